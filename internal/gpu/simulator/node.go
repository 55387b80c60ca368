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

// A Node is a simulated machine. Its methods may be called by any number of goroutines; it has none
// of its own.
type Node struct {
	profile Profile
	began   time.Time // when it was made

	mu sync.Mutex // guards all following fields, and everything that hangs on them: GPUs, sessions, event sets

	gpus     []*gpu // by position in the profile; a GPU that comes back is a new value
	driver   driver
	loads    int // how often the driver was loaded anew, which changes its major numbers
	reboots  int // how often the node was restarted: its boot ID depends on it
	stalls   []*stall
	failures []failure
	answers  []substitute
	closed   bool
	changed  chan struct{} // closed and replaced whenever something changes that a call may be waiting for
	files    fstest.MapFS  // what Root shows; nil when it has to be built anew
	log      *kernelLog    // has a lock of its own
	minors   []string      // the driver's table of minors, once it was shown

	sessions map[*session]struct{}  // those that are open
	sets     map[*eventSet]struct{} // those that are not freed, of sessions that ended too
	stale    int                    // calls on handles that did not live any more

	bindings   uint64                      // how many there were
	gpmSamples int                         // those that are not freed
	pins       map[*gpmSample]*gpuInstance // the instances that these were filled in for last: they are not destroyed
	calls      uint64                      // that were made
	systemSets int                         // those that are not freed, of sessions that ended too
}

// A driver is the driver that is installed now.
type driver struct {
	version string
	branch  int
	// files is the version of the driver's files where only these were replaced; empty if they are
	// of the module's version.
	files string
	// missing is the error that Init returns; SUCCESS if Init works.
	missing nvml.Return
}

// A gpu is a GPU from when it is plugged in until it falls off the bus or is unplugged.
type gpu struct {
	slot    int // position in the profile
	spec    GPU
	binding uint64 // to the driver, since it was plugged in or came back
	removed bool   // unplugged
	lost    bool   // fell off the bus; also set on a removed one

	mig         bool // multi-instance mode is on
	pending     bool // and is to be on after the next reset
	layout      layout
	computeMode nvml.ComputeMode
	transient   bool // persistence mode is off

	readings
}

// A failure makes calls answer something else.
type failure struct {
	call string
	slot int // or anywhere
	ret  nvml.Return
}

// anywhere is the slot of a stall or failure that is not of one GPU.
const anywhere = -1

// New returns the node that a profile describes.
func New(p Profile) *Node {
	n, err := build(p)
	if err != nil {
		panic(err) // Load has refused such a profile
	}
	return n
}

// build returns the node that a profile describes, or what in the profile cannot be.
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

// Close ends every call that hangs or waits, and every hang to come. All calls fail from then on.
func (n *Node) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	n.changeLocked()
}

// NVML returns a library of the node's driver that is not loaded yet. Each library is that of
// another process.
func (n *Node) NVML() nvml.Interface { return &library{node: n} }

// Root returns the node's file system, with the folders proc, sys and dev. It follows what happens
// to the node.
func (n *Node) Root() fs.FS { return root{n} }

// changeLocked wakes all calls that wait for a change, and makes Root show it.
func (n *Node) changeLocked() {
	n.files = nil
	close(n.changed)
	n.changed = make(chan struct{})
}

// failureLocked returns what a call on a GPU (nil: on none) answers instead of working, or SUCCESS.
func (n *Node) failureLocked(call string, g *gpu) nvml.Return {
	for _, f := range n.failures {
		if (f.call == "" || f.call == call) && (f.slot == anywhere || g != nil && f.slot == g.slot) {
			return f.ret
		}
	}
	return nvml.SUCCESS
}

// Stats say what users of the node hold, for tests that look for leaks.
type Stats struct {
	// Sessions are those that were opened with Init and not closed with Shutdown.
	Sessions int
	// EventSets are those that were created and not freed, SystemEventSets those for events of the
	// node as a whole.
	EventSets, SystemEventSets int
	// GPMSamples are those of GPU performance monitoring that were allocated and not freed.
	GPMSamples int
	// StaleCalls counts calls on handles of ended sessions and freed event sets, any of which can
	// crash a process that uses the real library.
	StaleCalls int
}

// Stats returns what users of the node hold now.
func (n *Node) Stats() Stats {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Stats{
		Sessions: len(n.sessions), EventSets: len(n.sets), SystemEventSets: n.systemSets, GPMSamples: n.gpmSamples, StaleCalls: n.stale,
	}
}

// Calls returns how many calls were made on the node's sessions, but for those that only free
// something.
func (n *Node) Calls() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.calls
}

// A Status says how one GPU of the node is.
type Status struct {
	// Index is the GPU's position in the profile: its NVML index as long as all GPUs before it are
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
	// Faults say what was injected and lasts, one sentence each.
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

// List returns how the GPUs of the node are, in the order of the profile; those that are unplugged
// too.
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
		case g.removed:
			s.State = "removed"
		case g.lost:
			s.State = "lost"
		}
		for _, c := range g.layout.devices {
			s.MIG = append(s.MIG, MIGStatus{Index: c.index, UUID: n.uuidLocked(g, c), Profile: c.name(), GI: c.gi.id, CI: c.id})
		}
		list = append(list, s)
	}
	return list
}

// uuidLocked returns the UUID of a MIG device as the driver writes it.
func (n *Node) uuidLocked(g *gpu, c *computeInstance) string {
	if n.driver.branch < 470 {
		return fmt.Sprintf("MIG-%s/%d/%d", g.spec.UUID, c.gi.id, c.id)
	}
	return c.uuid
}

// A target is what a Fault is aimed at: a GPU and, if it was addressed by a MIG device, its
// instance.
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
