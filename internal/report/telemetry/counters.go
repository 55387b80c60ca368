package telemetry

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	// maxCounted limits the GPUs and the resources with counted events.
	maxCounted = 256
	// maxXIDs limits the XIDs that are counted separately for a GPU.
	maxXIDs = 32
	// otherXID stands for all further XIDs.
	otherXID = "other"
	// departedLife is how long the counts of a removed GPU or resource are still shown: long enough
	// for Prometheus to scrape the last counts.
	departedLife = 2 * time.Minute
)

// criticalXIDs are counted from 0, so that the first occurrence is an increase.
var criticalXIDs = []uint64{48, 62, 64, 74, 79, 95, 119, 120, 123, 140}

// buckets are the classic buckets of a histogram, in seconds.
var buckets = []float64{0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10}

// Counters counts the reports of packages serve, claims, monitor and nvidia. Create it with
// NewCounters. Its methods are safe for concurrent use.
type Counters struct {
	rpcs, calls, claims *prometheus.HistogramVec
	// errors counts failed calls into the driver, requests the requests to the API server, and
	// dropped the Events that were not written.
	errors, requests, dropped *prometheus.CounterVec
	healthEvents              *prometheus.CounterVec // by result
	switches                  *prometheus.GaugeVec
	preparedWithoutKubelet    atomic.Uint64 // claims prepared without the kubelet's account of resources

	causes []string // causes of the end of a stream
	now    func() time.Time

	mu        sync.Mutex // guards all following fields
	gpus      map[string]*gpuCounts
	resources map[string]*resourceCounts
	switched  map[[3]string]bool // shown errors of NVSwitches
}

// gpuCounts are the counters of a GPU.
type gpuCounts struct {
	index      string
	gone       time.Time // when the GPU disappeared; zero if it exists
	xids       map[string]xidCount
	recoveries map[inventory.Remedy]uint64
}

// xidCount is how often an XID occurred, and when it last did.
type xidCount struct {
	n    uint64
	last time.Time
}

// resourceCounts are the counters of a resource.
type resourceCounts struct {
	gone             time.Time // when serving ended; zero if the resource is served
	accepted, failed uint64
	ends             map[string]uint64
}

// NewCounters returns Counters at zero. Causes are the causes of the end of a stream. They are
// counted from 0, so that the first end is an increase.
func NewCounters(causes []string) *Counters {
	return &Counters{
		rpcs: rpcDuration.histogramVec(buckets), calls: callDuration.histogramVec(buckets),
		claims: claimDuration.histogramVec(buckets),
		errors: callErrors.counterVec(), requests: apiRequests.counterVec(), dropped: eventsDropped.counterVec(),
		healthEvents: healthEvents.counterVec(),
		switches:     switchErrors.gaugeVec(), switched: map[[3]string]bool{},
		causes: causes, now: time.Now, gpus: map[string]*gpuCounts{}, resources: map[string]*resourceCounts{},
	}
}

// XID implements monitor.Metrics.
func (c *Counters) XID(gpu string, xid uint64, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.gpu(gpu)
	if g == nil {
		return
	}
	code := strconv.FormatUint(xid, 10)
	if _, known := g.xids[code]; !known && len(g.xids) >= maxXIDs {
		code = otherXID
	}
	g.xids[code] = xidCount{g.xids[code].n + 1, at}
}

// maxSwitchErrors limits the shown errors of NVSwitches.
const maxSwitchErrors = 64

// SwitchError records an error of the NVSwitch at a PCI address.
func (c *Counters) SwitchError(bdf string, sxid uint64, fatal bool, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := [3]string{bdf, strconv.FormatUint(sxid, 10), strconv.FormatBool(fatal)}
	if !c.switched[of] && len(c.switched) >= maxSwitchErrors {
		return
	}
	c.switched[of] = true
	c.switches.WithLabelValues(of[:]...).Set(float64(at.UnixMilli()) / 1000)
}

// Recovered implements monitor.Metrics.
func (c *Counters) Recovered(gpu string, remedy inventory.Remedy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if g := c.gpu(gpu); g != nil {
		g.recoveries[remedy]++
	}
}

// gpu returns the counts of a GPU; nil if there are too many GPUs. The caller holds the lock.
func (c *Counters) gpu(uuid string) *gpuCounts {
	g := c.gpus[uuid]
	if g == nil && len(c.gpus) < maxCounted {
		g = &gpuCounts{xids: map[string]xidCount{}, recoveries: map[inventory.Remedy]uint64{}}
		for _, xid := range criticalXIDs {
			g.xids[strconv.FormatUint(xid, 10)] = xidCount{}
		}
		c.gpus[uuid] = g
	}
	return g
}

// Registered implements serve.Metrics.
func (c *Counters) Registered(resource string, accepted bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r := c.resource(resource); {
	case r == nil:
	case accepted:
		r.accepted++
	default:
		r.failed++
	}
}

// StreamEnded implements serve.Metrics.
func (c *Counters) StreamEnded(resource, cause string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.resource(resource); r != nil {
		r.ends[cause]++
	}
}

// resource returns the counts of a resource; nil if there are too many resources. The caller holds
// the lock.
func (c *Counters) resource(name string) *resourceCounts {
	r := c.resources[name]
	if r == nil && len(c.resources) < maxCounted {
		r = &resourceCounts{ends: map[string]uint64{}}
		for _, cause := range c.causes {
			r.ends[cause] = 0
		}
		c.resources[name] = r
	}
	return r
}

// Answered implements serve.Metrics.
func (c *Counters) Answered(method, code string, took time.Duration) {
	c.rpcs.WithLabelValues(method, code).Observe(took.Seconds())
}

// Prepared implements claims.Metrics.
func (c *Counters) Prepared(took time.Duration, cause string) {
	c.claims.WithLabelValues("prepare", cmp.Or(cause, done)).Observe(took.Seconds())
}

// Unprepared implements claims.Metrics.
func (c *Counters) Unprepared(took time.Duration, cause string) {
	c.claims.WithLabelValues("unprepare", cmp.Or(cause, done)).Observe(took.Seconds())
}

// PreparedWithoutKubelet implements claims.Metrics.
func (c *Counters) PreparedWithoutKubelet() { c.preparedWithoutKubelet.Add(1) }

// done is the result of a successful call.
const done = "done"

// DriverCalled implements nvidia.Metrics.
func (c *Counters) DriverCalled(group string, took time.Duration) {
	c.calls.WithLabelValues(group).Observe(took.Seconds())
}

// DriverFailed implements nvidia.Metrics.
func (c *Counters) DriverFailed(group, code string) { c.errors.WithLabelValues(group, code).Inc() }

// APIRequested counts a request to the API server. The code is the HTTP status of the answer, 0 if
// there was no answer.
func (c *Counters) APIRequested(verb, resource string, code int) {
	text := "none"
	if code != 0 {
		text = strconv.Itoa(code)
	}
	c.requests.WithLabelValues(verb, resource, text).Inc()
}

// EventDropped counts a Kubernetes Event that was not written.
func (c *Counters) EventDropped(cause string) { c.dropped.WithLabelValues(cause).Inc() }

// HealthEventsSent counts the health events of a call to NVSentinel.
func (c *Counters) HealthEventsSent(accepted bool, events int) {
	result := "accepted"
	if !accepted {
		result = "failed"
	}
	c.healthEvents.WithLabelValues(result).Add(float64(events))
}

// send sends the counts of the GPUs and resources in a status, and of GPUs and resources that left
// it shortly before.
func (c *Counters) send(out *page, s status.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	gpus, resources := map[string]bool{}, map[string]bool{}
	for _, d := range s.GPUs {
		if d.GPU != "" {
			continue
		}
		gpus[d.UUID] = true
		if g := c.gpu(d.UUID); g != nil {
			g.index = d.Index
		}
	}
	for _, r := range s.Resources {
		resources[r.Name] = true
		c.resource(r.Name)
	}
	if s.DRA != nil {
		claimsWithoutKubelet.send(out, float64(c.preparedWithoutKubelet.Load()))
	}
	now := c.now()
	for uuid, g := range ascending(c.gpus) {
		if !keep(&g.gone, gpus[uuid], now) {
			delete(c.gpus, uuid)
			continue
		}
		for code, x := range ascending(g.xids) {
			xidEvents.send(out, float64(x.n), uuid, g.index, code)
			xidLast.sendTime(out, x.last, uuid, g.index, code)
		}
		for remedy, n := range ascending(g.recoveries) {
			recoveries.send(out, float64(n), uuid, g.index, string(remedy))
		}
	}
	for name, r := range ascending(c.resources) {
		if !keep(&r.gone, resources[name], now) {
			delete(c.resources, name)
			continue
		}
		registrations.send(out, float64(r.accepted), name, "accepted")
		registrations.send(out, float64(r.failed), name, "failed")
		for cause, n := range ascending(r.ends) {
			streamEnds.send(out, float64(n), name, cause)
		}
	}
}

// ascending returns the entries of a map by ascending key. The caller may delete entries meanwhile.
func ascending[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

// keep reports whether counts are still shown. It records in gone when their GPU or resource
// disappeared.
func keep(gone *time.Time, exists bool, now time.Time) bool {
	switch {
	case exists:
		*gone = time.Time{}
	case gone.IsZero():
		*gone = now
	}
	return gone.IsZero() || now.Sub(*gone) < departedLife
}
