package simulator_test

import (
	"math"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// start returns a node with a profile, and a library with an open session.
func start(t *testing.T, profile string) (*simulator.Node, nvml.Interface) {
	t.Helper()
	p, err := simulator.Load(profile)
	if err != nil {
		t.Fatal(err)
	}
	n := simulator.New(p)
	t.Cleanup(n.Close)
	return n, open(t, n)
}

// open returns a new library of a node with an open session.
func open(t *testing.T, n *simulator.Node) nvml.Interface {
	t.Helper()
	lib := n.NVML()
	must(t, "Init", lib.Init())
	return lib
}

// unattributed is the ID of an instance in an event that is about none.
const unattributed uint32 = math.MaxUint32

// must fails the test unless a call succeeded.
func must(t *testing.T, call string, ret nvml.Return) {
	t.Helper()
	if ret != nvml.SUCCESS {
		t.Fatalf("%s answered %v", call, ret)
	}
}

// handle returns the GPU with an index.
func handle(t *testing.T, lib nvml.Interface, index int) nvml.Device {
	t.Helper()
	d, ret := lib.DeviceGetHandleByIndex(index)
	must(t, "DeviceGetHandleByIndex", ret)
	return d
}

// listen returns an event set with all events of the given GPUs.
func listen(t *testing.T, lib nvml.Interface, gpus ...nvml.Device) nvml.EventSet {
	t.Helper()
	set, ret := lib.EventSetCreate()
	must(t, "EventSetCreate", ret)
	for _, d := range gpus {
		mask, ret := d.GetSupportedEventTypes()
		must(t, "GetSupportedEventTypes", ret)
		must(t, "RegisterEvents", d.RegisterEvents(mask, set))
	}
	return set
}

func TestSessions(t *testing.T) {
	n, first := start(t, "dgx-h100")
	gpu := handle(t, first, 0)
	second := open(t, n)
	must(t, "Init again", first.Init())
	if got := n.Stats(); got != (simulator.Stats{Sessions: 2}) {
		t.Errorf("with two libraries open: %+v", got)
	}
	must(t, "Shutdown", first.Shutdown())
	if _, ret := gpu.GetUUID(); ret != nvml.SUCCESS {
		t.Errorf("GetUUID after one of two Shutdowns answered %v", ret)
	}
	must(t, "Shutdown", first.Shutdown())
	if _, ret := gpu.GetUUID(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("GetUUID on a stale handle answered %v", ret)
	}
	if _, ret := first.DeviceGetCount(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("DeviceGetCount before Init answered %v", ret)
	}
	if ret := first.Shutdown(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("Shutdown without Init answered %v", ret)
	}
	if count, ret := second.DeviceGetCount(); count != 8 || ret != nvml.SUCCESS {
		t.Errorf("the other library has %d GPUs, %v", count, ret)
	}
	must(t, "Shutdown", second.Shutdown())
	if got := n.Stats(); got != (simulator.Stats{StaleCalls: 1}) {
		t.Errorf("with all closed: %+v", got)
	}
}

func TestEventsReachTheirSet(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	gpu := handle(t, lib, 3)
	set := listen(t, lib, gpu)
	if err := n.Inject(simulator.Fault{Kind: simulator.KindXID, GPU: "2", XID: 13}); err != nil {
		t.Fatal(err)
	}
	if err := n.Inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 13}); err != nil {
		t.Fatal(err)
	}
	event, ret := set.Wait(0)
	must(t, "Wait", ret)
	want := nvml.EventData{
		Device: gpu, EventType: nvml.EventTypeXidCriticalError, EventData: 13,
		GpuInstanceId: unattributed, ComputeInstanceId: unattributed,
	}
	if event != want {
		t.Errorf("got %+v, want %+v", event, want)
	}
	if _, ret := set.Wait(1); ret != nvml.ERROR_TIMEOUT {
		t.Errorf("Wait without an event answered %v", ret)
	}
}

// BenchmarkLook is what a look at a GPU and its readings costs a user of the simulator.
func BenchmarkLook(b *testing.B) {
	p, err := simulator.Load("dgx-h100")
	if err != nil {
		b.Fatal(err)
	}
	n := simulator.New(p)
	defer n.Close()
	lib := n.NVML()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		b.Fatal(ret)
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	b.ReportAllocs()
	for b.Loop() {
		d, _ := lib.DeviceGetHandleByIndex(5)
		_, _ = d.GetUUID()
		_, _ = d.GetPciInfo()
		_ = d.GetFieldValues(values)
		for link := range 18 {
			_, _ = d.GetNvLinkState(link)
		}
	}
}

// BenchmarkStart is what it costs to have a node.
func BenchmarkStart(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		p, err := simulator.Load("dgx-h100")
		if err != nil {
			b.Fatal(err)
		}
		simulator.New(p).Close()
	}
}
