package nvidia_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// stubLacks names, for the other process, the function that its library lacks.
const stubLacks = "NVIDIA_TEST_STUB_LACKS"

// TestMissingFunctions takes each function in turn from a library that has nearly all of them. What
// is left is served, and where nothing is, the error says which function is missing.
func TestMissingFunctions(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("testdata/r450.c")
	if err != nil {
		t.Fatal(err)
	}
	symbols := regexp.MustCompile(`(?m)^(?:ret_t|const char \*) ?(nvml\w+)\(`).FindAllStringSubmatch(string(source), -1)
	if len(symbols) < 50 {
		t.Fatalf("found %d functions in the library's source", len(symbols))
	}
	turns := make(chan struct{}, 2) // a compiler and a process each
	for _, symbol := range symbols {
		t.Run(symbol[1], func(t *testing.T) {
			t.Parallel()
			turns <- struct{}{}
			defer func() { <-turns }()
			env := []string{stubLacks + "=" + symbol[1]}
			out, code := runStubWith(t, "lacks one function", env, "-DFABRIC=3", "-DBINDINGS",
				"-D"+symbol[1]+"=lacks_"+symbol[1])
			if code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
				t.Fatalf("the process exited with %d:\n%s", code, out)
			}
		})
	}
}

// TestR418 uses a library that has what R418 had.
func TestR418(t *testing.T) {
	t.Parallel()
	flags := []string{"-DnvmlEventSetWait_v2=nvmlEventSetWait",
		"-DnvmlDeviceGetNvLinkRemotePciInfo_v2=nvmlDeviceGetNvLinkRemotePciInfo"}
	for _, newer := range []string{
		"DeviceGetMigMode", "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex", "DeviceGetGpuInstanceId",
		"DeviceGetComputeInstanceId", "DeviceGetAttributes", "DeviceGetGpuInstanceById", "GpuInstanceGetInfo",
		"GpuInstanceGetComputeInstanceById", "ComputeInstanceGetInfo", "DeviceGetGpuInstanceProfileInfo",
		"GpuInstanceGetComputeInstanceProfileInfo", "DeviceGetArchitecture", "DeviceGetRemappedRows",
	} {
		flags = append(flags, "-Dnvml"+newer+"=lacks_"+newer)
	}
	out, code := runStub(t, "R418", flags...)
	if code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
		t.Fatalf("the process exited with %d:\n%s", code, out)
	}
}

// requiredFunctions are the functions without which no GPU can be served. Every driver since R418
// has them.
var requiredFunctions = []string{
	"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
	"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
}

// lacksOne does all that the daemon does, with a library that lacks one function.
func lacksOne(t *testing.T, d *nvidia.Driver, _ string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	lacks := os.Getenv(stubLacks)
	base := regexp.MustCompile(`_v\d$`).ReplaceAllString(lacks, "")
	s, err := d.Open(ctx)
	if slices.Contains(requiredFunctions, base) {
		if !errors.Is(err, inventory.ErrNoDriver) || !strings.Contains(err.Error(), base+": install driver R418") {
			t.Errorf("Open: got error %v, want one that names %s", err, base)
		}
		if maps, err := os.ReadFile("/proc/self/maps"); err != nil || strings.Contains(string(maps), "libnvidia-ml") {
			t.Errorf("the library stays loaded: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := s.Scan(ctx)
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "GPUs", []string{stubUUID(0), stubUUID(1), stubUUID(2)},
		each(snapshot, func(g inventory.GPU) string { return g.UUID }))
	for _, g := range snapshot.GPUs {
		reading, err := s.Read(ctx, g.UUID)
		if err != nil || reading.Contact != inventory.ContactGood {
			t.Errorf("Read: got %v (%s) and error %v", reading.Contact, reading.Reason, err)
		}
	}
	supported := func(what string, err error) {
		if err != nil && !errors.Is(err, inventory.ErrNotSupported) && !strings.Contains(err.Error(), "SYS_ADMIN") {
			t.Errorf("%s: got error %v", what, err)
		}
	}
	_, err = s.Processes(ctx, stubUUID(0))
	supported("Processes", err)
	_, err = s.Partitions(ctx, stubUUID(0))
	supported("Partitions", err)
	_, err = s.Repartition(ctx, stubUUID(0), inventory.MIGStep{Action: inventory.MIGEnable})
	supported("Repartition", err)
	_, err = s.Sample(ctx, stubUUID(0), true, noPause)
	supported("Sample", err)
	_, err = s.SetComputeMode(ctx, stubUUID(0), inventory.ComputeExclusiveProcess)
	supported("SetComputeMode", err)
	supported("Clean clocks", s.Clean(ctx, stubUUID(0), inventory.RemnantClocks))
	supported("Clean ECC", s.Clean(ctx, stubUUID(0), inventory.RemnantECC))
	// Whatever it waits for, it gets on with it: the first wait gives an event, or none is to be had.
	waiting, enough := context.WithTimeout(ctx, 2*waitStep)
	defer enough()
	if _, err := s.Next(waiting); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Next: got error %v", err)
	}
	if err := s.Close(ctx); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// r418 does what the daemon does, with a library of driver R418.
func r418(t *testing.T, d *nvidia.Driver, _ string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := d.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Scan(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := stubSnapshot()
	for i := range want.GPUs {
		want.GPUs[i].Architecture, want.GPUs[i].MIG, want.GPUs[i].MIGDevices = "", inventory.MIGUnsupported, nil
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Scan (-want +got):\n%s", diff)
	}
	if event, err := s.Next(ctx); err != nil || event.XID != 43 {
		t.Errorf("Next: got %+v and error %v", event, err)
	}
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
}

// A countingLibrary counts some calls on GPUs.
type countingLibrary struct {
	nvml.Interface
	migMode, links, uuids int
}

type countingDevice struct {
	nvml.Device
	library *countingLibrary
}

func (l *countingLibrary) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(index)
	return countingDevice{d, l}, ret
}

func (d countingDevice) GetMigMode() (int, int, nvml.Return) {
	d.library.migMode++
	return d.Device.GetMigMode()
}

func (d countingDevice) GetNvLinkState(lane int) (nvml.EnableState, nvml.Return) {
	d.library.links++
	return d.Device.GetNvLinkState(lane)
}

func (d countingDevice) GetUUID() (string, nvml.Return) {
	d.library.uuids++
	return d.Device.GetUUID()
}

// TestNotSupportedIsRemembered looks at a GPU without MIG and NVLink three times in each of two
// sessions.
func TestNotSupportedIsRemembered(t *testing.T) {
	t.Parallel()
	node := newNode(t, "t4")
	lib := &countingLibrary{Interface: node.NVML()}
	d := nvidia.New(nvidia.Options{Library: lib, Root: node.Root()})
	for range 2 {
		s, err := d.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := s.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	compare(t, "calls of nvmlDeviceGetMigMode", 2, lib.migMode)
	compare(t, "calls of nvmlDeviceGetNvLinkState", 2*nvml.NVLINK_MAX_LINKS, lib.links)
	compare(t, "calls of nvmlDeviceGetUUID, which is supported", 2*3, lib.uuids)
}

// TestNotSupportedIsForgotten has MIG devices come and go: with them, rows cannot be read.
func TestNotSupportedIsForgotten(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"7g.80gb"}})
	for _, known := range []bool{false, true, false, true} {
		r.scan()
		reading, err := r.Read(r.ctx, r.uuid(0))
		if err != nil {
			t.Fatal(err)
		}
		compare(t, "rows are known", known, reading.RowRemapPending.Known)
		change := simulator.Fault{Kind: simulator.KindMIG, GPU: "0"}
		if known {
			change.Profiles = []string{"7g.80gb"}
		}
		r.inject(change)
	}
}
