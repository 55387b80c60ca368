package daemon

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// loopbacks counts the addresses that tests were given.
var loopbacks atomic.Uint32

// metricsAddress returns an address on loopback at which nobody listens, and that no other test is
// given.
func metricsAddress(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", fmt.Sprintf("127.2.0.%d:0", loopbacks.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// fetch returns the status and the body of an answer of the daemon; 0 if there is none.
func fetch(t *testing.T, address, path string) (code int, body string) {
	t.Helper()
	return fetchWithin(t, 30*time.Second, address, path)
}

func fetchWithin(t *testing.T, limit time.Duration, address, path string) (code int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err.Error()
	}
	return answer.StatusCode, string(text)
}

// answers waits until the daemon answers with a status and a text.
func (s *stage) answers(address, path string, code int, text string) {
	s.t.Helper()
	last := ""
	defer func() {
		if s.t.Failed() {
			s.t.Logf("last answer: %s", last)
		}
	}()
	s.eventually(path+" is answered with "+text, func() bool {
		got, body := fetch(s.t, address, path)
		last = body
		return got == code && strings.Contains(body, text)
	})
}

// TestProbes: a driver that hangs keeps neither a probe nor a scrape from its answer, and the daemon is
// alive. The probes of a process that does nothing fail.
func TestProbes(t *testing.T) {
	t.Parallel()
	at := metricsAddress(t)
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	// As the chart writes an address, of which it does not know whether it is one of IPv6.
	s := open(t, node.Setup{Args: []string{"--metrics-address", "[" + host + "]:" + port}})
	s.start()
	s.shows(8, 8)
	s.answers(at, "/readyz?wait=5s", http.StatusOK, "ready")
	s.answers(at, "/healthz", http.StatusOK, "ok")
	s.inject(simulator.Fault{Kind: simulator.KindHang})
	s.signal(s.Running(), syscall.SIGHUP)
	s.shows(8, 0)
	for _, path := range []string{"/metrics", "/healthz", "/readyz"} {
		if code, body := fetch(t, at, path); code != http.StatusOK {
			t.Errorf("%s is answered with %d: %s", path, code, body)
		}
	}
	alive, err := exec.CommandContext(t.Context(), binary, "alive", "--control-socket", s.ControlSocket()).CombinedOutput()
	if err != nil || string(alive) != "alive\n" {
		t.Errorf("alive: %v: %s", err, alive)
	}
	s.signal(s.Running(), syscall.SIGSTOP)
	defer s.signal(s.Running(), syscall.SIGCONT)
	s.eventually("all threads are stopped", func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", s.Running().Pid))
		return err == nil && !slices.ContainsFunc(threads, func(path string) bool {
			text, err := os.ReadFile(path)
			return err != nil || !strings.Contains(string(text), ") T ")
		})
	})
	if code, body := fetchWithin(t, time.Second, at, "/healthz"); code != 0 {
		t.Errorf("a process that is stopped answers %d: %s", code, body)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if text, err := exec.CommandContext(ctx, binary, "alive", "--control-socket",
		s.ControlSocket()).CombinedOutput(); err == nil {
		t.Errorf("alive: %s", text)
	}
}

// TestMetricsAddressOfTwoDaemons: an upgrade goes on. The later daemon is ready beside the earlier one
// and serves GPUs without the address. When the earlier daemon has ended, the later one takes the address
// over, with the GPUs that it measures itself and their pods.
func TestMetricsAddressOfTwoDaemons(t *testing.T) {
	t.Parallel()
	at := metricsAddress(t)
	s := open(t, node.Setup{Args: []string{"--metrics-address", at}})
	s.start()
	s.shows(8, 8)
	s.answers(at, "/readyz", http.StatusOK, "ready")
	held := s.admitOf("p", gpu, 1)[0]
	other := s.beside("dgx-h100", "--metrics-address", at, "--gpu-metrics-interval=1s")
	other.start()
	other.becomesReady("ready")
	other.logs("choose another address with --metrics-address")
	first := s.Running()
	s.signal(first, syscall.SIGTERM)
	s.ends(first)
	other.answers(at, "/readyz", http.StatusOK, "ready")
	s.hasSeries(at, 8, temperature)
	s.hasSeries(at, 1, temperature, `UUID="`+held+`"`, `pod="p"`)
	s.shows(8, 8)
}
