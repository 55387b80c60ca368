package cluster

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/why"
)

// Why returns what is known of a pod and of what it could get. What could not be read are sentences in missing, and the rest is there.
func (c *Client) Why(ctx context.Context, namespace, name string) (o why.Objects, missing []string, err error) {
	if o.Pod, err = c.core.Pods(namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
		return o, nil, c.whyNoPod(ctx, namespace, name, err)
	}
	// The scheduler allocates devices of all drivers together.
	f := c.read(ctx, nil, func(*resourceapi.ResourceSlice) bool { return true })
	o.Nodes, o.Pods, o.Claims, missing = f.Nodes, f.Pods, f.Claims, f.Missing
	for i := range f.Slices {
		o.Slices = append(o.Slices, &f.Slices[i])
	}
	if o.Events, err = c.events(ctx, namespace, name); err != nil {
		missing = append(missing, missingText("Events", err))
	}
	if o.Own, err = c.ownClaims(ctx, o.Pod); err != nil {
		missing = append(missing, missingText("the pod's ResourceClaims", err))
	}
	if len(o.Own) > 0 {
		classes, err := c.resource.DeviceClasses().List(ctx, metav1.ListOptions{})
		if err != nil {
			missing = append(missing, missingText("DeviceClasses", err))
		} else {
			for i := range classes.Items {
				o.Classes = append(o.Classes, &classes.Items[i])
			}
		}
	}
	o.Illness = c.illness(ctx, f, o.Pod)
	return o, missing, nil
}

// events returns the Events about a pod.
func (c *Client) events(ctx context.Context, namespace, name string) ([]eventsv1.Event, error) {
	client, err := eventsclient.NewForConfig(c.config)
	if err != nil {
		return nil, err
	}
	l, err := client.Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "regarding.name=" + name})
	if err != nil {
		return nil, err
	}
	return l.Items, nil
}

// whyNoPod adds to the error of a pod that is not there why its controller could not make it, such as a quota.
func (c *Client) whyNoPod(ctx context.Context, namespace, name string, notFound error) error {
	if !apierrors.IsNotFound(notFound) {
		return notFound
	}
	events, err := c.events(ctx, namespace, name)
	if err != nil {
		return notFound
	}
	for _, e := range events {
		if e.Reason == "FailedCreate" {
			return fmt.Errorf("there is no pod %s, because %s %s could not make one: %s", name, e.Regarding.Kind, name, e.Note)
		}
	}
	return fmt.Errorf("%w; give the name of a ReplicaSet or Job to see why it makes no pod, such as a quota", notFound)
}

// ownClaims returns the claims of a pod, by their names in its spec; nil for one that is not there.
func (c *Client) ownClaims(ctx context.Context, p *corev1.Pod) (map[string]*resourceapi.ResourceClaim, error) {
	own := map[string]*resourceapi.ResourceClaim{}
	for _, asked := range p.Spec.ResourceClaims {
		name := asked.ResourceClaimName
		for _, made := range p.Status.ResourceClaimStatuses {
			if made.Name == asked.Name && name == nil {
				name = made.ResourceClaimName
			}
		}
		if own[asked.Name] = nil; name == nil {
			continue
		}
		claim, err := c.resource.ResourceClaims(p.Namespace).Get(ctx, *name, metav1.GetOptions{})
		switch {
		case err == nil:
			own[asked.Name] = claim
		case !apierrors.IsNotFound(err):
			return nil, err
		}
	}
	return own, nil
}

// illness returns what the daemon of the pod's node says of devices that are not healthy, by UUID, if a device of the pod is such a one.
func (c *Client) illness(ctx context.Context, f view.Facts, p *corev1.Pod) map[string]string {
	ill := map[string]string{}
	pod := f.Daemons(c.IsDaemon)[p.Spec.NodeName]
	if pod == nil || !why.HasLost(p) {
		return ill
	}
	for _, a := range c.Statuses(ctx, []*corev1.Pod{pod}) {
		for _, d := range a.Status.GPUs {
			if d.State != "Healthy" {
				ill[d.UUID] = fmt.Sprintf("%s: %s; cure: %s", d.State, d.Reason, d.Cure)
			}
		}
	}
	return ill
}
