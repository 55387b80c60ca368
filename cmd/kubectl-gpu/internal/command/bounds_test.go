package command_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestAnswerWithoutEnd: a daemon that writes more than a status can have is named, and the others
// are shown.
func TestAnswerWithoutEnd(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, node := range []string{"a", "b"} {
		s.addNode(node, 8, nil)
	}
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) { return strings.Repeat(" ", 9<<20) + "{}", "", 0 })
	s.addDaemon("daemon-b", "b", answering(status.Status{Driver: "580.1"}))
	out, problems, code := s.run("--ask", "always", "-o", "wide")
	if code != 1 || !strings.Contains(problems, "node a: its daemon's pod") ||
		!strings.Contains(problems, "its answer has more than 8 MiB") ||
		strings.Contains(problems, "node b") || !strings.Contains(out, "580.1") {
		t.Errorf("exit status %d\n%s\n%s", code, problems, out)
	}
}

// TestAnswerForATerminal: what a pod prints cannot change the terminal, as its labels alone say
// that it is the daemon's.
func TestAnswerForATerminal(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) {
		return "\x1b[2Jan\tanswer\n", "\x1b]0;title\a\n", 3
	})
	out, problems, code := s.run("doctor", "a")
	if code != 3 || out != "^[[2Jan\tanswer\n" || !strings.Contains(problems, "^[]0;title") ||
		strings.Contains(problems, "\x1b") {
		t.Errorf("exit status %d\n%q\n%q", code, problems, out)
	}
}

// TestCharactersForATerminal: neither control characters of any kind nor those that turn the
// direction of writing reach the terminal, and other letters do, also where an answer comes in
// parts.
func TestCharactersForATerminal(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	letters := strings.Repeat("é漢\U0001F600", 20000)
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) {
		return letters + "\b\u009b31m\u202eabc\x9b\x7f\r\n\xe6", "\u2028\x00", 0
	})
	out, problems, code := s.run("doctor", "a")
	if rest, whole := strings.CutPrefix(out, letters); code != 0 || !whole ||
		rest != `^H\u009b31m\u202eabc\x9b^?^M`+"\n"+`\xe6` || problems != `\u2028^@` {
		t.Errorf("exit status %d, %q, %q", code, rest[:min(len(rest), 200)], problems)
	}
}

// TestHostileStatus: what a pod that has the daemon's labels says of its GPUs makes no row of
// another node, is not as long as it likes, and changes no terminal, in a table and as JSON and
// YAML, which say all.
func TestHostileStatus(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, node := range []string{"a", "b"} {
		s.addNode(node, 8, nil)
	}
	bad := gpu(0, "Healthy\nb\t9\tmodel\tUnhealthy")
	bad.Index, bad.Model, bad.UUID, bad.Reason, bad.Remedy = "0\t\x1b[2J", "yes: \u202e'\\u202e\"", strings.Repeat("漢",
		1<<20), strings.Repeat("x", 1<<20), "\u009b\u2028\ufeff\ufffe\uffffa\u2066\n\u061c # b"
	s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{bad},
		Holders: []status.Holder{{Device: bad.UUID, Pod: "p\nb\t8"}}}))
	s.addDaemon("daemon-b", "b", answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy")},
		Holders: []status.Holder{}}))
	out := s.must("list", "-o", "wide")
	if rows := strings.Split(strings.TrimSuffix(out, "\n"), "\n"); len(rows) != 3 || !strings.HasPrefix(rows[1], "a ") ||
		!strings.HasPrefix(rows[2], "b ") || len(out) > 1<<14 {
		t.Errorf("%d bytes, rows:\n%.2000s", len(out), out)
	}
	for format, parse := range map[string]func([]byte, any) error{
		"json": json.Unmarshal, "yaml": func(text []byte, into any) error { return yaml.UnmarshalStrict(text, into) },
	} {
		told := s.must("list", "-o", format)
		var all struct{ GPUs []view.GPU }
		if err := parse([]byte(told), &all); err != nil || len(all.GPUs) != 2 {
			t.Fatalf("%s: %v, %.300s", format, err, told)
		}
		if got := all.GPUs[0]; got.State != bad.State || got.Model != strings.ReplaceAll(bad.Model, " ", "-") || got.Reason != bad.Reason ||
			got.Remedy != bad.Remedy {
			t.Errorf("%s: state %q, model %q, remedy %q, a reason of %d bytes", format, got.State, got.Model, got.Remedy,
				len(got.Reason))
		}
		out += told
	}
	if at := strings.IndexFunc(out, func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
	}); at >= 0 {
		t.Errorf("prints %q", out[at:at+10])
	}
}

// TestColumnsOfATable: a letter that is as wide as two, and one that is written as two, move no
// column.
func TestColumnsOfATable(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	wide, plain := gpu(0, "Healthy"), gpu(1, "Healthy")
	wide.Model, plain.Model = "漢é\x1b\U0001F600ｗ", "漢"
	s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{wide, plain}, Holders: []status.Holder{}}))
	out := s.must("list")
	rows := strings.Split(strings.NewReplacer("漢", "xx", "\U0001F600", "xx", "ｗ", "xx", "é", "x").Replace(out), "\n")
	for _, row := range rows[1:3] {
		if at := strings.Index(row, "Healthy"); at != strings.Index(rows[0], "STATE") {
			t.Errorf("the column of the state is at %d:\n%s", at, out)
		}
	}
}

// TestMissingNode: the others that were named are shown with what the API server has
// of them.
func TestMissingNode(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("b", 7, nil)
	out, problems, code := s.run("a", "b")
	if code != 1 || !strings.Contains(problems, `node a: nodes "a" not found`) ||
		!strings.Contains(fields(out), "b NVIDIA H100 80GB HBM3 7 0 8 ") {
		t.Errorf("exit status %d\n%s\n%s", code, problems, out)
	}
}

// TestBadAPIServer: an API server that refuses for a while is asked again; one that is too slow, or
// whose answers end in the middle, is named, and what it told of the rest is shown.
func TestBadAPIServer(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 7, nil)
	s.addPod("p", "a", 2, corev1.PodRunning)
	var refused atomic.Int64
	s.server.SetFault(apiserver.Fault{Status: http.StatusTooManyRequests, RetryAfter: time.Second,
		Only: func(r apiserver.Request) bool {
			return r.Resource == "nodes" && refused.Add(1) == 1
		}})
	if got := fields(s.must()); !strings.Contains(got, " 7 2 8 ") {
		t.Errorf("after a refusal:\n%s", got)
	}
	s.server.SetFault(apiserver.Fault{Delay: patience,
		Only: func(r apiserver.Request) bool { return r.Resource == "pods" }})
	out, problems, code := s.run("--request-timeout", "500ms")
	if code != 1 || !strings.Contains(problems, "pods are not shown") || !strings.Contains(fields(out), " 7 0 8 ") {
		t.Errorf("slow: exit status %d\n%s\n%s", code, problems, out)
	}
	s.server.SetFault(apiserver.Fault{})
	for _, told := range []bool{true, false} { // whether the length of the answer is that of the whole
		server := s.halved("/api/v1/pods", told)
		out, problems, code := s.run("--server", server)
		if code != 1 || !strings.Contains(problems, "pods are not shown") || !strings.Contains(fields(out), " 7 0 8 ") {
			t.Errorf("half an answer: exit status %d\n%s\n%s", code, problems, out)
		}
	}
}

// patience is longer than any test waits.
const patience = 10 * time.Minute

// halved returns the address of an API server that sends half of what is at a path.
func (s *stage) halved(path string, lengthOfAll bool) string {
	s.t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", s.server.Kubeconfig())
	if err != nil {
		s.t.Fatal(err)
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		s.t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	if proxy.Transport, err = rest.TransportFor(config); err != nil {
		s.t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != path {
			proxy.ServeHTTP(w, r)
			return
		}
		whole := httptest.NewRecorder()
		proxy.ServeHTTP(whole, r)
		for name, values := range whole.Header() {
			w.Header()[name] = values
		}
		w.Header().Del("Content-Length")
		if lengthOfAll {
			w.Header().Set("Content-Length", strconv.Itoa(whole.Body.Len()))
		}
		w.WriteHeader(whole.Code)
		_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()/2])
	}))
	s.t.Cleanup(server.Close)
	return server.URL
}

// TestDaemonWhereAllNamespacesAreForbidden: its pod is looked for in kube-system, and what was not
// looked at is said.
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
	if _, problems, code := s.run("status", "b"); code != 1 ||
		!strings.Contains(problems, "kube-system was searched: set --daemon-namespace") {
		t.Errorf("no daemon there: %d, %s", code, problems)
	}
	s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
		Only: func(r apiserver.Request) bool { return r.Verb == "list" && r.Resource == "pods" }})
	if _, problems, code := s.run("status", "a"); code != 1 || !strings.Contains(problems, "set --daemon-namespace") {
		t.Errorf("no pods may be listed: %d, %s", code, problems)
	}
}
