package listing_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestDevicesOfAnOldFormStayHealthyWhilePodsHoldThem(t *testing.T) {
	t.Parallel()
	c := newNode(t, 3)
	c.plan(1)
	c.plan(2)
	c.lists("G0", "G1", "G2") // nothing is known yet
	before := c.Latest().Lists[gpuName]
	c.holds("G1")
	c.lists("G0::0", "G1", "G2::0") // in one list: the count never falls
	if before.Same(c.Latest().Lists[gpuName]) {
		t.Fatal("the list has not changed")
	}
	c.holds()
	c.lists("G0::0", "G0::1", "G1::0", "G2::0", "G2::1")
	c.holds()
	c.lists("G0::0", "G0::1", "G1::0", "G1::1", "G2::0", "G2::1")

	// Back: of G0 one replica is held, and the other one is not given out any more.
	c.plan(1)
	c.holds("G0::0")
	c.lists("G0::0", "G1", "G2")
	if got := c.allocate("G0::1"); got != "G0" {
		t.Errorf("a replica that kubelet chose just before: %s", got)
	}
	c.lists("G0::0", "G1", "G2") // as many as G0 will be
	c.holds("G0::1")
	c.holds()
	c.lists("G0", "G1", "G2")
}

// The scheduler sends pods by the old count for some seconds. It must know the new
// one before the pods end that hold more devices than there will be, and pods that
// come meanwhile find those that are free.
func TestACountThatFallsIsToldAtOnce(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.plan(4)
	c.plan(1)
	c.holds("G0::0", "G0::1", "G1::2")
	c.lists("G0::2", "G1::2")
	if got := c.allocate("G0::2"); got != "G0" {
		t.Errorf("Allocate: %s", got)
	}
	c.lists("G0::3", "G1::2")
	c.holds("G0::0", "G0::1", "G0::2", "G0::3")
	c.lists("G0::0", "G1")
	c.holds("G0::1")
	c.lists("G0::1", "G1")
	c.holds()
	c.lists("G0", "G1")
}

// Kubelet chooses a device, and then receives the list in which it is Unhealthy.
func TestTheLastMomentOfAnOldForm(t *testing.T) {
	t.Parallel()
	shared := func(t *testing.T) *node {
		c := newNode(t, 1)
		c.plan(1)
		c.plan(2)
		c.holds("G0")
		c.lists("G0")
		return c
	}
	t.Run("before its end is seen", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		if got := c.allocate("G0"); got != "G0" {
			t.Errorf("Allocate: %s", got)
		}
		c.holds() // kubelet does not say so yet
		c.lists("G0")
		c.holds("G0")
		c.holds()
		c.reads()
		c.lists("G0::0", "G0::1")
	})
	t.Run("after its end is seen", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.lists("G0::0") // the count has not risen, and so does not fall again
		if got := c.allocate("G0"); got != "G0" {
			t.Errorf("Allocate: %s", got)
		}
		c.lists("G0")
		if got := c.allocate("G0::0"); !strings.Contains(got, "its GPU may still be in use as nvidia.com/gpu G0") {
			t.Errorf("Allocate of the new form: %s", got)
		}
	})
	t.Run("the new form is given", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.reads()
		if got := c.allocate("G0::1"); got != "G0" {
			t.Errorf("Allocate: %s", got)
		}
		if got := c.allocate("G0"); !strings.HasPrefix(got, "refused") {
			t.Errorf("Allocate of the old form: %s", got)
		}
		c.lists("G0::0", "G0::1")
	})
	t.Run("a moment later", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.now = c.now.Add(growsAfter - 1)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now}})
		c.lists("G0::0")
		if got := c.allocate("G0::1"); !strings.Contains(got, "its GPU was offered in another form a moment ago") {
			t.Errorf("Allocate: %s", got)
		}
		c.now = c.now.Add(1)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now}})
		c.lists("G0::0", "G0::1")
	})
	t.Run("it is given once more, and then nothing is known", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.allocate("G0")
		c.now = c.now.Add(2 * holders.FreeFor)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, UnknownBecause: "PodResources does not answer"}})
		c.lists("G0")
	})
	t.Run("back again after it was given once more", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.allocate("G0")
		c.plan(1)
		c.lists("G0") // no pod can hold the new form
	})
	t.Run("back again after the new form was offered", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.reads()
		c.plan(1)
		c.lists("G0::0") // as many as G0 will be
	})
	t.Run("the new form has it all", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.reads()
		c.quiet("a reading that says the same")
		c.quiet("and one more")
	})
	t.Run("the GPU turns sick", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.gpus[0].Health = inventory.Health{State: inventory.Unhealthy, Reason: "XID 48"}
		c.plan(2)
		c.lists()
		if got := c.allocate("G0"); !strings.Contains(got, "XID 48") {
			t.Errorf("Allocate: %s", got)
		}
		c.gpus[0].Health = inventory.Health{State: inventory.Healthy}
		c.plan(2)
		c.lists("G0")
	})
	t.Run("the GPU is divided", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.gpus[0].MIG = inventory.MIGEnabled
		c.gpus[0].MIGDevices = []inventory.MIGDevice{{UUID: "M0", Profile: "1g.10gb",
			Health: inventory.Health{State: inventory.Healthy}}}
		c.plan(1)
		c.lists()
		if got := c.allocate("G0"); !strings.HasPrefix(got, "refused") {
			t.Errorf("Allocate: %s", got)
		}
	})
	t.Run("back again before anything was read", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.plan(1)
		c.lists("G0")
		if got := c.allocate("G0::0"); !strings.HasPrefix(got, "refused") {
			t.Errorf("Allocate of a form that never was offered: %s", got)
		}
		c.lists("G0")
	})
	t.Run("kubelet restarts after its end was seen", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.reads()
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, UnknownBecause: "the kubelet has just restarted"}})
		c.lists("G0::0", "G0::1")
	})
}

// TestGPUsThatGrowOneAfterTheOther: each has its devices half a second after its
// last offer in the old form, whatever the other waits for.
func TestGPUsThatGrowOneAfterTheOther(t *testing.T) {
	t.Parallel()
	for range 10 { // devices come in any order
		c := newNode(t, 2)
		c.plan(1)
		c.plan(2)
		c.holds("G0", "G1")
		c.holds("G1")
		c.lists("G0::0", "G1")
		clear(c.held)
		for _, d := range []time.Duration{growsAfter / 2, growsAfter / 2} {
			c.now = c.now.Add(d)
			c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now}})
		}
		c.lists("G0::0", "G0::1", "G1::0")
	}
}

// Kubelet's checkpoint names a pod that has ended until kubelet writes it again.
// PodResources has shown the pod, and does so no more.
func TestTheEndOfAPodIsSeenBeforeKubeletWritesItsCheckpoint(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.plan(2)
	key := keyOf(gpuName, "G0")
	c.held[key] = holders.Holder{Pod: "p", CheckpointOnly: true} // an init container may be the holder
	c.reads()
	c.lists("G0")
	c.held[key] = holders.Holder{Pod: "p"}
	c.reads()
	c.held[key] = holders.Holder{Pod: "p", CheckpointOnly: true}
	c.reads()
	c.lists("G0::0")
	c.reads()
	c.lists("G0::0", "G0::1")
	for range 20 {
		c.reads()
	}
	if !c.HasRetiring(gpuName) {
		t.Error("a device was dropped that kubelet's checkpoint names")
	}
	// Given again, it may be held by an init container, which PodResources never shows.
	c.allocate("G0")
	for range 20 {
		c.reads()
	}
	c.lists("G0")
}

// What an earlier process listed is given out by this one, too, until its end is seen.
func TestAnAdoptedDeviceIsGivenOut(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.holders.Begin(holders.Account{Began: c.now, Listed: map[string][]string{gpuName: {"G0", "G1", "G7"}}})
	c.plan(2)
	c.lists("G0", "G1")
	if got := c.allocate("G1"); got != "G1" {
		t.Errorf("Allocate: %s", got)
	}
	if got := c.allocate("G7"); !strings.HasPrefix(got, "refused") {
		t.Errorf("Allocate of a device that the node does not have: %s", got)
	}
	for range 11 {
		c.holds("G1")
	}
	c.lists("G0::0", "G0::1", "G1")
}

// TestARefusedDeviceIsNotHeld: a pod holds the GPU in another form. A call for the device of a form
// before that, which kubelet chose earlier, is refused and leaves nothing behind.
func TestARefusedDeviceIsNotHeld(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds()
	c.holds("G0::0")
	c.planWith(resource.Options{Sharing: resource.Sharing{
		Mode: resource.TimeSliced, RenameByDefault: true, Rules: []resource.SharingRule{{Name: gpuName, Replicas: 2}},
	}})
	for range 4 { // the last reading says the same
		c.holds("G0::0")
	}
	c.lists("G0::0")
	if got := c.allocate("G0"); !strings.HasPrefix(got, "refused") {
		t.Errorf("Allocate: %s", got)
	}
	c.lists("G0::0")
}

// TestADeviceThatAnotherProcessGaveIsGivenAgain: this process never offered the device, and an
// account names a pod for it. The next pod counts as holding it, too, before an account says so.
func TestADeviceThatAnotherProcessGaveIsGivenAgain(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds("G0")
	c.plan(1)
	c.holds("G0::1")
	c.lists("G0::1")
	if got := c.allocate("G0::1"); got != "G0" {
		t.Errorf("Allocate: %s", got)
	}
	c.holds()
	c.lists("G0::1")
	for range 10 {
		c.holds()
	}
	c.lists("G0")
}

// In a roll-out, pods that the scheduler sends by the old count find a device from
// the first list on.
func TestWhatNoPodIsKnownToHoldIsOnOfferFirst(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.holders.Begin(holders.Account{Began: c.now,
		Listed: map[string][]string{gpuName: {"G0::0", "G0::1", "G0::2", "G1::0", "G1::1", "G1::2"}},
		Held: map[holders.Key]holders.Holder{keyOf(gpuName, "G0::0"): {Pod: "p", CheckpointOnly: true},
			keyOf(gpuName, "G1::1"): {Pod: "p", CheckpointOnly: true}}})
	c.plan(1)
	c.lists("G0::1", "G1::0")
	if got := c.allocate("G0::1"); got != "G0" {
		t.Errorf("Allocate: %s", got)
	}
	c.holds("G0::0", "G0::1", "G1::1")
	c.lists("G0::2", "G1::0")
	c.holds("G0::0", "G0::1", "G0::2", "G1::1")
	c.lists("G0::0", "G1::0")
	for range 10 {
		c.holds("G0::0", "G1::1")
	}
	c.lists("G0::0", "G1::1") // of each GPU one is held, and so many will be
}

func TestPreferredAreDevicesOfThePlan(t *testing.T) {
	t.Parallel()
	c := newNode(t, 3)
	c.plan(1)
	c.plan(2)
	c.holds("G0", "G1")
	prefer := func(available, required []string, size int) []string {
		got, err := c.Latest().Lists[gpuName].Prefer(available, required, size)
		if err != nil {
			return []string{err.Error()}
		}
		return slices.Sorted(slices.Values(got))
	}
	for _, test := range []struct {
		available, required []string
		size                int
		want                []string
	}{
		{[]string{"G0", "G2::1"}, nil, 1, []string{"G2::1"}},
		{[]string{"G0", "G1"}, nil, 1, []string{"G0"}},
		{[]string{"G0", "G1", "G2::0"}, nil, 2, []string{"G0", "G2::0"}},
		{[]string{"G0", "G2::0", "G2::1"}, []string{"G0"}, 2, []string{"G0", "G2::0"}},
	} {
		if got := prefer(test.available, test.required, test.size); !slices.Equal(got, test.want) {
			t.Errorf("of %q with %q: %q, want %q", test.available, test.required, got, test.want)
		}
	}
}

// A call that kubelet made for a device which is withheld is refused, and changes
// nothing: the pod's device is offered as before.
func TestACallForAWithheldDeviceChangesNothing(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds("G0")
	if got := c.allocate("G0::0"); !strings.HasPrefix(got, "refused: ") {
		t.Errorf("Allocate of a withheld device: %s", got)
	}
	if c.holders.IsHeld(keyOf(gpuName, "G0::0")) {
		t.Error("the withheld device counts as held")
	}
	if got := c.allocate("G0"); got != "G0" {
		t.Errorf("Allocate of the offered device: %s", got)
	}
}

// TestAnOrdinaryAllocateChangesNoList, and a list whose resource has left the plan
// says by which name a device is not known.
func TestAnOrdinaryAllocateChangesNoList(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.plan(1)
	before := c.Latest()
	if got := c.allocate("G0"); got != "G0" || c.Latest() != before {
		t.Errorf("Allocate: %s; there is another decision: %v", got, c.Latest() != before)
	}
	c.gpus = nil
	c.plan(1)
	if got := c.allocate("unknown"); !strings.Contains(got, `invalid allocation request for "nvidia.com/gpu"`) {
		t.Errorf("Allocate of an unknown device: %s", got)
	}
}
