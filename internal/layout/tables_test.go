package layout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// TestTablesAreTheDrivers compares the tables with what the driver of a simulated GPU tells, which the simulator works out from the
// memory of profiles and the compute slices of the GPU.
func TestTablesAreTheDrivers(t *testing.T) {
	t.Parallel()
	for _, model := range []string{
		"a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm5-80gb", "h100-nvl-94gb", "h20-sxm5-96gb", "h200-sxm5-141gb", "b200-sxm-180gb",
		"gb300-278gb", "a30-pcie-24gb", "rtx-pro-6000",
	} {
		told := drive(t, fmt.Sprintf("{description: One GPU, driver: 590.48.01, cuda: \"13.1\", model: %s, gpus: [{bdf: \"0000:17:00.0\", "+
			"pcie: 0/0/0}]}", model)).gpu(0)
		byID := func(a, b inventory.MIGProfile) int { return cmp.Compare(a.ID, b.ID) }
		table := slices.Clone(models[told.PCIDevice>>16])
		slices.SortFunc(table, byID)
		slices.SortFunc(told.Profiles, byID)
		for i := range told.Profiles { // the tables have no more than a layout needs
			told.Profiles[i].MemoryBytes, told.Profiles[i].Attributes = 0, inventory.MIGAttributes{}
		}
		if diff := gocmp.Diff(told.Profiles, table); diff != "" {
			t.Errorf("%s (-driver +table):\n%s", model, diff)
		}
	}
}

// TestTablesHaveNames holds the names that NVIDIA's guide has, or follows from the memory, for models that the simulator does not have.
func TestTablesHaveNames(t *testing.T) {
	t.Parallel()
	for want, devices := range map[string][]uint32{
		"1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb":                                                                   {0x20B0, 0x20B1, 0x20F1, 0x20F6},
		"1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb":                                                                 {0x20B2, 0x20B5, 0x20F3, 0x20F5, 0x2330, 0x2331, 0x2322, 0x2324},
		"1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb":                                                                 {0x2321, 0x233A},
		"1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb":                                                                 {0x2342, 0x233D, 0x20B6, 0x2329},
		"1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb":                                                                {0x2335, 0x233B},
		"1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb":                                                                {0x2348},
		"1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb":                                                                {0x2901},
		"1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb":                                                                {0x2941},
		"1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb":                                                              {0x3182},
		"1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb":                                                              {0x31C2},
		"1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb":                                                                                {0x20B7},
		"1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me 4g.96gb 4g.96gb+gfx": {0x2BB5},
	} {
		for _, device := range devices {
			if got := strings.Join(names(models[device]), " "); got != want {
				t.Errorf("%X: %s, want %s", device, got, want)
			}
		}
	}
}

// TestTablesAreGeometry holds what is true of each model: places do not go beyond the GPU, as many instances fit as the profile counts,
// and one of the profiles takes all of the GPU.
func TestTablesAreGeometry(t *testing.T) {
	t.Parallel()
	for device, profiles := range models {
		all := memorySlices(profiles)
		seen := map[int]bool{}
		for _, p := range profiles {
			s, err := parseSize(p.Name)
			if err != nil || seen[p.ID] || s.String() != p.Name {
				t.Errorf("%x: %s: ID %d, error %v", device, p.Name, p.ID, err)
			}
			seen[p.ID] = true
			fit, end := 0, 0
			for _, start := range p.Starts {
				if start+p.Size > all || start%p.Size != 0 {
					t.Errorf("%x: %s begins at slice %d", device, p.Name, start)
				}
				if start >= end {
					fit, end = fit+1, start+p.Size
				}
			}
			media := s.suffix == "+me" || s.suffix == "+me.all"
			if fit != p.Count && !media || media && p.Count != 1 || fit*s.slices > 7 {
				t.Errorf("%x: %d of %s fit, and the table says %d", device, fit, p.Name, p.Count)
			}
		}
	}
}

// TestComputeInstancesAreNVIDIAs compares the places of compute instances with those of the mock GPUs in NVIDIA's go-nvml, where these
// have any. They have no compute instance of four slices in seven, which nvidia-smi mig -lcip shows on A100.
func TestComputeInstancesAreNVIDIAs(t *testing.T) {
	t.Parallel()
	compared := 0
	for _, mock := range []gpus.Config{gpus.H100_SXM5_80GB, gpus.H200_SXM5_141GB, gpus.B200_SXM5_180GB, gpus.A30_PCIE_24GB} {
		for number, byCompute := range mock.MIGProfiles.ComputeInstancePlacements {
			slicesOfGI := int(mock.MIGProfiles.GpuInstanceProfiles[number].SliceCount)
			for compute, placements := range byCompute {
				size := int(mock.MIGProfiles.ComputeInstanceProfiles[number][compute].SliceCount)
				var starts []int
				for _, p := range placements {
					starts = append(starts, int(p.Start))
				}
				if diff := gocmp.Diff(starts, computeStarts[[2]int{slicesOfGI, size}]); diff != "" {
					t.Errorf("%s: %dc.%dg (-mock +table):\n%s", mock.Name, size, slicesOfGI, diff)
				}
				compared++
			}
		}
	}
	if compared < 40 {
		t.Errorf("%d were compared", compared)
	}
}
