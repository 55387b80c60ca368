package layout_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// example has what files of mig-parted have.
const example = `version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  custom-config:
    - devices: [0,1]
      mig-enabled: false
    - device-filter: "0x233010DE"
      devices: [2]
      mig-enabled: true
      mig-devices:
        "1c.3g.40gb": 3
        "1g.10gb+me": 1
        "7c.7g.80gb": 0
    - device-filter: ["0x20B010DE", "0x2330:0x16c110de"]
      devices: all
      mig-enabled: true
      mig-devices: {2c.2g.20gb: 3}
  by-uuid:
    - devices: [GPU-aaaa, 3]
      mig-enabled: true
      mig-devices: {1g.24gb-me: 1, 1g.24gb+me.all: 1, 4g.96gb+gfx: 0}
`

func TestParse(t *testing.T) {
	t.Parallel()
	f, err := layout.Parse([]byte(example))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]layout.Item{
		"all-disabled": {{All: true}},
		"all-enabled":  {{All: true, Enabled: true}},
		"custom-config": {
			{Indexes: []int{0, 1}},
			{Indexes: []int{2}, Filters: []layout.Filter{{Device: 0x233010DE}}, Enabled: true,
				Devices: map[string]int{"1c.3g.40gb": 3, "1g.10gb+me": 1}},
			{
				All: true, Filters: []layout.Filter{{Device: 0x20B010DE}, {Device: 0x2330, Subsystem: 0x16c110de}},
				Enabled: true, Devices: map[string]int{"2g.20gb": 3},
			},
		},
		"by-uuid": {{
			Indexes: []int{3}, UUIDs: []string{"GPU-aaaa"}, Enabled: true,
			Devices: map[string]int{"1g.24gb-me": 1, "1g.24gb+me.all": 1},
		}},
	}
	if diff := cmp.Diff(want, layoutsOf(t, f)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"all-disabled", "all-enabled", "by-uuid", "custom-config"}, f.Names()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if _, err := f.Layout("none"); err == nil || err.Error() !=
		`no layout is called "none": give one of all-disabled, all-enabled, by-uuid, custom-config` {
		t.Errorf("got %v", err)
	}
	if _, err := f.Layout(""); err == nil {
		t.Error("no name stood for one of several layouts")
	}
	text := example
	for i := range 9000 {
		text += fmt.Sprintf("  fleet-%04d: [{devices: all, mig-enabled: false}]\n", i)
	}
	if f, err = layout.Parse([]byte(text)); err != nil {
		t.Fatal(err)
	}
	_, err = f.Layout(strings.Repeat("none", 1000))
	if err == nil || len(err.Error()) > 1000 ||
		!strings.HasSuffix(err.Error(), ", fleet-0035, fleet-0036 and 8963 more") {
		t.Errorf("9,004 layouts: %v", err)
	}
}

// layoutsOf returns the items of a file's layouts.
func layoutsOf(t *testing.T, f layout.File) map[string][]layout.Item {
	t.Helper()
	all := map[string][]layout.Item{}
	for _, name := range f.Names() {
		l, err := f.Layout(name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = l.Items
	}
	return all
}

func TestOnlyLayoutNeedsNoName(t *testing.T) {
	t.Parallel()
	f, err := layout.Parse([]byte(`{version: v1, mig-configs: {one: [{devices: all, mig-enabled: false}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	if l, err := f.Layout(""); err != nil || l.Name != "one" || len(l.Items) != 1 {
		t.Errorf("got %+v, %v", l, err)
	}
	if l, err := f.Layout("two"); err == nil {
		t.Errorf("another name gives %+v", l)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	item := func(text string) string {
		return "version: v1\nmig-configs:\n  x:\n  - " + strings.ReplaceAll(text, "\n", "\n    ")
	}
	devices := func(text string) string { return item("devices: all\nmig-enabled: true\nmig-devices: " + text) }
	for name, tt := range map[string]struct{ text, want string }{
		"nothing":         {"", "the file has no keys: it needs version: v1 and mig-configs"},
		"no map":          {"[]", "the file has no keys: it needs version: v1 and mig-configs"},
		"no YAML":         {"a: [", "not YAML: line 1: did not find expected node content"},
		"a key twice":     {"version: v1\nversion: v1", `not YAML: line 2: key "version" already set in map`},
		"no version":      {"mig-configs: {}", "version must be v1, in the first line of the file: version: v1"},
		"another version": {"version: v2", "version must be v1, in the first line of the file: version: v1"},
		"another key": {"version: v1\nmig-config: {}",
			"key mig-config is not known: the keys here are version, mig-configs"},
		"an empty map": {"version: v1\nmig-configs: {}",
			"mig-configs must be a map from the name of a layout to a list of items"},
		"no layouts": {"version: v1", "mig-configs must be a map from the name of a layout to a list of items"},
		"no items": {"version: v1\nmig-configs: {x: []}",
			"layout x has no items: give at least one with devices and mig-enabled"},
		"an empty item": {"version: v1\nmig-configs: {x: [null]}",
			"layout x, item 1: an item is a map with the keys devices and mig-enabled"},
		"a key of an item": {item("devices: all\nmig-enabled: true\nmig-device: {}"),
			"layout x, item 1: key mig-device is not known"},
		"no mode": {item("devices: all"), "layout x, item 1: mig-enabled must be true or false"},
		"a null mode": {item("devices: all\nmig-enabled: null"),
			"layout x, item 1: mig-enabled must be true or false"},
		"a mode as text": {item("devices: all\nmig-enabled: \"true\""),
			"layout x, item 1: mig-enabled must be true or false"},
		"no devices": {item("mig-enabled: false"),
			"layout x, item 1: devices must be all, or a list of GPUs by index or UUID"},
		"other devices": {item("devices: some\nmig-enabled: false"),
			"layout x, item 1: devices must be all, or a list"},
		"devices as text": {item("devices: [\"0\"]\nmig-enabled: false"),
			"layout x, item 1: devices must be all, or a list"},
		"a negative index": {item("devices: [-1]\nmig-enabled: false"),
			"layout x, item 1: devices must be all, or a list"},
		"half a GPU": {item("devices: [1.5]\nmig-enabled: false"),
			"layout x, item 1: devices must be all, or a list"},
		"a null index": {item("devices: [null]\nmig-enabled: false"),
			"layout x, item 1: devices must be all, or a list"},
		"a filter": {item("devices: all\nmig-enabled: false\ndevice-filter: H100"),
			`layout x, item 1: device-filter "H100" is not a PCI device ID`},
		"a filter's number": {item("devices: all\nmig-enabled: false\ndevice-filter: 7"),
			"layout x, item 1: device-filter must be a PCI device ID"},
		"an ID of nothing": {item("devices: all\nmig-enabled: false\ndevice-filter: \"0x0\""),
			`layout x, item 1: device-filter "0x0" is not a PCI`},
		"an ID that is long": {item("devices: all\nmig-enabled: false\ndevice-filter: \"0x1233010DE\""),
			`layout x, item 1: device-filter "0x12330`},
		"half an ID": {item("devices: all\nmig-enabled: false\ndevice-filter: \"0x233010DE:\""),
			`layout x, item 1: device-filter "0x233010DE:" is`},
		"a third ID": {item("devices: all\nmig-enabled: false\ndevice-filter: 1:2:3"),
			`layout x, item 1: device-filter "1:2:3" is not a PCI`},
		"no MIG devices": {item("devices: all\nmig-enabled: true"),
			"layout x, item 1: mig-devices is missing: give the profiles"},
		"MIG devices though": {item("devices: all\nmig-enabled: false\nmig-devices: {1g.10gb: 1}"),
			"layout x, item 1: mig-devices are given and"},
		"a list": {devices("[1g.10gb]"),
			"layout x, item 1: mig-devices must be a map from a profile to a whole number"},
		"half a device": {devices("{1g.10gb: 0.5}"),
			"layout x, item 1: mig-devices must be a map from a profile to a whole number"},
		"none at all": {devices("{1g.10gb: 0}"), "layout x, item 1: mig-devices has no profile with a count above 0"},
		"fewer than none": {devices("{1g.10gb: -1}"),
			"layout x, item 1: mig-devices: -1 of 1g.10gb: give a number from 0 to 64"},
		"no profile": {devices("{1g.10: 1}"),
			`layout x, item 1: mig-devices: "1g.10" is not the name of a MIG profile: write it as`},
		"an attribute": {devices("{1g.10gb+you: 1}"),
			`layout x, item 1: mig-devices: "1g.10gb+you" has the attribute +you, which is not`},
		"too many slices": {devices("{2c.1g.10gb: 1}"),
			`layout x, item 1: mig-devices: "2c.1g.10gb" has more compute slices (2c) than its`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := layout.Parse([]byte(tt.text))
			if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("got %v\nwant %s", err, tt.want)
			}
		})
	}
}

func TestItemMatches(t *testing.T) {
	t.Parallel()
	g := layout.GPU{Index: 2, UUID: "GPU-b", Partitions: inventory.Partitions{Mode: inventory.MIGEnabled,
		Pending: inventory.MIGEnabled, PCIDevice: 0x233010de, PCISubsystem: 0x16c110de}}
	for name, tt := range map[string]struct {
		item layout.Item
		want bool
	}{
		"all":            {layout.Item{All: true}, true},
		"its index":      {layout.Item{Indexes: []int{0, 2}}, true},
		"another":        {layout.Item{Indexes: []int{0, 1}}, false},
		"its UUID":       {layout.Item{UUIDs: []string{"GPU-b"}}, true},
		"another's UUID": {layout.Item{UUIDs: []string{"GPU-a"}}, false},
		"its model": {layout.Item{All: true, Filters: []layout.Filter{{Device: 1}, {Device: 0x233010de}}},
			true},
		"another model":     {layout.Item{All: true, Filters: []layout.Filter{{Device: 0x20b010de}}}, false},
		"its subsystem":     {layout.Item{All: true, Filters: []layout.Filter{{0x233010de, 0x16c110de}}}, true},
		"another subsystem": {layout.Item{All: true, Filters: []layout.Filter{{0x233010de, 0x16c010de}}}, false},
		"its model, another index": {layout.Item{Indexes: []int{1}, Filters: []layout.Filter{{Device: 0x233010de}}},
			false},
	} {
		tt.item.Enabled = true
		c := layout.Plan(layout.Layout{Items: []layout.Item{tt.item}}, []layout.GPU{g}).GPUs[0]
		if got := c.Note == ""; got != tt.want || c.Reason != "" {
			t.Errorf("%s: %v, %q %q", name, got, c.Note, c.Reason)
		}
	}
}

// FuzzParse holds that no input ends the program, and that what is accepted is what it says.
func FuzzParse(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("version: v1\nmig-configs: {x: [{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}]}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := layout.Parse(data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a sentence")
			}
			return
		}
		for _, name := range file.Names() {
			l, err := file.Layout(name)
			if err != nil || len(l.Items) == 0 {
				t.Fatalf("layout %q: %v", name, err)
			}
			text, err := yaml.Marshal(l.Document())
			if err != nil {
				t.Fatal(err)
			}
			again, err := layout.Parse(text)
			if diff := cmp.Diff(map[string][]layout.Item{name: l.Items}, layoutsOf(t, again),
				cmpopts.EquateEmpty()); err != nil || diff != "" {
				t.Errorf("the layout is not what is written of it: %v\n%s", err, diff)
			}
			for _, item := range l.Items {
				for device, count := range item.Devices {
					if count < 1 || count > 2*64 || !item.Enabled {
						t.Errorf("layout %q wants %d of %q", name, count, device)
					}
				}
			}
		}
	})
}
