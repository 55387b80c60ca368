package serve

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Without PodResources, kubelet sees the end of a pod when it gives a device to the next one. A pod
// that asks for a resource of which nothing is on offer would wait for ever.
func TestWithoutPodResourcesANewNameHasADevice(t *testing.T) {
	t.Parallel()
	const other = gpuName + ".shared"
	for name, restarted := range map[string]bool{"a reload": false, "a restart": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newChanging(t, 2)
			saved := kubelet.Checkpoint{}
			c.collaborators.Checkpoint = func() (kubelet.Checkpoint, error) { return saved, nil }
			reads := func(unasked bool, want ...string) {
				t.Helper()
				c.clock.Step(time.Second)
				c.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.clock.Now(), Held: heldIn(saved), NoPodResources: unasked}, others: others{checkpoint: saved}},
					c.clock.Now())
				if got := slices.Sorted(slices.Values(c.resources[other].list.views.Value().healthy())); !slices.Equal(got, want) {
					t.Errorf("%s has %q Healthy, want %q", other, got, want)
				}
				if l := c.resources[gpuName]; l != nil {
					for _, id := range l.list.views.Value().healthy() {
						if slices.Contains(want, id+"::0") {
							t.Errorf("%s is offered under both names", id)
						}
					}
				}
			}
			hold := func(ids ...string) {
				saved = kubelet.Checkpoint{}
				for _, id := range ids {
					saved.Held = append(saved.Held, kubelet.HeldDevice{Resource: gpuName, ID: id, Pod: "p"})
				}
			}
			hold("G0", "G1")
			c.gpus = append(c.gpus, inventory.GPU{UUID: "sick", Index: 2, Health: inventory.Health{State: inventory.Unhealthy}})
			if !restarted {
				c.plan(1)
			}
			c.Apply(resource.New(inventory.Snapshot{GPUs: c.gpus}, resource.Options{Sharing: resource.Sharing{
				Mode: resource.TimeSliced, RenameByDefault: true, Rules: []resource.SharingRule{{Name: gpuName, Replicas: 2}},
			}}), Options{Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}}}, 2)
			for range 60 {
				reads(false)
			}
			for range 20 {
				reads(true)
			}
			quiet := func(want ...string) {
				t.Helper()
				_, changed := c.Offered().Latest()
				reads(true, want...)
				if isClosed(changed) {
					t.Error("the plan is published again while nothing changes")
				}
			}
			quiet()
			reads(false) // the 30 s begin anew
			for range 30 {
				reads(true)
			}
			reads(true, "G0::0", "G0::1") // one is enough for the next pod
			reads(true, "G0::0", "G0::1")
			quiet("G0::0", "G0::1")
			if got := strings.Join(c.Offered().Value().Warnings, "; "); !strings.Contains(got, "no PodResources socket") {
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
			if got := c.Offered().Value().Warnings; len(got) > 0 {
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

// TestADeviceThatNothingWaitsFor: a pod holds it, and the configuration offers its GPU no more. Its
// health is that of the GPU.
func TestADeviceThatNothingWaitsFor(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 2)
	c.plan(1)
	excluding := resource.Options{Selectors: []resource.Selector{{Devices: []resource.Ref{"1"}, Exclude: true}}}
	c.Apply(resource.New(inventory.Snapshot{GPUs: c.gpus}, excluding), Options{}, 2)
	c.holds("G1")
	c.lists("G0", "G1")
	c.holds()
	c.lists("G0")
}

// TestSickGPUsAreNoReasonToForgetWhoHoldsThem: a resource that has nothing to give for that waits
// for no pod.
func TestSickGPUsAreNoReasonToForgetWhoHoldsThem(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 2)
	c.gpus[0].Health.State = inventory.Unhealthy
	c.gpus = c.gpus[:1]
	c.plan(1)
	for range 100 {
		c.clock.Step(time.Second)
		c.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.clock.Now(), NoPodResources: true}}, c.clock.Now())
	}
	if got := c.Offered().Value().Warnings; len(got) > 0 || c.forms.blocked != (holders.Lasting{}) {
		t.Errorf("the plan warns of %q", got)
	}
}

// TestWhatAnotherPluginOffers is not given out by this one. What a pod is known to hold is said so,
// and the same evidence is no change.
func TestWhatAnotherPluginOffers(t *testing.T) {
	t.Parallel()
	const other, another = "nvidia.com/other", "nvidia.com/another"
	offers := kubelet.Checkpoint{Healthy: map[string][]string{other: {"G0", "G1"}, another: {"G0", "G1"},
		gpuName: {"G0", "G1"}}}
	for range 10 { // resources come in any order
		c := newChanging(t, 2)
		c.plan(1)
		for i, tt := range []struct {
			held map[holders.Key]holders.Holder
			says string
		}{
			{nil, "its GPU may still be in use as nvidia.com/another G0 (another device plugin offers it, or did so until a short time ago)"},
			{map[holders.Key]holders.Holder{keyOf(another, "G0"): {Pod: "p"}},
				"its GPU may still be in use as nvidia.com/another G0 (pod p holds it)"},
		} {
			c.clock.Step(time.Second)
			said := evidence{Account: holders.Account{Kubelet: 1, Source: holders.Source{Incarnation: 1, Connections: 1}, Began: c.clock.Now(), Held: tt.held}, others: others{checkpoint: offers}}
			if outdated := c.drop(said, c.clock.Now()); !outdated || len(c.observed.unservedForms) != 4 {
				t.Errorf("reading %d: a new checkpoint says more: %v; claims %v", i, outdated, c.observed.unservedForms)
			}
			c.lists()
			if got := c.allocate("G0"); !strings.Contains(got, tt.says) {
				t.Errorf("reading %d: %s, want %s", i, got, tt.says)
			}
			if _, changed := c.update(said, c.clock.Now()); changed {
				t.Errorf("reading %d: the same evidence is a change", i)
			}
		}
		c.clock.Step(time.Second)
		c.drop(evidence{Account: holders.Account{Kubelet: 1, Source: holders.Source{Incarnation: 1, Connections: 1}, Began: c.clock.Now()}}, c.clock.Now())
		c.lists("G0", "G1")
	}
}

// TestAMIGDeviceIsNotGivenBesideItsGPU, nor twice, where another plugin offers one of them.
func TestAMIGDeviceIsNotGivenBesideItsGPU(t *testing.T) {
	t.Parallel()
	const mig = "nvidia.com/mig-1g.10gb"
	for id, want := range map[string]bool{"G0": false, "M0": false, "G1": true} {
		c := newChanging(t, 1)
		c.gpus[0].MIG = inventory.MIGEnabled
		c.gpus[0].MIGDevices = []inventory.MIGDevice{{UUID: "M0", Profile: "1g.10gb",
			Health: inventory.Health{State: inventory.Healthy}}}
		c.plan(1)
		offers := kubelet.Checkpoint{Healthy: map[string][]string{"nvidia.com/other": {id}}}
		c.drop(evidence{Account: holders.Account{Kubelet: 1, Source: holders.Source{Incarnation: 1, Connections: 1}, Began: c.clock.Now()}, others: others{checkpoint: offers}}, c.clock.Now())
		if healthy := len(c.resources[mig].list.views.Value().healthy()) > 0; healthy != want {
			t.Errorf("another plugin offers %s: M0 is Healthy: %v, want %v", id, healthy, want)
		}
	}
}

// TestWhatAnotherPluginOffersIsItsOwn, however long this one has nothing to give: no pod of its own
// would tell that another has ended.
func TestWhatAnotherPluginOffersIsItsOwn(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 1)
	c.plan(1)
	offers := kubelet.Checkpoint{Healthy: map[string][]string{"nvidia.com/other": {"G0"}}}
	for range 2 * int(blockedFor/time.Second) {
		c.clock.Step(time.Second)
		c.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.clock.Now(), NoPodResources: true}, others: others{checkpoint: offers}}, c.clock.Now())
	}
	c.lists()
}

// TestARetiringDeviceThatAnotherPluginOffers is neither Healthy nor given: a pod may use its GPU.
func TestARetiringDeviceThatAnotherPluginOffers(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds("G0")
	c.lists("G0")
	offers := kubelet.Checkpoint{Healthy: map[string][]string{"nvidia.com/other": {"G0"}}}
	c.drop(evidence{Account: holders.Account{Kubelet: 1, Began: c.clock.Now(), Held: c.held},
		others: others{checkpoint: offers}}, c.clock.Now())
	c.lists()
	if got := c.allocate("G0"); !strings.HasPrefix(got, "refused") {
		t.Errorf("Allocate: %s", got)
	}
}

// TestUnitsThatAllLeft: once their pods have ended, nothing is read for units any more.
func TestUnitsThatAllLeft(t *testing.T) {
	t.Parallel()
	const units = "volcano.sh/gpu-mem.1Gi"
	c := newChanging(t, 1)
	c.gpus[0].MemoryBytes = 4 << 30
	inUnits := resource.Options{Units: resource.Units{Name: units},
		Selectors: []resource.Selector{{Where: "x", Devices: []resource.Ref{"0"}, Units: true}}}
	c.Apply(resource.New(inventory.Snapshot{GPUs: c.gpus}, inUnits), Options{}, 1)
	c.held[keyOf(units, "G0::1")] = holders.Holder{Pod: "p"}
	c.reads()
	c.plan(1)
	clear(c.held)
	for range 12 {
		c.reads()
	}
	if waits, _ := c.waits(false); waits {
		t.Error("new evidence is awaited")
	}
}
