package serve_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/quiet"
)

// Units that left the plan.

// With fewer units than pods hold, all that is offered is what there is.
func TestAReserveThatGrows(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 2, 8)
	n.admit(t, "a", 7)
	n.settle(t)
	n.admit(t, "b", 8)
	n.settle(t)
	less := byMPS
	less.ReserveMiB = 4 << 10
	n.apply(d, less) // 5 units of each: 2 and 3 of those that are held are more
	until(t, n.clock, "all that is held stays offered", func() bool { return n.Allocatable(mem) == 15 })
	for _, pod := range []string{"a", "b"} {
		for unit, healthy := range n.PodStatus(pod)[mem] {
			if !healthy {
				t.Errorf("unit %s of %s is not Healthy", unit, pod)
			}
		}
	}
	n.size = 5
	n.Remove("a")
	delete(n.pods, "a")
	until(t, n.clock, "the 5 units of the GPU", func() bool { return n.Allocatable(mem) == 8+5 })
	n.Remove("b")
	delete(n.pods, "b")
	n.settle(t)
}

// TestUnitsThatLeaveAFreeGPU: what is offered once the reserve has grown is given at once.
func TestUnitsThatLeaveAFreeGPU(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 1, 8)
	n.settle(t)
	less := byMPS
	less.ReserveMiB = 4 << 10
	n.apply(d, less)
	until(t, n.clock, "only 5 units are offered", func() bool {
		for unit, healthy := range n.Devices(mem) {
			if _, number, _ := strings.Cut(unit, "::"); healthy != (number < "5") {
				return false
			}
		}
		return true
	})
	n.admit(t, "a", 5)
}

// TestUnitsThatLeaveBesideAnotherGPU: units that left the plan and that no pod holds are not
// offered beside the free units of another GPU. A pod of all that is offered is given it.
func TestUnitsThatLeaveBesideAnotherGPU(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		for name, rollOut := range map[string]bool{"reload": false, "roll-out": true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				n, d := newUnitNode(t, v, 2, 8)
				n.admit(t, "a", 2)
				n.settle(t)
				n.admit(t, "b", 8)
				n.settle(t)
				n.Remove("b") // its units were given a moment ago
				delete(n.pods, "b")
				n.settle(t)
				less := byMPS
				less.ReserveMiB = 4 << 10
				if rollOut {
					d.stop()
					n.awaitEnd(t)
					d = n.startDaemon(t, n.clock)
				}
				mark := n.Mark()
				n.apply(d, less) // 3 of the one GPU and 5 of the other are free, and 3 of that one were offered
				n.size = 5
				until(t, n.clock, "a list in which units that left come last", func() bool {
					return slices.ContainsFunc(n.Events(mark), func(e standin.Event) bool {
						return e.Kind == standin.Listed && e.Resource == mem && !strings.HasSuffix(e.Devices[5].GetID(), "::5")
					})
				})
				if free := n.Allocatable(mem) - n.held(); free != 5 {
					t.Errorf("%d units are offered, want 5", free)
				}
				n.admit(t, "c", 5)
			})
		}
	})
}

// TestUnitsThatLeaveWhileTheyAreAllocated: kubelet chose them before it received the list that has
// them not offered. The pod is given them, and they count as held from then on, also before its
// accounts were read.
func TestUnitsThatLeaveWhileTheyAreAllocated(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := newUnitNode(t, v, 2, 8)
		n.admit(t, "before", 1)
		n.settle(t)
		n.Remove("before")
		delete(n.pods, "before")
		n.settle(t) // the accounts were read
		less := byMPS
		less.ReserveMiB = 4 << 10
		answers := sync.OnceFunc(n.accounts.Unlock)
		n.WhileAllocating(func(now standin.Moment) {
			if now == standin.BeforeAllocate {
				n.apply(d, less)
				poll.Until(t, "a reading that waits, and 5 units offered",
					func() bool { return n.waiting.Load() > 0 && n.Allocatable(mem) == 5 })
				return
			}
			poll.Until(t, "those of the pod and 5 of the other GPU", func() bool { return n.Allocatable(mem) == 8+5 })
		})
		n.accounts.Lock()
		t.Cleanup(answers)
		n.admit(t, "a", 8)
		answers()
		n.WhileAllocating(nil)
		n.size = 5
		n.settle(t)
		n.Remove("a")
		delete(n.pods, "a")
		n.settle(t)
	})
}

// TestUnitsThatLeaveBeforeTheAccountsWereRead: a pod may hold any of them, so they stay offered,
// in place of others, until kubelet's accounts show that none does, or cannot be read for 10 s.
// What is offered is never more than the GPU has.
func TestUnitsThatLeaveBeforeTheAccountsWereRead(t *testing.T) {
	t.Parallel()
	for name, unreadable := range map[string]bool{"they are read": false, "they cannot be read": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := &unitNode{node: newNode(t), gpus: 1, size: 8}
			n.unreadable.Store(true)
			d := n.serve(t, standin.V137)
			mark, less := n.Mark(), byMPS
			less.ReserveMiB = 4 << 10
			n.apply(d, less)
			poll.Until(t, "3 units that left and 2 others", func() bool { return n.Allocatable(mem) == 5 && n.left() == 3 })
			n.unreadable.Store(unreadable)
			until(t, n.clock, "none that left", func() bool { return n.Allocatable(mem) == 5 && n.left() == 0 })
			for _, e := range n.Events(mark) {
				healthy := 0
				for _, d := range e.Devices {
					if d.GetHealth() == pluginapi.Healthy {
						healthy++
					}
				}
				if e.Kind == standin.Listed && e.Resource == mem && healthy != 5 {
					t.Errorf("a list has %d units offered, and the GPU has 5", healthy)
				}
			}
		})
	}
}

// left returns how many units that left a GPU, which had 8 and has 5, are offered.
func (n *unitNode) left() (count int) {
	for unit, healthy := range n.Devices(mem) {
		if _, number, _ := strings.Cut(unit, "::"); healthy && number >= "5" {
			count++
		}
	}
	return count
}

// TestUnitsThatLeaveAnInitContainer: PodResources leaves out init containers. Where the checkpoint
// cannot be read, that is no evidence.
func TestUnitsThatLeaveAnInitContainer(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 1, 8)
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "a", Name: "init", Resource: mem, Count: 8,
		Init: true}); err != nil {
		t.Fatal(err)
	}
	n.awaitReadings(t, 3)
	n.unreadable.Store(true)
	less := byMPS
	less.ReserveMiB = 4 << 10
	last := n.readings.Load()
	n.apply(d, less)
	poll.Until(t, "a reading", func() bool { return n.readings.Load() > last })
	n.clock.Step(time.Second)
	poll.Until(t, "another one", func() bool { return n.readings.Load() > last+1 })
	quiet.Wait(time.Second)
	if left := n.left(); left != 3 {
		t.Errorf("%d units that left are offered, and the container may hold all 3", left)
	}
	n.unreadable.Store(false)
	until(t, n.clock, "all that the container holds", func() bool { return n.Allocatable(mem) == 8 })
}

// TestUnitsOfAnInitContainerCount against the free ones of their GPU, also while the checkpoint
// cannot be read for long.
func TestUnitsOfAnInitContainerCount(t *testing.T) {
	t.Parallel()
	for name, unreadable := range map[string]bool{"given before": false, "given meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, d := newUnitNode(t, standin.V137, 1, 8)
			n.admit(t, "a", 4)
			n.settle(t)
			n.unreadable.Store(unreadable)
			n.awaitReadings(t, 2)
			got, err := n.Admit(t.Context(), standin.Container{Pod: "b", Name: "init", Resource: mem, Count: 4, Init: true})
			if err != nil {
				t.Fatal(err)
			}
			n.awaitReadings(t, 2)
			n.unreadable.Store(true)
			for began := n.clock.Now(); n.clock.Since(began) < 15*time.Second; {
				n.awaitReadings(t, 1)
			}
			n.Remove("a")
			less := byMPS
			less.ReserveMiB = 4 << 10
			n.apply(d, less)
			n.awaitReadings(t, 3)
			free := 0
			for unit, healthy := range n.Devices(mem) {
				if healthy && !slices.Contains(got.IDs, unit) {
					free++
				}
			}
			if free > 1 {
				t.Errorf("%d units are free, and the GPU has 5, of which a container has 4", free)
			}
		})
	}
}

// TestAUnitThatLeftIsGivenOnceMore: the pod that held it has ended a moment ago, and the list still
// has it offered in place of another unit of its GPU. A pod that needs it does not fail, and the
// node has no more units than the plan.
func TestAUnitThatLeftIsGivenOnceMore(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := newUnitNode(t, v, 1, 8)
		n.admit(t, "a", 7)
		n.admit(t, "b", 1)
		left := n.pods["b"][0]
		n.Remove("a")
		delete(n.pods, "a")
		n.settle(t)
		less := byMPS
		less.ReserveMiB = 2 << 10
		n.apply(d, less)
		n.size = 7
		until(t, n.clock, "6 units beside the one that left",
			func() bool { return n.Allocatable(mem) == 7 && n.Devices(mem)[left] })
		n.Remove("b")
		delete(n.pods, "b")
		n.admit(t, "c", 7)
		if !slices.Contains(n.pods["c"], left) {
			t.Fatalf("the pod has %q without %s", n.pods["c"], left)
		}
		n.settle(t)
		n.Remove("c")
		delete(n.pods, "c")
		until(t, n.clock, "the unit that left is not offered", func() bool { return !n.Devices(mem)[left] })
		n.settle(t)
		n.admit(t, "d", 7)
	})
}

// What pods hold of units outlives their configuration: the GPU is whole once the pod has ended.
func TestAGPUThatWasInUnits(t *testing.T) {
	t.Parallel()
	n, d := newUnitNode(t, standin.V137, 1, 8)
	n.admit(t, "a", 3)
	d.stop()
	n.awaitEnd(t)
	d = n.startDaemon(t, n.clock)
	d.Apply(units(3, 8, 0, byMPS), asEnvironment, 1)
	until(t, n.clock, "served for the pod", func() bool { return n.Allocatable("nvidia.com/gpu") == 2 && n.Allocatable(mem) > 0 })
	for range 15 {
		n.clock.Step(time.Second)
	}
	if n.Allocatable("nvidia.com/gpu.shared") != 0 {
		t.Error("the GPU is offered in another form while a pod has units of it")
	}
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "b", Name: "c", Resource: mem, Count: 1}); err == nil {
		t.Error("a unit was given that is not in the plan")
	}
	n.Remove("a")
	if _, err := n.Admit(t.Context(), standin.Container{Pod: "c", Name: "c", Resource: mem, Count: 3}); err == nil {
		t.Error("the units of a pod that has just ended were given, and the plan has none of their GPU")
	}
	until(t, n.clock, "shared by four", func() bool { return n.Allocatable("nvidia.com/gpu.shared") == 4 })
}

// TestUnitsThatLeaveWait: until the change may proceed, pods that were sent by the old count get
// units, and what is offered is never more than one GPU has free.
func TestUnitsThatLeaveWait(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		for name, rollOut := range map[string]bool{"reload": false, "roll-out": true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				n, d := newUnitNode(t, v, 2, 8)
				n.waits = true
				n.admit(t, "a", 2)
				n.settle(t) // 8 of the other GPU are free
				less := byMPS
				less.ReserveMiB = 4 << 10
				change := func() {
					mark := n.Mark()
					if rollOut {
						d.stop()
						n.awaitEnd(t)
						d = n.startDaemon(t, n.clock)
					}
					n.apply(d, less)
					if rollOut { // the kubelet keeps the counts of the process before
						n.awaitLists(t, mark)
					}
				}
				offers := func(count int) {
					t.Helper()
					poll.Until(t, fmt.Sprint(count), func() bool { return n.Allocatable(mem) == count && d.PendingShrink().Value() == 1 })
				}
				change()
				offers(2 + 8)
				last := n.readings.Load()
				n.clock.Step(time.Second)
				poll.Until(t, "a reading", func() bool { return n.readings.Load() > last })
				offers(2 + 8)
				n.admit(t, "b", 3)
				offers(5 + 5)
				change() // once more, while it waits
				offers(5 + 5)
				n.admit(t, "c", 5)
				offers(10 + 3)
				d.ApproveShrink(1)
				n.size = 5
				n.settle(t)
				n.admit(t, "d", 3)
			})
		}
	})
}

// TestUnitsOfAGPUThatLeavesWait: what is offered until then is what one GPU has free: one that
// stays in units, if there is one.
func TestUnitsOfAGPUThatLeavesWait(t *testing.T) {
	t.Parallel()
	for stay, free := range []int{7, 6} {
		t.Run(fmt.Sprint(stay), func(t *testing.T) {
			t.Parallel()
			n, d := newUnitNode(t, standin.V137, 2, 8)
			n.admit(t, "a", 2)
			n.settle(t)
			n.admit(t, "b", 1)
			n.settle(t) // 7 of the GPU that leaves in any case are free, and 6 of the other one
			o := asEnvironment
			o.AnnounceShrink = true
			d.Apply(units(n.gpus+2, n.size, stay, byMPS), o, 1)
			poll.Until(t, "what pods hold and what one GPU has free", func() bool { return n.Allocatable(mem) == 3+free })
			if got := d.PendingShrink().Value(); got != 1 {
				t.Errorf("change %d waits, want 1", got)
			}
			d.ApproveShrink(1)
			until(t, n.clock, "what is left", func() bool { return n.Allocatable(mem) == 3+6*stay })
		})
	}
}
