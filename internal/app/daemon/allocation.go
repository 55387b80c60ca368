package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// newDRA returns the parts for Dynamic Resource Allocation. They are nil without a state
// directory: no GPU is then offered to claims.
func (w *claimsWing) newDRA(
	ctx context.Context, inspect func(context.Context, []resource.Device) error, counters *telemetry.Counters,
) *DRA {
	c := w.startup
	if c.StateDir == "" {
		return nil
	}
	w.nameDriver(ctx, &c)
	a := &DRA{
		Owners: w.owners, Offered: feed.New(dra.Owners(nil)), Driver: feed.New(status.DRADriver{}),
	}
	devices := pool.Options{
		StateDir: c.StateDir, Driver: c.DRADriver, Node: c.NodeName,
		Snapshots: w.gpus.monitor.Snapshots(), Configs: w.watcher.Configs(), Owners: a.Owners,
		Divisions: feed.New(dra.Divisions(nil)), Lead: w.lead.Check, Driverless: w.driverless,
	}
	a.Devices = pool.New(devices)
	o := claims.Options{
		DriverName: c.DRADriver,
		Inputs: claims.Inputs{Pools: a.Devices.Pools(), Snapshots: w.gpus.monitor.Snapshots(),
			Configs: w.watcher.Configs()},
		Hardware: claims.Hardware{Divisions: devices.Divisions, Driver: w.gpus.monitor, Inspect: inspect,
			Alone: w.mayChangeHardware},
		Files:    claims.Files{StateDir: c.StateDir, CDIDir: c.CDIDir, BootID: BootID(w.gpus.node)},
		Metrics:  counters,
		Patience: callPatience,
		Lead:     w.lead.Check,
	}
	timeSlices := nvidia.NewTimeSlices(c.Driver.ContainerRoot, c.Driver.SearchPath...)
	o.SetTimeSlice = func(ctx context.Context, gpu string, interval int) error {
		if w.gpus.node != nil {
			return nil // simulated GPUs have no processes that take turns
		}
		return timeSlices.Set(ctx, gpu, interval)
	}
	if w.watcher.Configs().Value().Edits.MPSRoot != "" {
		o.MPS = mps.NewClaimDaemons(c.MPSRoot)
	}
	if c.KubeletRoot != "" {
		o.Checkpoint = filepath.Join(c.KubeletRoot, "plugins", dra.Driver, "checkpoint.json")
	}
	h := owner.Options{
		Devices: a.Devices, Offered: a.Offered, OtherProcess: w.beside, Driverless: w.driverless,
	}
	kept := &keptClaims{driver: a.Devices.Driver(), gpu: a.Devices.GPU, roots: kubeletRoots(c)}
	h.Prepared = kept.ofGPUs
	if w.kubelet.directory != nil {
		o.PodRuns = func(uid string) bool { return kubelet.PodRuns(kubelet.PodCgroups, uid) }
		account := w.kubelet.account
		o.HeldDevices, o.Owners, o.PodClaims, h.Holders = account.Held, a.Owners, account.Claims, w.kubelet.set
		kept.pods = account.ContainerDevices
		o.KubeletClaims = func(ctx context.Context) (map[string]bool, error) {
			if beside, _ := w.beside(); beside || !w.driverless() {
				return nil, errors.New("claims can be prepared on this node")
			}
			return kept.uids(ctx)
		}
	}
	if w.cluster != nil && c.NodeName != "" {
		o.LookUp, h.List = w.cluster.Claim, func(ctx context.Context, gpus []string) (map[string][]string, error) {
			return w.cluster.ClaimsOf(ctx, c.NodeName, gpus, a.Devices.GPU)
		}
	}
	a.Claims = claims.New(o)
	h.Records, kept.records = a.Claims.InUse(), a.Claims.InUse()
	a.Arbiter = owner.New(h)
	return a
}

// nameTimeout limits the wait at the start for the files with the driver name of existing claims.
const nameTimeout = 2 * time.Second

// nameDriver keeps the driver's name as long as claims have devices under it, or may get some.
func (w *claimsWing) nameDriver(ctx context.Context, c *config.Startup) {
	type choice struct{ name, kept string }
	now, err := statefile.Within(ctx, statefile.NewDisk(), nameTimeout, func() (choice, error) {
		name, kept, err := pool.DriverName(c.StateDir, c.CDIDir, c.DRADriver)
		return choice{name, kept}, err
	})
	// This process finds an earlier leader's slices before publishing any.
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the driver name of existing claims")
		return
	}
	if c.DRADriver, w.driverNameKept = now.name, now.kept; w.driverNameKept != "" {
		klog.FromContext(ctx).Info("The driver of Dynamic Resource Allocation keeps its name",
			"reason", w.driverNameKept)
	}
}

// callPatience is how long a call of the kubelet for a claim waits for temporary
// conditions. The kubelet waits for 45 s.
const callPatience = 30 * time.Second

// giveAll makes the device plugin the owner of all GPUs, because this process has no part
// in Dynamic Resource Allocation. The exceptions are GPUs with an owner received from the
// leader: they may be in slices.
func (w *claimsWing) giveAll(ctx context.Context) error {
	for {
		snapshot, snapshotChanged := w.gpus.monitor.Snapshots().Latest()
		before, owners := w.owners.Value(), dra.Owners{}
		for _, g := range snapshot.GPUs {
			owners[g.UUID] = cmp.Or(before[g.UUID], dra.OwnedByPlugin)
		}
		if w.owners.Publish(owners); !feed.WaitAny(ctx, snapshotChanged) {
			return nil
		}
	}
}

// beside reports whether another process of this program may serve the kubelet with older
// owners of the GPUs. The channel is closed when the answer may have changed.
func (w *leadership) beside() (bool, <-chan struct{}) {
	s, changed := w.lead.Statuses().Latest()
	return s.Standbys > 0 || s.PreviousLeader != "", changed
}

// mayChangeHardware returns why hardware must not change now; nil if it may.
func (w *leadership) mayChangeHardware() error {
	if previous := w.lead.Statuses().Value().PreviousLeader; previous != "" {
		return fmt.Errorf("no GPU is changed until %s has ended: it led on this node before and may still change GPUs",
			previous)
	}
	return nil
}

// mayGive returns why the device plugin must not allocate devices to a pod: they are in a
// slice, their GPU is being reset, they have no successful CUDA check, or their driver is not
// accepted or is being changed. The kubelet may allocate devices for a moment after they left the
// list. No disk is read.
func (w *maintenanceWing) mayGive(devices []resource.Device) error {
	owners := w.claims.owners.Value()
	for _, device := range devices {
		if owners[device.GPU].InSlice() {
			return fmt.Errorf("GPU %s may be in a ResourceSlice and go to another pod", device.GPU)
		}
	}
	return w.unready(devices)
}

// pluginHolders knows the holders of the device plugin's GPUs. It refuses GPUs with another owner.
type pluginHolders struct {
	*serve.Servers
	owners    *feed.Feed[dra.Owners]
	snapshots *feed.Feed[inventory.Snapshot]
}

// Holders returns the pods that hold devices, like Servers.
func (u pluginHolders) Holders(ctx context.Context, uuids []string) ([]kubelet.HeldDevice, error) {
	if err := u.owners.Value().MayDivide(u.snapshots.Value().GPUs, uuids); err != nil {
		return nil, err
	}
	return u.Servers.Holders(ctx, uuids)
}

// allocation returns the status of Dynamic Resource Allocation; nil if DRA is not used.
func (w *claimsWing) allocation() *status.DRA {
	if w.dra == nil {
		return nil
	}
	owners, waits, published := w.dra.Owners.Value(), w.dra.Arbiter.Waits().Value(), w.dra.Devices.Publication().Value()
	s := &status.DRA{
		Mode: w.watcher.Configs().Value().DRA.Mode.String(), DriverName: w.dra.Devices.Driver(),
		DriverNameKept: w.driverNameKept,
		Driver:         w.dra.Driver.Value(), Slices: published.Slices,
		Devices: published.Devices, Generation: published.Generation, Problem: published.Problem,
		API: published.API, NoTaints: published.NoTaints, NoCounters: published.NoCounters,
		NoShares: published.NoShares,
	}
	if s.DriverName == dra.Driver {
		s.DriverName = ""
	}
	used := s.Mode != config.DRAOff.String() || s.Driver != status.DRADriver{}
	unpublished := w.dra.Devices.Pools().Value().Unpublished(dra.Dropped{
		Taints: s.NoTaints, Counters: s.NoCounters, Shares: s.NoShares,
	})
	for _, g := range w.gpus.monitor.Snapshots().Value().GPUs {
		used = used || owners[g.UUID] != dra.OwnedByPlugin
		shown := status.DRAGPU{
			Index: g.Index, UUID: g.UUID, Owner: string(owners[g.UUID]), Waiting: waits[g.UUID],
		}
		if owners[g.UUID] == dra.OwnedByDRA {
			shown.Unpublished = unpublished[g.UUID]
		}
		s.GPUs = append(s.GPUs, shown)
	}
	for _, c := range w.dra.Claims.Status().Value() {
		shown := status.DRAClaim{
			UID: c.UID, Namespace: c.Namespace, Name: c.Name, Since: status.Moment(c.Since), Released: c.Released,
			Destroyed: c.Destroyed,
		}
		for _, device := range c.Devices {
			shown.Devices = append(shown.Devices, device.Name)
			if device.Share > 0 {
				shown.Shares = append(shown.Shares, status.DRAShare{Device: device.Name, MemoryBytes: device.Share,
					Limited: device.Limited})
			}
			if device.Problem != "" {
				shown.Problem = device.Name + ": " + device.Problem
			}
		}
		s.Claims = append(s.Claims, shown)
	}
	if !used && len(s.Claims) == 0 {
		return nil
	}
	return s
}
