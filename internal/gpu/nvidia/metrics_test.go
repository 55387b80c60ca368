package nvidia_test

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
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
	d := nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), Metrics: c})
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
	all := []string{"events", "inventory", "mig", "reading", "session", "use"}
	compare(t, "groups with calls", all, slices.Sorted(maps.Keys(c.calls)))
	if c.failed["reading GPU_IS_LOST"] == 0 || len(c.failed) != 1 {
		t.Errorf("errors %v, want those of GPU 1 that say something", c.failed)
	}
	if c.longest < 50*time.Millisecond {
		t.Errorf("the longest call took %v", c.longest)
	}
}

// TestGroups: each question to the driver, and each change, is counted in the group that it is
// about.
func TestGroups(t *testing.T) {
	t.Parallel()
	node := newNode(t, "dgx-h100")
	c := &counts{calls: map[string]int{}, failed: map[string]int{}}
	s, err := nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), Metrics: c}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := s.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	uuid := snapshot.GPUs[0].UUID
	_, _ = s.Read(t.Context(), uuid) // tells what Open has read
	for _, step := range []struct {
		what   string
		do     func() error
		groups []string
	}{
		{"Read", func() error { _, err := s.Read(t.Context(), uuid); return err }, []string{"reading"}},
		{"Sample", func() error { _, err := s.Sample(t.Context(), uuid, false, noPause); return err },
			[]string{"reading"}},
		{"Processes", func() error { _, err := s.Processes(t.Context(), uuid); return err }, []string{"use"}},
		{"Clean clocks", func() error { return s.Clean(t.Context(), uuid, inventory.RemnantClocks) }, []string{"use"}},
		{"Clean errors", func() error { return s.Clean(t.Context(), uuid, inventory.RemnantECC) }, []string{"use"}},
		{"SetComputeMode", func() error {
			_, err := s.SetComputeMode(t.Context(), uuid, inventory.ComputeProhibited)
			return err
		}, []string{"use"}},
		{"Close", func() error { return s.Close(t.Context()) }, []string{"events", "reading", "session"}},
	} {
		clear(c.calls)
		if err := step.do(); err != nil {
			t.Errorf("%s: %v", step.what, err)
		}
		compare(t, step.what, step.groups, slices.Sorted(maps.Keys(c.calls)))
	}
}
