package nvidia

import (
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A scanner looks at the node, again and again, for one session. It remembers what it saw: for GPUs
// that stop answering, to read what never changes only once, and so that a look that finds nothing
// new makes nothing new.
type scanner struct {
	driver *Driver
	api    *api // for calls about no GPU
	root   fs.FS
	devs   []string         // the folders of root that may have device nodes
	now    inventory.Driver // as it was when the session was opened
	bound  []binding        // the GPUs that were bound to the driver just before

	// instances are the MIG instances that there were just before, and shown those that the last look
	// found; by their folders.
	instances, shown []string

	events    nvml.EventSet // that GPUs which are met register with; nil when all were
	eventless error         // why there is no such set

	opened time.Time // when the session was opened
	// by NVML index, also of GPUs that are no longer counted: each has one record, and so one thread
	// at most
	made     []*slot
	slots    []*slot // of the GPUs that are counted
	control  inventory.ControlNodes
	majors   inventory.Majors
	topology topology
	last     inventory.Snapshot

	mu     sync.Mutex
	minors map[string]int // of MIG capabilities; guarded by mu

	// What the last look found; kept between looks for their memory.
	gpus    []inventory.GPU
	leftOut []inventory.LeftOut
}

func newScanner(a *api, d *Driver, now inventory.Driver, bound []binding) *scanner {
	instances := shownInstances(d.options.Root)
	return &scanner{
		api: a, driver: d, root: d.options.Root, devs: devFolders(d.options.DriverRoot), now: now, bound: bound, opened: time.Now(),
		instances: instances, shown: instances,
	}
}

// rebound returns inventory.ErrNewSession if GPUs were bound to the driver, or unbound, since the
// session was opened.
func (s *scanner) rebound() error {
	if bound := boundGPUs(s.root); !slices.Equal(bound, s.bound) {
		return fmt.Errorf("%w: the GPUs that are bound to the driver changed: %d before, %d now",
			inventory.ErrNewSession, len(s.bound), len(bound))
	}
	return nil
}

// redivided returns inventory.ErrNewSession if MIG instances were made or destroyed since the
// session was opened, and the driver does not tell this process of instances: a session goes on
// giving the handles of MIG devices that are gone, and only a new one does not. Two looks have to
// find the same instances: who divides a GPU makes one after the other.
func (s *scanner) redivided() error {
	if !slices.ContainsFunc(s.slots, func(sl *slot) bool { return sl.gpu.seen.MIG == inventory.MIGEnabled && sl.gpu.untold.Value }) {
		return nil
	}
	before := s.shown
	s.shown = shownInstances(s.root)
	if slices.Equal(s.shown, s.instances) || !slices.Equal(s.shown, before) {
		return nil
	}
	return fmt.Errorf("%w: MIG instances were made or destroyed: %d before, %d now", inventory.ErrNewSession,
		len(s.instances), len(s.shown))
}

// count has a slot for each GPU that the driver counts.
func (s *scanner) count() error {
	count, ret := s.api.DeviceGetCount()
	if err := failure("nvmlDeviceGetCount", ret); err != nil {
		return err
	}
	for len(s.made) < count {
		s.made = append(s.made, newSlot(s.driver, s.api, len(s.made)))
	}
	s.slots = s.made[:count]
	s.control, s.majors = controlNodes(s.root, s.devs, s.control), majors(s.root, s.majors)
	return nil
}

// visit reads the GPU of a slot, and its health signals if it is met for the first time.
func (s *scanner) visit(sl *slot, g *gpu) {
	var a callResults
	s.ask(sl, g, &a)
	g.results = a
	if g.seen.UUID == "" || g.hidden {
		return
	}
	if !g.read && !a.gone() {
		g.hurried = time.Since(s.opened) > linksBudget
		s.readSignals(sl, g)
		g.hurried = false
	}
}

// revisit asks a GPU that is lost by the handle that it had, which initialises nothing, and visits
// it if that works again.
func (s *scanner) revisit(sl *slot, g *gpu) {
	if s.readSignals(sl, g); g.reading.Contact != inventory.ContactLost {
		s.visit(sl, g)
	}
}

// publish returns what was found; the last Snapshot itself if it is the same.
func (s *scanner) publish() inventory.Snapshot {
	s.gpus, s.leftOut = s.gpus[:0], s.leftOut[:0]
	for _, sl := range s.slots {
		switch g := sl.gpu; {
		case g.hidden:
		case g.seen.UUID == "":
			s.leftOut = append(s.leftOut, sl.leftOut())
		default:
			s.gpus, s.leftOut = append(s.gpus, g.seen), append(s.leftOut, g.unread...)
		}
	}
	s.link()
	found := inventory.Snapshot{Driver: s.now, GPUs: s.gpus, Control: s.control, Majors: s.majors, LeftOut: s.leftOut}
	found.LinksDue = slices.ContainsFunc(s.slots, func(sl *slot) bool { return sl.linksDue && sl.linkable() })
	found = inventory.Identify(found, s.last)
	if !found.Equal(s.last) {
		found.GPUs, found.LeftOut = slices.Clone(found.GPUs), slices.Clone(found.LeftOut)
		s.last = found
	}
	return s.last
}
