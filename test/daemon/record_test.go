package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// run runs a command of the daemon's program, and returns what it prints. A command that is to fail
// prints an error.
func run(t *testing.T, fails bool, arguments ...string) string {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), binary, arguments...).CombinedOutput()
	if (err != nil) != fails {
		t.Fatalf("%s: %v: %s", strings.Join(arguments, " "), err, text)
	}
	return string(text)
}

// recorded returns the files of a recording, the oldest first, and all that is in them.
func recorded(t *testing.T, dir string) (names []string, text string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "recording-*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text += string(content)
	}
	return names, text
}

// inOrder fails the test unless the texts are in what a command printed, one after the other.
func inOrder(t *testing.T, printed string, texts ...string) {
	t.Helper()
	rest := printed
	for _, text := range texts {
		_, after, found := strings.Cut(rest, text)
		if !found {
			t.Fatalf("%q is missing, or not in its place, in\n%s", text, printed)
		}
		rest = after
	}
}

// TestRecordAndReplay: a running daemon is recorded without its UUIDs from record start to record
// stop, and replay prints what followed.
func TestRecordAndReplay(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.shows(8, 8)
	at := "--control-socket=" + s.ControlSocket()
	dir := strings.TrimSpace(run(t, false, "record", "start", "--redact", at))
	if want := filepath.Join(s.Path("state"), "recordings"); dir != want {
		t.Errorf("record start printed %q, want %q", dir, want)
	}
	if said := run(t, true, "record", "start", at); !strings.Contains(said, "record stop") {
		t.Errorf("a second recording is refused without the remedy: %s", said)
	}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
	s.shows(8, 7)
	s.eventually("the XID is in the recording", func() bool {
		_, text := recorded(t, dir)
		return strings.Contains(text, `"XID":48`)
	})
	s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
	s.shows(8, 8)
	run(t, false, "record", "stop", at)
	_, before := recorded(t, dir)
	for uuid := range s.known() {
		if strings.Contains(before, uuid) {
			t.Errorf("%s is in a recording that replaces UUIDs", uuid)
		}
	}
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "5", XID: 48})
	s.shows(8, 7)
	if _, after := recorded(t, dir); after != before {
		t.Error("the recording grew after record stop")
	}
	told := run(t, false, "simulate", "replay", dir)
	inOrder(t, told, "Unhealthy", "list nvidia.com/gpu: 7 Healthy, 1 Unhealthy", "Event GPUUnhealthy: GPU 3",
		"Healthy", "list nvidia.com/gpu: 8 Healthy, 0 Unhealthy", "Event GPURecovered: GPU 3")
	inOrder(t, told, "XID 48") // whether a look or the event came first
}

// TestRecordingOfAKilledDaemon: a daemon that records from its start is killed. The recording is
// played without its last line, which was cut off.
func TestRecordingOfAKilledDaemon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := serving(t, node.Setup{Args: []string{"--record", dir}})
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 48})
	s.shows(8, 7)
	s.eventually("the Event follows from the recording", func() bool {
		return strings.Contains(run(t, false, "simulate", "replay", dir), "Event GPUUnhealthy: GPU 3")
	})
	s.kill()
	names, text := recorded(t, dir)
	if len(names) != 1 {
		t.Fatalf("a daemon has recorded to %q", names)
	}
	if err := replace(names[0], text[:len(text)-5]); err != nil {
		t.Fatal(err)
	}
	inOrder(t, run(t, false, "simulate", "replay", dir), "an incomplete line is ignored", "7 Healthy, 1 Unhealthy",
		"Event GPUUnhealthy: GPU 3")
}
