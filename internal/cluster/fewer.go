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

// A fewerTaint manages the taint of a Node that is about to have fewer devices. It lasts for one
// term of leadership.
type fewerTaint struct {
	daemon    daemon.View
	api       *kubeapi.Client
	alarm     *feed.Alarm
	state     nodeevents.Shrink
	leadSince time.Time // start of the term
	// this process requested the taint and did not remove it; the watch may not show it yet
	requested bool
	// failures counts the failed lists of pods in a row.
	failures int
}

// announceFewer taints the Node before it has fewer devices, until ctx ends. It then removes the
// taint, because there may be no next process.
func (c *Cluster) announceFewer(ctx context.Context, d daemon.View) {
	t := &fewerTaint{daemon: d, api: c.client, alarm: new(feed.Alarm), leadSince: time.Now()}
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, fewer := d.Fewer.Latest()
		_, offered := d.Offered.Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, fewer, offered, configured, t.alarm.Rings()}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "taint for fewer devices", wake, t.step)
	if t.requested || !t.state.Tainted.IsZero() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if err := t.setTaint(last, false); err != nil {
			klog.FromContext(ctx).Info("The node keeps the taint for fewer devices until this program runs again", "reason",
				err.Error())
		}
	}
}

func (t *fewerTaint) step(ctx context.Context) error {
	node, now := t.api.Nodes().Value(), time.Now()
	if node.UID == "" {
		return nil // the change continues after a timeout
	}
	t.state.Number, t.state.Leads = t.daemon.Fewer.Value(), time.Time{}
	if t.daemon.Configs.Value().Features.ChangeTaint {
		t.state.Leads = t.leadSince
	}
	switch tainted := kubeapi.FewerDevices.IsOn(node); {
	case !tainted:
		t.state.Tainted, t.state.Admitted = time.Time{}, false
	case t.state.Tainted.IsZero():
		t.state.Tainted = now
	}
	t.state.Shown = showsAtMost(node, t.daemon.Listed())
	next := t.state.Next(now)
	if next.GiveUp {
		t.state.GivenUp = t.state.Number
	}
	if next.Proceed {
		t.daemon.Proceed(t.state.Number)
	}
	if next.Taint != !t.state.Tainted.IsZero() {
		return t.setTaint(ctx, next.Taint)
	}
	if next.Look {
		next.At = t.checkPods(ctx, node, now, next.At)
	}
	if !next.At.IsZero() {
		t.alarm.After(ctx, next.At.Sub(now))
	}
	return nil
}

// checkPods checks whether the kubelet has admitted all pods, and returns when to decide again: now
// if it has, at if it has not, and possibly later if the pods cannot be listed. This failure is no
// error of the step: after an error the taint would stay during the backoff of RunWithRetry.
func (t *fewerTaint) checkPods(ctx context.Context, node kubeapi.Node, now, at time.Time) time.Time {
	waiting, err := t.api.PodsNotAdmitted(ctx, node.ResourceVersion)
	if err != nil {
		if t.failures++; t.failures == 1 {
			klog.FromContext(ctx).Info("Cannot list the pods that the kubelet has admitted; the change continues after a timeout",
				"reason", err.Error())
		}
		later := now.Add(kubeapi.Backoff(err, t.failures))
		if until := t.state.Tainted.Add(nodeevents.ShrinkTimeout); later.After(until) {
			later = until
		}
		if later.After(at) {
			return later
		}
		return at
	}
	t.failures = 0
	if t.state.Admitted = len(waiting) == 0; t.state.Admitted {
		return now
	}
	klog.FromContext(ctx).V(2).Info("Waiting until the kubelet has admitted pods", "pods", waiting)
	return at
}

// setTaint adds or removes the taint.
func (t *fewerTaint) setTaint(ctx context.Context, wanted bool) error {
	t.requested = t.requested || wanted
	err := t.api.SetTaint(ctx, kubeapi.FewerDevices, wanted, time.Now())
	t.requested = t.requested && (wanted || err != nil)
	switch {
	case err == nil:
		klog.FromContext(ctx).Info("Changed the taint for fewer devices",
			"taint", kubeapi.FewerDevices.String(), "tainted", wanted)
	case !wanted && kubeapi.IsInaccessible(err):
		name := t.api.Nodes().Value().Name
		err = fmt.Errorf("the taint %s stays, because the right to remove it is missing; "+
			"remove it with: kubectl taint node %s %s-: %w",
			kubeapi.FewerDevices, name, kubeapi.FewerDevices, err)
	}
	return err
}

// showsAtMost reports whether the Node's status has at most the listed number of devices of each
// resource.
func showsAtMost(node kubeapi.Node, listed map[string]int) bool {
	for name, devices := range listed {
		if shown, err := strconv.Atoi(node.Allocatable[name]); err == nil && shown > devices {
			return false
		}
	}
	return true
}
