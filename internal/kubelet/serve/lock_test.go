package serve_test

import (
	"context"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A stuck collaborator does not answer calls of one kind until it is released.
type stuck struct {
	serve.Registrar
	serve.Accountant
	checkpoint func() (kubelet.Checkpoint, error)
	call       string
	entered    chan struct{} // has a value once the call is made
	released   chan struct{}
}

func (s *stuck) pass(call string) {
	if call != s.call {
		return
	}
	select {
	case s.entered <- struct{}{}:
	default:
	}
	<-s.released
}

func (s *stuck) NewEndpoint(resource string) string {
	s.pass("NewEndpoint")
	return s.Registrar.NewEndpoint(resource)
}

func (s *stuck) Peers(resource string) kubelet.Peers {
	s.pass("Peers")
	return s.Registrar.Peers(resource)
}

func (s *stuck) Listening(ctx context.Context) []string {
	s.pass("Listening")
	return s.Registrar.Listening(ctx)
}

func (s *stuck) Register(ctx context.Context, incarnation uint64, name, endpoint string,
	o *pluginapi.DevicePluginOptions) error {
	s.pass("Register")
	return s.Registrar.Register(ctx, incarnation, name, endpoint, o)
}

func (s *stuck) Allocatable(ctx context.Context) (map[string][]string, error) {
	s.pass("Allocatable")
	return s.Accountant.Allocatable(ctx)
}

func (s *stuck) Held(ctx context.Context) ([]kubelet.HeldDevice, error) {
	s.pass("Held")
	return s.Accountant.Held(ctx)
}

func (s *stuck) read() (kubelet.Checkpoint, error) {
	s.pass("Checkpoint")
	return s.checkpoint()
}

// Metrics and status are read while kubelet or its directory does not answer.
func TestStatusIsReadWhileCallsHang(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"NewEndpoint", "Peers", "Listening", "Register", "Allocatable", "Held", "Checkpoint"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			n, _ := unserved(t, standin.V137, "nvidia.com/beside", id(2))
			directory := n.directory(t)
			s := &stuck{Registrar: directory, Accountant: n.account(t, clock.RealClock{}), checkpoint: directory.Checkpoint,
				call: call, entered: make(chan struct{}, 1), released: make(chan struct{})}
			d := n.startSetOn(t, serve.Collaborators{Registrar: s, Accountant: s, Clock: clock.RealClock{}, Checkpoint: s.read})
			applied := make(chan struct{})
			go func() { // it may wait for the checkpoint
				defer close(applied)
				d.see(partitioned(true))
				d.see(inventory.Snapshot{GPUs: gpus(1)}) // MIG devices depart
			}()
			defer func() { close(s.released); <-applied }()
			late := time.After(patience)
			select {
			case <-s.entered:
			case <-late:
				t.Fatalf("%s is never called", call)
			}
			read := make(chan struct{})
			go func() {
				defer close(read)
				_, _ = d.Status(), d.Offered().Value()
			}()
			select {
			case <-read:
			case <-late:
				t.Errorf("the status cannot be read while %s hangs", call)
			}
		})
	}
}
