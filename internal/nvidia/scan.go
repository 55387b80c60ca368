package nvidia

import (
	"cmp"
	"fmt"
	"io/fs"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A scanner looks at the node, again and again, for one session. It remembers what it saw: for GPUs that stop
// answering, to read what never changes only once, and so that a look that finds nothing new makes nothing new.
type scanner struct {
	api    *api
	root   fs.FS
	devs   []string // the folders of root that may have device nodes
	driver inventory.Driver
	bound  []binding // the GPUs that were bound to the driver just before the session was opened

	known    []*gpu         // by NVML index
	minors   map[string]int // of MIG capabilities
	topology topology
	last     inventory.Snapshot

	// What the look under way has found so far; kept between looks for their memory.
	gpus       []inventory.GPU
	leftOut    []inventory.LeftOut
	migDevices []migDevice
}

func newScanner(a *api, o Options, driver inventory.Driver, bound []binding) *scanner {
	return &scanner{api: a, root: o.Root, devs: devFolders(o.DriverRoot), driver: driver, bound: bound}
}

// scan looks at the node once.
func (s *scanner) scan() (inventory.Snapshot, error) {
	count, ret := s.api.DeviceGetCount()
	if err := failure("nvmlDeviceGetCount", ret); err != nil {
		return inventory.Snapshot{}, err
	}
	if bound := boundGPUs(s.root); !slices.Equal(bound, s.bound) {
		return inventory.Snapshot{}, fmt.Errorf("%w: %d GPUs were bound to the driver and %d are now, or others, or again",
			inventory.ErrNewSession, len(s.bound), len(bound))
	}
	for len(s.known) < count {
		s.known = append(s.known, &gpu{})
	}
	s.known = s.known[:count]
	s.gpus, s.leftOut = s.gpus[:0], s.leftOut[:0]
	for i, g := range s.known {
		s.look(i, g)
	}
	s.link()
	return s.publish(), nil
}

// look reads the GPU at an index into what is found.
func (s *scanner) look(index int, g *gpu) {
	var a account
	if s.ask(index, g, &a); g.hidden {
		return
	}
	if g.seen.UUID == "" {
		reason := cmp.Or(a.reason, "its UUID is empty")
		s.leftOut = append(s.leftOut, inventory.LeftOut{Index: index, Reason: "the GPU cannot be identified: " + reason})
		return
	}
	g.seen.Health = a.health()
	s.gpus = append(s.gpus, g.seen)
}

// publish returns what was found; the last Snapshot itself if it is the same.
func (s *scanner) publish() inventory.Snapshot {
	found := inventory.Snapshot{Driver: s.driver, GPUs: s.gpus, Control: controlNodes(s.root, s.devs, s.last.Control), LeftOut: s.leftOut}
	found = inventory.Identify(found, s.last)
	if !found.Equal(s.last) {
		found.GPUs, found.LeftOut = slices.Clone(found.GPUs), slices.Clone(found.LeftOut)
		s.last = found
	}
	return s.last
}
