package claims_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// silentGPUs give no answer about how some GPUs are divided.
type silentGPUs struct {
	*divider
	uuids []string
}

func (s silentGPUs) Partitions(ctx context.Context, uuid string) (inventory.Partitions, error) {
	if slices.Contains(s.uuids, uuid) {
		<-ctx.Done()
		return inventory.Partitions{}, inventory.ErrNoAnswer
	}
	return s.divider.Partitions(ctx, uuid)
}

// TestSilentGPUsInASurvey: how the other GPU is divided is known as soon as one of them would be
// given up.
func TestSilentGPUsInASurvey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.options.Driver = silentGPUs{r.divide(), []string{"GPU-a", "GPU-c"}}
		r.options.Divisions = feed.New(dra.Divisions(nil))
		divided := r.snapshots.Value()
		for i := range divided.GPUs {
			divided.GPUs[i].MIG = inventory.MIGEnabled
		}
		r.snapshots.Publish(divided)
		c, stop := r.start()
		defer stop()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Divide(ctx) }()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		now := r.options.Divisions.Value()
		if b := now["GPU-b"]; b.Fixed != "" || len(b.Profiles) != len(profiles) || now["GPU-a"].Fixed == "" ||
			now["GPU-c"].Fixed == "" {
			t.Errorf("divisions: %+v", now)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
