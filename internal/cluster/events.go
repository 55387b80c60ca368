package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	// maxQueue is the capacity of the queue of Events.
	maxQueue = 64
	// maxEventPods limits the pods that get the Event of one fact: a shared device may have hundreds.
	maxEventPods = 16
	// maxPodAttempts limits the attempts to write an Event about a pod: an admission webhook of the
	// pod's namespace may look like an unavailable API server.
	maxPodAttempts = 10
	// podsTimeout limits the requests to the kubelet and the API server for the pods that hold
	// devices.
	podsTimeout = 2 * time.Second
	// dropRefused is the cause of an Event dropped after a rejection by the API server.
	dropRefused = "refused"
)

// A queue holds the Events to write, oldest first. One loop finds Events and adds them, another
// writes and removes them.
type queue struct {
	changed *feed.Feed[struct{}]

	mu     sync.Mutex // guards events
	events []nodeevents.NodeEvent
}

func (q *queue) room() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return maxQueue - len(q.events)
}

func (q *queue) push(events []nodeevents.NodeEvent) {
	if len(events) > 0 {
		q.change(func() { q.events = append(q.events, events...) })
	}
}

func (q *queue) clear() {
	if q.room() < maxQueue {
		q.change(func() { q.events = nil })
	}
}

func (q *queue) change(change func()) {
	q.mu.Lock()
	change()
	q.mu.Unlock()
	q.changed.Publish(struct{}{})
}

// first returns the oldest Event.
func (q *queue) first() (nodeevents.NodeEvent, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.events) == 0 {
		return nodeevents.NodeEvent{}, false
	}
	return q.events[0], true
}

// drop removes the oldest Event if the key and the time are unchanged.
func (q *queue) drop(e nodeevents.NodeEvent) {
	q.change(func() {
		if len(q.events) > 0 && isSameEvent(q.events[0], e) {
			q.events = q.events[1:]
		}
	})
}

// isSameEvent reports whether two values are the same Event.
func isSameEvent(a, b nodeevents.NodeEvent) bool { return a.Key() == b.Key() && a.At.Equal(b.At) }

// sendEvents writes the Events of the queue one after the other.
func (r *reporter) sendEvents(ctx context.Context) {
	wake := func() []<-chan struct{} {
		_, queueChanged := r.queue.changed.Latest()
		_, nodeChanged := r.nodes.Latest()
		return []<-chan struct{}{queueChanged, nodeChanged}
	}
	var written nodeevents.NodeEvent // the last Event written about the node
	var pods []kubeapi.Pod           // pods about which it is still to be written
	var attempts int                 // for the first of these pods
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "events", wake, func(ctx context.Context) error {
		for {
			e, ok := r.queue.first()
			node := r.nodes.Value()
			if !ok || node.UID == "" || ctx.Err() != nil {
				return nil
			}
			if !isSameEvent(e, written) {
				if err := r.write(ctx, node.UID, e, nil); err != nil {
					return err
				}
				written, pods, attempts = e, nil, 0
				if len(e.Devices) > 0 && r.daemon.Configs.Value().Features.PodEvents {
					pods = r.podsOf(ctx, e.Devices)
				}
			}
			for ; len(pods) > 0; pods, attempts = pods[1:], 0 {
				err := r.write(ctx, node.UID, e, &pods[0])
				if attempts++; kubeapi.IsTemporary(err) && attempts < maxPodAttempts {
					return err
				}
				// a pod that has ended, or a missing right in a namespace, must not block other Events
				if err != nil {
					r.recordRefused(ctx, e, err)
				}
			}
			r.queue.drop(e)
		}
	})
}

// write writes an Event. An invalid Event is dropped, because a retry
// would fail too.
func (r *reporter) write(ctx context.Context, uid string, e nodeevents.NodeEvent, pod *kubeapi.Pod) error {
	row := e.Reason.Row()
	err := r.api.WriteEvent(ctx, uid, kubeapi.EventRecord{
		Pod: pod, Key: e.Key(), Reason: string(e.Reason), Action: row.Action, Type: row.Type, Note: e.Note, At: e.At,
		AtStart: e.AtStart,
	})
	if kubeapi.IsInvalid(err) {
		r.recordRefused(ctx, e, err)
		return nil
	}
	return err
}

func (r *reporter) recordRefused(ctx context.Context, e nodeevents.NodeEvent, err error) {
	klog.FromContext(ctx).Info("Cannot write an Event; it is dropped", "event", string(e.Reason), "reason", err.Error())
	r.daemon.EventDropped(dropRefused)
}

// podsOf returns the pods with a device or a part of a device.
func (r *reporter) podsOf(ctx context.Context, devices []string) []kubeapi.Pod {
	devices = withParts(r.statuses.Value(), devices)
	all := append(r.podsByClaim(ctx, devices), r.podsByResource(ctx, devices)...)
	return all[:min(len(all), maxEventPods)]
}

// podsByClaim returns the pods with claims for a device, according to the API server.
func (r *reporter) podsByClaim(ctx context.Context, devices []string) (found []kubeapi.Pod) {
	if r.daemon.ClaimsOf == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsTimeout)
	defer cancel()
	for _, c := range r.daemon.ClaimsOf(devices) {
		claim, err := r.api.ResourceClaim(ctx, c.Namespace, c.Name)
		if err != nil || claim.UID != c.UID {
			klog.FromContext(ctx).V(2).Info("Cannot tell which pods use a claim", "claim", klog.KRef(c.Namespace,
				c.Name),
				"reason", fmt.Sprint(err))
			continue
		}
		found = append(found, claim.Pods...)
	}
	return found
}

// podsByResource returns the pods with a device by an extended resource.
func (r *reporter) podsByResource(ctx context.Context, devices []string) []kubeapi.Pod {
	if r.daemon.Held == nil || r.daemon.Checkpoint == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsTimeout)
	defer cancel()
	named, err := r.daemon.Held(ctx)
	recorded, other := r.daemon.Checkpoint()
	if err := errors.Join(err, other); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot tell which pods hold the device", "reason", err.Error())
		return nil
	}
	return matchPods(named, recorded.Held, devices)
}

// withParts returns the devices and the MIG devices on them.
func withParts(s status.Status, devices []string) []string {
	for _, d := range s.GPUs {
		if d.GPU != "" && slices.Contains(devices, d.GPU) {
			devices = append(devices[:len(devices):len(devices)], d.UUID)
		}
	}
	return devices
}

// matchPods returns the pods with a device: PodResources has the names, and the checkpoint the UIDs.
// matchPods omits a device for which the checkpoint also has a pod that has ended,
// because the UIDs are then ambiguous.
func matchPods(named, recorded []kubelet.HeldDevice, devices []string) []kubeapi.Pod {
	uids := map[[2]string][]string{} // by resource and ID
	for _, h := range recorded {
		key := [2]string{h.Resource, h.ID}
		if _, name, uid := h.SplitPod(); name == "" && !slices.Contains(uids[key], uid) {
			uids[key] = append(uids[key], uid)
		}
	}
	var found []kubeapi.Pod
	for _, h := range named {
		uuid, _ := resource.SplitID(h.ID)
		namespace, name, _ := h.SplitPod()
		matches := uids[[2]string{h.Resource, h.ID}]
		if name == "" || len(matches) != 1 || !slices.Contains(devices, uuid) {
			continue
		}
		if pod := (kubeapi.Pod{Namespace: namespace, Name: name, UID: matches[0]}); !slices.Contains(found, pod) &&
			len(found) < maxEventPods {
			found = append(found, pod)
		}
	}
	return found
}
