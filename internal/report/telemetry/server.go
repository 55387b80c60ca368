// Package telemetry serves the daemon's state over HTTP: metrics for Prometheus at /metrics, and
// the answers to the kubelet's probes at /healthz and /readyz. All answers come from memory: no
// request causes a call to the driver or to the kubelet.
//
// The package imports inventory, status and feed; package cli runs it. No other package imports
// Prometheus' client or net/http.
package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The limits of the listener. Prometheus needs one connection, and the kubelet's probes need
// another.
const (
	// maxConnections limits the open connections; see limitedListener.
	maxConnections = 32
	// maxScrapes limits the scrapes that are rendered at a time. Further scrapes wait for up to
	// placeTimeout, longer than all connections need while the daemon answers, and then get the
	// status 503. Refusals are logged once in refusalPause.
	maxScrapes   = 4
	placeTimeout = 5 * time.Second
	refusalPause = time.Minute
	// maxHeader limits the header of a request, in bytes.
	maxHeader = 16 << 10
	// headerTimeout is how long a client may take to send the header of a request, and
	// answerTimeout how long to read the answer. idleTimeout is how long a connection may be idle:
	// longer than the usual scrape interval.
	headerTimeout = 5 * time.Second
	answerTimeout = 15 * time.Second
	idleTimeout   = 90 * time.Second
	// maxWait is how long a readiness probe may wait.
	maxWait = 10 * time.Second
	// endTimeout is how long pending requests may take after the server stops.
	endTimeout = time.Second
)

// Options are the inputs of an Exporter.
type Options struct {
	// Address is the address to listen on, host:port. An empty host means all addresses, an empty
	// Address no server.
	Address *feed.Feed[string]
	// Status returns the state of the daemon.
	Status func(context.Context) (status.Status, error)
	// Stuck returns the stuck tasks of the daemon, with reasons. It answers in bounded time.
	Stuck func(context.Context) []string
	// Ready returns the answer to the readiness probe. It waits up to wait for the daemon to be
	// ready. Parameter probed is true if the client is the kubelet.
	Ready func(ctx context.Context, wait time.Duration, probed bool) status.Readiness
	// Counters are the counters that other packages increment.
	Counters *Counters
	// Problem receives the reason why the Exporter does not listen; nil if it listens, or should
	// not.
	Problem *feed.Feed[error]
	// PCIGPUs counts the NVIDIA GPUs on the PCI bus, with or without a driver, and separately the
	// GPUs assigned to virtual machines; nil if unknown.
	PCIGPUs func() (own, away int)
	// GPUs are the sources of the metrics of GPUs; nil for none.
	GPUs *GPUs
}

// An Exporter answers scrapes and probes.
type Exporter struct {
	options  Options
	registry *prometheus.Registry // metrics outside of a page
	scrapes  chan struct{}        // one entry for each scrape being rendered
	handler  http.Handler

	mu      sync.Mutex // guards refused
	refused time.Time  // last log of a refused scrape
}

// New returns an Exporter that does not listen yet.
func New(o Options) *Exporter {
	s := &Exporter{options: o, registry: prometheus.NewRegistry(), scrapes: make(chan struct{}, maxScrapes)}
	s.registry.MustRegister(
		o.Counters.calls, o.Counters.errors, o.Counters.rpcs, o.Counters.claims, o.Counters.requests,
		o.Counters.healthEvents,
		o.Counters.dropped,
		o.Counters.switches,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", s.metrics)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	s.handler = mux
	return s
}

// Run listens on the configured address until ctx ends, and then returns nil. It follows changes of
// the address and retries if it cannot listen: the address may belong to a process that is about to
// end.
func (s *Exporter) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		address, changed := s.options.Address.Latest()
		life, end := context.WithCancel(ctx)
		go func() {
			defer end()
			select {
			case <-changed:
			case <-life.Done():
			}
		}()
		s.follow(life, address)
		end()
	}
	return nil
}

// follow listens on one address until ctx ends.
func (s *Exporter) follow(ctx context.Context, address string) {
	defer s.options.Problem.Publish(nil)
	if address == "" {
		<-ctx.Done()
		return
	}
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "address", address))
	backoff := supervise.Backoff{First: time.Second, Most: 5 * time.Second, Proven: time.Minute}
	_ = supervise.Run(ctx, backoff, func(ctx context.Context) error { // always returns nil
		err := s.serve(ctx, address)
		s.options.Problem.Publish(err)
		return err
	})
}

// serve answers requests at address until ctx ends, and then returns nil.
func (s *Exporter) serve(ctx context.Context, address string) error {
	socket, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve metrics: %w; choose another address with --metrics-address", err)
	}
	s.options.Problem.Publish(nil)
	klog.FromContext(ctx).Info("Serving metrics", "listening", socket.Addr().String())
	server := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout, WriteTimeout: answerTimeout,
		IdleTimeout:    idleTimeout,
		MaxHeaderBytes: maxHeader,
		BaseContext:    func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
		ErrorLog:       log.New(httpErrors{klog.FromContext(ctx)}, "", 0),
	}
	ended := make(chan error, 1)
	go func() {
		ended <- server.Serve(&limitedListener{Listener: socket, most: maxConnections, log: klog.FromContext(ctx)})
	}()
	select {
	case err := <-ended:
		return fmt.Errorf("serve metrics: %w", err)
	case <-ctx.Done():
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return errors.Join(server.Shutdown(ending), server.Close())
}

// httpErrors logs messages of net/http, such as a panic of a handler. By default net/http writes to
// standard error, which may block and is not JSON.
type httpErrors struct{ klog.Logger }

func (l httpErrors) Write(line []byte) (int, error) {
	l.Info("HTTP server reports an error", "line", strings.TrimSpace(string(line)))
	return len(line), nil
}

// healthz answers the liveness probe. The answer depends on the tasks of the daemon only, not on
// the health of GPUs.
func (s *Exporter) healthz(w http.ResponseWriter, r *http.Request) {
	if stuck := s.options.Stuck(r.Context()); len(stuck) > 0 {
		answer(w, http.StatusServiceUnavailable, "stuck: "+strings.Join(stuck, "; "))
		return
	}
	answer(w, http.StatusOK, "ok")
}

// readyz answers the readiness probe, which may ask to wait for the daemon to be ready. The
// kubelet's probes have a distinct user agent. A client that imitates the kubelet can at most make
// the daemon start again while the kubelet is down.
func (s *Exporter) readyz(w http.ResponseWriter, r *http.Request) {
	wait, err := time.ParseDuration(cmp.Or(r.URL.Query().Get("wait"), "0s"))
	if err != nil || wait < 0 {
		answer(w, http.StatusBadRequest, "wait is not a duration, such as 5s")
		return
	}
	readiness := s.options.Ready(r.Context(), min(wait, maxWait), strings.HasPrefix(r.UserAgent(), "kube-probe/"))
	text, code := "ready", http.StatusOK
	if !readiness.Ready {
		text, code = "not ready", http.StatusServiceUnavailable
	}
	if readiness.Reason != "" {
		text += ": " + readiness.Reason
	}
	answer(w, code, text)
}

// answer writes an answer of one line. A disconnected client has no consequence.
func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = fmt.Fprintln(w, text)
}
