package mps

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Group is the GPUs of one control daemon: the MPS-shared GPUs of a resource, one GPU in units of
// memory, or the GPUs of a claim.
type Group struct {
	// Resource is the name of the resource, "gpu." and the UUID for a GPU in units, or ClaimDir for a
	// claim. It is also the directory of the daemon below the root.
	Resource string
	// GPUs are the GPUs in the order of the daemon's device numbers.
	GPUs []GPU
	// Claim is the request of a claim; nil for a resource.
	Claim *ClaimDaemon
	// Unlimited is true if the daemon sets no limits: the GPU is in units, and the environment of each
	// container has the limits.
	Unlimited bool
}

// A GPU is a member of a Group.
type GPU struct {
	UUID string
	// MemoryBytes is the memory of all replicas; 0 if the driver does not report the size, or for no
	// limit.
	MemoryBytes uint64
	// Replicas is the number of clients that share the GPU.
	Replicas int
}

// Groups returns the groups of a plan, in the order of the devices. Lost GPUs are in no group: CUDA
// would not count the GPUs after a lost one.
func Groups(snapshot inventory.Snapshot, plan resource.Plan) []Group {
	groups := []Group{}
	for _, r := range plan.Resources {
		replicas := map[string]int{}
		for _, d := range r.Devices {
			replicas[d.UUID]++
		}
		for _, d := range r.Members() {
			gpu, _ := snapshot.GPU(d.GPU)
			name := d.MPSDaemon()
			if name == "" || gpu.Health.State == inventory.Lost {
				continue
			}
			if n := len(groups); n == 0 || groups[n-1].Resource != name {
				groups = append(groups, Group{Resource: name, Unlimited: d.Sharing == resource.InMPSUnits})
			}
			g := &groups[len(groups)-1]
			if g.Unlimited { // the environment of each container has the limits
				g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, Replicas: 1})
				continue
			}
			g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, MemoryBytes: gpu.MemoryBytes, Replicas: replicas[d.UUID]})
		}
	}
	return groups
}

// serves reports whether the daemon of group g also serves another group: g has all GPUs of wanted,
// with the same limits. A lost GPU is no reason to stop the daemon and so the clients on the other
// GPUs.
func (g Group) serves(wanted Group) bool {
	return g.threads() == wanted.threads() &&
		!slices.ContainsFunc(wanted.GPUs, func(gpu GPU) bool { return !slices.Contains(g.GPUs, gpu) })
}

// uuids returns the UUIDs of the GPUs.
func (g Group) uuids() []string {
	uuids := make([]string, len(g.GPUs))
	for i, gpu := range g.GPUs {
		uuids[i] = gpu.UUID
	}
	return uuids
}

// exclusive returns the UUIDs of the GPUs on which only clients may compute.
func (g Group) exclusive() []string {
	if g.Claim != nil && !g.Claim.Exclusive {
		return nil
	}
	return g.uuids()
}

// threads returns the share of a GPU's threads for each client, in percent; 0 for no limit. A
// daemon has one figure for all GPUs: the GPU with most clients decides.
func (g Group) threads() int {
	switch {
	case g.Claim != nil:
		return g.Claim.Percentage
	case g.Unlimited:
		return 0
	}
	most := 1
	for _, gpu := range g.GPUs {
		most = max(most, gpu.Replicas)
	}
	return 100 / most
}

// memoryMiB returns the memory limit of each client; 0 if not known.
func (g GPU) memoryMiB() uint64 { return g.MemoryBytes / uint64(g.Replicas) >> 20 }
