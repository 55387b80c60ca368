package claims

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// lockPatience limits the wait of the loop for a call that has the lock of a claim.
const lockPatience = time.Second

// mayChange returns why hardware must not be changed now; nil if it may.
func (c *Claims) mayChange() error {
	if err := c.store.lead(); err != nil {
		return err
	}
	if err := c.options.Alone(); err != nil {
		return causedError{CauseNotReady, err}
	}
	return nil
}

// refreshInterval is how often records and specs are compared with the files.
const refreshInterval = 10 * time.Second

// Run keeps records and CDI specs up to date until ctx ends, and lets calls of the kubelet
// proceed. At the end it waits for the calls in progress and returns nil. The error wraps
// dra.ErrOtherName if all claims were prepared under another driver name.
func (c *Claims) Run(ctx context.Context) error {
	timer := time.NewTimer(refreshInterval)
	defer timer.Stop()
	for err := c.load(ctx); err != nil; err = c.load(ctx) {
		if errors.Is(err, dra.ErrOtherName) {
			return err
		}
		klog.FromContext(ctx).Error(err, "Cannot read the records of claims")
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			timer.Reset(refreshInterval)
		}
	}
	c.adopt(ctx)
	c.publish()
	leaks := leaks{since: map[string]time.Time{}}
	adopted := false
	var tasks sync.WaitGroup
	defer tasks.Wait()
	following, end := context.WithCancel(context.WithoutCancel(ctx)) // calls in progress need follow
	defer end()
	defer c.setOpen(false)
	first := make(chan struct{})
	tasks.Go(func() { c.follow(following, sync.OnceFunc(func() { close(first) })) })
	select {
	case <-first:
	case <-ctx.Done():
		return nil
	}
	for {
		_, editsChanged := c.editsChanged.Latest()
		_, configChanged := c.options.Configs.Latest()
		adopted = c.offersGPUs() && (adopted || c.adopt(ctx))
		c.refresh(ctx)
		c.setOpen(true)
		c.checkDaemons()
		select {
		case <-ctx.Done():
			return nil
		case <-editsChanged:
		case <-configChanged:
		case <-timer.C:
			timer.Reset(refreshInterval)
			c.findLeaks(ctx, &leaks)
			c.resetSlices(ctx, c.slicedGPUs())
			c.sweepMPS(ctx)
			c.retryReleases(ctx)
			c.dropUnprepareMarks()
			if err := errors.Join(statefile.Sweep(c.store.folder()), statefile.Sweep(c.options.CDIDir)); err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot remove old files of claims", "reason", err.Error())
			}
		}
	}
}

// follow keeps the container edits up to date until ctx ends, and calls looked after each
// update. It takes no lock of a claim or a GPU, because a call with such a lock may wait
// for follow.
func (c *Claims) follow(ctx context.Context, looked func()) {
	writer := cdi.NewWriter(c.options.CDIDir, c.options.Root)
	timer := time.NewTimer(refreshInterval)
	defer timer.Stop()
	var problem error
	for {
		snapshot, snapshotChanged := c.options.Snapshots.Latest()
		configured, changed := c.options.Configs.Latest()
		pool, poolChanged := c.options.Pools.Latest()
		if snapshot.Generation > 0 && (c.offersGPUs() || hasDevices(pool) || len(c.inUse.Value()) > 0) {
			devices, err := writer.DeviceEdits(snapshot, configured.Edits, configured.CDI)
			c.edits.Store(&containerEdits{devices, snapshot.Generation})
			if err != nil && textOf(err) != textOf(problem) {
				klog.FromContext(ctx).Error(err, "Cannot create all CDI specs of claims")
			}
			problem, poolChanged = err, nil
		}
		c.noteUVM(snapshot)
		c.editsChanged.Publish(struct{}{})
		looked()
		select {
		case <-ctx.Done():
			return
		case <-snapshotChanged:
		case <-changed:
		case <-poolChanged: // only whether there are devices matters: their details are not in specs
		case <-timer.C:
			timer.Reset(refreshInterval)
		}
	}
}

// noteUVM notes since when nvidia-uvm is missing, by a Snapshot.
func (c *Claims) noteUVM(snapshot inventory.Snapshot) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !snapshot.LacksUVM(true):
		c.noUVM = time.Time{}
	case c.noUVM.IsZero():
		c.noUVM = time.Now()
	}
}

// uvmAwaited reports whether nvidia-uvm is missing, but not yet for as long as claims wait
// for it.
func (c *Claims) uvmAwaited(snapshot inventory.Snapshot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return snapshot.LacksUVM(true) && (c.noUVM.IsZero() || time.Since(c.noUVM) < inventory.UVMPatience)
}

// offersGPUs reports whether the configuration offers GPUs to claims.
func (c *Claims) offersGPUs() bool { return c.options.Configs.Value().DRA.Mode != config.DRAOff }

// hasDevices reports whether a pool has devices.
func hasDevices(p dra.Pool) bool {
	return slices.ContainsFunc(p.Slices, func(s dra.Slice) bool { return len(s.Devices) > 0 })
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// load reads the records. An unreadable record is set aside, and a lost record is restored
// from the claim's spec.
func (c *Claims) load(ctx context.Context) error {
	uids, err := c.store.uids()
	if err != nil {
		return err
	}
	records := map[string]record{}
	for _, uid := range uids {
		r, found, copied := c.store.readOrCopied(ctx, uid)
		if !found {
			continue
		}
		if records[uid] = r; copied {
			klog.FromContext(ctx).Info("Restoring the record of a claim from its CDI spec", "claim",
				klog.KRef(r.Namespace, r.Name), "uid", uid,
				"problem", errorOrNone(c.store.write(r)))
		}
	}
	if err := checkDriverName(records, c.options.DriverName); err != nil {
		return err
	}
	prepared := map[string]bool{}
	for uid, r := range records {
		if _, err := os.Stat(c.store.specsOf(r).File(uid)); err == nil { // the last file that Prepare writes
			prepared[uid] = false
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = records
	c.specWritten = prepared
	clear(c.releaseProblem)
	c.mpsProblem = nil // another process may have led meanwhile
	return nil
}

// refresh publishes the records, rewrites outdated files of records and specs, and accepts
// records of other writers.
func (c *Claims) refresh(ctx context.Context) {
	c.publish()
	uids, err := c.store.uids()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot compare the records of claims with their files")
	}
	for uid := range c.all() {
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	for _, uid := range slices.Compact(uids) {
		if err := c.refreshClaim(ctx, uid); err != nil && ctx.Err() == nil {
			c.setSpecWritten(record{UID: uid}, false)
			klog.FromContext(ctx).V(2).Info("Cannot write the record or the CDI spec of a claim", "uid", uid, "reason",
				err.Error())
		}
	}
}

// refreshClaim refreshes one claim. The claim may have been unprepared since the list was
// made.
func (c *Claims) refreshClaim(ctx context.Context, uid string) error {
	locks := c.locks.beginBriefly() // a call that holds the lock for longer writes the files itself
	defer locks.end()
	if err := locks.claim(ctx, uid); err != nil {
		return err
	}
	r, known := c.all()[uid]
	switch {
	case !known:
		var found bool
		if r, found, _ = c.store.readOrCopied(ctx, uid); !found {
			// A process was killed during Unprepare.
			return c.removeMetadata(record{UID: uid, Driver: recordDriver(c.options.DriverName)})
		}
		klog.FromContext(ctx).Info("Accepted the record of a claim that another process wrote", "claim",
			klog.KRef(r.Namespace, r.Name),
			"uid", uid)
		c.setRecord(r)
	case !c.store.isCurrent(r):
		if err := c.store.write(r); err != nil {
			return err
		}
	}
	if r.beforeRestart(c.options.BootID) || r.Released || r.incomplete() {
		return nil
	}
	return c.writeSpec(r)
}

// setRecord puts a record into effect that is on disk.
func (c *Claims) setRecord(r record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = maps.Clone(c.records)
	c.records[r.UID] = r
	delete(c.specWritten, r.UID)
	if !r.Released {
		delete(c.releaseProblem, r.UID)
	}
	c.publishLocked()
	c.recordsChanged.Publish(struct{}{})
}

// deleteRecord deletes a record from memory that was removed from disk.
func (c *Claims) deleteRecord(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = maps.Clone(c.records)
	delete(c.records, uid)
	delete(c.specWritten, uid)
	delete(c.releaseProblem, uid)
	c.publishLocked()
	c.recordsChanged.Publish(struct{}{})
}

// publish publishes the records.
func (c *Claims) publish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.publishLocked()
}

func (c *Claims) publishLocked() {
	inUse, problems := map[string][]Holder{}, map[string]string{}
	all := make([]ClaimStatus, 0, len(c.records))
	for _, r := range c.records {
		s := ClaimStatus{
			UID: r.UID, Namespace: r.Namespace, Name: r.Name, OwnerPod: r.OwnerPod, Driver: r.Driver, Since: r.Prepared,
			Restarted: r.beforeRestart(c.options.BootID), Making: r.incomplete(),
		}
		if r.Released {
			s.Released, s.Destroyed = cmp.Or(c.releaseProblem[r.UID], releasePending), r.Destroyed
		}
		for _, d := range r.Devices {
			inUse[d.GPU] = append(inUse[d.GPU], Holder{
				UID: r.UID, Namespace: r.Namespace, Name: r.Name, Device: d.uuid(), Admin: d.AdminAccess,
			})
			shown := DeviceStatus{
				Request: d.Request, Name: d.Device, ShareID: d.ShareID, Share: d.Share, Limited: d.Share > 0 &&
					d.MPS != nil, GPU: d.GPU,
				Admin: d.AdminAccess, Problem: c.mpsProblemLocked(r, d),
			}
			if d.MIG != nil {
				shown.MIG = d.MIG.UUID
			}
			if shown.Problem != "" {
				problems[d.Device] = shown.Problem
			}
			s.Devices = append(s.Devices, shown)
		}
		all = append(all, s)
	}
	for _, holders := range inUse {
		order.Sort(holders, func(a, b Holder) int {
			return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Device, b.Device))
		})
	}
	order.Sort(all, func(a, b ClaimStatus) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	if !reflect.DeepEqual(c.inUse.Value(), inUse) {
		c.inUse.Publish(inUse)
	}
	if !maps.Equal(c.problems.Value(), problems) {
		c.problems.Publish(problems)
	}
	if !reflect.DeepEqual(c.status.Value(), all) {
		c.status.Publish(all)
	}
}

// leakPatience is how long a claim must be absent from both the API server and all pods
// before it counts as leaked. The kubelet itself unprepares the claims in its checkpoint,
// within two minutes.
const leakPatience = 10 * time.Minute

// leakQueryTimeout limits all queries to the kubelet and the API server about leaks,
// because other work waits meanwhile.
const leakQueryTimeout = 30 * time.Second

// forgottenPatience is how long the kubelet's checkpoint must lack a claim, in two checks
// in a row, in a process that does not serve the driver. No claim can be prepared
// meanwhile.
const forgottenPatience = refreshInterval / 2

// leaks are the records of unknown claims, and since when the claims are unknown.
type leaks struct {
	since     map[string]time.Time
	lastQuery time.Time
}

// isLasting reports whether a claim was forgotten at every check for a period.
func (l *leaks) isLasting(uid string, forgotten bool, atLeast time.Duration) bool {
	if !forgotten {
		delete(l.since, uid)
		return false
	}
	if l.since[uid].IsZero() {
		l.since[uid] = time.Now()
	}
	return time.Since(l.since[uid]) >= atLeast
}

// keepOnly removes the entries of claims without a record.
func (l *leaks) keepOnly(records map[string]record) {
	maps.DeleteFunc(l.since, func(uid string, _ time.Time) bool { _, still := records[uid]; return !still })
}

// findLeaks unprepares claims forgotten by the kubelet: no pod of the node has the claim,
// and the API server has no such claim or has allocated other devices since.
func (c *Claims) findLeaks(ctx context.Context, l *leaks) {
	now := time.Now()
	c.mu.Lock()
	records := c.records
	c.mu.Unlock()
	if c.options.KubeletClaims != nil && len(records) > 0 {
		if kept, err := c.options.KubeletClaims(ctx); err == nil {
			c.findForgotten(ctx, l, records, kept)
			return
		}
	}
	if c.options.PodClaims == nil || c.options.LookUp == nil || len(records) == 0 ||
		now.Sub(l.lastQuery) < leakPatience/10 {
		return
	}
	l.lastQuery = now
	ctx, cancel := context.WithTimeout(ctx, leakQueryTimeout)
	defer cancel()
	claimed, err := c.options.PodClaims(ctx)
	if err != nil {
		clear(l.since) // no answer is no evidence
		return
	}
	for uid, r := range records {
		needed := claimed[r.String()] || r.Released // a released claim is retried more often elsewhere
		if !needed {
			var now dra.Claim
			now, needed, err = c.options.LookUp(ctx, r.Namespace, r.Name)
			needed = needed && now.UID == uid && r.isFor(now)
		}
		// A time in the future comes from a clock that was set back.
		forgotten := !needed && err == nil && now.Sub(r.Prepared).Abs() >= leakPatience
		if l.isLasting(uid, forgotten, leakPatience) {
			c.unprepareLeak(ctx, r, "the API server does not have the claim with these devices")
		}
	}
	l.keepOnly(records)
}

// findForgotten unprepares claims that are in neither the kubelet's checkpoint nor a pod,
// in a process that does not serve the driver. The checkpoint has the claim of every
// running pod. A failure of the additional query to PodResources is ignored.
func (c *Claims) findForgotten(ctx context.Context, l *leaks, records map[string]record, kept map[string]bool) {
	claimed := map[string]bool{}
	if c.options.PodClaims != nil {
		claimed, _ = c.options.PodClaims(ctx)
	}
	for uid, r := range records {
		if l.isLasting(uid, !kept[uid] && !claimed[r.String()] && !r.Released, forgottenPatience) {
			c.unprepareLeak(ctx, r, "the kubelet's checkpoint does not have the claim")
		}
	}
	l.keepOnly(records)
}

// unprepareLeak unprepares a claim, unless the claim was prepared again after the read of
// its record.
func (c *Claims) unprepareLeak(ctx context.Context, r record, reason string) {
	err := c.unprepare(ctx, r.UID, r.Namespace, r.Name, func(current record) bool {
		return current.Prepared.Equal(r.Prepared) && slices.Equal(current.Pods, r.Pods)
	})
	klog.FromContext(ctx).Info("Unpreparing a claim without a pod", "claim", klog.KRef(r.Namespace, r.Name), "uid",
		r.UID,
		"reason", reason, "problem", errorOrNone(err))
}

func errorOrNone(err error) string { return cmp.Or(textOf(err), "none") }
