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

// A scanner scans the node repeatedly for one session. Its memory serves three purposes: it shows
// GPUs that stop answering, reads constant properties only once, and allocates nothing in a scan
// without changes.
type scanner struct {
	driver          *Driver
	api             *api // for calls about no GPU
	root            fs.FS
	devs            []string         // directories of root that may have device nodes
	versions        inventory.Driver // as of the start of the session
	initialBindings []binding        // GPUs bound to the driver just before the session

	// instances are the MIG instances just before the session, and lastInstances the MIG instances
	// of the last scan, by directory.
	instances, lastInstances []string

	events   nvml.EventSet // the set for new GPUs to register with; nil once all GPUs have registered
	noEvents error         // why there is no set

	opened time.Time // start of the session
	// By NVML index, including GPUs no longer counted. Each slot has one record, and so at most one
	// thread.
	allSlots []*slot
	slots    []*slot // GPUs that are counted
	control  inventory.ControlNodes
	majors   inventory.Majors
	topology topology
	last     inventory.Snapshot

	mu     sync.Mutex
	minors map[string]int // of MIG capabilities; guarded by mu

	// The result of the last scan, kept to reuse the memory.
	gpus    []inventory.GPU
	leftOut []inventory.LeftOut
}

func newScanner(a *api, d *Driver, now inventory.Driver, bound []binding) *scanner {
	instances := listInstances(d.options.Root)
	return &scanner{
		api: a, driver: d, root: d.options.Root, devs: devFolders(d.options.DriverRoot), versions: now,
		initialBindings: bound,
		opened:          time.Now(),
		instances:       instances, lastInstances: instances,
	}
}

// checkBindings returns inventory.ErrNewSession if GPUs were bound to the driver or unbound since
// the session was opened.
func (s *scanner) checkBindings() error {
	if bound := boundGPUs(s.root); !slices.Equal(bound, s.initialBindings) {
		return fmt.Errorf("%w: the GPUs bound to the driver changed: %d before, %d now",
			inventory.ErrNewSession, len(s.initialBindings), len(bound))
	}
	return nil
}

// checkInstances returns inventory.ErrNewSession if MIG instances were created or destroyed since
// the session was opened and the driver hides instances from this process. Then only a new session
// no longer returns handles of deleted MIG devices. Two scans must find the same instances, because
// a MIG layout is created one instance at a time.
func (s *scanner) checkInstances() error {
	if !slices.ContainsFunc(s.slots, func(sl *slot) bool {
		return sl.gpu.lastSeen.MIG == inventory.MIGEnabled && sl.gpu.instancesHidden.Value
	}) {
		return nil
	}
	before := s.lastInstances
	s.lastInstances = listInstances(s.root)
	if slices.Equal(s.lastInstances, s.instances) || !slices.Equal(s.lastInstances, before) {
		return nil
	}
	return fmt.Errorf("%w: MIG instances were created or destroyed: %d before, %d now", inventory.ErrNewSession,
		len(s.instances), len(s.lastInstances))
}

// count creates a slot for each GPU counted by the driver.
func (s *scanner) count() error {
	count, ret := s.api.DeviceGetCount()
	if err := failure("nvmlDeviceGetCount", ret); err != nil {
		return err
	}
	for len(s.allSlots) < count {
		s.allSlots = append(s.allSlots, newSlot(s.driver, s.api, len(s.allSlots)))
	}
	s.slots = s.allSlots[:count]
	s.control, s.majors = controlNodes(s.root, s.devs, s.control), majors(s.root, s.majors)
	return nil
}

// visit reads the GPU of a slot, at the first visit with its health signals.
func (s *scanner) visit(sl *slot, g *gpu) {
	var a callResults
	s.identify(sl, g, &a)
	g.results = a
	if g.lastSeen.UUID == "" || g.isHidden {
		return
	}
	if !g.hasReading && !a.isUseless() {
		g.skipReport = time.Since(s.opened) > linksBudget
		s.readSignals(sl, g)
		g.skipReport = false
	}
}

// revisit calls a lost GPU by the old handle, without initialising the GPU, and visits the GPU
// after a success.
func (s *scanner) revisit(sl *slot, g *gpu) {
	if s.readSignals(sl, g); g.reading.Contact != inventory.ContactLost {
		s.visit(sl, g)
	}
}

// publish returns the result of the scan, or the last Snapshot itself if nothing changed.
func (s *scanner) publish() inventory.Snapshot {
	s.gpus, s.leftOut = s.gpus[:0], s.leftOut[:0]
	for _, sl := range s.slots {
		switch g := sl.gpu; {
		case g.isHidden:
		case g.lastSeen.UUID == "":
			s.leftOut = append(s.leftOut, sl.leftOut())
		default:
			s.gpus, s.leftOut = append(s.gpus, g.lastSeen), append(s.leftOut, g.unread...)
		}
	}
	s.setLinks()
	found := inventory.Snapshot{Driver: s.versions, GPUs: s.gpus, Control: s.control, Majors: s.majors,
		LeftOut: s.leftOut}
	found.LinksDue = slices.ContainsFunc(s.slots, func(sl *slot) bool { return sl.linksDue && sl.linkable() })
	found = inventory.Identify(found, s.last)
	if !found.Equal(s.last) {
		found.GPUs, found.LeftOut = slices.Clone(found.GPUs), slices.Clone(found.LeftOut)
		s.last = found
	}
	return s.last
}
