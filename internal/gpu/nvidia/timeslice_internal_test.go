package nvidia

// This test is inside: no program of a test can be one that does not even end when it is killed, as
// while the driver hangs.

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestTimeSliceOfADriverThatHangs: a program that cannot even be killed keeps nobody waiting, and
// is run no second time for its GPU before it has ended. Other GPUs have nothing to do with it.
func TestTimeSliceOfADriverThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int32
		over := make(chan struct{})
		s := &TimeSlices{run: func(_ context.Context, uuid string, _ int) error {
			if runs.Add(1); uuid == "GPU-a" {
				<-over
			}
			return nil
		}}
		began := time.Now()
		if err := s.Set(t.Context(), "GPU-a", 1); !errors.Is(err, errHangs) {
			t.Errorf("Set() = %v", err)
		}
		if took := time.Since(began); took > smiTimeout+3*time.Second {
			t.Errorf("it took %v", took)
		}
		if err := s.Set(t.Context(), "GPU-a", 0); !errors.Is(err, errHangs) || runs.Load() != 1 {
			t.Errorf("the second time: %v; %d runs", err, runs.Load())
		}
		if err := s.Set(t.Context(), "GPU-b", 1); err != nil {
			t.Error(err)
		}
		close(over)
		synctest.Wait()
		if err := s.Set(t.Context(), "GPU-a", 0); err != nil || runs.Load() != 3 {
			t.Errorf("after its end: %v; %d runs", err, runs.Load())
		}
	})
}
