package serve

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Registrar registers sockets with the kubelet.
type Registrar interface {
	// NewEndpoint returns the path of a socket that was never used before.
	NewEndpoint(resource string) string
	// Peers returns the sockets of other servers of a resource in the kubelet's directory.
	Peers(resource string) kubelet.Peers
	// Listening returns the sockets of other GPU device plugins that accept connections.
	Listening(ctx context.Context) []string
	// Refuses reports whether the socket of that name is gone or refuses connections.
	Refuses(ctx context.Context, name string) bool
	// AwaitEnd waits until no server listens on the socket of that name. It returns
	// an error if ctx ends first.
	AwaitEnd(ctx context.Context, name string) error
	// CallEarlier calls the server of a resource in the newest process that started
	// before this process.
	CallEarlier(ctx context.Context, resource string,
		call func(context.Context, pluginapi.DevicePluginClient) error) error
	// LockRegistrations keeps other processes from registering until unlock is called, or until
	// they have waited for kubelet.LockTimeout. It waits no longer for their registrations itself,
	// and locked is false then. unlock may be called more than once.
	LockRegistrations(ctx context.Context) (unlock func(), locked bool)
	// Register registers the socket at path endpoint for a resource, only with the
	// kubelet of the given incarnation. It is called once for each endpoint.
	Register(ctx context.Context, incarnation uint64, resource, endpoint string,
		options *pluginapi.DevicePluginOptions) error
	// Detach prepares the end of this process's stream of a resource, while another process takes
	// the resource over. Without Detach, a kubelet up to 1.36 treats the end of this stream as the
	// end of the other process. On the error kubelet.ErrNotYet, call Detach again.
	Detach(ctx context.Context, incarnation uint64, resource string) error
}

// An Inspector checks devices before a container starts with them.
type Inspector interface {
	// Inspect returns why the devices must not be used, as a sentence for the pod's
	// events, or nil. A device may be missing in the plan or changed there. The GPU
	// of a device offered by an earlier process is empty.
	Inspect(ctx context.Context, devices []resource.Device) error
}

// Collaborators are the parts of the daemon used by Servers.
type Collaborators struct {
	Registrar  Registrar
	Accountant Accountant
	// Connections returns a number that changes with each connection of the Accountant to a
	// kubelet; nil if unknown. A starting kubelet answers before Incarnation changes.
	Connections func() uint64
	// Checkpoint returns the kubelet's checkpoint; nil if the checkpoint cannot be read here.
	Checkpoint func() (kubelet.Checkpoint, error)
	// CheckpointVersion returns a text that changes whenever the kubelet writes its
	// checkpoint; empty if unknown. A nil function means never known.
	CheckpointVersion func() string
	Inspector         Inspector
	// MayGive returns why no device plugin may give these devices to a pod now, as a sentence, or
	// nil. Each call of Allocate calls MayGive under the lock of Servers: it returns at once, and
	// calls no method of Servers. A nil function allows all GPUs.
	MayGive func(devices []resource.Device) error
	// KeepsOneClient reports whether a kubelet treats the end of any stream of a
	// resource as the end of the server that registered last. The argument is the
	// user agent of the kubelet's calls. Nil means kubelet.KeepsOneClient.
	KeepsOneClient func(userAgent string) bool
	// ExtendEnd is called while this process is ending, with the longest time until another process
	// serves in its place, or until the kubelet notices the end. Nil does nothing.
	ExtendEnd func(time.Duration)
	// Metrics counts registrations and calls; nil counts nothing.
	Metrics Metrics
	// Incarnation is the number of the current kubelet. It changes when the kubelet
	// restarts, and is 0 while no kubelet runs.
	Incarnation *feed.Feed[uint64]
	// Sockets are the names of the plugin sockets in the kubelet's directory.
	// Servers checks the sockets after each new value. Publish a value whenever a
	// socket may have appeared or disappeared.
	Sockets *feed.Feed[[]string]
	Clock   clock.WithTicker
}

// Options are the parts of the configuration for serving resources.
type Options struct {
	// Edits decide which variables, mounts and devices a container gets.
	Edits containeredits.Options
	// Inspect makes the kubelet ask before each start of a container whether its
	// devices may be used.
	Inspect bool
	// AnnounceShrink makes each removal of devices wait for a call of ApproveShrink.
	AnnounceShrink bool
}

// Phase is the state of the server of a resource.
type Phase string

// The phases of a server.
const (
	PhaseNoKubelet   Phase = "waiting for kubelet"
	PhaseRegistering Phase = "registering"
	PhaseServing     Phase = "serving"
	// PhaseYielding: the server sends no lists, because a later process of this
	// program serves the resource.
	PhaseYielding Phase = "standing by: another server has registered"
	// PhaseOtherPlugin: the server sends no lists, because another program serves the resource.
	PhaseOtherPlugin Phase = "standing by: another program has registered"
)

// Status describes how one resource is served.
type Status struct {
	Resource string
	Phase    Phase
	// Devices counts the devices in the list. Healthy counts the allocatable devices among them.
	Devices, Healthy int
	// Unoffered counts the units of healthy GPUs listed as Unhealthy, because the
	// free units of another GPU are offered first.
	Unoffered int
	// Agreed says that the kubelet's own account matched the list at the last
	// comparison in this registration.
	Agreed bool
	// Since is the time when Agreed became true; zero while Agreed is false.
	Since time.Time
	// Problem is why the last registration failed or ended, or how the kubelet's
	// account differs; empty if there is no problem.
	Problem string
	// Retiring are the devices that left the plan and are still listed, sorted by ID.
	Retiring []listing.RetiringDevice
}

// Servers keeps one server for each resource of the latest plan.
type Servers struct {
	collaborators Collaborators
	reaperWoken   chan struct{} // has a value when devices or resources may have left the plan
	pulse         supervise.Pulse
	added         *feed.Feed[int]           // counts the resources that ever came, to wake Run
	offered       *feed.Feed[resource.Plan] // the plan with the holds of the Servers
	shrinkNumber  *feed.Feed[uint64]        // the number of the change that waits for ApproveShrink
	holderReader  holderReader

	mu             sync.Mutex // guards all following fields
	resources      map[string]*servedResource
	options        Options // the latest ones
	holders        *holders.Holders
	listing        listing.State
	checkpointRead bool                 // the checkpoint was read for the first plan
	usersPacing    listing.ResendPacing // of the lists, for Holders
}

// A servedResource is one resource of Servers.
type servedResource struct {
	list    *list
	epoch   uint64
	retired bool // the resource has left the plan, and does not come back
	phase   Phase
	agreed  bool
	since   time.Time // agreed became true
	problem string
	started bool
	adopted bool               // adopt was called
	stop    context.CancelFunc // ends its registrations; set when started
}

// NewServers returns Servers without resources.
func NewServers(c Collaborators) *Servers {
	if c.Checkpoint == nil {
		c.Checkpoint = func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{}, errors.New("the kubelet's checkpoint is not read")
		}
	}
	if c.KeepsOneClient == nil {
		c.KeepsOneClient = kubelet.KeepsOneClient
	}
	if c.Metrics == nil {
		c.Metrics = noMetrics{}
	}
	if c.Connections == nil {
		c.Connections = func() uint64 { return 0 }
	}
	if c.ExtendEnd == nil {
		c.ExtendEnd = func(time.Duration) {}
	}
	return &Servers{collaborators: c, resources: map[string]*servedResource{}, holders: holders.New(),
		holderReader: holderReader{accounts: accounts{Collaborators: c}}, added: feed.New(0),
		offered: feed.New(resource.Plan{}), shrinkNumber: feed.New(uint64(0)), reaperWoken: make(chan struct{},
			1), pulse: supervise.NewPulse()}
}

// Offered returns the feed of the plan with all holds, including the holds on
// devices whose GPU may be held in another form.
func (s *Servers) Offered() *feed.Feed[resource.Plan] { return s.offered }

// Apply makes Servers serve the plan. When Apply returns, the changes are on their way to the
// kubelet. Apply waits only for the disk, when it reads the checkpoint for the first time.
//
// The epoch numbers the configuration of the plan. A resource missing from the plan of a later
// epoch is retired: its server stops. A resource missing from a later plan of the same epoch has
// only lost its devices: its server stays until the devices return.
func (s *Servers) Apply(plan resource.Plan, o Options, epoch uint64) {
	s.readOnce() // what pods hold is known before anything is offered
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options = o
	first := s.added.Value() == 0 // then another process of this program may serve, with another configuration
	state, now := s.listing, s.collaborators.Clock.Now()
	for _, r := range plan.Resources {
		entry, known := s.resources[r.Name]
		if !known {
			state, entry = state.Add(r.Name, first, s.holders, now), s.add(r.Name)
		}
		entry.epoch, entry.retired = epoch, false
	}
	for _, entry := range s.resources {
		if entry.epoch != epoch {
			entry.retired = true
		}
	}
	s.decide(listing.Next(state, plan, listing.Options{AnnounceShrink: o.AnnounceShrink}, s.holders, now))
	s.wakeReaper()
}

// decide takes over the next state. It publishes what the kubelet and pods are to get from now on,
// and reports whether this is a new decision. Resources that the state has added get a server.
func (s *Servers) decide(next listing.State) (changed bool) {
	before := s.listing.Latest()
	s.listing = next
	latest := next.Latest()
	if latest == before {
		return false
	}
	for name, devices := range latest.Lists {
		entry, served := s.resources[name]
		if !served {
			entry = s.add(name)
			entry.retired = true
		}
		entry.list.publish(devices, s.options)
	}
	if s.shrinkNumber.Value() != latest.Pending {
		s.shrinkNumber.Publish(latest.Pending)
	}
	s.offered.Publish(latest.Plan)
	return true
}

// readOnce reads the checkpoint before the first plan. It reads without the lock,
// so that calls of the kubelet do not wait for the disk.
func (s *Servers) readOnce() {
	s.mu.Lock()
	done := s.checkpointRead
	s.mu.Unlock()
	if done {
		return
	}
	began := s.collaborators.Clock.Now()
	checkpoint, err := s.collaborators.Checkpoint()
	if err != nil { // it is empty
		began = time.Time{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checkpointRead = true
	account := accountOf(checkpoint)
	account.Began = began
	s.holders.Begin(account)
}

// wakeReaper makes runReaper read the accounts at once.
func (s *Servers) wakeReaper() {
	select {
	case s.reaperWoken <- struct{}{}:
	default:
	}
}

// add adds the server of a resource.
func (s *Servers) add(name string) *servedResource {
	entry := &servedResource{list: newList(name)}
	s.resources[name] = entry
	s.added.Publish(s.added.Value() + 1)
	return entry
}

// allocating records a call of Allocate for the devices of each container, and
// returns the answer. The accounts are read at once for units, because such a call
// comes when another container has just ended.
func (s *Servers) allocating(name string, containers [][]string) (listing.Answer, Options) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, answer := s.listing.Allocate(name, containers, s.collaborators.MayGive, s.holders,
		s.collaborators.Clock.Now())
	s.decide(next)
	if answer.Resource.InUnits() {
		s.wakeReaper()
	}
	return answer, s.options
}

// Status returns how each resource is served, sorted by name.
func (s *Servers) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	statuses := make([]Status, 0, len(s.resources))
	for _, name := range slices.Sorted(maps.Keys(s.resources)) {
		entry := s.resources[name]
		view := entry.list.views.Value()
		status := Status{Resource: name, Phase: entry.phase, Agreed: entry.agreed, Problem: entry.problem,
			Devices: len(view.response.Devices), Healthy: len(healthyIDs(view.response)),
			Unoffered: view.Unoffered, Retiring: s.listing.Retiring(name)}
		if entry.agreed {
			status.Since = entry.since
		}
		statuses = append(statuses, status)
	}
	return statuses
}

// Alive returns an error if Run does not respond before ctx ends.
func (s *Servers) Alive(ctx context.Context) error { return s.pulse.Check(ctx) }

// Run serves until ctx ends. Then it closes its sockets, sends nothing more to the
// kubelet, and returns nil. Call Run once.
func (s *Servers) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.runReaper(ctx) })
	group.Go(func() error {
		for {
			_, more := s.added.Latest()
			for _, entry := range s.unstarted() {
				group.Go(func() error { return s.serve(ctx, entry) })
			}
			select {
			case <-ctx.Done():
				return nil
			case s.pulse.Heartbeat() <- struct{}{}:
			case <-more:
			}
		}
	})
	return group.Wait()
}

// unstarted returns the resources added since its last call, and marks them as started.
func (s *Servers) unstarted() []*servedResource {
	s.mu.Lock()
	defer s.mu.Unlock()
	var entries []*servedResource
	for _, entry := range s.resources {
		if !entry.started {
			entry.started = true
			entries = append(entries, entry)
		}
	}
	return entries
}

// serve serves one resource until ctx ends or the resource is retired and removed.
func (s *Servers) serve(ctx context.Context, entry *servedResource) error {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("resource", entry.list.name))
	for {
		if err := s.live(ctx, entry); err != nil {
			return err
		}
		// If the resource returns, the kubelet must not take its next registration for this one.
		select {
		case <-ctx.Done():
			return nil
		case <-s.collaborators.Clock.After(stopDelay):
		}
		if s.forget(ctx, entry) {
			return nil
		}
	}
}

// live runs the registrations of one resource until ctx ends or the resource is retired.
func (s *Servers) live(ctx context.Context, entry *servedResource) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s.mu.Lock()
	entry.stop = stop
	s.mu.Unlock()

	past, name := &previous{}, entry.list.name
	defer past.unlockRegistrations(s.collaborators.Clock)
	defer past.release()
	defer past.endKept()
	defer past.endBetween()
	backoff := supervise.Backoff{First: 10 * time.Millisecond, Most: 5 * time.Second, Proven: 10 * time.Second,
		Clock: s.collaborators.Clock, Nudge: s.nudge}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		current := &registration{Collaborators: s.collaborators, list: entry.list, previous: past,
			report:           func(p Phase) { s.setPhase(entry, p) },
			reportDifference: func(difference string) { s.setDifference(entry, difference) },
			adopt:            func(ctx context.Context) { s.adopt(ctx, entry) },
			allocating:       func(ids [][]string) (listing.Answer, Options) { return s.allocating(name, ids) },
		}
		err := current.run(ctx)
		if err != nil {
			s.setProblem(entry, err.Error())
		}
		return err
	})
}

func (s *Servers) setPhase(entry *servedResource, p Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.phase, entry.agreed = p, false
	if p == PhaseServing {
		entry.problem = ""
	}
}

func (s *Servers) setDifference(entry *servedResource, difference string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if difference == "" && !entry.agreed {
		entry.since = s.collaborators.Clock.Now()
	}
	entry.agreed, entry.problem = difference == "", difference
}

func (s *Servers) setProblem(entry *servedResource, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.phase, entry.agreed, entry.problem = PhaseRegistering, false, problem
}

// nudge returns a channel that is closed when the kubelet's incarnation changes.
func (s *Servers) nudge() <-chan struct{} {
	_, changed := s.collaborators.Incarnation.Latest()
	return changed
}
