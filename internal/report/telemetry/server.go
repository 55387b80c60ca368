// Package telemetry serves over HTTP what the daemon knows of itself and its GPUs: metrics for
// Prometheus at /metrics, and the answers for kubelet's probes at /healthz and /readyz. All answers
// come from memory: no request makes a call to the driver or to kubelet.
//
// The package imports inventory, status and feed; package cli runs it. It is the only home of
// Prometheus' client and of net/http.
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

// The limits of the listener. Prometheus needs one connection, kubelet's probes one more.
const (
	// maxConnections is how many connections are open at a time; see listener.
	maxConnections = 32
	// maxScrapes is how many answers to scrapes are made at a time. Others wait for at most
	// placeTimeout, which is longer than all connections take where the daemon answers, and then
	// get the status 503. That is logged once in refusalPause.
	maxScrapes   = 4
	placeTimeout = 5 * time.Second
	refusalPause = time.Minute
	// maxHeader bounds the header of a request, in bytes.
	maxHeader = 16 << 10
	// headerTimeout is how long a client may take to send the header of a request, answerTimeout how
	// long to take the answer, and idleTimeout how long a connection may be without a request: longer
	// than Prometheus' usual scrape interval.
	headerTimeout = 5 * time.Second
	answerTimeout = 15 * time.Second
	idleTimeout   = 90 * time.Second
	// maxWait is how long a readiness probe may wait.
	maxWait = 10 * time.Second
	// endTimeout is how long requests that are under way have to end when the server does.
	endTimeout = time.Second
)

// Options are what an Exporter is made of.
type Options struct {
	// Address is where to listen, host:port; an empty host is all addresses. Empty: nowhere.
	Address *feed.Feed[string]
	// Status returns what the daemon knows of itself.
	Status func(context.Context) (status.Status, error)
	// Stuck returns which tasks of the daemon are stuck, with the reasons. It answers in bounded time.
	Stuck func(context.Context) []string
	// Ready returns the answer to the readiness probe. It waits at most that long until the daemon is
	// ready. Probed says that the client is kubelet.
	Ready func(ctx context.Context, wait time.Duration, probed bool) status.Readiness
	// Counters are the counters that other packages increase.
	Counters *Counters
	// Problem is where the Exporter publishes why it does not listen; nil while it does, or is not to.
	Problem *feed.Feed[error]
	// PCIGPUs returns how many NVIDIA GPUs the node has by its PCI bus, with or without a driver,
	// and how many are given to virtual machines beside these; nil if that is not known.
	PCIGPUs func() (own, away int)
	// GPUs are what the metrics of GPUs are made of; nil for none.
	GPUs *GPUs
}

// An Exporter answers scrapes and probes.
type Exporter struct {
	options  Options
	registry *prometheus.Registry // of what is not in a page
	scrapes  chan struct{}        // has one for each scrape whose answer is being made
	handler  http.Handler

	mu      sync.Mutex // guards refused
	refused time.Time  // when it was logged last that a scrape was refused
}

// New returns an Exporter that does not listen yet.
func New(o Options) *Exporter {
	s := &Exporter{options: o, registry: prometheus.NewRegistry(), scrapes: make(chan struct{}, maxScrapes)}
	s.registry.MustRegister(
		o.Counters.calls, o.Counters.errors, o.Counters.rpcs, o.Counters.claims, o.Counters.requests, o.Counters.dropped, o.Counters.switches,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", s.metrics)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	s.handler = mux
	return s
}

// Run listens at the configured address until ctx ends, and returns nil then. When the address
// changes, it listens at the new one. It tries again where it cannot listen: the address may belong
// to a process that is about to end.
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

// follow listens at one address until ctx ends.
func (s *Exporter) follow(ctx context.Context, address string) {
	defer s.options.Problem.Publish(nil)
	if address == "" {
		<-ctx.Done()
		return
	}
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "address", address))
	backoff := supervise.Backoff{First: time.Second, Most: 5 * time.Second, Proven: time.Minute}
	_ = supervise.Run(ctx, backoff, func(ctx context.Context) error { // it returns nil
		err := s.serve(ctx, address)
		s.options.Problem.Publish(err)
		return err
	})
}

// serve answers requests at address until ctx ends, and returns nil then.
func (s *Exporter) serve(ctx context.Context, address string) error {
	socket, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve metrics: %w; choose another address with --metrics-address", err)
	}
	s.options.Problem.Publish(nil)
	klog.FromContext(ctx).Info("Serving metrics", "listening", socket.Addr().String())
	server := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout, WriteTimeout: answerTimeout, IdleTimeout: idleTimeout,
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

// httpErrors logs what net/http reports, such as a handler that panicked. By default net/http
// writes it to standard error, which may block and has no JSON.
type httpErrors struct{ klog.Logger }

func (l httpErrors) Write(line []byte) (int, error) {
	l.Info("HTTP server reports an error", "line", strings.TrimSpace(string(line)))
	return len(line), nil
}

// healthz answers the liveness probe: whether the tasks of the daemon are alive, and not whether
// GPUs are healthy.
func (s *Exporter) healthz(w http.ResponseWriter, r *http.Request) {
	if stuck := s.options.Stuck(r.Context()); len(stuck) > 0 {
		answer(w, http.StatusServiceUnavailable, "stuck: "+strings.Join(stuck, "; "))
		return
	}
	answer(w, http.StatusOK, "ok")
}

// readyz answers the readiness probe, which may say how long to wait until the daemon is ready.
// Kubelet's probes have a user agent of their own; a client that pretends to be kubelet can only
// make the daemon start anew while kubelet is down.
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

// answer writes an answer of one line. That a client is gone has no consequence.
func answer(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = fmt.Fprintln(w, text)
}
