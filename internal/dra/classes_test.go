package dra_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
)

// TestClasses: classes tell devices apart by as little as possible.
func TestClasses(t *testing.T) {
	t.Parallel()
	gpu := func(uuid, model string) dra.NamedDevice { return dra.NamedDevice{UUID: uuid, Model: model} }
	mig := func(uuid, profile string) dra.NamedDevice {
		return dra.NamedDevice{UUID: uuid, Model: "A", Profile: profile}
	}
	const kind, whole = "type == 'gpu'", "!('shared' in device.attributes['gpu-device-plugin.github.io'])"
	const shared = "'shared' in device.attributes['gpu-device-plugin.github.io']"
	for name, tt := range map[string]struct {
		of   []dra.NamedResource
		want []string // name: selector, without the driver and device.attributes
	}{
		"none": {},
		"one":  {[]dra.NamedResource{{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{gpu("a", "A"), gpu("b", "B")}}}, []string{"gpu.nvidia.com: " + kind + " && " + whole}},
		"profiles": {
			[]dra.NamedResource{
				{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{gpu("a", "A")}},
				{Name: "nvidia.com/mig-1g.10gb", Devices: []dra.NamedDevice{mig("m", "1g.10gb")}},
				{Name: "nvidia.com/mig-1g.10gb.me", Devices: []dra.NamedDevice{mig("n", "1g.10gb+me")}},
			},
			[]string{
				"gpu.nvidia.com: " + kind + " && " + whole, "mig-1g.10gb.nvidia.com: type == 'mig' && profile == '1g.10gb' && " + whole,
				"mig-1g.10gb.me.nvidia.com: type == 'mig' && profile == '1g.10gb+me' && " + whole,
			},
		},
		"strategy single": {
			[]dra.NamedResource{{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{mig("m", "1g.10gb"), gpu("a", "A")}}},
			[]string{"gpu.nvidia.com: type in ['gpu', 'mig'] && " + whole},
		},
		"models": {
			[]dra.NamedResource{{Name: "nvidia.com/small", Devices: []dra.NamedDevice{gpu("a", "A")}}, {Name: "x.org/Large_1", Devices: []dra.NamedDevice{gpu("b", "B"), gpu("c", "C")}}},
			[]string{
				"small.nvidia.com: " + kind + " && " + whole + " && productName == 'A'",
				"large-1.x.org: " + kind + " && " + whole + " && productName in ['B', 'C']",
			},
		},
		"UUIDs": {
			[]dra.NamedResource{{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{gpu("a", "A")}}, {Name: "nvidia.com/b", Devices: []dra.NamedDevice{gpu("b", "A")}}},
			[]string{"gpu.nvidia.com: " + kind + " && " + whole + " && uuid == 'a'", "b.nvidia.com: " + kind + " && " + whole + " && uuid == 'b'"},
		},
		"shared": {
			[]dra.NamedResource{
				{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{gpu("a", "A")}},
				{Name: "nvidia.com/gpu.shared", Devices: []dra.NamedDevice{gpu("b", "A")}, Shared: true, MPS: true},
			},
			[]string{"gpu.nvidia.com: " + kind + " && " + whole, "gpu.shared.nvidia.com by MPS: " + kind + " && " + shared},
		},
		"without devices": {of: []dra.NamedResource{{Name: "nvidia.com/gpu"}}},
	} {
		var got []string
		for _, c := range dra.Classes("", tt.of) {
			selector := strings.TrimPrefix(c.Selector, "device.driver == 'gpu.nvidia.com' && ")
			if len(c.Config) > 0 {
				c.Name += " by MPS"
			}
			got = append(got, c.Name+": "+strings.ReplaceAll(selector, "device.attributes['gpu.nvidia.com'].", ""))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestClassesOfAnotherName: attributes without a domain are in that of the driver's name, and configuration is for the driver of that name.
func TestClassesOfAnotherName(t *testing.T) {
	t.Parallel()
	c := dra.Classes("gpu.example.com", []dra.NamedResource{{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{{UUID: "a"}}, Shared: true, MPS: true}})[0]
	want := "device.driver == 'gpu.example.com' && device.attributes['gpu.example.com'].type == 'gpu' && " +
		"'shared' in device.attributes['gpu-device-plugin.github.io']"
	if c.Name != "gpu.example.com" || c.Selector != want || c.Config[0].Opaque.Driver != "gpu.example.com" {
		t.Errorf("a class %+v", c)
	}
}
