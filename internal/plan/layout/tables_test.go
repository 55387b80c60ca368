package layout_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// TestTablesAreTheDrivers compares what is planned for a GPU whose profiles are not told with what
// is planned by those that its driver tells: each number of each profile, and one that is in use at
// each slice.
func TestTablesAreTheDrivers(t *testing.T) {
	t.Parallel()
	for _, device := range devices() {
		same := func(what string, g layout.GPU, devices map[string]int) {
			t.Helper()
			plan := func(g layout.GPU) (calls []inventory.MIGStep, reason string) {
				c := layout.Plan(onAllGPUs(devices), []layout.GPU{g}).GPUs[0]
				for _, s := range c.Steps {
					calls = append(calls, s.Call(0))
				}
				return calls, c.Reason
			}
			table, reason := plan(g)
			g.Profiles = profilesOf(device)
			if driver, reason2 := plan(g); !gocmp.Equal(driver, table) || reason != reason2 {
				t.Errorf("%x: %s %s %s (-driver +table):\n%s", device, what, reason, reason2, gocmp.Diff(driver, table))
			}
		}
		for _, p := range profilesOf(device) {
			for n := range p.Count + 2 {
				same(fmt.Sprint(n, " of ", p.Name), gpu(device), map[string]int{p.Name: n})
			}
			for start := range 13 {
				same(fmt.Sprint(p.Name, " at ", start), gpu(device, fmt.Sprint(p.Name, "@", start, "!")),
					map[string]int{p.Name: 1})
			}
		}
	}
}

// TestTablesHaveNames holds the names that NVIDIA's guide has, or follows from the memory, for
// models that the simulator does not have.
func TestTablesHaveNames(t *testing.T) {
	t.Parallel()
	for want, devices := range profileNames {
		for _, device := range devices {
			var got []string
			for _, name := range layout.Builtin([]layout.GPU{gpu(device<<16 | 0x10de)}).Names() {
				if name != layout.AllBalanced && name != layout.AllDisabled && name != layout.AllEnabled {
					got = append(got, strings.TrimPrefix(name, "all-"))
				}
			}
			all := strings.Fields(strings.ReplaceAll(want, "+", "."))
			slices.Sort(all)
			if diff := gocmp.Diff(all, got); diff != "" {
				t.Errorf("%X (-want +got):\n%s", device, diff)
			}
		}
	}
}

// profileNames are the names of all profiles, with the PCI device IDs of the models that have them.
var profileNames = map[string][]uint32{
	"1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb": {0x20B0, 0x20B1, 0x20F1, 0x20F6},
	"1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb": {0x20B2, 0x20B5, 0x20F3, 0x20F5, 0x2330, 0x2331,
		0x2322, 0x2324},
	"1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb":    {0x2321, 0x233A},
	"1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb":    {0x2342, 0x233D, 0x20B6, 0x2329},
	"1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb":   {0x2335, 0x233B},
	"1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb":   {0x2348},
	"1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb":   {0x2901},
	"1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb":   {0x2941},
	"1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb": {0x3182},
	"1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb": {0x31C2},
	"1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb":                   {0x20B7},
	"1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me 4g.96gb " +
		"4g.96gb+gfx": {0x2BB5},
}

// known returns the PCI device IDs of all models that package layout knows.
func known() []uint32 { return slices.Concat(slices.Collect(maps.Values(profileNames))...) }

// TestComputeInstancesAreNVIDIAs compares the places of compute instances with those of the mock
// GPUs in NVIDIA's go-nvml, where these have any. They have no compute instance of four slices in
// seven, which nvidia-smi mig -lcip shows on A100.
func TestComputeInstancesAreNVIDIAs(t *testing.T) {
	t.Parallel()
	compared := 0
	for device, mock := range map[uint32]gpus.Config{
		h100: gpus.H100_SXM5_80GB, 0x233510de: gpus.H200_SXM5_141GB, 0x290110de: gpus.B200_SXM5_180GB,
		b30: gpus.A30_PCIE_24GB,
	} {
		for number, byCompute := range mock.MIGProfiles.ComputeInstancePlacements {
			slicesOfGI := int(mock.MIGProfiles.GpuInstanceProfiles[number].SliceCount)
			at := slices.IndexFunc(profilesOf(device), func(p inventory.MIGProfile) bool {
				_, all, _ := parse(p.Name)
				return all == slicesOfGI && !strings.Contains(p.Name, "+")
			})
			for compute, placements := range byCompute {
				size := int(mock.MIGProfiles.ComputeInstanceProfiles[number][compute].SliceCount)
				var starts []int
				for _, p := range placements {
					starts = append(starts, int(p.Start))
				}
				name := profilesOf(device)[at].Name
				if size < slicesOfGI {
					name = fmt.Sprintf("%dc.%s", size, name)
				}
				var planned []int
				for _, i := range layout.Plan(onAllGPUs(map[string]int{name: len(starts)}),
					[]layout.GPU{gpu(device)}).GPUs[0].After.Instances {
					for _, c := range i.Computes {
						planned = append(planned, c.Start)
					}
				}
				if diff := gocmp.Diff(starts, planned); diff != "" {
					t.Errorf("%s: %dc.%dg (-mock +planned):\n%s", mock.Name, size, slicesOfGI, diff)
				}
				compared++
			}
		}
	}
	if compared < 40 {
		t.Errorf("%d were compared", compared)
	}
}
