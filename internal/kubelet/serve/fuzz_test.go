package serve

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// fuzzed returns the service of four GPUs: one shared, one unhealthy, one that is departing.
func fuzzed() *service {
	const name = resource.WholeGPU
	var gpus []inventory.GPU
	for i, uuid := range []string{"GPU-a", "GPU-b", "GPU-c", "GPU-d"} {
		gpus = append(gpus, inventory.GPU{UUID: uuid, Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	gpus[2].Health.State = inventory.Unhealthy
	o := resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced, OnePerRequest: true,
		Rules: []resource.SharingRule{
			{Name: name, Devices: []resource.Ref{"1"}, Replicas: 3},
		}}}
	ways := Options{Edits: containeredits.Options{
		Strategies: []containeredits.Strategy{containeredits.VolumeMounts, containeredits.CDIAnnotations,
			containeredits.CDICRI}, DeviceNodes: true,
	}}
	set := NewServers(Collaborators{Clock: clock.RealClock{}})
	for _, n := range []int{4, 3} {
		set.Apply(resource.New(inventory.Snapshot{GPUs: gpus[:n]}, o), ways, 1)
	}
	return alone(&registration{list: set.resources[name].list,
		allocating: func(ids [][]string) (listing.Answer, Options) { return set.allocating(name, ids) }})
}

func FuzzAllocate(f *testing.F) {
	for _, ids := range [][]string{nil, {""}, {"GPU-a"}, {"GPU-a", "GPU-a"}, {"GPU-b::0", "GPU-b::2"}, {"GPU-c"},
		{"GPU-d"}, {"GPU-b::00"}} {
		seed, err := proto.Marshal(&pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
			{DevicesIds: ids}, {DevicesIds: []string{"GPU-b::1"}},
		}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(seed)
	}
	s := fuzzed()
	f.Fuzz(func(t *testing.T, data []byte) {
		var request pluginapi.AllocateRequest
		if proto.Unmarshal(data, &request) != nil {
			return
		}
		response, err := s.Allocate(t.Context(), &request)
		if err != nil {
			refusals := []codes.Code{codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition}
			if !slices.Contains(refusals, status.Code(err)) || !strings.Contains(err.Error(), resource.WholeGPU) {
				t.Errorf("refused with %v", err)
			}
			return
		}
		if len(response.GetContainerResponses()) != len(request.GetContainerRequests()) {
			t.Fatalf("%d answers to %d containers", len(response.GetContainerResponses()), len(request.GetContainerRequests()))
		}
		for i, c := range request.GetContainerRequests() {
			ids := c.GetDevicesIds()
			given := len(response.GetContainerResponses()[i].GetCdiDevices())
			if len(ids) == 0 || given != len(ids) {
				t.Errorf("%q: given %d devices", ids, given)
			}
			for _, id := range ids {
				if !slices.Contains([]string{"GPU-a", "GPU-b::0", "GPU-b::1", "GPU-b::2"}, id) {
					t.Errorf("%q was given out", id)
				}
			}
		}
	})
}

func FuzzGetPreferredAllocation(f *testing.F) {
	for _, size := range []int32{0, 1, 3, -1, 1 << 30} {
		seed, err := proto.Marshal(&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: []string{"GPU-a", "GPU-b::0", "GPU-b::1", "GPU-z",
				"GPU-c"}, MustIncludeDeviceIDs: []string{"GPU-b::2"},
			AllocationSize: size,
		}}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(seed)
	}
	s := fuzzed()
	f.Fuzz(func(t *testing.T, data []byte) {
		var request pluginapi.PreferredAllocationRequest
		if proto.Unmarshal(data, &request) != nil {
			return
		}
		response, err := s.GetPreferredAllocation(t.Context(), &request)
		if err != nil {
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("refused with %v", err)
			}
			return
		}
		for i, c := range request.GetContainerRequests() {
			got := response.GetContainerResponses()[i].GetDeviceIDs()
			if len(got) < int(c.GetAllocationSize()) {
				t.Errorf("%d devices for a request for %d", len(got), c.GetAllocationSize())
			}
			for j, id := range got {
				offered := slices.Contains(c.GetAvailableDeviceIDs(), id) || slices.Contains(c.GetMustIncludeDeviceIDs(), id)
				if !offered || slices.Contains(got[:j], id) {
					t.Errorf("%q was preferred of %v", id, c)
				}
			}
			for _, id := range c.GetMustIncludeDeviceIDs() {
				if !slices.Contains(got, id) {
					t.Errorf("%q is required and not in %q", id, got)
				}
			}
		}
	})
}
