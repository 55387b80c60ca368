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

// Without PodResources, kubelet sees the end of a pod when it gives a device to the next one. A pod
// that asks for a resource of which nothing is offered would wait for ever.
func TestWithoutPodResourcesANewNameHasADevice(t *testing.T) {
	t.Parallel()
	const other = gpuName + ".shared"
	for name, restarted := range map[string]bool{"a reload": false, "a restart": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newNode(t, 2)
			reads := func(unasked bool, want ...string) {
				t.Helper()
				c.now = c.now.Add(time.Second)
				c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now, Held: c.held, NoPodResources: unasked}})
				if got := c.healthy(other); !slices.Equal(got, want) {
					t.Errorf("%s has %q Healthy, want %q", other, got, want)
				}
				for _, id := range c.healthy(gpuName) {
					if slices.Contains(want, id+"::0") {
						t.Errorf("%s is offered under both names", id)
					}
				}
			}
			hold := func(ids ...string) {
				c.held = map[holders.Key]holders.Holder{}
				for _, id := range ids {
					c.held[keyOf(gpuName, id)] = holders.Holder{Pod: "p", CheckpointOnly: true}
				}
			}
			warnings := func() string { return strings.Join(c.Latest().Plan.Warnings, "; ") }
			hold("G0", "G1")
			c.gpus = append(c.gpus, inventory.GPU{UUID: "sick", Index: 2, Health: inventory.Health{State: inventory.Unhealthy}})
			if restarted {
				c.holders.Begin(holders.Account{Began: c.now, Held: c.held})
			} else {
				c.plan(1)
			}
			renamed := shared(2)
			renamed.RenameByDefault = true
			c.planWith(resource.Options{Sharing: renamed})
			for range 60 {
				reads(false)
			}
			for range 20 {
				reads(true)
			}
			quiet := func(want ...string) {
				t.Helper()
				before := c.Latest()
				reads(true, want...)
				if c.Latest() != before {
					t.Error("there is another decision while nothing changes")
				}
			}
			quiet()
			reads(false) // the 30 s begin again
			for range 30 {
				reads(true)
			}
			reads(true, "G0::0", "G0::1") // one is enough for the next pod
			reads(true, "G0::0", "G0::1")
			quiet("G0::0", "G0::1")
			if got := warnings(); !strings.Contains(got, "no PodResources socket") {
				t.Errorf("the plan warns of %q", got)
			}
			hold("G0") // as kubelet writes when that pod has come
			for range 15 {
				reads(true, "G1::0", "G1::1")
			}
			hold()
			for range 15 {
				reads(true, "G0::0", "G0::1", "G1::0", "G1::1")
			}
			if got := warnings(); got != "" {
				t.Errorf("the plan warns of %q", got)
			}

			// Under one name the next pod comes, whichever device it gets.
			hold("G0", "G1")
			c.plan(1)
			c.plan(2)
			reads(true)
			c.lists("G0", "G1")
		})
	}
}

// TestADeviceThatNothingWaitsFor: a pod holds it, and the configuration offers its
// GPU no more. Its health is that of the GPU.
func TestADeviceThatNothingWaitsFor(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.plan(1)
	excluding := resource.Options{Selectors: []resource.Selector{{Devices: []resource.Ref{"1"}, Exclude: true}}}
	c.planWith(excluding)
	c.holds("G1")
	c.lists("G0", "G1")
	c.holds()
	c.lists("G0")
}

// TestSickGPUsAreNoReasonToForgetWhoHoldsThem: a resource that has nothing to give
// for that waits for no pod.
func TestSickGPUsAreNoReasonToForgetWhoHoldsThem(t *testing.T) {
	t.Parallel()
	c := newNode(t, 2)
	c.gpus[0].Health.State = inventory.Unhealthy
	c.gpus = c.gpus[:1]
	c.plan(1)
	for range 100 {
		c.now = c.now.Add(time.Second)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now, NoPodResources: true}})
	}
	if got := c.Latest(); len(got.Plan.Warnings) > 0 || !got.Again.IsZero() {
		t.Errorf("the plan warns of %q; the next decision is at %v", got.Plan.Warnings, got.Again)
	}
}

// TestWhatAnotherPluginOffers is not given out by this one. What a pod is known to
// hold is said so, and the same evidence is no change.
func TestWhatAnotherPluginOffers(t *testing.T) {
	t.Parallel()
	const other, another = "nvidia.com/other", "nvidia.com/another"
	offers := map[string][]string{other: {"G0", "G1"}, another: {"G0", "G1"}, gpuName: {"G0", "G1"}}
	for range 10 { // resources come in any order
		c := newNode(t, 2)
		c.plan(1)
		for i, tt := range []struct {
			held map[holders.Key]holders.Holder
			says string
		}{
			{nil, "its GPU may still be in use as nvidia.com/another G0 (another device plugin offers it, or did so " +
				"until a short time ago)"},
			{map[holders.Key]holders.Holder{keyOf(another, "G0"): {Pod: "p"}},
				"its GPU may still be in use as nvidia.com/another G0 (pod p holds it)"},
		} {
			c.now = c.now.Add(time.Second)
			c.held = tt.held
			said := listing.Reading{Account: c.account()}
			said.Listed = offers
			if outdated := c.read(said); !outdated || !c.HasUnserved() {
				t.Errorf("reading %d: a new checkpoint says more: %v", i, outdated)
			}
			c.lists()
			if got := c.allocate("G0"); !strings.Contains(got, tt.says) {
				t.Errorf("reading %d: %s, want %s", i, got, tt.says)
			}
			before := c.Latest()
			if c.read(said); c.Latest() != before {
				t.Errorf("reading %d: the same evidence is a change", i)
			}
		}
		c.now = c.now.Add(time.Second)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now}})
		c.lists("G0", "G1")
	}
}

// TestAMIGDeviceIsNotGivenBesideItsGPU, nor twice, where another plugin offers one of them.
func TestAMIGDeviceIsNotGivenBesideItsGPU(t *testing.T) {
	t.Parallel()
	const mig = "nvidia.com/mig-1g.10gb"
	for id, want := range map[string]bool{"G0": false, "M0": false, "G1": true} {
		c := newNode(t, 1)
		c.gpus[0].MIG = inventory.MIGEnabled
		c.gpus[0].MIGDevices = []inventory.MIGDevice{{UUID: "M0", Profile: "1g.10gb",
			Health: inventory.Health{State: inventory.Healthy}}}
		c.plan(1)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now,
			Listed: map[string][]string{"nvidia.com/other": {id}}}})
		if healthy := len(c.healthy(mig)) > 0; healthy != want {
			t.Errorf("another plugin offers %s: M0 is Healthy: %v, want %v", id, healthy, want)
		}
	}
}

// TestWhatAnotherPluginOffersIsItsOwn, however long this one has nothing to give:
// no pod of its own would tell that another has ended.
func TestWhatAnotherPluginOffersIsItsOwn(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	offers := map[string][]string{"nvidia.com/other": {"G0"}}
	for range 2 * int(blockedFor/time.Second) {
		c.now = c.now.Add(time.Second)
		c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now, NoPodResources: true, Listed: offers}})
	}
	c.lists()
}

// TestARetiringDeviceThatAnotherPluginOffers is neither Healthy nor given: a pod may use its GPU.
func TestARetiringDeviceThatAnotherPluginOffers(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds("G0")
	c.lists("G0")
	offers := map[string][]string{"nvidia.com/other": {"G0"}}
	c.read(listing.Reading{Account: holders.Account{Kubelet: 1, Began: c.now, Held: c.held, Listed: offers}})
	c.lists()
	if got := c.allocate("G0"); !strings.HasPrefix(got, "refused") {
		t.Errorf("Allocate: %s", got)
	}
}

// TestUnitsThatAllLeft: once their pods have ended, nothing is read for units any more.
func TestUnitsThatAllLeft(t *testing.T) {
	t.Parallel()
	c := newNode(t, 1)
	c.planUnits(0)
	c.held[keyOf(inUnits, "G0::1")] = holders.Holder{Pod: "p"}
	c.reads()
	c.plan(1)
	clear(c.held)
	for range 12 {
		c.reads()
	}
	if c.Awaits(c.holders) {
		t.Error("new evidence is awaited")
	}
}
