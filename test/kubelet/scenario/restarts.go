package scenario

import (
	"net"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

var restarts = []scenario{
	{name: "a start wipes sockets and leaves files and directories", run: func(l *lab) {
		l.start("p.sock", Script{}, "a")
		l.saved()
		l.must(os.Mkdir(filepath.Join(l.dir, "directory"), 0o750))
		inside, err := net.Listen("unix", filepath.Join(l.dir, "directory", "s.sock"))
		l.must(err)
		defer inside.Close()
		l.must(os.WriteFile(filepath.Join(l.dir, "file"), []byte("x"), 0o600))
		l.must(os.Symlink(filepath.Join("directory", "s.sock"), filepath.Join(l.dir, "link.sock")))
		l.must(l.subject.Restart())
		for name, stays := range map[string]bool{
			"p.sock": false, "link.sock": false, "kubelet.sock": true, "file": true, "directory/s.sock": true,
			"kubelet_internal_checkpoint": true,
		} {
			if _, err := os.Lstat(filepath.Join(l.dir, name)); (err == nil) != stays {
				l.Errorf("%s: %v, want it there: %v", name, err, stays)
			}
		}
	}},
	{name: "a start breaks the streams, and the resource is known with nothing in it", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b")
		l.saved()
		l.must(l.subject.Restart())
		l.must(p.WaitStreams(l.ctx, 0))
		l.same("resources", map[string]kubelet.Quantity{resource: {}}, l.subject.Resources())
		l.refuse("pod", 1, kubelet.UnexpectedAdmission, "no healthy devices present")
		p.Stop()
		l.start("q.sock", Script{}, "a", "b")
		l.admit("pod", 2)
	}},
	{name: "what pods hold outlives a restart", run: func(l *lab) {
		p := l.start("p.sock", Script{}, "a", "b", "c")
		held := l.admit("pod", 2)
		p.Stop()
		l.must(l.subject.Restart())
		l.refuse("early", 1, kubelet.UnexpectedAdmission, "no healthy devices present")
		q := l.start("q.sock", Script{}, "a", "b", "c")
		q.ForgetCalls()
		l.same("allocation", held.IDs, l.admit("pod", 2).IDs) // its container starts again
		l.same("calls", 0, len(q.Calls()))
		l.same("answer", "p.sock", l.admit("pod", 2).Response.GetEnvs()["SERVED_BY"])
		l.refuse("other", 2, kubelet.UnexpectedAdmission, "Requested: 2, Available: 1")
		l.subject.Remove("pod")
		l.admit("other", 3)
	}},
	{name: "a broken checkpoint is none", run: func(l *lab) {
		l.start("p.sock", Script{}, "a", "b").Stop()
		l.shows(2, 0)
		l.saved()
		l.must(os.WriteFile(filepath.Join(l.dir, "kubelet_internal_checkpoint"), []byte(`{"Data":`), 0o600))
		l.must(l.subject.Restart())
		l.same("resources", 0, len(l.subject.Resources()))
		l.refuse("pod", 1, kubelet.Unschedulable, "")
		l.start("q.sock", Script{}, "a", "b")
		l.admit("pod", 2)
	}},
	{name: "the five minutes of a known resource begin with the start", minutes: true, run: func(l *lab) {
		l.start("p.sock", Script{}, "a", "b").Stop()
		l.shows(2, 0)
		l.saved()
		l.must(l.subject.Restart())
		l.setup.Pass(l.subject, stopGrace-margin)
		l.shows(0, 0)
		l.setup.Pass(l.subject, 2*margin)
		l.eventually("the resource is gone", func() bool {
			_, there := l.subject.Resources()[resource]
			return !there
		})
	}},
	{name: "health of a held device after a restart is that of the new list", run: func(l *lab) {
		l.start("p.sock", Script{}, "a").Stop()
		l.shows(1, 0)
		q := l.start("q.sock", Script{}, "a")
		l.admit("pod", 1)
		q.Stop()
		l.must(l.subject.Restart())
		l.same("status with no list", map[string]map[string]bool{resource: {"a": true}}, l.subject.PodStatus("pod"))
		r := l.serve("r.sock", Script{}, device("a", v1beta1.Unhealthy))
		l.must(r.Register(l.ctx))
		l.shows(1, 0)
		l.same("status", map[string]map[string]bool{resource: {"a": false}}, l.subject.PodStatus("pod"))
		l.refuse("pod", 1, kubelet.UnexpectedAdmission, "no healthy devices present")
	}},
}

// saved waits until the resource is in kubelet's checkpoint, which is written after a list shows.
func (l *lab) saved() {
	l.Helper()
	l.eventually("checkpoint", func() bool {
		checkpoint, err := os.ReadFile(filepath.Join(l.dir, "kubelet_internal_checkpoint"))
		return err == nil && strings.Contains(string(checkpoint), resource)
	})
}
