package offer_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestOnlyGPUsOfTheDevicePluginAreOffered: one that leaves is not given out from then on, and stays
// listed while a pod holds it. The owners are followed only when kubelet's list is on its way.
func TestOnlyGPUsOfTheDevicePluginAreOffered(t *testing.T) {
	t.Parallel()
	n := newNode(t, true)
	n.owners, n.followed = feed.New(dra.Owners(nil)), feed.New(dra.Owners(nil))
	n.start(t)
	follow := func(a, b dra.Ownership) {
		t.Helper()
		owners := dra.Owners{"GPU-0": a, "GPU-1": b}
		n.owners.Publish(owners)
		poll.Latest(t, fmt.Sprint("followed: ", owners), n.followed,
			func(got dra.Owners) bool { return maps.Equal(got, owners) })
	}
	follow(dra.OwnedByDRA, dra.LeavesDRA)
	if got := n.daemon.Status(); len(got) > 0 {
		t.Errorf("served: %+v", got)
	}
	follow(dra.OwnedByPlugin, "")
	n.await(t, "GPU-0 | ", gpu)
	held := n.admit(t, "p", gpu)
	n.clock.Step(20 * time.Second)
	follow(dra.OwnedByPlugin, dra.OwnedByPlugin)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
	if _, err := n.daemon.Holders(t.Context(), []string{"GPU-0", "GPU-1"}); err == nil ||
		!strings.Contains(err.Error(), "is still offered") {
		t.Errorf("users of GPUs that are offered: %v", err)
	}
	follow(dra.LeavesPlugin, dra.LeavesPlugin)
	n.await(t, " | GPU-0 GPU-1", gpu)
	if l := n.daemon.Offered().Value(); len(l.LeftOut)+len(l.Warnings) > 0 {
		t.Errorf("left out %+v, warnings %q: it is given elsewhere", l.LeftOut, l.Warnings)
	}
	users, err := n.daemon.Holders(t.Context(), []string{"GPU-0", "GPU-1"})
	// kubelet answers by its list of a moment ago
	for deadline := time.Now().Add(time.Minute); err != nil && time.Now().Before(deadline); {
		n.settle()
		users, err = n.daemon.Holders(t.Context(), []string{"GPU-0", "GPU-1"})
	}
	if err != nil || len(users) != 1 || users[0].ID != held {
		t.Errorf("users %+v and %v, want those of %s", users, err, held)
	}
	n.until(t, " | GPU-0", gpu)
	n.Remove("p")
	n.until(t, " | ", gpu)
	follow(dra.OwnedByPlugin, dra.OwnedByPlugin)
	n.await(t, "GPU-0 GPU-1 | ", gpu)
}
