package daemon_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

const (
	// patience limits the wait for an expected event, even on a busy machine.
	patience = time.Minute
)

// An inspected node is simulated, with an Inspector and a monitor that scans by itself only once.
type inspected struct {
	*daemon.Inspector
	t    *testing.T
	node *simulator.Node
	plan resource.Plan // first plan of the node
}

// inspect creates an inspected node.
func inspect(t *testing.T, profile string, o resource.Options, wanted config.PreStart) *inspected {
	t.Helper()
	node := simulated.Node(t, profile)
	policy := health.Default()
	// Suspect stays Suspect, however late the question comes
	policy.SuspectLimit, policy.SuspectSettle = time.Hour, time.Hour
	m := monitor.New(monitor.Options{
		Driver: simulated.DriverOf(node), Policy: policy,
		Poll: time.Hour, SuspectPoll: time.Hour,
	})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() {
		node.Close() // calls that hang end
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &inspected{
		Inspector: &daemon.Inspector{Configs: feed.New(config.Config{Live: config.Live{PreStart: wanted}}), Monitor: m},
		t:         t, node: node, plan: resource.New(m.Snapshots().Value(), o),
	}
}

// device returns the first device of an index.
func (i *inspected) device(index string) resource.Device {
	i.t.Helper()
	for _, r := range i.plan.Resources {
		for _, d := range r.Devices {
			if d.Index == index {
				return d
			}
		}
	}
	i.t.Fatalf("the plan has no device %s", index)
	return resource.Device{}
}

func (i *inspected) inject(faults ...simulator.Fault) {
	i.t.Helper()
	for _, f := range faults {
		if err := i.node.Inject(f); err != nil {
			i.t.Fatal(err)
		}
	}
}

// hears waits for the verdicts on XIDs, which come only as events. The scan of Inspect finds
// everything else.
func (i *inspected) hears(faults []simulator.Fault) {
	i.t.Helper()
	for _, f := range faults {
		if f.Kind == simulator.KindXID {
			poll.Latest(i.t, fmt.Sprintf("heard of %+v", f), i.Monitor.Snapshots(), func(s inventory.Snapshot) bool {
				return s.GPUs[3].MIGDevices[1].Health.XID == f.XID
			})
		}
	}
}

// asks inspects devices like a plugin server. The refusal must contain all of the words; without
// words there must be none.
func (i *inspected) asks(devices []string, words ...string) {
	i.t.Helper()
	ctx, cancel := context.WithTimeout(i.t.Context(), patience)
	defer cancel()
	var all []resource.Device
	for _, index := range devices {
		all = append(all, i.device(index))
	}
	err := i.Inspect(ctx, all)
	if (err != nil) != (len(words) > 0) {
		i.t.Errorf("%v: got error %v, want one with %q", devices, err, words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			i.t.Errorf("%v: got error %v, want %q in it", devices, err, w)
		}
	}
}

// errors returns the number of a GPU's memory errors.
func (i *inspected) errors(gpu int) uint64 {
	i.t.Helper()
	if _, err := i.Monitor.Look(i.t.Context()); err != nil {
		i.t.Fatal(err)
	}
	s, err := i.Monitor.Status(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	return s.GPUs[gpu].Reading.UncorrectedECC.Value
}

var (
	none   = config.PreStart{}
	fit    = config.PreStart{Checks: config.PreStartHealth}
	clean  = config.PreStart{Checks: config.PreStartClean}
	washed = config.PreStart{
		Checks: config.PreStartClean, Reset: []inventory.Remnant{inventory.RemnantClocks, inventory.RemnantECC},
	}
	modes = map[string]config.PreStart{"none": none, "health": fit, "clean": clean, "clean and reset": washed}
)

// TestRefusalOfPresentFaults: a container is refused for faults that nobody has seen before its
// start.
func TestRefusalOfPresentFaults(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		profile string
		options resource.Options
		faults  []simulator.Fault
		devices []string
		words   map[string][]string // by mode; a mode without words allows the start
	}{
		"all is well": {devices: []string{"0", "3"}},
		"the driver wants a reset": {
			faults:  []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Return: "RESET_REQUIRED"}},
			devices: []string{"0", "3"},
			words:   refusedUnlessNone("GPU 3 (GPU-", "is Unhealthy", "reset"),
		},
		"another GPU is bad": {
			faults: []simulator.Fault{{Kind: simulator.KindLost, GPU: "3"}}, devices: []string{"0", "4"},
		},
		"lost": {
			faults: []simulator.Fault{{Kind: simulator.KindLost, GPU: "3"}}, devices: []string{"3"},
			words: refusedUnlessNone("GPU 3 (GPU-", "is Lost", "remedy: reboot"),
		},
		"unplugged": {
			faults: []simulator.Fault{{Kind: simulator.KindRemove, GPU: "3"}}, devices: []string{"3"},
			words: refusedUnlessNone("GPU 3 (GPU-", "has disappeared"),
		},
		"new memory errors": {
			faults: []simulator.Fault{{Kind: simulator.KindECC, GPU: "3", Count: 1}}, devices: []string{"3"},
			words: refusedUnlessNone("GPU 3 (GPU-", "is Suspect", "memory errors"),
		},
		"a GPU hangs": {
			faults: []simulator.Fault{{Kind: simulator.KindHang, GPU: "3", Call: "DeviceGetMemoryInfo"}}, devices: []string{"0",
				"3"},
			words: refusedUnlessNone("GPU 3 (GPU-", "the driver has not returned from nvmlDeviceGetMemoryInfo for this GPU yet"),
		},
		"the driver is gone": {
			faults: []simulator.Fault{{Kind: simulator.KindFail, Call: "DeviceGetCount",
				Return: "DRIVER_NOT_LOADED"}}, devices: []string{"3"},
			words: refusedUnlessNone("GPU 3 (GPU-", "no NVIDIA driver"),
		},
		"processes of earlier work": {
			faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 2}}, devices: []string{"0", "3"},
			words: refusedIfClean("GPU 3 (GPU-", ": 2 (PID 100000 with 1024 MiB, PID 100001 with 1024 MiB)", "stop them"),
		},
		"many processes": {
			faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 50}}, devices: []string{"3"},
			words: refusedIfClean(": 50 (", "PID 100018 with 1024 MiB and 31 more)"),
		},
		"processes on another GPU": {
			faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 2}}, devices: []string{"0"},
		},
		"processes on a shared GPU": {
			options: resource.Options{Sharing: resource.Sharing{
				Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}},
			}},
			faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 2}}, devices: []string{"3"},
		},
		"processes that nobody may see": {
			faults: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetComputeRunningProcesses",
				Return: "NO_PERMISSION"}},
			devices: []string{"3"},
			words:   refusedIfClean("GPU 3 (GPU-", "NO_PERMISSION"),
		},
		"processes that the GPU cannot tell": {
			faults: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetComputeRunningProcesses",
				Return: "NOT_SUPPORTED"}},
			devices: []string{"3"},
		},
		"clocks that may not be reset": {
			faults: []simulator.Fault{{Kind: simulator.KindFail, GPU: "3", Call: "DeviceResetApplicationsClocks",
				Return: "NO_PERMISSION"}},
			devices: []string{"3"},
		},
		"clocks whose reset hangs": {
			faults:  []simulator.Fault{{Kind: simulator.KindHang, GPU: "3", Call: "DeviceResetApplicationsClocks"}},
			devices: []string{"3"},
			words:   map[string][]string{"clean and reset": {"GPU 3 (GPU-", "nvmlDeviceResetApplicationsClocks"}},
		},
		"an instance that was struck": {
			profile: "h100-mig-1g", options: resource.Options{MIG: resource.MIGMixed},
			faults: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3:1", XID: 48, Action: "none"}}, devices: []string{"3:0",
				"3:1"},
			words: refusedUnlessNone("MIG device 3:1 (MIG-", "XID 48"),
		},
		"another instance was struck": {
			profile: "h100-mig-1g", options: resource.Options{MIG: resource.MIGMixed},
			faults: []simulator.Fault{{Kind: simulator.KindXID, GPU: "3:1", XID: 48, Action: "none"}}, devices: []string{"3:0",
				"3:2"},
		},
		"an instance of a GPU that is lost": {
			profile: "h100-mig-1g", options: resource.Options{MIG: resource.MIGMixed},
			faults: []simulator.Fault{{Kind: simulator.KindLost, GPU: "3"}}, devices: []string{"3:0"},
			words: refusedUnlessNone("MIG device 3:0 (MIG-", "is Lost"),
		},
		"an instance that is not there": {
			profile: "h100-mig-1g", options: resource.Options{MIG: resource.MIGMixed},
			faults: []simulator.Fault{{Kind: simulator.KindMIG, GPU: "3"}}, devices: []string{"3:0"},
			words: refusedUnlessNone("MIG device 3:0 (MIG-", "has disappeared"),
		},
		"processes on instances": {
			profile: "h100-mig-1g", options: resource.Options{MIG: resource.MIGMixed},
			faults: []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 2}}, devices: []string{"3:0"},
		},
		"processes on a GPU in MIG mode": {
			profile: "h100-mig-1g",
			faults:  []simulator.Fault{{Kind: simulator.KindProcesses, GPU: "3", Count: 2}}, devices: []string{"3"},
		},
	}
	for name, test := range tests {
		for mode, wanted := range modes {
			t.Run(name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				i := inspect(t, cmp.Or(test.profile, "dgx-h100"), test.options, wanted)
				i.inject(test.faults...)
				i.hears(test.faults)
				i.asks(test.devices, test.words[mode]...)
			})
		}
	}
}

func refusedUnlessNone(words ...string) map[string][]string {
	return map[string][]string{"health": words, "clean": words, "clean and reset": words}
}

func refusedIfClean(words ...string) map[string][]string {
	return map[string][]string{"clean": words, "clean and reset": words}
}

// TestRemnantsAreReset: remnants are reset on unused GPUs, and only on the GPUs of the container.
func TestRemnantsAreReset(t *testing.T) {
	t.Parallel()
	i := inspect(t, "dgx-1", resource.Options{}, washed) // its driver has no verdict on new errors
	for _, gpu := range []string{"2", "3"} {
		i.inject(simulator.Fault{Kind: simulator.KindECC, GPU: gpu, Count: 7})
	}
	i.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "3", Count: 1})
	i.asks([]string{"3"}, "is still in use")
	if n := i.errors(3); n != 7 {
		t.Errorf("GPU 3, which is in use, counts %d errors, want 7", n)
	}
	i.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "3"})
	i.asks([]string{"3"})
	if n := i.errors(3); n != 0 {
		t.Errorf("GPU 3 counts %d errors, want 0", n)
	}
	if n := i.errors(2); n != 7 {
		t.Errorf("GPU 2, which is none of the container's, counts %d errors, want 7", n)
	}
}

// TestReleasedDriver: while the driver is released, the operator's choice for new work applies to
// starting containers.
func TestReleasedDriver(t *testing.T) {
	t.Parallel()
	for mode, wanted := range map[string]config.PreStart{"health": fit, "clean": washed} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			i := inspect(t, "dgx-h100", resource.Options{}, wanted)
			i.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "3"},
				simulator.Fault{Kind: simulator.KindProcesses, GPU: "5", Count: 1})
			i.asks([]string{"3"}, "is Lost")
			if err := i.Monitor.Quiesce(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			i.asks([]string{"0", "5"})
			i.asks([]string{"3"}, "GPU 3 (GPU-", "is Lost")
			if err := i.Monitor.Quiesce(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			i.asks([]string{"0"}, "GPU 0 (GPU-", "is Unknown", "released for maintenance: run resume first")
			if err := i.Monitor.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			i.asks([]string{"0"})
		})
	}
}

// TestDevicesOfAnEarlierProcess: devices with known IDs only are judged by their GPUs.
func TestDevicesOfAnEarlierProcess(t *testing.T) {
	t.Parallel()
	i := inspect(t, "a100-mig-mixed", resource.Options{MIG: resource.MIGMixed}, clean)
	i.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "3"})
	var whole, part resource.Device
	for _, r := range i.plan.Resources {
		for _, d := range r.Devices {
			switch {
			case d.UUID == d.GPU && whole.ID == "":
				whole = d
			case strings.HasPrefix(d.Index, "3:"):
				part = d
			}
		}
	}
	for id, words := range map[string][]string{
		whole.ID:           nil,
		whole.ID + "::1":   nil,
		part.ID:            {"MIG device " + part.Index + " (MIG-", "is Lost"},
		part.ID + "::1":    {"MIG device " + part.Index + " (MIG-", "is Lost"},
		"GPU-of-yesterday": {"GPU-of-yesterday has disappeared"},
	} {
		err := i.Inspect(t.Context(), []resource.Device{resource.ByID(id)})
		if (err != nil) != (words != nil) {
			t.Errorf("%s: got error %v, want one with %q", id, err, words)
			continue
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: got error %v, want %q in it", id, err, w)
			}
		}
	}
}

// TestUnresponsiveDriverIsNamed: the error names the driver after a timeout of the wait and after
// an abandoned call.
func TestUnresponsiveDriverIsNamed(t *testing.T) {
	t.Parallel()
	late, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	silent := watch(t, &driver{err: fmt.Errorf("%w: nvmlInit_v2", inventory.ErrNoAnswer)})
	for ctx, m := range map[context.Context]*monitor.Monitor{late: monitor.New(monitor.Options{}), t.Context(): silent} {
		err := (&daemon.Inspector{Configs: feed.New(config.Config{Live: config.Live{PreStart: fit}}), Monitor: m}).Inspect(ctx,
			[]resource.Device{{UUID: "GPU-a"}})
		if !errors.Is(err, inventory.ErrNoAnswer) || !strings.HasPrefix(err.Error(), "GPU-a cannot be checked: ") ||
			!strings.Contains(err.Error(), "see the kernel log") {
			t.Errorf("got error %v, want one that says where to look", err)
		}
	}
}
