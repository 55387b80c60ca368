package daemon

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// objects returns the log's lines as JSON objects. Every line must be one.
func (s *stage) objects() []map[string]any {
	s.t.Helper()
	log, err := os.ReadFile(s.LogPath())
	if err != nil {
		s.t.Fatal(err)
	}
	var all []map[string]any
	for line := range strings.Lines(string(log)) {
		var object map[string]any
		if err := json.Unmarshal([]byte(line), &object); err != nil {
			s.t.Fatalf("%q is no JSON: %v", line, err)
		}
		if object["ts"] == nil || object["caller"] == nil || object["msg"] == nil ||
			(object["v"] == nil) == (object["err"] == nil) {
			s.t.Errorf("a key is missing: %s", line)
		}
		all = append(all, object)
	}
	return all
}

// TestLogsInJSON: every line of a process is one object, from its start over faults and a kubelet's
// restart to its end, and the start is one line.
func TestLogsInJSON(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	config := s.write("config.yaml", "version: v1\nnothing: 1\nflags: {loggingFormat: json}\n")
	s.Args = []string{"--config-file", config}
	s.start()
	s.shows(8, 8)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79},
		simulator.Fault{Kind: simulator.KindLost, GPU: "5"})
	s.shows(8, 6)
	s.write("config.yaml", "version: v2\n")
	s.signal(s.Running(), syscall.SIGHUP)
	s.logs("Cannot use the configuration file")
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	s.shows(8, 6)
	if err := s.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	lines := s.objects()
	started := slices.DeleteFunc(slices.Clone(lines), func(o map[string]any) bool { return o["msg"] != "Started" })
	if len(started) != 1 || started[0]["driver"] != "580.95.05" || started[0]["gpus"] != 8.0 ||
		started[0]["version"] == "" {
		t.Errorf("the start: %v", started)
	}
	if last := lines[len(lines)-1]; last["msg"] != "Stopped" {
		t.Errorf("the last line is %v", last)
	}
}

// TestFailureInJSON: the reason of an end is one object, whether the configuration or the driver is
// the reason.
func TestFailureInJSON(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ flag, want string }{
		"the configuration": {"--mig-strategy=some", `"some" is not one of`},
		"the driver":        {"--fail-on-init-error=true", "; to find the cause, run: gpu-device-plugin doctor; to wait for the driver instead, use --fail-on-init-error=false"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{Args: []string{"--logging-format=json", tt.flag}})
			s.broken(simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"})
			s.start()
			daemon := s.Running()
			s.ends(daemon)
			_ = s.StopDaemon() // says the same again
			lines := s.objects()
			reason, _ := lines[len(lines)-1]["err"].(string)
			if daemon.Err() == nil || lines[len(lines)-1]["msg"] != "Failed" || !strings.Contains(reason, tt.want) {
				t.Errorf("it ended with %v and %v", daemon.Err(), lines[len(lines)-1])
			}
		})
	}
}
