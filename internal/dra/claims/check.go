package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A Cause is the reason of a failed call, for metrics.
type Cause string

// The causes of failed calls.
const (
	CauseConfig    Cause = "configuration" // the opaque configuration of the claim or its class
	CauseDevice    Cause = "device"        // the device does not belong to this node, or is gone
	CauseHealth    Cause = "health"
	CauseInUse     Cause = "in-use"
	CauseNotReady  Cause = "not-ready" // the driver, the kubelet or this program is not ready yet
	CauseDriver    Cause = "driver"    // the driver's program for settings
	CauseLate      Cause = "late"      // the claim was unprepared meanwhile, or the caller no longer waits
	CauseDisk      Cause = "disk"
	CauseMalformed Cause = "malformed" // the call itself
)

// A causedError is an error with its Cause.
type causedError struct {
	cause Cause
	err   error
}

func (f causedError) Error() string { return f.err.Error() }
func (f causedError) Unwrap() error { return f.err }

func fail(cause Cause, format string, args ...any) error {
	return causedError{cause, fmt.Errorf(format, args...)}
}

// causeOf returns the Cause of an error; empty for nil.
func causeOf(err error) Cause {
	var f causedError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &f):
		return f.cause
	}
	return CauseDisk
}

var uidForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// validUID reports whether a UID can be part of a file name, as every UID of the API
// server can.
func validUID(uid string) bool { return len(uid) <= 128 && uidForm.MatchString(uid) }

// A node is the state of this node's devices.
type node struct {
	pool     dra.Pool
	snapshot inventory.Snapshot
	slices   bool // time slices are supported
	mps      bool // MPS control daemons are supported
	imex     bool // the node's configuration allows IMEX channels
	noUVM    bool // nvidia-uvm is missing, and expected soon

	releaseProblem map[string]string // why devices of unprepared claims are not released yet, by UID
}

// plan returns the record for a claim by the current state of the node, and the devices
// that pods hold as resources. former is the claim's earlier record, if any.
func (c *Claims) plan(ctx context.Context, claim dra.Claim, former record) (node, record, []kubelet.HeldDevice, error) {
	n := node{
		pool: c.options.Pools.Value(), snapshot: c.options.Snapshots.Value(), slices: c.options.SetTimeSlice != nil,
		mps:  c.options.MPS != nil,
		imex: c.options.Configs.Value().Edits.IMEX,
	}
	n.noUVM = c.uvmAwaited(n.snapshot)
	c.mu.Lock()
	n.releaseProblem = maps.Clone(c.releaseProblem)
	c.mu.Unlock()
	devices, err := n.resolve(claim)
	if err != nil {
		return n, record{}, nil, err
	}
	r := record{
		Version: recordVersion, Boot: c.options.BootID, Driver: recordDriver(c.options.DriverName),
		UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name,
		Prepared: time.Now().UTC(), Pods: claim.Pods, OwnerPod: claim.OwnerPod, Devices: devices,
	}
	if former.UID != "" {
		r.inherit(former)
	}
	if c.options.Configs.Value().DRA.Metadata {
		n.describe(&r, claim)
	}
	edits := c.edits.Load()
	for _, d := range r.Devices {
		if edits == nil || !n.needsMIGChange(d) && !edits.Has(d.uuid()) {
			return n, r, nil, fail(CauseNotReady, "the driver's files for containers with the device %s are not "+
				"known yet",
				d.Device)
		}
	}
	held, err := c.heldDevices(ctx, n.snapshot)
	if err != nil {
		return n, r, nil, fail(CauseNotReady, "cannot check whether a pod holds the devices through the device "+
			"plugin: %w",
			err)
	}
	return n, r, held, nil
}

// resolve returns the devices of a claim, or why the claim cannot have them.
func (n node) resolve(claim dra.Claim) ([]recordDevice, error) {
	configs, err := parseConfigs(claim.Configs)
	if err != nil {
		return nil, err
	}
	if len(claim.Results) == 0 {
		return nil, fail(CauseMalformed, "the claim has no device of the driver %s",
			cmp.Or(n.pool.Driver, dra.Driver))
	}
	if n.snapshot.Generation == 0 {
		return nil, fail(CauseNotReady, "the GPUs of the node are not known yet: the driver has not answered")
	}
	if n.pool.Name == "" { // for a short time after a start
		return nil, fail(CauseNotReady, "the devices that this node offers to claims are not known yet")
	}
	if !n.snapshot.Control.Has(inventory.NodeControl) {
		return nil, fail(CauseNotReady, "the driver's device node /dev/nvidiactl does not exist yet")
	}
	if n.noUVM {
		return nil, fail(CauseNotReady, "the driver's device node /dev/nvidia-uvm does not exist yet; CUDA needs it")
	}
	devices, chosen := make([]recordDevice, len(claim.Results)), make([]*claimConfig, len(claim.Results))
	for i, result := range claim.Results {
		if devices[i], err = n.device(result); err != nil {
			return nil, err
		}
		if chosen[i], err = n.settings(configs, &devices[i]); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(devices, func(d recordDevice) bool { return d.IMEX }) &&
		!n.snapshot.Control.Has(inventory.NodeIMEXChannel0) {
		return nil, fail(CauseNotReady, "the IMEX channel /dev/%s does not exist yet", inventory.NodeIMEXChannel0)
	}
	return devices, shareByMPS(claim.UID, devices, chosen)
}

// device returns the device of a result if the device accepts new work.
func (n node) device(result dra.Result) (recordDevice, error) {
	d := recordDevice{
		Request: result.Request, Pool: result.Pool, Device: result.Device, ShareID: result.ShareID,
		ConsumedCapacity: result.ConsumedCapacity, AdminAccess: result.AdminAccess,
		Tolerations: tolerations(result.Tolerations),
	}
	published, found := n.published(result)
	if result.ShareID != "" && !validUID(result.ShareID) {
		return d, fail(CauseMalformed, "invalid share ID %q", result.ShareID)
	}
	d.Share = result.Share(published)
	if d.ShareID != "" {
		d.SharedBy = published.SharedBy
	}
	if most := int64(published.Capacity[dra.SharesCapacity]); d.SharedBy == dra.ByCount && most > 0 {
		count := min(result.Count(), most)
		d.equal.memory, d.equal.threads = int64(published.Capacity[dra.MemoryCapacity])/most*count, 100*count/most
	}
	if !found {
		return d, fail(CauseDevice, "the device %s of pool %s is not offered to claims by this node now",
			result.Device,
			result.Pool)
	}
	if published.Partition != nil {
		return n.partition(d, published, result)
	}
	uuid := published.Attributes["uuid"].Value
	for _, g := range n.snapshot.GPUs {
		name, health := fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID), g.Fitness()
		if g.UUID != uuid {
			i := slices.IndexFunc(g.MIGDevices, func(m inventory.MIGDevice) bool { return m.UUID == uuid })
			if i < 0 {
				continue
			}
			m := g.MIGDevices[i]
			name = fmt.Sprintf("MIG device %d:%d (%s)", g.Index, m.Index, m.UUID)
			health = inventory.Worst(g.Fitness(), m.Health)
			d.MIG = &recordMIG{UUID: m.UUID, Profile: m.Profile, GI: m.GI, CI: m.CI, Start: m.Placement.Start,
				Size: m.Placement.Size}
		} else if d.DisableMIG = published.Switched && !d.AdminAccess; g.MIG == inventory.MIGEnabled && !d.DisableMIG {
			continue // the GPU was divided after its publication, or adminAccess must not change it
		}
		d.GPU, d.BDF = g.UUID, g.BDF
		return d, checkHealth(name, health, published, result)
	}
	return d, fail(CauseDevice, "the device %s (%s) no longer exists", result.Device, uuid)
}

// published returns a device of the pool.
func (n node) published(result dra.Result) (dra.Device, bool) {
	if result.Pool != n.pool.Name {
		return dra.Device{}, false
	}
	for _, slice := range n.pool.Slices {
		for _, d := range slice.Devices {
			if d.Name == result.Device {
				return d, true
			}
		}
	}
	return dra.Device{}, false
}

// checkHealth returns why a device must not get new work because of its health.
func checkHealth(name string, health inventory.Health, published dra.Device, result dra.Result) error {
	if health.Allocatable() {
		return nil
	}
	var keys []string
	for _, t := range published.Taints {
		tolerated := slices.ContainsFunc(result.Tolerations, func(by dra.Toleration) bool { return tolerates(by, t) })
		if t.Key != dra.TaintLeaving && !tolerated {
			keys = append(keys, t.Key)
		}
	}
	switch {
	case len(keys) > 0:
		return fail(CauseHealth, "%s is %s: %s; the claim does not tolerate the taint %s",
			name, health.State, health.Why(),
			strings.Join(keys, ", "))
	case len(published.Taints) == 0: // not published yet
		return fail(CauseHealth, "%s is %s: %s", name, health.State, health.Why())
	}
	return nil
}

// needsMIGChange reports whether the claim gets the device only after a MIG change of its
// GPU. Until then the container edits are unknown.
func (n node) needsMIGChange(d recordDevice) bool {
	g, _ := n.snapshot.GPU(d.GPU)
	return d.uuid() == "" || d.DisableMIG && g.MIG == inventory.MIGEnabled
}

// tolerates implements Kubernetes' rule for tolerations.
func tolerates(by dra.Toleration, t dra.Taint) bool {
	return (by.Effect == "" || by.Effect == t.Effect) && (by.Key == t.Key || by.Key == "" && by.Operator == "Exists") &&
		(by.Operator == "Exists" || (by.Operator == "Equal" || by.Operator == "") && by.Value == t.Value)
}

// A claimConfig applies to its requests, or to all requests if it names none.
type claimConfig struct {
	dra.OpaqueConfig
	dra.DeviceConfig
}

// parseConfigs parses the whole configuration of a claim, so that errors in overridden
// parts are found.
func parseConfigs(of []dra.OpaqueConfig) ([]claimConfig, error) {
	all := make([]claimConfig, len(of))
	for i, o := range of {
		parsed, problems := dra.ParseConfig(o.Parameters)
		if len(problems) > 0 {
			where := "the claim"
			if o.Source == dra.FromClass {
				where = "the DeviceClass"
			}
			if len(o.Requests) > 0 {
				where += " for " + strings.Join(o.Requests, ", ")
			}
			return nil, fail(CauseConfig, "the configuration of %s is refused: %s",
				where, strings.Join(problems, "; "))
		}
		all[i] = claimConfig{o, parsed}
	}
	return all, nil
}

// settings applies the last matching configuration to a device and returns it. The error
// says why the device cannot be used as configured.
func (n node) settings(configs []claimConfig, d *recordDevice) (*claimConfig, error) {
	kind := dra.GPUConfig
	if d.MIG != nil {
		kind = dra.MIGConfig
	}
	for i, c := range slices.Backward(configs) {
		named := slices.Contains(c.Requests, d.Request) || slices.Contains(c.Requests, d.request())
		switch {
		case !named && len(c.Requests) > 0, !named && c.Kind != kind:
			continue
		case c.Kind != kind:
			return nil, fail(CauseConfig, "the configuration for request %s is a %s, and its device %s needs a %s",
				d.Request, c.Kind, d.Device, kind)
		case c.Strategy == dra.MPS && !n.mps:
			return nil, fail(CauseConfig, "%s", noMPS)
		case c.Interval != 0 && !n.slices:
			return nil, fail(CauseConfig, "sharing.timeSlicingConfig.interval: only Default is supported on this "+
				"node")
		case c.IMEX && !n.imex:
			return nil, fail(CauseConfig, "imex.channelIDs: this node offers no IMEX channel; set "+
				"imex.channelIDs: [0] in its configuration file")
		}
		if d.Settings = c.String(); !d.AdminAccess {
			d.Interval, d.IMEX = c.Interval, c.IMEX
		}
		return &configs[i], nil
	}
	return nil, nil
}

// checkAvailable returns the claim or pod that holds a device needed by the claim.
func (n node) checkAvailable(wanted record, records map[string]record, boot string, held []kubelet.HeldDevice) error {
	for _, d := range wanted.Devices {
		if d.AdminAccess {
			continue
		}
		if err := n.checkShares(d, wanted, records, boot); err != nil {
			return err
		}
		for uid, r := range records {
			if uid == wanted.UID || r.beforeRestart(boot) || r.Destroyed {
				continue
			}
			for _, other := range r.Devices {
				switch {
				case !overlap(d, other), r.Released && !other.needsRelease():
				case r.Released:
					return fail(CauseNotReady, "the device %s is not free yet: devices of the unprepared claim "+
						"%s are not released yet: %s",
						d.Device, r, cmp.Or(n.releaseProblem[uid], releasePending))
				default:
					return fail(CauseInUse, "the device %s (%s) is in use by the claim %s, which is not "+
						"unprepared yet",
						d.Device, d.uuid(), r)
				}
			}
		}
		for _, h := range held {
			uuid, _ := resource.SplitID(h.ID)
			if n.overlaps(uuid, d) {
				return fail(CauseInUse, "the device %s (%s) is in use by the pod %s, which holds %s through the "+
					"device plugin",
					d.Device, d.uuid(), h.Pod, h.Resource)
			}
		}
	}
	return nil
}

// overlap reports whether two devices must not be in two claims at the same time.
func overlap(a, b recordDevice) bool {
	switch {
	case a.GPU != b.GPU, a.AdminAccess, b.AdminAccess:
		return false
	case a.MIG != nil && b.MIG != nil && (a.MIG.Dynamic || b.MIG.Dynamic):
		return a.MIG.Start < b.MIG.Start+b.MIG.Size && b.MIG.Start < a.MIG.Start+a.MIG.Size
	case a.MIG != nil && b.MIG != nil && a.MIG.UUID != b.MIG.UUID:
		return false
	}
	return !a.isShare() || !b.isShare()
}

// checkShares returns why a claim cannot have its share of a device beside the shares of
// other claims: too little is free, or the other claims use the device differently.
func (n node) checkShares(d recordDevice, wanted record, records map[string]record, boot string) error {
	if !d.isShare() {
		return nil
	}
	published, _ := n.published(dra.Result{Pool: d.Pool, Device: d.Device})
	memory, count, by := int64(0), int64(0), []string{}
	for uid, r := range records {
		if uid == wanted.UID || r.beforeRestart(boot) {
			continue
		}
		for _, other := range r.Devices {
			if other.uuid() != d.uuid() || !other.isShare() || other.AdminAccess {
				continue
			}
			if !compatible(d, other) {
				return fail(CauseInUse, "the device %s (%s) is shared by the claim %s with other settings: %s "+
					"instead of %s; shares of one GPU need the same time slice, and MPS for all or none",
					d.Device, d.uuid(), r, other.usage(), d.usage())
			}
			memory, count, by = memory+other.Share, count+other.count(), append(by, r.String())
		}
	}
	for _, own := range wanted.Devices {
		if own.uuid() != d.uuid() || own.AdminAccess {
			continue
		}
		if !compatible(d, own) {
			return fail(CauseConfig, "the requests %s and %s have shares of the device %s with different "+
				"settings: %s and %s",
				d.Request, own.Request, d.Device, d.usage(), own.usage())
		}
		memory, count = memory+own.Share, count+own.count()
	}
	var what string
	switch most := int64(published.Capacity[dra.SharesCapacity]); {
	case memory > int64(published.Capacity[dra.MemoryCapacity]):
		what = "enough memory"
	case most > 0 && count > most:
		what = "enough shares"
	default:
		return nil
	}
	slices.Sort(by)
	return fail(CauseInUse, "the device %s (%s) does not have %s left for the claim; it is in use by %s, "+
		"including claims that are not unprepared yet",
		d.Device, d.uuid(), what, strings.Join(slices.Compact(by), ", "))
}

// count returns how many shares of a device the claim has.
func (d recordDevice) count() int64 {
	return dra.Result{ShareID: d.ShareID, ConsumedCapacity: d.ConsumedCapacity}.Count()
}

// compatible reports whether two shares of a GPU can be used at the same time: a GPU has
// one time slice, and MPS clients use the GPU exclusively.
func compatible(a, b recordDevice) bool {
	return a.Interval == b.Interval && (a.MPS == nil) == (b.MPS == nil) && a.SharedBy == b.SharedBy
}

// usage describes how a device is used, for errors.
func (d recordDevice) usage() string {
	way := cmp.Or(d.Settings, "without configuration")
	if d.SharedBy != "" {
		way += ", in shares: " + string(d.SharedBy)
	}
	return way
}

// overlaps reports whether a device of the device plugin overlaps a device of a claim.
func (n node) overlaps(uuid string, d recordDevice) bool {
	if uuid == d.GPU || uuid == d.uuid() {
		return true
	}
	g, _ := n.snapshot.GPU(d.GPU)
	return (d.MIG == nil || d.MIG.Dynamic) && slices.ContainsFunc(g.MIGDevices,
		func(m inventory.MIGDevice) bool { return m.UUID == uuid })
}
