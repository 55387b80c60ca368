package resource_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/topology"
)

// What is best is for package topology to know and to test; here it matters that it is asked about the right devices.
func TestPreferKnowsLinksAndSharing(t *testing.T) {
	t.Parallel()
	link := func(peer string, index int) []inventory.Link {
		return []inventory.Link{{Peer: peer, PeerIndex: index, NVLinks: 4, NVLinkVersion: 3}}
	}
	gpus := []inventory.GPU{gpu(0), gpu(1), gpu(2), gpu(3)}
	gpus[1].Links, gpus[3].Links = link("GPU-d", 3), link("GPU-b", 1)
	twice := resource.Sharing{
		Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}},
	}
	for _, tt := range []struct {
		name      string
		options   resource.Options
		available []string
		want      []string
	}{
		{name: "linked GPUs", available: []string{"GPU-a", "GPU-b", "GPU-c", "GPU-d"}, want: []string{"GPU-b", "GPU-d"}},
		{
			name: "distributed replicas", options: resource.Options{Sharing: twice},
			available: []string{"GPU-a::0", "GPU-c::0", "GPU-c::1"}, want: []string{"GPU-a::0", "GPU-c::0"},
		},
		{
			name: "packed replicas", options: resource.Options{Sharing: twice, Policy: resource.PolicyPacked},
			available: []string{"GPU-a::1", "GPU-c::0", "GPU-c::1", "GPU-d::1"}, want: []string{"GPU-a::1", "GPU-d::1"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, found := resource.New(inventory.Snapshot{GPUs: gpus}, tt.options).Resource("nvidia.com/gpu")
			if !found {
				t.Fatal("no resource nvidia.com/gpu")
			}
			got, err := r.Prefer(tt.available, nil, 2)
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

func TestTheZeroResourceHasNothingToPrefer(t *testing.T) {
	t.Parallel()
	var r resource.Resource
	var tooFew *topology.TooFewError
	if got, err := r.Prefer([]string{"GPU-a"}, nil, 1); !errors.As(err, &tooFew) {
		t.Errorf("got %q, %v", got, err)
	}
	if d, found := r.Device("GPU-a"); found {
		t.Errorf("has %+v", d)
	}
}
