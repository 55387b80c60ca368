package resource

import (
	"cmp"
	"fmt"
)

// A HeldShape is a device that a pod holds or may hold in a form that the plan does
// not offer. The form of a device is its resource, whether it is shared, and
// whether it is a whole GPU or a MIG device.
type HeldShape struct {
	// Resource and ID are the kubelet's names.
	Resource, ID string
	// GPU is the UUID of the physical GPU; empty if only the ID is known.
	GPU string
	// Reason names the pod that holds the device, or says why the pod is unknown.
	Reason string
	// Row is the row of holds for the device, if it is not RowForm.
	Row Row
}

// Conflicts returns holds on the devices of the plan whose GPU is held in another
// form, so that two pods never use a GPU in different forms. Two MIG devices of a
// GPU do not conflict.
func (p Plan) Conflicts(held []HeldShape) []Hold {
	if len(held) == 0 {
		return nil
	}
	gpuOf := map[string]string{} // by UUID of a GPU or MIG device
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			gpuOf[d.UUID], gpuOf[d.GPU] = d.GPU, d.GPU
		}
	}
	claimed := map[string][]HeldShape{} // by GPU
	seen := map[[3]string]bool{}
	for _, c := range held {
		uuid, shared := SplitID(c.ID)
		c.GPU = cmp.Or(c.GPU, gpuOf[uuid])
		// All replicas of a device have one form: one of them is enough.
		if key := [3]string{c.Resource, uuid, fmt.Sprint(shared)}; !seen[key] {
			seen[key] = true
			claimed[c.GPU] = append(claimed[c.GPU], c)
		}
	}
	var holds []Hold
	done := map[[2]string]bool{}
	for _, r := range p.Resources {
		for _, d := range r.Devices {
			for _, c := range claimed[d.GPU] {
				if key := [2]string{r.Name, d.UUID}; !done[key] && c.Conflicts(d) {
					done[key] = true
					holds = append(holds, Hold{Resource: r.Name, UUID: d.UUID, Row: cmp.Or(c.Row, RowForm),
						Reason: fmt.Sprintf("its GPU may still be in use as %s %s (%s)", c.Resource, c.ID, c.Reason)})
				}
			}
		}
	}
	return holds
}

// Conflicts reports whether a device is on the same GPU as the held device and has
// another form.
func (c HeldShape) Conflicts(d Device) bool {
	uuid, shared := SplitID(c.ID)
	switch {
	case c.GPU == "" || c.GPU != d.GPU:
		return false
	case uuid != d.UUID:
		return uuid == d.GPU || d.UUID == d.GPU // the whole GPU and a part of it
	}
	return c.Resource != d.Resource || shared != (d.Sharing != Unshared)
}
