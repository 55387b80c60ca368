package serve_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const mig = "nvidia.com/mig-1g.10gb"

func migID(i int) string { return fmt.Sprintf("MIG-%08d-0000-0000-0000-000000000000", i) }

// partitioned returns a snapshot of one whole GPU and, unless it cannot be read, one with two MIG
// devices.
func partitioned(readable bool) inventory.Snapshot {
	healthy := inventory.Health{State: inventory.Healthy}
	all := gpus(2)
	if !readable {
		return inventory.Snapshot{GPUs: all[:1]}
	}
	all[1].MIG = inventory.MIGEnabled
	for i := range 2 {
		all[1].MIGDevices = append(all[1].MIGDevices, inventory.MIGDevice{UUID: migID(i), Index: i, Profile: "1g.10gb",
			Health: healthy})
	}
	return inventory.Snapshot{GPUs: all}
}

func (d *daemon) see(s inventory.Snapshot) {
	d.Apply(resource.New(s, resource.Options{MIG: resource.MIGMixed}), asEnvironment, 1)
}

// registrations counts the registrations of a resource since a mark.
func (n *node) registrations(resource string, after int) int {
	return len(slices.DeleteFunc(n.Events(after),
		func(e standin.Event) bool { return e.Kind != standin.Registered || e.Resource != resource }))
}

// A pod holds a MIG device, and the daemon starts again while nothing can be read that would tell
// of the resource. The device is listed, and not offered, until the pod ends or the device comes
// back.
func TestAResourceThatOnlyPodsTellOfIsServed(t *testing.T) {
	t.Parallel()
	tests := map[string]func(d *daemon){
		"its GPU is left out":                     func(d *daemon) { d.see(partitioned(false)) },
		"no GPU can be read":                      func(d *daemon) { d.see(inventory.Snapshot{}) },
		"the driver is away, and there's no plan": func(*daemon) {},
	}
	for name, start := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				c := clocktesting.NewFakeClock(time.Now())
				n := newNode(t)
				n.startKubelet(t, v)
				account := &countedAccount{Accountant: n.account(t, c)}
				before := n.startDaemonWith(t, c, account)
				before.see(partitioned(true))
				n.await(t, "two MIG devices", func() bool { return n.Allocatable(mig) == 2 })
				pod := standin.Container{Pod: "p", Name: "c", Resource: mig, Count: 1, SingleNode: true}
				got, err := n.Admit(t.Context(), pod)
				check(t, err)
				before.stop()
				n.awaitEnd(t)

				mark := n.Mark()
				d := n.startDaemonWith(t, c, account)
				start(d)
				departing := func() bool { // under load, the clock of the test can be too fast for one registration
					healthy, listed := n.Devices(mig)[got.IDs[0]]
					return listed && !healthy && n.Allocatable(mig) == 0 && n.registrations(mig, mark) > 0 &&
						slices.ContainsFunc(d.Status(), func(s serve.Status) bool { return s.Resource == mig && agreed(s) })
				}
				until(t, c, "the pod's device in a list of this daemon", departing)
				mark = n.Mark()
				check(t, n.Restart())
				until(t, c, "the pod's device in a list of the new kubelet", departing)
				if _, err := n.Admit(t.Context(), pod); errors.Is(err, standin.ErrCrash) {
					t.Error("kubelet crashed")
				}
				mark = n.Mark()
				d.see(partitioned(true))
				n.await(t, "both MIG devices again", func() bool { return n.Allocatable(mig) == 2 })
				d.see(partitioned(false))
				n.await(t, "no MIG device", func() bool { return n.Allocatable(mig) == 0 })
				if got := n.registrations(mig, mark); got != 0 {
					t.Errorf("%d registrations as the devices came and went, want none", got)
				}
				n.Remove("p")
				until(t, c, "dropped", func() bool { return n.Capacity(mig) == 0 })
			})
		})
	}
}

// When the pods have ended, nothing is left of a resource that the plan never had.
func TestAResourceThatOnlyPodsTellOfEndsWithThem(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		c := clocktesting.NewFakeClock(time.Now())
		n, theirs := unserved(t, v, mig, migID(0))
		account := &countedAccount{Accountant: n.account(t, c)}
		d := n.startDaemonWith(t, c, account)
		d.see(partitioned(false))
		account.pass(t, c, 5)
		if len(d.Status()) != 1 {
			t.Error("served at once; the plugin that served it may be starting again")
		}
		until(t, c, "served", func() bool { return n.Capacity(mig) == 1 && len(d.Status()) == 2 })
		n.SetPodsKnown(false)
		check(t, n.Restart())
		n.Remove("p")
		until(t, c, "served", func() bool { return n.Capacity(mig) == 1 })
		account.pass(t, c, 60)
		if n.Capacity(mig) != 1 {
			t.Error("the device was dropped although kubelet does not know that the pod has ended")
		}
		// The other plugin returns and registers last: it serves. On kubelet 1.36, the end of our stream
		// would end its service.
		came := c.Now()
		check(t, theirs.again(t))
		n.await(t, "their list", func() bool { return n.Allocatable(mig) == 1 })
		poll.Until(t, "silent", func() bool { // while the other plugin's socket counts as new
			if c.Since(came) < 50*time.Second {
				c.Step(20 * time.Millisecond)
			}
			return slices.ContainsFunc(d.Status(),
				func(s serve.Status) bool { return s.Resource == mig && s.Phase == serve.PhaseOtherPlugin })
		})
		n.SetPodsKnown(true)
		began := c.Now()
		until(t, c, "a minute later", func() bool { return c.Since(began) > time.Minute })
		if got := n.Allocatable(mig); got != 1 {
			t.Errorf("%d devices of the other plugin are allocatable, want 1", got)
		}
		theirs.Stop()
		until(t, c, "retired", func() bool { return len(d.Status()) == 1 })
		if got := n.Capacity(mig); got > 1 {
			t.Errorf("capacity %d", got)
		}
	})
}

// theirPlugin is another program's plugin.
type theirPlugin struct {
	*scenario.Plugin
	dir, resource, id string
}

// again starts the plugin after its end.
func (p *theirPlugin) again(t *testing.T) error {
	t.Helper()
	theirs, err := scenario.StartPlugin(p.dir, "nvidia-gpu.sock", p.resource, scenario.Script{})
	if err != nil {
		return err
	}
	t.Cleanup(theirs.Stop)
	p.Plugin = theirs
	theirs.Send(&device{ID: p.id, Health: pluginapi.Healthy})
	return theirs.Register(t.Context())
}

// hold has a pod hold the plugin's device, and ends the plugin.
func (p *theirPlugin) hold(t *testing.T, n *node, pod string) {
	t.Helper()
	check(t, p.again(t))
	n.await(t, "their device", func() bool { return n.Allocatable(p.resource) == 1 })
	_, err := n.Admit(t.Context(), standin.Container{Pod: pod, Name: "c", Resource: p.resource, Count: 1})
	check(t, err)
	p.Stop()
	n.await(t, "unserved", func() bool { return n.Allocatable(p.resource) == 0 })
}

// unserved returns a node on which pod p holds a device of a resource whose plugin, another
// program's, has ended.
func unserved(t *testing.T, v standin.Version, resource, id string) (*node, *theirPlugin) {
	t.Helper()
	n := newNode(t)
	n.startKubelet(t, v)
	theirs := &theirPlugin{dir: n.dir, resource: resource, id: id}
	theirs.hold(t, n, "p")
	return n, theirs
}

func TestWhatAnotherProgramServesOrMayServeIsLeftAlone(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		resource, id string
		// happens is what the other program does while the daemon runs.
		happens func(t *testing.T, theirs *theirPlugin)
	}{
		"another vendor's resource":        {resource: "example.com/gpu", id: id(1)},
		"IDs of another form":              {resource: "nvidia.com/vgpu", id: id(1) + "-3"},
		"IDs of another plugin's replicas": {resource: gpu, id: "nvidia0/vgpu1"},
		"its devices are Unhealthy": {resource: mig, id: migID(0), happens: func(t *testing.T, theirs *theirPlugin) {
			check(t, theirs.again(t))
			theirs.Send(&device{ID: migID(0), Health: pluginapi.Unhealthy})
		}},
		"its devices are Healthy": {resource: mig, id: migID(0),
			happens: func(t *testing.T, theirs *theirPlugin) { check(t, theirs.again(t)) }},
		"it starts, and has not registered": {resource: mig, id: migID(0), happens: func(t *testing.T, theirs *theirPlugin) {
			started, err := scenario.StartPlugin(theirs.dir, "nvidia-mig.sock", mig, scenario.Script{})
			check(t, err)
			t.Cleanup(started.Stop)
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothVersions(t, func(t *testing.T, v standin.Version) {
				c := clocktesting.NewFakeClock(time.Now())
				n, theirs := unserved(t, v, test.resource, test.id)
				if test.happens != nil {
					test.happens(t, theirs)
				} else {
					beside := &theirPlugin{dir: n.dir, resource: "nvidia.com/beside", id: id(2)}
					beside.hold(t, n, "q")
				}
				account := &countedAccount{Accountant: n.account(t, c)}
				d := n.startDaemonWith(t, c, account)
				d.see(inventory.Snapshot{})
				if test.happens != nil {
					account.pass(t, c, 60)
				} else {
					until(t, c, "the resource beside it served", func() bool { return len(d.Status()) > 0 })
				}
				for _, s := range d.Status() {
					if s.Resource == test.resource {
						t.Errorf("the daemon serves %s", s.Resource)
					}
				}
			})
		})
	}
}

// The accounts are read when the daemon starts and cannot be read then. Nothing is lost by that.
func TestWhatPodsHoldIsLookedForUntilAnAccountCanBeRead(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	n, _ := unserved(t, standin.V137, mig, migID(0))
	directory := n.directory(t)
	var damaged atomic.Bool
	var reads atomic.Int64
	d := n.startSetOn(t, serve.Collaborators{Accountant: &countedAccount{Accountant: n.account(t, c)}, Clock: c,
		Checkpoint: func() (kubelet.Checkpoint, error) {
			reads.Add(1)
			if damaged.Load() {
				return kubelet.Checkpoint{}, errors.New("damaged")
			}
			return directory.Checkpoint()
		}})
	damage := func() {
		damaged.Store(true)
		before := reads.Load()
		until(t, c, "three readings", func() bool { return reads.Load() >= before+3 })
	}
	damage()
	d.see(inventory.Snapshot{})
	damaged.Store(false)
	until(t, c, "served", func() bool { return len(d.Status()) == 1 && n.Capacity(mig) == 1 })
	n.Remove("p")
	damage()
	d.status(t, "the device waits for an account", func(s serve.Status) bool {
		return len(s.Retiring) == 1 && strings.Contains(s.Retiring[0].Waiting, "damaged")
	})
	damaged.Store(false)
	until(t, c, "retired", func() bool { return len(d.Status()) == 0 })
}
