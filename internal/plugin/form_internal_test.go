package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/edits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// changing is a Set without a kubelet, whose plan and evidence a test changes.
type changing struct {
	*testing.T
	*Set
	clock *clocktesting.FakeClock
	gpus  []inventory.GPU
	held  map[deviceKey]holder
}

const gpuName = "nvidia.com/gpu"

func newChanging(t *testing.T, gpus int) *changing {
	t.Helper()
	clock := clocktesting.NewFakeClock(time.Now())
	c := &changing{T: t, Set: NewSet(Collaborators{Clock: clock}), clock: clock, held: map[deviceKey]holder{}}
	for i := range gpus {
		c.gpus = append(c.gpus, inventory.GPU{UUID: fmt.Sprintf("G%d", i), Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	return c
}

// plan has the GPUs offered with so many replicas; one: they are not shared.
func (c *changing) plan(replicas int) {
	o := resource.Options{MIG: resource.MIGMixed}
	if replicas > 1 {
		o.Sharing = resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: gpuName, Replicas: replicas}}}
	}
	c.Apply(resource.New(inventory.Snapshot{GPUs: c.gpus}, o), Options{WaitForRelease: true,
		Edits: edits.Options{Strategies: []edits.Strategy{edits.EnvVar}}}, 1)
}

// allocate returns what a container gets for a device, or why it is refused.
func (c *changing) allocate(id string) string {
	l := c.resources[gpuName].list
	s := &service{log: klog.Background(), list: l, allocating: func(r *pluginapi.AllocateRequest) *view { return c.allocating(l, r) }}
	got, err := s.Allocate(c.Context(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	if err != nil {
		return "refused: " + status.Convert(err).Message()
	}
	return got.GetContainerResponses()[0].GetEnvs()["NVIDIA_VISIBLE_DEVICES"]
}

// reads has the accounts read a second later.
func (c *changing) reads() {
	c.clock.Step(time.Second)
	c.drop(evidence{kubelet: 1, source: source{1, 1}, began: c.clock.Now(), held: c.held}, c.clock.Now())
}

func (c *changing) holds(ids ...string) {
	c.held = map[deviceKey]holder{}
	for _, id := range ids {
		c.held[deviceKey{gpuName, id}] = holder{pod: "p"}
	}
	c.reads()
}

// lists fails the test if other devices are listed as Healthy.
func (c *changing) lists(healthy ...string) {
	c.Helper()
	got := slices.Sorted(slices.Values(c.resources[gpuName].list.views.Value().healthy()))
	if slices.Sort(healthy); !slices.Equal(got, healthy) {
		c.Errorf("Healthy are %q, want %q", got, healthy)
	}
}

func TestDevicesOfAnOldFormStayHealthyWhilePodsHoldThem(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 3)
	c.plan(1)
	view := c.resources[gpuName].list.views
	c.plan(2)
	c.lists("G0", "G1", "G2") // nothing is known yet
	before := view.Value()
	c.holds("G1")
	c.lists("G0::0", "G1", "G2::0") // in one list: the count never falls
	if before.response == view.Value().response {
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

// The scheduler sends pods by the old count for some seconds. It must know the new one before the pods end that hold more devices than
// there will be, and pods that come meanwhile find those that are free.
func TestACountThatFallsIsToldAtOnce(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 2)
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
	shared := func(t *testing.T) *changing {
		c := newChanging(t, 1)
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
		if got := c.allocate("G0::0"); !strings.Contains(got, "its GPU is not free yet as nvidia.com/gpu G0") {
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
		c.clock.Step(growsAfter - 1)
		c.drop(evidence{kubelet: 1, source: source{1, 1}, began: c.clock.Now()}, c.clock.Now())
		c.lists("G0::0")
		if got := c.allocate("G0::1"); !strings.Contains(got, "its GPU was on offer in another form a moment ago") {
			t.Errorf("Allocate: %s", got)
		}
		c.clock.Step(1)
		c.drop(evidence{kubelet: 1, source: source{1, 1}, began: c.clock.Now()}, c.clock.Now())
		c.lists("G0::0", "G0::1")
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
		c.gpus[0].MIGDevices = []inventory.MIGDevice{{UUID: "M0", Profile: "1g.10gb", Health: inventory.Health{State: inventory.Healthy}}}
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
			t.Errorf("Allocate of a form that never was on offer: %s", got)
		}
		c.lists("G0")
	})
	t.Run("kubelet restarts after its end was seen", func(t *testing.T) {
		t.Parallel()
		c := shared(t)
		c.holds()
		c.reads()
		c.drop(evidence{kubelet: 1, gap: "kubelet has just restarted"}, c.clock.Now())
		c.lists("G0::0", "G0::1")
	})
}

// Kubelet's checkpoint names a pod that has ended until kubelet writes it again. PodResources has shown the pod, and does so no more.
func TestTheEndOfAPodIsSeenBeforeKubeletWritesItsCheckpoint(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 1)
	c.plan(1)
	c.plan(2)
	key := deviceKey{gpuName, "G0"}
	c.held[key] = holder{pod: "p", checkpointOnly: true} // an init container may be the holder
	c.reads()
	c.lists("G0")
	c.held[key] = holder{pod: "p"}
	c.reads()
	c.held[key] = holder{pod: "p", checkpointOnly: true}
	c.reads()
	c.lists("G0::0")
	c.reads()
	c.lists("G0::0", "G0::1")
	for range 20 {
		c.reads()
	}
	if departing, _ := c.resources[gpuName].list.leaving(); !departing {
		t.Error("a device was dropped that kubelet's checkpoint names")
	}
	// Given again, it may be held by an init container, which PodResources never shows.
	c.allocate("G0")
	for range 20 {
		c.reads()
	}
	c.lists("G0")
}

// Without PodResources, kubelet sees the end of a pod when it gives a device to the next one. A pod that asks for a resource of which nothing is
// on offer would wait for ever.
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
				c.drop(evidence{kubelet: 1, began: c.clock.Now(), held: heldIn(saved), checkpoint: saved, unasked: unasked}, c.clock.Now())
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
			if !restarted {
				c.plan(1)
			}
			c.Apply(resource.New(inventory.Snapshot{GPUs: c.gpus}, resource.Options{Sharing: resource.Sharing{
				Mode: resource.TimeSliced, RenameByDefault: true, Rules: []resource.SharingRule{{Name: gpuName, Replicas: 2}},
			}}), Options{WaitForRelease: true, Edits: edits.Options{Strategies: []edits.Strategy{edits.EnvVar}}}, 2)
			for range 60 {
				reads(false)
			}
			for range 30 {
				reads(true)
			}
			reads(true, "G0::0", "G0::1") // one is enough for the next pod
			reads(true, "G0::0", "G0::1")
			if got := strings.Join(c.Offered().Value().Warnings, "; "); !strings.Contains(got, "pod-resources is not mounted") {
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

// What an earlier process listed is given out by this one, too, until its end is seen.
func TestAnAdoptedDeviceIsGivenOut(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 2)
	c.collaborators.Checkpoint = func() (kubelet.Checkpoint, error) {
		return kubelet.Checkpoint{Healthy: map[string][]string{gpuName: {"G0", "G1", "G7"}}}, nil
	}
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

// In a roll-out, pods that the scheduler sends by the old count find a device from the first list on.
func TestWhatNoPodIsKnownToHoldIsOnOfferFirst(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 2)
	c.collaborators.Checkpoint = func() (kubelet.Checkpoint, error) {
		return kubelet.Checkpoint{
			Healthy: map[string][]string{gpuName: {"G0::0", "G0::1", "G0::2", "G1::0", "G1::1", "G1::2"}},
			Held:    []kubelet.HeldDevice{{Resource: gpuName, ID: "G0::0", Pod: "p"}, {Resource: gpuName, ID: "G1::1", Pod: "p"}},
		}, nil
	}
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
	c := newChanging(t, 3)
	c.plan(1)
	c.plan(2)
	c.holds("G0", "G1")
	prefer := func(available, required []string, size int32) []string {
		s := &service{log: klog.Background(), list: c.resources[gpuName].list}
		got, err := s.GetPreferredAllocation(context.Background(), &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, MustIncludeDeviceIDs: required, AllocationSize: size},
			},
		})
		if err != nil {
			return []string{err.Error()}
		}
		return slices.Sorted(slices.Values(got.GetContainerResponses()[0].GetDeviceIDs()))
	}
	for _, test := range []struct {
		available, required []string
		size                int32
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

// A call that kubelet made for a device which is withheld is refused, and changes nothing: the pod's device is on offer as before.
func TestACallForAWithheldDeviceChangesNothing(t *testing.T) {
	t.Parallel()
	c := newChanging(t, 1)
	c.plan(1)
	c.plan(2)
	c.holds("G0")
	if got := c.allocate("G0::0"); !strings.HasPrefix(got, "refused: ") {
		t.Errorf("Allocate of a withheld device: %s", got)
	}
	if l := c.resources[gpuName].list; l.departing["G0"].taken || len(l.allocated) > 0 {
		t.Errorf("the pod's device is taken: %v; allocated: %v", l.departing["G0"].taken, l.allocated)
	}
	if got := c.allocate("G0"); got != "G0" {
		t.Errorf("Allocate of the device on offer: %s", got)
	}
}
