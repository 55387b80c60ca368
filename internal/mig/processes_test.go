package mig_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// second starts the Controller of another process with its own layout. It leads from now on, while
// the first one may still change GPUs. The returned function ends the first one.
func (r *rig) second(desired mig.DesiredLayout, more ...func(*mig.Options)) (end func()) {
	first := r.stop
	r.stop = func() {}
	r.desired = feed.New(desired)
	var ended atomic.Bool
	r.start(append(more, func(o *mig.Options) {
		o.PreviousLeader = func() error {
			if ended.Load() {
				return nil
			}
			return errors.New("it has not ended")
		}
	})...)
	return func() {
		first()
		ended.Store(true)
	}
}

// A hanging previous leader may still change GPUs: the new leader waits for its end, and advertises
// the existing devices.
func TestPreviousLeader(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		end := r.second(mig.DesiredLayout{Layout: "all-balanced"})
		r.reaches(mig.StateSuccess)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-disabled"})
		r.until("waits", func(s mig.Status) bool { return strings.Contains(s.Reason, "it has not ended") })
		r.passes(time.Minute)
		if diff := cmp.Diff(balanced, r.devices()[0]); diff != "" || len(r.uuids(0, "3g.40gb")) != 1 {
			t.Errorf("offered meanwhile (-want +got):\n%s", diff)
		}
		end()
		r.reaches(mig.StateSuccess)
	})
}

// The next version starts during a step of this process. It advertises no device of the GPU before
// the change is over.
func TestChangeByAnotherProcess(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		began, goOn := make(chan struct{}), make(chan struct{})
		begin, release := sync.OnceFunc(func() { close(began) }), sync.OnceFunc(func() { close(goOn) })
		t.Cleanup(release)
		r.before = func(string, inventory.MIGStep) error {
			begin()
			<-goOn
			return nil
		}
		r.start()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}})
		<-began
		end := r.second(mig.DesiredLayout{})
		defer func() { release(); end() }()
		r.until("has decided", func(s mig.Status) bool { return len(s.GPUs) == 3 && s.GPUs[0].Phase == mig.PhaseWaiting })
		r.passes(time.Minute)
		if d := r.devices(); len(d[0]) != 0 || len(d[1]) != 1 || len(d[2]) != 1 {
			t.Errorf("offered during a step of the other process: %v", d)
		}
		release()
		r.until("sees the end", func(s mig.Status) bool { return s.GPUs[0].Phase == mig.PhaseKept })
		if diff := cmp.Diff(balanced, r.devices()[0]); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// A process that does not change GPUs advertises none whose layout must be restored.
func TestAnotherProcessAfterNodeRestart(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		r.reboots()
		r.absent = errors.New("kubelet does not run")
		r.start()
		r.until("waits for kubelet", func(s mig.Status) bool { return strings.Contains(s.Reason, "kubelet does not run") })
		defer r.second(mig.DesiredLayout{})()
		r.until("waits for the other process", func(s mig.Status) bool {
			return len(s.GPUs) == 3 && strings.Contains(s.GPUs[0].Reason, "another process of this program divides the GPUs")
		})
		r.passes(time.Minute)
		if d := r.devices()[0]; len(d) > 0 { // of the others, the mode outlives a restart, and nobody is waited for
			t.Errorf("offered before the layout stands: %v", d)
		}
		r.mu.Lock()
		r.absent = nil
		r.mu.Unlock()
		r.until("sees the end", func(s mig.Status) bool { return s.GPUs[0].Phase == mig.PhaseKept })
		if diff := cmp.Diff(balanced, r.devices()[0]); diff != "" {
			t.Errorf("offered (-want +got):\n%s", diff)
		}
	})
}

// The orders of the previous process are known before any change.
func TestTakeOver(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makes("all-balanced")
		steps := 0
		end := r.second(mig.DesiredLayout{Layout: "all-disabled"}, func(o *mig.Options) {
			o.TakeOver = func(context.Context) { r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced"}) }
		})
		r.until("waits", func(s mig.Status) bool { return strings.Contains(s.Reason, "it has not ended") })
		r.mu.Lock()
		r.before = func(string, inventory.MIGStep) error { steps++; return nil }
		r.mu.Unlock()
		end()
		r.until("is content", func(s mig.Status) bool { return s.State == mig.StateSuccess && s.Layout == "all-balanced" })
		if steps > 0 {
			t.Errorf("%d steps for a layout that is not the latest", steps)
		}
	})
}
