package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repairer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// newRepairs returns the owner of repairs.
func (w *maintenanceWing) newRepairs() *repairer.Repairs {
	return repairer.New(repairer.Options{
		Mode: func() (repair.Mode, <-chan struct{}) {
			c, changed := w.watcher.Configs().Latest()
			return c.Repair, changed
		},
		Snapshots: w.gpus.monitor.Snapshots(), Users: w.usersForRepair,
		CreatesMIG: func() bool { return w.mig.choice != nil && w.mig.choice.Desired().Value().Layout != "" },
		Rank:       func(ctx context.Context, pods []repair.Pod) error { return w.cluster.RankPods(ctx, pods) },
		Evict:      func(ctx context.Context, p mig.Pod) error { return w.cluster.Evict(ctx, p) },
		Admit:      w.admitRepair, Reset: w.resets.Reset,
		Resetting: func() bool { return w.resets.Status().Value().Withholds() }, StateDir: w.startup.StateDir,
		Write: func(path string, v any) error { return statefile.WriteStateIf(path, v, w.lead.Check) },
	})
}

// usersForRepair returns the users of a GPU, and other processes that have it open: because of them
// nvidia-smi would refuse the reset.
func (w *maintenanceWing) usersForRepair(ctx context.Context, g inventory.GPU) (u repair.Users) {
	names, release, err := w.reserveForReset(ctx, g)
	if release != nil {
		release()
	}
	switch u.Names = names; {
	case err != nil:
		u.Unknown = err.Error()
	case len(names) == 0:
		u.Names = w.gpus.clientsOf(g)
	default:
		u.Pods = w.podsOf(ctx, g)
	}
	return u
}

// podsOf returns the pods to evict from a GPU in the mode Evict; none if one of its users is not a
// pod with a known name.
func (w *maintenanceWing) podsOf(ctx context.Context, g inventory.GPU) (pods []repair.Pod) {
	if w.kubelet.directory == nil || w.watcher.Configs().Value().Repair != repair.Evict {
		return nil
	}
	devices := []string{g.UUID}
	for _, m := range g.MIGDevices {
		devices = append(devices, m.UUID)
	}
	held, err := w.kubelet.set.Holders(ctx, devices)
	if err != nil {
		return nil
	}
	for _, h := range held {
		var p repair.Pod
		if p.Namespace, p.Name, p.UID = h.SplitPod(); p.Name == "" {
			return nil
		}
		if !slices.Contains(pods, p) {
			pods = append(pods, p)
		}
	}
	if w.claims.dra == nil {
		return pods
	}
	prepared := claims.Of(w.claims.dra.Claims.Status().Value(), devices)
	if len(prepared) == 0 {
		return pods
	}
	all, err := w.kubelet.account.ContainerDevices(ctx)
	if err != nil {
		return nil
	}
	ofClaims := PodsOfClaims(claims.WithPodUIDs(all, w.claims.dra.Claims.Status().Value()), prepared)
	if ofClaims == nil {
		return nil
	}
	return append(pods, ofClaims...)
}

// PodsOfClaims returns the pods that have a device by one of the claims; none if a claim has no
// pod: its pod has ended, or is about to start, and the eviction of others would not free the GPU.
func PodsOfClaims(devices []kubelet.ContainerDevice, prepared []dra.Claim) (pods []repair.Pod) {
	for _, c := range prepared {
		found := false
		for _, d := range devices {
			if d.Claim.Namespace != c.Namespace || d.Claim.Name != c.Name {
				continue
			}
			found = true
			if p := (repair.Pod{Namespace: d.Namespace, Name: d.Pod, UID: d.PodUID}); !slices.Contains(pods, p) {
				pods = append(pods, p)
			}
		}
		if !found {
			return nil
		}
	}
	return pods
}

// clientsOf returns the visible processes that have a GPU open, in words for people.
func (w *gpuWing) clientsOf(g inventory.GPU) (open []string) {
	clients, _ := nvidia.Clients(nodeRoot(w.node), g.Minor) // hidden clients may exist in any case
	for _, c := range clients {
		open = append(open, fmt.Sprintf("process %d (%s)", c.PID, c.Name))
	}
	return open
}

// admitRepair returns why a repair must not begin now; nil if it may.
func (w *maintenanceWing) admitRepair(what string) error {
	if w.cluster == nil {
		return errors.New("a repair needs a slot of the cluster: run gpu-node-agent")
	}
	if err := w.mayReset(); err != nil {
		return err
	}
	return w.cluster.RequestRepair(what)
}

// repairStatus returns what the daemon does about GPUs whose remedy is a reset; nil if nothing.
func (w *maintenanceWing) repairStatus() *repair.Status {
	s := w.repairs.Status().Value()
	if s.Mode == repair.Off {
		return nil
	}
	return &s
}

// addManual changes the remedy of GPUs that resets did not repair to manual.
func addManual(devices []status.Device, r *repair.Status) {
	if r == nil {
		return
	}
	for _, step := range r.Steps {
		for i := range devices {
			if d := &devices[i]; step.State == repair.Manual && d.UUID == step.UUID {
				d.Remedy, d.Reason = string(inventory.RemedyHuman), d.Reason+"; "+step.Reason
				d.Faults = append(slices.Clip(d.Faults), status.Fault{Source: "repair", Remedy: d.Remedy, XID: d.XID})
			}
		}
	}
}
