package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// newRepairs returns the owner of repairs.
func (d *daemon) newRepairs() *repair.Repairs {
	return repair.New(repair.Options{
		Mode: func() (policy.Mode, <-chan struct{}) {
			c, changed := d.watcher.Configs().Latest()
			return c.Repair, changed
		},
		Snapshots: d.monitor.Snapshots(), Users: d.usersForRepair,
		CreatesMIG: func() bool { return d.migChoice != nil && d.migChoice.Desired().Value().Layout != "" },
		Rank:       func(ctx context.Context, pods []policy.Pod) error { return d.cluster.RankPods(ctx, pods) },
		Evict: func(ctx context.Context, p policy.Pod) error {
			return d.cluster.Evict(ctx, mig.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID})
		},
		Admit: d.admitRepair, Reset: d.resets.Reset,
		Resetting: func() bool { return d.resets.Status().Value().Withholds() }, StateDir: d.startup.StateDir,
		Write: func(path string, v any) error { return statefile.WriteStateIf(path, v, d.lead.Check) },
	})
}

// usersForRepair returns the users of a GPU, and other processes that have it open: because of them
// nvidia-smi would refuse the reset.
func (d *daemon) usersForRepair(ctx context.Context, g inventory.GPU) (u policy.Users) {
	names, release, err := d.reserveForReset(ctx, g)
	if release != nil {
		release()
	}
	switch u.Names = names; {
	case err != nil:
		u.Unknown = err.Error()
	case len(names) == 0:
		u.Names = d.clientsOf(g)
	default:
		u.Pods = d.podsOf(ctx, g)
	}
	return u
}

// podsOf returns the pods that have a GPU, or one of its MIG devices, by the device plugin; none if
// one of them cannot be evicted, because its name is not known.
func (d *daemon) podsOf(ctx context.Context, g inventory.GPU) (pods []policy.Pod) {
	if d.directory == nil || d.watcher.Configs().Value().Repair != policy.Evict {
		return nil
	}
	devices := []string{g.UUID}
	for _, m := range g.MIGDevices {
		devices = append(devices, m.UUID)
	}
	held, err := d.set.Holders(ctx, devices)
	if err != nil {
		return nil
	}
	for _, h := range held {
		var p policy.Pod
		if p.Namespace, p.Name, p.UID = h.SplitPod(); p.Name == "" {
			return nil
		}
		if !slices.Contains(pods, p) {
			pods = append(pods, p)
		}
	}
	return pods
}

// clientsOf returns the visible processes that have a GPU open, in words for people.
func (d *daemon) clientsOf(g inventory.GPU) (open []string) {
	clients, _ := nvidia.Clients(nodeRoot(d.node), g.Minor) // hidden clients may exist in any case
	for _, c := range clients {
		open = append(open, fmt.Sprintf("process %d (%s)", c.PID, c.Name))
	}
	return open
}

// admitRepair returns why a repair must not begin now; nil if it may.
func (d *daemon) admitRepair(what string) error {
	if d.cluster == nil {
		return errors.New("a repair needs a slot of the cluster: run gpu-node-agent")
	}
	if err := d.mayReset(); err != nil {
		return err
	}
	return d.cluster.MayRepair(what)
}

// repairStatus returns what the daemon does about GPUs whose remedy is a reset; nil if nothing.
func (d *daemon) repairStatus() *policy.Status {
	s := d.repairs.Status().Value()
	if s.Mode == policy.Off {
		return nil
	}
	return &s
}

// addManual changes the remedy of GPUs that resets did not repair: an operator must.
func addManual(devices []status.Device, r *policy.Status) {
	if r == nil {
		return
	}
	for _, step := range r.Steps {
		for i := range devices {
			if d := &devices[i]; step.State == policy.Manual && d.UUID == step.UUID {
				d.Remedy, d.Reason = string(inventory.RemedyHuman), d.Reason+"; "+step.Reason
				d.Faults = append(slices.Clip(d.Faults), status.Fault{Source: "repair", Remedy: d.Remedy, XID: d.XID})
			}
		}
	}
}
