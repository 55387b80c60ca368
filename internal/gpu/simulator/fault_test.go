package simulator_test

import (
	"encoding/binary"
	"encoding/json"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// inject makes a fault happen.
func inject(t *testing.T, n *simulator.Node, f simulator.Fault) {
	t.Helper()
	if err := n.Inject(f); err != nil {
		t.Fatal(err)
	}
}

// drain returns the types and data of all events in a set, and what ended them.
func drain(set nvml.EventSet) ([][2]uint64, nvml.Return) {
	var all [][2]uint64
	for {
		e, ret := set.Wait(0)
		if ret != nvml.SUCCESS {
			return all, ret
		}
		all = append(all, [2]uint64{e.EventType, e.EventData})
	}
}

// recovery reads the recovery action of a GPU.
func recovery(t *testing.T, d nvml.Device) (nvml.DeviceGpuRecoveryAction, nvml.Return) {
	t.Helper()
	v := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	must(t, "GetFieldValues", d.GetFieldValues(v))
	return nvml.DeviceGpuRecoveryAction(binary.NativeEndian.Uint32(v[0].Value[:4])), nvml.Return(v[0].NvmlReturn)
}

func TestXID(t *testing.T) {
	const xid, action, gone = nvml.EventTypeXidCriticalError, nvml.EventTypeGpuRecoveryAction,
		nvml.EventTypeGpuUnavailableError
	for name, c := range map[string]struct {
		profile string
		fault   simulator.Fault
		events  [][2]uint64
		end     nvml.Return
		action  nvml.DeviceGpuRecoveryAction
		known   nvml.Return
	}{
		"application": {"dgx-h100", simulator.Fault{XID: 13}, [][2]uint64{{xid, 13}}, nvml.ERROR_TIMEOUT, 0,
			nvml.SUCCESS},
		"reset": {
			"dgx-h100", simulator.Fault{XID: 48}, [][2]uint64{{xid, 48}, {action, 0}}, nvml.ERROR_TIMEOUT,
			nvml.GPU_RECOVERY_ACTION_GPU_RESET, nvml.SUCCESS,
		},
		"another action": {
			"dgx-h100", simulator.Fault{XID: 48, Action: "reboot"}, [][2]uint64{{xid, 48}, {action, 0}},
			nvml.ERROR_TIMEOUT,
			nvml.GPU_RECOVERY_ACTION_NODE_REBOOT, nvml.SUCCESS,
		},
		"reset, before the driver says so": {
			"dgx-a100", simulator.Fault{XID: 143}, [][2]uint64{{xid, 143}}, nvml.ERROR_TIMEOUT, 0, nvml.SUCCESS,
		},
		"old driver": {"dgx-1", simulator.Fault{XID: 48}, [][2]uint64{{xid, 48}}, nvml.ERROR_TIMEOUT, 0,
			nvml.ERROR_NOT_SUPPORTED},
		"off the bus": {"dgx-h100", simulator.Fault{XID: 79}, [][2]uint64{{xid, 79}, {gone, 0}}, nvml.ERROR_GPU_IS_LOST,
			0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, lib := start(t, c.profile)
			d := handle(t, lib, 2)
			set := listen(t, lib, handle(t, lib, 0), d)
			c.fault.Kind, c.fault.GPU = simulator.KindXID, uuid(t, d)
			inject(t, n, c.fault)
			events, end := drain(set)
			if diff := cmp.Diff(c.events, events); diff != "" || end != c.end {
				t.Errorf("the events end with %v (-want +got):\n%s", end, diff)
			}
			if c.end == nvml.ERROR_GPU_IS_LOST {
				return
			}
			if got, ret := recovery(t, d); got != c.action || ret != c.known {
				t.Errorf("the recovery action is %v, %v, want %v, %v", got, ret, c.action, c.known)
			}
		})
	}
}

func TestEventsOfInstances(t *testing.T) {
	n, lib := start(t, "a100-mig-mixed")
	set := listen(t, lib, handle(t, lib, 6))
	one, two := 1, 2
	for _, c := range []struct {
		fault  simulator.Fault
		gi, ci uint32
	}{
		{simulator.Fault{GPU: "6"}, unattributed, unattributed},
		{simulator.Fault{GPU: "6", GI: &two}, 2, unattributed},
		{simulator.Fault{GPU: "6", GI: &one, CI: &two}, 1, 2},
		{simulator.Fault{GPU: "6:1"}, 1, 1},
		{simulator.Fault{GPU: n.List()[6].MIG[3].UUID}, 2, 0},
	} {
		c.fault.Kind, c.fault.XID = simulator.KindXID, 94
		inject(t, n, c.fault)
		e, ret := set.Wait(0)
		must(t, "Wait", ret)
		if e.GpuInstanceId != c.gi || e.ComputeInstanceId != c.ci || e.EventData != 94 {
			t.Errorf("%+v: got %+v", c.fault, e)
		}
	}
}

func TestLostAndRestored(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	lost, other := handle(t, lib, 3), handle(t, lib, 4)
	set := listen(t, lib, lost, other)
	inject(t, n, simulator.Fault{Kind: simulator.KindLost, GPU: "3"})
	for range 3 {
		if _, ret := set.Wait(1000); ret != nvml.ERROR_GPU_IS_LOST {
			t.Fatalf("Wait with a lost GPU answered %v", ret)
		}
	}
	if _, ret := lost.GetUUID(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("a lost GPU answered %v", ret)
	}
	if _, ret := lib.DeviceGetHandleByIndex(3); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("looking up a lost GPU answered %v", ret)
	}
	if _, ret := other.GetTopologyCommonAncestor(lost); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("the ancestor common with a lost GPU: %v", ret)
	}
	must(t, "GetUUID of another GPU", second(other.GetUUID()))
	rest := listen(t, lib, other)
	if _, ret := rest.Wait(0); ret != nvml.ERROR_TIMEOUT {
		t.Errorf("Wait without the lost GPU answered %v", ret)
	}

	inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: "3"})
	if _, ret := lost.GetUUID(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("a GPU that is back answered its old session %v", ret)
	}
	again := open(t, n)
	must(t, "GetUUID in a new session", second(handle(t, again, 3).GetUUID()))
	if s := n.List()[3]; s.State != "present" || s.Faults != nil {
		t.Errorf("after restore: %+v", s)
	}
}

// second returns the answer of a call that has a value too.
func second[T any](_ T, ret nvml.Return) nvml.Return { return ret }

func TestHotPlug(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	fourth := handle(t, lib, 4)
	inject(t, n, simulator.Fault{Kind: simulator.KindRemove, GPU: "3"})
	if count, _ := lib.DeviceGetCount(); count != 8 {
		t.Errorf("the open session has %d GPUs", count)
	}
	if _, ret := lib.DeviceGetHandleByIndex(3); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("looking up an unplugged GPU answered %v", ret)
	}
	after := open(t, n)
	if count, _ := after.DeviceGetCount(); count != 7 {
		t.Errorf("a new session has %d GPUs", count)
	}
	if got, want := uuid(t, handle(t, after, 3)), uuid(t, fourth); got != want {
		t.Errorf("index 3 is %s now, want %s", got, want)
	}
	if s := n.List()[3]; s.State != "removed" || s.Index != 3 {
		t.Errorf("List says %+v", s)
	}
	inject(t, n, simulator.Fault{Kind: simulator.KindAdd, GPU: n.List()[3].UUID})
	if count, _ := open(t, n).DeviceGetCount(); count != 8 {
		t.Errorf("after add a new session has %d GPUs", count)
	}
}

func TestMIGLayoutChanges(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	gpu := handle(t, lib, 1)
	set := listen(t, lib, gpu)
	layout := func(profiles ...string) []string {
		inject(t, n, simulator.Fault{Kind: simulator.KindMIG, GPU: "1", Profiles: profiles})
		if events, _ := drain(set); len(events) != 1 || events[0][0] != nvml.EventMigConfigChange {
			t.Errorf("events of the change: %v", events)
		}
		var names []string
		for _, m := range migDevices(t, gpu) {
			names = append(names, migName(t, gpu, m))
		}
		return names
	}
	if diff := cmp.Diff([]string{"3g.40gb", "1g.10gb"}, layout("1g.10gb", "3g.40gb")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	old := migDevices(t, gpu)[1]
	if mode, _, ret := gpu.GetMigMode(); mode != nvml.DEVICE_MIG_ENABLE || ret != nvml.SUCCESS {
		t.Errorf("MIG mode %v, %v", mode, ret)
	}
	if _, _, _, _, ret := gpu.GetRemappedRows(); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("GetRemappedRows with MIG instances answered %v", ret)
	}
	if got := layout(); got != nil {
		t.Errorf("MIG devices with the mode off: %v", got)
	}
	if _, ret := old.GetUUID(); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a MIG device that is no more answered %v", ret)
	}
	if mode, _, _ := gpu.GetMigMode(); mode != nvml.DEVICE_MIG_DISABLE {
		t.Errorf("MIG mode %v", mode)
	}
}

func TestDriverComesAndGoes(t *testing.T) {
	n, lib := start(t, "dgx-h100")
	for _, c := range []struct {
		driver string
		want   nvml.Return
	}{
		{"missing", nvml.ERROR_DRIVER_NOT_LOADED},
		{"no-library", nvml.ERROR_LIBRARY_NOT_FOUND},
		{"590.48.01", nvml.ERROR_LIB_RM_VERSION_MISMATCH},
	} {
		inject(t, n, simulator.Fault{Kind: simulator.KindDriver, Driver: c.driver})
		if _, ret := lib.DeviceGetCount(); ret != c.want {
			t.Errorf("driver %s: a call of the open session answered %v, want %v", c.driver, ret, c.want)
		}
		if ret := lib.Init(); ret != c.want {
			t.Errorf("driver %s: Init answered %v, want %v", c.driver, ret, c.want)
		}
	}
	process := open(t, n)
	if version, ret := process.SystemGetDriverVersion(); version != "590.48.01" || ret != nvml.SUCCESS {
		t.Errorf("a new process sees driver %s, %v", version, ret)
	}
	inject(t, n, simulator.Fault{Kind: simulator.KindRestore})
	must(t, "DeviceGetCount after restore", second(lib.DeviceGetCount()))
}

func TestRebootRenewsAll(t *testing.T) {
	n, lib := start(t, "t4")
	gpu := handle(t, lib, 0)
	inject(t, n, simulator.Fault{Kind: simulator.KindECC, GPU: "0"})
	inject(t, n, simulator.Fault{Kind: simulator.KindHang})
	inject(t, n, simulator.Fault{Kind: simulator.KindReboot})
	if _, ret := gpu.GetUUID(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("a handle from before the reboot answered %v", ret)
	}
	after := handle(t, open(t, n), 0)
	volatile, _ := after.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	aggregate, _ := after.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC)
	if volatile != 0 || aggregate != 1 {
		t.Errorf("memory errors after a reboot: %d volatile, %d in all; want 0 and 1", volatile, aggregate)
	}
}

func TestOldDriversLackFunctions(t *testing.T) {
	_, lib := start(t, "dgx-1")
	for symbol, want := range map[string]bool{
		"nvmlDeviceGetUUID": true, "nvmlDeviceGetNvLinkRemoteDeviceType": true, "nvmlDeviceGetGpuFabricInfo": false,
		"nvmlDeviceGetGpuFabricInfoV": false, "nvmlDeviceGetUnrepairableMemoryFlag_v1": false, "cuInit": false,
	} {
		if err := lib.Extensions().LookupSymbol(symbol); (err == nil) != want {
			t.Errorf("LookupSymbol(%s): %v", symbol, err)
		}
	}
	gpu := handle(t, lib, 0)
	if mask, _ := gpu.GetSupportedEventTypes(); mask&nvml.EventTypeGpuRecoveryAction != 0 ||
		mask&nvml.EventTypeXidCriticalError == 0 {
		t.Errorf("event types of R470: %#x", mask)
	}
	set, ret := lib.EventSetCreate()
	must(t, "EventSetCreate", ret)
	if ret := gpu.RegisterEvents(nvml.EventTypeGpuRecoveryAction, set); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("registering for an event that R470 lacks answered %v", ret)
	}
	defer func() {
		if recover() == nil {
			t.Error("calling a function that R470 lacks did not end the process")
		}
	}()
	_, _ = gpu.GetGpuFabricInfo()
}

func TestRefusedFaults(t *testing.T) {
	n, _ := start(t, "dgx-h100")
	inject(t, n, simulator.Fault{Kind: simulator.KindLost, GPU: "6"})
	inject(t, n, simulator.Fault{Kind: simulator.KindRemove, GPU: "7"})
	before := n.List()
	one := 1
	for _, c := range []struct {
		fault simulator.Fault
		want  string
	}{
		{simulator.Fault{Kind: "x"}, `no kind "x": give one of add, answer, clients, driver,`},
		{simulator.Fault{Kind: simulator.KindXID, GPU: "0"}, "xid is missing"},
		{simulator.Fault{Kind: simulator.KindXID, XID: 3}, "gpu is missing"},
		{simulator.Fault{Kind: simulator.KindXID, GPU: "8", XID: 3},
			`no GPU or MIG device "8": give an index from 0 to 7`},
		{simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 48, Action: "x"},
			`no action "x": give one of drain-and-reset,`},
		{simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 3, GI: &one}, "GPU 0 has no GPU instance 1"},
		{simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 3, CI: &one}, "ci is given without gi"},
		{simulator.Fault{Kind: simulator.KindLost, GPU: "0", XID: 3}, "takes no xid: it takes gpu"},
		{simulator.Fault{Kind: simulator.KindLost, GPU: "6"}, "GPU 6 is off the bus: bring it back with restore first"},
		{simulator.Fault{Kind: simulator.KindRestore, GPU: "7"}, "GPU 7 is unplugged: plug it in with add first"},
		{simulator.Fault{Kind: simulator.KindAdd, GPU: "0"}, "GPU 0 is plugged in already"},
		{simulator.Fault{Kind: simulator.KindHang, Call: "DeviceGetFoo"}, `no call "DeviceGetFoo": give one of`},
		{simulator.Fault{Kind: simulator.KindHang, Delay: "1s"}, "takes no delay: it takes gpu, call, count"},
		{simulator.Fault{Kind: simulator.KindSlow, GPU: "0"},
			`delay "" is not a time above zero: give how much longer a call takes, such as 20ms`},
		{simulator.Fault{Kind: simulator.KindSlow, GPU: "0", Delay: "20"}, `delay "20" is not a time above zero`},
		{simulator.Fault{Kind: simulator.KindPersistence, State: "x"}, `no state "x": give one of off, on`},
		{simulator.Fault{Kind: simulator.KindFail, Call: "Init", Return: "X"}, `no return "X": give one of`},
		{simulator.Fault{Kind: simulator.KindEvent, GPU: "0", Event: "x"}, `no event "x": give one of`},
		{simulator.Fault{Kind: simulator.KindFabric, GPU: "0", State: "x"},
			`no state "x": give one of completed, in-progress, not-started`},
		{simulator.Fault{Kind: simulator.KindDriver, Driver: "x"}, `driver "x" is not a version`},
		{simulator.Fault{Kind: simulator.KindDriver, GPU: "0", Driver: "missing"}, "takes no gpu"},
		{simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: []string{"9g.1gb"}},
			`has no MIG device "9g.1gb"`},
		{simulator.Fault{Kind: simulator.KindNVLink, GPU: "0", Link: new(int)}, ""},
	} {
		err := n.Inject(c.fault)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: got %v, want %q", c.fault, err, c.want)
		}
	}
	inject(t, n, simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
	if diff := cmp.Diff(before, n.List()); diff != "" {
		t.Errorf("refused faults changed the node (-before +after):\n%s", diff)
	}
}

func TestFaultIsJSON(t *testing.T) {
	gi := 3
	want := simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 94, GI: &gi}
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != `{"kind":"xid","gpu":"1","xid":94,"gi":3}` {
		t.Errorf("marshalled %s", text)
	}
	var got simulator.Fault
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
