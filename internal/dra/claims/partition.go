package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// MIG devices can be created for claims. The rules:
//
//   - Before a MIG device is created, the record says where. Without the UUID the record
//     is incomplete. MIG devices are created and destroyed only under the locks of the
//     claim and the GPU, and an incomplete record is written only while its places are
//     free.
//   - A GPU instance belongs to the claim if the call that created the instance succeeded
//     and the record has the instance's ID: from before the instance has a compute
//     instance until after the compute instance is gone. Earlier versions of the record
//     have only the UUID.
//   - Any other instance at the place of an incomplete record, without a compute instance,
//     is unfinished: its call was killed or did not return. Such an instance cannot be in
//     use, and is destroyed before a new instance is created at the place. With a compute
//     instance, the instance belongs to another program.
//   - Instances of other programs are never destroyed. A GPU with such an instance gets no
//     MIG devices for claims.
//   - Before a MIG device is destroyed, its record is marked as released. The record stays
//     until the MIG device is gone. While the device is in use, Unprepare fails and the
//     kubelet retries. While the driver does not work, Unprepare succeeds.

// A Divider creates and destroys MIG devices. All methods return by the end of ctx.
type Divider interface {
	mig.Driver
	// Look triggers a scan by the monitor, and returns its Snapshot.
	Look(ctx context.Context) (inventory.Snapshot, error)
}

// divideTimeout limits all queries and steps for one GPU. The kubelet waits for 45 s.
const divideTimeout = 20 * time.Second

// placement returns the place of a MIG device on its GPU.
func (m recordMIG) placement() inventory.MIGPlacement {
	return inventory.MIGPlacement{Profile: m.ProfileID, Start: m.Start, Size: m.Size}
}

// instance returns the GPU instance to create for a claim.
func (m recordMIG) instance() inventory.GPUInstance {
	return inventory.GPUInstance{Profile: m.Profile, Start: m.Start, Size: m.Size,
		Computes: []inventory.ComputeInstance{{Slices: m.Slices}}}
}

// isAt reports whether a GPU instance has the profile and the place of the MIG device.
func (m recordMIG) isAt(i inventory.GPUInstance) bool {
	return i.Profile == m.Profile && i.Start == m.Start && i.Size == m.Size
}

// hasInstance reports whether the record names the claim's GPU instance.
func (m recordMIG) hasInstance() bool { return m.Created || m.UUID != "" }

// isInstance reports whether a GPU instance was created for the claim, and has no foreign
// compute instance.
func (m recordMIG) isInstance(i inventory.GPUInstance) bool {
	return m.hasInstance() && m.GI == i.ID && m.isAt(i) && (len(i.Computes) == 0 ||
		len(i.Computes) == 1 && i.Computes[0].Slices == m.Slices)
}

// isUnfinished reports whether a GPU instance comes from a killed or hanging call. Without
// a compute instance it is not in use.
func (m recordMIG) isUnfinished(i inventory.GPUInstance) bool {
	return !m.hasInstance() && m.isAt(i) && len(i.Computes) == 0
}

// isOwn reports whether a GPU instance must be destroyed with the claim.
func (m recordMIG) isOwn(i inventory.GPUInstance) bool { return m.isInstance(i) || m.isUnfinished(i) }

// checkFree returns an error that names the GPU instance at the place of a device to
// create.
func (d recordDevice) checkFree(instances []inventory.GPUInstance) error {
	for _, i := range instances {
		if m := d.MIG; !m.isInstance(i) && i.Start < m.Start+m.Size && m.Start < i.Start+i.Size {
			return d.blockedBy(i)
		}
	}
	return nil
}

// blockedBy returns the error for a GPU instance at the place of a device.
func (d recordDevice) blockedBy(i inventory.GPUInstance) error {
	return fail(CauseInUse, "GPU instance %d (%s at memory slice %d) of GPU %s blocks %s, and does not belong to "+
		"a claim",
		i.ID, i.Profile, i.Start, d.GPU, d.Device)
}

// dynamicDevices returns the indices of the devices that are created for the claim, by
// UUID of the GPU.
func (r record) dynamicDevices() map[string][]int {
	all := map[string][]int{}
	for i, d := range r.Devices {
		if d.MIG != nil && d.MIG.Dynamic {
			all[d.GPU] = append(all[d.GPU], i)
		}
	}
	return all
}

// incomplete reports whether devices of the claim do not exist yet.
func (r record) incomplete() bool {
	return slices.ContainsFunc(r.Devices, func(d recordDevice) bool {
		return d.DisableMIG || d.MIG != nil && d.MIG.Dynamic && d.MIG.UUID == ""
	})
}

// partition does the work of device for a device that is created for the claim.
func (n node) partition(d recordDevice, published dra.Device, result dra.Result) (recordDevice, error) {
	p := published.Partition
	g, found := n.snapshot.GPU(published.GPU())
	if !found || g.MIG != inventory.MIGEnabled && !p.Switched {
		return d, fail(CauseDevice, "the GPU of the device %s (%s) no longer exists or is not in MIG mode",
			result.Device,
			published.GPU())
	}
	name, health := fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID), g.Fitness()
	d.GPU, d.BDF = g.UUID, g.BDF
	d.MIG = &recordMIG{
		Profile: p.Profile, ProfileID: p.Placement.Profile, Start: p.Placement.Start, Size: p.Placement.Size,
		Slices: p.Slices, Dynamic: true,
		Switched: p.Switched,
	}
	for _, m := range g.MIGDevices {
		if result.AdminAccess && m.Placement == p.Placement && m.Attributes.CISlices == m.Attributes.GISlices {
			d.MIG.Dynamic, d.MIG.Switched, d.MIG.UUID, d.MIG.GI, d.MIG.CI = false, false, m.UUID, m.GI, m.CI
			health = inventory.Worst(health, m.Health)
		}
	}
	if result.AdminAccess && d.MIG.UUID == "" {
		return d, fail(CauseDevice, "the device %s does not exist, and adminAccess creates none", result.Device)
	}
	return d, checkHealth(name, health, published, result)
}

// layoutOf returns the MIG layout of a GPU on which MIG devices can be created and
// destroyed.
func (c *Claims) layoutOf(ctx context.Context, uuid string) (layout.GPU, error) {
	g := layout.GPU{UUID: uuid}
	if c.options.Driver == nil {
		return g, errors.New("this program does not divide GPUs")
	}
	var err error
	if g.Partitions, err = c.options.Driver.Partitions(ctx, uuid); err != nil {
		return g, err
	}
	switch {
	case g.Unread != "":
		return g, errors.New(g.Unread)
	case g.Mode != g.Pending && !g.Resetless:
		return g, fmt.Errorf("the MIG mode of GPU %s is being changed", uuid)
	}
	return g, nil
}

// checkSpace returns why the devices of a claim cannot be created, or the record with the
// MIG changes that are needed. The caller has the locks of the GPUs.
func (c *Claims) checkSpace(ctx context.Context, r record) (record, error) {
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	for uuid, positions := range r.dynamicDevices() {
		g, err := c.layoutOf(ctx, uuid)
		if err != nil {
			return r, fail(CauseDriver, "cannot read the MIG layout of GPU %s: %w", uuid, err)
		}
		if g.Mode != inventory.MIGEnabled && !r.switchesMIG(uuid) {
			return r, fail(CauseDevice, "GPU %s is no longer in MIG mode", uuid)
		}
		if err := c.checkMode(ctx, g, inventory.MIGEnabled, r.switchesMIG(uuid)); err != nil {
			return r, causedError{refusal(err), err}
		}
		for _, at := range positions {
			if err := r.Devices[at].checkFree(g.Instances); err != nil {
				return r, err
			}
		}
	}
	return c.checkDisableMIG(ctx, r)
}

// createDevices creates the missing devices of a record, and returns the complete record.
// It keeps the devices of an earlier call, and destroys unfinished instances. The caller
// has the lock of the claim.
func (c *Claims) createDevices(ctx context.Context, locks *heldLocks, r record, earlier bool) (record, error) {
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return r, causedError{CauseLate, err}
	}
	if earlier {
		if err := c.destroy(ctx, r, recordMIG.isUnfinished); err != nil {
			return r, fail(CauseDriver, "cannot destroy the unfinished MIG devices of an earlier call: %w", err)
		}
	}
	for uuid, positions := range r.dynamicDevices() {
		wanted := func(g layout.GPU) ([]inventory.GPUInstance, error) {
			all := slices.Clone(g.Instances)
			for _, at := range positions {
				if err := r.Devices[at].checkFree(g.Instances); err != nil {
					return nil, err
				}
				all = append(slices.DeleteFunc(all, r.Devices[at].MIG.isInstance), r.Devices[at].MIG.instance())
			}
			return all, nil
		}
		if err := c.change(ctx, &r, uuid, wanted); err != nil {
			return r, c.rollBack(ctx, r, fmt.Errorf("cannot create the MIG devices of the claim: %w", err))
		}
	}
	for _, d := range r.Devices {
		if !d.DisableMIG {
			continue
		}
		if err := c.disableMIG(ctx, d.GPU); err != nil {
			return r, c.rollBack(ctx, r, fmt.Errorf("cannot switch the MIG mode of the GPU off:  %w", err))
		}
	}
	made, err := c.awaitDevices(ctx, r)
	if err != nil {
		return r, err
	}
	if err := c.store.write(made); err != nil {
		return r, err
	}
	c.setRecord(made)
	return made, nil
}

// rollBack undoes the steps before a failed step, and returns why the claim is not
// prepared. The caller has the locks of the claim and its GPUs.
func (c *Claims) rollBack(ctx context.Context, r record, err error) error {
	late := ctx.Err() != nil || errors.Is(err, inventory.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded)
	if err = (causedError{refusal(err), err}); late {
		return err // a step may still complete: the next call continues from there
	}
	if undone := errors.Join(c.destroy(ctx, r, recordMIG.isInstance), c.disableUnusedMIG(ctx, r)); undone != nil {
		return fail(CauseDriver, "%w; undo failed: %w", err, undone)
	}
	if gone := c.store.remove(r.UID); gone != nil {
		return gone
	}
	c.deleteRecord(r.UID)
	return err
}

// awaitDevices waits until a Snapshot shows the claim's new devices, and returns the
// record with their UUIDs.
func (c *Claims) awaitDevices(ctx context.Context, r record) (record, error) {
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	r.Devices = slices.Clone(r.Devices)
	s, err := c.options.Driver.Look(ctx)
	for {
		now, snapshotChanged := c.options.Snapshots.Latest()
		_, editsChanged := c.editsChanged.Latest()
		if now.Generation > s.Generation {
			s = now
		}
		edits, missing := c.edits.Load(), ""
		for i, d := range r.Devices {
			g, found := s.GPU(d.GPU)
			if d.DisableMIG {
				if r.Devices[i].DisableMIG = !found || g.MIG == inventory.MIGEnabled ||
					!edits.knownSince(s.Generation, d.GPU); r.Devices[i].DisableMIG {
					missing = d.Device
				}
				continue
			}
			if d.MIG == nil || !d.MIG.Dynamic {
				continue
			}
			at := slices.IndexFunc(g.MIGDevices, func(m inventory.MIGDevice) bool {
				return m.GI == d.MIG.GI && m.Placement == d.MIG.placement() &&
					m.Attributes.CISlices == m.Attributes.GISlices
			})
			if at < 0 {
				missing = d.Device
				continue
			}
			m, noted := g.MIGDevices[at], *d.MIG
			noted.UUID, noted.GI, noted.CI = m.UUID, m.GI, m.CI
			r.Devices[i].MIG = &noted
			if !edits.knownSince(s.Generation, m.UUID) {
				missing = d.Device
			}
		}
		if missing == "" {
			return r, nil
		}
		select {
		case <-ctx.Done():
			return r, fail(CauseNotReady, "the device %s was created, but no scan has found it yet: %w", missing,
				errors.Join(err, ctx.Err()))
		case <-snapshotChanged:
		case <-editsChanged:
		}
	}
}

// destroy destroys the GPU instances selected by which, a function of a MIG device of the
// claim and an instance. The caller has the locks of the claim and its GPUs.
func (c *Claims) destroy(ctx context.Context, r record, which func(recordMIG, inventory.GPUInstance) bool) error {
	if r.beforeRestart(c.options.BootID) {
		return nil // the restart of the node destroyed them
	}
	for uuid, positions := range r.dynamicDevices() {
		err := c.change(ctx, &r, uuid, func(g layout.GPU) ([]inventory.GPUInstance, error) {
			return slices.DeleteFunc(slices.Clone(g.Instances), func(i inventory.GPUInstance) bool {
				return slices.ContainsFunc(positions, func(at int) bool { return which(*r.Devices[at].MIG, i) })
			}), nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// A recordingDriver applies steps for a claim and updates the claim's record: a GPU
// instance is added after its creation, and removed before its destruction.
type recordingDriver struct {
	mig.Driver
	claims *Claims
	r      *record
}

func (n recordingDriver) Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error) {
	if step.Action == inventory.MIGDestroyInstance {
		err := n.record(uuid, func(m *recordMIG) bool { return m.GI == step.GI }, false, 0)
		if err != nil { // a full disk must not keep a pod from terminating
			klog.FromContext(ctx).V(2).Info("Cannot note that a GPU instance is destroyed",
				"claim", n.r.String(), "reason",
				err.Error())
		}
	}
	id, err := n.Driver.Repartition(ctx, uuid, step)
	if err == nil && step.Action == inventory.MIGCreateInstance {
		err = n.record(uuid, func(m *recordMIG) bool { return m.Start == step.Start }, true, id)
	}
	return id, err
}

func (n recordingDriver) record(gpu string, which func(*recordMIG) bool, made bool, id int) error {
	n.r.Devices = slices.Clone(n.r.Devices)
	for _, at := range n.r.dynamicDevices()[gpu] {
		if m := *n.r.Devices[at].MIG; which(&m) {
			if m.Created, m.GI = made, id; !made {
				m.UUID = ""
			}
			n.r.Devices[at].MIG = &m
		}
	}
	err := n.claims.store.write(*n.r)
	n.claims.setRecord(*n.r)
	return err
}

// change divides a GPU for a claim into the instances returned by wanted, in the steps of
// a layout change. A GPU without MIG mode has no instances.
func (c *Claims) change(ctx context.Context, r *record, uuid string,
	wanted func(layout.GPU) ([]inventory.GPUInstance, error)) error {
	if err := c.mayChange(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	g, err := c.layoutOf(ctx, uuid)
	if err != nil {
		return err
	}
	instances, err := wanted(g)
	if err != nil || g.Mode != inventory.MIGEnabled && len(instances) == 0 {
		return err
	}
	if err := c.checkMode(ctx, g, inventory.MIGEnabled, r.switchesMIG(uuid)); err != nil {
		return err
	}
	change := layout.Restore(g, inventory.MIGEnabled, instances)
	if change.Reason != "" {
		return errors.New(change.Reason)
	}
	return c.applySteps(ctx, recordingDriver{c.options.Driver, c, r}, change)
}

// release stops the control daemons of an unprepared claim and destroys its MIG devices.
// It reports whether the record can be removed; otherwise the record stays as released.
// The caller has the lock of the claim.
func (c *Claims) release(ctx context.Context, locks *heldLocks, r record) (done bool, err error) {
	if made := len(r.dynamicDevices()) > 0; made {
		if err := locks.gpus(ctx, r.gpus()); err != nil {
			return false, causedError{CauseLate, err}
		}
	} else if !c.hasDaemons(r) {
		return true, nil
	}
	var noted error
	if !r.Released && !r.beforeRestart(c.options.BootID) {
		r.Released = true
		noted = c.store.write(r)
		c.setRecord(r)
	}
	if !r.Destroyed {
		if err = c.endMPS(ctx, locks, r); err == nil {
			err = c.destroy(ctx, r, recordMIG.isOwn)
		}
	}
	if err == nil {
		if err = c.disableUnusedMIG(ctx, r); err == nil {
			return true, nil
		}
		if !r.Destroyed {
			r.Destroyed, noted = true, nil
			if problem := c.store.write(r); problem != nil { // the file is written later
				klog.FromContext(ctx).V(2).Info("Cannot note that a GPU instance is destroyed",
					"claim", r.String(), "reason",
					problem.Error())
			}
			c.setRecord(r)
		}
	}
	c.setReleaseProblem(r, err)
	switch {
	case errors.Is(err, inventory.ErrInUse) && !r.Destroyed:
		return false, fail(CauseInUse, "a MIG device of the claim is still in use: %w", err)
	case noted != nil:
		return false, noted
	}
	klog.FromContext(ctx).V(2).Info("Devices of an unprepared claim will be released later",
		"claim", klog.KRef(r.Namespace, r.Name), "uid", r.UID, "reason", err.Error())
	return false, nil
}

// reclaim removes the remains of an unprepared claim before the claim is prepared again.
// If only the MIG mode of a GPU remains, its record gets another UID, so that the claim
// waits no longer than other claims. The caller has the lock of the claim.
func (c *Claims) reclaim(ctx context.Context, locks *heldLocks, r record) error {
	const undone = "the claim's earlier devices are not released yet: "
	gone, err := c.remove(ctx, locks, r)
	if gone || err != nil {
		if err != nil {
			err = fail(CauseNotReady, undone+"%w", err)
		}
		return err
	}
	own := r.UID
	c.mu.Lock()
	r, why := c.records[own], c.releaseProblem[own]
	c.mu.Unlock()
	if !r.Destroyed {
		return fail(CauseNotReady, undone+"%s", why)
	}
	r.UID = fmt.Sprintf("%s-%d", own, r.Prepared.UnixNano())
	if err := c.store.write(r); err != nil {
		return err
	}
	c.setRecord(r)
	c.setReleaseProblem(r, errors.New(why))
	if err := c.store.remove(own); err != nil {
		return err
	}
	c.deleteRecord(own)
	return nil
}

// releasePending is the release problem of a claim before the first attempt to release its
// devices.
const releasePending = "the release is in progress"

// setReleaseProblem publishes why devices of an unprepared claim are not released yet.
func (c *Claims) setReleaseProblem(r record, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseProblem[r.UID] = why.Error()
	c.publishLocked()
}

// retryReleases retries failed releases. The claims are handled concurrently.
func (c *Claims) retryReleases(ctx context.Context) {
	var tries sync.WaitGroup
	for uid, r := range c.all() {
		if !r.Released {
			continue
		}
		tries.Go(func() {
			if err := c.unprepare(ctx, uid, r.Namespace, r.Name,
				func(now record) bool { return now.Released }); err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot release the devices of an unprepared claim",
					"uid", uid, "reason",
					err.Error())
			}
		})
	}
	tries.Wait()
}
