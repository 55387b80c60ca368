package owner_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestToPlugin: a GPU leaves its slice once no claim has it, and goes to the device plugin once no
// slice has it and no claim got it meanwhile.
func TestToPlugin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAAll)
		r.published.Publish(map[string]bool{"a": true, "b": true})
		r.start()
		r.after(0, dra.OwnedByDRA, dra.OwnedByDRA, "")
		r.records.Publish(map[string][]claims.Holder{"a": {{Namespace: "ns", Name: "c"}}, "b": {{Admin: true}}})
		r.set(func() { r.claimed = map[string][]string{"b": {"ns/pending"}} })
		r.mode(config.DRAOff)
		r.after(time.Minute, dra.LeavesDRA, dra.LeavesDRA, "a:claim ns/c has it b:claim ns/pending was given it")
		r.set(func() { r.claimed = nil })
		r.after(2*time.Minute, dra.LeavesDRA, dra.OwnedByNobody, "b:it may still be in a ResourceSlice")
		before := r.listed
		if r.after(time.Hour, dra.LeavesDRA, dra.OwnedByNobody, ""); r.listed != before {
			t.Error("claims are listed although a record and a slice say enough")
		}
		// The scheduler gave it away by the slice of before.
		r.set(func() { r.claimed = map[string][]string{"b": {"ns/late"}} })
		r.published.Publish(map[string]bool{"a": true})
		r.after(10*time.Second, dra.LeavesDRA, dra.LeavesDRA, "b:claim ns/late was given it") // and so its pod can have it
		r.published.Publish(map[string]bool{"a": true, "b": true})
		r.records.Publish(map[string][]claims.Holder{"a": {{Namespace: "ns", Name: "c"}},
			"b": {{Namespace: "ns", Name: "late"}}})
		r.after(0, dra.LeavesDRA, dra.LeavesDRA, "claim ns/late has it")
		r.set(func() { r.claimed = nil })
		r.records.Publish(map[string][]claims.Holder{})
		r.after(10*time.Second, dra.OwnedByNobody, dra.OwnedByNobody, "")
		r.published.Publish(map[string]bool{})
		r.after(10*time.Second, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}

// TestToPluginWithoutAPIServer: nothing goes to the device plugin, also not after a restart.
func TestToPluginWithoutAPIServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.set(func() { r.failed = errors.New("away") })
		r.published.Publish(map[string]bool{"a": true})
		r.start()
		r.after(24*time.Hour, dra.LeavesDRA, dra.OwnedByPlugin, "away")
		r.lists = nil
		r.start()
		r.after(24*time.Hour, dra.LeavesDRA, dra.OwnedByPlugin, "another process of this program serves the kubelet")
	})
}

// TestToPluginWithoutTheRightToList: records count, and a time in which a claim that was under way
// comes to have one.
func TestToPluginWithoutTheRightToList(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.set(func() { r.failed = fmt.Errorf("list: %w", owner.ErrNotListed) })
		r.published.Publish(map[string]bool{"a": true})
		r.start()
		r.after(50*time.Second, dra.LeavesDRA, dra.OwnedByPlugin, "may be in progress")
		r.after(2*time.Minute, dra.OwnedByNobody, dra.OwnedByPlugin, "")
		r.published.Publish(map[string]bool{})
		r.after(50*time.Second, dra.OwnedByNobody, dra.OwnedByPlugin, "may be in progress")
		r.after(2*time.Minute, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}

// TestClaimThatKubeletAskedFor: where claims are not listed, one that kubelet asked for holds its
// GPU, which goes back into the slice for it.
func TestClaimThatKubeletAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.set(func() { r.failed = fmt.Errorf("list: %w", owner.ErrNotListed) })
		r.published.Publish(map[string]bool{"a": true})
		r.start()
		r.after(2*time.Minute, dra.OwnedByNobody, dra.OwnedByPlugin, "")
		r.published.Publish(map[string]bool{})
		r.set(func() { r.claimed = map[string][]string{"a": {"ns/late"}} })
		r.after(time.Hour, dra.LeavesDRA, dra.OwnedByPlugin, "claim ns/late was given it")
		r.set(func() { r.claimed = nil })
		r.after(5*time.Minute, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}

// TestToPluginWithoutADriver: where no claim can be prepared, a GPU comes back by the kubelet's
// account alone, ten seconds after the last process that may have been the driver. A claim that the
// kubelet has keeps it, and the reason says what to do.
func TestToPluginWithoutADriver(t *testing.T) {
	t.Parallel()
	const grace, way = "the kubelet has had no driver for claims for 10s", "--set dra.enabled=true --set dra.mode=plugin"
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.lists, r.driverless = nil, true
		r.published.Publish(map[string]bool{"a": true, "b": true})
		r.set(func() { r.claimed = map[string][]string{"a": {"ns/c"}} })
		r.beside.Publish(true)
		r.start()
		before := r.listed
		if r.after(time.Hour, dra.LeavesDRA, dra.LeavesDRA,
			"another process of this program serves the kubelet"); r.listed > before {
			t.Error("the kubelet's account is read while another process may be the driver")
		}
		r.beside.Publish(false)
		r.after(9*time.Second, dra.LeavesDRA, dra.LeavesDRA, grace)
		if !r.arbiter.Returning() {
			t.Error("it is not said that GPUs return")
		}
		r.after(2*time.Second, dra.LeavesDRA, dra.OwnedByPlugin, "a:claim ns/c was given it; to release it, run the driver")
		r.after(time.Minute, dra.LeavesDRA, dra.OwnedByPlugin, way)
		if r.arbiter.Returning() {
			t.Error("it is said that a GPU returns which a claim has")
		}
		r.set(func() { r.claimed, r.failed = nil, errors.New("no answer") })
		r.after(24*time.Hour, dra.LeavesDRA, dra.OwnedByPlugin, "a:no answer; to release it")
		r.set(func() { r.failed = nil })
		r.after(time.Minute, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
		r.mode(config.DRAAll)
		r.follow()
		r.after(time.Minute, dra.LeavesPlugin, dra.LeavesPlugin, "")
	})
}

// TestToPluginAfterARollOut: a GPU that was claimed by nobody by the API server, while another
// process was there, comes back as soon as the kubelet has had no driver for a while.
func TestToPluginAfterARollOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.driverless = true
		r.published.Publish(map[string]bool{"a": true})
		r.beside.Publish(true)
		r.start()
		r.follow()
		r.after(time.Minute, dra.OwnedByNobody, dra.OwnedByPlugin, "it may still be in a ResourceSlice")
		r.beside.Publish(false)
		r.after(9*time.Second, dra.OwnedByNobody, dra.OwnedByPlugin, "10s")
		r.after(10*time.Second, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}

// TestRecordWithoutADriver: a claim with a record has its GPU for as long as it has the record, and
// the way out is said.
func TestRecordWithoutADriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.lists, r.driverless = nil, true
		r.published.Publish(map[string]bool{"a": true})
		r.records.Publish(map[string][]claims.Holder{"a": {{Namespace: "ns", Name: "c"}}})
		r.start()
		r.after(24*time.Hour, dra.LeavesDRA, dra.OwnedByPlugin, "a:claim ns/c has it; to release it, run the driver")
		r.records.Publish(map[string][]claims.Holder{})
		r.after(10*time.Second, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}
