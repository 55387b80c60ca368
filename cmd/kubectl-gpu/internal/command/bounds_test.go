package command_test

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestAnswerWithoutEnd: a daemon that writes more than a status can have is named, and the others are shown.
func TestAnswerWithoutEnd(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, node := range []string{"a", "b"} {
		s.addNode(node, 8, nil)
	}
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) { return strings.Repeat(" ", 9<<20) + "{}", "", 0 })
	s.addDaemon("daemon-b", "b", answering(status.Status{Driver: "580.1"}))
	out, problems, code := s.run("--ask", "always", "-o", "wide")
	if code != 1 || !strings.Contains(problems, "node a: its daemon's pod") || !strings.Contains(problems, "its answer has more than 8 MiB") ||
		strings.Contains(problems, "node b") || !strings.Contains(out, "580.1") {
		t.Errorf("exit status %d\n%s\n%s", code, problems, out)
	}
}

// TestAnswerForATerminal: what a pod prints cannot change the terminal, as its labels alone say that it is the daemon's.
func TestAnswerForATerminal(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) { return "\x1b[2Jan\tanswer\n", "\x1b]0;title\a\n", 3 })
	out, problems, code := s.run("doctor", "a")
	if code != 3 || out != "^[[2Jan\tanswer\n" || !strings.Contains(problems, "^[]0;title") || strings.Contains(problems, "\x1b") {
		t.Errorf("exit status %d\n%q\n%q", code, problems, out)
	}
}

// TestDaemonWhereAllNamespacesAreForbidden: its pod is looked for in kube-system, and what was not looked at is said.
func TestDaemonWhereAllNamespacesAreForbidden(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, node := range []string{"a", "b"} {
		s.addNode(node, 8, nil)
	}
	s.addDaemon("daemon-a", "a", answering(status.Status{}))
	var lists atomic.Int64 // each first one is of all namespaces
	s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(r apiserver.Request) bool {
		return r.Verb == "list" && r.Resource == "pods" && lists.Add(1)%2 == 1
	}})
	if got := s.must("status", "a"); got != "ran status\n" {
		t.Errorf("prints %q", got)
	}
	if _, problems, code := s.run("status", "b"); code != 1 || !strings.Contains(problems, "kube-system alone was looked at: give --daemon-namespace") {
		t.Errorf("no daemon there: %d, %s", code, problems)
	}
	s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden, Only: func(r apiserver.Request) bool { return r.Verb == "list" && r.Resource == "pods" }})
	if _, problems, code := s.run("status", "a"); code != 1 || !strings.Contains(problems, "give --daemon-namespace") {
		t.Errorf("no pods may be listed: %d, %s", code, problems)
	}
}
