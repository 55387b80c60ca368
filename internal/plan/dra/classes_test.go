package dra_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestClasses: classes tell devices apart by as little as possible, and a resource that claims
// cannot have is named.
func TestClasses(t *testing.T) {
	t.Parallel()
	device := func(kind, uuid, model, profile string) dra.Device {
		d := dra.Device{Name: uuid, Attributes: map[string]dra.Attribute{"type": {Type: dra.String, Value: kind}}}
		for name, value := range map[string]string{"uuid": uuid, "productName": model, "profile": profile} {
			if value != "" {
				d.Attributes[name] = dra.Attribute{Type: dra.String, Value: value}
			}
		}
		if kind == "mig" {
			d.Attributes["parentUUID"] = dra.Attribute{Type: dra.String, Value: "g"}
		}
		return d
	}
	gpu := func(uuid, model string) dra.Device { return device("gpu", uuid, model, "") }
	mig := func(uuid, profile string) dra.Device { return device("mig", uuid, "A", profile) }
	made := func(profile string) dra.Device {
		d := device("mig", "", "A", profile)
		d.Partition = &dra.Partition{Profile: profile}
		return d
	}
	shared := func(d dra.Device) dra.Device { d.SharedBy = dra.ByCount; return d }
	resource := func(name string, uuids ...string) dra.NamedResource {
		r := dra.NamedResource{Name: name}
		for _, uuid := range uuids {
			n := dra.NamedDevice{UUID: uuid, GPU: uuid}
			if strings.HasPrefix(uuid, "m") {
				n.GPU, n.Profile = "g", "1g"
			}
			r.Devices = append(r.Devices, n)
		}
		return r
	}
	byMPS := resource("nvidia.com/gpu.shared", "b")
	byMPS.Shared, byMPS.MPS = true, true
	ofClaims := resource("nvidia.com/mig-1g")
	ofClaims.Profiles = []string{"1g"}
	const kind, whole = "type == 'gpu'", "!('shared' in device.attributes['gpu-device-plugin.github.io'])"
	const isShared = "'shared' in device.attributes['gpu-device-plugin.github.io']"
	const at = "device.attributes['gpu.nvidia.com']"
	for name, tt := range map[string]struct {
		pool     []dra.Device
		of       []dra.NamedResource
		want     []string // name: selector, without the driver and device.attributes
		stranded []string // resource: missing of all
	}{
		"none": {},
		"one": {
			pool: []dra.Device{gpu("a", "A"), gpu("b", "B")},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "a", "b")},
			want: []string{"gpu.nvidia.com: " + kind + " && " + whole},
		},
		"profiles": {
			pool: []dra.Device{gpu("a", "A"), mig("m", "1g.10gb"), mig("n", "1g.10gb+me")},
			of: []dra.NamedResource{
				resource("nvidia.com/gpu", "a"), resource("nvidia.com/mig-1g.10gb", "m"),
				resource("nvidia.com/mig-1g.10gb.me", "n"),
			},
			want: []string{
				"gpu.nvidia.com: " + kind + " && " + whole, "mig-1g.10gb.nvidia.com: type == 'mig' && profile == " +
					"'1g.10gb' && " + whole,
				"mig-1g.10gb.me.nvidia.com: type == 'mig' && profile == '1g.10gb+me' && " + whole,
			},
		},
		"strategy single": {
			pool: []dra.Device{mig("m", "1g.10gb"), gpu("a", "A")},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "m", "a")},
			want: []string{"gpu.nvidia.com: (type == 'gpu' || type == 'mig' && profile == '1g.10gb') && " + whole},
		},
		"models": {
			pool: []dra.Device{gpu("a", "A"), gpu("b", "B's"), gpu("c", "C")},
			of:   []dra.NamedResource{resource("nvidia.com/small", "a"), resource("x.org/Large_1", "b", "c")},
			want: []string{
				"small.nvidia.com: " + kind + " && " + whole + " && 'productName' in " + at + " && productName == 'A'",
				"large-1.x.org: " + kind + " && " + whole + " && 'productName' in " + at +
					` && productName in ['B\'s', 'C']`,
			},
		},
		"models that are not in slices": {
			pool: []dra.Device{gpu("a", ""), gpu("b", "B")},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "a"), resource("nvidia.com/b", "b")},
			want: []string{
				"gpu.nvidia.com: " + kind + " && " + whole + " && 'uuid' in " + at + " && uuid == 'a'",
				"b.nvidia.com: " + kind + " && " + whole + " && 'productName' in " + at + " && productName == 'B'",
			},
		},
		"UUIDs": {
			pool: []dra.Device{gpu("a", "A"), gpu("b", "A")},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "a"), resource("nvidia.com/b", "b")},
			want: []string{
				"gpu.nvidia.com: " + kind + " && " + whole + " && 'uuid' in " + at + " && uuid == 'a'",
				"b.nvidia.com: " + kind + " && " + whole + " && 'uuid' in " + at + " && uuid == 'b'",
			},
		},
		"MIG devices that are there, and those made for claims": {
			pool: []dra.Device{mig("m", "1g"), made("1g")}, of: []dra.NamedResource{resource("nvidia.com/small", "m"),
				ofClaims},
			want: []string{
				"small.nvidia.com: type == 'mig' && profile == '1g' && " + whole + " && 'uuid' in " + at +
					" && uuid == 'm'",
				"mig-1g.nvidia.com: type == 'mig' && profile == '1g' && " + whole + " && !('uuid' in " + at + ")",
			},
		},
		"a MIG device of a claim": {
			pool: []dra.Device{made("1g")}, of: []dra.NamedResource{{Name: "nvidia.com/mig-1g",
				Devices: resource("", "m").Devices, Profiles: []string{"1g"}}},
			want: []string{"mig-1g.nvidia.com: type == 'mig' && profile == '1g' && " + whole},
		},
		"shared": {
			pool: []dra.Device{gpu("a", "A"), shared(gpu("b", "A"))},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "a"), byMPS},
			want: []string{"gpu.nvidia.com: " + kind + " && " + whole,
				"gpu.shared.nvidia.com by MPS: " + kind + " && " + isShared},
		},
		"all are shared": {
			pool:     []dra.Device{shared(gpu("a", "A")), shared(gpu("c", "A")), shared(gpu("b", "A"))},
			of:       []dra.NamedResource{resource("nvidia.com/gpu", "a", "c"), byMPS},
			want:     []string{"gpu.shared.nvidia.com by MPS: " + kind + " && " + isShared},
			stranded: []string{"nvidia.com/gpu: 2 of 2"},
		},
		"none is shared": {
			pool: []dra.Device{gpu("b", "A")}, of: []dra.NamedResource{byMPS},
			stranded: []string{"nvidia.com/gpu.shared: 1 of 1"},
		},
		"a GPU in MIG mode, by strategy none": {
			pool: []dra.Device{gpu("a", "A"), mig("m", "1g")},
			of:   []dra.NamedResource{resource("nvidia.com/gpu", "a", "g")},
			want: []string{"gpu.nvidia.com: " + kind + " && " + whole}, stranded: []string{"nvidia.com/gpu: 1 of 2"},
		},
		"one name of two": {
			pool: []dra.Device{gpu("a", "A"), gpu("b", "B")}, of: []dra.NamedResource{resource("x.org/a_b", "a"),
				resource("x.org/a-b", "b")},
			want: []string{
				"a-b.x.org: " + kind + " && " + whole + " && 'productName' in " + at + " && productName == 'A'",
				"another-a-b.x.org: " + kind + " && " + whole + " && 'productName' in " + at + " && productName == 'B'",
			},
		},
		"without devices": {of: []dra.NamedResource{{Name: "nvidia.com/gpu"}}},
	} {
		classes, missing := dra.Classes(dra.Pool{Slices: []dra.Slice{{Devices: tt.pool}}}, tt.of)
		var got, stranded []string
		for _, c := range classes {
			selector := strings.TrimPrefix(c.Selector, "device.driver == 'gpu.nvidia.com' && ")
			if len(c.Config) > 0 {
				c.Name += " by MPS"
			}
			got = append(got, c.Name+": "+strings.ReplaceAll(selector, at+".", ""))
		}
		for _, s := range missing {
			if stranded = append(stranded, fmt.Sprintf("%s: %d of %d", s.Resource, s.Missing, s.All)); s.Reason == "" {
				t.Errorf("%s: no reason for %s", name, s.Resource)
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(tt.stranded, stranded); diff != "" {
			t.Errorf("%s, stranded (-want +got):\n%s", name, diff)
		}
	}
}

// TestClassesOfAnotherName: attributes without a domain are in that of the driver's name, and
// configuration is for the driver of that name.
func TestClassesOfAnotherName(t *testing.T) {
	t.Parallel()
	gpu := dra.Device{SharedBy: dra.ByCount,
		Attributes: map[string]dra.Attribute{"type": {Type: dra.String, Value: "gpu"},
			"uuid": {Type: dra.String, Value: "a"}}}
	all, _ := dra.Classes(dra.Pool{Driver: "gpu.example.com", Slices: []dra.Slice{{Devices: []dra.Device{gpu}}}},
		[]dra.NamedResource{{Name: "nvidia.com/gpu", Devices: []dra.NamedDevice{{UUID: "a"}}, Shared: true, MPS: true}})
	c := all[0]
	want := "device.driver == 'gpu.example.com' && device.attributes['gpu.example.com'].type == 'gpu' && " +
		"'shared' in device.attributes['gpu-device-plugin.github.io']"
	if c.Name != "gpu.example.com" || c.Selector != want || c.Config[0].Opaque.Driver != "gpu.example.com" {
		t.Errorf("a class %+v", c)
	}
}
