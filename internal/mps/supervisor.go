package mps

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// readyMark, in the root, is there while all daemons serve clients; it says how GPUs are shared.
	readyMark = ".ready"
	// lockFile, in the root, is locked by the process that works there.
	lockFile = ".lock"
)

// A Supervisor runs the control daemons of the groups that are wanted. Make it with NewSupervisor.
type Supervisor struct {
	root   string
	wanted *feed.Feed[[]Group]
	modes  Modes

	mu      sync.Mutex // guards all following fields
	serving map[string]bool
	all     int  // groups that are wanted; -1 while that is not known
	failed  bool // the mark could not be written or removed
}

// NewSupervisor returns a Supervisor of daemons below root, a directory. It follows wanted while it
// runs; until something is published there, nil, nothing is known to be wanted.
func NewSupervisor(root string, wanted *feed.Feed[[]Group], modes Modes) *Supervisor {
	return &Supervisor{root: root, wanted: wanted, modes: modes, serving: map[string]bool{}, all: -1}
}

// backoff is that between the lives of a daemon.
var backoff = supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute}

// Run runs daemons until ctx ends; then it ends them, sets the GPUs back, and returns nil. While
// another process works in the root it waits.
func (s *Supervisor) Run(ctx context.Context) error { return supervise.Run(ctx, backoff, s.work) }

func (s *Supervisor) work(ctx context.Context) error {
	unlock, err := lockRoot(s.root)
	if err != nil {
		return err
	}
	defer unlock()
	gpus := newExclusive(s.modes, filepath.Join(s.root, exclusiveMark))
	tasks, claims := map[string]*task{}, map[string]*task{}
	defer func() {
		for _, t := range tasks {
			t.cancel()
		}
		for _, t := range claims {
			t.cancel()
		}
		for _, t := range tasks {
			<-t.done
		}
		for _, t := range claims {
			<-t.done
		}
		s.count(ctx, -1)
	}()
	if err := forgetStarted(s.root); err != nil {
		return err
	}
	look := time.NewTicker(claimPace)
	for {
		groups, changed := s.wanted.Latest()
		ending := 0
		if groups != nil {
			ending = s.adjust(ctx, gpus, tasks, groups)
			s.restoreUnwanted(ctx, gpus, groups)
		}
		for same := true; same; {
			s.adjustClaims(ctx, gpus, claims)
			if ending > 0 {
				ending = s.adjust(ctx, gpus, tasks, groups)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-changed:
				same = false
			case <-look.C:
				s.retryMark(ctx)
			}
		}
	}
}

// adjust ends the tasks of resources that are no longer shared, tells the others what they are to
// serve, and begins those that are missing. A task whose daemon has a GPU that is another one's now
// is ended and begun anew. It returns how many have not ended yet. Only what is to serve a GPU of
// one of these waits for it.
func (s *Supervisor) adjust(ctx context.Context, gpus *exclusive, tasks map[string]*task, groups []Group) (ending int) {
	wanted, of := map[string]Group{}, map[string]string{}
	for _, g := range groups {
		wanted[g.Resource] = g
		for _, uuid := range g.uuids() {
			of[uuid] = g.Resource
		}
	}
	busy := map[string]bool{} // GPUs of those that end
	for name, t := range tasks {
		has := slices.Concat(t.wanted.Value().uuids(), t.has.Value().uuids())
		lost := func(uuid string) bool { now, still := of[uuid]; return still && now != name }
		if _, still := wanted[name]; still && !t.ends && !slices.ContainsFunc(has, lost) {
			continue
		}
		t.ends = true
		t.cancel()
		select {
		case <-t.done:
			delete(tasks, name)
		default:
			ending++
			for _, uuid := range has {
				busy[uuid] = true
			}
		}
	}
	for name, g := range wanted {
		switch t := tasks[name]; {
		case slices.ContainsFunc(g.uuids(), func(uuid string) bool { return busy[uuid] }):
		case t == nil:
			tasks[name] = s.begin(ctx, gpus, g)
		case !t.ends && !slices.Equal(t.wanted.Value().GPUs, g.GPUs):
			t.wanted.Publish(g)
		}
	}
	s.count(ctx, len(wanted)+ending)
	return ending
}

// restoreUnwanted sets GPUs back that an earlier process left in exclusive mode and that no daemon
// needs.
func (s *Supervisor) restoreUnwanted(ctx context.Context, gpus *exclusive, groups []Group) {
	all, err := devices(s.root)
	if err == nil {
		for _, g := range groups {
			all[g.Resource] = g.uuids()
		}
		err = gpus.restoreUnwanted(ctx, slices.Concat(slices.Collect(maps.Values(all))...))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs that nobody wants stay in exclusive mode")
	}
}

// A task runs the daemons of one resource, one after the other.
type task struct {
	wanted *feed.Feed[Group]
	has    *feed.Feed[Group] // what its daemon was started for
	cancel context.CancelFunc
	done   chan struct{}
	ends   bool // it is to end, or removes what is left of a claim
}

func (s *Supervisor) begin(ctx context.Context, gpus *exclusive, g Group) *task {
	ctx, cancel := context.WithCancel(ctx)
	t := &task{wanted: feed.New(g), has: feed.New(g), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		pauses := backoff
		pauses.Nudge = func() <-chan struct{} { _, changed := t.wanted.Latest(); return changed }
		// The error is of a life that gives up, which none does.
		_ = supervise.Run(ctx, pauses, func(ctx context.Context) error { return s.live(ctx, gpus, t) })
		err := gpus.restore(context.WithoutCancel(ctx), g.Resource, t.wanted.Value().exclusive())
		if err == nil && g.Claim != nil { // nothing is left of it but the wish
			err = os.RemoveAll(filepath.Join(s.root, g.Resource))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "GPUs stay in exclusive mode", "resource", g.Resource)
		}
	}()
	return t
}

// errReplaced ends the life of a daemon that does not serve what is wanted now.
var errReplaced = errors.New("another group is wanted")

// live runs a daemon until it dies, or does not serve what is wanted; then it returns nil.
func (s *Supervisor) live(ctx context.Context, gpus *exclusive, t *task) error {
	group := t.wanted.Value()
	t.has.Publish(group)
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	go func() {
		for {
			wanted, changed := t.wanted.Latest()
			if !group.serves(wanted) {
				end(errReplaced)
			}
			if !feed.WaitAny(ctx, changed) {
				return
			}
		}
	}()
	d := &daemon{control: control{dir: filepath.Join(s.root, group.Resource)}, root: s.root, group: group, gpus: gpus}
	err := d.run(ctx, func(serves bool) {
		if group.Claim == nil {
			s.note(ctx, group.Resource, serves)
		} else if err := statefile.Remove(d.folder(failedMark)); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot remove the reason of an earlier failure of MPS", "resource", group.Resource)
		}
	})
	if errors.Is(context.Cause(ctx), errReplaced) {
		return nil
	}
	if err != nil && ctx.Err() == nil && group.Claim != nil { // for the call that waits for it
		err = errors.Join(err, statefile.Replace(d.folder(failedMark), []byte(err.Error()), 0o600))
	}
	return err
}

// note keeps whether a resource's daemon serves clients, and the mark with it.
func (s *Supervisor) note(ctx context.Context, name string, serves bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if serves {
		s.serving[name] = true
	} else {
		delete(s.serving, name)
	}
	s.markLocked(ctx)
}

// count keeps how many daemons there are to be, and the mark with it.
func (s *Supervisor) count(ctx context.Context, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all != all || all < 0 {
		s.all = all
		s.markLocked(ctx)
	}
}

// retryMark sets the mark or takes it back if that failed: the disk was full, for instance.
func (s *Supervisor) retryMark(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed {
		s.markLocked(ctx)
	}
}

// markLocked sets the mark if all daemons serve clients, and takes it back if not.
func (s *Supervisor) markLocked(ctx context.Context) {
	mark := filepath.Join(s.root, readyMark)
	var err error
	if len(s.serving) == s.all {
		err = statefile.Write(mark, []byte(resource.MPS.String()+"\n"), 0o600, nil) // the plugin reads it at any moment
	} else if err = os.Remove(mark); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil && !s.failed {
		klog.FromContext(ctx).Error(err, "Cannot write or remove the mark that MPS is ready", "mark", mark)
	}
	s.failed = err != nil
}
