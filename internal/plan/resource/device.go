package resource

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A Device is the device with one ID: a GPU, a MIG device, or a replica of one.
type Device struct {
	// ID is the device's name at kubelet: UUID, or "UUID::n" for the n-th replica of a shared device.
	ID string
	// UUID is the GPU's or the MIG device's; of a Percentage, a word that no GPU has.
	UUID string
	// GPU is the UUID of the physical GPU that the device is, or is a part of; empty for a Percentage.
	GPU string
	// Index is "i", the GPU's index, or "i:j" for the MIG device j on it.
	Index string
	// Resource is the name of the resource that it belongs to.
	Resource string
	// Sharing is how several containers share it.
	Sharing SharingMode
	// Minor is the N of the physical GPU's /dev/nvidiaN.
	Minor int
	// GI and CI are the instances of a MIG device; inventory.Unattributed for whole GPUs.
	GI, CI int
	// GICap and CICap are the N of the /dev/nvidia-caps/nvidia-capN of the two; 0 for whole GPUs and
	// where not known.
	GICap, CICap int
	// Control are the driver's device nodes that the node has.
	Control inventory.ControlNodes
	// NUMANode is the memory node nearest to the GPU, or inventory.NoNUMANode.
	NUMANode int
	// Healthy says that new work may be given to the device.
	Healthy bool
	// Reason says why not, and what cures it, in a sentence without a full stop; empty when Healthy.
	Reason string
}

// MPSDaemon returns the name of the MPS control daemon that containers with the device use: its
// directory below that of MPS state. It is empty if they use none. All devices of a resource that
// is shared by MPS have one; a GPU in units has one of its own.
func (d Device) MPSDaemon() string {
	switch d.Sharing {
	case MPS:
		return d.Resource
	case InMPSUnits:
		return "gpu." + d.UUID
	case Unshared, TimeSliced, InUnits, InDriverUnits, Percentage:
	}
	return ""
}

// A Resource is one extended resource of the node. It is immutable, and made by NewResource; the
// zero value has no devices.
type Resource struct {
	// Name is the full name, such as nvidia.com/gpu.
	Name string
	// Devices are the devices of the resource, by index and then by replica. Of units of memory they
	// are the first of each GPU, because there are thousands that differ in their IDs alone: All makes
	// the others.
	Devices []Device

	onePerRequest bool
	policy        Policy
	migParents    bool
	graph         *topology.Graph
	preference    *topology.Preference
	at            map[string]int // position in Devices, by ID; of units of memory, by UUID
	units         *unitRules     // nil if the devices are no units of memory
	counts        []int          // how many units each GPU has, in the order of Devices
}

// NewResource returns a resource of the given devices, which it orders, on a node whose GPUs are
// connected as graph says. It takes over the slice.
func NewResource(name string, o Options, graph *topology.Graph, devices []Device) Resource {
	slices.SortStableFunc(devices, compareDevices)
	r := Resource{Name: name, onePerRequest: o.Sharing.OnePerRequest, policy: o.Policy, migParents: o.MIGParents,
		graph: graph}
	return r.with(devices)
}

// with returns the resource with other devices, which are in order.
func (r Resource) with(devices []Device) Resource {
	r.Devices, r.at = devices, make(map[string]int, len(devices))
	if r.units != nil {
		r.counts = make([]int, len(devices))
		for i, d := range devices {
			r.at[d.UUID], r.counts[i] = i, r.units.gpus[d.UUID].count
		}
		return r
	}
	choice := make([]topology.Device, len(devices))
	for i, d := range devices {
		r.at[d.ID] = i
		choice[i] = topology.Device{ID: d.ID, UUID: d.UUID, GPU: d.GPU, Healthy: d.Healthy}
		if r.migParents {
			choice[i].GPU = d.UUID
		}
	}
	r.preference = topology.NewPreference(r.graph, choice, r.policy)
	return r
}

// Equal reports whether two resources have the same name, the same devices in the same state, and
// are served alike.
func (r Resource) Equal(other Resource) bool {
	return r.Name == other.Name && slices.Equal(r.Devices, other.Devices) &&
		r.onePerRequest == other.onePerRequest && r.policy == other.policy && r.migParents == other.migParents &&
		r.units.equal(other.units) && (r.graph == other.graph ||
		r.graph != nil && other.graph != nil && r.graph.Equal(other.graph))
}

// All returns all devices of the resource, in order.
func (r Resource) All() iter.Seq[Device] { return r.Without(Resource{}) }

// Count returns how many devices the resource has.
func (r Resource) Count() int {
	count := len(r.Devices)
	if r.units != nil {
		count = 0
		for _, units := range r.counts {
			count += units
		}
	}
	return count
}

// Without returns the devices that another resource does not have, in order.
func (r Resource) Without(other Resource) iter.Seq[Device] {
	return func(yield func(Device) bool) {
		for _, d := range r.Devices {
			if r.units == nil {
				if other.Lacks(d.ID) && !yield(d) {
					return
				}
				continue
			}
			for n, count := other.UnitCount(d.UUID), r.UnitCount(d.UUID); n < count; n++ {
				if d.ID = replicaID(d.UUID, n); !yield(d) {
					return
				}
			}
		}
	}
}

// Members returns one device of the resource for each GPU or MIG device, in the order of Devices.
func (r Resource) Members() []Device {
	var each []Device
	for i, d := range r.Devices {
		if i == 0 || r.Devices[i-1].UUID != d.UUID {
			each = append(each, d)
		}
	}
	return each
}

// Device returns the device of the given ID.
func (r Resource) Device(id string) (Device, bool) {
	if r.units != nil {
		gpu, n := r.unit(id)
		if gpu < 0 || n >= r.counts[gpu] {
			return Device{}, false
		}
		d := r.Devices[gpu]
		d.ID = id
		return d, true
	}
	i, found := r.at[id]
	if !found {
		return Device{}, false
	}
	return r.Devices[i], true
}

// Lacks reports whether no device has the given ID.
func (r Resource) Lacks(id string) bool {
	_, found := r.Device(id)
	return !found
}

// TooFew reports whether an error of Prefer says that a request wants more devices than are
// available, and returns how many are.
func TooFew(err error) (available int, few bool) {
	var e *topology.TooFewError
	if !errors.As(err, &e) {
		return 0, false
	}
	return len(e.Available), true
}

// Prefer returns which `size` of the available devices a container should be given, including the
// required ones, in the order of the resource. Package topology describes the rules. The answer
// depends on the sets alone, not on their order. It fails with the errors of topology.Preference.
func (r Resource) Prefer(available, required []string, size int) ([]string, error) {
	if r.units != nil {
		return r.preferUnits(available, required, size)
	}
	if r.preference == nil {
		r.preference = topology.NewPreference(topology.New(nil), nil, r.policy)
	}
	return r.preference.Prefer(r.admissible(available, required, size), required, size)
}

// admissible returns those of the available devices that Admit lets a container have together, if
// they are enough; else all of them.
func (r Resource) admissible(available, required []string, size int) []string {
	if !r.onePerRequest || size < 2 {
		return available
	}
	alone := map[string]struct{}{} // not of size, which may be anything
	for _, id := range required {
		if d, known := r.Device(id); known && d.Sharing != Unshared {
			return available // whatever comes with it is refused
		}
		alone[id] = struct{}{}
	}
	var kept []string
	for _, id := range available {
		if d, known := r.Device(id); known && d.Sharing == Unshared && d.Healthy {
			alone[id] = struct{}{}
			kept = append(kept, id)
		}
	}
	if len(alone) < size {
		return available
	}
	return kept
}

// Admit returns why a container may not be given all these devices of the resource at once; nil if
// it may. It does not look at the health of the devices.
func (r Resource) Admit(devices []Device) error {
	if UnitMiB(r.Name) > 0 {
		return r.admitUnits(devices)
	}
	if len(devices) > 0 && devices[0].Sharing == Percentage {
		return r.admitPercentage(len(devices))
	}
	shared := slices.ContainsFunc(devices, func(d Device) bool { return d.Sharing != Unshared })
	if !r.onePerRequest || !shared || len(devices) < 2 {
		return nil
	}
	return fmt.Errorf("invalid allocation request for %q: invalid request: maximum request size for shared resources is 1; "+
		"found %d", r.Name, len(devices))
}

// compareDevices orders devices by index, number by number, and then by replica.
func compareDevices(a, b Device) int {
	return cmp.Or(compareIndex(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID), cmp.Compare(replica(a.ID), replica(b.ID)))
}

// compareIndex orders indices "i" and "i:j", number by number.
func compareIndex(a, b string) int {
	if a == b {
		return 0
	}
	ga, ma := splitIndex(a)
	gb, mb := splitIndex(b)
	return cmp.Or(cmp.Compare(ga, gb), cmp.Compare(ma, mb))
}

// splitIndex takes "i" or "i:j" apart; j is -1 for a whole GPU.
func splitIndex(index string) (gpu, mig int) {
	i, j, partitioned := strings.Cut(index, ":")
	gpu, _ = strconv.Atoi(i)
	if !partitioned {
		return gpu, -1
	}
	mig, _ = strconv.Atoi(j)
	return gpu, mig
}

// replicaMark stands between the UUID and the number of a replica in a device ID.
const replicaMark = "::"

// replicaID is the device ID of the n-th replica of a device.
func replicaID(uuid string, n int) string { return uuid + replicaMark + strconv.Itoa(n) }

// SplitID returns the UUID of the device that kubelet has under an ID, and whether the ID is that
// of a replica.
func SplitID(id string) (uuid string, shared bool) {
	uuid, _, shared = strings.Cut(id, replicaMark)
	return uuid, shared
}

// ByID returns the facts that the ID alone tells about a device that the plan may no longer have:
// its UUID, and whether it is shared, but not how.
func ByID(id string) Device {
	uuid, shared := SplitID(id)
	d := Device{ID: id, UUID: uuid, NUMANode: inventory.NoNUMANode}
	if shared {
		d.Sharing = TimeSliced
	}
	return d
}

// idForm is that of the IDs of devices with NVML's UUIDs, and of their replicas.
var idForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^((` + uuidForm + `(::\d+)?)|` + percentageID + `::\d+)$`)
})

// MayBeOurs reports whether this program may have offered a device of that ID under that resource,
// with another configuration or on GPUs that cannot be read now. NVIDIA's plugin uses the same
// names and IDs.
func MayBeOurs(name, id string) bool {
	return (IsName(name) || UnitMiB(name) > 0 || IsPercentage(name)) && idForm().MatchString(id)
}

// replica is the n of a replica's device ID; -1 for a device that is not shared.
func replica(id string) int {
	_, n, shared := strings.Cut(id, replicaMark)
	if !shared {
		return -1
	}
	i, _ := strconv.Atoi(n)
	return i
}
