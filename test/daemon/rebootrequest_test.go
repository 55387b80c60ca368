package daemon

import (
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

// TestRebootIsAskedForByTheNode: with --node-reboot the Node of a real daemon asks for a restart while only that cures a GPU, through a kill,
// beside another process, and no longer than that.
func TestRebootIsAskedForByTheNode(t *testing.T) {
	t.Parallel()
	s, server := openAgent(t, "", "--node-reboot", "--state-dir", t.TempDir())
	s.start()
	s.shows(8, 8)
	const key = "gpu-device-plugin.github.io/reboot.required"
	says := func(what, text string) {
		t.Helper()
		s.eventually(what, func() bool {
			n, err := server.Node(nodeName)
			return err == nil && strings.Contains(n.Annotations[key], text) && (n.Annotations[key] == "") == (text == "")
		})
	}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 119}, simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	says("a restart is asked for", `"reason":"GPU 3 is Lost: XID 79`)
	before, err := server.Node(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	d := s.Running()
	s.signal(d, syscall.SIGKILL)
	s.ends(d)
	_ = s.StopDaemon() // it was killed
	says("it is kept while there is no process", `"reason":"GPU 3 is Lost: XID 79`)
	s.start()
	s.eventually("the first one leads", s.leads) // else the other one may begin earlier
	other := s.beside(s.Profile, s.Args...)
	other.start()
	s.eventually("the later process leads", other.leads)
	says("it is kept by the next process", `"reason":"GPU 3 is Lost: XID 79`)
	if after, err := server.Node(nodeName); err != nil || after.Annotations[key] != before.Annotations[key] {
		t.Errorf("the request of before was %s, and is %s now: %v", before.Annotations[key], after.Annotations[key], err)
	}
	other.inject(simulator.Fault{Kind: simulator.KindReboot})
	says("nothing is asked for after the restart", "")
}
