package listing_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestACallThatIsRefused: the answer says why, and the pod holds nothing.
func TestACallThatIsRefused(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ids  []string
		says string
		kind listing.Refusal
	}{
		"no device":             {nil, "requests no device", listing.Invalid},
		"an empty ID":           {[]string{"G0", ""}, "empty ID", listing.Invalid},
		"twice":                 {[]string{"G0", "G0"}, "requested twice", listing.Invalid},
		"one is not Healthy":    {[]string{"G0", "G1"}, "device G1 is not healthy", listing.Withheld},
		"one may not be given":  {[]string{"G0", "G2"}, "a claim has G2", listing.Withheld},
		"unknown":               {[]string{"G9"}, "unknown device: G9", listing.Unknown},
		"a long ID":             {[]string{strings.Repeat("x", 300)}, "... (300 bytes)", listing.Unknown},
		"of a list that is not": {[]string{"G0"}, "unknown device: G0", listing.Unknown},
	} {
		c := newNode(t, 3)
		c.gpus[1].Health.State = inventory.Unhealthy
		c.mayGive = func(devices []resource.Device) error {
			for _, d := range devices {
				if d.UUID == "G2" {
					return errors.New("a claim has G2")
				}
			}
			return nil
		}
		c.plan(1)
		if name == "of a list that is not" {
			c.State = c.Remove(gpuName)
		}
		before := c.Latest()
		next, answer := c.Allocate(gpuName, [][]string{tt.ids}, c.mayGive, c.holders, c.now)
		_, err := answer.Devices(tt.ids)
		var refused *listing.RefusalError
		if !errors.As(err, &refused) || refused.Kind != tt.kind || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v", name, err)
		}
		if next.Latest() != before {
			t.Errorf("%s: there is another decision", name)
		}
		if held := c.holders.IsHeld(keyOf(gpuName, "G0")); held {
			t.Errorf("%s: a pod counts as the holder of G0: %v", name, held)
		}
	}
}
