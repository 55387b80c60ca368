package why

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// admissions are what kubelet's messages mean, by a part of each.
var admissions = []struct{ has, means string }{
	{"no healthy devices present", stale},
	{"requested number of devices unavailable", stale},
	{"previously allocated devices are no longer healthy",
		"the node or the kubelet was restarted, and the GPU of the pod is Unhealthy. Repair the GPU, or make the pod again"},
	{"cannot allocate unregistered device",
		"the node was restarted, and the kubelet admitted the pod before the daemon had registered. Make the pod again"},
	{"unknown device", "the kubelet chose from a list that had just changed. Make the pod again"},
	{"maximum request size for shared resources is 1", "the configuration gives one share to a container. Ask for one"},
	{"is not healthy", refusal},
	{"cannot be given out", refusal},
}

// again is the end of a sentence about a pod that must be created again.
const again = "ake the pod again"

// refusal is that of the daemon, whose reason is in the message.
const refusal = "the daemon refused the GPU. Make the pod again"

const stale = "the scheduler's count was older than the kubelet's: a GPU had become Unhealthy or had changed its form " +
	"a moment before, or the node was restarted, and the kubelet admitted the pod before the daemon had registered. Make the pod again"

// endings are what the other reasons of a pod that failed mean, by the reason.
var endings = map[string]string{
	"Evicted":          "the node was short of memory, disk or process IDs, or the pod was evicted. It is not about GPUs",
	"DeadlineExceeded": "it ran for longer than activeDeadlineSeconds. It is not about GPUs",
	"Preempting":       "the kubelet ended it for a critical pod. A controller makes it again",
	"Terminated":       "the node was shut down. A controller makes it again",
	"NodeShutdown":     "the node was shut down. A controller makes it again",
	"NodeLost":         "its node does not answer. A controller makes it again",
}

// failed explains a pod that has failed: the kubelet did not admit it or ended it, or its
// containers failed.
func (o Objects) failed(ctx context.Context) string {
	p := o.Pod
	message := strings.TrimSuffix(strings.TrimSpace(p.Status.Message), ".")
	if means := endings[p.Status.Reason]; means != "" {
		if message != "" {
			message = ": " + message
		}
		return fmt.Sprintf("It has failed (%s)%s: %s.", p.Status.Reason, message, means)
	}
	if p.Status.Reason != "" {
		return o.rejected(ctx, message)
	}
	t := view.FirstTrouble(p)
	if t == nil {
		return "It has failed, and its containers do not say why."
	}
	text := fmt.Sprintf("Container %s %s.", t.Container, t.Text("on node "+p.Spec.NodeName, o.Now))
	return text + o.next(ctx, t.Says(), t.Container)
}

// rejected explains a pod that the kubelet did not admit. The kubelet never looks at it again.
func (o Objects) rejected(ctx context.Context, message string) string {
	p := o.Pod
	begin := fmt.Sprintf("The kubelet of node %s did not admit it (%s): ", p.Spec.NodeName, p.Status.Reason)
	if p.Status.Reason == "TopologyAffinityError" {
		return begin + "no NUMA node has enough free GPUs for the policy of its Topology Manager. Ask for fewer GPUs, or change the policy."
	}
	if resource, out := strings.CutPrefix(p.Status.Reason, "OutOf"); out {
		return begin + o.outOf(ctx, resource, message)
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
			if strings.HasSuffix(a.means, again) {
				return begin + a.means + "; a controller does that by itself." + o.nowOf(ctx)
			}
			return begin + a.means + "."
		}
	}
	return begin + message + "."
}

// outOf explains that the kubelet had too few of a resource.
func (o Objects) outOf(ctx context.Context, resource, message string) string {
	text := message
	if text == "" {
		text = "it had too few " + resource
	}
	text += ". Its count was newer than the scheduler's, or the pod was not placed by the scheduler (spec.nodeName, a static pod): " +
		"let the scheduler place it, and make it again"
	if !strings.Contains(resource, "/") {
		return text + ". It is not about GPUs."
	}
	return text + "; a controller does that by itself." + o.nowOf(ctx)
}

// nowOf says what the node of a rejected pod cannot give out now, if anything.
func (o Objects) nowOf(ctx context.Context) string {
	d := o.ask(ctx, o.Pod.Spec.NodeName)
	if d.Status == nil {
		return ""
	}
	for resource := range o.wanted() {
		if text := withheld(*d.Status, resource); text != "" {
			return fmt.Sprintf(" Now, the daemon of node %s says: %s.", o.Pod.Spec.NodeName, text)
		}
	}
	return ""
}
