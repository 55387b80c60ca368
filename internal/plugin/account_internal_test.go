package plugin

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// emptyAccount is that of a kubelet that knows no device.
type emptyAccount struct{}

func (emptyAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (emptyAccount) Held(context.Context) ([]kubelet.HeldDevice, error)       { return nil, nil }

func TestTheAccountIsComparedWhilePlansThatSayTheSameKeepComing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r := oneGPU()
		l := &life{Collaborators: Collaborators{Accountant: emptyAccount{}, Clock: clock.RealClock{}}, list: newList(r.Name, clock.RealClock{}),
			compared: func(string) {}}
		l.list.set(r, Options{})
		var plans sync.WaitGroup
		plans.Go(func() {
			for ctx.Err() == nil {
				l.list.set(r, Options{})
				select {
				case <-ctx.Done():
				case <-time.After(checkSoon / 2):
				}
			}
		})
		_, err := l.checkAccount(ctx)
		if !errors.Is(err, errDisagrees) {
			t.Errorf("checkAccount() = %v, want %v", err, errDisagrees)
		}
		cancel()
		plans.Wait()
	})
}
