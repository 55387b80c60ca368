package cli_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// planText returns what mig apply prints about a GPU of a daemon's plan.
func planText(t *testing.T, gpu layout.PlannedGPU) string {
	t.Helper()
	gpu.Index, gpu.Model, gpu.UUID = 1, "H100", "GPU-1"
	socket, _ := answering(t, map[string][]any{daemon.CallMIGApply: {daemon.OrderedMIG{
		Plan: &layout.Planned{Layout: "a", Possible: true, GPUs: []layout.PlannedGPU{gpu}}}}})
	text, err := printed(t, "mig", "apply", "--layout=a", "--dry-run", "--control-socket", socket)
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(text, "\n\nGPU 1  H100  GPU-1\n")
	if !found {
		t.Fatalf("the GPU is not in %s", text)
	}
	return text
}

// TestRowsOfMIG: instances are in their places, what is free is too, and a text never leaves its
// place.
func TestRowsOfMIG(t *testing.T) {
	t.Parallel()
	eighth := strings.Repeat(" ", 10)
	for name, test := range map[string]struct {
		p    layout.PlannedPartitions
		want string
	}{
		"off":      {layout.PlannedPartitions{MIG: "disabled", MemorySlices: 8}, "MIG disabled"},
		"none":     {layout.PlannedPartitions{MIG: "unsupported"}, "MIG unsupported"},
		"not read": {layout.PlannedPartitions{MIG: "enabled"}, "MIG enabled, not known how it is divided"},
		"empty":    {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8}, strings.Repeat("|"+eighth, 8) + "|"},
		"at the end": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
			Instances: []layout.PlannedInstance{{Profile: "1g.10gb", Start: 7, Size: 1,
				Devices: []string{"1g.10gb"}}}}, strings.Repeat("|"+eighth, 7) + "|1g.10gb   |"},
		"a long name": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
			Instances: []layout.PlannedInstance{{Profile: "1g.10gb+me.all", Size: 1}}}, "|1g.10gb+me" +
			strings.Repeat("|"+eighth, 7) + "|"},
		"without parts": {layout.PlannedPartitions{MIG: "enabled", MemorySlices: 4,
			Instances: []layout.PlannedInstance{{Profile: "2g.12gb", Size: 2}}}, "|" + "2g.12gb empty" +
			strings.Repeat(" ", 30) + strings.Repeat("|"+strings.Repeat(" ", 21), 2) + "|"},
	} {
		text := planText(t, layout.PlannedGPU{Before: test.p, After: test.p})
		if want := "  before  " + test.want + "\n  nothing to do\n"; !strings.HasSuffix("\n"+text, "\n"+want) {
			t.Errorf("%s:\n%s, want\n%s", name, text, want)
		}
	}
	for slices, want := range map[int]int{1: 88, 8: 11, 12: 7, 88: 1, 100: 1} {
		p := layout.PlannedPartitions{MIG: "enabled", MemorySlices: slices}
		row := strings.Repeat("|"+strings.Repeat(" ", want-1), slices) + "|"
		if text := planText(t, layout.PlannedGPU{Before: p, After: p}); !strings.Contains(text, "  before  "+row+"\n") {
			t.Errorf("%d slices: %s, want %d columns for each", slices, text, want)
		}
	}
}

// TestGPUsOfAPlan: the ruler is there where instances are, and a GPU that is not changed has one
// line.
func TestGPUsOfAPlan(t *testing.T) {
	t.Parallel()
	id := 3
	kept := layout.PlannedInstance{ID: &id, Profile: "1g.10gb", Start: 1, Size: 1, Devices: []string{"1g.10gb"},
		InUse: true}
	off, on := layout.PlannedPartitions{MIG: "disabled"}, layout.PlannedPartitions{MIG: "enabled", MemorySlices: 2,
		Instances: []layout.PlannedInstance{kept}}
	there := layout.PlannedInstance{ID: &id, Profile: "3g.40gb", Start: 4, Size: 4,
		Devices: []string{"a", "1c.3g.40gb", "1c.3g.40gb", "a"}}
	ruled := "  slice    0" + strings.Repeat(" ", 43) + "1\n"
	row := "|" + strings.Repeat(" ", 43) + "|1g.10gb" + strings.Repeat(" ", 36) + "|\n"
	for name, test := range map[string]struct {
		gpu  layout.PlannedGPU
		want string
	}{
		"nothing to do": {layout.PlannedGPU{Before: on, After: on}, ruled + "  before  " + row + "  nothing to do\n"},
		"off":           {layout.PlannedGPU{Before: off, After: off}, "  before  MIG disabled\n  nothing to do\n"},
		"left out":      {layout.PlannedGPU{Before: off, After: off, Note: "n"}, "  before  MIG disabled\n  stays: n\n"},
		"not possible": {layout.PlannedGPU{Before: off, After: off, Reason: "r", Note: "n"},
			"  before  MIG disabled\n  not possible: r\n"},
		"switched on": {layout.PlannedGPU{Before: off, After: on,
			Steps: []layout.PlannedStep{{Action: inventory.MIGEnable}}}, ruled + "  before  MIG disabled\n  after   " + row +
			"   1. enable MIG mode while nothing uses the GPU\n   =  GPU instance 3, 1g.10gb at slice 1 stays, in use\n"},
		"switched off": {layout.PlannedGPU{Before: on, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGDisable}}}, ruled + "  before  " + row +
			"  after   MIG disabled\n   1. disable MIG mode while nothing uses the GPU\n"},
		"many steps": {layout.PlannedGPU{Before: off, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGCreateInstance, GPU: &layout.PlannedInstance{
				Profile: "7g.80gb", Size: 8, Devices: []string{"1c.7g.80gb", "2c.7g.80gb", "1c.7g.80gb", "3c.7g.80gb"},
			}}}}, "  before  MIG disabled\n  after   MIG disabled\n" +
			"   1. create GPU instance 7g.80gb at slices 0 to 7, with 1c.7g.80gb, 2c.7g.80gb, 1c.7g.80gb,\n      3c.7g.80gb\n"},
		"compute instances in an instance that stays": {layout.PlannedGPU{Before: off, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGCreateCompute, GPU: &there},
				{Action: inventory.MIGCreateCompute, GPU: &there}}}, "  before  MIG disabled\n  after   MIG disabled\n" +
			"   1. create a, 2 x 1c.3g.40gb, a in GPU instance 3, 3g.40gb at slices 4 to 7\n"},
		"a reset, and an instance in use": {layout.PlannedGPU{Before: off, After: off, Resets: true,
			Steps: []layout.PlannedStep{{Action: inventory.MIGEnable}, {Action: inventory.MIGDestroyInstance,
				GPU: &layout.PlannedInstance{Profile: "1g.10gb", Size: 1, InUse: true}}}},
			"  before  MIG disabled\n  after   MIG disabled\n" +
				"   1. enable MIG mode while nothing uses the GPU; the driver resets it\n" +
				"   2. destroy GPU instance 1g.10gb at slice 0, once nothing uses it\n"},
		"without places": {layout.PlannedGPU{Before: layout.PlannedPartitions{MIG: "enabled"}, After: off,
			Steps: []layout.PlannedStep{{Action: inventory.MIGDisable}}},
			"  before  MIG enabled, not known how it is divided\n  after   MIG disabled\n" +
				"   1. disable MIG mode while nothing uses the GPU\n"},
	} {
		if diff := cmp.Diff(test.want, planText(t, test.gpu)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestMIGStatusText: progress, awaited conditions, and the present and wanted division of each GPU.
func TestMIGStatusText(t *testing.T) {
	t.Parallel()
	whole, empty := &layout.PlannedPartitions{MIG: "disabled"}, &layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8}
	half := &layout.PlannedPartitions{MIG: "enabled", MemorySlices: 8,
		Instances: []layout.PlannedInstance{{Profile: "3g.40gb", Start: 4, Size: 4, Devices: []string{"3g.40gb"}}}}
	s := daemon.MIGProgress{Layout: "mine", From: "label", State: "pending", Reason: "GPU 0 waits", GPUs: []daemon.MIGGPU{
		{Index: 0, Model: "H100", UUID: "GPU-0", Phase: "waiting", Reason: "in use by pod a/b", Before: whole, After: half},
		{Index: 1, Model: "H100", UUID: "GPU-1", Phase: "failed", Retry: time.Unix(0, 0), Before: empty, After: empty},
		{Index: 2, Model: "H100", UUID: "GPU-2", Phase: "done", Before: whole, After: whole},
		{Index: 3, Model: "T4", UUID: "GPU-3", Phase: "kept"},
	}}
	socket, _ := answering(t, map[string][]any{daemon.CallMIGStatus: {s, daemon.MIGProgress{}}})
	const want = `Layout mine of label: pending: GPU 0 waits

GPU 0  H100  GPU-0
  waiting: in use by pod a/b
  slice    0          1          2          3          4          5          6          7
  before  MIG disabled
  after   |          |          |          |          |3g.40gb                                    |

GPU 1  H100  GPU-1
  failed; tried again at 1970-01-01T00:00:00Z
  slice    0          1          2          3          4          5          6          7
  now     |          |          |          |          |          |          |          |          |

GPU 2  H100  GPU-2
  done
  now     MIG disabled

GPU 3  T4  GPU-3
  kept
`
	for _, want := range []string{want, "No layout is selected. GPUs stay unchanged.\n"} {
		got, err := printed(t, "mig", "status", "--control-socket", socket)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
}
