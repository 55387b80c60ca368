// Package why says in one sentence why a pod has no GPU, or lost it, and what to do. It is pure: the same objects give the same sentence.
package why

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// Objects are what is known of a pod and of what it could get.
type Objects struct {
	Pod    *corev1.Pod
	Events []eventsv1.Event // about the pod
	Nodes  []corev1.Node
	Pods   []corev1.Pod // that ask for GPUs, of all nodes
	Slices []*resourceapi.ResourceSlice
	// Claims are all that are allocated, and Own those of the pod by their names in its spec; nil for one that does not exist yet.
	Claims  []resourceapi.ResourceClaim
	Own     map[string]*resourceapi.ResourceClaim
	Classes []*resourceapi.DeviceClass
	// Illness is what the daemon of the pod's node says of devices that are not healthy, by UUID.
	Illness map[string]string
}

// Explain returns the sentence.
func Explain(ctx context.Context, o Objects) string {
	p := o.Pod
	switch {
	case p.Status.Reason != "" && p.Status.Phase == corev1.PodFailed:
		return rejected(p)
	case view.IsOver(p):
		return "It has ended."
	case !view.AsksForGPUs(p):
		return "It asks for no GPU: its containers have no limit of a resource " + view.Resources + "NAME, and it has no claim."
	case p.Spec.NodeName == "":
		return unscheduled(ctx, o)
	}
	if text := waiting(o); text != "" {
		return text
	}
	return held(o)
}

// admissions are what kubelet's messages mean, by a part of each.
var admissions = []struct{ has, means string }{
	{"no healthy devices present", stale},
	{"requested number of devices unavailable", stale},
	{"previously allocated devices are no longer healthy",
		"the node or kubelet was restarted, and the GPU of the pod is Unhealthy. Cure the GPU, or make the pod again"},
	{"cannot allocate unregistered device",
		"the node was restarted, and kubelet admitted the pod before the daemon had registered. Make the pod again"},
	{"unknown device", "kubelet chose from a list that had just changed. Make the pod again"},
	{"maximum request size for shared resources is 1", "the configuration gives one share to a container. Ask for one"},
	{"is not healthy", "the daemon refused the GPU. kubectl gpu list has its state. Make the pod again"},
	{"cannot be given out", "the daemon refused the GPU, because a claim or a MIG layout has it. Make the pod again"},
}

// again is the end of a sentence about a pod that has to be made anew.
const again = "ake the pod again"

const stale = "the scheduler's count was older than kubelet's: a GPU had become Unhealthy or had changed its form a moment before. " +
	"Make the pod again"

// rejected explains a pod that kubelet did not admit. Kubelet never looks at it again.
func rejected(p *corev1.Pod) string {
	begin := fmt.Sprintf("Kubelet of node %s did not admit it (%s): ", p.Spec.NodeName, p.Status.Reason)
	if p.Status.Reason == "TopologyAffinityError" {
		return begin + "no NUMA node has enough free GPUs for the policy of its Topology Manager. Ask for fewer GPUs, or change the policy."
	}
	for _, a := range admissions {
		if strings.Contains(p.Status.Message, a.has) {
			if strings.HasSuffix(a.means, again) {
				return begin + a.means + "; a controller does that by itself."
			}
			return begin + a.means + "."
		}
	}
	return begin + strings.TrimSuffix(p.Status.Message, ".") + "."
}

// waiting explains containers that do not start on the pod's node; empty if none waits.
func waiting(o Objects) string {
	for _, c := range containers(o.Pod) {
		w := c.State.Waiting
		if w == nil {
			continue
		}
		message := strings.TrimSuffix(w.Message, ".")
		switch {
		case strings.Contains(message, "PreStartContainer"): // kubelet's word for the check of a device plugin
			return fmt.Sprintf("Container %s waits for its GPU: %s. It starts by itself when the GPU is good; to get another GPU, delete the pod.",
				c.Name, message)
		case o.Pod.Status.Phase != corev1.PodPending || w.Reason == "" || w.Reason == "ContainerCreating" || w.Reason == "PodInitializing":
			continue
		case message != "":
			message = ": " + message
		}
		return fmt.Sprintf("Container %s does not start on node %s (%s)%s.", c.Name, o.Pod.Spec.NodeName, w.Reason, message)
	}
	if o.Pod.Status.Phase != corev1.PodPending {
		return ""
	}
	for _, e := range slices.Backward(o.Events) {
		if e.Reason == "FailedPrepareDynamicResources" && e.Regarding.UID == o.Pod.UID { // a pod before it may have had the name
			return fmt.Sprintf("Node %s cannot prepare its claim: %s. It is tried again by itself.", o.Pod.Spec.NodeName,
				strings.TrimSuffix(e.Note, "."))
		}
	}
	return fmt.Sprintf("It is on node %s, and its containers are being made.", o.Pod.Spec.NodeName)
}

// HasLost reports whether kubelet says that a device of a pod is Unhealthy.
func HasLost(p *corev1.Pod) bool {
	_, uuid := lost(p)
	return uuid != ""
}

// lost returns the first device of a container that is Unhealthy. A container that has ended does not use its devices.
func lost(p *corev1.Pod) (container, uuid string) {
	for _, c := range containers(p) {
		for _, r := range c.AllocatedResourcesStatus {
			for _, d := range r.Resources {
				if d.Health == corev1.ResourceHealthStatusUnhealthy && c.State.Terminated == nil {
					uuid, _, _ := strings.Cut(string(d.ResourceID), "::")
					return c.Name, uuid
				}
			}
		}
	}
	return "", ""
}

// containers returns the status of all containers of a pod.
func containers(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses)
}

// held explains a pod that has its GPUs.
func held(o Objects) string {
	if container, uuid := lost(o.Pod); uuid != "" {
		reason := cmp.Or(o.Illness[uuid], "kubectl gpu list "+o.Pod.Spec.NodeName+" -o wide has the reason and the cure")
		return fmt.Sprintf("Container %s has lost %s: %s. The pod is not touched: delete it to get another GPU.", container, uuid, reason)
	}
	return fmt.Sprintf("It runs on node %s and has its GPUs.", o.Pod.Spec.NodeName)
}

// unscheduled explains a pod that no node has.
func unscheduled(ctx context.Context, o Objects) string {
	if len(o.Pod.Spec.SchedulingGates) > 0 {
		return fmt.Sprintf("It is not scheduled before its gate %s is removed.", o.Pod.Spec.SchedulingGates[0].Name)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Own)) {
		if o.Own[name] == nil {
			return fmt.Sprintf("Its claim %s does not exist: make the ResourceClaim, or the ResourceClaimTemplate of that name.", name)
		}
	}
	requests := view.Requests(o.Pod)
	for _, resource := range slices.Sorted(maps.Keys(requests)) {
		if text := o.noRoom(resource, requests[resource]); text != "" {
			return text
		}
	}
	if text := explainClaims(ctx, o); text != "" {
		return text
	}
	for _, c := range o.Pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return "There are GPUs for it, and the scheduler says: " + strings.TrimSuffix(c.Message, ".") + "."
		}
	}
	return "There are GPUs for it, and the scheduler has not looked at it yet."
}

// A candidate is what a node has of a resource, and why it is none for the pod.
type candidate struct {
	node                *corev1.Node
	capacity, ill, free int64
	excluded, message   string
}

// noRoom says why no node has so many devices of a resource free for the pod, and which is nearest; empty if one has.
func (o Objects) noRoom(resource corev1.ResourceName, wanted int64) string {
	var best *candidate
	known := false
	for i := range o.Nodes {
		c := o.candidate(&o.Nodes[i], resource)
		if c.capacity == 0 {
			continue
		}
		known = true
		if c.excluded == "" && c.free >= wanted {
			return ""
		}
		if best == nil || nearer(c, *best, wanted) {
			best = &c
		}
	}
	switch {
	case !known:
		return fmt.Sprintf("No node has %s: %s.", resource,
			"the daemon serves it on none; kubectl gpu shows what there is, and kubectl gpu doctor NODE why")
	case best.excluded != "" && best.free >= wanted:
		return fmt.Sprintf("Node %s has %d %s free, and %s.", best.node.Name, best.free, resource, best.excluded)
	}
	text := fmt.Sprintf("No node has %d %s free; nearest is node %s with %d of %d", wanted, resource, best.node.Name, best.free, best.capacity)
	if best.ill > 0 && best.free+best.ill >= wanted {
		return text + fmt.Sprintf(", of which %d cannot be given out%s: kubectl gpu list %s -o wide has what cures them.", best.ill,
			best.message, best.node.Name)
	}
	if best.excluded != "" {
		text += ", and " + best.excluded
	}
	return text + ": wait until pods end, ask for fewer, or add nodes."
}

// nearer reports whether a node is nearer to what is wanted: first what could be cured or tolerated, then the most that is free.
func nearer(a, b candidate, wanted int64) bool {
	enough := func(c candidate) bool { return c.free >= wanted }
	if enough(a) != enough(b) {
		return enough(a)
	}
	if (a.excluded == "") != (b.excluded == "") {
		return a.excluded == ""
	}
	return a.free > b.free
}

func (o Objects) candidate(n *corev1.Node, resource corev1.ResourceName) candidate {
	all, good := n.Status.Capacity[resource], n.Status.Allocatable[resource]
	c := candidate{node: n, capacity: all.Value(), ill: all.Value() - good.Value(), free: good.Value(), excluded: excludedBy(n, o.Pod)}
	for i := range o.Pods {
		if p := &o.Pods[i]; p.Spec.NodeName == n.Name && !view.IsOver(p) {
			c.free -= view.Requests(p)[resource]
		}
	}
	c.free = max(c.free, 0)
	for _, condition := range n.Status.Conditions {
		if condition.Type == view.ConditionType && condition.Status != corev1.ConditionTrue && condition.Message != "" {
			c.message = " (" + condition.Message + ")"
		}
	}
	return c
}

// excludedBy says what keeps a pod from a node whatever is free there, with the remedy; empty if nothing does.
func excludedBy(n *corev1.Node, p *corev1.Pod) string {
	if n.Spec.Unschedulable {
		return "it is cordoned: kubectl uncordon " + n.Name
	}
	for _, t := range n.Spec.Taints {
		tolerated := slices.ContainsFunc(p.Spec.Tolerations, func(by corev1.Toleration) bool {
			return (by.Effect == "" || by.Effect == t.Effect) && (by.Key == "" && by.Operator == corev1.TolerationOpExists ||
				by.Key == t.Key && (by.Operator == corev1.TolerationOpExists || by.Value == t.Value))
		})
		if t.Effect != corev1.TaintEffectPreferNoSchedule && !tolerated {
			return fmt.Sprintf("the pod does not tolerate its taint %s:%s: give the pod a toleration, or remove the taint", t.Key, t.Effect)
		}
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err == nil && !fits {
		return "the nodeSelector or the affinity of the pod does not select it"
	}
	return ""
}
