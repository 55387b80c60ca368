package resource_test

import (
	"fmt"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/equality"
)

// linked are two GPUs, connected by so many NVLinks.
func linked(lanes int) *topology.Graph {
	link := func(peer int) []inventory.Link {
		return []inventory.Link{{Peer: fmt.Sprint("GPU-", peer), PeerIndex: peer, NVLinks: lanes, PCIe: inventory.PCIeSystem}}
	}
	return topology.New([]inventory.GPU{{UUID: "GPU-0", Index: 0, Links: link(1)},
		{UUID: "GPU-1", Index: 1, Links: link(0)}})
}

func TestEqual(t *testing.T) {
	t.Parallel()
	one := func(o resource.Options, g *topology.Graph) resource.Resource {
		return resource.NewResource("nvidia.com/gpu", o, g, []resource.Device{{ID: "a", UUID: "GPU-0"},
			{ID: "b", UUID: "GPU-1", Index: "1"}})
	}
	equality.Check(t, func() resource.Resource { return one(resource.Options{}, linked(1)) }, resource.Resource.Equal)
	equality.Check(t, func() resource.Plan {
		return resource.Plan{
			Resources: []resource.Resource{one(resource.Options{},
				linked(1))}, LeftOut: []resource.LeftOut{{UUID: "a"}}, Warnings: []string{"a"},
			Holds: []resource.Hold{{UUID: "a"}},
		}
	}, resource.Plan.Equal)

	// How it is served counts as well.
	same := one(resource.Options{}, linked(1))
	for name, other := range map[string]resource.Resource{
		"one device a request": one(resource.Options{Sharing: resource.Sharing{OnePerRequest: true}}, linked(1)),
		"another policy":       one(resource.Options{Policy: resource.PolicyPacked}, linked(1)),
		"MIG devices alone":    one(resource.Options{MIGParents: true}, linked(1)),
		"other connections":    one(resource.Options{}, linked(2)),
		"none":                 {},
	} {
		if same.Equal(other) || other.Equal(same) {
			t.Errorf("%s: equal", name)
		}
	}
	empty := func(g *topology.Graph) resource.Resource {
		return resource.NewResource("a", resource.Options{}, g, nil)
	}
	if empty(nil).Equal(empty(linked(1))) || empty(linked(1)).Equal(empty(nil)) || !empty(nil).Equal(empty(nil)) {
		t.Error("a graph and none are equal, or none and none are not")
	}
	if none := (resource.Resource{}); !none.Equal(resource.Resource{}) {
		t.Error("two resources without devices are not equal")
	}
}
