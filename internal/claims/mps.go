package claims

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

// The GPUs of a claim that are shared by MPS have one control daemon; a MIG device has one of its own, because CUDA uses one MIG device
// at a time. A daemon is asked for after the record of its claim is written, and given up after that is removed. So a daemon that no record
// needs is one that can be ended.

// ControlDaemons has control daemons of CUDA's Multi-Process Service run for claims, by IDs.
type ControlDaemons interface {
	// Start has a daemon started, and waits until it serves clients. It answers at once for one that does.
	Start(ctx context.Context, id string, wanted mps.ClaimDaemon) error
	// Stop has a daemon ended; End waits until it is.
	Stop(id string) error
	End(ctx context.Context, id string) error
	// Problem returns why a daemon does not serve clients; empty if it does.
	Problem(id string) string
	// All returns the UUIDs of the devices of all daemons that may be there.
	All() (map[string][]string, error)
}

// mpsPatience is how long a claim may wait for control daemons. Kubelet asks again.
const mpsPatience = 20 * time.Second

// A recordMPS is the control daemon of a device.
type recordMPS struct {
	ID         string `json:"id"`
	Percentage int    `json:"activeThreadPercentage,omitempty"`
	Memory     int64  `json:"memoryLimit,omitempty"`
	MultiUser  bool   `json:"multiUser,omitempty"`
}

// shareByMPS gives the devices of a claim for which a configuration wants MPS their control daemons.
func shareByMPS(uid string, devices []recordDevice, chosen []*claimConfig) error {
	first := -1 // of the GPUs
	members := map[*claimConfig][]int{}
	for i, c := range chosen {
		if c == nil || c.Strategy != dra.MPS || devices[i].AdminAccess {
			continue
		}
		d := &devices[i]
		switch {
		case d.ShareID != "": // two daemons cannot have one GPU for themselves
			return fail(CauseConfig, "sharing.strategy: MPS is not supported for a share of the device %s; use %s", d.Device, dra.TimeSlicing)
		case d.uuid() == "": // its daemon would have to end before it can be destroyed
			return fail(CauseConfig, "sharing.strategy: MPS is not supported for the device %s, which is made for the claim; use %s",
				d.Device, dra.TimeSlicing)
		}
		d.MPS = &recordMPS{ID: uid + "-" + strconv.Itoa(i), Memory: c.MPS.Memory, MultiUser: c.MPS.MultiUser}
		if p := c.MPS.Percentage; p != nil {
			if d.MPS.Percentage = *p; *p == 0 {
				return fail(CauseConfig, "sharing.mpsConfig.defaultActiveThreadPercentage: 0 leaves clients nothing; use 1 to 100")
			}
		}
		members[c] = append(members[c], i)
		if d.MIG != nil {
			continue
		}
		if first < 0 {
			first = i
		}
		of := devices[first]
		if d.MPS.ID = of.MPS.ID; d.MPS.Percentage != of.MPS.Percentage || d.MPS.MultiUser != of.MPS.MultiUser {
			return fail(CauseConfig, "sharing.mpsConfig: the requests %s and %s have different settings; "+
				"the GPUs of a claim have one MPS control daemon", of.Request, d.Request)
		}
	}
	for c, indices := range members {
		for key, limit := range c.MPS.MemoryOf {
			n, err := strconv.Atoi(key)
			if err != nil {
				n = slices.IndexFunc(indices, func(i int) bool { return devices[i].uuid() == key })
			}
			if n < 0 || n >= len(indices) {
				return fail(CauseConfig, "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.%s: the claim has no such device", key)
			}
			devices[indices[n]].MPS.Memory = limit
		}
	}
	return nil
}

// daemons returns the control daemons of a claim, by ID.
func (r record) daemons() map[string]mps.ClaimDaemon {
	all := map[string]mps.ClaimDaemon{}
	for _, d := range r.Devices {
		if d.MPS == nil {
			continue
		}
		wanted := all[d.MPS.ID]
		wanted.Percentage, wanted.MultiUser, wanted.Exclusive = d.MPS.Percentage, d.MPS.MultiUser, d.MIG == nil
		wanted.Devices = append(wanted.Devices, mps.ClaimDevice{UUID: d.uuid(), Memory: d.MPS.Memory})
		all[d.MPS.ID] = wanted
	}
	return all
}

// startMPS has the control daemons of a claim serve clients, and those of earlier claims on its devices ended.
func (c *Claims) startMPS(ctx context.Context, t *turn, r record) error {
	m, wanted := c.options.MPS, r.daemons()
	if m == nil {
		if len(wanted) > 0 {
			return fail(CauseConfig, "%s", noMPS)
		}
		return nil
	}
	there, err := m.All()
	if err != nil {
		return failure{CauseDriver, err}
	}
	if len(wanted)+len(there) == 0 {
		return nil
	}
	if err := t.gpus(ctx, r.gpus()); err != nil {
		return failure{CauseLate, err}
	}
	records, _, err := c.store.all()
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, mpsPatience)
	defer cancel()
	needed := neededDaemons(records, c.options.BootID)
	for id, uuids := range there {
		ours := func(d recordDevice) bool { return !d.AdminAccess && slices.Contains(uuids, d.uuid()) }
		if needed[id] || !slices.ContainsFunc(r.Devices, ours) {
			continue
		}
		c.store.step()
		if err := m.End(waiting, id); err != nil {
			return failure{CauseDriver, err}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		c.store.step()
		if err := m.Start(waiting, id, wanted[id]); err != nil {
			return fail(CauseDriver, "the MPS control daemon of the claim does not serve: %w", err)
		}
		c.store.step()
	}
	if len(wanted) > 0 {
		c.show(r.UID, &r) // nothing is wrong with them any more
	}
	return nil
}

// noMPS is why a claim cannot be shared by MPS.
const noMPS = "sharing.strategy: MPS needs mps-control-daemon on the node, and its directory (--mps-root); use " + string(dra.TimeSlicing)

// neededDaemons are the IDs of the daemons that claims need.
func neededDaemons(records map[string]record, boot string) map[string]bool {
	needed := map[string]bool{}
	for _, r := range records {
		for id := range r.daemons() {
			needed[id] = !r.former(boot)
		}
	}
	return needed
}

// stopMPS has the control daemons of a claim that was given back ended. It never fails: what is left is ended later.
func (c *Claims) stopMPS(ctx context.Context, r record) {
	for id := range r.daemons() {
		if c.options.MPS == nil {
			return
		}
		if err := c.options.MPS.Stop(id); err != nil {
			klog.FromContext(ctx).Info("An MPS control daemon is ended later", "claim", klog.KRef(r.Namespace, r.Name), "reason", err.Error())
		}
		c.store.step()
	}
}

// sweepMPS has all control daemons ended that no claim needs.
func (c *Claims) sweepMPS(ctx context.Context) {
	if c.options.MPS == nil {
		return
	}
	there, err := c.options.MPS.All()
	for id := range there {
		uid := id[:max(strings.LastIndex(id, "-"), 0)]
		err = c.sweepDaemon(ctx, uid, id)
		if err != nil && ctx.Err() == nil {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("Cannot end MPS control daemons that no claim needs", "reason", err.Error())
	}
}

func (c *Claims) sweepDaemon(ctx context.Context, uid, id string) error {
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	t, err := begin(c.options.StateDir, c.options.Clock)
	if err != nil {
		return err
	}
	defer t.end()
	if err := t.claim(ctx, uid); err != nil {
		return err
	}
	r, found := c.store.readOrRestore(ctx, uid)
	if _, needed := r.daemons()[id]; found && needed && !r.former(c.options.BootID) {
		return nil
	}
	return c.options.MPS.Stop(id)
}

// problem returns what is wrong with the control daemon of a device; empty if nothing is, and for a device without one.
func (c *Claims) problem(r record, d recordDevice) string {
	if d.MPS == nil || r.former(c.options.BootID) {
		return ""
	}
	if c.options.MPS == nil {
		return noMPS
	}
	return c.options.MPS.Problem(d.MPS.ID)
}
