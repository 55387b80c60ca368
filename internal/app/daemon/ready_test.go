package daemon_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
)

// TestReadinessStays: tasks are asked until all are ready, and never again.
func TestReadinessStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		began := time.Now()
		after := func(d time.Duration, late, good string) daemon.Task {
			return daemon.Task{Name: late, Ready: func(context.Context) (bool, string) {
				asked.Add(1)
				if time.Since(began) < d {
					return false, late
				}
				return true, good
			}}
		}
		r := daemon.NewReadiness(lead.New(lead.Options{}), []daemon.Task{{Name: "always"}, after(10*time.Second, "a is late", "")},
			[]daemon.Task{after(20*time.Second, "b is late", "b is empty")})
		ended := make(chan error, 1)
		go func() { ended <- r.Run(klog.NewContext(t.Context(), klog.Logger{})) }()
		for _, tt := range []struct {
			at     time.Duration
			ready  bool
			reason string
		}{
			{0, false, "the daemon is starting"},
			{5 * time.Second, false, "a is late; b is late"},
			{15 * time.Second, false, "b is late"},
			{25 * time.Second, true, "b is empty"},
		} {
			time.Sleep(time.Until(began.Add(tt.at)))
			synctest.Wait()
			if got := r.Answer().Value(); got.Ready != tt.ready || got.Reason != tt.reason || got.Since.IsZero() {
				t.Errorf("after %s: %+v, want %t, %q", tt.at, got, tt.ready, tt.reason)
			}
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		before := asked.Load()
		if time.Sleep(time.Hour); asked.Load() != before {
			t.Error("tasks are asked although all were ready")
		}
	})
}
