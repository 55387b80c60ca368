package plugin

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// oneGPU is a resource with one device.
func oneGPU() resource.Resource {
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{{UUID: "GPU-0", Health: inventory.Health{State: inventory.Healthy}}}}
	return resource.New(snapshot, resource.Options{}).Resources[0]
}

func TestADepartingDeviceOutlivesGapsInKubeletsAccount(t *testing.T) {
	held := func(string) bool { return true }
	free := func(string) bool { return false }
	type look struct {
		after time.Duration
		held  func(string) bool // nil: kubelet does not answer
	}
	tests := map[string]struct {
		looks []look
		stays bool
	}{
		"nobody holds it":                      {[]look{{9 * time.Second, free}}, true},
		"nobody held it for the notice":        {[]look{{time.Second, free}, {10 * time.Second, free}}, false},
		"kubelet does not answer once":         {[]look{{time.Hour, held}, {time.Second, nil}}, true},
		"kubelet does not answer for long":     {[]look{{time.Hour, held}, {4 * time.Minute, nil}, {2 * time.Minute, nil}}, false},
		"kubelet knows no pod after its start": {[]look{{time.Hour, held}, {20 * time.Second, nil}, {time.Second, free}, {time.Second, held}}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := clocktesting.NewFakeClock(time.Now())
			r := oneGPU()
			l := newList(r.Name, c)
			l.set(r, Options{})
			l.clear(false)
			for _, look := range test.looks {
				c.Step(look.after)
				l.reap(look.held)
			}
			if departing, _ := l.leaving(); departing != test.stays {
				t.Errorf("still listed: %v, want %v", departing, test.stays)
			}
		})
	}
}
