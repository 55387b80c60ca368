package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func TestStatusOfDRA(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	s := status.Status{DRA: &status.DRA{
		Mode: "split", Driver: status.DRADriver{Registered: true}, Slices: 1, Devices: 2, Generation: 4,
		Problem: "the API server is away",
		GPUs: []status.DRAGPU{{Index: 0, Owner: "plugin"}, {Index: 1, Owner: "dra"},
			{Index: 2, Owner: "leaving-dra", Waiting: "claim a/b has it"},
			{Index: 3, Owner: "leaving-plugin"}, {Index: 4, Owner: "nobody"}, {Index: 5},
			{Index: 6, Owner: "dra", Unpublished: "the API server drops its taint gpu.nvidia.com/xid"}},
		Claims: []status.DRAClaim{{Namespace: "a", Name: "b", Devices: []string{"gpu-2", "gpu-1"},
			Since: now.Add(-time.Minute),
			Shares: []status.DRAShare{{Device: "gpu-1", MemoryBytes: 20 << 30},
				{Device: "gpu-2", MemoryBytes: 10 << 30, Limited: true}}},
			{Namespace: "a", Name: "c", Devices: []string{"gpu-3-mig-1g10gb-19-0"},
				Released: "the driver does not answer"},
			{Namespace: "a", Name: "d", Devices: []string{"gpu-4-mig-1g10gb-19-0"}, Released: "in use", Destroyed: true}},
	}}
	var out bytes.Buffer
	printStatus(&out, s, view{wide: true, now: now})
	_, got, _ := bytes.Cut(out.Bytes(), []byte("Dynamic"))
	if diff := cmp.Diff(` Resource Allocation: mode split; registered with the kubelet; slices: 1 with 2 devices, generation 4; the API server is away

owner: GPU 1: in a ResourceSlice
owner: GPU 2: moves from its ResourceSlice to the device plugin; it waits: claim a/b has it
owner: GPU 3: moves from the device plugin into a ResourceSlice
owner: GPU 4: moves to the device plugin
owner: GPU 5: not known yet
owner: GPU 6: owned by claims, but in no ResourceSlice: the API server drops its taint gpu.nvidia.com/xid
claim: a/b has gpu-2, gpu-1 since 2026-11-01T11:59:00Z; 20480 MiB of gpu-1, not a limit; 10240 MiB of gpu-2, a limit by MPS
claim: a/c was released, but its devices at gpu-3-mig-1g10gb-19-0 still exist: the driver does not answer; no claim gets `+
		`this part of the GPU until they are removed; retried every 10 s
claim: a/d was released, and its MIG devices (gpu-4-mig-1g10gb-19-0) are destroyed, but MIG mode is still on: in use; the switch off is retried every 10 s
`, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for want, driver := range map[string]status.DRADriver{
		"mode plugin; another driver of the same name registers at /a.sock": {NameConflict: "/a.sock", Problem: "b"},
		"mode plugin; not registered with the kubelet: b":                   {Problem: "b"},
		"mode plugin; not registered with the kubelet":                      {},
	} {
		if got := allocationLine(&status.DRA{Mode: "plugin", Driver: driver}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := allocationLine(&status.DRA{Mode: "dra", NoTaints: true, NoCounters: true, NoShares: true}); !strings.HasSuffix(
		got, "; the API server drops taints of devices: a GPU that is not healthy leaves its slice"+
			"; the API server drops counters of devices: no MIG devices are created for claims"+
			"; the API server knows no shares of devices: GPUs are given whole") {
		t.Error(got)
	}
}
