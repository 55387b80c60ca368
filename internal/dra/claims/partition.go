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

// MIG devices can be made for claims. The rules:
//
//   - Before anything is made, the record says where: it is an intent as long as it lacks the UUID. Only under the locks of claim and
//     GPU are MIG devices made and destroyed, and only while nothing is at their places may an intent be written.
//   - A GPU instance is the claim's if the call that made it has succeeded, and the record says so with its ID: from before the instance
//     has a compute instance until after it has none. Earlier versions say so by the UUID alone.
//   - What is at the place of an intent otherwise was made by a call that was killed or gave no answer, if it has no compute instance:
//     nobody can use it. It is destroyed before anything is made there. With a compute instance it is another program's.
//   - What another program made is never destroyed. While there is any, nothing is made of the GPU.
//   - Before anything is destroyed, the record says so: it is released, and stays until the MIG device is gone. While that is in use, the
//     claim is not given back, and kubelet tries again. While the driver does not work, the claim is given back.

// A Divider divides GPUs. All methods return by the end of ctx.
type Divider interface {
	mig.Driver
	// Look has the monitor look now, and returns the Snapshot of that look.
	Look(ctx context.Context) (inventory.Snapshot, error)
}

// divideTimeout bounds all questions and steps for one GPU. Kubelet waits for 45 s.
const divideTimeout = 20 * time.Second

// placement returns where a MIG device lies.
func (m recordMIG) placement() inventory.MIGPlacement {
	return inventory.MIGPlacement{Profile: m.ProfileID, Start: m.Start, Size: m.Size}
}

// instance returns the GPU instance of a MIG device that is made for a claim.
func (m recordMIG) instance() inventory.GPUInstance {
	return inventory.GPUInstance{Profile: m.Profile, Start: m.Start, Size: m.Size,
		Computes: []inventory.ComputeInstance{{Slices: m.Slices}}}
}

// at reports whether a GPU instance is of the profile and at the place of the MIG device.
func (m recordMIG) isAt(i inventory.GPUInstance) bool {
	return i.Profile == m.Profile && i.Start == m.Start && i.Size == m.Size
}

// noted reports whether the record says which GPU instance was made for the claim.
func (m recordMIG) hasInstance() bool { return m.Created || m.UUID != "" }

// is reports whether a GPU instance was made for the claim, and has no compute instances that were
// not.
func (m recordMIG) isInstance(i inventory.GPUInstance) bool {
	return m.hasInstance() && m.GI == i.ID && m.isAt(i) && (len(i.Computes) == 0 ||
		len(i.Computes) == 1 && i.Computes[0].Slices == m.Slices)
}

// begun reports whether a GPU instance was made by a call that was killed or gave no answer. It has
// no compute instance, so nobody uses it.
func (m recordMIG) isUnfinished(i inventory.GPUInstance) bool {
	return !m.hasInstance() && m.isAt(i) && len(i.Computes) == 0
}

// own reports whether a GPU instance is to be destroyed with the claim.
func (m recordMIG) isOwn(i inventory.GPUInstance) bool { return m.isInstance(i) || m.isUnfinished(i) }

// free returns which GPU instance is in the way of a device that is to be made.
func (d recordDevice) checkFree(instances []inventory.GPUInstance) error {
	for _, i := range instances {
		if m := d.MIG; !m.isInstance(i) && i.Start < m.Start+m.Size && m.Start < i.Start+i.Size {
			return d.blockedBy(i)
		}
	}
	return nil
}

// blockedBy is the error of a GPU instance that is in the way of a device.
func (d recordDevice) blockedBy(i inventory.GPUInstance) error {
	return fail(CauseInUse, "GPU instance %d (%s at memory slice %d) of GPU %s is in the way of %s, and was not made for a claim",
		i.ID, i.Profile, i.Start, d.GPU, d.Device)
}

// made returns the positions of the devices that are made for the claim, by the UUID of the GPU.
func (r record) dynamicDevices() map[string][]int {
	all := map[string][]int{}
	for i, d := range r.Devices {
		if d.MIG != nil && d.MIG.Dynamic {
			all[d.GPU] = append(all[d.GPU], i)
		}
	}
	return all
}

// intent reports whether devices of the claim are to be made still.
func (r record) incomplete() bool {
	return slices.ContainsFunc(r.Devices, func(d recordDevice) bool {
		return d.DisableMIG || d.MIG != nil && d.MIG.Dynamic && d.MIG.UUID == ""
	})
}

// partition is device for a device that is made for the claim.
func (n node) partition(d recordDevice, published dra.Device, result dra.Result) (recordDevice, error) {
	p := published.Partition
	g, found := n.snapshot.GPU(published.GPU())
	if !found || g.MIG != inventory.MIGEnabled && !p.Switched {
		return d, fail(CauseDevice, "the GPU of the device %s (%s) is not there any more, or not in MIG mode", result.Device,
			published.GPU())
	}
	name, health := fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID), g.Fitness()
	d.GPU, d.BDF = g.UUID, g.BDF
	d.MIG = &recordMIG{
		Profile: p.Profile, ProfileID: p.Placement.Profile, Start: p.Placement.Start, Size: p.Placement.Size, Slices: p.Slices, Dynamic: true,
		Switched: p.Switched,
	}
	for _, m := range g.MIGDevices {
		if result.AdminAccess && m.Placement == p.Placement && m.Attributes.CISlices == m.Attributes.GISlices {
			d.MIG.Dynamic, d.MIG.Switched, d.MIG.UUID, d.MIG.GI, d.MIG.CI = false, false, m.UUID, m.GI, m.CI
			health = inventory.Worst(health, m.Health)
		}
	}
	if result.AdminAccess && d.MIG.UUID == "" {
		return d, fail(CauseDevice, "the device %s is not there, and adminAccess makes none", result.Device)
	}
	return d, checkHealth(name, health, published, result)
}

// divided returns how a GPU is divided, if MIG devices can be made and destroyed there.
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

// room returns what is in the way of the devices that are to be made for a claim, and otherwise its
// record. The caller has the locks of its GPUs.
func (c *Claims) checkSpace(ctx context.Context, r record) (record, error) {
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	for uuid, positions := range r.dynamicDevices() {
		g, err := c.layoutOf(ctx, uuid)
		if err != nil {
			return r, fail(CauseDriver, "it is not known how GPU %s is divided: %w", uuid, err)
		}
		if g.Mode != inventory.MIGEnabled && !r.switches(uuid) {
			return r, fail(CauseDevice, "GPU %s is not in MIG mode any more", uuid)
		}
		if err := c.inMode(ctx, g, inventory.MIGEnabled, r.switches(uuid)); err != nil {
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

// makeDevices makes the devices that a record intends, and returns the record with them. It keeps
// what an earlier call has made, and destroys what that call has only begun. The caller has the
// lock of the claim.
func (c *Claims) makeDevices(ctx context.Context, locks *heldLocks, r record, earlier bool) (record, error) {
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return r, causedError{CauseLate, err}
	}
	if earlier {
		if err := c.destroy(ctx, r, recordMIG.isUnfinished); err != nil {
			return r, fail(CauseDriver, "what an earlier call has begun to make cannot be destroyed: %w", err)
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
			return r, c.rollBack(ctx, r, fmt.Errorf("the MIG devices of the claim cannot be made: %w", err))
		}
	}
	for _, d := range r.Devices {
		if !d.DisableMIG {
			continue
		}
		if err := c.disableMIG(ctx, d.GPU); err != nil {
			return r, c.rollBack(ctx, r, fmt.Errorf("the GPU cannot be given as a whole: %w", err))
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

// abandon takes back what was made for a claim before a step failed, and returns why the claim is
// not prepared. The caller has the locks of the claim and its GPUs.
func (c *Claims) rollBack(ctx context.Context, r record, err error) error {
	late := ctx.Err() != nil || errors.Is(err, inventory.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded)
	if err = (causedError{refusal(err), err}); late {
		return err // a step may still happen: the next call goes on from there
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

// find waits until the node shows the devices that were made for a claim, and returns the record
// with their UUIDs.
func (c *Claims) awaitDevices(ctx context.Context, r record) (record, error) {
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	r.Devices = slices.Clone(r.Devices)
	s, err := c.options.Driver.Look(ctx)
	for {
		now, looked := c.options.Snapshots.Latest()
		_, renewed := c.editsChanged.Latest()
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
				return m.GI == d.MIG.GI && m.Placement == d.MIG.placement() && m.Attributes.CISlices == m.Attributes.GISlices
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
			return r, fail(CauseNotReady, "the device %s was made, and is not seen yet: %w", missing,
				errors.Join(err, ctx.Err()))
		case <-looked:
		case <-renewed:
		}
	}
}

// destroy destroys those GPU instances for which a function of the claim's MIG devices is true. The
// caller has the locks of the claim and its GPUs.
func (c *Claims) destroy(ctx context.Context, r record, which func(recordMIG, inventory.GPUInstance) bool) error {
	if r.beforeRestart(c.options.BootID) {
		return nil // the restart of the node has ended them
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

// A noting driver makes steps for a claim, and keeps its record true: a GPU instance is noted after
// it is made, and not any more before it is destroyed.
type recordingDriver struct {
	mig.Driver
	claims *Claims
	r      *record
}

func (n recordingDriver) Repartition(ctx context.Context, uuid string, step inventory.MIGStep) (int, error) {
	if step.Action == inventory.MIGDestroyInstance {
		err := n.record(uuid, func(m *recordMIG) bool { return m.GI == step.GI }, false, 0)
		if err != nil { // a full disk must not keep a pod from ending
			klog.FromContext(ctx).V(2).Info("Cannot note that a GPU instance is destroyed", "claim", n.r.String(), "reason",
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

// change divides a GPU for a claim: afterwards the GPU has the instances that wanted returns. It
// takes the same steps as a change of the layout does. A GPU without MIG mode has no instances.
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
	if err := c.inMode(ctx, g, inventory.MIGEnabled, r.switches(uuid)); err != nil {
		return err
	}
	change := layout.Restore(g, inventory.MIGEnabled, instances)
	if change.Reason != "" {
		return errors.New(change.Reason)
	}
	return c.steps(ctx, recordingDriver{c.options.Driver, c, r}, change)
}

// giveBack ends the control daemons of a claim that is given back, and destroys what was made for
// it. It reports whether the record can go; it stays, as released, where that is not done yet. The
// caller has the lock of the claim.
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
			if problem := c.store.write(r); problem != nil { // it is written later
				klog.FromContext(ctx).V(2).Info("Cannot note that a GPU instance is destroyed", "claim", r.String(), "reason",
					problem.Error())
			}
			c.setRecord(r)
		}
	}
	c.setReleaseProblem(r, err)
	switch {
	case errors.Is(err, inventory.ErrInUse) && !r.Destroyed:
		return false, fail(CauseInUse, "a MIG device of the claim is in use still: %w", err)
	case noted != nil:
		return false, noted
	}
	klog.FromContext(ctx).V(2).Info("What was made for a claim that was given back is taken back later",
		"claim", klog.KRef(r.Namespace, r.Name), "uid", r.UID, "reason", err.Error())
	return false, nil
}

// clear removes what is left of a claim that was given back and is to be prepared again. Where
// nothing but the MIG mode of a GPU is left, its record gets another UID: the claim waits for that
// no more than other claims do. The caller has the lock of the claim.
func (c *Claims) reclaim(ctx context.Context, locks *heldLocks, r record) error {
	const undone = "what was made for the claim before is there still: "
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

// takingBack is why something is left of a claim that was given back, before that was tried.
const releasePending = "it is being taken back"

// leave shows why something is left of a claim that was given back.
func (c *Claims) setReleaseProblem(r record, why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseProblem[r.UID] = why.Error()
	c.publishLocked()
}

// giveBackReleased tries again to take back what could not be taken back when a claim was given
// back. No claim waits for another one.
func (c *Claims) retryReleases(ctx context.Context) {
	var tries sync.WaitGroup
	for uid, r := range c.all() {
		if !r.Released {
			continue
		}
		tries.Go(func() {
			if err := c.unprepare(ctx, uid, r.Namespace, r.Name, func(now record) bool { return now.Released }); err != nil {
				klog.FromContext(ctx).V(2).Info("Cannot take back what was made for a claim", "uid", uid, "reason", err.Error())
			}
		})
	}
	tries.Wait()
}
