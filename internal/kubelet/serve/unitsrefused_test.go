package serve_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A container that is refused because its units are of two GPUs holds none of them: what is free on
// one GPU is offered as soon as the accounts were read, and no unit beside it. The kubelet asks
// for no preference where a container asks for all that is offered.
func TestUnitsOfARefusedContainer(t *testing.T) {
	t.Parallel()
	n := &unitNode{node: newNode(t), clock: clocktesting.NewFakeClock(time.Now()), gpus: 2, size: 8,
		pods: map[string][]string{}}
	n.startKubelet(t, standin.V137)
	n.apply(n.startDaemon(t, clock.RealClock{}), byMPS)
	n.settle(t)
	n.admit(t, "a", 5)
	n.settle(t)
	n.admit(t, "b", 5)
	n.settle(t)
	n.Remove("a") // its units are offered until the accounts were read
	delete(n.pods, "a")
	var all []string
	for unit, healthy := range n.Devices(mem) {
		if healthy && !slices.Contains(n.pods["b"], unit) {
			all = append(all, unit)
		}
	}
	began := time.Now()
	if err := n.allocate(t, all); len(all) != 3+5 || err == nil || !strings.Contains(err.Error(), "must be of one GPU") {
		t.Fatalf("a container that asks for %d units of two GPUs: %v", len(all), err)
	}
	n.settle(t)
	if took := time.Since(began); took > 8*time.Second { // what is given counts for ten
		t.Errorf("what is free on one GPU alone is offered after %v", took)
	}
}

// allocate calls Allocate as the kubelet does, for units. It returns the error of the server that
// knows them.
func (n *unitNode) allocate(t *testing.T, ids []string) error {
	t.Helper()
	var last error
	for _, name := range n.sockets(t) {
		client, err := grpc.NewClient("unix://"+filepath.Join(n.dir, name),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		check(t, err)
		_, err = pluginapi.NewDevicePluginClient(client).Allocate(t.Context(), &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
		check(t, client.Close())
		if status.Code(err) != codes.NotFound {
			last = err
		}
	}
	return last
}
