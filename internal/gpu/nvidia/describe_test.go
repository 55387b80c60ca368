package nvidia_test

import (
	"fmt"
	"io/fs"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestDescription reads what selectors of claims are about: brand, addressing mode and PCIe root
// complex.
func TestDescription(t *testing.T) {
	t.Parallel()
	for profile, want := range map[string]string{
		"t4":       "Tesla//pci0000:00",
		"dgx-h100": "Nvidia/HMM/pci0000:1a Nvidia/HMM/pci0000:42",
		"dgx-1":    "Tesla//pci0000:05 Tesla//pci0000:05",
	} {
		r := newRig(t, profile)
		var got []string
		for _, g := range r.scan().GPUs[:min(2, len(r.scan().GPUs))] {
			got = append(got, fmt.Sprintf("%s/%s/%s", g.Brand, g.AddressingMode, g.PCIeRoot))
		}
		compare(t, profile, want, strings.Join(got, " "))
	}
	r := newRig(t, "dgx-h100",
		simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetBrand", Return: "NOT_SUPPORTED"},
		simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetAddressingMode", Return: "NOT_SUPPORTED"})
	if g := r.scan().GPUs[0]; g.Brand != "" || g.AddressingMode != "" || len(r.scan().GPUs) != 8 {
		t.Errorf("a driver that tells neither brand nor addressing mode: %+v", g)
	}
}

// TestPCIeRoot reads the root complex of the paths that sysfs has on machines of several kinds.
func TestPCIeRoot(t *testing.T) {
	t.Parallel()
	for target, want := range map[string]string{
		"../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:1b:00.0":         "pci0000:16",
		"../../../devices/platform/NVDA0001:00/pci0009:00/0009:00:00.0/0009:01:00.0": "pci0009:00",
		"../../../devices/pci10000:e0/10000:e0:06.0":                                 "pci10000:e0",
		"../../../devices/vmbus/47505500-0001":                                       "",
		"":                                                                           "",
	} {
		root := fstest.MapFS{folderOfT4: {Data: []byte(target), Mode: fs.ModeSymlink}}
		if target == "" {
			root = fstest.MapFS{}
		}
		compare(t, target, want, scanWith(t, "t4", root, "").GPUs[0].PCIeRoot)
	}
}

// TestPlacement reads where MIG devices lie. A process without privileges is not told.
func TestPlacement(t *testing.T) {
	t.Parallel()
	r := newRig(t, "a100-mig-mixed")
	var got []string
	for _, m := range r.scan().GPUs[5].MIGDevices {
		got = append(got, fmt.Sprintf("%s=%d@%d+%d", m.Profile, m.Placement.Profile, m.Placement.Start,
			m.Placement.Size))
	}
	compare(t, "placements", "4g.40gb=5@0+4 2g.20gb=14@4+2 1g.10gb+me=20@6+1", strings.Join(got, " "))
	r = newRig(t, "a100-mig-mixed", simulator.Fault{Kind: simulator.KindFail, Call: "DeviceGetGpuInstanceById",
		Return: "NO_PERMISSION"})
	if p := r.scan().GPUs[5].MIGDevices[0].Placement; p.Size != 0 {
		t.Errorf("without privileges a placement is %+v", p)
	}
}

// TestDescriptionThatFailed: what could not be read of a GPU at first is read by a later scan.
func TestDescriptionThatFailed(t *testing.T) {
	t.Parallel()
	whole := newRig(t, "dgx-h100").scan()
	for _, call := range []string{
		"DeviceGetName", "DeviceGetBrand", "DeviceGetArchitecture", "DeviceGetCudaComputeCapability",
		"DeviceGetAddressingMode",
	} {
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: call, Return: "UNKNOWN"})
		if s := r.scan(); s.Equal(whole) {
			t.Errorf("%s fails, and nobody sees it", call)
		}
		r.inject(restore)
		r.scan()
		compare(t, "after "+call+" has failed", whole, r.scan())
	}
}

// A movedDevice has another PCI address.
type movedDevice struct {
	nvml.Device
	bus *uint32
}

func (d movedDevice) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	pci, ret := d.Device.GetPciInfo()
	pci.Bus += *d.bus
	return pci, ret
}

// A virtualDevice is a virtual function of a GPU, and counts how often it is asked for the state of
// a lane of NVLink.
type virtualDevice struct {
	nvml.Device
	function string
	asked    *atomic.Int64
}

func (d virtualDevice) GetPciInfo() (nvml.PciInfo, nvml.Return) {
	pci, ret := d.Device.GetPciInfo()
	for i, c := range "0000:1B:00." + d.function + "\x00" {
		pci.BusId[i] = int8(c)
	}
	return pci, ret
}

func (d virtualDevice) GetNvLinkState(link int) (nvml.EnableState, nvml.Return) {
	d.asked.Add(1)
	return d.Device.GetNvLinkState(link)
}

// TestVirtualFunction: a GPU that is a virtual function has that in its address, and is asked for
// each lane that it has not once only.
func TestVirtualFunction(t *testing.T) {
	t.Parallel()
	for function, want := range map[string]string{"4": "4", "0": "0", "": "0", "8": "0", "12": "0"} {
		var asked atomic.Int64
		r := newRigWith(t, "dgx-h100", hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
			if index > 0 {
				return d
			}
			return virtualDevice{d, function, &asked}
		}}))
		if bdf := r.scan().GPUs[0].BDF; bdf != "0000:1b:00."+want {
			t.Errorf("function %q: %s", function, bdf)
		}
		asked.Store(0)
		r.retry()
		r.scan()
		compare(t, "lanes that are asked for again", 18, asked.Load())
	}
}

// TestGPUThatMoves: a GPU that has another PCI address is read again.
func TestGPUThatMoves(t *testing.T) {
	t.Parallel()
	var bus uint32
	r := newRigWith(t, "t4", hook(hookedLibrary{device: func(_ int,
		d nvml.Device) nvml.Device {
		return movedDevice{d, &bus}
	}}))
	before := r.scan().GPUs[0]
	bus = 1
	after := r.scan().GPUs[0]
	if after.BDF == before.BDF || after.Class != "" || after.PCIeRoot != "" {
		t.Errorf("the GPU was %+v and is %+v", before, after)
	}
}

// TestBoundGPUs: the first folder that can be read says which GPUs are bound to the driver, and
// since when.
func TestBoundGPUs(t *testing.T) {
	t.Parallel()
	entry := func(number uint64) *fstest.MapFile { return &fstest.MapFile{Sys: &syscall.Stat_t{Ino: number}} }
	const first, second = "sys/bus/pci/drivers/nvidia/", "proc/driver/nvidia/gpus/"
	for name, tt := range map[string]struct {
		root fstest.MapFS
		want uint64
	}{
		"both folders": {fstest.MapFS{
			first + "0000:01:00.0": entry(5), first + addressOfT4: entry(7), first + "bind": {},
			second + addressOfT4: entry(9),
		}, 7},
		"the second":       {fstest.MapFS{second + addressOfT4: entry(9)}, 9},
		"without a number": {fstest.MapFS{first + addressOfT4: {}}, 0},
		"another GPU only": {fstest.MapFS{first + "0000:01:00.0": entry(5)}, 0},
		"none":             {fstest.MapFS{}, 0},
	} {
		compare(t, name, tt.want, scanWith(t, "t4", tt.root, "").GPUs[0].Binding)
	}
}
