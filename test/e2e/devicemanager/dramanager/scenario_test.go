//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A scenario is a promise of test/e2e_node/dra_test.go, by its name there.
type scenario struct {
	name string
	// run shows it with the driver; nil if there is nothing of the driver's in it, and why.
	run func(n *node)
	why string
}

const kubeletAlone = "kubelet's own: "

var scenarios = []scenario{
	{name: "must register after Kubelet restart", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		n.restartKubelet()
		d.awaitRegistered(2)
		n.runs(n.pod("gpu-0"))
	}},
	{name: "must register after plugin restart", run: func(n *node) {
		n.startKubelet()
		n.startRegistered().stop()
		n.startRegistered()
		n.runs(n.pod("gpu-0"))
	}},
	{name: "must recover and register after registration failure", run: func(n *node) {
		k := n.startKubeletWithoutDRA()
		d := n.startDriver()
		n.eventually("kubelet refuses the driver", func() error {
			if problem := d.Status().Value().Problem; !strings.Contains(problem, "no handler registered for plugin type") {
				return errors.New(problem)
			}
			return nil
		})
		k.plugins.AddHandler("DRAPlugin", k.manager.GetWatcherHandler())
		d.awaitRegistered(1)
		n.runs(n.pod("gpu-0"))
	}},
	{name: "must recover and register after NotifyRegistrationStatus failure", why: "the driver's answer cannot fail"},
	{name: "must process pod created when kubelet is not running", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		n.stopKubelet()
		pod := n.pod("gpu-3")
		n.startKubelet()
		d.awaitRegistered(2)
		if got := n.runs(pod); !slices.Equal(got, []string{"/dev/nvidia3"}) {
			n.t.Errorf("the container gets %q", got)
		}
	}},
	{name: "must keep pod in pending state if NodePrepareResources times out", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		slow, fast := n.pod("gpu-0"), n.pod("gpu-1")
		hangs := make(chan struct{})
		d.on(func(_ context.Context, call, name string) error {
			if call == preparing && name == slow.Name {
				<-hangs
			}
			return nil
		})
		ended := make(chan error, 1)
		go func() { ended <- n.prepare(slow) }()
		n.eventually("the call hangs", func() error {
			if d.calls(preparing) == 0 {
				return errors.New("no call")
			}
			return nil
		})
		for range 3 { // beside it
			n.runs(fast)
			n.ends(fast)
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "it has not ended within 40s") {
			n.t.Errorf("the error is %v", err)
		}
		close(hangs)
		n.runs(slow)
	}},
	{name: "must run pod if NodePrepareResources fails and then succeeds", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		pod := n.pod("gpu-0")
		d.fail(preparing)
		if err := n.prepare(pod); err == nil || !strings.Contains(err.Error(),
			"NodePrepareResources failed for ResourceClaim "+pod.Name+": injected") {
			n.t.Errorf("the error is %v", err)
		}
		d.on(nil)
		n.runs(pod)
	}},
	{name: "must run pod if NodeUnprepareResources fails and then succeeds", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		pod := n.pod("gpu-0")
		n.runs(pod)
		d.fail(unpreparing)
		if err := n.manager().UnprepareResources(n.t.Context(), pod); err == nil || !n.recorded(pod) {
			n.t.Errorf("the error is %v, recorded %v", err, n.recorded(pod))
		}
		d.on(nil)
		n.ends(pod)
		if n.recorded(pod) {
			n.t.Error("the record is still there")
		}
	}},
	{name: "must retry NodePrepareResources after Kubelet restart", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		pod := n.pod("gpu-0")
		d.fail(preparing)
		if err := n.prepare(pod); err == nil {
			n.t.Error("no error")
		}
		n.stopKubelet()
		d.on(nil)
		n.startKubelet()
		d.awaitRegistered(2)
		n.runs(pod)
	}},
	{name: "must retry NodeUnprepareResources after Kubelet restart", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		pod := n.pod("gpu-0")
		n.runs(pod)
		d.fail(unpreparing)
		if err := n.manager().UnprepareResources(n.t.Context(), pod); err == nil {
			n.t.Error("no error")
		}
		n.stopKubelet()
		d.on(nil)
		n.startKubelet()
		d.awaitRegistered(2)
		n.ends(pod)
		if n.recorded(pod) {
			n.t.Error("the record is still there")
		}
	}},
	{name: "must call NodeUnprepareResources for deleted pod", run: func(n *node) { n.unpreparesDeleted(false) }},
	{name: "must call NodeUnprepareResources for deleted pod after Kubelet restart",
		run: func(n *node) { n.unpreparesDeleted(true) }},
	{name: "must not call NodePrepareResources for deleted pod after Kubelet restart",
		why: kubeletAlone + "which pods it starts"},
	{name: "must be functional when plugin starts to listen on a service socket after registration",
		why: "the driver has one socket for registration and calls, which listens before kubelet sees it"},
	{name: "must be functional after service reconnect", run: func(n *node) {
		n.startKubelet()
		first := n.startRegistered()
		pod := n.pod("gpu-0")
		n.runs(pod)
		first.stop()
		if err := n.manager().UnprepareResources(n.t.Context(), pod); err == nil {
			n.t.Error("kubelet unprepared without a driver")
		}
		n.startRegistered()
		n.ends(pod)
		if n.recorded(pod) {
			n.t.Error("the record is still there")
		}
	}},
	{name: "must report gRPC serving error", why: "a socket that cannot be served is given up for another one"},
	{name: "must use one gRPC connection for all service calls", run: func(n *node) { n.usesOneConnection() }},
	{name: "must prepare and unprepare resources", run: func(n *node) {
		n.startKubelet()
		n.startOther()
		n.startRegistered()
		pod := n.pod("other:x", "gpu-2")
		if got := n.runs(pod); !slices.Equal(got, []string{"/dev/nvidia2"}) {
			n.t.Errorf("the container gets %q", got)
		}
		n.ends(pod)
		if n.recorded(pod) {
			n.t.Error("the record is still there")
		}
	}},
	{name: "must provide metrics", why: kubeletAlone + "its metrics"},
	{name: "must run pod if NodePrepareResources fails for one plugin and then succeeds",
		run: func(n *node) { n.otherFails(preparing) }},
	{name: "must run pod if NodeUnprepareResources fails for one plugin and then succeeds",
		run: func(n *node) { n.otherFails(unpreparing) }},
	{name: "must run pod if NodePrepareResources is in progress for one plugin when Kubelet restarts",
		run: func(n *node) { n.restartsDuring(preparing) }},
	{name: "must call NodeUnprepareResources again if it's in progress for one plugin when Kubelet restarts",
		run: func(n *node) { n.restartsDuring(unpreparing) }},
	{name: "must be removed on kubelet startup", run: func(n *node) {
		n.startWiped()
		n.startRegistered() // tells package cluster to publish
	}},
	{name: "must be removed after plugin unregistration", run: func(n *node) { n.wiped(func(d *driver) { d.stop() }) }},
	{name: "must be removed if plugin stops after registration",
		why: "with one socket it is the same as the scenario before"},
	{name: "must be removed if plugin is unresponsive after registration",
		why: kubeletAlone + "what it does about a driver without connection"},
	{name: "must not be removed if plugin restarts quickly enough", run: func(n *node) {
		n.startWiped()
		d := n.startRegistered()
		n.publish()
		d.stop()
		n.startRegistered()
		over := time.After(35 * time.Second) // kubelet's patience is 30 s
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			if err := n.slices(1); err != nil {
				n.t.Fatal(err)
			}
			select {
			case <-over:
				return
			case <-ticker.C:
			}
		}
	}},
	{name: "should reflect device health changes in the Pod's status", run: func(n *node) { n.reflectsHealth("gpu-0") }},
	{name: "should reflect device health changes for a plugin which only supports the v1alpha1 health API",
		why: "kubelet 1.36 knows that alone"},
	{name: "should reflect device health changes for a plugin which only supports the v1 health API",
		why: "kubelet 1.37 takes that first"},
	{name: "must reuse one gRPC connection for service and health-monitoring calls",
		run: func(n *node) { n.usesOneConnection() }},
	{name: "should update health to Unknown when plugin stops and recover upon restart", run: func(n *node) {
		n.startKubelet()
		d := n.startRegistered()
		pod := n.pod("gpu-0")
		n.runs(pod)
		n.awaitHealth(pod, "Healthy")
		d.stop()
		n.awaitHealth(pod, "Unknown")
		n.startRegistered()
		n.awaitHealth(pod, "Healthy")
	}},
	{name: "should automatically reconnect both DRA and Health API after connection drop", run: func(n *node) {
		n.startKubelet()
		kill := n.startProcess()
		pod := n.pod("gpu-0")
		n.runs(pod)
		n.awaitHealth(pod, "Healthy")
		kill()
		n.awaitHealth(pod, "Unknown")
		n.startProcess()
		n.awaitHealth(pod, "Healthy")
		n.ends(pod)
		n.runs(n.pod("gpu-0"))
	}},
	{name: "should handle concurrent DRA operations and health monitoring without connection issues", run: func(n *node) {
		n.startKubelet()
		n.startRegistered()
		watched := n.pod("gpu-0")
		n.runs(watched)
		var pods sync.WaitGroup
		for gpu := 1; gpu < 8; gpu++ {
			pods.Go(func() {
				for range 5 {
					pod := n.pod("gpu-" + strconv.Itoa(gpu))
					err := n.prepare(pod)
					if err == nil {
						err = n.manager().UnprepareResources(n.t.Context(), pod)
					}
					if err != nil {
						n.t.Error(err)
					}
				}
			})
		}
		for range 3 {
			n.setHealth(inventory.Health{State: inventory.Unhealthy, Reason: "XID 79", Remedy: inventory.RemedyReset})
			n.awaitHealth(watched, "Unhealthy XID 79; remedy: reset")
			n.setHealth(inventory.Health{State: inventory.Healthy})
			n.awaitHealth(watched, "Healthy")
		}
		pods.Wait()
	}},
	{name: "should not add health status to Pod when feature gate is disabled", why: kubeletAlone + "its gate"},
	{name: "should reflect device health changes for devices with ShareID",
		run: func(n *node) { n.reflectsHealth("gpu-0/one", "gpu-0/two") }},
	{name: "must be functional when plugin starts to listen on a service socket after registration with the specified " +
		"allocation results",
		run: func(n *node) { n.sharesDevices() }},
}

// TestScenarios shows the promises that the driver has a part in.
func TestScenarios(t *testing.T) {
	t.Parallel()
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if s.run == nil {
				t.Skip(s.why)
			}
			s.run(newNode(t))
		})
	}
}

// TestScenariosAreAll holds the table to Kubernetes' own list.
func TestScenariosAreAll(t *testing.T) {
	t.Parallel()
	if !newest {
		t.Skip("the table is that of kubelet 1.37")
	}
	pointer := reflect.ValueOf(dra.NewManager).Pointer()
	manager, _ := runtime.FuncForPC(pointer).FileLine(pointer)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(manager), "../../../../test/e2e_node/dra_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var theirs, ours []string
	for _, found := range regexp.MustCompile(`\w+\.(?:It|DescribeTable)\("([^"]+)"`).FindAllStringSubmatch(string(text),
		-1) {
		theirs = append(theirs, found[1])
	}
	for _, s := range scenarios {
		ours = append(ours, s.name)
	}
	if !slices.Equal(theirs, ours) {
		t.Errorf("Kubernetes has the scenarios\n%s\nand the table has\n%s", strings.Join(theirs, "\n"),
			strings.Join(ours, "\n"))
	}
}

// unpreparesDeleted has a pod deleted without kubelet's ending it in order, as by force.
func (n *node) unpreparesDeleted(restart bool) {
	n.t.Helper()
	n.startKubelet()
	n.startRegistered()
	pod := n.pod("gpu-0")
	n.runs(pod)
	claim, err := n.api.Claim(namespace, pod.Name)
	if err != nil {
		n.t.Fatal(err)
	}
	if restart {
		n.stopKubelet()
	}
	n.remove(pod)
	if restart {
		n.startKubelet()
	}
	n.eventually("the claim is unprepared", func() error {
		if n.hasRecord(string(claim.UID)) {
			return errors.New("it has a record")
		}
		return nil
	})
}

func (n *node) usesOneConnection() {
	n.t.Helper()
	n.startKubelet()
	n.startRegistered()
	for gpu := range 4 {
		pod := n.pod("gpu-" + strconv.Itoa(gpu))
		n.runs(pod)
		n.awaitHealth(pod, "Healthy")
		n.ends(pod)
	}
	n.eventually("one connection", func() error { // that of the registration ends
		if now := n.connected(); now != 1 {
			return fmt.Errorf("there are %d", now)
		}
		return nil
	})
}

// otherFails has a call of somebody else's driver fail at first, for a claim that both have a part
// in.
func (n *node) otherFails(which string) {
	n.t.Helper()
	n.startKubelet()
	o := n.startOther()
	n.startRegistered()
	pod := n.pod("gpu-0", "other:x")
	failed := false
	o.on(func(call string) error {
		if call == which && !failed {
			failed = true
			return errors.New("injected")
		}
		return nil
	})
	n.runs(pod)
	n.ends(pod)
	if !failed || n.recorded(pod) {
		n.t.Errorf("failed %v, recorded %v", failed, n.recorded(pod))
	}
}

// restartsDuring has kubelet restart while a call of the driver is being answered, for a claim that
// another driver has a part in, too.
func (n *node) restartsDuring(which string) {
	n.t.Helper()
	n.startKubelet()
	n.startOther()
	d := n.startRegistered()
	pod := n.pod("gpu-0", "other:x")
	if which == unpreparing {
		n.runs(pod)
	}
	began, first := make(chan struct{}), sync.Once{}
	d.on(func(ctx context.Context, call, _ string) error {
		if call == which {
			first.Do(func() {
				close(began)
				<-ctx.Done()
			})
		}
		return nil
	})
	ended := make(chan error, 1)
	manager := n.manager()
	calls := manager.UnprepareResources
	if which == preparing {
		calls = manager.PrepareResources
	}
	go func() {
		for pause := time.NewTicker(10 * time.Millisecond); ; <-pause.C {
			err := calls(context.Background(), pod)
			select {
			case <-began:
				pause.Stop()
				ended <- err
				return
			default: // the other driver is not registered yet, and the kubelet calls again
			}
		}
	}()
	<-began
	n.restartKubelet()
	if err := <-ended; err == nil {
		n.t.Error("the call of the kubelet that ended has no error")
	}
	d.awaitRegistered(2)
	if which == preparing {
		n.runs(pod)
	}
	n.ends(pod)
	if n.recorded(pod) {
		n.t.Error("the record is still there")
	}
}

// publish publishes a slice of the driver's.
func (n *node) publish() {
	n.t.Helper()
	if err := n.api.ChangeSlice("slice", func(s *resourceapi.ResourceSlice) {
		name := nodeName
		s.Name, s.Spec.NodeName, s.Spec.Driver = "slice", &name, policy.Driver
	}); err != nil {
		n.t.Fatal(err)
	}
}

// slices returns an error unless there are so many slices.
func (n *node) slices(want int) error {
	if got := len(n.api.Slices()); got != want {
		return fmt.Errorf("there are %d slices, want %d", got, want)
	}
	return nil
}

// startWiped starts kubelet and waits until it has deleted the slices of before, which it does some
// time after its start.
func (n *node) startWiped() {
	n.t.Helper()
	n.publish()
	n.startKubelet()
	n.eventually("kubelet has deleted the slices", func() error { return n.slices(0) })
}

// wiped has kubelet delete the slices after something happened to the driver.
func (n *node) wiped(after func(*driver)) {
	n.t.Helper()
	n.startWiped()
	d := n.startRegistered()
	n.publish()
	after(d)
	n.eventually("kubelet has deleted the slices", func() error { return n.slices(0) })
}
