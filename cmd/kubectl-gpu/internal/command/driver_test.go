package command_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// preflight returns a daemon that answers driver preflight with a verdict, an exit status, and a
// summary.
func preflight(verdict, summary string, code int) daemon {
	return func(arguments []string) (string, string, int) {
		line := strings.Join(arguments, " ")
		if !strings.HasPrefix(line, "driver preflight") {
			return "", "unexpected: " + line, 1
		}
		if !strings.Contains(line, "-o json") {
			return "the whole report of: " + line + "\n", "", code
		}
		text, _ := json.Marshal(map[string]any{"verdict": verdict, "summary": summary, "driver": "580.95.05",
			"kernel":     "6.8.0-50",
			"nextKernel": "6.8.0-50", "holders": []any{map[string]any{"kind": "pod", "name": "team/a",
				"pids": []int{4711}}},
			"notChecked": 1, "node": "another"})
		return string(text), "", code
	}
}

// TestDriverPreflight: a row for each node, the worst first; the exit status is the worst one; one
// node has its whole report; texts of nodes do not change the terminal.
func TestDriverPreflight(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for name, d := range map[string]daemon{
		"a": preflight("ready", "ready: nothing uses driver 580.95.05", 0),
		"b": preflight("in use", "in use by 1 pod (team/a)", 2),
		"c": preflight("blocked", "blocked: no module\x1b[2J for\tkernel", 3),
	} {
		s.addNode(name, 8, nil)
		s.addDaemon("daemon-"+name, name, d)
	}
	out, problems, code := s.run("driver", "preflight", "--to", "590")
	const want = `Nodes: 3: 1 ready, 1 in use, 1 blocked.
NODE VERDICT DRIVER KERNEL NEXT BOOT HOLDERS NOT CHECKED REASON
c blocked 580.95.05 6.8.0-50 same 1 1 no module^[[2J for kernel
b in use 580.95.05 6.8.0-50 same 1 1 in use by 1 pod (team/a)
a ready 580.95.05 6.8.0-50 same 1 1 nothing uses driver 580.95.05
`
	if got := fields(out) + "\n"; strings.TrimSpace(got) != strings.TrimSpace(want) || code != 3 || problems != "" {
		t.Errorf("exit status %d, %s, and\n%s", code, problems, got)
	}
	for _, ran := range s.commands() {
		if !strings.HasSuffix(ran, " driver preflight -o json --to=590") {
			t.Errorf("it ran %s", ran)
		}
	}
	out, _, code = s.run("driver", "preflight", "a", "b", "-o", "json")
	var told struct {
		Nodes []struct {
			Node, Verdict string
			Holders       []struct{ PIDs []int }
		}
	}
	if err := json.Unmarshal([]byte(out),
		&told); err != nil || code != 2 || len(told.Nodes) != 2 || told.Nodes[0].Node != "b" ||
		told.Nodes[0].Holders[0].PIDs[0] != 4711 {
		t.Errorf("exit status %d, %v: %s", code, err, out)
	}
	out, _, code = s.run("driver", "preflight", "c", "--to", "/opt/driver")
	if out != "the whole report of: driver preflight --to=/opt/driver\n" || code != 3 {
		t.Errorf("of one node: exit status %d, %s", code, out)
	}
}

// TestDriverPreflightWithoutAnswers: an old daemon, one that answers something else, and a node
// without one are reported, and the exit status is 1.
func TestDriverPreflightWithoutAnswers(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for name, d := range map[string]daemon{
		"good": preflight("ready", "ready", 0),
		"old":  func([]string) (string, string, int) { return "", `Error: unknown command "driver"`, 1 },
		"odd":  func([]string) (string, string, int) { return `{"verdict":"fine"}`, "", 0 },
		"text": func([]string) (string, string, int) { return "no JSON", "", 3 },
	} {
		s.addNode(name, 8, nil)
		s.addDaemon("daemon-"+name, name, d)
	}
	s.addNode("none", 8, nil)
	out, problems, code := s.run("driver", "preflight")
	for _, want := range []string{"node old: no answer of driver preflight: its version has no driver preflight: " +
		"upgrade the daemon",
		"node odd: no answer of driver preflight: its answer has no verdict", "node text: no answer of driver preflight: its answer cannot be read",
		"No daemon runs on node none"} {
		if !strings.Contains(problems, want) {
			t.Errorf("it does not say %q, but\n%s", want, problems)
		}
	}
	if code != 1 || !strings.HasPrefix(out, "Nodes: 4: 1 ready, 0 in use, 0 blocked, 3 without an answer.\n") {
		t.Errorf("exit status %d and\n%s", code, out)
	}
}

// TestDriverPreflightOfManyNodes: 300 nodes, each of which takes 0.9 s, are asked 60 at a time: that
// takes about 5 s.
func TestDriverPreflightOfManyNodes(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	slow := func(arguments []string) (string, string, int) {
		select {
		case <-time.After(900 * time.Millisecond):
		case <-t.Context().Done():
		}
		return preflight("ready", "ready", 0)(arguments)
	}
	for i := range 300 {
		name := fmt.Sprintf("node-%03d", i)
		s.addNode(name, 8, nil)
		s.addDaemon("daemon-"+name, name, slow)
	}
	began := time.Now()
	out, problems, code := s.run("driver", "preflight")
	took := time.Since(began)
	t.Logf("300 nodes in %v, %d at a time", took.Round(10*time.Millisecond), s.most)
	if code != 0 || !strings.HasPrefix(out, "Nodes: 300: 300 ready,") || s.most < 40 || s.most > 60 {
		t.Errorf("exit status %d, %d at a time, %s: %s", code, s.most, problems, out[:min(len(out), 200)])
	}
}

// TestDriverStatus: a row for each node with a change of its driver, the worst first; other nodes are
// counted, and a node that does not answer makes the output incomplete.
func TestDriverStatus(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	since := time.Now().Add(-longAgo)
	for name, change := range map[string]*driverchange.Status{
		"a": {State: driverchange.Done, Wanted: "580.95.05", Loaded: "580.95.05", Since: since},
		"b": {State: driverchange.Changing, Wanted: "580.95.05", Loaded: "570.1", Since: since, Percent: 52,
			Reason: "modules are\tloaded\x1b[2J"},
		"c": {State: driverchange.Failed, Wanted: "580.95.05", Loaded: "570.1", Since: since, Reason: "the driver finds no GPU"},
		"d": {State: driverchange.AwaitsBoot, Wanted: "580.95.05", Loaded: "570.1", Since: since, Reboot: "x",
			Reason: "the driver is in use"},
		"e": {State: "dancing", Percent: 1000, Since: since},
		"f": nil,
	} {
		s.addNode(name, 8, nil)
		s.addDaemon("daemon-"+name, name, answering(status.Status{Driver: "570.1", DriverChange: change}))
	}
	out, problems, code := s.run("driver", "status")
	const want = `Nodes: 6: 1 dancing, 1 failed, 1 next-boot, 1 changing, 1 done, 1 off.
NODE STATE PROGRESS SINCE LOADED WANTED REASON
e dancing - 5h - - -
c failed - 5h 570.1 580.95.05 the driver finds no GPU
d next-boot - 5h 570.1 580.95.05 the driver is in use; restart the node
b changing [#####.....] 52% 5h 570.1 580.95.05 modules are loaded^[[2J
a done - 5h 580.95.05 580.95.05 -`
	if got := strings.TrimSpace(fields(out)); got != want || code != 0 || problems != "" {
		t.Errorf("exit status %d, %s, and\n%s\nwant\n%s", code, problems, got, want)
	}
	s.addNode("g", 8, nil)
	s.addDaemon("daemon-g", "g", nil)
	out, problems, code = s.run("driver", "status", "f", "g", "-o", "json")
	var told struct{ Nodes []map[string]any }
	if err := json.Unmarshal([]byte(out), &told); err != nil || code != 1 || len(told.Nodes) != 1 ||
		told.Nodes[0]["node"] != "f" || told.Nodes[0]["state"] != "off" || told.Nodes[0]["loaded"] != "570.1" ||
		!strings.Contains(problems, "node g: its daemon's pod kube-system/daemon-g does not respond") {
		t.Errorf("exit status %d, %v, %s: %s", code, err, problems, out)
	}
}
