package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

const (
	profileName = "dgx-h100"
	wholeGPU    = "nvidia.com/gpu"
)

// A key names a device as kubelet knows it.
type key struct{ resource, id string }

// uuid returns the UUID of the GPU or MIG device behind a device.
func (k key) uuid() string {
	uuid, _, _ := strings.Cut(k.id, "::")
	return uuid
}

func (k key) String() string { return k.resource + " " + k.id }

// A gpu is what is true of one GPU.
type gpu struct {
	slot    int
	uuid    string
	parts   []simulator.MIGStatus // its MIG devices; none if multi-instance mode is off
	layout  []string              // their profiles
	problem *problem              // nil if it is well
	since   time.Time             // when the problem began
	removed bool
	// settled is from when on kubelet must see the GPU as it is here, unless busy: something happens
	// to it now.
	settled time.Time
	busy    bool
}

func (g *gpu) String() string { return fmt.Sprint("GPU ", g.slot) }

// good reports whether new pods may get the GPU.
func (g *gpu) good() bool { return g.problem == nil || g.problem.harmless }

// A setting is a configuration of the daemon and what it makes of a node.
type setting struct {
	name string
	text string // of the file, without what all settings have in common
	// renamed are the slots of GPUs under the resource of the second name; excluded are offered to
	// nobody.
	renamed, excluded []int
	renameTo          string
	// replicas of whole GPUs and of MIG devices of 1g.10gb; 0 means that they are not shared.
	replicas, partReplicas int
	// sharedName is the resource of GPUs that are shared; empty for the same as before.
	sharedName string
}

const common = "version: v1\nflags: {migStrategy: mixed%s}\nhealth: {flapLimit: 1000000}\n"

// settings returns the configurations, of which the first is the plain one. GPUs are named by
// UUIDs, because the index of a GPU changes when one before it is unplugged.
func settings(gpus []*gpu) []setting {
	return []setting{
		{name: "plain"},
		{
			name: "two share a GPU", replicas: 2,
			text: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
		},
		{
			name: "three share a GPU under another name", replicas: 3, sharedName: "nvidia.com/gpu.shared",
			text: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n",
		},
		{
			name: "two GPUs have another name", renamed: []int{0, 1}, renameTo: "nvidia.com/large",
			text: fmt.Sprintf("selectors: [{uuids: [%s, %s], rename: nvidia.com/large}]\n", gpus[0].uuid, gpus[1].uuid),
		},
		{
			name: "a GPU is excluded", excluded: []int{5},
			text: fmt.Sprintf("selectors: [{uuids: [%s], exclude: true}]\n", gpus[5].uuid),
		},
		{
			name: "four share a MIG device", partReplicas: 4,
			text: "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 4}]}}\n",
		},
	}
}

// file returns the text of the configuration file.
func (c setting) file(strategies string) string {
	plugin := ""
	if strategies != "" {
		plugin = ", plugin: {deviceListStrategy: [" + strategies + "]}"
	}
	return fmt.Sprintf(common, plugin) + c.text
}

// keys returns the devices that a GPU is to kubelet.
func (c setting) keys(g *gpu) []key {
	if g.removed || slices.Contains(c.excluded, g.slot) {
		return nil
	}
	if len(g.parts) == 0 {
		resource := wholeGPU
		switch {
		case slices.Contains(c.renamed, g.slot):
			resource = c.renameTo
		case c.sharedName != "":
			resource = c.sharedName
		}
		return replicas(resource, g.uuid, c.replicas)
	}
	var keys []key
	for _, part := range g.parts {
		n := 0
		if part.Profile == "1g.10gb" {
			n = c.partReplicas
		}
		keys = append(keys, replicas("nvidia.com/mig-"+part.Profile, part.UUID, n)...)
	}
	return keys
}

// replicas returns the devices of a resource that one GPU or MIG device is.
func replicas(resource, uuid string, n int) []key {
	if n == 0 {
		return []key{{resource, uuid}}
	}
	keys := make([]key, n)
	for i := range keys {
		keys[i] = key{resource, fmt.Sprintf("%s::%d", uuid, i)}
	}
	return keys
}

// A form is as what a GPU is held.
type form struct {
	resource string
	shared   bool
	part     string // UUID of the MIG device; empty for a whole GPU
}

// held is a device that a pod has, and of which GPU.
type held struct {
	key
	slot int
	part string
}

func (h held) form() form { return form{h.resource, strings.Contains(h.id, "::"), h.part} }

// excludes reports whether two pods may not have these two devices at a time: one GPU in two forms.
// MIG devices of one GPU are apart from each other.
func (h held) excludes(o held) bool {
	a, b := h.form(), o.form()
	switch {
	case h.slot != o.slot || a == b:
		return false
	case a.part != "" && b.part != "":
		return a.part == b.part
	}
	return true
}

// A problem is something that is wrong with a GPU for a while.
type problem struct {
	name   string
	faults []simulator.Fault // without their GPU
	// harmless says that the GPU stays Healthy.
	harmless bool
	// whole says that it is not for GPUs in multi-instance mode.
	whole bool
	// seen is how long kubelet may be told nothing of it.
	seen time.Duration
	// alone says that the daemon asks a GPU with it ever more rarely, or cannot ask it now. quiesce
	// and resume have all GPUs asked.
	alone bool
	// hangs says that calls do not return.
	hangs bool
}

const (
	// soon is for what an event tells, with much room for a machine that is busy. atPoll is for what
	// only the next poll can find.
	soon   = 2 * time.Second
	atPoll = 45 * time.Second
	// recoveryTime is for readings that must be good twice.
	recoveryTime = 15 * time.Second
	// unheld is how long it may take until a GPU that no pod holds any more is given in another form:
	// kubelet's checkpoint names the last holder until a list is sent again, which happens ever more
	// rarely.
	unheld = 75 * time.Second
)

func fault(kind simulator.Kind) simulator.Fault { return simulator.Fault{Kind: kind} }

func failing(call, ret string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindFail, Call: call, Return: ret}
}

func xid(code uint64) simulator.Fault { return simulator.Fault{Kind: simulator.KindXID, XID: code} }

func asked(action string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindRecoveryAction, Action: action}
}

// problems are what can happen to a GPU; restore ends each of them.
var problems = []*problem{
	{name: "XID 48", faults: []simulator.Fault{xid(48)}, seen: soon},
	{name: "XID 95", faults: []simulator.Fault{xid(95)}, seen: soon},
	{name: "XID 79", faults: []simulator.Fault{xid(79)}, seen: soon, alone: true},
	{name: "the driver asks for a reset", faults: []simulator.Fault{asked("reset")}, seen: soon},
	{name: "the driver asks to drain and reset", faults: []simulator.Fault{asked("drain-and-reset")}, seen: soon},
	{name: "lost", faults: []simulator.Fault{fault(simulator.KindLost)}, seen: atPoll, alone: true},
	{name: "every call says lost", faults: []simulator.Fault{failing("", "GPU_IS_LOST")}, seen: atPoll, alone: true},
	{name: "every call says reset required", faults: []simulator.Fault{failing("", "RESET_REQUIRED")}, seen: atPoll,
		alone: true},
	{name: "memory cannot be read", whole: true, faults: []simulator.Fault{failing("DeviceGetMemoryInfo",
		"RESET_REQUIRED")}, seen: atPoll},
	{name: "fields cannot be read", whole: true, faults: []simulator.Fault{failing("DeviceGetFieldValues", "UNKNOWN")},
		seen: atPoll},
	{name: "fabric not started", whole: true, faults: []simulator.Fault{{Kind: simulator.KindFabric,
		State: "not-started"}}, seen: atPoll},
	{
		name: "XIDs of applications", harmless: true,
		faults: []simulator.Fault{xid(13), xid(31), xid(43), xid(45), xid(63), xid(94)},
	},
	{
		name: "memory errors that the driver acquits", harmless: true, whole: true,
		faults: []simulator.Fault{{Kind: simulator.KindECC, Count: 2}},
	},
	{
		name: "what is only reported", harmless: true, whole: true,
		faults: []simulator.Fault{
			fault(simulator.KindRemapPending), fault(simulator.KindThrottle), {Kind: simulator.KindNVLink},
			{Kind: simulator.KindPCIeReplays, Count: 9},
		},
	},
	{name: "slow calls", harmless: true, faults: []simulator.Fault{{Kind: simulator.KindSlow, Delay: "10ms"}}},
	{
		name: "hanging field values", alone: true, hangs: true, whole: true, seen: 60 * time.Second,
		faults: []simulator.Fault{{Kind: simulator.KindHang, Call: "DeviceGetFieldValues"}},
	},
	{
		name: "every call hangs", alone: true, hangs: true, seen: 60 * time.Second,
		faults: []simulator.Fault{{Kind: simulator.KindHang}},
	},
}

// on returns the faults of a problem on a GPU.
func (a *problem) on(g *gpu) []simulator.Fault {
	faults := slices.Clone(a.faults)
	for i := range faults {
		faults[i].GPU = fmt.Sprint(g.slot)
	}
	return faults
}

// layouts are how a GPU can be divided; nil ends multi-instance mode.
var layouts = [][]string{
	nil,
	{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"},
	{"3g.40gb", "3g.40gb"},
	{"2g.20gb", "2g.20gb", "3g.40gb"},
	{"4g.40gb", "1g.10gb", "1g.10gb", "1g.10gb"},
	{"7g.80gb"},
}
