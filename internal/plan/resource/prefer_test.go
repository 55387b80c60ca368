package resource_test

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// What is best is for package topology to know and to test; here it matters that it is asked about
// the right devices.
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

// MIG devices of one GPU count together, or each as a GPU of its own as with NVIDIA's device
// plugin.
func TestPreferMIGDevices(t *testing.T) {
	t.Parallel()
	snapshot := inventory.Snapshot{GPUs: []inventory.GPU{gpu(0, "1g.10gb", "1g.10gb", "1g.10gb"),
		gpu(1, "1g.10gb", "1g.10gb")}}
	// GPU 0 has a device in use and two that are not, GPU 1 has one in use.
	available := []string{"MIG-a1::0", "MIG-a1::1", "MIG-a2::1", "MIG-b0::0"}
	for _, tt := range []struct {
		policy resource.Policy
		alone  bool
		want   []string
	}{
		{resource.PolicyDistributed, false, []string{"MIG-a1::0", "MIG-b0::0"}},
		{resource.PolicyDistributed, true, []string{"MIG-a1::0", "MIG-a2::1"}},
		{resource.PolicyPacked, true, []string{"MIG-a2::1", "MIG-b0::0"}},
	} {
		r, found := resource.New(snapshot, resource.Options{
			MIG: resource.MIGMixed, Policy: tt.policy, MIGParents: tt.alone,
			Sharing: resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: "nvidia.com/mig-1g.10gb",
				Replicas: 2}}},
		}).Resource("nvidia.com/mig-1g.10gb")
		if !found {
			t.Fatal("no resource nvidia.com/mig-1g.10gb")
		}
		if got, err := r.Prefer(available, nil, 2); err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%v, each MIG device alone %v: got %q, %v, want %q", tt.policy, tt.alone, got, err, tt.want)
		}
	}
}

// A request for several devices is refused one that is shared, where so configured: it prefers the
// others.
func TestPreferWhatIsAdmitted(t *testing.T) {
	t.Parallel()
	r, found := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1), gpu(2), gpu(3)}}, resource.Options{
		Sharing: resource.Sharing{Mode: resource.TimeSliced, OnePerRequest: true, Rules: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Replicas: 2, Devices: []resource.Ref{"0", "1"}},
		}},
	}).Resource("nvidia.com/gpu")
	if !found {
		t.Fatal("no resource nvidia.com/gpu")
	}
	all := []string{"GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1", "GPU-c", "GPU-d"}
	for _, tt := range []struct {
		name                string
		available, required []string
		size                int
		want                []string
	}{
		{"one", all, nil, 1, []string{"GPU-a::0"}},
		{"two", all, nil, 2, []string{"GPU-c", "GPU-d"}},
		{"one that is required", all, []string{"GPU-d"}, 2, []string{"GPU-c", "GPU-d"}},
		{"a shared one that is required", all, []string{"GPU-a::0"}, 2, []string{"GPU-a::0", "GPU-b::0"}},
		{"more than are not shared", all, nil, 3, []string{"GPU-a::0", "GPU-b::0", "GPU-c"}},
		{"one named twice", []string{"GPU-c", "GPU-c", "GPU-a::0"}, nil, 2, []string{"GPU-a::0", "GPU-c"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got, err := r.Prefer(tt.available, tt.required, tt.size); err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

func TestPreferWithHugeSize(t *testing.T) {
	t.Parallel()
	r, _ := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1)}}, resource.Options{
		Sharing: resource.Sharing{Mode: resource.MPS, OnePerRequest: true, Rules: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Replicas: 2, Devices: []resource.Ref{"0"}},
		}},
	}).Resource("nvidia.com/gpu")
	var tooFew *topology.TooFewError
	if got, err := r.Prefer([]string{"GPU-b"}, nil, math.MaxInt); !errors.As(err, &tooFew) {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestPreferOfZeroResource(t *testing.T) {
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
