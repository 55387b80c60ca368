package daemon

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestDevicesThatCannotBeNamed: GPUs with impossible UUIDs, and one with a UUID that becomes
// another's while it is served, are left out, and containers get the others.
func TestDevicesThatCannotBeNamed(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	faults := []simulator.Fault{{Kind: simulator.KindAnswer, Call: "DeviceGetCount", Value: "4294967295"}}
	for gpu, uuid := range map[string]string{
		"1": `""`, "2": `"GPU-\xff\xfe"`, "3": `"GPU-0\nGPU-1"`, "4": "GPU-0,GPU-1", "5": "GPU/0",
		"6": strings.Repeat("x", 1_000_000),
	} {
		faults = append(faults, simulator.Fault{Kind: simulator.KindAnswer, GPU: gpu, Call: "DeviceGetUUID", Value: uuid})
	}
	s.broken(faults...)
	s.start()
	s.shows(2, 2)
	s.admit("first", 2)
	s.says("six GPUs are left out, each for its UUID", func(now status) bool {
		return len(now.LeftOut) == 6 && !slices.ContainsFunc(now.LeftOut,
			func(why string) bool { return !strings.Contains(why, "its UUID") })
	})

	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	kept, becomes := profile.GPUs[7].UUID, profile.GPUs[0].UUID
	s.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceGetUUID", Value: kept})
	s.allocatable(1)
	if devices := s.Devices(gpu); !devices[kept] || devices[becomes] {
		t.Errorf("devices: %v, want %s Healthy and %s not", devices, kept, becomes)
	}
}
