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
	// maxQueue is how many Events wait for the API server.
	maxQueue = 64
	// maxEventPods is how many pods get the Event of one fact: a device that is shared may have
	// hundreds.
	maxEventPods = 16
	// podTries is how often an Event about a pod is tried: what its namespace does to requests may
	// look as if the API server was away.
	podTries = 10
	// podsPatience is how long kubelet, and the API server, may take to say which pods hold devices.
	podsPatience = 2 * time.Second
	// dropRefused is the cause of an Event that the API server will never take.
	dropRefused = "refused"
)

// A queue holds the Events that are to be written, the oldest first. The loop that finds Events
// puts them in, the loop that writes them takes them out.
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

// drop removes the oldest Event if it is still the one with this key and time.
func (q *queue) drop(e nodeevents.NodeEvent) {
	q.change(func() {
		if len(q.events) > 0 && same(q.events[0], e) {
			q.events = q.events[1:]
		}
	})
}

// same reports whether two values are one Event.
func same(a, b nodeevents.NodeEvent) bool { return a.Key() == b.Key() && a.At.Equal(b.At) }

// sendEvents writes the Events of the queue, one after the other.
func (r *reporter) sendEvents(ctx context.Context) {
	wake := func() []<-chan struct{} {
		_, queued := r.queue.changed.Latest()
		_, seen := r.nodes.Latest()
		return []<-chan struct{}{queued, seen}
	}
	var told nodeevents.NodeEvent // the last one that was written about the node
	var pods []kubeapi.Pod        // that it is still to be written about
	var tries int                 // of the first of them
	kubeapi.Keep(ctx, clock.RealClock{}, "events", wake, func(ctx context.Context) error {
		for {
			e, ok := r.queue.first()
			node := r.nodes.Value()
			if !ok || node.UID == "" || ctx.Err() != nil {
				return nil
			}
			if !same(e, told) {
				if err := r.write(ctx, node.UID, e, nil); err != nil {
					return err
				}
				told, pods, tries = e, nil, 0
				if len(e.Devices) > 0 && r.daemon.Configs.Value().Features.PodEvents {
					pods = r.holders(ctx, e.Devices)
				}
			}
			for ; len(pods) > 0; pods, tries = pods[1:], 0 {
				err := r.write(ctx, node.UID, e, &pods[0])
				if tries++; kubeapi.IsPassing(err) && tries < podTries {
					return err
				}
				// a pod that has ended, or a namespace where this is not allowed, keeps no other Event from
				// being written
				if err != nil {
					r.refuse(ctx, e, err)
				}
			}
			r.queue.drop(e)
		}
	})
}

// write writes an Event. One that the API server calls wrong is dropped, as it would be every time.
func (r *reporter) write(ctx context.Context, uid string, e nodeevents.NodeEvent, pod *kubeapi.Pod) error {
	row := e.Reason.Row()
	err := r.api.WriteEvent(ctx, uid, kubeapi.EventRecord{
		Pod: pod, Key: e.Key(), Reason: string(e.Reason), Action: row.Action, Type: row.Type, Note: e.Note, At: e.At, AtStart: e.AtStart,
	})
	if kubeapi.IsWrong(err) {
		r.refuse(ctx, e, err)
		return nil
	}
	return err
}

func (r *reporter) refuse(ctx context.Context, e nodeevents.NodeEvent, err error) {
	klog.FromContext(ctx).Info("An Event is not written", "event", string(e.Reason), "reason", err.Error())
	r.daemon.EventDropped(dropRefused)
}

// holders returns the pods that hold one of the devices, or a part of one of them.
func (r *reporter) holders(ctx context.Context, devices []string) []kubeapi.Pod {
	devices = withParts(r.statuses.Value(), devices)
	all := append(r.holdersByClaim(ctx, devices), r.holdersByResource(ctx, devices)...)
	return all[:min(len(all), maxEventPods)]
}

// holdersByClaim returns the pods that may use claims with one of the devices, as the API server
// has them.
func (r *reporter) holdersByClaim(ctx context.Context, devices []string) (found []kubeapi.Pod) {
	if r.daemon.ClaimsOf == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsPatience)
	defer cancel()
	for _, c := range r.daemon.ClaimsOf(devices) {
		claim, err := r.api.ResourceClaim(ctx, c.Namespace, c.Name)
		if err != nil || claim.UID != c.UID {
			klog.FromContext(ctx).V(2).Info("Cannot tell which pods use a claim", "claim", klog.KRef(c.Namespace, c.Name),
				"reason", fmt.Sprint(err))
			continue
		}
		found = append(found, claim.Pods...)
	}
	return found
}

// holdersByResource returns the pods that hold one of the devices by a resource.
func (r *reporter) holdersByResource(ctx context.Context, devices []string) []kubeapi.Pod {
	if r.daemon.Held == nil || r.daemon.Checkpoint == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, podsPatience)
	defer cancel()
	named, err := r.daemon.Held(ctx)
	recorded, other := r.daemon.Checkpoint()
	if err := errors.Join(err, other); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot tell which pods hold the device", "reason", err.Error())
		return nil
	}
	return pods(named, recorded.Held, devices)
}

// withParts returns the devices with the MIG devices on them.
func withParts(s status.Status, devices []string) []string {
	for _, d := range s.GPUs {
		if d.GPU != "" && slices.Contains(devices, d.GPU) {
			devices = append(devices[:len(devices):len(devices)], d.UUID)
		}
	}
	return devices
}

// pods returns the pods that hold one of the devices: PodResources has their names, and the
// checkpoint has their UIDs. A device for which the checkpoint also has a pod that has ended is
// left out, as it cannot be told which UID is whose.
func pods(named, recorded []kubelet.HeldDevice, devices []string) []kubeapi.Pod {
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
		of := uids[[2]string{h.Resource, h.ID}]
		if name == "" || len(of) != 1 || !slices.Contains(devices, uuid) {
			continue
		}
		if pod := (kubeapi.Pod{Namespace: namespace, Name: name, UID: of[0]}); !slices.Contains(found, pod) &&
			len(found) < maxEventPods {
			found = append(found, pod)
		}
	}
	return found
}
