package listing_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestAResourceThatNobodyServesForTenSeconds: it must be known for ten seconds
// without a gap, of one kubelet, that nobody serves it.
func TestAResourceThatNobodyServesForTenSeconds(t *testing.T) {
	t.Parallel()
	const (
		name = "nvidia.com/mig-1g.10gb"
		wait = 10 * time.Second
	)
	held := func(resource string) map[holders.Key]holders.Holder {
		return map[holders.Key]holders.Holder{keyOf(resource, "MIG-00000000-0000-0000-0000-000000000000"): {Pod: "p"}}
	}
	is := listing.Reading{Account: holders.Account{Kubelet: 1, Held: held(name)}, Alone: true}
	but := func(change func(*listing.Reading)) listing.Reading { r := is; change(&r); return r }
	for title, tt := range map[string]struct {
		meanwhile listing.Reading // after five seconds
		last      time.Duration
		want      bool
	}{
		"nearly":                    {is, wait - 1, false},
		"ten seconds":               {is, wait, true},
		"another listens meanwhile": {but(func(e *listing.Reading) { e.Alone = false }), wait, false},
		"a gap":                     {but(func(e *listing.Reading) { e.UnknownBecause = "damaged" }), wait, false},
		"another kubelet":           {but(func(e *listing.Reading) { e.Kubelet = 2 }), wait, false},
		"another serves it": {but(func(e *listing.Reading) { e.Healthy = map[string][]string{name: {"x"}} }), wait,
			false},
		"another resource is served": {but(func(e *listing.Reading) { e.Healthy = map[string][]string{"x": {"x"}} }), wait,
			true},
		"no pod holds it":   {but(func(e *listing.Reading) { e.Held = nil }), wait, false},
		"of another vendor": {but(func(e *listing.Reading) { e.Held = held("example.com/gpu") }), wait, false},
	} {
		c := newNode(t, 0)
		c.plan(1)
		began := c.now
		c.read(is)
		c.now = began.Add(5 * time.Second)
		c.read(tt.meanwhile)
		before := c.Latest()
		c.now = began.Add(tt.last)
		c.read(is)
		if served := c.Has(name); served != tt.want || served && c.Latest() == before {
			t.Errorf("%s: served %v, want %v", title, served, tt.want)
		}
	}
}

// TestWhoseResourceItIs: one that has a name and held devices as this program makes
// them, or those of the plan.
func TestWhoseResourceItIs(t *testing.T) {
	t.Parallel()
	const ours, theirs = "MIG-00000000-0000-0000-0000-000000000000", "nvidia0/vgpu1"
	for name, tt := range map[string]struct {
		resource string
		ids      []string
		claims   bool // a GPU may be held so
		want     bool
	}{
		"ours":                 {"nvidia.com/mig-1g.10gb", []string{ours}, true, true},
		"ours, two of them":    {"nvidia.com/mig-1g.10gb", []string{ours, ours + "::1"}, true, true},
		"theirs":               {"nvidia.com/gpu", []string{theirs}, false, false},
		"ours and theirs":      {"nvidia.com/gpu", []string{theirs, ours}, true, false},
		"a device of the plan": {"nvidia.com/gpu.shared", []string{"GPU-0::1"}, true, true},
		"a device of the plan of another vendor's": {"example.com/gpu", []string{"GPU-0::1"}, true, false},
	} {
		for range 10 { // devices come in any order
			c := newNode(t, 0)
			c.gpus = []inventory.GPU{{UUID: "GPU-0", Health: inventory.Health{State: inventory.Healthy}}}
			c.planWith(resource.Options{GPUs: []resource.Naming{{Pattern: "*", Name: "nvidia.com/planned"}}})
			r := listing.Reading{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{}}, Alone: true}
			for _, id := range tt.ids {
				r.Held[keyOf(tt.resource, id)] = holders.Holder{Pod: "p"}
			}
			c.read(r)
			if c.HasUnserved() != tt.claims {
				t.Errorf("%s: other forms count: %v, want %v", name, c.HasUnserved(), tt.claims)
			}
			c.now = c.now.Add(10 * time.Second)
			c.read(r)
			if served := c.Has(tt.resource); served != tt.want {
				t.Errorf("%s: served %v, want %v", name, served, tt.want)
				break
			}
		}
	}
}
