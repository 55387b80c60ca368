package keeper

import (
	"context"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// startupInterval is how often the daemon's status is read while the Node has the start-up taint.
const startupInterval = time.Second

// A StartupPart removes the start-up taint of the Node as soon as its GPUs are allocatable. It reads
// the daemon's status only while the Node has the taint.
type StartupPart struct {
	Daemon daemon.View

	on     bool
	listed map[string]int
	status status.Status // the zero value if it could not be read
}

// Inputs implements Part.
func (p *StartupPart) Inputs() []<-chan struct{} {
	_, configChanged := p.Daemon.Configs.Latest()
	return []<-chan struct{}{configChanged}
}

// Look implements Part.
func (p *StartupPart) Look(ctx context.Context, node kubeapi.Node) {
	if p.on = p.Daemon.Configs.Value().Features.StartupTaint; !p.on || !kubeapi.Startup.IsOn(node) {
		return
	}
	p.status, p.listed = status.Status{}, p.Daemon.Listed()
	if s, err := p.Daemon.Status(ctx); err == nil {
		p.status = s
	}
}

// Want implements Part.
func (p *StartupPart) Want(node kubeapi.Node, now time.Time) Decision {
	switch {
	case !p.on || !kubeapi.Startup.IsOn(node):
		return Decision{}
	case !isStarted(node, p.listed, p.status): // the taint stays; the status says why
		return Decision{At: now.Add(startupInterval)}
	}
	return Decision{
		Patch: kubeapi.TaintPatch{Taint: kubeapi.Startup, Now: now},
		Done: func(ctx context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			if err == nil {
				klog.FromContext(ctx).Info("Removed the start-up taint: the GPUs of the node are allocatable",
					"taint", kubeapi.Startup.String())
			}
			return false
		},
	}
}

// isStarted reports whether the GPUs of a node are allocatable: the daemon is ready, and the Node's
// status has all listed devices or the API server has slices of them. A node without devices has
// not started.
func isStarted(node kubeapi.Node, listed map[string]int, s status.Status) bool {
	if !s.Readiness.Ready {
		return false
	}
	total := 0
	for name, devices := range listed {
		total += devices
		if shown, err := strconv.Atoi(node.Allocatable[name]); devices > 0 && (err != nil || shown < devices) {
			return false
		}
	}
	return total > 0 || s.DRA != nil && s.DRA.Devices > 0
}
