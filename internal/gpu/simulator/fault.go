package simulator

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A Fault is an event injected into a node. Kind decides which fields are used; all others must be
// unset.
type Fault struct {
	Kind Kind `json:"kind"`
	// GPU is a GPU by index or UUID, or, for faults of instances, a MIG device by i:j or UUID.
	GPU string `json:"gpu,omitempty"`
	// XID is the driver's error number, or the SXid of an NVSwitch.
	XID uint64 `json:"xid,omitempty"`
	// GI and CI are the instance of an event; nil means the whole GPU.
	GI *int `json:"gi,omitempty"`
	CI *int `json:"ci,omitempty"`
	// Event is an event type, such as "double-bit-ecc".
	Event string `json:"event,omitempty"`
	// Action is the recovery action requested by the driver from now on: "none", "reset", "reboot",
	// "drain-p2p", "drain-and-reset" or "recover-imex". For an XID the default is the request of a
	// real driver.
	Action string `json:"action,omitempty"`
	// Profiles are the MIG devices of a layout, such as "1g.10gb" and "1c.3g.40gb"; an empty list
	// turns MIG mode off.
	Profiles []string `json:"profiles,omitempty"`
	// Call is an NVML function without its "nvml", such as "DeviceGetFieldValues" or
	// "EventSetWait"; empty means all.
	Call string `json:"call,omitempty"`
	// Return is the return code of a call, such as "UNKNOWN", "RESET_REQUIRED" or "GPU_IS_LOST".
	Return string `json:"return,omitempty"`
	// Value replaces the value returned by a call: text, or a number. Text in quotes is parsed as a
	// Go string ("\xff").
	Value string `json:"value,omitempty"`
	// Driver is "missing" (the module is not loaded), "no-library", or the newly installed version;
	// for driver-files, the version of the files.
	Driver string `json:"driver,omitempty"`
	// State is the state of the fabric: "not-started", "in-progress" or "completed"; the state of
	// persistence mode: "on" or "off"; or the behaviour of a reset: "works", "fails", "hangs",
	// "another" or "peers".
	State string `json:"state,omitempty"`
	// Link is the number of an NVLink; nil means all links of the GPU.
	Link *int `json:"link,omitempty"`
	// Count is a number of memory errors, processes or packets, or of calls to hang or slow down; 0
	// calls means all.
	Count uint64 `json:"count,omitempty"`
	// Clients are the pod UIDs of processes that have the GPU open without computing, like DCGM,
	// one process each; "host" is a process without a pod. An empty list ends the processes.
	Clients []string `json:"clients,omitempty"`
	// Delay is the additional duration of a call, such as "20ms" or "45s".
	Delay string `json:"delay,omitempty"`
}

// Kind is the kind of a Fault.
type Kind string

// The kinds of faults. Lasting faults end when restored.
const (
	KindXID        Kind = "xid"         // the driver reports and logs an XID; 79 also loses the GPU
	KindLoggedXID  Kind = "logged-xid"  // the driver logs an XID, Count times, and reports nothing
	KindLoggedSXID Kind = "logged-sxid" // the driver logs a fatal error of an NVSwitch
	KindEvent      Kind = "event"       // the driver reports an event of another type
	KindLost       Kind = "lost"        // a GPU falls off the bus without any event
	// A GPU is healthy and on the bus again; without a GPU: all GPUs, and the driver.
	KindRestore        Kind = "restore"
	KindRemove         Kind = "remove"              // a GPU is unplugged
	KindAdd            Kind = "add"                 // an unplugged GPU is plugged in again
	KindMIG            Kind = "mig"                 // a GPU gets another MIG layout, or leaves MIG mode
	KindHang           Kind = "hang"                // a call does not return, on one GPU or on all
	KindSlow           Kind = "slow"                // a call takes longer, on one GPU or on all
	KindFail           Kind = "fail"                // a call returns an error, on one GPU or on all
	KindAnswer         Kind = "answer"              // a call returns another value, for a GPU, a MIG device or the node
	KindRecoveryAction Kind = "recovery-action"     // the driver requests a recovery action
	KindRemapFailure   Kind = "remap-failure"       // a memory row cannot be remapped
	KindRemapPending   Kind = "remap-pending"       // a memory row will be remapped at the next reset
	KindUnrepairable   Kind = "unrepairable-memory" // the memory has a fault beyond remapping
	KindSRAMThreshold  Kind = "sram-threshold"      // SRAM errors passed the threshold for a replacement
	KindThrottle       Kind = "throttle"            // the clocks are low because the GPU is hot
	KindPCIeReplays    Kind = "pcie-replays"        // Count more PCIe packets were repeated
	KindECC            Kind = "ecc"                 // uncorrected memory errors, with their event
	KindFabric         Kind = "fabric"              // the registration with the NVSwitch fabric has another state
	KindPersistence    Kind = "persistence"         // persistence mode is switched on or off
	KindNVLink         Kind = "nvlink"              // an NVLink stops working
	KindProcesses      Kind = "processes"           // Count processes compute on the GPU, or on a MIG device
	KindClients        Kind = "clients"             // processes have the GPU open without computing
	KindDriver         Kind = "driver"              // the driver is unloaded or replaced
	KindDriverFiles    Kind = "driver-files"        // the driver's files are replaced, but not the kernel module
	// A GPU is reset. It loses its MIG instances, and since Hopper also MIG mode.
	KindReset    Kind = "reset"
	KindSMIReset Kind = "smi-reset" // the behaviour of nvidia-smi for a reset of a GPU
	KindReboot   Kind = "reboot"    // the machine restarts: another boot ID, and all GPUs new and reset
)

// A rule has the fields and the effect of a kind of fault.
type rule struct {
	gpu   need
	takes []string // fields besides kind and gpu
	apply func(n *Node, f Fault, t target) error
}

// need says whether a fault needs a GPU.
type need int

const (
	noGPU need = iota
	oneGPU
	maybeGPU
)

// rules returns the fields and the effect of each kind of fault.
func rules() map[Kind]rule {
	return map[Kind]rule{
		KindXID:            {oneGPU, []string{"xid", "gi", "ci", "action"}, (*Node).xidLocked},
		KindLoggedXID:      {oneGPU, []string{"xid", "gi", "ci", "count"}, (*Node).loggedXIDLocked},
		KindLoggedSXID:     {noGPU, []string{"xid"}, (*Node).loggedSXIDLocked},
		KindEvent:          {oneGPU, []string{"event", "gi", "ci"}, (*Node).eventLocked},
		KindLost:           {oneGPU, nil, on(func(g *gpu, _ Fault) { g.isLost = true })},
		KindRestore:        {maybeGPU, nil, (*Node).restoreLocked},
		KindRemove:         {oneGPU, nil, (*Node).removeLocked},
		KindAdd:            {oneGPU, nil, (*Node).addLocked},
		KindMIG:            {oneGPU, []string{"profiles"}, (*Node).migLocked},
		KindHang:           {maybeGPU, []string{"call", "count"}, (*Node).stallsLocked},
		KindSlow:           {maybeGPU, []string{"call", "count", "delay"}, (*Node).stallsLocked},
		KindFail:           {maybeGPU, []string{"call", "return"}, (*Node).failLocked},
		KindAnswer:         {maybeGPU, []string{"call", "value"}, (*Node).answersLocked},
		KindRecoveryAction: {oneGPU, []string{"action"}, (*Node).recoveryLocked},
		KindRemapFailure:   {oneGPU, nil, on(func(g *gpu, _ Fault) { g.remapFailure = true })},
		KindRemapPending: {oneGPU, nil, on(func(g *gpu, _ Fault) {
			g.remappedRows, g.remapPending = g.remappedRows+1, true
		})},
		KindUnrepairable:  {oneGPU, nil, on(func(g *gpu, _ Fault) { g.unrepairable = true })},
		KindSRAMThreshold: {oneGPU, nil, on(func(g *gpu, _ Fault) { g.sramThreshold = true })},
		KindThrottle:      {oneGPU, nil, on(func(g *gpu, _ Fault) { g.isThrottled = true })},
		KindPCIeReplays:   {oneGPU, []string{"count"}, on(func(g *gpu, f Fault) { g.replays += int(f.Count) })},
		KindECC:           {oneGPU, []string{"count"}, (*Node).eccLocked},
		KindFabric:        {oneGPU, []string{"state", "return"}, (*Node).fabricLocked},
		KindPersistence:   {maybeGPU, []string{"state"}, (*Node).persistenceLocked},
		KindNVLink:        {oneGPU, []string{"link"}, (*Node).nvlinkLocked},
		KindProcesses:     {oneGPU, []string{"count"}, (*Node).processesLocked},
		KindClients: {oneGPU, []string{"clients"},
			on(func(g *gpu, f Fault) { g.clients = slices.Clone(f.Clients) })},
		KindDriver:      {noGPU, []string{"driver"}, (*Node).driverLocked},
		KindDriverFiles: {noGPU, []string{"driver"}, (*Node).driverFilesLocked},
		KindReset:       {oneGPU, nil, (*Node).resetLocked},
		KindSMIReset:    {oneGPU, []string{"state"}, (*Node).smiResetLocked},
		KindReboot:      {noGPU, nil, (*Node).rebootLocked},
	}
}

// on returns the apply function of a fault that changes one GPU.
func on(change func(g *gpu, f Fault)) func(*Node, Fault, target) error {
	return func(_ *Node, f Fault, t target) error {
		change(t.gpu, f)
		return nil
	}
}

// Kinds returns the kinds of faults, sorted.
func Kinds() []Kind { return slices.Sorted(maps.Keys(rules())) }

// Inject injects a fault. When it returns, calls answer accordingly and events are in their sets.
// An invalid fault is refused without effect.
func (n *Node) Inject(f Fault) error {
	r, ok := rules()[f.Kind]
	if !ok {
		return fmt.Errorf("inject fault: no kind %q: give one of %s", f.Kind, join(Kinds()))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	t, err := n.aimLocked(f, r)
	if err == nil {
		err = r.apply(n, f, t)
	}
	if err != nil {
		return fmt.Errorf("inject %s: %w", f.Kind, err)
	}
	n.changeLocked()
	return nil
}

// aimLocked returns the target of a fault. It refuses fields not used by the kind.
func (n *Node) aimLocked(f Fault, r rule) (target, error) {
	for _, name := range f.fields() {
		if !slices.Contains(r.takes, name) {
			return target{}, fmt.Errorf("takes no %s: it takes %s", name, join(append(r.gpu.words(), r.takes...)))
		}
	}
	switch {
	case f.GPU == "" && r.gpu == oneGPU:
		return target{}, errors.New("gpu is missing: give an index or a UUID")
	case f.GPU == "":
		return target{}, nil
	case r.gpu == noGPU:
		return target{}, errors.New("takes no gpu: it concerns the whole node")
	}
	t, err := n.targetLocked(f.GPU)
	switch {
	case err != nil:
		return target{}, err
	case t.inst != nil && !slices.Contains(r.takes, "gi") && f.Kind != KindAnswer && f.Kind != KindProcesses:
		return target{}, fmt.Errorf("%s is a MIG device: give its GPU, %d", f.GPU, t.gpu.slot)
	case t.gpu.isRemoved && f.Kind != KindAdd:
		return target{}, fmt.Errorf("GPU %d is unplugged: plug it in with %s first", t.gpu.slot, KindAdd)
	case t.gpu.isLost && !t.gpu.isRemoved && f.Kind != KindRestore && f.Kind != KindRemove:
		return target{}, fmt.Errorf("GPU %d is off the bus: bring it back with %s first", t.gpu.slot, KindRestore)
	}
	return t, nil
}

// words returns the words of an error about the GPU of a fault.
func (n need) words() []string {
	if n == noGPU {
		return nil
	}
	return []string{"gpu"}
}

// fields returns the names of the set fields, without Kind and GPU.
func (f Fault) fields() []string {
	var set []string
	for _, field := range []struct {
		name string
		set  bool
	}{
		{"xid", f.XID != 0}, {"gi", f.GI != nil}, {"ci", f.CI != nil}, {"event", f.Event != ""},
		{"action", f.Action != ""},
		{"profiles", len(f.Profiles) > 0}, {"call", f.Call != ""}, {"return", f.Return != ""},
		{"driver", f.Driver != ""},
		{"state", f.State != ""}, {"link", f.Link != nil}, {"count", f.Count != 0},
		{"clients", len(f.Clients) > 0}, {"delay", f.Delay != ""}, {"value", f.Value != ""},
	} {
		if field.set {
			set = append(set, field.name)
		}
	}
	return set
}

// join joins words for a message.
func join[S ~string](words []S) string {
	if len(words) == 0 {
		return "nothing"
	}
	text := make([]string, len(words))
	for i, w := range words {
		text[i] = string(w)
	}
	return strings.Join(text, ", ")
}

// choose returns the value for a word.
func choose[T any](what, word string, choices map[string]T) (T, error) {
	value, ok := choices[word]
	if !ok {
		return value, fmt.Errorf("no %s %q: give one of %s", what, word, join(slices.Sorted(maps.Keys(choices))))
	}
	return value, nil
}

// checkCall refuses a call missing from the simulator.
func checkCall(name string) error {
	if name != "" && !slices.Contains(calls, name) {
		return fmt.Errorf("the simulator has no call %q: give one of %s, or none for all", name, join(calls))
	}
	return nil
}

// stallsLocked makes calls hang or slow down.
func (n *Node) stallsLocked(f Fault, t target) error {
	if err := checkCall(f.Call); err != nil {
		return err
	}
	s := &stall{call: f.Call, slot: t.slot(), hasCount: f.Count > 0, remainingCalls: f.Count}
	if f.Kind == KindSlow {
		delay, err := time.ParseDuration(f.Delay)
		if err != nil || delay <= 0 {
			return fmt.Errorf("delay %q is not a time above zero: give how much longer a call takes, such as 20ms",
				f.Delay)
		}
		s.delay = delay
	}
	n.stalls = append(n.stalls, s)
	return nil
}

func (n *Node) failLocked(f Fault, t target) error {
	if err := checkCall(f.Call); err != nil {
		return err
	}
	ret, err := choose("return", f.Return, returns)
	if err != nil {
		return err
	}
	n.failures = append(n.failures, failure{call: f.Call, slot: t.slot(), ret: ret})
	return nil
}

func (n *Node) persistenceLocked(f Fault, t target) error {
	off, err := choose("state", f.State, map[string]bool{"on": false, "off": true})
	if err != nil {
		return err
	}
	for _, g := range n.gpus {
		if t.slot() == anywhere || t.slot() == g.slot {
			g.transient = off
		}
	}
	return nil
}

// forgetLocked resets the state that a GPU without persistence mode loses with its last user.
func (n *Node) forgetLocked() {
	for _, g := range n.gpus {
		if g.transient && len(n.sessions) == 0 {
			g.uncorrectedErrors, g.computeMode = 0, nvml.COMPUTEMODE_DEFAULT
		}
	}
}

// slot returns the position of the target's GPU, or anywhere.
func (t target) slot() int {
	if t.gpu == nil {
		return anywhere
	}
	return t.gpu.slot
}

func (n *Node) driverLocked(f Fault, _ target) error {
	switch f.Driver {
	case "missing":
		n.driver.initError = nvml.ERROR_DRIVER_NOT_LOADED
		n.loads++
		for _, g := range n.gpus { // a newly loaded driver binds every GPU again
			n.bindings++
			g.binding = n.bindings
		}
	case "no-library":
		n.driver.initError = nvml.ERROR_LIBRARY_NOT_FOUND
	default:
		b, err := branch(f.Driver)
		if err != nil {
			return fmt.Errorf("%w, missing, or no-library", err)
		}
		n.driver = driver{version: f.Driver, branch: b}
		n.loads++
	}
	return nil
}

func (n *Node) driverFilesLocked(f Fault, _ target) error {
	if _, err := branch(f.Driver); err != nil {
		return err
	}
	n.driver.files = f.Driver
	return nil
}

// returns are the errors that can be injected into calls.
var returns = map[string]nvml.Return{
	"DRIVER_NOT_LOADED":       nvml.ERROR_DRIVER_NOT_LOADED,
	"GPU_IS_LOST":             nvml.ERROR_GPU_IS_LOST,
	"GPU_NOT_FOUND":           nvml.ERROR_GPU_NOT_FOUND,
	"INVALID_ARGUMENT":        nvml.ERROR_INVALID_ARGUMENT,
	"IN_USE":                  nvml.ERROR_IN_USE,
	"IRQ_ISSUE":               nvml.ERROR_IRQ_ISSUE,
	"LIB_RM_VERSION_MISMATCH": nvml.ERROR_LIB_RM_VERSION_MISMATCH,
	"MEMORY":                  nvml.ERROR_MEMORY,
	"NO_PERMISSION":           nvml.ERROR_NO_PERMISSION,
	"NOT_FOUND":               nvml.ERROR_NOT_FOUND,
	"NOT_READY":               nvml.ERROR_NOT_READY,
	"NOT_SUPPORTED":           nvml.ERROR_NOT_SUPPORTED,
	"OPERATING_SYSTEM":        nvml.ERROR_OPERATING_SYSTEM,
	"RESET_REQUIRED":          nvml.ERROR_RESET_REQUIRED,
	"TIMEOUT":                 nvml.ERROR_TIMEOUT,
	"UNINITIALIZED":           nvml.ERROR_UNINITIALIZED,
	"UNKNOWN":                 nvml.ERROR_UNKNOWN,
}

// calls are the functions of the simulator, except functions that never reach the driver.
var calls = []string{
	"ComputeInstanceDestroy",
	"ComputeInstanceGetInfo",
	"DeviceClearEccErrorCounts",
	"DeviceCreateGpuInstance",
	"DeviceCreateGpuInstanceWithPlacement",
	"DeviceGetAddressingMode",
	"DeviceGetApplicationsClock",
	"DeviceGetArchitecture",
	"DeviceGetAttributes",
	"DeviceGetBrand",
	"DeviceGetClockInfo",
	"DeviceGetComputeInstanceId",
	"DeviceGetComputeMode",
	"DeviceGetComputeRunningProcesses",
	"DeviceGetCount",
	"DeviceGetCudaComputeCapability",
	"DeviceGetCurrPcieLinkGeneration",
	"DeviceGetCurrPcieLinkWidth",
	"DeviceGetCurrentClocksEventReasons",
	"DeviceGetCurrentClocksThrottleReasons",
	"DeviceGetDecoderUtilization",
	"DeviceGetDefaultApplicationsClock",
	"DeviceGetEncoderUtilization",
	"DeviceGetEnforcedPowerLimit",
	"DeviceGetFieldValues",
	"DeviceGetGpuFabricInfo",
	"DeviceGetGpuInstanceById",
	"DeviceGetGpuInstanceId",
	"DeviceGetGpuInstancePossiblePlacements",
	"DeviceGetGpuInstanceProfileInfo",
	"DeviceGetGpuInstanceRemainingCapacity",
	"DeviceGetGpuInstances",
	"DeviceGetGridLicensableFeatures",
	"DeviceGetHandleByIndex",
	"DeviceGetMaxClockInfo",
	"DeviceGetMaxMigDeviceCount",
	"DeviceGetMaxPcieLinkGeneration",
	"DeviceGetMaxPcieLinkWidth",
	"DeviceGetMemoryInfo",
	"DeviceGetMemoryInfo_v2",
	"DeviceGetMemoryLimits_v1",
	"DeviceGetMigDeviceHandleByIndex",
	"DeviceGetMigMode",
	"DeviceGetMinorNumber",
	"DeviceGetName",
	"DeviceGetNvLinkRemoteDeviceType",
	"DeviceGetNvLinkRemotePciInfo",
	"DeviceGetNvLinkState",
	"DeviceGetNvLinkVersion",
	"DeviceGetPciInfo",
	"DeviceGetPcieReplayCounter",
	"DeviceGetPcieThroughput",
	"DeviceGetPersistenceMode",
	"DeviceGetPowerManagementDefaultLimit",
	"DeviceGetPowerManagementLimit",
	"DeviceGetPowerUsage",
	"DeviceGetRemappedRows",
	"DeviceGetRepairStatus",
	"DeviceGetRetiredPagesPendingStatus",
	"DeviceGetSramEccErrorStatus",
	"DeviceGetSupportedEventTypes",
	"DeviceGetTemperature",
	"DeviceGetTopologyCommonAncestor",
	"DeviceGetTotalEccErrors",
	"DeviceGetTotalEnergyConsumption",
	"DeviceGetUUID",
	"DeviceGetUnrepairableMemoryFlag_v1",
	"DeviceGetUtilizationRates",
	"DeviceGetVirtualizationMode",
	"DeviceRegisterEvents",
	"DeviceResetApplicationsClocks",
	"DeviceSetComputeMode",
	"DeviceSetMigMode",
	"EventSetCreate",
	"EventSetFree",
	"EventSetWait",
	"GpmMetricsGet",
	"GpmMigSampleGet",
	"GpmQueryDeviceSupport",
	"GpmSampleAlloc",
	"GpmSampleGet",
	"GpuInstanceCreateComputeInstance",
	"GpuInstanceCreateComputeInstanceWithPlacement",
	"GpuInstanceDestroy",
	"GpuInstanceGetComputeInstanceById",
	"GpuInstanceGetComputeInstancePossiblePlacements",
	"GpuInstanceGetComputeInstanceProfileInfo",
	"GpuInstanceGetComputeInstanceRemainingCapacity",
	"GpuInstanceGetComputeInstances",
	"GpuInstanceGetInfo",
	"Init",
	"Shutdown",
	"SystemEventSetCreate",
	"SystemEventSetFree",
	"SystemEventSetWait",
	"SystemGetConfComputeGpusReadyState",
	"SystemGetConfComputeState",
	"SystemGetCudaDriverVersion_v2",
	"SystemGetDriverVersion",
	"SystemRegisterEvents",
}
