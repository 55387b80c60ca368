package daemon

import (
	"flag"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

var update = flag.Bool("update", false, "rewrite the examples of docs/runbook.md")

const runbook = "../../docs/runbook.md"

// TestExamples plays the examples of docs/runbook.md on a simulated node, and holds what the
// document shows to what the commands print, but for times. `go test ./test/daemon -run
// TestExamples -update` rewrites the output.
func TestExamples(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(runbook)
	if err != nil {
		t.Fatal(err)
	}
	d := &document{t: t, text: string(text)}
	s := open(t, node.Setup{})
	s.goodHost()
	s.start()
	s.shows(8, 8)

	s.becomesReady("")
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	s.shows(8, 7)
	d.finding(s, "xid-doctor", "GPU 3 is Lost")
	s.signal(s.Running(), syscall.SIGTERM) // as the restart of the node does
	s.ends(s.Running())
	s.start()
	s.shows(8, 8)

	s.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "5"})
	s.shows(8, 7)
	d.finding(s, "hang-doctor", "A driver call has not returned")
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.shows(8, 8)

	s.Stop()
	d.finding(s, "kubelet-doctor", "The kubelet does not answer")
	mark := s.Mark()
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	s.next(mark, standin.Listed)

	if *update && d.text != string(text) {
		if err := os.WriteFile(runbook, []byte(d.text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// command returns what a command prints.
func (s *stage) command(arguments ...string) string {
	s.t.Helper()
	output, err := exec.CommandContext(s.t.Context(), s.Daemon,
		append(arguments, "--control-socket", s.ControlSocket())...).CombinedOutput()
	if err != nil {
		s.t.Fatalf("%v: %s", err, output)
	}
	return string(output)
}

// A document has examples between marks.
type document struct {
	t    *testing.T
	text string
}

// finding holds the example of a name to the finding of doctor that has a text.
func (d *document) finding(s *stage, name, says string) {
	d.t.Helper()
	d.shows(s, name, "gpu-device-plugin doctor", says, func() string {
		_, output, _ := s.doctor()
		for finding := range strings.SplitSeq(output, "\n\n") {
			if strings.HasPrefix(finding, "error ") && strings.Contains(finding, says) {
				return strings.TrimSpace(finding) + "\n…\n"
			}
		}
		return ""
	})
}

// shows runs a command until it prints what says, and holds the example of that name to what it
// printed then.
func (d *document) shows(s *stage, name, command, says string, run func() string) {
	d.t.Helper()
	begin, end := "<!-- example "+name+": written by test/daemon's TestExamples -->\n", "<!-- end of example -->\n"
	before, rest, begins := strings.Cut(d.text, begin)
	shown, after, ends := strings.Cut(rest, end)
	var got string
	prints := func() bool {
		got = run()
		says := strings.Contains(got, says)
		for path, usual := range map[string]string{
			s.Socket(): config.DefaultKubeletSocket, s.PodResourcesSocket(): "/var/lib/kubelet/pod-resources/kubelet.sock",
		} {
			got = strings.ReplaceAll(got, path, usual)
		}
		got = "```console\n$ " + command + "\n" + got + "```\n"
		return says
	}
	s.eventually(command+" prints "+says, prints)
	// On a machine that is busy, something else may be slow for a moment, and be told of.
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for late := time.Now().Add(time.Minute); timeless(shown) != timeless(got) && !*update && !d.t.Failed() &&
		time.Now().Before(late); <-again.C {
		prints()
	}
	switch {
	case !begins || !ends:
		d.t.Errorf("%s has no place for the example: %s", runbook, begin)
	case timeless(shown) == timeless(got):
	case *update:
		d.text = before + begin + got + end + after
	default:
		d.t.Errorf("%s shows for %s\n%s, and the command prints\n%s; if that is right: go test ./test/daemon -run TestExamples -update",
			runbook, name, shown, got)
	}
}

var moments = regexp.MustCompile(`version v\d[^,]*|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|\b(\d+(h|m|s|ms))+\b|× \d+|nvmlDevice\w+|\d\.\d+e\+09`)

// timeless returns a text without its version, its times and numbers of events, the call that hangs
// first, and the width of columns.
func timeless(text string) string {
	return strings.Join(strings.Fields(moments.ReplaceAllString(text, "TIME")), " ")
}
