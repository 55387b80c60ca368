package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// lockPatience is how long the loop waits for a call that has the lock of a claim.
const lockPatience = time.Second

// every is how often the records are read again, which another process may have changed, and specs are compared with the driver's files.
const every = 10 * time.Second

// Run keeps the CDI specs of all claims as they should be, until ctx ends, and then returns nil.
func (c *Claims) Run(ctx context.Context) error {
	timer := c.options.Clock.NewTimer(every)
	defer timer.Stop()
	leaks := leaks{since: map[string]time.Time{}}
	c.adopt(ctx)
	c.reread(ctx)
	adopted := false
	var tasks sync.WaitGroup
	defer tasks.Wait()
	first := make(chan struct{})
	tasks.Go(func() { c.follow(ctx, sync.OnceFunc(func() { close(first) })) })
	select {
	case <-first:
	case <-ctx.Done():
		return nil
	}
	for {
		_, renewed := c.renewed.Latest()
		_, configured := c.options.Configs.Latest()
		adopted = c.gives() && (adopted || c.adopt(ctx))
		c.refresh(ctx)
		select {
		case <-c.started:
		default:
			close(c.started)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-renewed:
		case <-configured:
		case <-timer.C():
			timer.Reset(every)
			c.findLeaks(ctx, &leaks)
			c.resetSlices(ctx)
			c.sweepMPS(ctx)
			c.giveBackReleased(ctx)
			if err := errors.Join(c.store.sweep(), c.sweepSpecs()); err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot remove old files of claims", "reason", err.Error())
			}
		}
	}
}

// follow keeps what containers are given with devices, and calls looked each time, until ctx ends. It takes no lock of a claim or a GPU:
// who has one may wait for it.
func (c *Claims) follow(ctx context.Context, looked func()) {
	writer := cdi.NewWriter(c.options.CDIDir, c.options.Root)
	timer := c.options.Clock.NewTimer(every)
	defer timer.Stop()
	var problem error
	for {
		snapshot, found := c.options.Snapshots.Latest()
		configured, changed := c.options.Configs.Latest()
		pool, published := c.options.Pools.Latest()
		if snapshot.Generation > 0 && (c.gives() || hasDevices(pool) || len(c.inUse.Value()) > 0) {
			given, err := writer.Given(snapshot, configured.Edits, configured.CDI)
			c.given.Store(&given)
			if err != nil && textOf(err) != textOf(problem) {
				klog.FromContext(ctx).Error(err, "Cannot make all CDI specs of claims")
			}
			problem, published = err, nil
		}
		c.waitsForUVM(snapshot) // from now on
		c.renewed.Publish(struct{}{})
		looked()
		select {
		case <-ctx.Done():
			return
		case <-found:
		case <-changed:
		case <-published: // what it says of devices is not in specs; that there are any is what counts
		case <-timer.C():
			timer.Reset(every)
		}
	}
}

// waitsForUVM reports whether the node has no nvidia-uvm, and lacks it for less than a claim waits for that.
func (c *Claims) waitsForUVM(snapshot inventory.Snapshot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !snapshot.LacksUVM(true) {
		c.noUVM = time.Time{}
		return false
	}
	if c.noUVM.IsZero() {
		c.noUVM = c.options.Clock.Now()
	}
	return c.options.Clock.Since(c.noUVM) < inventory.UVMPatience
}

// gives reports whether GPUs are to be given to claims.
func (c *Claims) gives() bool { return c.options.Configs.Value().DRA.Mode != config.DRAOff }

// hasDevices reports whether claims can be given devices of a pool.
func hasDevices(p dra.Pool) bool {
	return slices.ContainsFunc(p.Slices, func(s dra.Slice) bool { return len(s.Devices) > 0 })
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// sweepSpecs removes what a process that was killed has left of specs.
func (c *Claims) sweepSpecs() error {
	prefix := "." + strings.TrimSuffix(filepath.Base(cdi.ClaimFile(c.options.CDIDir, "")), ".yaml")
	return sweepTemporary(c.options.CDIDir, prefix, c.options.Clock)
}

// refresh reads the records again, writes the specs that are not as they should be, sets aside what cannot be read, and restores what is
// lost.
func (c *Claims) refresh(ctx context.Context) {
	records, unread := c.reread(ctx)
	for _, uid := range append(unread, slices.Sorted(maps.Keys(records))...) {
		if err := c.refreshClaim(ctx, uid); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Cannot write the CDI spec of a claim", "uid", uid, "reason", err.Error())
		}
	}
}

// refreshClaim does so for one claim. It may have been given back since its record was read.
func (c *Claims) refreshClaim(ctx context.Context, uid string) error {
	t, err := begin(c.options.StateDir, c.options.Clock)
	if err != nil {
		return err
	}
	defer t.end()
	waiting, cancel := context.WithTimeout(ctx, lockPatience) // a call that has the lock for longer writes the spec itself
	defer cancel()
	if err := t.claim(waiting, uid); err != nil {
		return err
	}
	r, found := c.store.readOrRestore(ctx, uid)
	if !found || r.former(c.options.BootID) || r.Released || r.intent() {
		return nil
	}
	return c.writeSpec(r)
}

// NotPrepared returns an error if a claim has one of the GPUs, by the records on disk now, which another process may have written. Where
// they cannot be read, no claim is prepared.
func (c *Claims) NotPrepared(gpus []string) error {
	records, _, _ := c.store.all()
	for _, r := range records {
		for _, d := range r.Devices {
			if slices.Contains(gpus, d.GPU) && !d.AdminAccess && !r.former(c.options.BootID) {
				return fmt.Errorf("GPU %s is in use by the claim %s", d.GPU, r)
			}
		}
	}
	return nil
}

// reread shows the records as they are on disk, and returns them.
func (c *Claims) reread(ctx context.Context) (records map[string]record, unread []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	records, unread, err := c.store.all()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot read the records of claims")
		return c.records, nil
	}
	c.records, c.read = records, true
	c.publishLocked()
	return maps.Clone(records), unread
}

// show shows a record that was written, or, if it is nil, that was removed.
func (c *Claims) show(uid string, r *record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = maps.Clone(c.records)
	if delete(c.records, uid); r != nil {
		c.records[uid] = *r
	}
	if r == nil || !r.Released {
		delete(c.left, uid)
	}
	c.publishLocked()
}

// publishLocked publishes the records, once all of them were read.
func (c *Claims) publishLocked() {
	if !c.read {
		return
	}
	inUse, problems := map[string][]Holder{}, map[string]string{}
	all := make([]ClaimStatus, 0, len(c.records))
	for _, r := range c.records {
		s := ClaimStatus{UID: r.UID, Namespace: r.Namespace, Name: r.Name, Since: r.Prepared, Restarted: r.former(c.options.BootID)}
		if r.Released {
			s.Released = cmp.Or(c.left[r.UID], "they are to be destroyed")
		}
		for _, d := range r.Devices {
			inUse[d.GPU] = append(inUse[d.GPU], Holder{UID: r.UID, Namespace: r.Namespace, Name: r.Name, Device: d.uuid(), Admin: d.AdminAccess})
			shown := DeviceStatus{
				Request: d.Request, Name: d.Device, ShareID: d.ShareID, Share: d.Share, Limited: d.Share > 0 && d.MPS != nil, GPU: d.GPU,
				Admin: d.AdminAccess, Problem: c.problem(r, d),
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
		slices.SortFunc(holders, func(a, b Holder) int { return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Device, b.Device)) })
	}
	slices.SortFunc(all, func(a, b ClaimStatus) int {
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

// leakAfter is how long a claim must be seen neither at the API server nor in a pod before it counts as leaked. Kubelet gives the claims
// that it knows of back itself, within two minutes.
const leakAfter = 10 * time.Minute

// leakPatience is how long kubelet and the API server may take to answer all questions about leaks: all else waits meanwhile.
const leakPatience = 30 * time.Second

// leaks are the records whose claim nobody knows, and since when.
type leaks struct {
	since map[string]time.Time
	asked time.Time
}

// findLeaks gives claims back that neither a pod nor the API server has: kubelet has forgotten them.
func (c *Claims) findLeaks(ctx context.Context, l *leaks) {
	now := c.options.Clock.Now()
	c.mu.Lock()
	records, ask := c.records, c.exists
	c.mu.Unlock()
	if c.options.Claimed == nil || ask == nil || len(records) == 0 || now.Sub(l.asked) < leakAfter/10 {
		return
	}
	l.asked = now
	ctx, cancel := context.WithTimeout(ctx, leakPatience)
	defer cancel()
	claimed, err := c.options.Claimed(ctx)
	if err != nil {
		clear(l.since) // no answer is no evidence
		return
	}
	for uid, r := range records {
		exists := claimed[r.String()]
		if !exists {
			exists, err = ask(ctx, uid, r.Namespace, r.Name)
		}
		if exists || err != nil || now.Sub(r.Prepared).Abs() < leakAfter { // a later time is of a clock that went back
			delete(l.since, uid)
			continue
		}
		if l.since[uid].IsZero() {
			l.since[uid] = now
		}
		if now.Sub(l.since[uid]) >= leakAfter {
			err := c.Unprepare(ctx, uid, r.Namespace, r.Name)
			klog.FromContext(ctx).Info("Unpreparing a claim that neither a pod nor the API server has", "claim", klog.KRef(r.Namespace, r.Name),
				"uid", uid, "problem", errorOrNone(err))
		}
	}
	maps.DeleteFunc(l.since, func(uid string, _ time.Time) bool { _, still := records[uid]; return !still })
}

func errorOrNone(err error) string { return cmp.Or(textOf(err), "none") }
