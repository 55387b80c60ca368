package resource

import (
	"fmt"
	"strings"
)

// A Claim is a GPU or MIG device in a form in which the plan does not offer it, and in which a pod holds it or may hold it. The
// form of a device is its resource, whether it is shared, and whether it is a whole GPU or a part of it.
type Claim struct {
	// Resource and ID are what kubelet knows the device by.
	Resource, ID string
	// GPU is the UUID of the GPU that the device is or stands on; empty where it is to be found by ID.
	GPU string
	// Reason says who holds it, or why that is not known.
	Reason string
}

// Conflicts returns holds on the devices of the plan whose GPU is claimed in another form, so that no two pods have it in
// different forms. MIG devices of one GPU do not conflict: the driver keeps them apart.
func (p Plan) Conflicts(claims []Claim) []Hold {
	if len(claims) == 0 {
		return nil
	}
	gpuOf := map[string]string{} // by UUID of a GPU or MIG device
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			gpuOf[d.UUID], gpuOf[d.GPU] = d.GPU, d.GPU
		}
	}
	claimed := map[string][]Claim{} // by GPU
	seen := map[[3]string]bool{}
	for _, c := range claims {
		uuid, _, shared := strings.Cut(c.ID, replicaMark)
		if c.GPU == "" {
			c.GPU = gpuOf[uuid]
		}
		// Replicas of a device are one form; the first one stands for all.
		if key := [3]string{c.Resource, uuid, fmt.Sprint(shared)}; c.GPU != "" && !seen[key] {
			seen[key] = true
			claimed[c.GPU] = append(claimed[c.GPU], c)
		}
	}
	var holds []Hold
	held := map[[2]string]bool{}
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			for _, c := range claimed[d.GPU] {
				if key := [2]string{r.Name, d.UUID}; !held[key] && c.conflicts(d, r.Name) {
					held[key] = true
					holds = append(holds, Hold{Resource: r.Name, UUID: d.UUID,
						Reason: fmt.Sprintf("its GPU is not free yet as %s %s: %s", c.Resource, c.ID, c.Reason)})
				}
			}
		}
	}
	return holds
}

// conflicts reports whether a device of the plan on the claim's GPU has another form.
func (c Claim) conflicts(d Device, resource string) bool {
	uuid, _, shared := strings.Cut(c.ID, replicaMark)
	if uuid != d.UUID {
		return uuid == d.GPU || d.UUID == d.GPU // the whole GPU and a part of it
	}
	return c.Resource != resource || shared != (d.Sharing != Unshared)
}
