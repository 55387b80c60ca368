package layout

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// TestTablesAreTheDrivers compares the tables with what the driver of a simulated GPU tells, which the simulator works out from the
// memory of profiles and the compute slices of the GPU.
func TestTablesAreTheDrivers(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm5-141gb", "b200-sxm-180gb", "a30-pcie-24gb", "rtx-pro-6000"} {
		told := drive(t, fmt.Sprintf("{description: One GPU, driver: 590.48.01, cuda: \"13.1\", model: %s, gpus: [{bdf: \"0000:17:00.0\", "+
			"pcie: 0/0/0}]}", model)).gpu(0)
		byID := func(a, b inventory.MIGProfile) int { return cmp.Compare(a.ID, b.ID) }
		table := slices.Clone(models[told.PCIDevice>>16])
		slices.SortFunc(table, byID)
		slices.SortFunc(told.Profiles, byID)
		if diff := gocmp.Diff(told.Profiles, table); diff != "" {
			t.Errorf("%s (-driver +table):\n%s", model, diff)
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
