package why

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// admissions explains messages of the kubelet that contain a text.
var admissions = []struct{ has, means string }{
	{"no healthy devices present", stale},
	{"requested number of devices unavailable", stale},
	{"previously allocated devices are no longer healthy",
		"the node or the kubelet was restarted, and the GPU of the pod is Unhealthy. Repair the GPU, or create the " +
			"pod again"},
	{"cannot allocate unregistered device",
		"the node was restarted, and the kubelet admitted the pod before the daemon had registered. Create the pod " +
			"again"},
	{"unknown device", "the kubelet chose from a list that had just changed. Create the pod again"},
	{"maximum request size for shared resources is 1", "the configuration allows one share for each container. " +
		"Request one"},
	{"is not healthy", refusal},
	{"cannot be given out", refusal},
}

// retryEnd is the end of sentences about a pod that must be created again.
const retryEnd = "reate the pod again"

// refusal explains a refusal by the daemon; the message has its reason.
const refusal = "the daemon refused the GPU. Create the pod again"

const stale = "the scheduler's count was older than the kubelet's: a GPU had become Unhealthy or had changed its " +
	"form a moment before, or the node was restarted, and the kubelet admitted the pod before the daemon had " +
	"registered. Create the pod again"

// endings explains other reasons of failed pods.
var endings = map[string]string{
	"Evicted": "the node was short of memory, disk or process IDs, or the pod was evicted. This is not a " +
		"GPU problem",
	"DeadlineExceeded": "it ran for longer than activeDeadlineSeconds. This is not a GPU problem",
	"Preempting":       "the kubelet ended it for a critical pod. Its controller creates a new pod",
	"Terminated":       "the node was shut down. Its controller creates a new pod",
	"NodeShutdown":     "the node was shut down. Its controller creates a new pod",
	"NodeLost":         "its node does not respond. Its controller creates a new pod",
}

// explainFailed explains a failed pod: the kubelet rejected or ended the pod, or its containers
// failed.
func (o Objects) explainFailed(ctx context.Context) string {
	p := o.Pod
	message := strings.TrimSuffix(strings.TrimSpace(p.Status.Message), ".")
	if means := endings[p.Status.Reason]; means != "" {
		if message != "" {
			message = ": " + message
		}
		return fmt.Sprintf("It has failed (%s)%s: %s.", p.Status.Reason, message, means)
	}
	if p.Status.Reason != "" {
		return o.explainRejected(ctx, message)
	}
	t := view.FirstTrouble(p)
	if t == nil {
		return "It has failed, and its containers do not say why."
	}
	text := fmt.Sprintf("Container %s %s.", t.Container, t.Text("on node "+p.Spec.NodeName, o.Now))
	return text + o.badGPU(ctx, t.Container) + o.nextStep(ctx, t.FullText(), t.Container)
}

// explainRejected explains a pod refused by the kubelet. The kubelet never retries the admission.
func (o Objects) explainRejected(ctx context.Context, message string) string {
	p := o.Pod
	begin := fmt.Sprintf("The kubelet of node %s did not admit it (%s): ", p.Spec.NodeName, p.Status.Reason)
	if p.Status.Reason == "TopologyAffinityError" {
		return begin + "no NUMA node has enough free GPUs for the policy of its Topology Manager. Request fewer " +
			"GPUs, or change the policy."
	}
	if resource, out := strings.CutPrefix(p.Status.Reason, "OutOf"); out {
		return begin + o.tooFew(ctx, resource, message)
	}
	if node := o.node(p.Spec.NodeName); node != nil && p.Status.Reason == "NodeAffinity" {
		if text := view.ExcludedBy(node, p); text != "" {
			return begin + message + ": " + text + "."
		}
	}
	for _, a := range admissions {
		if strings.Contains(message, a.has) {
			if a.means == refusal {
				begin += message + ": "
			}
			if strings.HasSuffix(a.means, retryEnd) {
				return begin + a.means + "; a controller does that by itself." + o.nodeState(ctx)
			}
			return begin + a.means + "."
		}
	}
	return begin + message + "."
}

// tooFew explains that the kubelet had too few devices of a resource.
func (o Objects) tooFew(ctx context.Context, resource, message string) string {
	text := message
	if text == "" {
		text = "it had too few " + resource
	}
	text += ". Its count was newer than the scheduler's, or the pod was not placed by the scheduler (spec.nodeName, " +
		"a static pod): let the scheduler place it, and create it again"
	if !strings.Contains(resource, "/") {
		return text + ". This is not a GPU problem."
	}
	return text + "; a controller does that by itself." + o.nodeState(ctx)
}

// nodeState says which devices the node of a rejected pod does not offer now; empty if there are
// none.
func (o Objects) nodeState(ctx context.Context) string {
	d := o.ask(ctx, o.Pod.Spec.NodeName)
	if d.Status == nil {
		return ""
	}
	for resource := range o.wantedDevices() {
		if text := notAllocatable(*d.Status, resource); text != "" {
			return fmt.Sprintf(" Now, the daemon of node %s says: %s.", o.Pod.Spec.NodeName, text)
		}
	}
	return ""
}
