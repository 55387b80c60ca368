package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A MIGProgress is the printed progress of the MIG layout.
type MIGProgress struct {
	// Layout is the name of the wanted layout, and From the source of the choice. Again is
	// the number of the last accepted order.
	Layout string `json:"layout,omitempty"`
	From   string `json:"from,omitempty"`
	Again  uint64 `json:"again,omitempty"`
	// State is pending, rebooting, success or failed; empty if no layout is named.
	State string `json:"state,omitempty"`
	// Reason explains any state but success.
	Reason string   `json:"reason,omitempty"`
	GPUs   []MIGGPU `json:"gpus"`
}

// A MIGGPU is the progress of one GPU.
type MIGGPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	Phase string `json:"phase"`
	// Reason is the awaited condition, or the failure.
	Reason string `json:"reason,omitempty"`
	// Holders are the users of the parts to change.
	Holders []string `json:"holders,omitempty"`
	// Retry is the time of the next attempt after a failure.
	Retry time.Time `json:"retry,omitzero"`
	// Before and After are the present and the wanted division of the GPU; nil if the GPU
	// was not read because no layout concerns it.
	Before *layout.PlannedPartitions `json:"before,omitempty"`
	After  *layout.PlannedPartitions `json:"after,omitempty"`
}

func (w *migWing) progress() (MIGProgress, error) {
	if err := w.off(); err != nil {
		return MIGProgress{}, err
	}
	l, controller := w.layout(), w.controller.Status().Value()
	s := MIGProgress{Layout: l.Layout, From: l.From, Again: controller.OrderNumber, State: l.State,
		Reason: l.Reason, GPUs: []MIGGPU{}}
	for _, g := range controller.GPUs {
		shown := MIGGPU{
			Index: g.Index, UUID: g.UUID, Model: g.Model, Phase: string(g.Phase), Reason: g.Reason,
			Retry: status.Moment(g.Retry),
		}
		if g.Change.GPU.UUID != "" {
			shown.Before, shown.After = new(layout.NewPlannedPartitions(g.Change.Before)),
				new(layout.NewPlannedPartitions(g.Change.After))
		}
		for _, h := range g.Holders {
			shown.Holders = append(shown.Holders, h.String())
		}
		s.GPUs = append(s.GPUs, shown)
	}
	return s, nil
}

// layout returns the progress of the wanted MIG layout; nil if layouts are not changed.
func (w *migWing) layout() *status.MIGLayout {
	if w.controller == nil {
		return nil
	}
	decision, controller := w.choice.Choices().Value(), w.controller.Status().Value()
	s := &status.MIGLayout{Layout: decision.Layout, From: string(decision.From), State: string(controller.State),
		Reason: controller.Reason}
	switch {
	case decision.Err != nil:
		s.State, s.Reason = string(mig.StateFailed), decision.Err.Error()
	case controller.Layout != decision.Layout || controller.OrderNumber != decision.Desired.OrderNumber:
		// the controller has not seen the choice yet
		s.State, s.Reason = string(mig.StatePending), ""
	}
	for _, g := range controller.GPUs {
		for _, h := range g.Holders {
			if !slices.Contains(s.Waiting, h.Device) {
				s.Waiting = append(s.Waiting, h.Device)
			}
		}
	}
	slices.Sort(s.Waiting)
	return s
}

// ApplyArguments are the arguments of CallMIGApply.
type ApplyArguments struct {
	Layout string   `json:"layout,omitempty"`
	GPUs   []string `json:"gpus,omitempty"`
	DryRun bool     `json:"dryRun,omitempty"`
	Forget bool     `json:"forget,omitempty"`
}

// An OrderedMIG is the answer to CallMIGApply.
type OrderedMIG struct {
	// Plan is the planned division of the GPUs; nil after an order to forget the earlier layout.
	Plan *layout.Planned `json:"plan,omitempty"`
	// Again is the number of the order; 0 if nothing was ordered.
	Again uint64 `json:"again,omitempty"`
}

// off returns why the daemon does not change layouts; nil if it does.
func (w *migWing) off() error {
	if enabled := w.watcher.Configs().Value().MIG.Enabled; w.choice == nil && enabled {
		return errors.New("this daemon does not change MIG layouts yet: mig.enabled was not set when it was " +
			"started; start it again")
	} else if !enabled {
		return choice.ErrOff
	}
	return nil
}

func (w *migWing) apply(ctx context.Context, a ApplyArguments) (any, error) {
	if err := w.off(); err != nil {
		return nil, err
	}
	var ordered OrderedMIG
	var gpus []string // by UUID: the order must not apply to another GPU that gets the index later
	if !a.Forget {
		p, err := w.plan(ctx, a)
		if err != nil {
			return nil, err
		}
		if ordered.Plan = &p; a.DryRun || !p.Possible {
			return ordered, nil
		}
		for _, g := range p.GPUs {
			if len(a.GPUs) > 0 {
				gpus = append(gpus, g.UUID)
			}
		}
	}
	if err := w.lead.Check(); err != nil {
		return nil, fmt.Errorf("%w: ask %s", err, cmp.Or(w.lead.Statuses().Value().Name, "that one"))
	}
	if err := ctx.Err(); err != nil { // the caller left while the GPUs were read
		return nil, err
	}
	decision, err := w.choice.Apply(ctx, a.Layout, gpus)
	if err != nil {
		return nil, err
	}
	ordered.Again = decision.Desired.OrderNumber
	return ordered, nil
}

// plan returns the result of a layout on the GPUs in the arguments.
func (w *migWing) plan(ctx context.Context, a ApplyArguments) (layout.Planned, error) {
	file, err := w.choice.Layouts()
	if err != nil {
		return layout.Planned{}, err
	}
	n := Partitioned{Architectures: map[string]string{}}
	n.Read(ctx, w.gpus.monitor.Snapshots().Value(), requestReader{w.gpus.monitor})
	l, err := layout.Find(a.Layout, file, n.GPUs)
	if err != nil {
		return layout.Planned{}, err
	}
	changes := layout.Plan(l, n.GPUs)
	changes.RefuseUnmatched(file)
	if len(a.GPUs) > 0 {
		if changes.GPUs, err = SelectGPUs(changes.GPUs, a.GPUs); err != nil {
			return layout.Planned{}, fmt.Errorf("--gpu: %w", err)
		}
	}
	return layout.NewPlanned(changes, n.Architectures, n.Warnings), nil
}

// A requestReader reads partitions by requests to the monitor.
type requestReader struct{ *monitor.Monitor }

func (a requestReader) Processes(ctx context.Context, uuid string) ([]inventory.Process, error) {
	found, err := a.Monitor.Processes(ctx, []string{uuid})
	return found[uuid], err
}

// A Partitioned is the division of a node's GPUs.
type Partitioned struct {
	GPUs          []layout.GPU
	Architectures map[string]string // by UUID
	Warnings      []string          // failures to read
}

// A partitionReader reads the division of a GPU and its compute processes, by UUID.
type partitionReader interface {
	Partitions(ctx context.Context, uuid string) (inventory.Partitions, error)
	Processes(ctx context.Context, uuid string) ([]inventory.Process, error)
}

// Read reads the division of the GPUs in a Snapshot.
func (n *Partitioned) Read(ctx context.Context, snapshot inventory.Snapshot, from partitionReader) {
	for _, l := range snapshot.LeftOut {
		n.Warnings = append(n.Warnings, fmt.Sprintf("GPU %d: %s", l.Index, l.Reason))
	}
	for _, found := range snapshot.GPUs {
		g := layout.GPU{Index: found.Index, UUID: found.UUID, Model: found.Model, InUse: map[int]bool{}}
		var err error
		if g.Partitions, err = from.Partitions(ctx, found.UUID); err != nil {
			g.Partitions = inventory.Partitions{Mode: found.MIG, Pending: found.MIG, Unread: err.Error()}
		}
		if g.Mode == inventory.MIGEnabled {
			processes, err := from.Processes(ctx, found.UUID)
			if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
				g.Unread = cmp.Or(g.Unread, err.Error())
			}
			for _, i := range g.Instances { // without the driver's answer, a process may be in any instance
				g.InUse[i.ID] = slices.ContainsFunc(processes,
					func(p inventory.Process) bool { return !p.GI.Known || p.GI.Value == i.ID })
			}
		}
		n.GPUs = append(n.GPUs, g)
		n.Architectures[g.UUID] = found.Architecture
	}
}

// SelectGPUs returns the GPUs with the given indexes or UUIDs.
func SelectGPUs(gpus []layout.GPUChange, names []string) ([]layout.GPUChange, error) {
	wanted := func(g layout.GPUChange, name string) bool {
		return g.GPU.UUID == name || strconv.Itoa(g.GPU.Index) == name
	}
	for _, name := range names {
		if !slices.ContainsFunc(gpus, func(g layout.GPUChange) bool { return wanted(g, name) }) {
			return nil, fmt.Errorf("no GPU has the index or UUID %q", name)
		}
	}
	return slices.DeleteFunc(gpus, func(g layout.GPUChange) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return wanted(g, name) })
	}), nil
}

// newController returns the controller of MIG layouts.
func (w *migWing) newController() *mig.Controller {
	o := mig.Options{
		Desired: w.choice.Desired(), Snapshots: w.gpus.monitor.Snapshots(), Driver: w.gpus.monitor, Evictor: w.cluster,
		StateDir: w.startup.StateDir,
		BootID:   BootID(w.gpus.node), TakeOver: w.choice.Reload, PreviousLeader: w.mayChangeHardware,
		Blocked: w.mayDivide,
		Clients: func(minor int) ([]inventory.DriverClient, error) {
			return nvidia.Clients(nodeRoot(w.gpus.node), minor)
		},
	}
	if w.kubelet.directory != nil {
		o.Holders = pluginHolders{w.kubelet.set, w.claims.owners, w.gpus.monitor.Snapshots()}
	}
	if w.claims.dra != nil {
		o.Refuse = w.dividedForClaims
	}
	if w.cluster != nil {
		o.Pauser, o.Admit = w.cluster, w.admitLayout
	}
	return mig.New(o)
}

// admitLayout returns why a change to a MIG layout must not begin, by the slots of the cluster.
func (w *migWing) admitLayout(layout string) error {
	if !w.watcher.Configs().Value().MIG.Budget {
		return nil
	}
	return w.cluster.RequestSlot("MIG layout " + layout)
}

// dividedForClaims returns why the MIG layout of a GPU must not be applied now; empty if it may.
func (w *migWing) dividedForClaims(uuid string) string {
	if w.watcher.Configs().Value().DRA.DynamicMIG && w.claims.dra.Owners.Value()[uuid] != dra.OwnedByPlugin {
		return "MIG devices of this GPU are created for claims: let the device plugin offer the GPU, or switch " +
			"dra.dynamicMIG off"
	}
	return ""
}
