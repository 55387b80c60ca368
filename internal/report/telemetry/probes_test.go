package telemetry_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestProbes: the answers name the stuck tasks, or the reason for not being ready.
func TestProbes(t *testing.T) {
	t.Parallel()
	var stuck atomic.Pointer[[]string]
	stuck.Store(&[]string{})
	readiness := feed.New(status.Readiness{Reason: "the daemon is starting"})
	var probes atomic.Int32
	var waited atomic.Int64
	at := freeAddress(t)
	start(t, telemetry.Options{
		Address: feed.New(at), Stuck: func(context.Context) []string { return *stuck.Load() },
		Ready: func(_ context.Context, wait time.Duration, probed bool) status.Readiness {
			if probed {
				probes.Add(1)
			}
			waited.Store(int64(wait))
			return readiness.Value()
		},
	})
	poll.Until(t, "it serves", func() bool { code, _ := get(t, at, "/healthz"); return code == http.StatusOK })
	want := func(path string, code int, text string) {
		t.Helper()
		if gotCode, got := get(t, at, path); gotCode != code || got != text+"\n" {
			t.Errorf("%s is answered with %d: %q, want %d: %q", path, gotCode, got, code, text)
		}
	}
	want("/healthz", http.StatusOK, "ok")
	want("/readyz", http.StatusServiceUnavailable, "not ready: the daemon is starting")
	stuck.Store(&[]string{"plan: its loop makes no progress", "monitor: the same"})
	readiness.Publish(status.Readiness{Ready: true})
	want("/healthz", http.StatusServiceUnavailable, "stuck: plan: its loop makes no progress; monitor: the same")
	want("/readyz", http.StatusOK, "ready")
	readiness.Publish(status.Readiness{Ready: true, Reason: "nothing to serve: no driver"})
	want("/readyz", http.StatusOK, "ready: nothing to serve: no driver")
	for asked, want := range map[string]time.Duration{"": 0, "?wait=5s": 5 * time.Second, "?wait=1h": 10 * time.Second} {
		if _, _ = get(t, at, "/readyz"+asked); waited.Load() != int64(want) {
			t.Errorf("/readyz%s waits for %s, want %s", asked, time.Duration(waited.Load()), want)
		}
	}
	want("/readyz?wait=long", http.StatusBadRequest, "wait is not a duration, such as 5s")
	if n := probes.Load(); n != 0 {
		t.Errorf("%d requests of others count as kubelet's", n)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+at+"/readyz", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("User-Agent", "kube-probe/1.37")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if n := probes.Load(); n != 1 {
		t.Errorf("%d requests count as kubelet's, want 1", n)
	}
}
