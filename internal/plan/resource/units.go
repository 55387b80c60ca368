package resource

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Units is how the memory of GPUs is offered in units. It applies to GPUs that a Selector with
// Units selects.
type Units struct {
	// Name is the full name of the resource, as UnitsName returns it.
	Name string
	// ReserveMiB is the memory of a GPU that no container gets, in MiB. With Measured it applies
	// only to a GPU whose driver does not report its own use. For the other GPUs the reserve is
	// what the driver keeps and, with MPS, what its server takes.
	ReserveMiB int
	Measured   bool
	// Fit decides which of the free units are offered.
	Fit Fit
	// Fill decides which GPU a container gets.
	Fill Fill
	// Percentage is the full name of the resource of percentages, as PercentageName returns it; empty
	// for none.
	Percentage string
	// MPS enforces limits by CUDA's Multi-Process Service. Without it, units are only counted.
	MPS bool
	// Driver enforces limits by the driver, on the cgroup of each container. It excludes MPS.
	Driver bool
}

// Fit decides which of the free units of a node are offered.
type Fit int

// The values of Fit.
const (
	// FitOne offers the units of the GPU with the most free units: units that the scheduler counts
	// as free are free on one GPU.
	FitOne Fit = iota
	// FitSum offers all. A container fails if no single GPU has enough units for it.
	FitSum
)

func (f Fit) String() string { return [...]string{"one", "sum"}[f] }

// Fill decides which of the GPUs with enough units a container gets.
type Fill int

// The values of Fill.
const (
	// FillFullest takes the GPU with the fewest free units.
	FillFullest Fill = iota
	// FillEmptiest takes the GPU with the most.
	FillEmptiest
)

func (f Fill) String() string { return [...]string{"fullest", "emptiest"}[f] }

// unitSizes are the sizes of units in MiB, ascending, with the ends of their resource names.
var unitSizes = []struct {
	name string
	mib  int
}{{"128Mi", 128}, {"256Mi", 256}, {"1Gi", 1024}}

// maxUnitsList is the longest list of units, in bytes: the kubelet accepts MaxList, and a list may
// also have devices that left the plan.
const maxUnitsList = 3 << 20

// unitsForm matches a qualified name with a domain.
var unitsForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+/` +
	`[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// UnitsName returns the full name of a resource in units of a size. The name ends with the size, so
// that another size is another resource.
func UnitsName(prefix, size string) (string, error) {
	names := make([]string, len(unitSizes))
	for i, s := range unitSizes {
		names[i] = s.name
	}
	if !slices.Contains(names, size) {
		return "", fmt.Errorf("%q is not a size of units; use %s", size, strings.Join(names, ", "))
	}
	return unitsPrefix(prefix, prefix+"."+size)
}

// unitsPrefix returns a name with a prefix, if the prefix suits a resource.
func unitsPrefix(prefix, name string) (string, error) {
	switch _, local, _ := strings.Cut(name, "/"); {
	case !unitsForm.MatchString(prefix) || strings.Contains(prefix, "kubernetes.io/"):
		return "", fmt.Errorf("%q is not the beginning of a resource name; write a domain and a name, such as "+
			"volcano.sh/gpu-mem", prefix)
	case len(local) > maxName:
		return "",
			fmt.Errorf("%q is too long: with the size it has %d characters after the domain, of which %d are allowed",
				prefix, len(local), maxName)
	}
	return name, nil
}

// UnitMiB returns the size of the units of a resource in MiB, by its name; 0 for a resource of
// another kind.
func UnitMiB(name string) int {
	for _, s := range unitSizes {
		if prefix, is := strings.CutSuffix(name, "."+s.name); is && unitsForm.MatchString(prefix) {
			return s.mib
		}
	}
	return 0
}

// mpsServerMiB is the memory of the MPS server on its GPU: about 450 MiB were measured.
const mpsServerMiB = 512

// reserveMiB returns the memory of a GPU that no container gets.
func (u Units) reserveMiB(g inventory.GPU) int {
	if !u.Measured || g.ReservedBytes == 0 {
		return u.ReserveMiB
	}
	mib := int((g.ReservedBytes-1)>>20) + 1 // a driver that reports the highest number keeps all
	if u.MPS {
		mib += mpsServerMiB
	}
	return mib
}

// DriverLimitsSince is the first driver branch that limits the memory of containers.
const DriverLimitsSince = 615

// DriverLimitsMemory reports whether a driver of this version, such as 615.71.05, limits the memory
// of containers.
func DriverLimitsMemory(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	number, err := strconv.Atoi(branch)
	return err == nil && number >= DriverLimitsSince
}

// placeUnits adds a GPU as units of its memory, and reports whether it did. Otherwise the GPU is
// offered as without Units, and a warning has the reason.
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
		why = fmt.Sprintf("the reserve of %[2]d MiB leaves nothing of its %[1]d MiB", c.gpu.MemoryBytes>>20, reserve)
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

// gatherUnits creates the resource of all GPUs in units. If the list would be too long, each GPU
// has as many units as fit.
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
		p.warn("resource %s has fewer units than its GPUs have memory for: the list would have %d bytes, and the "+
			"limit is %d; %s",
			p.options.Units.Name, bytes, maxUnitsList, fits)
	}
	p.unitGPUs = map[string]unitsOf{}
	g := &draft{}
	for _, u := range p.units {
		if bytes > maxUnitsList {
			u.count = u.count * (maxUnitsList >> 10) / (bytes >> 10) // in KiB, to prevent an overflow
		}
		p.unitGPUs[u.device.UUID] = u.unitsOf
		g.add(u.device, u.count)
	}
	p.resources[p.options.Units.Name] = g
	p.gatherPercentages()
}
