package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/why"
)

// Why returns the known facts about a pod and the cluster. missing has sentences about
// unreadable objects.
func (c *Client) Why(ctx context.Context, namespace, name string) (o why.Objects, missing []string, err error) {
	if o.Pod, err = c.core.Pods(namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
		return o, nil, c.whyNoPod(ctx, namespace, name, err)
	}
	// The scheduler allocates devices of all drivers together.
	f := c.read(ctx, nil, func(*resourceapi.ResourceSlice) bool { return true })
	missing, o.Now = f.Missing, time.Now()
	for i := range f.Slices {
		o.Slices = append(o.Slices, &f.Slices[i])
	}
	if o.Events, err = c.events(ctx, namespace, name); err != nil {
		missing = append(missing, missingText("Events", err))
	}
	if o.Own, err = c.ownClaims(ctx, o.Pod); err != nil {
		missing = append(missing, missingText("the pod's ResourceClaims", err))
	}
	if view.MayAskForGPUs(o.Pod) {
		classes, err := c.resource.DeviceClasses().List(ctx, metav1.ListOptions{})
		if err != nil && !isNotServed(err) {
			missing = append(missing, missingText("DeviceClasses", err))
		} else if err == nil {
			for i := range classes.Items {
				o.Classes = append(o.Classes, &classes.Items[i])
			}
		}
	}
	daemons := f.Daemons(c.IsDaemon)
	// the pod may request units under another name
	for _, pod := range f.UnclearResources(daemons, view.Extended(o.Pod)) {
		f.Learn(c.Statuses(ctx, []*corev1.Pod{pod}))
	}
	o.Facts, o.Running = f, slices.Sorted(maps.Keys(daemons))
	if len(o.Running) == 0 {
		o.NoneRuns = strings.Join(f.AbsenceSentences(nil, daemons, true), " ")
	}
	asked := map[string]why.Daemon{}
	o.Ask = func(ctx context.Context, node string) why.Daemon {
		d, is := asked[node]
		if !is {
			d = c.daemonOf(ctx, f, daemons[node], node)
			asked[node] = d
		}
		return d
	}
	o.Doctor = func(ctx context.Context, node string) why.Doctor { return c.doctorOf(ctx, daemons[node]) }
	return o, missing, nil
}

// daemonOf returns the answer of a node's daemon; pod is nil if none runs.
func (c *Client) daemonOf(ctx context.Context, f view.Facts, pod *corev1.Pod, node string) why.Daemon {
	if pod == nil {
		if f.PodsUnknown {
			return why.Daemon{Problem: fmt.Sprintf("whether a daemon runs on node %s is not known, as pods could "+
				"not be listed", node)}
		}
		return why.Daemon{Problem: fmt.Sprintf("no daemon runs on node %s: %s", node,
			f.Absence(node, c.IsDaemon, time.Now()))}
	}
	a := c.Statuses(ctx, []*corev1.Pod{pod})[0]
	if a.Err != nil {
		return why.Daemon{Problem: fmt.Sprintf("the daemon of node %s, pod %s/%s, does not respond: %v",
			node, pod.Namespace, pod.Name, a.Err)}
	}
	return why.Daemon{Status: &a.Status}
}

// The codes of doctor's findings on how containers get GPUs.
const (
	doctorNoGPUs     = "containers-get-no-gpus"
	doctorNeedsClass = "pods-need-runtime-class"
)

// doctorOf returns doctor's findings on how containers get GPUs on the node of a daemon's pod;
// empty if doctor cannot be run.
func (c *Client) doctorOf(ctx context.Context, pod *corev1.Pod) (d why.Doctor) {
	ctx, cancel := context.WithTimeout(ctx, responseTimeout)
	defer cancel()
	out, problems := boundedWriter{full: cancel}, boundedWriter{full: cancel}
	// The exit status only says that the node has a problem. After the end of ctx, the command may
	// still write to the output.
	if _ = c.Run(ctx, pod, &out, &problems, "doctor", "-o", "json"); ctx.Err() != nil {
		return d
	}
	var report struct {
		Findings []struct{ Code, Message string }
	}
	if json.Unmarshal(out.text.Bytes(), &report) != nil {
		return d
	}
	for _, f := range report.Findings {
		switch {
		case f.Code == doctorNoGPUs && d.None == "":
			d.None = f.Message
		case f.Code == doctorNeedsClass:
			d.NeedsClass = f.Message
		}
	}
	return d
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

// whyNoPod adds to the error for a missing pod why its controller could not create the
// pod, for example because of a quota.
func (c *Client) whyNoPod(ctx context.Context, namespace, name string, notFound error) error {
	if !apierrors.IsNotFound(notFound) {
		return notFound
	}
	events, err := c.events(ctx, namespace, name)
	if err != nil {
		return notFound
	}
	for _, e := range view.Newest(events) {
		if e.Reason == "FailedCreate" {
			return fmt.Errorf("there is no pod %s, because %s %s could not make one: %s", name, e.Regarding.Kind, name,
				e.Note)
		}
	}
	return fmt.Errorf("%w; give the name of a ReplicaSet or Job to see why it makes no pod, such as a quota", notFound)
}

// ownClaims returns the claims of a pod, by their names in its spec; nil for a missing claim.
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
	if s := p.Status.ExtendedResourceClaimStatus; s != nil && p.Spec.NodeName != "" {
		claim, err := c.resource.ResourceClaims(p.Namespace).Get(ctx, s.ResourceClaimName, metav1.GetOptions{})
		switch {
		case err == nil:
			own[s.ResourceClaimName] = claim
		case !apierrors.IsNotFound(err):
			return nil, err
		}
	}
	return own, nil
}
