package daemon

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

const quiesceKey = "gpu-device-plugin.github.io/quiesce."

// annotate sets the annotations by which the driver is released until a time; empty takes them away.
func (s *stage) annotate(server *apiserver.Server, until string) {
	s.t.Helper()
	if err := server.ChangeNode(nodeName, func(n *corev1.Node) {
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[quiesceKey+"until"], n.Annotations[quiesceKey+"by"] = until, "kured"
		if until == "" {
			delete(n.Annotations, quiesceKey+"until")
		}
	}); err != nil {
		s.t.Fatal(err)
	}
}

// TestRollOutDuringQuiesceAnnotation: a process of a roll-out that starts while the driver is released for an
// annotation uses it when the time ends, and becomes Ready. It dies, and the earlier one, which led
// before, uses the driver again, too.
func TestRollOutDuringQuiesceAnnotation(t *testing.T) {
	t.Parallel()
	s, server := openAgent(t, "", "--node-quiesce")
	s.start()
	s.shows(8, 8)
	s.annotate(server, time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	s.shows(8, 0)
	later := s.beside(s.Profile, append(slices.Clone(s.Args), "--state-dir", s.Path("state"), "--cdi-dir",
		s.Path("cdi"))...)
	later.start()
	later.firstLine("quiesced: the driver is released since")
	s.annotate(server, "")
	later.becomesReady("ready")
	mark, d := s.Mark(), later.Running()
	s.signal(d, syscall.SIGKILL)
	<-d.Ended()
	_ = later.StopDaemon()            // it was killed
	s.next(mark, standin.StreamEnded) // before, kubelet asks the process that was killed about a pod
	s.shows(8, 8)
	s.admit("work", 8)
}

// TestQuiesceAnnotation: an annotation of the Node releases the driver of a real daemon, also through a
// kill, and the next process uses it again at the time that the annotation has. Then another annotation
// is obeyed, and ends when the annotation goes.
func TestQuiesceAnnotation(t *testing.T) {
	t.Parallel()
	s, server := openAgent(t, "", "--node-quiesce", "--state-dir", t.TempDir())
	s.start()
	s.shows(8, 8)
	const key = quiesceKey
	annotate := func(until string) { s.annotate(server, until) }
	says := func(state string) {
		t.Helper()
		s.eventually("the Node says "+state, func() bool {
			n, err := server.Node(nodeName)
			return err == nil && n.Annotations[key+"state"] == state &&
				(state == "" || strings.Contains(n.Annotations[key+"answer"], `"by":"kured"`))
		})
	}
	until := time.Now().Add(40 * time.Second).Truncate(time.Second)
	annotate(until.UTC().Format(time.RFC3339))
	says("done")
	s.shows(8, 0)
	d := s.Running()
	s.signal(d, syscall.SIGKILL)
	<-d.Ended()
	_ = s.StopDaemon() // it was killed
	s.start()
	says("ended")
	if early := time.Until(until); early > 0 {
		t.Errorf("it ended %v early", early)
	}
	s.shows(8, 8)
	annotate(time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	says("done")
	s.shows(8, 0)
	annotate("")
	says("")
	s.shows(8, 8)
}
