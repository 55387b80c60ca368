package cluster

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
)

// A fewerTaint keeps the taint of a node that gets fewer devices. It is for one term under the
// lead.
type fewerTaint struct {
	daemon daemon.View
	api    *kubeapi.Client
	again  *feed.Alarm
	is     nodeevents.Fewer
	began  time.Time // of the term
	// this process has asked for the taint, and has not removed it: the node may have it before that
	// is seen
	asked bool
	// failures counts how often in a row the pods could not be listed.
	failures int
}

// announceFewer taints the node before it gets fewer devices, until ctx ends. At its end it removes
// the taint: there may be no next process.
func (c *Cluster) announceFewer(ctx context.Context, d daemon.View) {
	t := &fewerTaint{daemon: d, api: c.client, again: new(feed.Alarm), began: time.Now()}
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, fewer := d.Fewer.Latest()
		_, offered := d.Offered.Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, fewer, offered, configured, t.again.Rings()}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "taint for fewer devices", wake, t.step)
	if t.asked || !t.is.Tainted.IsZero() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRequests)
		defer cancel()
		if err := t.set(last, false); err != nil {
			klog.FromContext(ctx).Info("The node keeps the taint for fewer devices until this program runs again", "reason",
				err.Error())
		}
	}
}

func (t *fewerTaint) step(ctx context.Context) error {
	node, now := t.api.Nodes().Value(), time.Now()
	if node.UID == "" {
		return nil // the change goes on by itself after some time
	}
	t.is.Number, t.is.Leads = t.daemon.Fewer.Value(), time.Time{}
	if t.daemon.Configs.Value().Features.ChangeTaint {
		t.is.Leads = t.began
	}
	switch tainted := kubeapi.FewerDevices.IsOn(node); {
	case !tainted:
		t.is.Tainted, t.is.Admitted = time.Time{}, false
	case t.is.Tainted.IsZero():
		t.is.Tainted = now
	}
	t.is.Shown = shows(node, t.daemon.Listed())
	next := t.is.Next(now)
	if next.GiveUp {
		t.is.GivenUp = t.is.Number
	}
	if next.Proceed {
		t.daemon.Proceed(t.is.Number)
	}
	if next.Taint != !t.is.Tainted.IsZero() {
		return t.set(ctx, next.Taint)
	}
	if next.Look {
		next.At = t.look(ctx, node, now, next.At)
	}
	if !next.At.IsZero() {
		t.again.After(ctx, next.At.Sub(now))
	}
	return nil
}

// look looks at the pods of the node, and returns when to decide anew: at the time at, but now if
// all pods are admitted, and later if the pods cannot be listed. That is no error of the step:
// after an error the taint would stay for as long as Keep pauses.
func (t *fewerTaint) look(ctx context.Context, node kubeapi.Node, now, at time.Time) time.Time {
	waiting, err := t.api.NotAdmitted(ctx, node.ResourceVersion)
	if err != nil {
		if t.failures++; t.failures == 1 {
			klog.FromContext(ctx).Info("Cannot see which pods kubelet has admitted; the change goes on after some time",
				"reason", err.Error())
		}
		later := now.Add(kubeapi.Pause(err, t.failures))
		if until := t.is.Tainted.Add(nodeevents.FewerMost); later.After(until) {
			later = until
		}
		if later.After(at) {
			return later
		}
		return at
	}
	t.failures = 0
	if t.is.Admitted = len(waiting) == 0; t.is.Admitted {
		return now
	}
	klog.FromContext(ctx).V(2).Info("Pods that kubelet has not admitted yet", "pods", waiting)
	return at
}

// set adds the taint to the node, or removes it.
func (t *fewerTaint) set(ctx context.Context, wanted bool) error {
	t.asked = t.asked || wanted
	err := t.api.SetTaint(ctx, kubeapi.FewerDevices, wanted, time.Now())
	t.asked = t.asked && (wanted || err != nil)
	switch {
	case err == nil:
		klog.FromContext(ctx).Info("Changed the taint for fewer devices",
			"taint", kubeapi.FewerDevices.String(), "tainted", wanted)
	case !wanted && kubeapi.IsDenied(err):
		name := t.api.Nodes().Value().Name
		err = fmt.Errorf("the taint %s stays, as the right to remove it is missing; remove it with: kubectl taint node %s %s-: %w",
			kubeapi.FewerDevices, name, kubeapi.FewerDevices, err)
	}
	return err
}

// shows reports whether the Node's status has no more devices than are listed, by resource.
func shows(node kubeapi.Node, listed map[string]int) bool {
	for name, devices := range listed {
		if shown, err := strconv.Atoi(node.Allocatable[name]); err == nil && shown > devices {
			return false
		}
	}
	return true
}
