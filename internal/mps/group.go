package mps

import (
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// A Group is the GPUs of one control daemon: those of one resource that are shared by MPS, or those of a claim.
type Group struct {
	// Resource is the name of the resource, or ClaimDir for a claim. It is the directory of the daemon below the root.
	Resource string
	// GPUs are in the order in which the daemon counts them.
	GPUs []GPU
	// Claim is the daemon that a claim wants; nil for a resource.
	Claim *ClaimDaemon
}

// A GPU is one of a Group.
type GPU struct {
	UUID string
	// MemoryBytes is the memory of all replicas; 0 if the driver does not say, or if it has no limit.
	MemoryBytes uint64
	// Replicas is how many clients share the GPU.
	Replicas int
}

// Groups returns the groups of a plan, by resource. GPUs that are lost are in none: CUDA would not count those behind them.
func Groups(snapshot inventory.Snapshot, plan resource.Plan) []Group {
	groups := []Group{}
	for _, r := range plan.Resources {
		g := Group{Resource: r.Name}
		for _, d := range r.Devices {
			gpu, _ := snapshot.GPU(d.GPU)
			if d.Sharing != resource.MPS || gpu.Health.State == inventory.Lost {
				continue
			}
			i := slices.IndexFunc(g.GPUs, func(known GPU) bool { return known.UUID == d.UUID })
			if i < 0 {
				i = len(g.GPUs)
				g.GPUs = append(g.GPUs, GPU{UUID: d.UUID, MemoryBytes: gpu.MemoryBytes})
			}
			g.GPUs[i].Replicas++
		}
		if len(g.GPUs) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// serves reports whether the daemon of this group will do for another one: it has its GPUs, with the same limits. A GPU
// that is lost is no reason to end the daemon, and with it the clients on all the others.
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

// threads is the part of a GPU's threads, in percent, that one client may use; 0 for no limit. A daemon has one figure for all its
// GPUs: that of the one with most clients.
func (g Group) threads() int {
	if g.Claim != nil {
		return g.Claim.Percentage
	}
	most := 1
	for _, gpu := range g.GPUs {
		most = max(most, gpu.Replicas)
	}
	return 100 / most
}

// memoryMiB is how much memory of the GPU one client may have; 0 if that is not known.
func (g GPU) memoryMiB() uint64 { return g.MemoryBytes / uint64(g.Replicas) >> 20 }
