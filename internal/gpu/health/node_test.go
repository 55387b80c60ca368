package health_test

import (
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

func TestNodeWide(t *testing.T) {
	healthy := begin(t, 580).gpu
	read := func(r inventory.Reading) health.GPU {
		s := begin(t, 580)
		s.reads(1, r)
		return s.gpu
	}
	silent := func(why string) health.GPU {
		s := begin(t, 580)
		return s.policy.FoldSilence(s.gpu, why, s.now)
	}
	reboot, reset := read(asking(inventory.RecoveryNodeReboot)), read(asking(inventory.RecoveryGPUReset))
	lost := read(inventory.Reading{Contact: inventory.ContactLost})
	failing := read(inventory.Reading{Contact: inventory.ContactFailing, Reason: "unknown error"})
	for name, tt := range map[string]struct {
		gpus []health.GPU
		want bool
	}{
		"no GPU":                       {nil, false},
		"one GPU":                      {[]health.GPU{reboot}, false},
		"all good":                     {[]health.GPU{healthy, healthy}, false},
		"a reboot for all":             {[]health.GPU{reboot, reboot, reboot}, true},
		"a reboot for some":            {[]health.GPU{reboot, healthy, reboot}, false},
		"a reset for all is each's":    {[]health.GPU{reset, reset}, false},
		"a reboot and a reset":         {[]health.GPU{reboot, reset}, false},
		"calls fail everywhere":        {[]health.GPU{failing, failing}, true},
		"all lost, each for itself":    {[]health.GPU{lost, lost}, false},
		"a failing one and a reset":    {[]health.GPU{failing, reset}, false},
		"a reset and a failing one":    {[]health.GPU{reset, failing}, false},
		"nobody answers":               {[]health.GPU{silent("it hangs"), silent("it hangs")}, true},
		"nobody answers but for a lot": {slices.Repeat([]health.GPU{silent("it hangs"), reset}, 4), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := health.NodeWide(tt.gpus); (got != "") != tt.want {
				t.Errorf("NodeWide = %q, want a reason: %v", got, tt.want)
			}
		})
	}
}
