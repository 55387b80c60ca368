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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps/exclusive"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const (
	// readyMark, in the root, exists while all daemons serve clients. Its text is the way of sharing.
	readyMark = ".ready"
	// exclusiveMark, in the root, is the mark of exclusive.GPUs.
	exclusiveMark = ".exclusive"
	// lockFile, in the root, is locked by the Supervisor of the root.
	lockFile = ".lock"
)

// A Supervisor runs the control daemons of the wanted groups. Create a Supervisor with
// NewSupervisor.
type Supervisor struct {
	root   string
	wanted *feed.Feed[[]Group]
	modes  exclusive.Modes

	mu         sync.Mutex // guards all following fields
	isServing  map[string]bool
	groups     int  // number of wanted groups; -1 if not known
	markFailed bool // the mark could not be written or removed
}

// NewSupervisor returns a Supervisor of the daemons below root, a directory. Run follows wanted; a
// nil value means that the wanted groups are unknown.
func NewSupervisor(root string, wanted *feed.Feed[[]Group], modes exclusive.Modes) *Supervisor {
	return &Supervisor{root: root, wanted: wanted, modes: modes, isServing: map[string]bool{}, groups: -1}
}

// backoff is the pause between two runs of a daemon.
var backoff = supervise.Backoff{First: time.Second, Most: 30 * time.Second, Proven: time.Minute}

// Run runs daemons until ctx ends. Then it stops the daemons, restores the modes of the GPUs, and
// returns nil. It waits for another process with the lock of the root.
func (s *Supervisor) Run(ctx context.Context) error { return supervise.Run(ctx, backoff, s.work) }

func (s *Supervisor) work(ctx context.Context) error {
	unlock, err := lockRoot(s.root)
	if err != nil {
		return err
	}
	defer unlock()
	gpus := exclusive.New(s.modes, filepath.Join(s.root, exclusiveMark))
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
		s.setGroups(ctx, -1)
	}()
	if err := removeStartedMarks(s.root); err != nil {
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

// adjust stops the tasks of resources no longer shared, passes the wanted groups to the other
// tasks, and starts missing tasks. A task is restarted if the daemon has a GPU that now belongs to
// another resource. Only a daemon that needs a GPU of a stopping task waits. adjust returns the
// number of stopping tasks.
func (s *Supervisor) adjust(ctx context.Context, gpus *exclusive.GPUs, tasks map[string]*task,
	groups []Group) (ending int) {
	wanted, of := map[string]Group{}, map[string]string{}
	for _, g := range groups {
		wanted[g.Resource] = g
		for _, uuid := range g.uuids() {
			of[uuid] = g.Resource
		}
	}
	busy := map[string]bool{} // GPUs of the stopping tasks
	for name, t := range tasks {
		has := slices.Concat(t.wanted.Value().uuids(), t.current.Value().uuids())
		lost := func(uuid string) bool { now, still := of[uuid]; return still && now != name }
		if _, still := wanted[name]; still && !t.isEnding && !slices.ContainsFunc(has, lost) {
			continue
		}
		t.isEnding = true
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
		case !t.isEnding && !slices.Equal(t.wanted.Value().GPUs, g.GPUs):
			t.wanted.Publish(g)
		}
	}
	s.setGroups(ctx, len(wanted)+ending)
	return ending
}

// restoreUnwanted restores the modes of GPUs that an earlier process left in exclusive mode and no
// daemon needs.
func (s *Supervisor) restoreUnwanted(ctx context.Context, gpus *exclusive.GPUs, groups []Group) {
	all, err := devices(s.root)
	if err == nil {
		for _, g := range groups {
			all[g.Resource] = g.uuids()
		}
		err = gpus.RestoreUnwanted(ctx, slices.Concat(slices.Collect(maps.Values(all))...))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs without an MPS control daemon stay in exclusive mode")
	}
}

// A task runs the daemons of a resource, one after the other.
type task struct {
	wanted   *feed.Feed[Group]
	current  *feed.Feed[Group] // the group of the running daemon
	cancel   context.CancelFunc
	done     chan struct{}
	isEnding bool // the task stops, or only removes the files of a claim
}

func (s *Supervisor) begin(ctx context.Context, gpus *exclusive.GPUs, g Group) *task {
	ctx, cancel := context.WithCancel(ctx)
	t := &task{wanted: feed.New(g), current: feed.New(g), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		pauses := backoff
		pauses.Nudge = func() <-chan struct{} { _, changed := t.wanted.Latest(); return changed }
		// Run returns an error only for a run that gives up; none does.
		_ = supervise.Run(ctx, pauses, func(ctx context.Context) error { return s.runDaemon(ctx, gpus, t) })
		err := gpus.Restore(context.WithoutCancel(ctx), g.Resource, t.wanted.Value().exclusive())
		if err == nil && g.Claim != nil { // only the request remains
			err = os.RemoveAll(filepath.Join(s.root, g.Resource))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "GPUs stay in exclusive mode", "resource", g.Resource)
		}
	}()
	return t
}

// errReplaced stops a daemon that does not serve the wanted group.
var errReplaced = errors.New("another group is wanted")

// runDaemon runs a daemon until it exits. It returns nil if the daemon does not serve the wanted
// group any more.
func (s *Supervisor) runDaemon(ctx context.Context, gpus *exclusive.GPUs, t *task) error {
	group := t.wanted.Value()
	t.current.Publish(group)
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
			s.setServing(ctx, group.Resource, serves)
		}
	})
	if errors.Is(context.Cause(ctx), errReplaced) {
		return nil
	}
	if err != nil && ctx.Err() == nil && group.Claim != nil { // for the call that waits for the daemon
		err = errors.Join(err, statefile.Replace(d.folder(failedMark), []byte(err.Error()), 0o600))
	}
	return err
}

// setServing records whether the daemon of a resource serves clients, and updates the mark.
func (s *Supervisor) setServing(ctx context.Context, name string, serves bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if serves {
		s.isServing[name] = true
	} else {
		delete(s.isServing, name)
	}
	s.markLocked(ctx)
}

// setGroups records the number of wanted groups, and updates the mark.
func (s *Supervisor) setGroups(ctx context.Context, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.groups != n || n < 0 {
		s.groups = n
		s.markLocked(ctx)
	}
}

// retryMark writes or removes the mark again after a failure, such as a full disk.
func (s *Supervisor) retryMark(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.markFailed {
		s.markLocked(ctx)
	}
}

// markLocked writes the mark if all daemons serve clients, and otherwise removes it.
func (s *Supervisor) markLocked(ctx context.Context) {
	mark := filepath.Join(s.root, readyMark)
	var err error
	if len(s.isServing) == s.groups {
		// Written atomically, because the plugin may read the mark at any time.
		err = statefile.Write(mark, []byte(resource.MPS.String()+"\n"), 0o600, nil)
	} else if err = os.Remove(mark); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil && !s.markFailed {
		klog.FromContext(ctx).Error(err, "Cannot write or remove the mark that MPS is ready", "mark", mark)
	}
	s.markFailed = err != nil
}
