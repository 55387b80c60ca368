package resource

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Units says how the memory of GPUs is offered in units. It counts for GPUs that a Selector selects
// with Units.
type Units struct {
	// Name is the full name of the resource, as UnitsName returns it.
	Name string
	// ReserveMiB is the memory of a GPU that no container gets, in MiB. With Measured it is that of a
	// GPU whose driver does not tell what it keeps. For the others it is what the driver keeps and,
	// with MPS, what its server takes.
	ReserveMiB int
	Measured   bool
	// Fit says which of the free units are on offer.
	Fit Fit
	// Fill says which GPU a container gets.
	Fill Fill
	// Percentage is the full name of the resource of percentages, as PercentageName returns it; empty
	// for none.
	Percentage string
	// MPS has limits enforced by CUDA's Multi-Process Service. Otherwise units are only counted.
	MPS bool
	// Driver has limits enforced by the driver on the cgroup of each container. It excludes MPS.
	Driver bool
}

// Fit says which of the free units of a node are on offer.
type Fit int

// Which free units are on offer.
const (
	// FitOne offers those of one GPU, the one with the most: what the scheduler counts as free is free
	// on one GPU.
	FitOne Fit = iota
	// FitSum offers all. A container for which no single GPU has enough fails.
	FitSum
)

func (f Fit) String() string { return [...]string{"one", "sum"}[f] }

// Fill says which GPU a container gets units of, of those that have enough.
type Fill int

// Which GPU a container gets units of.
const (
	// FillFullest takes the one with the fewest free units.
	FillFullest Fill = iota
	// FillEmptiest takes the one with the most.
	FillEmptiest
)

func (f Fill) String() string { return [...]string{"fullest", "emptiest"}[f] }

// unitSizes are the sizes of units, as names of resources end with them, in MiB, by ascending size.
var unitSizes = []struct {
	name string
	mib  int
}{{"128Mi", 128}, {"256Mi", 256}, {"1Gi", 1024}}

// maxUnitsList is the length of a list of units that is not passed, in bytes: kubelet accepts
// MaxList, and a list may have devices that left the plan, too.
const maxUnitsList = 3 << 20

// unitsForm is that of a qualified name with a domain.
var unitsForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+/` +
	`[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// UnitsName returns the full name of a resource in units of a size: it ends with the size, so that
// another size is another resource.
func UnitsName(prefix, size string) (string, error) {
	names := make([]string, len(unitSizes))
	for i, s := range unitSizes {
		names[i] = s.name
	}
	if !slices.Contains(names, size) {
		return "", fmt.Errorf("%q is no size of units; use %s", size, strings.Join(names, ", "))
	}
	return unitsPrefix(prefix, prefix+"."+size)
}

// unitsPrefix returns a name that begins with a prefix, if a resource can have it.
func unitsPrefix(prefix, name string) (string, error) {
	switch _, local, _ := strings.Cut(name, "/"); {
	case !unitsForm.MatchString(prefix) || strings.Contains(prefix, "kubernetes.io/"):
		return "", fmt.Errorf("%q is not the beginning of a resource name; write a domain and a name, such as volcano.sh/gpu-mem", prefix)
	case len(local) > maxName:
		return "", fmt.Errorf("%q is too long: with the size it has %d characters after the domain, of which %d are allowed",
			prefix, len(local), maxName)
	}
	return name, nil
}

// UnitMiB returns the size of the units of a resource in MiB; 0 for a resource of another kind. The
// name alone says so.
func UnitMiB(name string) int {
	for _, s := range unitSizes {
		if prefix, is := strings.CutSuffix(name, "."+s.name); is && unitsForm.MatchString(prefix) {
			return s.mib
		}
	}
	return 0
}

// mpsServerMiB is the memory that the server of MPS takes of its GPU: about 450 MiB were seen.
const mpsServerMiB = 512

// reserveMiB returns the memory of a GPU that no container gets.
func (u Units) reserveMiB(g inventory.GPU) int {
	if !u.Measured || g.ReservedBytes == 0 {
		return u.ReserveMiB
	}
	mib := int((g.ReservedBytes-1)>>20) + 1 // a driver that says the highest number keeps all
	if u.MPS {
		mib += mpsServerMiB
	}
	return mib
}

// DriverLimitsSince is the first branch of the driver that limits the memory of containers.
const DriverLimitsSince = 615

// DriverLimitsMemory reports whether a driver of this version, such as 615.71.05, limits the memory
// of containers.
func DriverLimitsMemory(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	number, err := strconv.Atoi(branch)
	return err == nil && number >= DriverLimitsSince
}

// placeUnits adds a GPU as units of its memory, and reports whether it did. Otherwise the GPU stays
// as it would be without Units, with the reason in a warning.
func (p *planner) placeUnits(c candidate) bool {
	size, reserve, why := UnitMiB(p.options.Units.Name), p.options.Units.reserveMiB(*c.gpu), ""
	count := (int(c.gpu.MemoryBytes>>20) - reserve) / max(size, 1)
	switch {
	case size == 0:
		return false
	case c.mig != nil:
		why = "it is a MIG device, whose memory is its own"
	case c.gpu.MemoryBytes == 0:
		why = "the driver does not say how much memory it has"
	case count < 1:
		why = fmt.Sprintf("of its %d MiB nothing is left after the reserve of %d MiB", c.gpu.MemoryBytes>>20, reserve)
	case p.options.Units.Driver && !DriverLimitsMemory(p.driver):
		why = fmt.Sprintf("limits by the driver need driver %d, and this one is %q", DriverLimitsSince, p.driver)
	case p.options.Units.MPS && c.gpu.ComputeCapability.Major < 7:
		why = "limits by MPS need compute capability 7.0"
	case p.options.Units.MPS && !cudaAtLeast(p.cuda, 11, 5, true):
		why = "limits by MPS need a driver for CUDA 11.5, and this one is for " + p.cuda
	}
	if why != "" {
		p.warn("device %s (%s) is not offered in units: %s", c.index(), c.uuid(), why)
		return false
	}
	d := p.device(c)
	d.Resource, d.Sharing = p.options.Units.Name, InUnits
	switch {
	case p.options.Units.MPS:
		d.Sharing = InMPSUnits
	case p.options.Units.Driver:
		d.Sharing = InDriverUnits
	}
	p.units = append(p.units, unitGPU{d, unitsOf{count: count, clients: mpsClients(*c.gpu, p.cuda)}})
	return true
}

// A unitGPU is a GPU in units.
type unitGPU struct {
	device Device
	unitsOf
}

// gatherUnits makes the resource of all GPUs in units. Where their list would be too long, each has
// as many units as fit.
func (p *planner) gatherUnits() {
	if len(p.units) == 0 {
		return
	}
	size := UnitMiB(p.options.Units.Name)
	listOf := func(mib int) (bytes int) {
		for _, u := range p.units {
			d := u.device
			d.ID = replicaID(d.UUID, u.count)
			bytes = sum(bytes, multiply(u.count*size/mib, listed(d)))
		}
		return bytes
	}
	bytes := listOf(size)
	if bytes > maxUnitsList {
		fits := "no size fits"
		for _, s := range unitSizes {
			if s.mib > size && listOf(s.mib) <= maxUnitsList {
				fits = "units of " + s.name + " fit"
				break
			}
		}
		p.warn("resource %s has fewer units than its GPUs have memory for: the list would have %d bytes, and %d are used at most; %s",
			p.options.Units.Name, bytes, maxUnitsList, fits)
	}
	p.unitGPUs = map[string]unitsOf{}
	g := &gathered{}
	for _, u := range p.units {
		if bytes > maxUnitsList {
			u.count = u.count * (maxUnitsList >> 10) / (bytes >> 10) // in KiB, so as not to overflow
		}
		p.unitGPUs[u.device.UUID] = u.unitsOf
		g.add(u.device, u.count)
	}
	p.resources[p.options.Units.Name] = g
	p.gatherPercentages()
}
