package dra_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestWithout has a row for each set of feature gates that may be off: which devices of a node are
// published then. Of its GPUs, 0 is healthy, 1 is ill, 2 is in MIG mode and empty, and 3 changes MIG
// mode by claims. A device has ! with a taint, # with counters, and * if several claims can have it.
func TestWithout(t *testing.T) {
	t.Parallel()
	profiles := []inventory.MIGProfile{{
		Name: "3g.40gb", ID: 9, Count: 2, Size: 4, Starts: []int{0, 4},
		Attributes: inventory.MIGAttributes{GISlices: 3, CISlices: 3},
	}}
	s := inventory.Snapshot{Driver: inventory.Driver{Version: "580.95.05", CUDA: "13.0"}}
	for i := range 4 {
		s.GPUs = append(s.GPUs, inventory.GPU{
			Index: i, Minor: i, UUID: fmt.Sprintf("GPU-%d", i), Model: "NVIDIA H100 80GB HBM3", MemoryBytes: 80 << 30,
			Health: inventory.Health{State: inventory.Healthy},
		})
	}
	s.GPUs[1].Health = inventory.Health{State: inventory.Unhealthy, XID: 79}
	s.GPUs[2].MIG = inventory.MIGEnabled
	pool := dividedPool(s, dra.Divisions{"GPU-2": {Profiles: profiles}, "GPU-3": {Profiles: profiles, Switched: true}}).Shared(4)

	const (
		ill   = " 1!"
		parts = " 3# 3-mig-3g40gb-9-0# 3-mig-3g40gb-9-4# 2-mig-3g40gb-9-0# 2-mig-3g40gb-9-4#"
	)
	for _, row := range []struct {
		version string // of Kubernetes with these default gates
		dropped dra.Dropped
		want    string
	}{
		{"1.36, 1.37", dra.Dropped{}, "0* 1!*" + parts},
		{"", dra.Dropped{Taints: true}, "0*" + parts},
		{"", dra.Dropped{Counters: true}, "0* 1!* 3"},
		{"", dra.Dropped{Shares: true}, "0" + ill + parts},
		{"", dra.Dropped{Taints: true, Counters: true}, "0* 3"},
		{"", dra.Dropped{Taints: true, Shares: true}, "0" + parts},
		{"", dra.Dropped{Counters: true, Shares: true}, "0" + ill + " 3"},
		{"1.34, 1.35", dra.Dropped{Taints: true, Counters: true, Shares: true}, "0 3"},
	} {
		without := pool.Without(row.dropped)
		var got []string
		for _, slice := range without.Slices {
			if row.dropped.Taints && slice.Tainted() || row.dropped.Counters && slice.Counted() ||
				row.dropped.Shares && slice.Shared() {
				t.Errorf("%+v: a slice has a part that is dropped", row.dropped)
			}
			for _, d := range slice.Devices {
				name := strings.TrimPrefix(d.Name, "gpu-")
				if len(d.Taints) > 0 {
					name += "!"
				}
				if len(d.ConsumesCounters) > 0 {
					name += "#"
				}
				if d.SmallestShare > 0 {
					name += "*"
				}
				got = append(got, name)
			}
		}
		if names := strings.Join(got, " "); names != row.want {
			t.Errorf("%+v, as in %q: %s, want %s", row.dropped, row.version, names, row.want)
		}
		if problems := refusedBy(without); len(problems) > 0 {
			t.Errorf("%+v: %v", row.dropped, problems)
		}
	}
	for dropped, want := range map[dra.Dropped]map[string]string{
		{}:             {},
		{Shares: true}: {},
		{Taints: true}: {"GPU-1": "the API server drops its taint gpu.nvidia.com/xid"},
		{Taints: true, Counters: true}: {"GPU-1": "the API server drops its taint gpu.nvidia.com/xid",
			"GPU-2": "the API server drops the counters of the MIG devices that can be created on it"},
	} {
		if diff := cmp.Diff(want, pool.Unpublished(dropped)); diff != "" {
			t.Errorf("Unpublished(%+v) (-want +got):\n%s", dropped, diff)
		}
	}
}
