package nvidia

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

// counts counts calls into the driver.
type counts struct {
	mu            sync.Mutex // guards all following fields
	calls, failed map[string]int
	longest       time.Duration
}

func (c *counts) DriverCalled(group string, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[group]++
	c.longest = max(c.longest, took)
}

func (c *counts) DriverFailed(group, code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed[group+" "+code]++
}

// TestMetrics: calls are counted by group, with the time that they took, and errors by code.
func TestMetrics(t *testing.T) {
	t.Parallel()
	profile, err := simulator.Load("h100-mig-1g")
	if err != nil {
		t.Fatal(err)
	}
	node := simulator.New(profile)
	defer node.Close()
	for _, f := range []simulator.Fault{
		{Kind: simulator.KindSlow, GPU: "0", Call: "DeviceGetRemappedRows", Delay: "50ms"},
		{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetPersistenceMode", Return: "GPU_IS_LOST"},
		{Kind: simulator.KindFail, GPU: "1", Call: "DeviceGetTotalEnergyConsumption", Return: "NOT_SUPPORTED"},
	} {
		if err := node.Inject(f); err != nil {
			t.Fatal(err)
		}
	}
	c := &counts{calls: map[string]int{}, failed: map[string]int{}}
	d := New(Options{Library: node.NVML(), Root: node.Root(), Metrics: c})
	s, err := d.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := s.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range snapshot.GPUs {
		if _, err := s.Read(t.Context(), g.UUID); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Processes(t.Context(), g.UUID); err != nil && !errors.Is(err, inventory.ErrNotSupported) {
			t.Logf("processes: %v", err)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	all := []string{groupEvents, groupInventory, groupMIG, groupReading, groupSession, groupUse}
	compare(t, "groups with calls", all, slices.Sorted(maps.Keys(c.calls)))
	if c.failed["reading GPU_IS_LOST"] == 0 || len(c.failed) != 1 {
		t.Errorf("errors %v, want those of GPU 1 that say something", c.failed)
	}
	if c.longest < 50*time.Millisecond {
		t.Errorf("the longest call took %v", c.longest)
	}
}

// TestGroups: each function is in the group that its name says.
func TestGroups(t *testing.T) {
	t.Parallel()
	for function, want := range map[string]string{
		"nvmlInit": groupSession, "nvmlSystemGetDriverVersion": groupSession, "nvmlDeviceGetUUID": groupInventory,
		"nvmlDeviceGetNvLinkState": groupInventory, "nvmlDeviceGetGpuInstanceId": groupMIG, "nvmlDeviceGetMigMode": groupMIG,
		"nvmlDeviceGetFieldValues": groupReading, "nvmlDeviceGetPersistenceMode": groupReading, "nvmlSystemEventSetWait": groupEvents,
		"nvmlDeviceRegisterEvents": groupEvents, "nvmlDeviceClearEccErrorCounts": groupUse, "nvmlDeviceGetComputeMode": groupUse,
		"nvmlDeviceGetTotalEccErrors": groupReading, "nvmlDeviceResetApplicationsClocks": groupUse,
	} {
		if got := groupOf[function]; got != want {
			t.Errorf("%s is in %s, want %s", function, got, want)
		}
	}
	if len(groupOf) != len(functions) {
		t.Errorf("%d of %d functions have a group", len(groupOf), len(functions))
	}
}
