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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A Device is the device with one ID: a GPU, a MIG device, or a replica of either.
type Device struct {
	// ID is the kubelet's name of the device: UUID, or "UUID::n" for the n-th replica of a shared
	// device.
	ID string
	// UUID is the UUID of the GPU or MIG device. For Percentage, it is a word that no GPU has.
	UUID string
	// GPU is the UUID of the physical GPU; empty for Percentage.
	GPU string
	// Index is the GPU's index "i", or "i:j" for the MIG device j on it.
	Index string
	// Resource is the name of the device's resource.
	Resource string
	// Sharing is how several containers share the device.
	Sharing SharingMode
	// Minor is the N of the physical GPU's /dev/nvidiaN.
	Minor int
	// GI and CI are the instances of a MIG device; inventory.Unattributed for whole GPUs.
	GI, CI int
	// GICap and CICap are the N of /dev/nvidia-caps/nvidia-capN for the two instances; 0 for whole
	// GPUs and where unknown.
	GICap, CICap int
	// Control are the driver's device nodes on the node.
	Control inventory.ControlNodes
	// NUMANode is the memory node nearest to the GPU, or inventory.NoNUMANode.
	NUMANode int
	// Healthy reports whether the device can be given new work.
	Healthy bool
	// Reason says why the device is not Healthy and names the remedy, without a full stop; empty
	// when Healthy.
	Reason string
}

// MPSDaemon returns the name of the MPS control daemon for containers with the device: the daemon's
// directory below the MPS state. It is empty without MPS. All devices of a resource that is shared
// by MPS have the same daemon; each GPU in units has its own.
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

// A Resource is one extended resource of the node. It is immutable and comes from NewResource; the
// zero value has no devices.
type Resource struct {
	// Name is the full name, such as nvidia.com/gpu.
	Name string
	// Devices are the devices of the resource, by index and then by replica. For units of memory,
	// Devices has only the first unit of each GPU: there are thousands, which differ only in their
	// IDs. All returns every unit.
	Devices []Device

	onePerRequest bool
	policy        Policy
	migParents    bool
	graph         *topology.Graph
	preference    *topology.Preference
	at            map[string]int // position in Devices, by ID; for units of memory, by UUID
	units         *unitRules     // nil for other resources than units of memory
	counts        []int          // number of units of each GPU, in the order of Devices
}

// NewResource returns a resource of the given devices on a node with the given graph of GPU
// connections. It takes over the slice and sorts it.
func NewResource(name string, o Options, graph *topology.Graph, devices []Device) Resource {
	order.Sort(devices, compareDevices)
	r := Resource{Name: name, onePerRequest: o.Sharing.OnePerRequest, policy: o.Policy, migParents: o.MIGParents,
		graph: graph}
	return r.with(devices)
}

// with returns the resource with other devices, which must be in order.
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
// the same rules.
func (r Resource) Equal(other Resource) bool {
	return r.Name == other.Name && slices.Equal(r.Devices, other.Devices) &&
		r.onePerRequest == other.onePerRequest && r.policy == other.policy && r.migParents == other.migParents &&
		r.units.equal(other.units) && (r.graph == other.graph ||
		r.graph != nil && other.graph != nil && r.graph.Equal(other.graph))
}

// All returns all devices of the resource, in order.
func (r Resource) All() iter.Seq[Device] { return r.Without(Resource{}) }

// Count returns the number of devices of the resource.
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

// Without returns the devices that another resource lacks, in order.
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

// Device returns the device with the given ID.
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

// TooFew reports whether an error of Prefer means that a request wants more devices than are
// available. It also returns the number of available devices.
func TooFew(err error) (available int, few bool) {
	var e *topology.TooFewError
	if !errors.As(err, &e) {
		return 0, false
	}
	return len(e.Available), true
}

// Prefer returns the preferred `size` of the available devices for a container, including the
// required ones, in the order of the resource. Package topology describes the rules. The answer
// depends only on the sets, not on their order. Prefer fails with the errors of
// topology.Preference.
func (r Resource) Prefer(available, required []string, size int) ([]string, error) {
	if r.units != nil {
		return r.preferUnits(available, required, size)
	}
	if r.preference == nil {
		r.preference = topology.NewPreference(topology.New(nil), nil, r.policy)
	}
	return r.preference.Prefer(r.admissible(available, required, size), required, size)
}

// admissible returns the available devices that Admit lets a container have together, if there are
// enough; otherwise all of them.
func (r Resource) admissible(available, required []string, size int) []string {
	if !r.onePerRequest || size < 2 {
		return available
	}
	alone := map[string]struct{}{} // not of length size, which may be any number
	for _, id := range required {
		if d, known := r.Device(id); known && d.Sharing != Unshared {
			return available // Admit refuses every combination with a replica
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

// Admit returns why a container may not be given all these devices of the resource together; nil if
// it may. It ignores the health of the devices.
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
	return fmt.Errorf("invalid allocation request for %q: invalid request: maximum request size for shared "+
		"resources is 1; found %d", r.Name, len(devices))
}

// compareDevices orders devices by index, number by number, and then by replica.
func compareDevices(a, b Device) int {
	return cmp.Or(compareIndex(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID),
		cmp.Compare(replica(a.ID), replica(b.ID)))
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

// splitIndex splits "i" or "i:j"; j is -1 for a whole GPU.
func splitIndex(index string) (gpu, mig int) {
	i, j, partitioned := strings.Cut(index, ":")
	gpu, _ = strconv.Atoi(i)
	if !partitioned {
		return gpu, -1
	}
	mig, _ = strconv.Atoi(j)
	return gpu, mig
}

// replicaMark separates the UUID from the number of the replica in a device ID.
const replicaMark = "::"

// replicaID returns the device ID of the n-th replica of a device.
func replicaID(uuid string, n int) string { return uuid + replicaMark + strconv.Itoa(n) }

// SplitID returns the UUID in a device ID, and whether the ID belongs to a replica.
func SplitID(id string) (uuid string, shared bool) {
	uuid, _, shared = strings.Cut(id, replicaMark)
	return uuid, shared
}

// ByID returns what the ID alone says about a device that the plan may no longer have: its UUID,
// and whether it is shared, but not how.
func ByID(id string) Device {
	uuid, shared := SplitID(id)
	d := Device{ID: id, UUID: uuid, NUMANode: inventory.NoNUMANode}
	if shared {
		d.Sharing = TimeSliced
	}
	return d
}

// idForm matches the IDs of devices with NVML's UUIDs, of their replicas and of percentages.
var idForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^((` + uuidForm + `(::\d+)?)|` + percentageID + `::\d+)$`)
})

// MayBeOurs reports whether this program may have offered a device with that ID under that
// resource, with another configuration or on GPUs that cannot be read now. NVIDIA's plugin uses the
// same names and IDs.
func MayBeOurs(name, id string) bool {
	return (IsName(name) || UnitMiB(name) > 0 || IsPercentage(name)) && idForm().MatchString(id)
}

// replica returns the n of a replica's device ID; -1 for a device that is not shared.
func replica(id string) int {
	_, n, shared := strings.Cut(id, replicaMark)
	if !shared {
		return -1
	}
	i, _ := strconv.Atoi(n)
	return i
}
