package mig_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// A layout that is not admitted changes nothing: the GPU stays in service, and the state says why. A
// change that has begun, and instances that a restart of the node removed, are not asked about.
func TestAdmit(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		var admits atomic.Bool
		var asked atomic.Int64
		admit := func(o *mig.Options) {
			o.Admit = func(layout string) error {
				asked.Add(1)
				if layout != "all-1g.10gb" && layout != "all-7g.80gb" {
					t.Errorf("asked about layout %q", layout)
				}
				if admits.Load() {
					return nil
				}
				return errors.New("all slots are in use")
			}
		}
		r.start(admit)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-1g.10gb", GPUs: []string{"0"}})
		r.until("waits for a slot", func(s mig.Status) bool { return strings.Contains(s.Reason, "all slots are in use") })
		r.passes(time.Minute)
		if offered := r.devices()[0]; len(offered) != 1 || offered[0] != "GPU" {
			t.Errorf("%v is offered, want the whole GPU", offered)
		}
		if n := asked.Load(); n < 30 {
			t.Errorf("asked %d times in a minute", n)
		}
		admits.Store(true)
		r.reaches(mig.StateSuccess)

		admits.Store(false)
		begun := make(chan struct{}, 1)
		r.before = func(string, inventory.MIGStep) error {
			select {
			case begun <- struct{}{}:
			default:
			}
			return nil
		}
		admits.Store(true)
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}, OrderNumber: 1})
		<-begun
		admits.Store(false)
		r.start(admit) // another process goes on
		r.reaches(mig.StateSuccess)

		asked.Store(0)
		r.reboots()
		r.start(admit)
		r.until("has its instance again", func(s mig.Status) bool { return s.State == mig.StateSuccess && len(r.devices()[0]) == 1 })
		if n := asked.Load(); n > 0 {
			t.Errorf("asked %d times after a restart of the node", n)
		}
	})
}
