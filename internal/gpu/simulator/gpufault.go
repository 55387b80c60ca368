package simulator

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// events are the event types that can be injected.
var events = map[string]uint64{
	"single-bit-ecc":          nvml.EventTypeSingleBitEccError,
	"double-bit-ecc":          nvml.EventTypeDoubleBitEccError,
	"pstate":                  nvml.EventTypePState,
	"mig-change":              nvml.EventMigConfigChange,
	"single-bit-ecc-storm":    nvml.EventTypeSingleBitEccErrorStorm,
	"dram-retirement":         nvml.EventTypeDramRetirementEvent,
	"dram-retirement-failure": nvml.EventTypeDramRetirementFailure,
	"non-fatal-poison":        nvml.EventTypeNonFatalPoisonError,
	"fatal-poison":            nvml.EventTypeFatalPoisonError,
	"unavailable":             nvml.EventTypeGpuUnavailableError,
	"recovery-action":         nvml.EventTypeGpuRecoveryAction,
}

// actions are the recovery actions of the driver.
var actions = map[string]nvml.DeviceGpuRecoveryAction{
	"none":            nvml.GPU_RECOVERY_ACTION_NONE,
	"reset":           nvml.GPU_RECOVERY_ACTION_GPU_RESET,
	"reboot":          nvml.GPU_RECOVERY_ACTION_NODE_REBOOT,
	"drain-p2p":       nvml.GPU_RECOVERY_ACTION_DRAIN_P2P,
	"drain-and-reset": nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET,
	"recover-imex":    nvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN,
}

// resetXIDs are the XIDs after which the driver requests a reset, with the first such branch. 46
// and 140 also need a reset, but no known driver requests it.
var resetXIDs = map[uint64]int{
	48: 565, 62: 565, 64: 565, 74: 565, 95: 565, 109: 570, 110: 565, 119: 565, 120: 565, 136: 565,
	143: 575, 155: 565, 156: 565, 158: 575,
}

// offTheBus is the XID of a GPU that fell off the bus.
const offTheBus = 79

func (n *Node) loggedXIDLocked(f Fault, t target) error {
	gi, ci, err := t.xid(f)
	if err == nil {
		n.log.write(t.gpu.spec.BDF, f, gi, ci)
	}
	return err
}

func (n *Node) loggedSXIDLocked(f Fault, _ target) error {
	if len(n.profile.NVSwitches) == 0 {
		return errors.New("the node has no NVSwitch")
	}
	n.log.add(fmt.Sprintf("nvidia-nvswitch0: SXid (PCI:%s): %d, Fatal, Link 30 LTSSM Fault Up", n.profile.NVSwitches[0],
		f.XID))
	return nil
}

func (n *Node) xidLocked(f Fault, t target) error {
	gi, ci, err := t.xid(f)
	if err != nil {
		return err
	}
	action := t.gpu.recovery
	if since, ok := resetXIDs[f.XID]; ok && n.driver.branch >= since {
		action = nvml.GPU_RECOVERY_ACTION_GPU_RESET
	}
	if f.Action != "" {
		if action, err = choose("action", f.Action, actions); err != nil {
			return err
		}
	}
	n.log.write(t.gpu.spec.BDF, f, gi, ci)
	n.deliverLocked(t.gpu, nvml.EventTypeXidCriticalError, f.XID, gi, ci)
	n.askLocked(t.gpu, action)
	if f.XID == offTheBus {
		n.deliverLocked(t.gpu, nvml.EventTypeGpuUnavailableError, 0, unattributed, unattributed)
		t.gpu.isLost = true
	}
	return nil
}

// xid returns the GI and CI of an XID.
func (t target) xid(f Fault) (gi, ci uint32, err error) {
	if f.XID == 0 {
		return 0, 0, errors.New("xid is missing: give the driver's error number, such as 48")
	}
	return t.instance(f)
}

// instance returns the GI and CI of an event.
func (t target) instance(f Fault) (gi, ci uint32, err error) {
	gi, ci = unattributed, unattributed
	switch {
	case t.inst != nil && (f.GI != nil || f.CI != nil):
		return 0, 0, fmt.Errorf("gi or ci is given, and %s is a MIG device already", f.GPU)
	case t.inst != nil:
		return uint32(t.inst.gi.id), uint32(t.inst.id), nil
	case f.GI == nil && f.CI != nil:
		return 0, 0, errors.New("ci is given without gi: a compute instance is in a GPU instance")
	case f.GI == nil:
		return gi, ci, nil
	}
	i := slices.IndexFunc(t.gpu.layout.instances, func(g *gpuInstance) bool { return g.id == *f.GI })
	if i < 0 {
		return 0, 0, fmt.Errorf("GPU %d has no GPU instance %d", t.gpu.slot, *f.GI)
	}
	gi = uint32(*f.GI)
	if f.CI != nil {
		if !slices.ContainsFunc(t.gpu.layout.instances[i].computes,
			func(c *computeInstance) bool { return c.id == *f.CI }) {
			return 0, 0, fmt.Errorf("GPU instance %d of GPU %d has no compute instance %d", *f.GI, t.gpu.slot, *f.CI)
		}
		ci = uint32(*f.CI)
	}
	return gi, ci, nil
}

func (n *Node) eventLocked(f Fault, t target) error {
	event, err := choose("event", f.Event, events)
	if err != nil {
		return err
	}
	if supportedEvents(t.gpu, n.driver.branch)&event == 0 {
		return fmt.Errorf("driver %s has no event %s on GPU %d", n.driver.version, f.Event, t.gpu.slot)
	}
	gi, ci, err := t.instance(f)
	if err != nil {
		return err
	}
	n.deliverLocked(t.gpu, event, 0, gi, ci)
	return nil
}

func (n *Node) recoveryLocked(f Fault, t target) error {
	action, err := choose("action", f.Action, actions)
	if err != nil {
		return err
	}
	n.askLocked(t.gpu, action)
	return nil
}

// askLocked makes the driver request a recovery action for a GPU.
func (n *Node) askLocked(g *gpu, action nvml.DeviceGpuRecoveryAction) {
	if g.recovery != action {
		g.recovery = action
		n.deliverLocked(g, nvml.EventTypeGpuRecoveryAction, 0, unattributed, unattributed)
	}
}

func (n *Node) eccLocked(f Fault, t target) error {
	count := max(f.Count, 1)
	t.gpu.uncorrectedErrors += count
	t.gpu.aggregateErrors += count
	n.deliverLocked(t.gpu, nvml.EventTypeDoubleBitEccError, 0, unattributed, unattributed)
	return nil
}

func (n *Node) fabricLocked(f Fault, t target) error {
	behind, err := choose("state", f.State, map[string]uint8{"completed": 0, "in-progress": 1, "not-started": 2})
	if err != nil {
		return err
	}
	status := nvml.SUCCESS
	if f.Return != "" {
		if status, err = choose("return", f.Return, returns); err != nil {
			return err
		}
	}
	t.gpu.fabric = fabric{behind: behind, status: status}
	return nil
}

func (n *Node) nvlinkLocked(f Fault, t target) error {
	links := t.gpu.spec.model.NVLink.Links
	first, last := 0, links-1
	if f.Link != nil {
		first, last = *f.Link, *f.Link
	}
	if first < 0 || last >= links || links == 0 {
		return fmt.Errorf("GPU %d has %d NVLinks, counted from 0", t.gpu.slot, links)
	}
	if t.gpu.cut == nil {
		t.gpu.cut = map[int]bool{}
	}
	for link := first; link <= last; link++ {
		t.gpu.cut[link] = true
	}
	return nil
}

func (n *Node) removeLocked(_ Fault, t target) error {
	t.gpu.isLost, t.gpu.isRemoved = true, true
	n.deliverSystemLocked(t.gpu, nvml.SystemEventTypeGpuDriverUnbind)
	return nil
}

func (n *Node) addLocked(_ Fault, t target) error {
	if !t.gpu.isRemoved {
		return fmt.Errorf("GPU %d is plugged in already", t.gpu.slot)
	}
	n.renewLocked(t.gpu.slot)
	n.deliverSystemLocked(t.gpu, nvml.SystemEventTypeGpuDriverBind)
	return nil
}

// renewLocked replaces a GPU by a new one with the same MIG layout. Open sessions keep the old one.
func (n *Node) renewLocked(slot int) {
	old := n.gpus[slot]
	n.bindings++
	n.gpus[slot] = &gpu{
		slot: slot, spec: old.spec, binding: n.bindings, mig: old.mig, pending: old.pending, layout: old.layout,
		transient: old.transient,
		readings:  readings{aggregateErrors: old.aggregateErrors},
	}
}

func (n *Node) restoreLocked(f Fault, t target) error {
	slot := t.slot()
	everything := f.GPU == ""
	n.stalls = slices.DeleteFunc(n.stalls, func(s *stall) bool { return everything || s.slot == slot })
	n.failures = slices.DeleteFunc(n.failures, func(f failure) bool { return everything || f.slot == slot })
	n.answers = slices.DeleteFunc(n.answers, func(a substitute) bool { return everything || a.slot == slot })
	if everything {
		b, _ := branch(n.profile.Driver) // New has parsed the version
		n.driver = driver{version: n.profile.Driver, branch: b}
	}
	for _, g := range n.gpus {
		switch {
		case !everything && g.slot != slot, g.isRemoved:
		case g.isLost:
			n.renewLocked(g.slot)
		default:
			g.readings = readings{aggregateErrors: g.aggregateErrors}
		}
	}
	return nil
}

func (n *Node) rebootLocked(Fault, target) error {
	n.reboots++
	n.stalls, n.failures, n.answers = nil, nil, nil
	for slot, g := range n.gpus {
		g.isLost = true // for sessions with a handle of the GPU
		if !g.isRemoved {
			n.renewLocked(slot)
			n.gpus[slot].reset()
		}
	}
	return nil
}

func (n *Node) resetLocked(_ Fault, t target) error {
	if t.gpu.busy() {
		return fmt.Errorf("GPU %d is in use: end its processes first", t.gpu.slot)
	}
	t.gpu.readings = readings{aggregateErrors: t.gpu.aggregateErrors}
	t.gpu.reset()
	n.deliverLocked(t.gpu, nvml.EventMigConfigChange, 0, unattributed, unattributed)
	return nil
}

func (n *Node) migLocked(f Fault, t target) error {
	if len(t.gpu.spec.model.MIG) == 0 {
		return fmt.Errorf("%s has no multi-instance mode", t.gpu.spec.model.Name)
	}
	layout, err := layOut(t.gpu.spec.model, t.gpu.spec.UUID, f.Profiles)
	if err != nil {
		return err
	}
	t.gpu.mig, t.gpu.pending, t.gpu.layout = len(f.Profiles) > 0, len(f.Profiles) > 0, layout
	n.deliverLocked(t.gpu, nvml.EventMigConfigChange, 0, unattributed, unattributed)
	return nil
}

// processesLocked sets the number of processes on a GPU or MIG device.
func (n *Node) processesLocked(f Fault, t target) error {
	if t.inst != nil {
		t.inst.processes = int(f.Count)
		return nil
	}
	t.gpu.processes = int(f.Count)
	return nil
}

// faultsLocked returns the lasting faults injected into a GPU.
func (n *Node) faultsLocked(g *gpu) []string {
	var faults []string
	say := func(is bool, format string, args ...any) {
		if is {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	for name, action := range actions {
		say(g.recovery != nvml.GPU_RECOVERY_ACTION_NONE && action == g.recovery, "the driver asks for %s", name)
	}
	say(g.remapPending, "row remapping is pending")
	say(g.remapFailure, "row remapping failed")
	say(g.unrepairable, "memory cannot be repaired")
	say(g.sramThreshold, "the chip's own memories had too many errors")
	say(g.isThrottled, "the clocks are low because it is hot")
	say(g.replays > 0, "%d PCIe packets were sent again", g.replays)
	say(g.uncorrectedErrors > 0, "%d uncorrected memory errors", g.uncorrectedErrors)
	say(g.fabric != fabric{}, "the fabric is not up")
	say(g.transient, "persistence mode is off")
	say(len(g.cut) > 0, "%d NVLinks are cut", len(g.cut))
	say(g.pending != g.mig, "another multi-instance mode is pending")
	say(g.processes > 0, "%d processes compute", g.processes)
	say(g.smiReset != "", "nvidia-smi --gpu-reset: %s", g.smiReset)
	say(len(g.clients) > 0, "%d processes have it open", len(g.clients))
	for _, c := range g.layout.devices {
		say(c.processes > 0, "%d processes compute on MIG device %d:%d", c.processes, g.slot, c.index)
	}
	for _, s := range n.stalls {
		say(s.slot == anywhere || s.slot == g.slot, "%s", s)
	}
	for _, f := range n.failures {
		say(f.slot == anywhere || f.slot == g.slot, "%s answers %s", cmp.Or(f.call, "every call"), f.ret)
	}
	for _, a := range n.answers {
		say(a.slot == anywhere || a.slot == g.slot, "%s answers %.40q", a.call, a.value)
	}
	return faults
}
