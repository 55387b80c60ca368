package plugin

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/edits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/supervise"
)

// Presence is what is known of kubelet and of the sockets beside ours.
type Presence struct {
	// Incarnation changes with each kubelet; 0 while none is there.
	Incarnation uint64
	// Sockets are the names of the plugin sockets in kubelet's directory, sorted, ours and those of others.
	Sockets []string
}

// A Registrar registers sockets at kubelet.
type Registrar interface {
	// NewEndpoint returns the path of a socket that was never used before.
	NewEndpoint(resource string) string
	// Ours reports whether NewEndpoint made the socket of that name.
	Ours(name string) bool
	// Register registers the serving socket at path endpoint for resource. It is called once for an endpoint.
	Register(ctx context.Context, resource, endpoint string, options *pluginapi.DevicePluginOptions) error
}

// An Inspector looks at devices before a container starts on them.
type Inspector interface {
	// Inspect returns why the devices must not be used, in a sentence for whoever reads the pod's events; nil if they may.
	Inspect(ctx context.Context, devices []resource.Device) error
}

// Collaborators are what a Set works with. All are needed.
type Collaborators struct {
	Registrar  Registrar
	Accountant Accountant
	Inspector  Inspector
	Presence   *feed.Feed[Presence]
	Clock      clock.WithTicker
}

// Options are what the configuration decides about how resources are served.
type Options struct {
	// Edits decide what a container is given.
	Edits edits.Options
	// Inspect has kubelet ask before each start of a container whether its devices may be used.
	Inspect bool
}

// Phase is how far the server of a resource has come.
type Phase string

// The phases of a server.
const (
	PhaseNoKubelet   Phase = "waiting for kubelet"
	PhaseRegistering Phase = "registering"
	PhaseServing     Phase = "serving"
)

// Status is how one resource is being served.
type Status struct {
	Resource string
	Phase    Phase
	// Devices counts the devices that the list names, Healthy those of them that may be given out.
	Devices, Healthy int
}

// A Set keeps one server for each resource of the plan that it was last given.
type Set struct {
	collaborators Collaborators
	incarnation   *feed.Feed[uint64] // of Presence alone, without the sockets

	mu        sync.Mutex // guards all following fields
	resources map[string]*served
	added     *feed.Feed[int] // counts the resources that ever came, to wake Run
}

// served is one resource of a Set.
type served struct {
	list    *list
	epoch   uint64
	phase   Phase
	started bool
	stop    context.CancelFunc // ends its lives; set when started
}

// NewSet returns a Set that serves nothing yet.
func NewSet(c Collaborators) *Set {
	return &Set{collaborators: c, incarnation: feed.New(uint64(0)), resources: map[string]*served{}, added: feed.New(0)}
}

// Apply makes the Set serve the plan: what changed is on its way to kubelet when Apply returns. It never blocks.
//
// The epoch says by which configuration the plan was made. A resource that the plan of a later epoch does not have is
// retired; one that disappears within its epoch has lost its devices, and keeps its server for the day they return.
func (s *Set) Apply(plan resource.Plan, o Options, epoch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	planned := make(map[string]bool, len(plan.Resources))
	for _, r := range plan.Resources {
		planned[r.Name] = true
		entry, known := s.resources[r.Name]
		if !known {
			entry = &served{list: newList(r.Name, s.collaborators.Clock)}
			s.resources[r.Name] = entry
			s.added.Publish(s.added.Value() + 1)
		}
		entry.epoch = epoch
		entry.list.set(r, o)
	}
	for name, entry := range s.resources {
		if !planned[name] {
			entry.list.clear(entry.epoch != epoch)
		}
	}
}

// Status returns how each resource is being served, by name.
func (s *Set) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	statuses := make([]Status, 0, len(s.resources))
	for _, name := range slices.Sorted(maps.Keys(s.resources)) {
		entry := s.resources[name]
		view := entry.list.views.Value()
		statuses = append(statuses, Status{Resource: name, Phase: entry.phase,
			Devices: len(view.response.Devices), Healthy: len(view.healthy())})
	}
	return statuses
}

// Run serves until ctx ends; then it closes its sockets, without another word to kubelet, and returns nil. It runs once.
func (s *Set) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.followIncarnation(ctx) })
	group.Go(func() error { return s.reap(ctx) })
	group.Go(func() error {
		for {
			_, more := s.added.Latest()
			for _, entry := range s.unstarted() {
				group.Go(func() error { return s.serve(ctx, entry) })
			}
			select {
			case <-ctx.Done():
				return nil
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
	s.adopt(ctx, entry.list)
	for {
		if err := s.live(ctx, entry); err != nil {
			return err
		}
		// Should the resource return, its next life must not be taken for this one.
		select {
		case <-ctx.Done():
			return nil
		case <-s.collaborators.Clock.After(settleTime):
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

	backoff := supervise.Backoff{First: 10 * time.Millisecond, Most: 5 * time.Second, Proven: 10 * time.Second,
		Clock: s.collaborators.Clock, Nudge: s.nudge}
	return supervise.Run(ctx, backoff, func(ctx context.Context) error {
		life := &life{Collaborators: s.collaborators, list: entry.list, report: func(p Phase) { s.setPhase(entry, p) }}
		return life.run(ctx)
	})
}

// forget takes a retired resource out of the Set and reports whether it did: not if the plan has it again.
func (s *Set) forget(ctx context.Context, entry *served) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ended := entry.list.leaving(); !ended {
		return false
	}
	klog.FromContext(ctx).Info("Resource retired")
	delete(s.resources, entry.list.name)
	return true
}

func (s *Set) setPhase(entry *served, p Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	entry.phase = p
}

// nudge returns a channel that is closed with the next incarnation of kubelet.
func (s *Set) nudge() <-chan struct{} {
	_, changed := s.incarnation.Latest()
	return changed
}

// adoptTimeout bounds the wait for kubelet's account before the first registration. A kubelet that is not there says so
// at once; one that is slow to answer is waited for, as the first list would drop what it does not know; one that hangs
// not for long, as pods that are admitted before the registration fail.
const adoptTimeout = time.Second

// adopt lists, on their way out, the devices that kubelet knows from an earlier process and this one does not have.
func (s *Set) adopt(ctx context.Context, l *list) {
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	for _, ask := range []func(context.Context) (map[string][]string, error){
		s.collaborators.Accountant.Allocatable, s.collaborators.Accountant.Held,
	} {
		ids, err := ask(ctx)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Cannot tell what kubelet knows of the resource", "reason", err.Error())
			return
		}
		l.adopt(ids[l.name])
	}
}

// followIncarnation passes on kubelet's incarnation.
func (s *Set) followIncarnation(ctx context.Context) error {
	for {
		presence, changed := s.collaborators.Presence.Latest()
		if presence.Incarnation != s.incarnation.Value() {
			s.incarnation.Publish(presence.Incarnation)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// reapInterval is the pace at which departing devices are looked at, while there are any.
const reapInterval = time.Second

// reap drops departing devices when their time has come, and ends the servers of retired resources that have none left.
func (s *Set) reap(ctx context.Context) error {
	ticker := s.collaborators.Clock.NewTicker(reapInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		var held map[string][]string
		asked := false
		for _, entry := range s.entries() {
			departing, ended := entry.list.leaving()
			if ended { // a tick after its last device was dropped: kubelet has the empty list
				s.end(entry)
			}
			if !departing {
				continue
			}
			if !asked {
				held, asked = s.held(ctx), true
			}
			entry.list.reap(holds(held, entry.list.name))
		}
	}
}

func (s *Set) entries() []*served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.resources))
}

// held returns the devices that pods hold, by resource; nil when kubelet's account cannot be asked.
func (s *Set) held(ctx context.Context) map[string][]string {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	held, err := s.collaborators.Accountant.Held(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot tell which devices pods hold", "reason", err.Error())
		return nil
	}
	return held
}

func holds(held map[string][]string, resource string) func(id string) bool {
	if held == nil {
		return nil
	}
	ids := make(map[string]bool, len(held[resource])) // replicas are counted in thousands
	for _, id := range held[resource] {
		ids[id] = true
	}
	return func(id string) bool { return ids[id] }
}

// end ends the lives of a retired resource, unless the plan has it again.
func (s *Set) end(entry *served) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ended := entry.list.leaving(); ended && entry.stop != nil {
		entry.stop()
	}
}
