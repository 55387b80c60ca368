package claims

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Prepare prepares the claim with the given UID: it saves a record, creates MIG devices,
// starts MPS and writes the CDI spec. It returns the names of the CDI devices for the
// kubelet, which passes the names to the container runtime. read reads the claim from the
// API server. The error is a sentence for an Event of the pod. For a prepared claim the
// answer is always the same, even if the devices have changed, because the claim's
// containers use the devices.
func (c *Claims) Prepare(
	ctx context.Context, uid string, read func(context.Context) (dra.Claim, error),
) (prepared []dra.Prepared, err error) {
	began := time.Now()
	defer func() { c.options.Metrics.Prepared(time.Since(began), string(causeOf(err))) }()
	if !validUID(uid) {
		return nil, fail(CauseMalformed, "%q is not the UID of a claim", uid)
	}
	unprepares := c.unprepareNumber(uid) // before read: the claim that read returns may be older than an unprepare call
	claim, err := read(ctx)
	switch {
	case err != nil:
		return nil, fail(CauseNotReady, "read the claim: %w", err)
	case claim.UID != uid:
		return nil, fail(CauseLate, "the claim was deleted and created again: its UID is %s instead of %s",
			claim.UID, uid)
	}
	done, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	err = c.retry(ctx, func() error {
		prepared, err = c.prepare(ctx, claim, unprepares)
		return err
	})
	return prepared, err
}

// prepare is one attempt of Prepare. unprepares is the result of unprepareNumber at the
// start of the call.
func (c *Claims) prepare(ctx context.Context, claim dra.Claim, unprepares int) ([]dra.Prepared, error) {
	if r, specWritten := c.recordWithSpec(claim.UID); specWritten && r.isFor(claim) && !r.addsPods(claim) {
		return c.answerFor(r), nil
	}
	locks := c.locks.begin()
	defer locks.end()
	if err := locks.claim(ctx, claim.UID); err != nil {
		return nil, causedError{CauseLate, err}
	}
	r, found := c.all()[claim.UID]
	if found && r.Released {
		if err := c.reclaim(ctx, locks, r); err != nil {
			return nil, err
		}
		locks.end() // the locks of all GPUs are taken at once
		return c.prepare(ctx, claim, unprepares)
	}
	earlier := found && !r.beforeRestart(c.options.BootID)
	if earlier && !r.isFor(claim) {
		return nil, fail(CauseInUse, "the claim was allocated again: it has %s now, and is prepared with %s, "+
			"which is not unprepared yet", resultNames(claim.Results), r.names())
	}
	var err error
	if !earlier {
		if rival := c.CompetingDriver(ctx); rival != "" {
			return nil, fail(CauseDevice, "%s", rival)
		}
		if r, err = c.record(ctx, locks, claim, r, unprepares); err != nil {
			return nil, err
		}
	} else if r.addsPods(claim) {
		r.Pods = slices.Compact(slices.Sorted(slices.Values(slices.Concat(r.Pods, claim.Pods))))
		if err := c.store.write(r); err != nil {
			return nil, err
		}
		c.setRecord(r)
	}
	if r.incomplete() {
		if r, err = c.createDevices(ctx, locks, r, earlier); err != nil {
			return nil, err
		}
	}
	if err := c.setSlices(ctx, locks, r); err != nil {
		return nil, err
	}
	if err := c.startMPS(ctx, locks, r); err != nil {
		return nil, err
	}
	c.notePrepared(r.UID)
	if err := c.writeSpec(r); err != nil {
		return nil, err
	}
	for _, d := range r.Devices {
		if c.isAbsent(d) {
			return nil, fail(CauseDevice, "the device %s (%s) no longer exists", d.Device, d.uuid())
		}
	}
	return c.answerFor(r), nil
}

// isAbsent reports whether a scan has shown that a device of a claim is gone: its GPU was
// removed, or the MIG device was destroyed. The device nodes may now belong to another
// claim.
func (c *Claims) isAbsent(d recordDevice) bool {
	s, edits := c.options.Snapshots.Value(), c.edits.Load()
	if edits == nil || edits.generation != s.Generation || s.Stale != "" || len(s.LeftOut) > 0 || d.uuid() == "" ||
		edits.Has(d.uuid()) {
		return false
	}
	g, found := s.GPU(d.GPU)
	return !found || d.MIG != nil && g.Health.State != inventory.Lost && g.Health.State != inventory.Unknown &&
		!slices.ContainsFunc(g.MIGDevices, func(m inventory.MIGDevice) bool { return m.UUID == d.uuid() })
}

// retryInterval is the interval of retries while a call waits for changes without
// notification, such as pods and processes on a MIG device.
const retryInterval = time.Second

// retry repeats try while the error is temporary and the call may wait. Between attempts
// no lock is held.
func (c *Claims) retry(ctx context.Context, try func() error) error {
	_, openChanged := c.open.Latest()
	late := time.NewTimer(c.options.Patience)
	defer late.Stop()
	for {
		_, changed := c.recordsChanged.Latest()
		_, editsChanged := c.editsChanged.Latest()
		err := try()
		if cause := causeOf(err); cause != CauseInUse && cause != CauseNotReady || c.options.Patience == 0 {
			return err
		}
		again := time.NewTimer(retryInterval)
		select {
		case <-changed:
		case <-editsChanged:
		case <-again.C:
		case <-late.C:
			again.Stop()
			return err
		case <-openChanged:
			again.Stop()
			return causedError{CauseLate, dra.ErrEnded}
		case <-ctx.Done():
			again.Stop()
			return err
		}
		again.Stop()
	}
}

// answerFor returns the answer to the kubelet for a prepared claim.
func (c *Claims) answerFor(r record) (all []dra.Prepared) {
	for _, d := range r.Devices {
		all = append(all, dra.Prepared{
			Requests: []string{d.request()}, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID,
			CDIDeviceIDs: []string{c.store.specsOf(r).Device(r.UID, r.cdiName(d))},
		})
	}
	return all
}

// isFor reports whether a record matches the claim's current allocation.
func (r record) isFor(claim dra.Claim) bool {
	return len(r.Devices) == len(claim.Results) && !slices.ContainsFunc(claim.Results, func(result dra.Result) bool {
		return !slices.ContainsFunc(r.Devices, func(d recordDevice) bool {
			return d.Pool == result.Pool && d.Device == result.Device && d.ShareID == result.ShareID
		})
	})
}

// addsPods reports whether pods of a claim are missing in the claim's record.
func (r record) addsPods(claim dra.Claim) bool {
	return slices.ContainsFunc(claim.Pods, func(uid string) bool { return !slices.Contains(r.Pods, uid) })
}

// names returns the device names of a record.
func (r record) names() string {
	all := make([]string, len(r.Devices))
	for i, d := range r.Devices {
		all[i] = d.Device
	}
	return strings.Join(all, ", ")
}

func resultNames(results []dra.Result) string {
	all := make([]string, len(results))
	for i, result := range results {
		all[i] = result.Device
	}
	return strings.Join(all, ", ")
}

// recordWithSpec returns the record of a claim, and whether a repeated Prepare has nothing
// to do. It needs no disk and no lock, and so does not wait for calls that wait for the
// disk.
func (c *Claims) recordWithSpec(uid string) (r record, specWritten bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records[uid], c.specWritten[uid]
}

// notePrepared notes that only the files of a claim may still be missing.
func (c *Claims) notePrepared(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.specWritten[uid] = false
}

// setSpecWritten notes whether the files of a claim are up to date. It has no effect on a
// claim that was not fully prepared, and never confirms a claim with its own time slice or
// control daemons, because Prepare checks their state on every call.
func (c *Claims) setSpecWritten(r record, written bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, prepared := c.specWritten[r.UID]; prepared {
		c.specWritten[r.UID] = written && !r.setsTimeSlice() && len(r.daemons()) == 0
	}
}

// record decides whether a claim may have its devices, and writes the record. The caller
// has the lock of the claim.
func (c *Claims) record(
	ctx context.Context, locks *heldLocks, claim dra.Claim, former record, unprepares int,
) (record, error) {
	unprepared := fail(CauseLate, "the claim was unprepared while it was being prepared")
	if c.unpreparedSince(claim.UID, unprepares) {
		return record{}, unprepared
	}
	n, r, held, err := c.plan(ctx, claim, former)
	if err != nil {
		return record{}, err
	}
	locks.waited = false
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return record{}, causedError{CauseLate, err}
	}
	if locks.waited { // the plan is outdated
		if n, r, held, err = c.plan(ctx, claim, former); err != nil {
			return record{}, err
		}
	}
	if err := n.checkAvailable(r, c.all(), c.options.BootID, held); err != nil {
		return record{}, err
	}
	if r, err = c.checkSpace(ctx, r); err != nil {
		return record{}, err
	}
	if err := c.inspect(ctx, n.snapshot, r); err != nil {
		return record{}, err
	}
	if c.unpreparedSince(claim.UID, unprepares) {
		return record{}, unprepared
	}
	if err := ctx.Err(); err != nil {
		return record{}, fail(CauseLate, "the kubelet no longer waits for the claim: %w", err)
	}
	if err := c.store.write(r); err != nil {
		return record{}, err
	}
	c.setRecord(r)
	return r, nil
}

// heldPatience limits how long the kubelet may take to say which pods hold GPUs as
// resources when no GPU is offered as a resource.
const heldPatience = 2 * time.Second

// heldDevices returns the devices held by pods through the device plugin. A GPU enters a slice
// only when no pod holds the GPU as a resource, and is offered as a resource only after it
// left the slice, even across restarts. If all GPUs are in slices, the kubelet's answer is
// therefore optional.
func (c *Claims) heldDevices(ctx context.Context, s inventory.Snapshot) ([]kubelet.HeldDevice, error) {
	if c.options.HeldDevices == nil {
		return nil, nil
	}
	owners := c.options.Owners.Value()
	if slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool { return !owners[g.UUID].InSlice() }) {
		return c.options.HeldDevices(ctx)
	}
	limited, cancel := context.WithTimeout(ctx, heldPatience)
	defer cancel()
	held, err := c.options.HeldDevices(limited)
	if err == nil || ctx.Err() != nil {
		return held, err
	}
	klog.FromContext(ctx).V(2).Info("Preparing a claim without the kubelet's account of resources",
		"reason", err.Error())
	c.options.Metrics.PreparedWithoutKubelet()
	return nil, nil
}

// inspectTimeout limits the checks of the devices of a claim.
const inspectTimeout = 5 * time.Second

// inspect runs the checks before a start on the devices of a claim that is prepared for
// the first time: later the claim's own containers may run. Unhealthy devices whose taint
// the claim tolerates, and devices with adminAccess, are not checked. The caller has the
// locks of the GPUs.
func (c *Claims) inspect(ctx context.Context, s inventory.Snapshot, r record) error {
	if c.options.Inspect == nil {
		return nil
	}
	var devices []resource.Device
	for _, d := range r.Devices {
		g, _ := s.GPU(d.GPU)
		health := g.Fitness()
		for _, m := range g.MIGDevices {
			if m.UUID == d.uuid() {
				health = inventory.Worst(health, m.Health)
			}
		}
		if d.AdminAccess || !health.Allocatable() {
			continue
		}
		wanted := resource.Device{UUID: cmp.Or(d.uuid(), d.GPU)}
		if d.isShare() {
			wanted.Sharing = resource.TimeSliced
		}
		devices = append(devices, wanted)
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	switch err := c.options.Inspect(ctx, devices); {
	case errors.Is(err, inventory.ErrInUse):
		return causedError{CauseInUse, err}
	case errors.Is(err, inventory.ErrNoAnswer):
		return causedError{CauseDriver, err}
	case err != nil:
		return causedError{CauseHealth, err}
	}
	return nil
}

// writeSpec writes the CDI spec of a claim if it is outdated. Missing devices are omitted,
// so that the runtime refuses to restart containers with missing devices. If the right
// content is unknown, an existing spec is kept. The caller has the lock of the claim.
func (c *Claims) writeSpec(r record) error {
	specs := c.store.specsOf(r)
	path := specs.File(r.UID)
	devices := map[string]cdi.ClaimedDevice{}
	edits := c.edits.Load()
	unknown := edits == nil
	for _, d := range r.Devices {
		if c.isAbsent(d) {
			continue
		}
		claimed := cdi.ClaimedDevice{UUID: d.uuid(), IMEX: d.IMEX}
		if d.MPS != nil {
			claimed.MPS, claimed.Env = mps.ClaimDir(d.MPS.ID), d.MPS.env()
		}
		devices[r.cdiName(d)] = claimed
		unknown = unknown || !edits.Has(d.uuid()) || d.IMEX && !edits.HasIMEX()
	}
	if unknown {
		if _, err := os.Stat(path); err != nil {
			return fail(CauseNotReady, "the container edits of the claim are not known yet: %w", err)
		}
		return nil
	}
	if len(devices) == 0 { // CDI requires at least one device
		c.setSpecWritten(r, false)
		if err := c.store.lead(); err != nil {
			return err
		}
		return statefile.Remove(path)
	}
	if err := c.writeMetadata(r, devices); err != nil {
		return err
	}
	note, err := encode(r)
	if err != nil {
		return err
	}
	content, err := edits.Claim(r.driver(), r.UID, devices, note)
	if err != nil {
		return err
	}
	if there, err := statefile.Read(path, maxSpec); err != nil || !bytes.Equal(there, content) {
		if err := c.store.lead(); err != nil {
			return err
		}
		c.store.step()
		defer c.store.step()
		if err := specs.Write(r.UID, content); err != nil {
			return err
		}
	}
	c.setSpecWritten(r, len(devices) == len(r.Devices))
	return nil
}

// maxSpec is the largest claim spec to compare, in bytes; a larger spec is replaced.
const maxSpec = 1 << 20

// Unprepare releases a claim. It needs neither the driver nor the API server. An unknown
// claim is no error.
func (c *Claims) Unprepare(ctx context.Context, uid, namespace, name string) (err error) {
	began := time.Now()
	defer func() { c.options.Metrics.Unprepared(time.Since(began), string(causeOf(err))) }()
	if !validUID(uid) {
		return fail(CauseMalformed, "%q is not the UID of a claim", uid)
	}
	done, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	return c.retry(ctx, func() error { return c.unprepare(ctx, uid, namespace, name, nil) })
}

// ended returns an error with the name of a pod of the claim that still has a process. The
// kubelet unprepares the claims of force-deleted pods once a minute, even if containers
// still run, and retries after the containers have ended.
func (c *Claims) ended(r record) error {
	if c.options.PodRuns == nil || r.beforeRestart(c.options.BootID) {
		return nil
	}
	for _, uid := range r.Pods {
		if c.options.PodRuns(uid) {
			return fail(CauseInUse, "the pod with UID %s is still running", uid)
		}
	}
	return nil
}

// unprepare is Unprepare for a call and for Run. Run passes unchanged, a check that the
// record is still the record examined by Run: the claim may have been prepared again for
// the next pod. A call passes nil.
func (c *Claims) unprepare(ctx context.Context, uid, namespace, name string, unchanged func(record) bool) error {
	locks := c.locks.begin()
	if unchanged != nil {
		locks = c.locks.beginBriefly()
	}
	defer locks.end()
	if err := locks.claim(ctx, uid); err != nil {
		return causedError{CauseLate, err}
	}
	r, known := c.all()[uid]
	if unchanged != nil && !unchanged(r) {
		return nil
	}
	c.noteUnprepared(uid)
	if err := c.ended(r); err != nil {
		return err
	}
	if r.UID = uid; !known {
		r.Driver = recordDriver(c.options.DriverName)
	}
	if _, err := c.remove(ctx, locks, r); err != nil {
		return err
	}
	if locks.end(); r.setsTimeSlice() {
		c.resetSlices(ctx, r.gpus())
	}
	klog.FromContext(ctx).V(2).Info("Unprepared claim", "claim", klog.KRef(namespace, name), "uid", uid)
	return nil
}

// remove releases the devices of a claim and removes its files. It reports whether the
// record is gone. The caller has the lock of the claim.
func (c *Claims) remove(ctx context.Context, locks *heldLocks, r record) (gone bool, err error) {
	c.setSpecWritten(r, false)
	if gone, err = c.release(ctx, locks, r); err != nil {
		return false, err
	}
	if err := c.store.lead(); err != nil {
		return false, err
	}
	if err := statefile.Remove(c.store.specsOf(r).File(r.UID)); err != nil {
		return false, err
	}
	c.store.step()
	if r.Metadata != nil { // without metadata the folder need not be read
		if err := c.removeMetadata(r); err != nil {
			return false, err
		}
	}
	if gone {
		if err := c.store.remove(r.UID); err != nil {
			return false, err
		}
		c.deleteRecord(r.UID)
	}
	return gone, nil
}
