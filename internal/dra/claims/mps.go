package claims

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The GPUs of a claim with MPS share one control daemon. Each MIG device has its own
// daemon, because CUDA uses one MIG device at a time. A daemon is started after the record
// of its claim is written, and has stopped before the record is removed. If the disk of
// the daemons hangs, the records therefore tell where a daemon may be, and a daemon
// without a record can be stopped. The daemon of a MIG device created for the claim starts
// after the device exists, and has stopped before the device is destroyed.
//
// All claims with MPS shares of a GPU use one daemon, because an MPS server uses a GPU
// exclusively. Environment variables then set the limits for each client. Starting,
// stopping or checking the need for such a daemon requires the lock of the GPU.

// ControlDaemons runs MPS control daemons for claims, by daemon ID.
type ControlDaemons interface {
	// Start starts a daemon and waits until the daemon serves clients. It returns at once
	// for a daemon that already serves clients.
	Start(ctx context.Context, id string, wanted mps.ClaimDaemon) error
	// Stop tells a daemon to stop; End also waits until the daemon has stopped.
	Stop(id string) error
	End(ctx context.Context, id string) error
	// Problems returns why daemons do not serve clients. Daemons without a problem are
	// omitted.
	Problems(ids ...string) map[string]string
	// All returns the device UUIDs of all daemons that may exist.
	All() (map[string][]string, error)
}

// mpsPatience is how long a claim may wait for control daemons. The kubelet retries.
const mpsPatience = 20 * time.Second

// A recordMPS is the control daemon of a device.
type recordMPS struct {
	ID         string `json:"id"`
	Percentage int    `json:"activeThreadPercentage,omitempty"`
	Memory     int64  `json:"memoryLimit,omitempty"`
	MultiUser  bool   `json:"multiUser,omitempty"`
	// Shared says that all shares of the GPU use the daemon, and that the limits apply to
	// the clients of this claim.
	Shared bool `json:"shared,omitempty"`
}

// sharedDaemonPrefix begins the ID of the daemon for all shares of a GPU; the UUID of the
// GPU follows. Claim UIDs never contain a dot.
const sharedDaemonPrefix = "gpu."

// env returns the limits of a client of a shared daemon. Such a daemon has one GPU.
func (m recordMPS) env() (all []string) {
	if !m.Shared {
		return nil
	}
	if m.Percentage > 0 {
		all = append(all, fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", m.Percentage))
	}
	if m.Memory > 0 {
		all = append(all, fmt.Sprintf("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", m.Memory>>20))
	}
	return all
}

// shareByMPS assigns control daemons to the devices of a claim whose configuration selects
// MPS.
func shareByMPS(uid string, devices []recordDevice, chosen []*claimConfig) error {
	first := -1 // the first whole GPU or share of a GPU
	members := map[*claimConfig][]int{}
	for i, c := range chosen {
		if c == nil || c.Strategy != dra.MPS || devices[i].AdminAccess {
			continue
		}
		d := &devices[i]
		d.MPS = &recordMPS{ID: uid + "-" + strconv.Itoa(i), Percentage: c.MPS.Percentage, Memory: c.MPS.Memory,
			MultiUser: c.MPS.MultiUser}
		if d.isShare() && d.MIG != nil {
			return fail(CauseConfig, "sharing.strategy: MPS is not supported for shares of MIG devices; use %s",
				dra.TimeSlicing)
		}
		if d.isShare() {
			d.MPS.ID, d.MPS.Shared = sharedDaemonPrefix+d.GPU, true
		}
		members[c] = append(members[c], i)
		if d.MIG != nil {
			continue
		}
		if first < 0 {
			first = i
		}
		of := devices[first]
		if of.isShare() || d.isShare() {
			if d.MPS.ID != of.MPS.ID {
				return fail(CauseConfig, "sharing.strategy: MPS is not supported for shares of several GPUs in one "+
					"claim: the requests %s and %s have %s and %s, and a process can be a client of one MPS control "+
					"daemon",
					of.Request, d.Request, of.Device, d.Device)
			}
			continue
		}
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
				return fail(CauseConfig, "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit.%s: the claim has "+
					"no such device",
					key)
			}
			devices[indices[n]].MPS.Memory = limit
		}
	}
	for _, d := range devices {
		limit := cmp.Or(d.Share, d.equal.memory)
		if d.MPS != nil && limit > 0 && (d.MPS.Memory == 0 || d.MPS.Memory > limit) {
			d.MPS.Memory = limit
		}
		if d.MPS != nil && d.MPS.Percentage == 0 {
			d.MPS.Percentage = int(d.equal.threads)
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
		if d.MPS.Shared {
			all[d.MPS.ID] = mps.ClaimDaemon{Devices: []mps.ClaimDevice{{UUID: d.GPU}}, MultiUser: true, Exclusive: true,
				Shared: true}
			continue
		}
		wanted := all[d.MPS.ID]
		wanted.Percentage, wanted.MultiUser, wanted.Exclusive = d.MPS.Percentage, d.MPS.MultiUser, d.MIG == nil
		wanted.Devices = append(wanted.Devices, mps.ClaimDevice{UUID: d.uuid(), Memory: d.MPS.Memory})
		all[d.MPS.ID] = wanted
	}
	return all
}

// startMPS starts the control daemons of a claim, and stops daemons of earlier claims on
// its devices.
func (c *Claims) startMPS(ctx context.Context, locks *heldLocks, r record) error {
	m, wanted := c.options.MPS, r.daemons()
	if m == nil {
		if len(wanted) > 0 {
			return fail(CauseConfig, "%s", noMPS)
		}
		return nil
	}
	records := c.all()
	there, err := m.All()
	if err != nil { // the disk does not respond
		there = daemonsInRecords(records)
	}
	if len(wanted)+len(there) == 0 {
		return nil
	}
	if err := locks.gpus(ctx, r.gpus()); err != nil {
		return causedError{CauseLate, err}
	}
	if err := c.mayChange(); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, mpsPatience)
	defer cancel()
	needed := neededDaemons(c.all(), c.options.BootID)
	for id, uuids := range there {
		ours := func(d recordDevice) bool { return !d.AdminAccess && slices.Contains(uuids, d.uuid()) }
		if needed[id] || !slices.ContainsFunc(r.Devices, ours) {
			continue
		}
		c.store.step()
		if err := m.End(waiting, id); err != nil {
			return causedError{CauseDriver, err}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		c.store.step()
		if err := m.Start(waiting, id, wanted[id]); err != nil {
			return fail(CauseDriver, "the MPS control daemon of the claim does not serve clients: %w", err)
		}
		c.noteServing(id)
		c.store.step()
	}
	return nil
}

// daemonsInRecords returns the device UUIDs of all control daemons in the records, by
// daemon ID.
func daemonsInRecords(records map[string]record) map[string][]string {
	all := map[string][]string{}
	for _, r := range records {
		for id, daemon := range r.daemons() {
			for _, d := range daemon.Devices {
				all[id] = append(all[id], d.UUID)
			}
		}
	}
	return all
}

// noteServing notes that a control daemon serves clients.
func (c *Claims) noteServing(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.servedCount++
	c.mpsProblem = maps.Clone(c.mpsProblem)
	delete(c.mpsProblem, id)
	c.publishLocked()
}

// checkDaemons publishes the problems of the control daemons of claims. It holds no lock
// while waiting for the disk.
func (c *Claims) checkDaemons() {
	for c.options.MPS != nil {
		c.mu.Lock()
		before, records := c.servedCount, c.records
		c.mu.Unlock()
		var ids []string
		for id, needed := range neededDaemons(records, c.options.BootID) {
			if needed {
				ids = append(ids, id)
			}
		}
		var problems map[string]string
		if len(ids) > 0 {
			problems = c.options.MPS.Problems(ids...)
		}
		c.mu.Lock()
		same := c.servedCount == before
		if same {
			c.mpsProblem = problems
			c.publishLocked()
		}
		c.mu.Unlock()
		if same {
			return
		}
	}
}

// noMPS is the error of a claim that needs MPS on a node without MPS.
const noMPS = "sharing.strategy: MPS needs mps-control-daemon on the node, and its directory (--mps-root); use " +
	string(dra.TimeSlicing)

// neededDaemons returns all control daemons in the records, by ID, and whether a claim
// needs them.
func neededDaemons(records map[string]record, boot string) map[string]bool {
	needed := map[string]bool{}
	for _, r := range records {
		for id := range r.daemons() {
			needed[id] = needed[id] || !r.beforeRestart(boot) && !r.Released
		}
	}
	return needed
}

// endMPS waits until the control daemons of this claim alone have stopped. The record is
// released already. The caller has the lock of the claim.
func (c *Claims) endMPS(ctx context.Context, locks *heldLocks, r record) error {
	if !c.hasDaemons(r) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, mpsPatience)
	defer cancel()
	for id, daemon := range r.daemons() {
		needed := func() bool { return neededDaemons(c.all(), c.options.BootID)[id] }
		if daemon.Shared && !needed() { // a daemon in use needs no lock
			if err := locks.gpus(ctx, r.gpus()); err != nil {
				return err
			}
		}
		if needed() {
			continue
		}
		c.store.step()
		if err := c.options.MPS.End(ctx, id); err != nil {
			return err
		}
		c.store.step()
	}
	return nil
}

// hasDaemons reports whether a claim may have control daemons. A restart of the node stops
// all daemons.
func (c *Claims) hasDaemons(r record) bool {
	return c.options.MPS != nil && len(r.daemons()) > 0 && !r.beforeRestart(c.options.BootID)
}

// sweepMPS stops all control daemons that no claim needs.
func (c *Claims) sweepMPS(ctx context.Context) {
	if c.options.MPS == nil {
		return
	}
	there, err := c.options.MPS.All()
	for id := range there {
		err = c.sweepDaemon(ctx, id)
		if err != nil && ctx.Err() == nil {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("Cannot stop MPS control daemons that no claim needs", "reason", err.Error())
	}
}

// sweepDaemon stops a control daemon if no claim needs it.
func (c *Claims) sweepDaemon(ctx context.Context, id string) error {
	locks := c.locks.beginBriefly()
	defer locks.end()
	if gpu, shared := strings.CutPrefix(id, sharedDaemonPrefix); shared {
		if err := locks.gpus(ctx, []string{gpu}); err != nil {
			return err
		}
		if neededDaemons(c.all(), c.options.BootID)[id] {
			return nil
		}
		return c.options.MPS.Stop(id)
	}
	uid := id[:max(strings.LastIndex(id, "-"), 0)]
	if err := locks.claim(ctx, uid); err != nil {
		return err
	}
	r, found := c.all()[uid]
	if _, needed := r.daemons()[id]; found && needed && !r.Released && !r.beforeRestart(c.options.BootID) {
		return nil
	}
	return c.options.MPS.Stop(id)
}

// mpsProblemLocked returns the last known problem of the device's control daemon; empty
// without a problem or daemon.
func (c *Claims) mpsProblemLocked(r record, d recordDevice) string {
	if d.MPS == nil || r.beforeRestart(c.options.BootID) || r.Released || d.uuid() == "" {
		return ""
	}
	if c.options.MPS == nil {
		return noMPS
	}
	return c.mpsProblem[d.MPS.ID]
}
