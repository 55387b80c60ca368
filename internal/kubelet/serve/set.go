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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Registrar registers sockets at kubelet.
type Registrar interface {
	// NewEndpoint returns the path of a socket that was never used before.
	NewEndpoint(resource string) string
	// Rivals returns the sockets of other servers of a resource that are beside kubelet's now.
	Rivals(resource string) kubelet.Rivals
	// Listening returns the sockets of other GPU device plugins that accept connections.
	Listening(ctx context.Context) []string
	// Refuses reports whether the socket of that name is gone or refuses connections now.
	Refuses(ctx context.Context, name string) bool
	// AwaitEnd waits until no server listens on the socket of that name. It returns an error if ctx
	// ends before.
	AwaitEnd(ctx context.Context, name string) error
	// CallEarlier makes a call to the server of a resource in the process that started last before
	// this one.
	CallEarlier(ctx context.Context, resource string, call func(context.Context, pluginapi.DevicePluginClient) error) error
	// LockRegistrations keeps other processes from registering until unlock is called, which may be
	// called more than once. It waits for their registrations, for a second at most.
	LockRegistrations(ctx context.Context) (unlock func())
	// Register registers the serving socket at path endpoint for resource at the kubelet of an
	// incarnation, and at no other. It is called once for an endpoint.
	Register(ctx context.Context, incarnation uint64, resource, endpoint string,
		options *pluginapi.DevicePluginOptions) error
	// Leave prepares the end of the stream of a resource that another process serves from now on.
	// Without it, the kubelet up to 1.36 would treat that end as the end of that process's stream.
	// The error kubelet.ErrNotYet means that it is to be called again.
	Leave(ctx context.Context, incarnation uint64, resource string) error
}

// An Inspector looks at devices before a container starts on them.
type Inspector interface {
	// Inspect returns why the devices must not be used, in a sentence for the pod's events; nil if
	// they may. The devices may be missing in the plan now, or be changed there. The GPU of a device
	// that an earlier process offered is empty.
	Inspect(ctx context.Context, devices []resource.Device) error
}

// Collaborators are the parts of the daemon that a Set uses.
type Collaborators struct {
	Registrar  Registrar
	Accountant Accountant
	// Connections returns a number that changes with each connection of the Accountant to a kubelet;
	// nil if that is not known. A kubelet that starts answers before Incarnation changes.
	Connections func() uint64
	// Checkpoint returns kubelet's checkpoint; nil if it cannot be read here.
	Checkpoint func() (kubelet.Checkpoint, error)
	// CheckpointVersion returns a text that changes whenever the kubelet writes its checkpoint; empty
	// if that is not known. Nil means that it never is.
	CheckpointVersion func() string
	Inspector         Inspector
	// MayGive returns why devices must not be given to a pod by any device plugin now, in a sentence;
	// nil if they may. It is asked in each call of Allocate, and returns at once. Without the function
	// all GPUs may be given.
	MayGive func(devices []resource.Device) error
	// KeepsOneClient reports whether a kubelet treats the end of any stream of a resource as the end
	// of the server that registered last. The argument is the user agent of kubelet's calls. Nil means
	// kubelet.KeepsOneClient.
	KeepsOneClient func(userAgent string) bool
	// ExtendEnd is called when this process is ending, and needs so much time from now on at most,
	// until another one serves in its place. Nil does nothing.
	ExtendEnd func(time.Duration)
	// Metrics counts registrations and calls; nil counts nothing.
	Metrics Metrics
	// Incarnation is the number of the current kubelet, which changes when kubelet restarts; 0 while
	// no kubelet runs.
	Incarnation *feed.Feed[uint64]
	// Sockets are the names of the plugin sockets in kubelet's directory. A new value makes the Set
	// look at the sockets: publish one whenever a socket may have come or gone.
	Sockets *feed.Feed[[]string]
	Clock   clock.WithTicker
}

// Options are what the configuration decides about how resources are served.
type Options struct {
	// Edits decide which variables, mounts and devices a container gets.
	Edits containeredits.Options
	// Inspect makes kubelet ask before each start of a container whether its devices may be used.
	Inspect bool
	// Announce has a change that takes devices away wait until Proceed is called.
	Announce bool
}

// Phase is the state of the server of a resource.
type Phase string

// The phases of a server.
const (
	PhaseNoKubelet   Phase = "waiting for kubelet"
	PhaseRegistering Phase = "registering"
	PhaseServing     Phase = "serving"
	// PhaseYielding: the server sends nothing, because a process of this program that started later
	// serves the resource.
	PhaseYielding Phase = "silent: another server has registered"
	// PhaseForeign: the server sends nothing, because another program serves the resource.
	PhaseForeign Phase = "silent: another program has registered"
)

// Status is how one resource is being served.
type Status struct {
	Resource string
	Phase    Phase
	// Devices counts the devices that the list names, Healthy those of them that may be given out.
	Devices, Healthy int
	// Unoffered counts the units of well GPUs that are listed as Unhealthy because the free units of
	// another GPU are on offer.
	Unoffered int
	// Agreed says that kubelet's own account of the resource was the list, when the two were compared
	// last in this life.
	Agreed bool
	// Since is since when Agreed is true; zero if it is not.
	Since time.Time
	// Problem is why the last registration failed or ended, or how kubelet's account differs; empty
	// while all is well.
	Problem string
	// Departing are the devices that left the plan and are still listed, by ID.
	Departing []Departing
}

// Departing is a device that left the plan and is still listed.
type Departing struct {
	ID string
	// Reason is why it cannot be given out.
	Reason string
	// Waiting says what must happen before the list drops the device.
	Waiting string
}

// A Set keeps one server for each resource of the plan that it was last given.
type Set struct {
	collaborators Collaborators
	departed      chan struct{} // has a value when devices or resources may have left the plan
	pulse         supervise.Pulse
	added         *feed.Feed[int]           // counts the resources that ever came, to wake Run
	offered       *feed.Feed[resource.Plan] // the plan with the holds of the Set
	fewer         *feed.Feed[uint64]        // the number of the change that waits for Proceed
	users         users

	mu        sync.Mutex // guards all following fields
	resources map[string]*served
	asked     asked
	told      told
	forms     heldForms
	waiting   waiting
	allocated map[deviceKey]uint64 // how often each device was allocated
	regiven   time.Time            // the last Allocate of a departing device
}

// asked is what a Set was given last.
type asked struct {
	plan    resource.Plan
	options Options
	uuids   map[string]bool // those of the plan
}

// told is what kubelet has told.
type told struct {
	evidence evidence             // the last one without a gap
	holders  map[deviceKey]holder // as far as the accounts told last
	begun    bool                 // the checkpoint was read for the first plan
	silence  lasting              // the checkpoint cannot be read
	unasked  bool                 // PodResources cannot be asked
	foreign  []resource.HeldShape // devices that kubelet has under resources that this Set does not serve
	unserved map[string]time.Time // since when it is known that nobody serves a resource of which pods hold devices
}

// heldForms are the forms in which GPUs count as held, where that is another form than that of the
// plan.
type heldForms struct {
	held  []resource.HeldShape
	grows time.Time // when more devices of a GPU in its new form may be on offer; zero if there are none
	drain drain
	stuck lasting // a resource has nothing to give because PodResources cannot be asked
}

// A lasting is something that counts once it has lasted for a time.
type lasting struct {
	since  time.Time // since when it lasts; zero if it does not
	reason string    // why it counts; empty if it does not
}

// see notes whether it is so now, and with which reason it counts once it has been so for least.
func (l *lasting) see(is bool, now time.Time, least time.Duration, reason string) {
	switch {
	case !is:
		*l = lasting{}
	case l.since.IsZero():
		*l = lasting{since: now}
	case now.Sub(l.since) >= least:
		l.reason = reason
	}
}

func (l *lasting) counts() bool { return l.reason != "" }

// isDue reports whether it counts when it is seen next, and did not before.
func (l *lasting) isDue(now time.Time, least time.Duration) bool {
	return !l.counts() && !l.since.IsZero() && now.Sub(l.since) >= least
}

// served is one resource of a Set.
type served struct {
	list    *list
	epoch   uint64
	phase   Phase
	agreed  bool
	since   time.Time // agreed became true
	problem string
	started bool
	adopted bool               // adopt was called
	stop    context.CancelFunc // ends its lives; set when started
}

// NewSet returns a Set that serves nothing yet.
func NewSet(c Collaborators) *Set {
	if c.Checkpoint == nil {
		c.Checkpoint = func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{}, errors.New("kubelet's checkpoint is not read")
		}
	}
	if c.KeepsOneClient == nil {
		c.KeepsOneClient = kubelet.KeepsOneClient
	}
	if c.Metrics == nil {
		c.Metrics = noMetrics{}
	}
	if c.ExtendEnd == nil {
		c.ExtendEnd = func(time.Duration) {}
	}
	return &Set{collaborators: c, resources: map[string]*served{}, allocated: map[deviceKey]uint64{},
		users:   users{accounts: accounts{Collaborators: c}, shown: map[deviceKey]showing{}},
		added:   feed.New(0),
		offered: feed.New(resource.Plan{}), fewer: feed.New(uint64(0)), departed: make(chan struct{},
			1), pulse: supervise.NewPulse()}
}

// Offered returns the feed of the plan with all its holds, also those on devices whose GPU may be
// held in another form.
func (s *Set) Offered() *feed.Feed[resource.Plan] { return s.offered }

// Apply makes the Set serve the plan: what changed is on its way to kubelet when Apply returns. It
// does not wait, except for the disk when it reads the checkpoint for the first time.
//
// The epoch numbers the configuration of the plan. If a resource is missing in the plan of a later
// epoch, its server ends. If it is missing in a later plan of the same epoch, it has only lost its
// devices, and its server stays until they return.
func (s *Set) Apply(plan resource.Plan, o Options, epoch uint64) {
	s.readOnce() // what pods hold is known before anything is offered
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = asked{plan, o, map[string]bool{}}
	first := s.added.Value() == 0 // then another process of this program may serve, with another configuration
	for _, r := range plan.Resources {
		entry, known := s.resources[r.Name]
		if !known {
			entry = s.add(r.Name)
			if first {
				entry.list.allLeft()
			}
		}
		entry.epoch, entry.list.retired = epoch, false
		for _, d := range r.Devices {
			s.asked.uuids[d.UUID], s.asked.uuids[d.GPU] = true, true
		}
	}
	for _, entry := range s.resources {
		if entry.epoch != epoch {
			entry.list.retired = true
		}
	}
	s.refresh()
	s.mayDepart()
}

// readOnce reads the checkpoint unless that was done. It reads without the lock: calls of kubelet's
// do not wait for the disk.
func (s *Set) readOnce() {
	s.mu.Lock()
	done := s.told.begun
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
	s.told.evidence, s.told.begun = evidence{began: began, checkpoint: checkpoint, held: heldIn(checkpoint)}, true
	s.told.holders = s.told.evidence.held
}

// mayDepart has dropDeparting look at once.
func (s *Set) mayDepart() {
	select {
	case s.departed <- struct{}{}:
	default:
	}
}

// add adds a resource, with the devices that kubelet knew at the last reading.
func (s *Set) add(name string) *served {
	entry := &served{list: newList(name, s.collaborators.Clock)}
	entry.list.adopt(knownOf(s.told.evidence.checkpoint, name))
	s.resources[name] = entry
	s.added.Publish(s.added.Value() + 1)
	return entry
}

// Status returns how each resource is being served, by name.
func (s *Set) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	statuses := make([]Status, 0, len(s.resources))
	for _, name := range slices.Sorted(maps.Keys(s.resources)) {
		entry := s.resources[name]
		view := entry.list.views.Value()
		status := Status{Resource: name, Phase: entry.phase, Agreed: entry.agreed, Problem: entry.problem,
			Devices: len(view.response.Devices), Healthy: len(view.healthy()),
			Unoffered: view.unoffered, Departing: entry.list.departures()}
		if entry.agreed {
			status.Since = entry.since
		}
		statuses = append(statuses, status)
	}
	return statuses
}

// Alive returns an error if Run makes no round before ctx ends.
func (s *Set) Alive(ctx context.Context) error { return s.pulse.Check(ctx) }

// Run serves until ctx ends. Then it closes its sockets, sends nothing more to kubelet, and returns
// nil. It runs once.
func (s *Set) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.dropDeparting(ctx) })
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

// unstarted returns the resources that came since it was last called, and holds them for started.
func (s *Set) unstarted() []*served {
	s.mu.Lock()
	defer s.mu.Unlock()
	var entries []*served
	for _, entry := range s.resources {
		if !entry.started {
			entry.started = true
			entries = append(entries, entry)
		}
	}
	return entries
}

// serve serves one resource until ctx ends, or the resource is retired and forgotten.
func (s *Set) serve(ctx context.Context, entry *served) error {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("resource", entry.list.name))
	for {
		if err := s.live(ctx, entry); err != nil {
			return err
		}
		// Should the resource return, its next life must not be taken for this one.
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

// live runs the lives of one resource until ctx ends or the resource is retired.
func (s *Set) live(ctx context.Context, entry *served) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s.mu.Lock()
	entry.stop = stop
	s.mu.Unlock()

	past := &past{}
	defer past.letRegister(s.collaborators.Clock)
	defer past.release()
	defer past.endKept()
	defer past.endBetween()
	backoff := supervise.Backoff{First: 10 * time.Millisecond, Most: 5 * time.Second, Proven: 10 * time.Second,
		Clock: s.collaborators.Clock, Nudge: s.nudge}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		life := &life{Collaborators: s.collaborators, list: entry.list, past: past,
			report:     func(p Phase) { s.setPhase(entry, p) },
			compared:   func(difference string) { s.setDifference(entry, difference) },
			adopt:      func(ctx context.Context) { s.adopt(ctx, entry) },
			allocating: func(r *pluginapi.AllocateRequest) *view { return s.allocating(entry.list, r) },
		}
		err := life.run(ctx)
		if err != nil {
			s.setProblem(entry, err.Error())
		}
		return err
	})
}

func (s *Set) setPhase(entry *served, p Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.phase, entry.agreed = p, false
	if p == PhaseServing {
		entry.problem = ""
	}
}

func (s *Set) setDifference(entry *served, difference string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if difference == "" && !entry.agreed {
		entry.since = s.collaborators.Clock.Now()
	}
	entry.agreed, entry.problem = difference == "", difference
}

func (s *Set) setProblem(entry *served, problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.phase, entry.agreed, entry.problem = PhaseRegistering, false, problem
}

// nudge returns a channel that is closed with the next incarnation of kubelet.
func (s *Set) nudge() <-chan struct{} {
	_, changed := s.collaborators.Incarnation.Latest()
	return changed
}
