package daemon

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestRebootIsAskedFor: while only a restart of the node repairs a GPU, the file of --reboot-file
// is there, with the GPU and its reason. It outlives a process that is killed, beside another one
// too, and is gone after the restart. A file that somebody else has written is not touched.
func TestRebootIsAskedFor(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	file := s.Path("reboot-required")
	s.Args = append(s.Args, "--reboot-file", file)
	s.start()
	s.shows(8, 8)
	has := func(what, begins string) {
		t.Helper()
		s.eventually(what, func() bool {
			text, err := os.ReadFile(file)
			if begins == "" {
				return os.IsNotExist(err)
			}
			return strings.HasPrefix(string(text), begins)
		})
	}
	const asks = "gpu-device-plugin asks for a restart of this node: GPU 3 is Lost: XID 79"
	lost := simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 119}) // a reset repairs it
	s.shows(8, 7)
	if _, err := os.Stat(file); err == nil {
		t.Error("a restart is asked for where a reset repairs the GPU")
	}
	s.inject(lost)
	has("a restart is asked for", asks)

	other := s.beside(s.Profile, "--state-dir", s.Path("state"), "--reboot-file", file)
	other.start()
	s.eventually("the later process leads", other.leads)
	other.inject(lost)
	first := s.Running()
	s.signal(first, syscall.SIGKILL)
	s.ends(first)
	_ = s.StopDaemon()
	other.says("the GPU is lost", func(now status) bool { return len(now.GPUs) > 3 && now.GPUs[3].State == "Lost" })
	has("the request is kept", asks)
	d := other.Running()
	other.signal(d, syscall.SIGKILL)
	other.ends(d)
	_ = other.StopDaemon()
	has("the request is kept while there is no process", asks)

	before := "gpu-device-plugin asks for a restart of this node: GPU 0 is Lost: XID 79 (boot 00000000-0000-0000-0000-000000000000)\n"
	if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	profile, args := s.Profile, s.Args
	s.Args = append(slices.Clone(args), "--fail-on-init-error=false")
	s.broken(simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"})
	s.start()
	has("what was asked for before a restart of the node, after which the driver does not come", "")
	if err := s.StopDaemon(); err != nil {
		t.Error(err)
	}
	s.Profile, s.Args = profile, args

	s.start() // by what is on disk, the GPU is lost still
	s.shows(8, 6)
	has("the request of before", asks)
	s.inject(simulator.Fault{Kind: simulator.KindReboot})
	has("nothing is asked for after the restart", "")

	const apt = "*** System restart required ***\n"
	if err := os.WriteFile(file, []byte(apt), 0o600); err != nil {
		t.Fatal(err)
	}
	s.inject(lost)
	s.shows(8, 7)
	s.inject(simulator.Fault{Kind: simulator.KindReboot})
	s.shows(8, 8)
	has("the file of somebody else", apt)
}
