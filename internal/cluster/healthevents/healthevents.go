// Package healthevents sends the health of the GPUs to NVSentinel, as one event for each change of
// the state of a GPU. ADR 84 has the reasons.
//
// A file records the last event that the receiver got for each GPU. An event is saved before it is
// sent, and is sent again until the receiver accepts it. A new receiver, which may have lost what an
// earlier one accepted, gets the last event of every GPU again, unchanged.
package healthevents

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// File is the name of the file in the state directory.
const File = "healthevents.json"

const (
	fileVersion = 1
	maxFile     = 4 << 20
	// diskPatience limits the wait for the disk.
	diskPatience = 2 * time.Second
	// worseAfter and betterAfter are how long a state must last before it is an event: often one fault
	// follows another at once, and a GPU may flap after a repair. The condition of the Node waits as
	// long.
	worseAfter  = time.Second
	betterAfter = 30 * time.Second
	// socketInterval is the interval of checks for a new receiver.
	socketInterval = 10 * time.Second
	// sendTimeout limits one call, and maxRetry the pause after a failure.
	sendTimeout = 10 * time.Second
	maxRetry    = time.Minute
)

// Options configure a Reporter.
type Options struct {
	Configs   *feed.Feed[config.Config]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Unproven returns why CUDA is not proven on devices, by UUID, and a channel that is closed when
	// the result may have changed.
	Unproven func(inventory.Snapshot) (map[string]string, <-chan struct{})
	// Repairs is what the daemon does about GPUs whose remedy is a reset; nil if it does nothing.
	Repairs *feed.Feed[repair.Status]
	// Lead returns why this process does not lead; nil if it leads.
	Lead func() error
	// Node is the name of the node.
	Node string
	// StateDir is the folder of the file; empty for none.
	StateDir string
	// Sent counts events that the receiver accepted, or did not accept in one try.
	Sent func(accepted bool, events int)
	// Clock is used for waiting; nil means the real clock. Timeout limits one call; 0 means 10 s.
	Clock   clock.Clock
	Timeout time.Duration
}

// A Reporter sends the events of a node. Create it with New, and call Run once.
type Reporter struct {
	o     Options
	disk  *statefile.Disk
	state state
	// unsaved is true while the file differs from state.
	unsaved bool
	// newer are states that have not lasted long enough, by UUID.
	newer map[string]candidate
	// tried is the receiver of the last failed call, failures the number of failed calls in a row, and
	// retryAt the time of the next one.
	tried    string
	failures int
	retryAt  time.Time
	// problem is why events were not sent, and unsavedProblem why the file is out of date, as last
	// logged.
	problem, unsavedProblem string
}

// state is the content of the file.
type state struct {
	Version int `json:"version"`
	// Receiver is the instance that accepted the events of GPUs.
	Receiver string `json:"receiver,omitempty"`
	// GPUs has the last event of each GPU, by UUID.
	GPUs map[string]delivery `json:"gpus"`
}

// A delivery is the last event of a GPU.
type delivery struct {
	Event
	// Accepted is true if Receiver has accepted the event. An event that is not accepted may have
	// arrived all the same.
	Accepted bool `json:"accepted"`
}

// A candidate is a state that is not an event yet.
type candidate struct {
	Event
	since time.Time
}

// A gpuEvent is an event with the GPU that it is about.
type gpuEvent struct {
	Event
	uuid string
}

// New returns a Reporter that has not read its file.
func New(o Options) *Reporter {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Repairs == nil {
		o.Repairs = feed.New(repair.Status{})
	}
	if o.Timeout == 0 {
		o.Timeout = sendTimeout
	}
	return &Reporter{o: o, disk: statefile.NewDisk(), state: state{Version: fileVersion, GPUs: map[string]delivery{}},
		newer: map[string]candidate{}}
}

// Run sends events while the configuration names a receiver, until ctx ends.
func (r *Reporter) Run(ctx context.Context) {
	isRead := false
	for ctx.Err() == nil {
		c, configChanged := r.o.Configs.Latest()
		if c.Features.HealthEvents == "" {
			clear(r.newer)
			feed.WaitAny(ctx, configChanged)
			continue
		}
		if !isRead {
			isRead = true
			r.recall(ctx)
		}
		s, snapshotChanged := r.o.Snapshots.Latest()
		unproven, proved := r.o.Unproven(s)
		repairs, repairsChanged := r.o.Repairs.Latest()
		wait := r.update(s, unproven, manual(repairs), c.Features)
		r.save(ctx)
		wait = min(wait, r.deliver(ctx, strings.TrimPrefix(c.Features.HealthEvents, config.UnixScheme)))
		r.save(ctx)
		select {
		case <-ctx.Done():
		case <-configChanged:
		case <-snapshotChanged:
		case <-proved:
		case <-repairsChanged:
		case <-r.o.Clock.After(wait):
		}
	}
}

// manual returns the GPUs that the daemon's resets did not repair, by UUID.
func manual(s repair.Status) map[string]bool {
	all := map[string]bool{}
	for _, step := range s.Steps {
		all[step.UUID] = step.State == repair.Manual
	}
	return all
}

// recall reads the file. Without it, every GPU gets an event, and so does a receiver that already
// has one.
func (r *Reporter) recall(ctx context.Context) {
	if r.o.StateDir == "" {
		return
	}
	saved, err := statefile.Within(ctx, r.disk, diskPatience, func() (s state, err error) {
		_, err = statefile.ReadState(r.path(), maxFile, fileVersion, &s)
		return s, err
	})
	if err != nil {
		klog.FromContext(ctx).Info("Cannot read which events NVSentinel has; sending the health of all GPUs", "file",
			r.path(), "reason", err.Error())
		return
	}
	r.state.Receiver = saved.Receiver
	maps.Copy(r.state.GPUs, saved.GPUs)
}

func (r *Reporter) path() string { return filepath.Join(r.o.StateDir, File) }

// update makes events of the states that have lasted long enough, and returns the time until the
// next one may have.
func (r *Reporter) update(
	s inventory.Snapshot, unproven map[string]string, manual map[string]bool, f config.Features,
) time.Duration {
	now, wait := r.o.Clock.Now(), socketInterval
	for _, g := range s.GPUs {
		wanted, known := judge(g, s.Stale != "", unproven, f)
		if manual[g.UUID] && wanted.Action == ComponentReset {
			wanted.Action = ContactSupport
		}
		last, exists := r.state.GPUs[g.UUID]
		// The receiver looks for what it has by its entities, and clears it only if it may act.
		if exists && !last.Healthy {
			wanted.PCI, wanted.Execute = last.PCI, wanted.Execute || last.Execute
		}
		if !known || g.UUID == "" || exists && wanted.isSame(last.Event) {
			delete(r.newer, g.UUID)
			continue
		}
		next, pending := r.newer[g.UUID]
		if !pending || !next.isSame(wanted) || next.since.After(now) {
			next.since = now
		}
		next.Event = wanted
		r.newer[g.UUID] = next
		patience := worseAfter
		if wanted.Healthy {
			patience = betterAfter
		}
		if left := patience - now.Sub(next.since); left > 0 {
			wait = min(wait, left)
			continue
		}
		delete(r.newer, g.UUID)
		wanted.At = r.uniqueTime(next.since)
		r.state.GPUs[g.UUID] = delivery{Event: wanted}
		r.unsaved = true
	}
	r.forget(s)
	return wait
}

// uniqueTime returns the first time from t on that no event has: the receiver may tell events apart
// by their times alone.
func (r *Reporter) uniqueTime(t time.Time) time.Time {
	t = t.UTC().Round(0)
	for _, d := range r.state.GPUs {
		if !d.At.Before(t) {
			t = d.At.Add(time.Nanosecond)
		}
	}
	return t
}

// forget removes healthy GPUs that the node no longer has. For one that was not healthy, nobody
// knows what became of it.
func (r *Reporter) forget(s inventory.Snapshot) {
	if s.Stale != "" || len(s.GPUs) == 0 {
		return
	}
	for uuid, d := range r.state.GPUs {
		if _, exists := s.GPU(uuid); !exists && d.Healthy && d.Accepted {
			delete(r.state.GPUs, uuid)
			r.unsaved = true
		}
	}
}

// save writes the file if it is out of date. Events are sent even if that fails: after a restart, the
// receiver may then get an event once more.
func (r *Reporter) save(ctx context.Context) {
	if !r.unsaved || r.o.StateDir == "" {
		return
	}
	now := r.state
	now.GPUs = maps.Clone(now.GPUs)
	// Not ended by ctx: a write that ends later could replace that of the next Reporter.
	err := r.disk.Do(context.WithoutCancel(ctx), diskPatience, func() error {
		return statefile.WriteStateIf(r.path(), now, r.o.Lead)
	})
	if err == nil {
		r.unsaved, r.unsavedProblem = false, ""
		return
	}
	if r.o.Lead() == nil && ctx.Err() == nil && err.Error() != r.unsavedProblem {
		r.unsavedProblem = err.Error()
		klog.FromContext(ctx).Info("Cannot record which events NVSentinel has; after a restart, it may get them again",
			"file", r.path(), "reason", err.Error())
	}
}

// deliver sends the events that the receiver does not have, and returns the time until the next try
// or the next check for a new receiver.
func (r *Reporter) deliver(ctx context.Context, socket string) time.Duration {
	receiver, err := instance(socket)
	if err == nil && receiver != r.state.Receiver && r.isAnyAccepted() {
		for uuid, d := range r.state.GPUs {
			d.Accepted = false
			r.state.GPUs[uuid] = d
		}
		r.unsaved = true
	}
	var batch []gpuEvent
	for uuid, d := range r.state.GPUs {
		if !d.Accepted {
			batch = append(batch, gpuEvent{Event: d.Event, uuid: uuid})
		}
	}
	now := r.o.Clock.Now()
	if len(batch) == 0 || r.o.Lead() != nil {
		return socketInterval
	}
	if left := r.retryAt.Sub(now); err == nil && receiver == r.tried && left > 0 && left <= maxRetry {
		return min(left, socketInterval)
	}
	slices.SortFunc(batch, func(a, b gpuEvent) int { return a.At.Compare(b.At) })
	if err == nil {
		calling, cancel := context.WithTimeout(ctx, r.o.Timeout)
		err = send(calling, socket, encode(r.o.Node, batch))
		cancel()
		if ctx.Err() != nil { // whether it arrived is unknown
			return 0
		}
		r.o.Sent(err == nil, len(batch))
	}
	r.log(ctx, err, len(batch))
	if err != nil {
		r.tried, r.failures = receiver, min(r.failures+1, 16)
		pause := min(time.Second<<(r.failures-1), maxRetry)
		r.retryAt = r.o.Clock.Now().Add(pause)
		return min(pause, socketInterval)
	}
	r.tried, r.failures = "", 0
	r.state.Receiver = receiver
	for _, e := range batch {
		d := r.state.GPUs[e.uuid]
		d.Accepted = true
		r.state.GPUs[e.uuid] = d
	}
	r.unsaved = true
	return socketInterval
}

// isAnyAccepted reports whether a receiver has accepted an event.
func (r *Reporter) isAnyAccepted() bool {
	for _, d := range r.state.GPUs {
		if d.Accepted {
			return true
		}
	}
	return false
}

// log logs the result of a call, and a failure only if it differs from the last one.
func (r *Reporter) log(ctx context.Context, err error, events int) {
	switch {
	case err == nil:
		klog.FromContext(ctx).Info("Sent health events to NVSentinel", "events", events)
		r.problem = ""
	case err.Error() != r.problem:
		klog.FromContext(ctx).Info("NVSentinel does not accept health events; they are sent when it does",
			"events", events, "reason", err.Error())
		r.problem = err.Error()
	}
}
