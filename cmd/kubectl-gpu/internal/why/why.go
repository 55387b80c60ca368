// Package why explains in a few sentences why a pod has no GPU or lost its GPU, and what
// to do. The package has no I/O: the same objects and the same answer of the daemon give
// the same sentences.
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

// Objects are the known facts about a pod and the cluster.
type Objects struct {
	Pod    *corev1.Pod
	Events []eventsv1.Event // about the pod
	// Facts cover all nodes. Pods are pods that may request GPUs, and Slices are slices of all
	// drivers, because the scheduler allocates devices of all drivers together.
	view.Facts
	Slices []*resourceapi.ResourceSlice
	// Own are the claims of the pod by their names in its spec; nil for a missing claim. A
	// claim of the scheduler for the pod's extended resources is also in Own, by the
	// claim's own name.
	Own     map[string]*resourceapi.ResourceClaim
	Classes []*resourceapi.DeviceClass
	// Ask returns the status of a node's daemon. It may take a while, and asks each node once.
	Ask func(ctx context.Context, node string) Daemon
	// Running are the sorted names of the nodes with a running daemon. NoneRuns says why
	// no daemon runs in the cluster; empty if a daemon runs, or if the answer is unknown.
	Running  []string
	NoneRuns string
	// Doctor returns doctor's findings on how containers get GPUs on a node. It is called for nodes
	// whose daemon responds.
	Doctor func(ctx context.Context, node string) Doctor
	Now    time.Time
}

// A Daemon is the answer of a node's daemon.
type Daemon struct {
	// Status is the daemon's status with holders. If the daemon did not respond, Status is nil and
	// Problem says why, without a full stop.
	Status  *status.Status
	Problem string
}

// Doctor has doctor's findings on how containers get GPUs on a node, without a full stop.
type Doctor struct {
	// NeedsClass says that pods need a runtime class to get GPUs, and None that containers
	// get no GPUs; empty otherwise.
	NeedsClass, None string
}

// Explain returns the explanation on one line.
func Explain(ctx context.Context, o Objects) string {
	p := o.Pod
	switch {
	case p.Status.Phase == corev1.PodFailed:
		return o.explainFailed(ctx)
	case p.Status.Phase == corev1.PodSucceeded:
		return "It has ended."
	case p.DeletionTimestamp != nil:
		return o.explainTerminating()
	case !o.asksForGPUs():
		return o.asksForNone()
	case p.Spec.NodeName == "":
		return explainUnscheduled(ctx, o)
	}
	return o.outdated() + o.explainAssigned(ctx)
}

// asksForGPUs reports whether the pod requests GPUs: by any claim, or by a resource that is known
// to be for GPUs, is named by a DeviceClass, or is on no node.
func (o Objects) asksForGPUs() bool {
	return len(o.Pod.Spec.ResourceClaims) > 0 || len(o.wantedDevices()) > 0
}

// wantedDevices returns the number of devices that the pod requests of each explained resource.
func (o Objects) wantedDevices() map[corev1.ResourceName]int64 {
	wanted := view.Extended(o.Pod)
	for name := range wanted {
		if !o.IsGPU(name) && view.ClassOf(name, o.Classes) == nil && o.isServed(name) {
			delete(wanted, name) // another kind of device
		}
	}
	return wanted
}

// isServed reports whether a node has the resource, even with 0 devices.
func (o Objects) isServed(name corev1.ResourceName) bool {
	for i := range o.Nodes {
		if _, has := o.Nodes[i].Status.Capacity[name]; has {
			return true
		}
	}
	return false
}

func (o Objects) asksForNone() string {
	text := "It requests no GPU: its containers have no limit of a GPU resource such as nvidia.com/gpu, and it has " +
		"no claim"
	if names := o.servedNames(); names != "" {
		text += "; nodes have " + names
	}
	return text + "."
}

// explainTerminating explains a pod that is being deleted.
func (o Objects) explainTerminating() string {
	text := "It is being deleted"
	if end := o.Pod.DeletionTimestamp.Time; end.Before(o.Now) {
		text += ", and was to have ended" + view.Ago(" ", end, o.Now)
	}
	if len(o.Pod.Finalizers) > 0 {
		text += "; it waits for its finalizer " + o.Pod.Finalizers[0]
	}
	if node := o.node(o.Pod.Spec.NodeName); node != nil && notReady(node) != nil {
		text += fmt.Sprintf("; the kubelet of node %s does not respond", node.Name)
	}
	return text + ". It keeps its GPUs until it has ended."
}

// outdated returns a first sentence if the kubelet of the pod's node does not respond, because the
// pod's status is then out of date.
func (o Objects) outdated() string {
	node := o.node(o.Pod.Spec.NodeName)
	if node == nil && len(o.Nodes) > 0 {
		return fmt.Sprintf("Node %s does not exist any more, so the pod's status is out of date. ", o.Pod.Spec.NodeName)
	}
	if node == nil || notReady(node) == nil {
		return ""
	}
	return fmt.Sprintf("The kubelet of node %s does not respond%s, so the pod's status is out of date. ",
		node.Name, view.Ago(", as was found ", notReady(node).LastTransitionTime.Time, o.Now))
}

// notReady returns the Ready condition of a node that is not ready; nil for a ready node.
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

// ask returns the answer of a node's daemon.
func (o Objects) ask(ctx context.Context, node string) Daemon {
	if o.Ask == nil {
		return Daemon{Problem: "its daemon was not asked"}
	}
	return o.Ask(ctx, node)
}
