package view

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// notReadyBadness is worse than any number of devices that are not healthy.
const notReadyBadness = 1 << 30

// Badness returns how bad a node is: 0 for a healthy node, and otherwise more for each
// device missing for pods. A node whose kubelet does not respond is the worst.
func (n Node) Badness() int64 {
	missing := n.All - n.Healthy
	if n.All == 0 {
		missing = int64(n.GPUs) // none of its GPUs is offered
	}
	if missing == 0 && (n.Condition == string(corev1.ConditionFalse) || n.DaemonAbsent != "" && n.All > 0) {
		missing = 1
	}
	if !n.NotReadySince.IsZero() {
		return notReadyBadness + missing
	}
	return missing
}

// SortNodes sorts nodes: the worst first, and equal ones by name.
func SortNodes(nodes []Node) {
	slices.SortStableFunc(nodes, func(a, b Node) int {
		return cmp.Or(cmp.Compare(b.Badness(), a.Badness()), cmp.Compare(a.Name, b.Name))
	})
}

// Totals returns a sentence with the sums over nodes.
func Totals(nodes []Node) string {
	var all, healthy, allocated int64
	bad := 0
	for _, n := range nodes {
		all, healthy, allocated = all+n.All, healthy+n.Healthy, allocated+n.Allocated
		if n.Badness() > 0 {
			bad++
		}
	}
	return fmt.Sprintf("Nodes: %d, of which %d not healthy. Devices: %d healthy of %d, %d allocated.",
		len(nodes), bad, healthy, all, allocated)
}

// badStates are the states of GPUs that are not healthy, the worst last.
var badStates = []string{"Healthy", "Suspect", "Unknown", "Unhealthy", "Lost"}

// Badness returns how bad a GPU is; 0 if it is Healthy.
func (g GPU) Badness() int {
	if at := slices.Index(badStates, g.State); at >= 0 {
		return at
	}
	return slices.Index(badStates, "Unknown")
}

// SortGPUs sorts GPUs: the worst first. The order of equal ones stays.
func SortGPUs(gpus []GPU) {
	slices.SortStableFunc(gpus, func(a, b GPU) int { return cmp.Compare(b.Badness(), a.Badness()) })
}

// RemedyText returns the remedy of the GPU, in words if its name does not say what to do;
// empty for a GPU without a fault.
func (g GPU) RemedyText() string {
	if g.Remedy == string(inventory.RemedyHuman) {
		return "manual (needs an operator)"
	}
	return g.Remedy
}
