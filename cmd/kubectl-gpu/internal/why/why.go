// Package why says in a few sentences why a pod has no GPU, or lost it, and what to do. It reads
// nothing itself: the same objects, and the same answer of a node's daemon, give the same
// sentences.
package why

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// Objects are what is known of a pod and of what it could get.
type Objects struct {
	Pod    *corev1.Pod
	Events []eventsv1.Event // about the pod
	// Facts are those of all nodes: Pods may ask for GPUs, and Slices are of all drivers, because the
	// scheduler allocates devices of all drivers together.
	view.Facts
	Slices []*resourceapi.ResourceSlice
	// Own are the claims of the pod by their names in its spec; nil for one that does not exist yet.
	// Of a pod whose resources are given by a claim, it has that one too, by its own name.
	Own     map[string]*resourceapi.ResourceClaim
	Classes []*resourceapi.DeviceClass
	// Ask returns what the daemon of a node knows. It may take a while; one node is asked once.
	Ask func(ctx context.Context, node string) Daemon
	// Running are the nodes on which a daemon runs, in order, and NoneRuns says why none runs in the
	// cluster; empty if one does, or if that is not known.
	Running  []string
	NoneRuns string
	// Doctor returns what doctor says of how containers get GPUs on a node. It is asked for nodes
	// whose daemon answers.
	Doctor func(ctx context.Context, node string) Doctor
	Now    time.Time
}

// A Daemon is what the daemon of a node knows.
type Daemon struct {
	// Status is its status, with holders; nil if it did not answer, and then Problem says why, in a
	// sentence without a full stop.
	Status  *status.Status
	Problem string
}

// Doctor is what doctor says of how containers get GPUs on a node: sentences without a full stop.
type Doctor struct {
	// NeedsClass says that pods get GPUs by their runtime class alone, and None that no container gets
	// any; empty where that is not so.
	NeedsClass, None string
}

// Explain returns the sentences, in one line.
func Explain(ctx context.Context, o Objects) string {
	p := o.Pod
	switch {
	case p.Status.Phase == corev1.PodFailed:
		return o.failed(ctx)
	case p.Status.Phase == corev1.PodSucceeded:
		return "It has ended."
	case p.DeletionTimestamp != nil:
		return o.terminating()
	case !o.asksForGPUs():
		return o.asksForNone()
	case p.Spec.NodeName == "":
		return unscheduled(ctx, o)
	}
	return o.late() + o.assigned(ctx)
}

// asksForGPUs reports whether the pod asks for GPUs: by any claim, or by a resource that is known
// to be one of GPUs, that a DeviceClass names, or that no node has.
func (o Objects) asksForGPUs() bool { return len(o.Pod.Spec.ResourceClaims) > 0 || len(o.wanted()) > 0 }

// wanted returns how many devices the pod asks for, of the resources that are explained.
func (o Objects) wanted() map[corev1.ResourceName]int64 {
	wanted := view.Extended(o.Pod)
	for name := range wanted {
		if !o.IsGPU(name) && view.ClassOf(name, o.Classes) == nil && o.isServed(name) {
			delete(wanted, name) // it is another kind of device
		}
	}
	return wanted
}

// isServed reports whether a node has a resource, be it with no device.
func (o Objects) isServed(name corev1.ResourceName) bool {
	for i := range o.Nodes {
		if _, has := o.Nodes[i].Status.Capacity[name]; has {
			return true
		}
	}
	return false
}

func (o Objects) asksForNone() string {
	text := "It asks for no GPU: its containers have no limit of a resource of GPUs, such as nvidia.com/gpu, and it has no claim"
	if names := o.servedNames(); names != "" {
		text += "; nodes have " + names
	}
	return text + "."
}

// terminating explains a pod that is being deleted.
func (o Objects) terminating() string {
	text := "It is being deleted"
	if end := o.Pod.DeletionTimestamp.Time; end.Before(o.Now) {
		text += ", and was to have ended" + view.Ago(" ", end, o.Now)
	}
	if len(o.Pod.Finalizers) > 0 {
		text += "; it waits for its finalizer " + o.Pod.Finalizers[0]
	}
	if node := o.node(o.Pod.Spec.NodeName); node != nil && notReady(node) != nil {
		text += fmt.Sprintf("; the kubelet of node %s does not answer", node.Name)
	}
	return text + ". It keeps its GPUs until it has ended."
}

// late begins the sentences about a pod whose kubelet does not answer: the pod's status is out of
// date.
func (o Objects) late() string {
	node := o.node(o.Pod.Spec.NodeName)
	if node == nil && len(o.Nodes) > 0 {
		return fmt.Sprintf("Node %s does not exist any more, so the pod's status is out of date. ", o.Pod.Spec.NodeName)
	}
	if node == nil || notReady(node) == nil {
		return ""
	}
	return fmt.Sprintf("The kubelet of node %s does not answer%s, so the pod's status is out of date. ",
		node.Name, view.Ago(", as was found ", notReady(node).LastTransitionTime.Time, o.Now))
}

// notReady returns the condition of a node that is not ready; nil if it is.
func notReady(n *corev1.Node) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

func (o Objects) node(name string) *corev1.Node {
	for i := range o.Nodes {
		if o.Nodes[i].Name == name {
			return &o.Nodes[i]
		}
	}
	return nil
}

// ask returns what the daemon of a node knows.
func (o Objects) ask(ctx context.Context, node string) Daemon {
	if o.Ask == nil {
		return Daemon{Problem: "its daemon was not asked"}
	}
	return o.Ask(ctx, node)
}
