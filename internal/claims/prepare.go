package claims

import (
	"bytes"
	"context"
	"os"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

// Prepare has the runtime know what containers of the claim are given, and returns by which names. The error is a sentence for the
// Event of the pod. A claim that is prepared already is answered in the same way, whatever has become of its devices: its containers
// have them.
func (c *Claims) Prepare(ctx context.Context, claim dra.Claim) (prepared []dra.Prepared, err error) {
	began := c.options.Clock.Now()
	defer func() { c.options.Metrics.Prepared(c.options.Clock.Since(began), string(causeOf(err))) }()
	if !validUID(claim.UID) {
		return nil, fail(CauseMalformed, "%q is not the UID of a claim", claim.UID)
	}
	before := c.store.gone(claim.UID)
	select {
	case <-c.started:
	case <-ctx.Done():
		return nil, fail(CauseNotReady, "the records of claims are not read yet: %w", ctx.Err())
	}
	t, err := begin(c.options.StateDir, c.options.Clock)
	if err != nil {
		return nil, err
	}
	defer t.end()
	if err := t.claim(ctx, claim.UID); err != nil {
		return nil, failure{CauseLate, err}
	}
	r, found := c.store.readOrRestore(ctx, claim.UID)
	if found && r.Released {
		if gone, err := c.giveBack(ctx, t, r); !gone {
			return nil, fail(CauseNotReady, "the MIG devices that the claim had before are not destroyed yet: %s", errorOrNone(err))
		}
		r, found = record{}, false
	}
	earlier := found && !r.former(c.options.BootID)
	if !earlier {
		if r, err = c.record(ctx, t, claim, r, before); err != nil {
			return nil, err
		}
	}
	if r.intent() {
		if r, err = c.makeDevices(ctx, t, r, earlier); err != nil {
			return nil, err
		}
	}
	if err := c.setSlices(ctx, t, r); err != nil {
		return nil, err
	}
	if err := c.startMPS(ctx, t, r); err != nil {
		return nil, err
	}
	if err := c.writeSpec(r); err != nil {
		return nil, err
	}
	for _, d := range r.Devices {
		prepared = append(prepared, dra.Prepared{
			Requests: []string{d.request()}, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID,
			CDIDeviceIDs: []string{cdi.ClaimDevice(r.UID, r.cdiName(d))},
		})
	}
	return prepared, nil
}

// record decides whether a claim may have its devices, and records that it has. The caller has the lock of the claim.
func (c *Claims) record(ctx context.Context, t *turn, claim dra.Claim, former record, before string) (record, error) {
	n := node{
		pool: c.options.Pools.Value(), snapshot: c.options.Snapshots.Value(), slices: c.options.SetTimeSlice != nil, mps: c.options.MPS != nil,
	}
	n.noUVM = c.waitsForUVM(n.snapshot)
	devices, err := n.resolve(claim)
	if err != nil {
		return record{}, err
	}
	r := record{
		Version: recordVersion, Boot: c.options.BootID, UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name,
		Prepared: c.options.Clock.Now().UTC(), Devices: devices,
	}
	if former.UID != "" {
		r.inherit(former)
	}
	given := c.given.Load()
	for _, d := range r.Devices {
		if given == nil || d.uuid() != "" && !given.Has(d.uuid()) {
			return record{}, fail(CauseNotReady, "the files of the driver that a container is given with the device %s are not known yet", d.Device)
		}
	}
	var held []kubelet.HeldDevice
	if c.options.Held != nil {
		if held, err = c.options.Held(ctx); err != nil {
			return record{}, fail(CauseNotReady, "it is not known whether a pod has the devices by the device plugin: %w", err)
		}
	}
	if err := t.gpus(ctx, r.gpus()); err != nil {
		return record{}, failure{CauseLate, err}
	}
	records, _, err := c.store.all()
	if err != nil {
		return record{}, err
	}
	if err := n.free(r, records, c.options.BootID, held); err != nil {
		return record{}, err
	}
	if err := c.room(ctx, r); err != nil {
		return record{}, err
	}
	if c.store.gone(claim.UID) != before {
		return record{}, fail(CauseLate, "the claim was unprepared while it was being prepared")
	}
	if err := ctx.Err(); err != nil {
		return record{}, fail(CauseLate, "kubelet does not wait for the claim any more: %w", err)
	}
	if err := c.store.write(r); err != nil {
		return record{}, err
	}
	c.show(r.UID, &r)
	return r, nil
}

// writeSpec writes the CDI spec of a claim if it is not as it should be. Where it is not known how it should be, it stays. The caller
// has the lock of the claim.
func (c *Claims) writeSpec(r record) error {
	path := cdi.ClaimFile(c.options.CDIDir, r.UID)
	devices := map[string]cdi.ClaimedDevice{}
	given := c.given.Load()
	unknown := given == nil
	for _, d := range r.Devices {
		claimed := cdi.ClaimedDevice{UUID: d.uuid()}
		if d.MPS != nil {
			claimed.MPS, claimed.Env = mps.ClaimDir(d.MPS.ID), d.MPS.env()
		}
		devices[r.cdiName(d)] = claimed
		unknown = unknown || !given.Has(d.uuid())
	}
	if unknown {
		if _, err := os.Stat(path); err != nil {
			return fail(CauseNotReady, "what containers of the claim are given is not known yet: %w", err)
		}
		return nil
	}
	note, err := encode(r)
	if err != nil {
		return err
	}
	content, err := given.Claim(r.UID, devices, note)
	if err != nil {
		return err
	}
	if there, err := files.Read(path, maxSpec); err == nil && bytes.Equal(there, content) {
		return nil
	}
	c.store.step()
	defer c.store.step()
	return cdi.WriteClaim(c.options.CDIDir, r.UID, content)
}

// maxSpec is the largest spec of a claim that is compared, in bytes; a larger one is replaced.
const maxSpec = 1 << 20

// Unprepare gives a claim back. It needs no driver, no API server and no Run. A claim that is not known is no error.
func (c *Claims) Unprepare(ctx context.Context, uid, namespace, name string) (err error) {
	began := c.options.Clock.Now()
	defer func() { c.options.Metrics.Unprepared(c.options.Clock.Since(began), string(causeOf(err))) }()
	if !validUID(uid) {
		return fail(CauseMalformed, "%q is not the UID of a claim", uid)
	}
	t, err := begin(c.options.StateDir, c.options.Clock)
	if err != nil {
		return err
	}
	defer t.end()
	if err := t.claim(ctx, uid); err != nil {
		return failure{CauseLate, err}
	}
	buried := c.store.bury(uid)
	r, found, _ := c.store.read(uid) // of one that cannot be read nothing is known
	if !found {
		r, _ = c.store.copied(uid)
	}
	gone, err := c.giveBack(ctx, t, r)
	if err != nil {
		return err
	}
	if err := files.Remove(cdi.ClaimFile(c.options.CDIDir, uid)); err != nil {
		return err
	}
	c.store.step()
	if gone {
		if err := c.store.remove(uid); err != nil {
			return err
		}
		c.show(uid, nil)
	}
	c.stopMPS(ctx, r)
	if buried != nil { // a full disk must not keep a pod from ending, and a late Prepare could not write its record there either
		klog.FromContext(ctx).Error(buried, "Cannot note that a claim was given back", "uid", uid)
	}
	if t.end(); r.slices() {
		c.resetSlices(ctx)
	}
	c.leaveDaemons(ctx, r)
	klog.FromContext(ctx).V(2).Info("Unprepared claim", "claim", klog.KRef(namespace, name), "uid", uid)
	return nil
}
