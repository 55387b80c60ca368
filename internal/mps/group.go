package mps

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Group is the GPUs of one control daemon: those of one resource that are shared by MPS, one in
// units of its memory, or those of a claim.
type Group struct {
	// Resource is the name of the resource, "gpu." and the UUID for a GPU in units, or ClaimDir for a
	// claim. It is the directory of the daemon below the root.
	Resource string
	// GPUs are in the order in which the daemon counts them.
	GPUs []GPU
	// Claim is the daemon that a claim wants; nil for a resource.
	Claim *ClaimDaemon
	// Unlimited says that the daemon sets no limits: the GPU is in units, and each container has its
	// limits in its environment.
	Unlimited bool
}

// A GPU is one of a Group.
type GPU struct {
	UUID string
	// MemoryBytes is the memory of all replicas; 0 if the driver does not say, or if it has no limit.
	MemoryBytes uint64
	// Replicas is how many clients share the GPU.
	Replicas int
}

// Groups returns the groups of a plan, in the order of its devices. GPUs that are lost are in none:
// CUDA would not count those behind them.
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
			if g.Unlimited { // each container has its limits in its environment
				g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, Replicas: 1})
				continue
			}
			g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, MemoryBytes: gpu.MemoryBytes, Replicas: replicas[d.UUID]})
		}
	}
	return groups
}

// serves reports whether the daemon of this group will do for another one: it has its GPUs, with
// the same limits. A GPU that is lost is no reason to end the daemon, and with it the clients on
// all the others.
func (g Group) serves(wanted Group) bool {
	return g.threads() == wanted.threads() &&
		!slices.ContainsFunc(wanted.GPUs, func(gpu GPU) bool { return !slices.Contains(g.GPUs, gpu) })
}

// uuids are those of the GPUs.
func (g Group) uuids() []string {
	uuids := make([]string, len(g.GPUs))
	for i, gpu := range g.GPUs {
		uuids[i] = gpu.UUID
	}
	return uuids
}

// exclusive are the UUIDs of GPUs on which no process but clients may compute.
func (g Group) exclusive() []string {
	if g.Claim != nil && !g.Claim.Exclusive {
		return nil
	}
	return g.uuids()
}

// threads is the part of a GPU's threads, in percent, that one client may use; 0 for no limit. A
// daemon has one figure for all its GPUs: that of the one with most clients.
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

// memoryMiB is how much memory of the GPU one client may have; 0 if that is not known.
func (g GPU) memoryMiB() uint64 { return g.MemoryBytes / uint64(g.Replicas) >> 20 }
