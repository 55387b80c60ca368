package serve_test

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

func TestContainersAreRefusedOnDevicesThatMustNotBeUsed(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n, d := serving(t, v, clock.RealClock{}, 1)
		snapshot := inventory.Snapshot{GPUs: []inventory.GPU{
			{UUID: id(0), Health: inventory.Health{State: inventory.Healthy}},
		}}
		inspected := serve.Options{Edits: asEnvironment.Edits, Inspect: true}

		// Kubelet reads options when a server registers, so that other options take another life.
		mark := n.Mark()
		d.Apply(resource.New(snapshot, resource.Options{}), inspected, 1)
		n.await(t, "registered with other options", func() bool { return n.listedAnew(mark) && n.Allocatable(gpu) == 1 })

		d.inspector.say(errors.New("GPU 0 has XID 48; remedy: reset"))
		container := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}
		_, err := n.Admit(t.Context(), container)
		var refused *standin.PodError
		if !errors.As(err, &refused) || refused.Reason != standin.CreateContainerConfig {
			t.Fatalf("Admit() = %v, want %s", err, standin.CreateContainerConfig)
		}
		for _, words := range []string{"GPU 0 has XID 48", "delete the pod", gpu} {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("Admit() = %v, want %q in it", err, words)
			}
		}
		if _, err := n.client(t).PreStartContainer(t.Context(),
			&pluginapi.PreStartContainerRequest{DevicesIds: []string{"GPU-x"}}); status.Code(err) != codes.NotFound ||
			!strings.Contains(err.Error(), "GPU-x") {
			t.Errorf("PreStartContainer() of an unknown device = %v, want NotFound", err)
		}
		d.inspector.say(nil)
		if _, err := n.Admit(t.Context(), container); err != nil {
			t.Errorf("Admit() once the device is good = %v", err)
		}
	})
}

// TestDevicesThatLeftThePlanAreInspected: of those that an earlier process offered only the ID is
// known.
func TestDevicesThatLeftThePlanAreInspected(t *testing.T) {
	t.Parallel()
	bothVersions(t, func(t *testing.T, v standin.Version) {
		n := newNode(t)
		n.startKubelet(t, v)
		container := standin.Container{Pod: "p", Name: "c", Resource: gpu, Count: 1}
		inspected := serve.Options{Edits: asEnvironment.Edits, Inspect: true}
		other := func(d *daemon, uuid string) {
			d.Apply(resource.New(inventory.Snapshot{GPUs: []inventory.GPU{
				{UUID: uuid, Health: inventory.Health{State: inventory.Healthy}},
			}}, resource.Options{}), inspected, 1)
			n.await(t, uuid+" is listed", func() bool { return n.Devices(gpu)[uuid] })
		}
		inspectedNow := func(d *daemon, want resource.Device) {
			t.Helper()
			if err := n.StartAgain(t.Context(), container); err != nil {
				t.Fatal(err)
			}
			d.inspector.mu.Lock()
			defer d.inspector.mu.Unlock()
			if got := d.inspector.devices; len(got) != 1 || got[0].ID != want.ID || got[0].UUID != want.UUID ||
				got[0].GPU != want.GPU {
				t.Errorf("inspected %+v, want %+v", got, want)
			}
		}
		d := n.startDaemon(t, clock.RealClock{})
		other(d, id(0))
		if _, err := n.Admit(t.Context(), container); err != nil {
			t.Fatal(err)
		}
		inspectedNow(d, resource.Device{ID: id(0), UUID: id(0), GPU: id(0)})
		other(d, id(1))
		inspectedNow(d, resource.Device{ID: id(0), UUID: id(0), GPU: id(0)})
		mark := n.Mark()
		d.stop()
		// Kubelet 1.36 takes a stream whose end it sees late for that of the second daemon, and stops
		// that one.
		n.await(t, "the end of the first daemon's stream", func() bool { return n.count(standin.StreamEnded, mark) > 0 })
		d = n.startDaemon(t, clock.RealClock{})
		other(d, id(1)) // kubelet may show it from before
		n.await(t, "a list of the second daemon", func() bool { return n.listedAnew(mark) })
		inspectedNow(d, resource.Device{ID: id(0), UUID: id(0)})
	})
}
