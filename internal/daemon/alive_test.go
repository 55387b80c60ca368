package daemon_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/lead"
)

// TestStuck: tasks are asked at the same time, and those are named that do not answer.
func TestStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		alive := func(after time.Duration) func(context.Context) error {
			return func(ctx context.Context) error {
				select {
				case <-time.After(after):
					return nil
				case <-ctx.Done():
					return errors.New("no answer")
				}
			}
		}
		l := daemon.NewLiveness(lead.New(lead.Options{}), []daemon.Task{{Name: "a", Alive: alive(time.Hour)}, {Name: "b"}, {Name: "c", Alive: alive(4 * time.Second)}},
			[]daemon.Task{{Name: "d", Alive: alive(time.Hour)}})
		began := time.Now()
		if diff := cmp.Diff([]string{"a: no answer", "d: no answer"}, l.Stuck(t.Context())); diff != "" {
			t.Errorf("stuck (-want +got):\n%s", diff)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("the answer took %s", took)
		}
	})
}
