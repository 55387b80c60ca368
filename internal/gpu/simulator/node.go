package simulator

import (
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"testing/fstest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A Node is a simulated machine. It is safe for concurrent use, and starts no goroutine.
type Node struct {
	profile Profile
	began   time.Time // when the node was created

	mu sync.Mutex // guards the fields below and everything they refer to: GPUs, sessions, event sets

	gpus     []*gpu // by position in the profile; a returning GPU is a new value
	driver   driver
	loads    int // number of reloads of the driver; each changes the major numbers
	reboots  int // number of restarts of the node; each changes the boot ID
	stalls   []*stall
	failures []failure
	answers  []substitute
	closed   bool
	changed  chan struct{} // closed and replaced at every change that a call may wait for
	files    fstest.MapFS  // content of Root; nil if out of date
	log      *kernelLog    // has its own lock
	minors   []string      // the driver's table of minors, once shown

	sessions map[*session]struct{}  // open sessions
	sets     map[*eventSet]struct{} // sets not freed yet, including those of ended sessions
	stale    int                    // calls on invalid handles

	bindings   uint64                      // number of bindings so far
	gpmSamples int                         // not freed yet
	pins       map[*gpmSample]*gpuInstance // the last instances of the samples, which cannot be destroyed
	calls      uint64                      // number of calls
	systemSets int                         // not freed yet, including those of ended sessions
}

// A driver is the installed driver.
type driver struct {
	version string
	branch  int
	// files is the version of the driver's files if different from the module; empty if they match.
	files string
	// initError is the error of Init; SUCCESS if Init works.
	initError nvml.Return
}

// A gpu is a GPU, from plugging in until it falls off the bus or is unplugged.
type gpu struct {
	slot      int // position in the profile
	spec      GPU
	binding   uint64 // number of the binding to the driver, since plugged in or back
	isRemoved bool   // unplugged
	isLost    bool   // fell off the bus, or was unplugged

	mig         bool // MIG mode is on
	pending     bool // MIG mode after the next reset
	layout      layout
	computeMode nvml.ComputeMode
	transient   bool // persistence mode is off

	readings
}

// A failure makes calls return an error.
type failure struct {
	call string
	slot int // or anywhere
	ret  nvml.Return
}

// anywhere is the slot of a stall or failure without a particular GPU.
const anywhere = -1

// New creates the node described by a profile.
func New(p Profile) *Node {
	n, err := build(p)
	if err != nil {
		panic(err) // Load refuses such a profile
	}
	return n
}

// build creates the node described by a profile, or returns why the profile is invalid.
func build(p Profile) (*Node, error) {
	b, err := branch(p.Driver)
	if err != nil {
		return nil, err
	}
	n := &Node{
		profile:  p,
		began:    time.Now(),
		driver:   driver{version: p.Driver, branch: b},
		changed:  make(chan struct{}),
		log:      newKernelLog(),
		sessions: map[*session]struct{}{},
		sets:     map[*eventSet]struct{}{},
		pins:     map[*gpmSample]*gpuInstance{},
	}
	for slot, spec := range p.GPUs {
		layout, err := layOut(spec.model, spec.UUID, spec.MIG)
		if spec.MIG != nil && err != nil {
			return nil, fmt.Errorf("gpus[%d]: mig: %w", slot, err)
		}
		n.bindings++
		n.gpus = append(n.gpus, &gpu{slot: slot, spec: spec, binding: n.bindings, mig: spec.MIG != nil,
			pending: spec.MIG != nil, layout: layout})
	}
	for i, f := range p.Faults {
		if err := n.Inject(f); err != nil {
			return nil, fmt.Errorf("faults[%d]: %w", i, err)
		}
	}
	return n, nil
}

// Close ends all hanging and waiting calls, now and later. All calls fail from then on.
func (n *Node) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	n.changeLocked()
}

// NVML returns a library of the node's driver, not loaded yet. Each library belongs to another
// process.
func (n *Node) NVML() nvml.Interface { return &library{node: n} }

// Root returns the node's file system, with the directories proc, sys and dev. It follows the
// changes of the node.
func (n *Node) Root() fs.FS { return root{n} }

// changeLocked wakes all calls waiting for a change, and updates Root.
func (n *Node) changeLocked() {
	n.files = nil
	close(n.changed)
	n.changed = make(chan struct{})
}

// failureLocked returns the injected error of a call on a GPU (nil: on none), or SUCCESS.
func (n *Node) failureLocked(call string, g *gpu) nvml.Return {
	for _, f := range n.failures {
		if (f.call == "" || f.call == call) && (f.slot == anywhere || g != nil && f.slot == g.slot) {
			return f.ret
		}
	}
	return nvml.SUCCESS
}

// Stats are the resources held by users of the node, for leak tests.
type Stats struct {
	// Sessions are opened with Init and not closed with Shutdown.
	Sessions int
	// EventSets and SystemEventSets are created and not freed. SystemEventSets are for events of
	// the whole node.
	EventSets, SystemEventSets int
	// GPMSamples are samples of GPU performance monitoring that are allocated and not freed.
	GPMSamples int
	// StaleCalls counts calls on handles of ended sessions and freed event sets. With the real
	// library, any of them can crash the process.
	StaleCalls int
}

// Stats returns the resources held now.
func (n *Node) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Stats{
		Sessions: len(n.sessions), EventSets: len(n.sets), SystemEventSets: n.systemSets, GPMSamples: n.gpmSamples,
		StaleCalls: n.stale,
	}
}

// Calls returns the number of calls on the node's sessions, without calls that only free something.
func (n *Node) Calls() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.calls
}

// A Status is the state of one GPU of the node.
type Status struct {
	// Index is the GPU's position in the profile, and its NVML index while all GPUs before it are
	// plugged in.
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	BDF   string `json:"bdf"`
	Minor int    `json:"minor"`
	Model string `json:"model"`
	// State is "present", "lost" or "removed".
	State string `json:"state"`
	// MIG are the MIG devices.
	MIG []MIGStatus `json:"mig,omitempty"`
	// Faults are the lasting faults, one sentence each.
	Faults []string `json:"faults,omitempty"`
}

// A MIGStatus is one MIG device of a GPU.
type MIGStatus struct {
	Index   int    `json:"index"`
	UUID    string `json:"uuid"`
	Profile string `json:"profile"`
	GI      int    `json:"gi"`
	CI      int    `json:"ci"`
}

// List returns the states of all GPUs, including unplugged ones, in the order of the profile.
func (n *Node) List() []Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := make([]Status, 0, len(n.gpus))
	for _, g := range n.gpus {
		s := Status{
			Index: g.slot, UUID: g.spec.UUID, BDF: g.spec.BDF, Minor: g.spec.minor, Model: g.spec.model.Name,
			State: "present", Faults: n.faultsLocked(g),
		}
		switch {
		case g.isRemoved:
			s.State = "removed"
		case g.isLost:
			s.State = "lost"
		}
		for _, c := range g.layout.devices {
			s.MIG = append(s.MIG, MIGStatus{Index: c.index, UUID: n.uuidLocked(g, c), Profile: c.name(), GI: c.gi.id,
				CI: c.id})
		}
		list = append(list, s)
	}
	return list
}

// uuidLocked returns the UUID of a MIG device in the driver's format.
func (n *Node) uuidLocked(g *gpu, c *computeInstance) string {
	if n.driver.branch < 470 {
		return fmt.Sprintf("MIG-%s/%d/%d", g.spec.UUID, c.gi.id, c.id)
	}
	return c.uuid
}

// A target is the target of a Fault: a GPU, and its instance if the fault addressed a MIG device.
type target struct {
	gpu  *gpu
	inst *computeInstance
}

// targetLocked returns the GPU or MIG device with an address: an index ("3", "3:0") or a UUID.
func (n *Node) targetLocked(address string) (target, error) {
	first, second, isMIG := strings.Cut(address, ":")
	for _, g := range n.gpus {
		if address == g.spec.UUID || address == strconv.Itoa(g.slot) {
			return target{gpu: g}, nil
		}
		for _, c := range g.layout.devices {
			position := isMIG && first == strconv.Itoa(g.slot) && second == strconv.Itoa(c.index)
			if position || address == n.uuidLocked(g, c) {
				return target{gpu: g, inst: c}, nil
			}
		}
	}
	return target{}, fmt.Errorf("no GPU or MIG device %q: give an index from 0 to %d, i:j for a MIG device, or a UUID",
		address, len(n.gpus)-1)
}
