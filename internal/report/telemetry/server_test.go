package telemetry_test

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// patience limits the wait for an expected event.
const patience = time.Minute

// freeAddress returns an unused address on loopback.
func freeAddress(t testing.TB) string {
	t.Helper()
	address, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// start runs a server until the test ends.
func start(t testing.TB, o telemetry.Options) {
	t.Helper()
	startLogged(t, o, klog.Logger{})
}

// startLogged is start with a logger.
func startLogged(t testing.TB, o telemetry.Options, log klog.Logger) {
	t.Helper()
	if o.Status == nil {
		o.Status = func(context.Context) (status.Status, error) { return status.Status{Version: "v1"}, nil }
	}
	if o.Stuck == nil {
		o.Stuck = func(context.Context) []string { return nil }
	}
	if o.Counters == nil {
		o.Counters = telemetry.NewCounters(nil)
	}
	if o.Problem == nil {
		o.Problem = feed.New[error](nil)
	}
	s := telemetry.New(o)
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run() = %v", err)
			}
		case <-time.After(patience):
			t.Error("the server does not end")
		}
	})
}

// get returns the status and the body of an answer; 0 if there is none.
func get(t testing.TB, address, path string) (code int, body string) {
	t.Helper()
	a, err := ask(t, address, path, nil)
	if err != nil {
		return 0, err.Error()
	}
	return a.code, string(a.body)
}

// An answer to a request, with its body as it was sent.
type answer struct {
	code   int
	header http.Header
	body   []byte
}

// ask sends a request with a header.
func ask(t testing.TB, address, path string, header http.Header) (answer, error) {
	t.Helper()
	client := &http.Client{Timeout: patience,
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(request.Header, header)
	response, err := client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, body}, err
}

// scrape returns a successful answer to a scrape with a header.
func scrape(t testing.TB, address string, header http.Header) answer {
	t.Helper()
	a, err := ask(t, address, "/metrics", header)
	if err != nil {
		t.Fatal(err)
	}
	if a.code != http.StatusOK {
		t.Fatalf("answered with %d: %s", a.code, a.body)
	}
	return a
}

// TestAddress: the server listens on the configured address and follows its changes.
func TestAddress(t *testing.T) {
	t.Parallel()
	first, second := freeAddress(t), freeAddress(t)
	address := feed.New(first)
	start(t, telemetry.Options{Address: address})
	serves := func(at string) func() bool {
		return func() bool {
			code, body := get(t, at, "/metrics")
			return code == http.StatusOK && strings.Contains(body, `gpu_device_plugin_build_info{version="v1"} 1`)
		}
	}
	silent := func(at string) func() bool {
		return func() bool { code, _ := get(t, at, "/metrics"); return code == 0 }
	}
	poll.Until(t, "it serves", serves(first))
	address.Publish(second)
	poll.Until(t, "it serves at the other address", serves(second))
	poll.Until(t, "it does not serve at the first address any more", silent(first))
	address.Publish("")
	poll.Until(t, "it serves nowhere", silent(second))
}

// TestAddressInUse: a server waits for an address in use.
func TestAddressInUse(t *testing.T) {
	t.Parallel()
	at := freeAddress(t)
	other, err := new(net.ListenConfig).Listen(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	problem := feed.New[error](nil)
	start(t, telemetry.Options{Address: feed.New(at), Problem: problem})
	poll.Until(t, "it says why it does not listen", func() bool {
		return problem.Value() != nil && strings.Contains(problem.Value().Error(),
			"address already in use; choose another address with --metrics-address")
	})
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "it takes the address over",
		func() bool { code, _ := get(t, at, "/metrics"); return code == http.StatusOK })
	if err := problem.Value(); err != nil {
		t.Errorf("the server listens and says %v", err)
	}
}

// TestServerErrorsAreLogged: errors of net/http are lines of the daemon's log.
func TestServerErrorsAreLogged(t *testing.T) {
	t.Parallel()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	at := freeAddress(t)
	startLogged(t, telemetry.Options{
		Address: feed.New(at), Ready: func(context.Context, time.Duration, bool) status.Readiness { panic("broken") },
	}, logger)
	poll.Until(t, "it serves", func() bool { code, _ := get(t, at, "/healthz"); return code == http.StatusOK })
	if code, _ := get(t, at, "/readyz"); code != 0 {
		t.Errorf("a handler that panics answers with %d", code)
	}
	buffered, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	poll.Until(t, "the panic is logged", func() bool { return strings.Contains(buffered.GetBuffer().String(), "panic serving") })
}
