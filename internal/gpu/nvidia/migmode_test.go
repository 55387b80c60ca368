package nvidia_test

import (
	"errors"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const a100 = `{description: "One A100", driver: %DRIVER, cuda: "12.0", model: a100-sxm4-40gb,
gpus: [{bdf: "0000:17:00.0", pcie: 0/0/0}]%MORE}`

// TestModeInASessionOfItsOwn: an A100 gets another mode while nobody else has it open.
func TestModeInASessionOfItsOwn(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		driver, more string
		fault        *simulator.Fault
		want         error
	}{
		"":                            {},
		"a driver that does not tell": {driver: "470.57.02"},
		"a process has it open": {fault: &simulator.Fault{Kind: simulator.KindClients, GPU: "0",
			Clients: []string{"host"}}, want: inventory.ErrOpenElsewhere},
		"a virtual machine": {more: ", virtualMachine: true", want: inventory.ErrResetRequired},
		"without rights": {fault: &simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceSetMigMode",
			Return: "NO_PERMISSION"},
			want: inventory.ErrNoPermission},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.driver == "" {
				tt.driver = "580.95.05"
			}
			r := newRig(t, strings.NewReplacer("%DRIVER", tt.driver, "%MORE", tt.more).Replace(a100))
			uuid := r.uuid(0)
			set := func() error {
				return nvidia.SetMIGMode(nvidia.Options{Library: r.node.NVML(), Root: r.node.Root()}, uuid,
					inventory.MIGEnabled)
			}
			if err := set(); !errors.Is(err, inventory.ErrOpenElsewhere) && tt.want == nil {
				t.Errorf("while a session is open: %v", err)
			}
			if err := r.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if tt.fault != nil {
				r.inject(*tt.fault)
			}
			if err := set(); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("got error %v, want %v", err, tt.want)
			}
			if got := nvidia.InVirtualMachine(r.node.Root()); got != (tt.more != "") {
				t.Errorf("in a virtual machine: %t", got)
			}
		})
	}
	if nvidia.InVirtualMachine(fstest.MapFS{}) {
		t.Error("in a virtual machine, without /proc/cpuinfo")
	}
	node := newRig(t, "dgx-h100").node
	if err := nvidia.SetMIGMode(nvidia.Options{Library: node.NVML(), Root: node.Root()}, "GPU-none",
		inventory.MIGEnabled); err == nil {
		t.Error("a GPU that is not there got another mode")
	}
}

// TestLostByClose: settings of GPUs without persistence mode are lost with their last user.
func TestLostByClose(t *testing.T) {
	t.Parallel()
	off := simulator.Fault{Kind: simulator.KindPersistence, GPU: "2", State: "off"}
	answer := func(call, value string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindAnswer, GPU: "2", Call: call, Value: value}
	}
	for name, tt := range map[string]struct {
		faults []simulator.Fault
		want   string
	}{
		"nothing": {faults: []simulator.Fault{off}},
		"a limit, with persistence mode": {faults: []simulator.Fault{answer("DeviceGetPowerManagementLimit",
			"250000")}},
		"a limit": {faults: []simulator.Fault{off, answer("DeviceGetPowerManagementLimit", "250000")},
			want: "GPU 2 would lose its power limit of 250 W"},
		"a clock": {faults: []simulator.Fault{off, answer("DeviceGetApplicationsClock", "900")},
			want: "of 900 MHz"},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			r.scan()
			for _, f := range tt.faults {
				r.inject(f)
			}
			got, err := r.LostByClose(t.Context())
			if err != nil || !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
	r := newRig(t, "dgx-h100")
	if _, err := r.SetComputeMode(t.Context(), r.uuid(2), inventory.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	r.inject(off)
	if got, err := r.LostByClose(t.Context()); err != nil ||
		!strings.HasPrefix(got, "GPU 2 would lose its compute mode") {
		t.Errorf("got %q, %v", got, err)
	}
}
