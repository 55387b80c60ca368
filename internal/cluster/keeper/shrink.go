package keeper

import (
	"context"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
)

// A ShrinkPart taints the Node before it has fewer devices, and lets the change continue when the
// kubelet has admitted all pods of the Node.
type ShrinkPart struct {
	Daemon daemon.View
	Client *kubeapi.Client
	Leads  time.Time // start of the term

	number uint64 // of the change that waits; 0 for none
	on     bool
	listed map[string]int // devices in the kubelet's lists, by resource

	state    nodeevents.Shrink
	approved uint64 // number of the last change that continued
	// requested says that this process requested the taint and did not remove it; the taint may be on
	// the Node even if the response was an error.
	requested bool
	checkAt   time.Time // no check of the pods before this time
	failures  int       // failed lists of pods in a row
}

// Inputs implements Part.
func (p *ShrinkPart) Inputs() []<-chan struct{} {
	c, configChanged := p.Daemon.Configs.Latest()
	_, shrinkChanged := p.Daemon.PendingShrink.Latest()
	_, offeredChanged := p.Daemon.Offered.Latest()
	return inputsIf(c.Features.ChangeTaint || p.needsFinalWrite(), configChanged, shrinkChanged, offeredChanged)
}

// Look implements Part.
func (p *ShrinkPart) Look(context.Context, kubeapi.Node) {
	p.number, p.on, p.listed = p.Daemon.PendingShrink.Value(), p.Daemon.Configs.Value().Features.ChangeTaint,
		p.Daemon.Listed()
}

// Want implements Part.
func (p *ShrinkPart) Want(node kubeapi.Node, now time.Time) Decision {
	if node.UID == "" {
		return Decision{} // the change continues after a timeout
	}
	p.state.Number, p.state.Leads = p.number, time.Time{}
	if p.on {
		p.state.Leads = p.Leads
	}
	switch tainted := kubeapi.FewerDevices.IsOn(node); {
	case !tainted:
		p.state.Tainted, p.state.Admitted = time.Time{}, false
	case p.state.Tainted.IsZero():
		p.state.Tainted = now
	}
	p.state.Shown = showsAtMost(node, p.listed)
	next := p.state.Next(now)
	if next.GiveUp {
		p.state.GivenUp = p.state.Number
	}
	switch {
	case next.Proceed && p.approved != p.number:
		number := p.number
		return Decision{Act: func(context.Context) error {
			p.Daemon.ApproveShrink(number)
			return nil
		}, Done: func(context.Context, kubeapi.Node, error, time.Time) bool {
			p.approved = number
			return true
		}}
	case next.Taint != !p.state.Tainted.IsZero():
		return p.change(next.Taint, now)
	case next.Look && now.Before(p.checkAt):
		return Decision{At: p.checkAt}
	case next.Look:
		return p.checkPods(node, next.At)
	}
	return Decision{At: next.At}
}

// change adds or removes the taint.
func (p *ShrinkPart) change(wanted bool, now time.Time) Decision {
	return Decision{
		Patch: kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Wanted: wanted, Now: now},
		Done: func(ctx context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			if p.requested = wanted || p.requested && err != nil; err == nil {
				p.logChange(ctx, wanted)
			}
			return false
		},
	}
}

func (p *ShrinkPart) logChange(ctx context.Context, wanted bool) {
	klog.FromContext(ctx).Info("Changed the taint for fewer devices",
		"taint", kubeapi.FewerDevices.String(), "tainted", wanted)
}

// checkPods checks whether the kubelet has admitted all pods. The next check is at a time, or later
// if the pods cannot be listed.
func (p *ShrinkPart) checkPods(node kubeapi.Node, at time.Time) Decision {
	var waiting []string
	return Decision{Act: func(ctx context.Context) (err error) {
		waiting, err = p.Client.PodsNotAdmitted(ctx, node.ResourceVersion)
		return err
	}, Done: func(ctx context.Context, _ kubeapi.Node, err error, now time.Time) bool {
		if p.checkAt = at; err == nil {
			p.failures = 0
			if p.state.Admitted = len(waiting) == 0; !p.state.Admitted {
				klog.FromContext(ctx).V(2).Info("Waiting until the kubelet has admitted pods", "pods", waiting)
			}
			return true
		}
		if p.failures++; p.failures == 1 {
			klog.FromContext(ctx).Info(
				"Cannot list the pods that the kubelet has admitted; the change continues after a timeout",
				"reason", err.Error())
		}
		later := order.Earliest(
			now.Add(kubeapi.Backoff(err, p.failures)), p.state.Tainted.Add(nodeevents.ShrinkTimeout))
		if later.After(at) {
			p.checkAt = later
		}
		return true // after an error of the part, the taint would stay during its backoff
	}}
}

func (p *ShrinkPart) needsFinalWrite() bool { return p.requested || !p.state.Tainted.IsZero() }

func (p *ShrinkPart) finalPatch(node kubeapi.Node, now time.Time) kubeapi.NodePatch {
	if !kubeapi.FewerDevices.IsOn(node) {
		return nil
	}
	return kubeapi.TaintPatch{Taint: kubeapi.FewerDevices, Now: now}
}

func (p *ShrinkPart) recordFinalWrite(ctx context.Context, err error) {
	if err != nil {
		klog.FromContext(ctx).Info("The node keeps the taint for fewer devices until this program runs again", "reason",
			err.Error())
		return
	}
	p.logChange(ctx, false)
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
