package cluster

import (
	"cmp"
	"context"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The status of a claim has the GPU or MIG device of each of its devices, and whether it is ready
// and healthy. The daemon writes it after the claim is prepared, and after each change. Nothing
// waits for the status.

// A claimData is the data of a device in the status of a claim.
type claimData struct {
	UUID string `json:"uuid"`
	// GPU is the UUID of the GPU of a MIG device.
	GPU string `json:"parentUUID,omitempty"`
	// Memory is the claim's part of the memory of the device, in bytes. Limited says whether processes
	// cannot use more.
	Memory  int64 `json:"memory,omitempty"`
	Limited bool  `json:"memoryIsLimit,omitempty"`
}

// claimStatus writes the status of claims until ctx ends, while the configuration enables it.
func (c *Cluster) claimStatus(ctx context.Context, d daemon.View) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) {
		now, changed := d.Configs.Latest()
		return now.DRA.ClaimStatus, []<-chan struct{}{changed}
	}, func(ctx context.Context, wanted bool) error {
		if wanted {
			c.WriteClaimStatus(ctx, d.DRA.Claims.States, d.DRA.Devices.Pools(), d.Snapshots)
		}
		return nil
	})
}

// WriteClaimStatus writes the status of claims until ctx ends. prepared returns the prepared
// claims, and a channel that is closed when they change. Each claim has its own writer, so that a
// failure delays no other claim.
func (c *Cluster) WriteClaimStatus(
	ctx context.Context, prepared func() (claims []dra.ClaimState, changed <-chan struct{}), pools *feed.Feed[dra.Pool],
	snapshots *feed.Feed[inventory.Snapshot],
) {
	var writers sync.WaitGroup
	defer writers.Wait()
	stops := map[string]func(){} // by the UID of the claim
	for {
		claims, changed := prepared()
		present := map[string]bool{}
		for _, claim := range claims {
			if present[claim.UID] = true; stops[claim.UID] == nil {
				writing, stop := context.WithCancel(ctx)
				stops[claim.UID] = stop
				w := statusWriter{client: c.client, uid: claim.UID, prepared: prepared, pools: pools,
					snapshots: snapshots}
				writers.Go(func() {
					kubeapi.RunWithRetry(writing, clock.RealClock{},
						"status of claim "+claim.Namespace+"/"+claim.Name, w.wake,
						w.write)
				})
			}
		}
		for uid, stop := range stops {
			if !present[uid] {
				stop()
				delete(stops, uid)
			}
		}
		if !feed.WaitAny(ctx, changed) {
			for _, stop := range stops {
				stop()
			}
			return
		}
	}
}

// A statusWriter writes the status of one claim.
type statusWriter struct {
	client    *kubeapi.Client
	uid       string
	prepared  func() ([]dra.ClaimState, <-chan struct{})
	pools     *feed.Feed[dra.Pool]
	snapshots *feed.Feed[inventory.Snapshot]
	written   []kubeapi.ClaimDeviceStatus
}

// wake returns channels that are closed when the status may change.
func (w *statusWriter) wake() []<-chan struct{} {
	_, preparedChanged := w.prepared()
	_, snapshotChanged := w.snapshots.Latest()
	_, poolChanged := w.pools.Latest()
	return []<-chan struct{}{preparedChanged, snapshotChanged, poolChanged}
}

// write writes the status of the claim if it has changed since the last write.
func (w *statusWriter) write(ctx context.Context) error {
	pool, health := w.pools.Value(), map[string]dra.DeviceHealth{}
	claims, _ := w.prepared()
	i := slices.IndexFunc(claims, func(c dra.ClaimState) bool { return c.UID == w.uid })
	if pool.Name == "" || i < 0 {
		return nil
	}
	for _, h := range dra.HealthOf(pool, w.snapshots.Value(), nil) {
		health[h.Device] = h
	}
	claim := claims[i]
	wanted := claimDevices(pool, claim, health, w.written, time.Now())
	if reflect.DeepEqual(wanted, w.written) {
		return nil
	}
	err := w.client.WriteClaimDevices(ctx, claim.Namespace, claim.Name, claim.UID, wanted)
	switch {
	case err == nil:
	case !kubeapi.IsNotFound(err) && !kubeapi.IsForbidden(err) && !kubeapi.IsInvalid(err):
		return err
	default: // the claim is gone or replaced, or the right is missing: a retry would fail too
		klog.FromContext(ctx).Info("Cannot write the status of a claim", "claim", klog.KRef(claim.Namespace,
			claim.Name),
			"reason", err.Error())
	}
	w.written = wanted
	return nil
}

// statuses has the status of the condition Healthy by verdict; other verdicts are Unknown.
var statuses = map[dra.Verdict]string{dra.VerdictHealthy: "True", dra.VerdictUnhealthy: "False"}

// claimDevices returns the wanted status of a claim. before is the last written status; an
// unchanged condition keeps its time.
func claimDevices(
	pool dra.Pool, claim dra.ClaimState, health map[string]dra.DeviceHealth, before []kubeapi.ClaimDeviceStatus,
	now time.Time,
) (all []kubeapi.ClaimDeviceStatus) {
	for i, d := range claim.Devices {
		ready := kubeapi.ClaimCondition{Type: "Ready", Status: "True", Reason: "Prepared"}
		if d.Problem != "" {
			ready.Status, ready.Reason, ready.Message = "False", "NotUsable", d.Problem
		}
		healthy := kubeapi.ClaimCondition{Type: "Healthy", Status: "Unknown", Reason: "NotPublished"}
		if h, known := health[d.Device]; known {
			healthy.Status = cmp.Or(statuses[h.Verdict], "Unknown")
			healthy.Reason, healthy.Message = string(h.Verdict), h.Message
		}
		device := kubeapi.ClaimDeviceStatus{Driver: cmp.Or(pool.Driver, dra.Driver), Pool: pool.Name, Device: d.Device,
			ShareID: d.ShareID}
		for j, condition := range []kubeapi.ClaimCondition{ready, healthy} {
			condition.LastTransitionTime = now.UTC().Truncate(time.Second)
			switch {
			case i >= len(before) && condition.Status == "True":
				condition.LastTransitionTime = claim.Since.UTC().Truncate(time.Second)
			case i < len(before) && before[i].Device == d.Device && before[i].Conditions[j].Status == condition.Status:
				condition.LastTransitionTime = before[i].Conditions[j].LastTransitionTime
			}
			device.Conditions = append(device.Conditions, condition)
		}
		data := claimData{UUID: d.GPU, Memory: d.Memory, Limited: d.Limited}
		if d.MIG != "" {
			data.UUID, data.GPU = d.MIG, d.GPU
		}
		device.Data = data
		all = append(all, device)
	}
	return all
}
