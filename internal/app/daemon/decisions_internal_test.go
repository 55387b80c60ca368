package daemon

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// TestLayoutInTheStatus: the status has the chosen layout, and the controller's progress once it
// has seen the choice.
func TestLayoutInTheStatus(t *testing.T) {
	t.Parallel()
	d := unstarted(t, nil, append(slices.Clone(alone), "--mig-enabled")...)
	empty, err := d.mig.progress()
	if diff := cmp.Diff(MIGProgress{GPUs: []MIGGPU{}}, empty); err != nil || diff != "" {
		t.Errorf("%v, without a layout (-want +got):\n%s", err, diff)
	}
	retry := time.Unix(100, 0).UTC()
	d.mig.choice.Choices().Publish(choice.Choice{Layout: "a", From: choice.FromLabel,
		Desired: mig.DesiredLayout{Layout: "a", OrderNumber: 3}})
	d.mig.controller.Status().Publish(mig.Status{State: mig.StateFailed, Layout: "a", OrderNumber: 3, Reason: "r",
		GPUs: []mig.GPU{
			{Index: 1, UUID: "GPU-1", Model: "H100", Phase: mig.PhaseWaiting, Reason: "in use", Retry: retry,
				Holders: []mig.Holder{
					{Device: "MIG-2", PID: 3}, {Device: "MIG-1", PID: 4}, {Device: "MIG-2", PID: 5},
				}, Change: layout.GPUChange{GPU: layout.GPU{UUID: "GPU-1"}}},
			{Index: 2, UUID: "GPU-2", Phase: mig.PhaseKept},
		}})
	unread := &layout.PlannedPartitions{MIG: inventory.MIGMode(0).String(), Instances: []layout.PlannedInstance{}}
	want := MIGProgress{Layout: "a", From: "label", Again: 3, State: "failed", Reason: "r", GPUs: []MIGGPU{
		{Index: 1, UUID: "GPU-1", Model: "H100", Phase: "waiting", Reason: "in use", Retry: retry,
			Holders: []string{"process 3", "process 4", "process 5"}, Before: unread, After: unread},
		{Index: 2, UUID: "GPU-2", Phase: "kept"},
	}}
	got, err := d.mig.progress()
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	waits := &status.MIGLayout{Layout: "a", From: "label", State: "failed", Reason: "r", Waiting: []string{"MIG-1", "MIG-2"}}
	if diff := cmp.Diff(waits, d.mig.layout()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, test := range map[string]struct {
		decision      choice.Choice
		state, reason string
	}{
		"a later order":         {choice.Choice{Layout: "a", Desired: mig.DesiredLayout{OrderNumber: 4}}, "pending", ""},
		"another layout":        {choice.Choice{Layout: "b", Desired: mig.DesiredLayout{OrderNumber: 3}}, "pending", ""},
		"one that is not there": {choice.Choice{Layout: "b", Err: errors.New("no such layout")}, "failed", "no such layout"},
		"the one that is made":  {choice.Choice{Layout: "a", Desired: mig.DesiredLayout{OrderNumber: 3}}, "failed", "r"},
	} {
		d.mig.choice.Choices().Publish(test.decision)
		if got := d.mig.layout(); got.State != test.state || got.Reason != test.reason || got.Layout != test.decision.Layout {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestAllocationInTheStatus: nothing if Dynamic Resource Allocation is not used, and otherwise the
// owners of GPUs and the devices of claims.
func TestAllocationInTheStatus(t *testing.T) {
	t.Parallel()
	if d := unstarted(t, nil, alone...); d.claims.allocation() != nil ||
		d.maintenance.mayGive([]resource.Device{{GPU: "GPU-0"}}) != nil {
		t.Error("there is something without a state directory")
	}
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--state-dir", t.TempDir())...))
	owners := dra.Owners{}
	gpus := d.gpus.monitor.Snapshots().Value().GPUs
	for _, g := range gpus {
		owners[g.UUID] = dra.OwnedByPlugin
	}
	d.claims.dra.Owners.Publish(owners)
	if s := d.claims.allocation(); s != nil {
		t.Errorf("it is not used: %+v", s)
	}
	d.claims.dra.Driver.Publish(status.DRADriver{Registered: true})
	if d.claims.allocation() == nil {
		t.Error("a driver that is registered is nothing")
	}
	d.claims.dra.Driver.Publish(status.DRADriver{})
	since := time.Unix(100, 0).UTC()
	d.claims.dra.Claims.Status().Publish([]claims.ClaimStatus{{UID: "u", Namespace: "ns", Name: "c", Since: since,
		Devices: []claims.DeviceStatus{{Name: "gpu-0"}, {Name: "gpu-1", Problem: "p"}}}})
	s := d.claims.allocation()
	if s == nil {
		t.Fatal("a claim is nothing")
	}
	if diff := cmp.Diff([]status.DRAClaim{{UID: "u", Namespace: "ns", Name: "c", Since: since, Devices: []string{"gpu-0", "gpu-1"},
		Problem: "gpu-1: p"}}, s.Claims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	d.claims.dra.Claims.Status().Publish(nil)
	owners[gpus[1].UUID] = dra.LeavesDRA
	d.claims.dra.Arbiter.Waits().Publish(map[string]string{gpus[1].UUID: "w"})
	d.claims.dra.Devices.Publication().Publish(pool.Publication{Slices: 1, Devices: 2, Generation: 3, Problem: "p",
		API: "v1", NoTaints: true})
	if s = d.claims.allocation(); s == nil || s.Mode != "plugin" || s.Slices != 1 || s.Devices != 2 || s.Generation != 3 ||
		s.Problem != "p" || s.API != "v1" || !s.NoTaints || len(s.GPUs) != len(gpus) {
		t.Errorf("%+v", s)
	}
	if diff := cmp.Diff(status.DRAGPU{Index: 1, UUID: gpus[1].UUID, Owner: "leaving-dra", Waiting: "w"}, s.GPUs[1]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for i, taken := range map[int]bool{0: false, 1: true} {
		if err := d.maintenance.mayGive([]resource.Device{{GPU: gpus[i].UUID}}); (err != nil) != taken {
			t.Errorf("GPU %d for a pod: %v", i, err)
		}
	}
	d.maintenance.swaps.Status().Publish(driverchange.Status{Withholds: true})
	free := []resource.Device{{GPU: gpus[0].UUID}}
	if d.maintenance.mayGive(free) == nil || d.maintenance.inspectForClaim(t.Context(), free) == nil {
		t.Error("a device is given while the driver changes")
	}
}

// TestLayoutsOfGPUsOfClaims: with dynamic MIG, a layout divides only GPUs of the device plugin.
func TestLayoutsOfGPUsOfClaims(t *testing.T) {
	t.Parallel()
	d := unstarted(t, nil, append(slices.Clone(alone), "--state-dir", t.TempDir(), "--mig-enabled")...)
	d.claims.dra.Owners.Publish(dra.Owners{"GPU-0": dra.OwnedByPlugin, "GPU-1": dra.OwnedByDRA})
	for _, dynamic := range []bool{false, true} {
		c := d.watcher.Configs().Value()
		c.DRA.DynamicMIG = dynamic
		d.watcher.Configs().Publish(c)
		for uuid, want := range map[string]bool{"GPU-0": false, "GPU-1": dynamic, "GPU-2": dynamic} {
			if got := d.mig.dividedForClaims(uuid); (got != "") != want {
				t.Errorf("%s, dynamic MIG %v: %q", uuid, dynamic, got)
			}
		}
	}
}

// TestPodUIDsOfClaims: the pod of a claim has its UID in metrics, also where the kubelet's folder
// is not used.
func TestPodUIDsOfClaims(t *testing.T) {
	t.Parallel()
	d := unstarted(t, nil, append(slices.Clone(alone), "--state-dir", t.TempDir())...)
	d.claims.dra.Claims.Status().Publish([]claims.ClaimStatus{{Namespace: "ns", Name: "c", OwnerPod: "pod-1"}})
	got := d.podDevices().WithPodUIDs([]kubelet.ContainerDevice{{Claim: kubelet.ClaimResource{Namespace: "ns", Name: "c"}}})
	if len(got) != 1 || got[0].PodUID != "pod-1" {
		t.Errorf("%+v", got)
	}
}

// TestGroupsOfMPS: groups are computed for each Snapshot after the first scan, and for each
// configuration.
func TestGroupsOfMPS(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--simulate=t4")...))
	signals := make(chan os.Signal, 1)
	m := &mpsNode{watcher: d.watcher, monitor: d.gpus.monitor, wanted: feed.New[[]mps.Group](nil), signals: signals}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	ended := make(chan error, 1)
	go func() { ended <- m.followPlan(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	groups := func(want int) {
		t.Helper()
		if !feed.Until(ctx, m.wanted, func(now []mps.Group) bool { return len(now) == want }) {
			t.Fatalf("%d groups, want %d", len(m.wanted.Value()), want)
		}
	}
	c := d.watcher.Configs().Value()
	shared := c
	shared.Resource.Sharing = resource.Sharing{Mode: resource.MPS,
		Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}}
	d.watcher.Configs().Publish(shared)
	groups(1)
	d.watcher.Configs().Publish(c)
	groups(0)
}
