package layout_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

const (
	h100 = 0x233010de
	a100 = 0x20b010de
	b30  = 0x20b710de
	rtx  = 0x2bb510de
)

// maxSlices is more memory slices than any GPU has.
const maxSlices = 64

// gpu returns a GPU in multi-instance mode with the given instances: a profile, "@", the first
// slice, and "!" if it is in use.
func gpu(device uint32, instances ...string) layout.GPU {
	g := layout.GPU{
		UUID: "GPU-0", InUse: map[int]bool{},
		Partitions: inventory.Partitions{PCIDevice: device, Mode: inventory.MIGEnabled, Pending: inventory.MIGEnabled},
	}
	for id, text := range instances {
		text, inUse := strings.CutSuffix(text, "!")
		text, bare := strings.CutSuffix(text, "?")
		name, at, _ := strings.Cut(text, "@")
		var start int
		if _, err := fmt.Sscan(at, &start); err != nil {
			panic(err)
		}
		compute, all, instance := parse(name)
		i := inventory.GPUInstance{ID: id + 1, Profile: instance, Start: start}
		for _, p := range profilesOf(device) {
			if p.Name == i.Profile {
				i.Size = p.Size
			}
		}
		for n := 0; n < all/compute && !bare; n++ {
			i.Computes = append(i.Computes, inventory.ComputeInstance{ID: n, Start: n * compute, Slices: compute})
		}
		g.Instances = append(g.Instances, i)
		g.InUse[i.ID] = inUse
	}
	return g
}

// onAllGPUs returns a layout that wants the given devices on all GPUs.
func onAllGPUs(devices map[string]int) layout.Layout {
	return layout.Layout{Name: "test", Items: []layout.Item{{All: true, Enabled: true, Devices: devices}}}
}

// show writes the steps of a change, one a line.
func show(c layout.GPUChange) []string {
	var lines []string
	for _, s := range c.Steps {
		line := string(s.Action)
		switch s.Action {
		case inventory.MIGCreateInstance:
			line += fmt.Sprintf(" %s %d:%d", s.Part.Profile, s.Part.Start, s.Part.Size)
		case inventory.MIGCreateCompute:
			line += fmt.Sprintf(" at %d %d:%d", s.Part.Start, s.Compute.Start, s.Compute.Slices)
		case inventory.MIGDestroyInstance:
			line += fmt.Sprintf(" %d", s.Part.ID)
		case inventory.MIGDestroyCompute:
			line += fmt.Sprintf(" %d/%d", s.Part.ID, s.Compute.ID)
		default: // the mode
		}
		lines = append(lines, line)
	}
	return lines
}

func TestSteps(t *testing.T) {
	t.Parallel()
	off := gpu(h100)
	off.Mode, off.Pending = inventory.MIGDisabled, inventory.MIGDisabled
	pending := gpu(a100)
	pending.Mode = inventory.MIGDisabled
	toOff := gpu(h100, "7g.80gb@0")
	toOff.Pending = inventory.MIGDisabled
	balanced := map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
	otherOrder := gpu(h100, "7g.80gb@0?")
	otherOrder.Instances[0].Computes = []inventory.ComputeInstance{{Slices: 2}, {ID: 1, Start: 4, Slices: 3}}
	for name, tt := range map[string]struct {
		gpu  layout.GPU
		item layout.Item
		want []string
	}{
		"from a whole GPU": {off, layout.Item{Enabled: true, Devices: balanced}, []string{
			"enable-mig",
			"create-gpu-instance 3g.40gb 4:4", "create-compute-instance at 4 0:3",
			"create-gpu-instance 2g.20gb 0:2", "create-compute-instance at 0 0:2",
			"create-gpu-instance 1g.10gb 2:1", "create-compute-instance at 2 0:1",
			"create-gpu-instance 1g.10gb 3:1", "create-compute-instance at 3 0:1",
		}},
		"nothing to do": {gpu(h100, "2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"),
			layout.Item{Enabled: true, Devices: balanced}, nil},
		"what is wanted stays": {
			gpu(h100, "1g.10gb@0!", "1g.10gb@1", "1g.10gb@2!", "3g.40gb@4"), layout.Item{Enabled: true,
				Devices: map[string]int{"1g.10gb": 2, "3g.40gb": 1}},
			[]string{"destroy-compute-instance 2/0", "destroy-gpu-instance 2"},
		},
		"those in use stay before others": {
			gpu(h100, "3g.40gb@0", "3g.40gb@4!"), layout.Item{Enabled: true,
				Devices: map[string]int{"3g.40gb": 1, "4g.40gb": 1}},
			[]string{
				"destroy-compute-instance 1/0", "destroy-gpu-instance 1",
				"create-gpu-instance 4g.40gb 0:4", "create-compute-instance at 0 0:4",
			},
		},
		"one in the way goes although it is in use": {
			gpu(h100, "1g.10gb@0!"), layout.Item{Enabled: true, Devices: map[string]int{"7g.80gb": 1}},
			[]string{
				"destroy-compute-instance 1/0", "destroy-gpu-instance 1",
				"create-gpu-instance 7g.80gb 0:8", "create-compute-instance at 0 0:7",
			},
		},
		"others go around one that stays": {
			gpu(h100, "2g.20gb@4"), layout.Item{Enabled: true, Devices: map[string]int{"2g.20gb": 1, "3g.40gb": 1,
				"1g.10gb": 1}},
			[]string{
				"create-gpu-instance 3g.40gb 0:4", "create-compute-instance at 0 0:3",
				"create-gpu-instance 1g.10gb 6:1", "create-compute-instance at 6 0:1",
			},
		},
		"one that is in the way elsewhere moves": {
			gpu(h100, "2g.20gb@4"), layout.Item{Enabled: true, Devices: map[string]int{"2g.20gb": 1, "3g.40gb": 1,
				"1g.10gb": 2}},
			[]string{
				"destroy-compute-instance 1/0", "destroy-gpu-instance 1",
				"create-gpu-instance 3g.40gb 4:4", "create-compute-instance at 4 0:3",
				"create-gpu-instance 2g.20gb 0:2", "create-compute-instance at 0 0:2",
				"create-gpu-instance 1g.10gb 2:1", "create-compute-instance at 2 0:1",
				"create-gpu-instance 1g.10gb 3:1", "create-compute-instance at 3 0:1",
			},
		},
		"an instance without its compute instance": {
			gpu(h100, "3g.40gb@4?"), layout.Item{Enabled: true, Devices: map[string]int{"3g.40gb": 1}},
			[]string{"create-compute-instance at 4 0:3"},
		},
		"a complete one stays before one without its compute instance": {
			gpu(h100, "3g.40gb@0?", "3g.40gb@4"), layout.Item{Enabled: true,
				Devices: map[string]int{"3g.40gb": 1}}, []string{"destroy-gpu-instance 1"},
		},
		"and the other way round": {
			gpu(h100, "3g.40gb@0", "3g.40gb@4?"), layout.Item{Enabled: true,
				Devices: map[string]int{"3g.40gb": 1}}, []string{"destroy-gpu-instance 2"},
		},
		"the same compute instances at other places": {otherOrder,
			layout.Item{Enabled: true, Devices: map[string]int{"2c.7g.80gb": 1, "3c.7g.80gb": 1}}, nil},
		"other compute instances": {
			gpu(h100, "3g.40gb@4"), layout.Item{Enabled: true, Devices: map[string]int{"1c.3g.40gb": 3}},
			[]string{
				"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "create-gpu-instance 3g.40gb 0:4",
				"create-compute-instance at 0 0:1", "create-compute-instance at 0 1:1",
				"create-compute-instance at 0 2:1",
			},
		},
		"the same compute instances": {gpu(h100, "1c.3g.40gb@4"),
			layout.Item{Enabled: true, Devices: map[string]int{"1c.3g.40gb": 3}}, nil},
		"compute instances of several sizes": {
			gpu(h100), layout.Item{Enabled: true, Devices: map[string]int{"3c.7g.80gb": 1, "2c.7g.80gb": 2}},
			[]string{
				"create-gpu-instance 7g.80gb 0:8", "create-compute-instance at 0 0:2",
				"create-compute-instance at 0 2:2", "create-compute-instance at 0 4:3",
			},
		},
		"the mode alone":                 {off, layout.Item{Enabled: true}, []string{"enable-mig"}},
		"the mode alone keeps instances": {gpu(h100, "1g.10gb@0"), layout.Item{Enabled: true}, nil},
		"a mode that is pending":         {pending, layout.Item{Enabled: true}, []string{"enable-mig"}},
		"a mode that is not to be changed": {toOff, layout.Item{Enabled: true, Devices: map[string]int{"7g.80gb": 1}},
			[]string{"enable-mig"}},
		"off": {gpu(h100, "7g.80gb@0"), layout.Item{},
			[]string{"destroy-compute-instance 1/0", "destroy-gpu-instance 1", "disable-mig"}},
		"off already": {off, layout.Item{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.item.All = true
			c := layout.Plan(layout.Layout{Items: []layout.Item{tt.item}}, []layout.GPU{tt.gpu})
			if !c.Possible() {
				t.Fatal(c.GPUs[0].Reason)
			}
			if diff := gocmp.Diff(tt.want, show(c.GPUs[0])); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestImpossible(t *testing.T) {
	t.Parallel()
	none := gpu(0x1db110de)
	none.Mode = inventory.MIGUnsupported
	for name, tt := range map[string]struct {
		gpu     layout.GPU
		devices map[string]int
		want    string
	}{
		"a profile of another model": {
			gpu(h100), map[string]int{"1g.5gb": 7},
			"the GPU has no profile 1g.5gb: give some of 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, " +
				"7g.80gb",
		},
		"too many of one": {
			gpu(h100), map[string]int{"3g.40gb": 3, "1g.10gb": 1},
			"the GPU has room for 2 of 3g.40gb, and 3 of 3g.40gb are wanted: want fewer",
		},
		"a name that is none": {
			gpu(h100), map[string]int{"large": 1},
			`"large" is not the name of a MIG profile: write it as in 1g.10gb, 1g.10gb+me or 1c.3g.40gb`,
		},
		"too many compute instances": {
			gpu(h100), map[string]int{"1c.4g.40gb": 2, "2c.4g.40gb": 2},
			"the GPU has room for 1 of 4g.40gb, and 2 of 1c.4g.40gb, 2 of 2c.4g.40gb are wanted: want fewer",
		},
		"a size that has no place": {
			gpu(h100), map[string]int{"3c.4g.40gb": 1},
			"the GPU has room for 1 of 4g.40gb, and 1 of 3c.4g.40gb are wanted: want fewer",
		},
		"too many slices": {
			gpu(h100), map[string]int{"3g.40gb": 2, "1g.10gb": 1, "2g.20gb": 1},
			"the instances need 11 memory slices, and the GPU has 8: of them, 2 of 3g.40gb would fit",
		},
		"too many slices, and the largest first is not the most": {
			gpu(h100), map[string]int{"3g.40gb": 1, "1g.10gb": 5},
			"the instances need 9 memory slices, and the GPU has 8: of them, 1 of 3g.40gb, 4 of 1g.10gb would fit",
		},
		"no placement": {
			gpu(h100), map[string]int{"1g.10gb": 4, "4g.40gb": 1},
			"there is no placement for all of these instances at once: of them, 1 of 4g.40gb, 3 of 1g.10gb would fit",
		},
		"two that need the same media engines": {
			gpu(b30), map[string]int{"1g.6gb+me": 1, "2g.12gb+me": 1},
			"2g.12gb+me and 1g.6gb+me cannot be on one GPU, because there are not enough media engines: " +
				"of them, 1 of 2g.12gb+me would fit",
		},
		"all media engines": {
			gpu(rtx), map[string]int{"1g.24gb+me.all": 1, "1g.24gb-me": 2, "1g.24gb": 1},
			"1g.24gb and 1g.24gb+me.all cannot be on one GPU, because there are not enough media engines: " +
				"of them, 1 of 1g.24gb, 2 of 1g.24gb-me would fit",
		},
		"an unknown model": {
			gpu(0x999910de), map[string]int{"1g.10gb": 1},
			"the profiles of this GPU are not known: run this as root to read them from the driver",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := layout.Plan(onAllGPUs(tt.devices), []layout.GPU{tt.gpu})
			if c.Possible() || c.GPUs[0].Reason != tt.want {
				t.Errorf("got  %s\nwant %s", c.GPUs[0].Reason, tt.want)
			}
			if len(c.GPUs[0].Steps) > 0 {
				t.Errorf("steps although it is impossible: %v", show(c.GPUs[0]))
			}
		})
	}
	item := layout.Item{Indexes: []int{0}, Enabled: true}
	if c := layout.Plan(layout.Layout{Items: []layout.Item{item}}, []layout.GPU{none}); c.Possible() {
		t.Error("the mode is possible on a GPU that has none")
	}
	for _, item := range []layout.Item{{All: true, Enabled: true}, {All: true}, {Indexes: []int{0}}} {
		if c := layout.Plan(layout.Layout{Items: []layout.Item{item}}, []layout.GPU{none}); !c.Possible() ||
			c.GPUs[0].Note == "" {
			t.Errorf("a GPU without the mode stands in the way of %+v: %+v", item, c.GPUs[0])
		}
	}
}

// TestDriverThatIsWrong has profiles and instances that cannot be. They give no plan that cannot
// be, and no plan that does not end.
func TestDriverThatIsWrong(t *testing.T) {
	t.Parallel()
	for name, profile := range map[string]inventory.MIGProfile{
		"no size":          {Name: "1g.10gb", Count: 7, Starts: []int{0, 1}},
		"a negative size":  {Name: "1g.10gb", Count: 7, Size: -1, Starts: []int{0, 1}},
		"a negative slice": {Name: "1g.10gb", Count: 7, Size: 1, Starts: []int{-1, 1}},
		"far away":         {Name: "1g.10gb", Count: 7, Size: 1, Starts: []int{0, 1 << 40}},
		"very large":       {Name: "1g.10gb", Count: 7, Size: 1 << 40, Starts: []int{0}},
		"none of it":       {Name: "1g.10gb", Size: 1, Starts: []int{0}},
		"no name":          {Name: "", Count: 7, Size: 1, Starts: []int{0}},
		"a part":           {Name: "1c.2g.20gb", Count: 7, Size: 1, Starts: []int{0}},
	} {
		g := gpu(h100)
		g.Profiles = []inventory.MIGProfile{profile, {Name: "7g.80gb", Count: 1, Size: 8, Starts: []int{0}}}
		want := "the GPU has no profile 1g.10gb: give some of 7g.80gb"
		if c := layout.Plan(onAllGPUs(map[string]int{"1g.10gb": 1}), []layout.GPU{g}); c.GPUs[0].Reason != want {
			t.Errorf("%s: %q, want %q", name, c.GPUs[0].Reason, want)
		}
	}
	many := gpu(h100)
	many.Profiles = []inventory.MIGProfile{{Name: "7g.80gb", Count: 1, Size: maxSlices, Starts: []int{0}},
		{Name: "1g.10gb", Count: maxSlices, Size: 1}}
	for i := range maxSlices {
		many.Profiles[1].Starts = append(many.Profiles[1].Starts, i)
	}
	if c := layout.Plan(onAllGPUs(map[string]int{"1g.10gb": 32}),
		[]layout.GPU{many}); len(c.GPUs[0].After.Instances) != 32 || c.GPUs[0].After.Instances[31].Start != 31 {
		t.Errorf("32 instances on 64 slices: %s %v", c.GPUs[0].Reason, show(c.GPUs[0]))
	}
	twice := gpu(h100, "3g.40gb@4", "3g.40gb@4", "4g.40gb@2")
	c := layout.Plan(onAllGPUs(map[string]int{"3g.40gb": 1}), []layout.GPU{twice}).GPUs[0]
	want := []string{
		"destroy-compute-instance 2/0", "destroy-gpu-instance 2", "destroy-compute-instance 3/0",
		"destroy-gpu-instance 3",
	}
	if diff := gocmp.Diff(want, show(c)); diff != "" || c.Reason != "" {
		t.Errorf("two instances at one place: %s\n%s", c.Reason, diff)
	}
}

func TestExport(t *testing.T) {
	t.Parallel()
	a, b, c, off := gpu(h100, "1g.10gb@0", "1g.10gb@1", "1c.3g.40gb@4"), gpu(h100, "1g.10gb@5", "1g.10gb@2",
		"1c.3g.40gb@4"), gpu(h100, "3g.40gb@0?"), gpu(a100)
	off.Mode = inventory.MIGDisabled
	unread, none, off2 := gpu(h100), layout.GPU{Index: 5}, layout.GPU{Index: 6}
	off2.Mode = inventory.MIGDisabled
	a.Index, b.Index, c.Index, off.Index, unread.Index, unread.Unread = 3, 1, 2, 0, 4, "nobody knows"
	got, lost := layout.Export([]layout.GPU{off2, a, b, c, off, unread, none})
	want := layout.Layout{Name: "current", Items: []layout.Item{
		{Indexes: []int{0, 6}, Devices: map[string]int{}},
		{Indexes: []int{1, 3}, Enabled: true, Devices: map[string]int{"1g.10gb": 2, "1c.3g.40gb": 3}},
		{Indexes: []int{2}, Enabled: true, Devices: map[string]int{}},
	}}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	wantLost := []string{
		"GPU 2 has a GPU instance 3g.40gb without compute instances, which a layout cannot say",
		"GPU 4 is not in the layout: nobody knows",
	}
	if diff := gocmp.Diff(wantLost, lost); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestLastItemCounts(t *testing.T) {
	t.Parallel()
	a, b, c := gpu(h100), gpu(h100), gpu(h100)
	b.Index, b.UUID, c.Index, c.UUID = 1, "GPU-1", 2, "GPU-2"
	l := layout.Layout{Items: []layout.Item{
		{Indexes: []int{0, 1}, Enabled: true, Devices: map[string]int{"7g.80gb": 1}},
		{UUIDs: []string{"GPU-1", "GPU-9"}, Enabled: true, Devices: map[string]int{"3g.40gb": 2}},
		{Indexes: []int{7}},
	}}
	gpus := []layout.GPU{c, b, a}
	got := layout.Plan(l, gpus)
	if gpus[0].Index != 2 || gpus[2].Index != 0 {
		t.Error("the caller's GPUs are in another order")
	}
	var profiles []string
	for _, g := range got.GPUs {
		for _, i := range g.After.Instances {
			profiles = append(profiles, fmt.Sprint(g.GPU.Index, " ", i.Profile))
		}
	}
	if diff := gocmp.Diff([]string{"0 7g.80gb", "1 3g.40gb", "1 3g.40gb"}, profiles); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got.GPUs[2].Note == "" || len(got.GPUs[2].Steps) > 0 {
		t.Errorf("a GPU that no item matches is changed: %+v", got.GPUs[2])
	}
	warnings := []string{"the layout names GPU-9, and there is no such GPU",
		"the layout names GPU 7, and there is no such GPU"}
	if diff := gocmp.Diff(warnings, got.Warnings); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestBuiltin(t *testing.T) {
	t.Parallel()
	a, b := gpu(h100), gpu(a100)
	b.Index, b.UUID = 1, "GPU-1"
	none := layout.GPU{Index: 2, UUID: "GPU-2"}
	gpus := []layout.GPU{a, b, none}
	want := []string{
		"all-1g.10gb", "all-1g.10gb.me", "all-1g.20gb", "all-1g.5gb", "all-1g.5gb.me", "all-2g.10gb", "all-2g.20gb",
		"all-3g.20gb",
		"all-3g.40gb", "all-4g.20gb", "all-4g.40gb", "all-7g.40gb", "all-7g.80gb", "all-balanced", "all-disabled",
		"all-enabled",
	}
	if diff := gocmp.Diff(want, layout.Builtin(gpus).Names()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	l, err := layout.Find("all-1g.10gb", nil, gpus)
	if err != nil {
		t.Fatal(err)
	}
	c := layout.Plan(l, gpus)
	if !c.Possible() || len(c.GPUs[0].After.Instances) != 7 || len(c.GPUs[1].After.Instances) != 4 ||
		len(c.GPUs[2].Steps) > 0 {
		t.Errorf("got %+v", c)
	}
	enabled, err := layout.Find("all-enabled", nil, gpus[:2])
	if err != nil {
		t.Fatal(err)
	}
	if c := layout.Plan(enabled, gpus[:2]); !c.Possible() || c.GPUs[0].After.Mode != inventory.MIGEnabled ||
		len(c.GPUs[0].After.Instances) > 0 {
		t.Errorf("all-enabled: %+v", c)
	}
	unread := layout.GPU{Index: 3, UUID: "GPU-3", Partitions: inventory.Partitions{Mode: inventory.MIGEnabled,
		Unread: "no permission"}}
	if l, err = layout.Find("all-1g.10gb", nil, []layout.GPU{a, unread}); err != nil {
		t.Fatal(err)
	}
	if c := layout.Plan(l, []layout.GPU{a, unread}); c.Possible() || c.GPUs[0].Reason != "" ||
		!strings.Contains(c.GPUs[1].Reason, "no permission") {
		t.Errorf("beside a GPU that cannot be read: %+v", c)
	}
	// they name no devices, which may be those of such a GPU or not
	for _, name := range []string{layout.AllDisabled, layout.AllEnabled} {
		without, err := layout.Builtin([]layout.GPU{a}).Layout(name)
		with, err2 := layout.Builtin([]layout.GPU{a, unread}).Layout(name)
		if diff := gocmp.Diff(without, with); diff != "" || errors.Join(err, err2) != nil {
			t.Errorf("%s beside a GPU that cannot be read (-without +with):\n%s", name, diff)
		}
	}
	if _, err := layout.Find("all-1g.6gb", nil, gpus); err == nil ||
		!strings.HasPrefix(err.Error(), `no layout is called "all-1g.6gb": give one of all-1`) {
		t.Errorf("got %v", err)
	}
	if _, err := layout.Find("all-balanced", nil, []layout.GPU{gpu(0x999910de)}); err == nil ||
		!strings.Contains(err.Error(), "run this as root") {
		t.Errorf("got %v", err)
	}
	file, err := layout.Parse([]byte("{version: v1, mig-configs: {mine: [{devices: all, mig-enabled: false}]}}"))
	if err != nil {
		t.Fatal(err)
	}
	if l, err := layout.Find("", &file, gpus); err != nil || l.Name != "mine" {
		t.Errorf("got %+v, %v", l, err)
	}
}

// TestBuiltinIsPossible holds that each built-in layout can be had on each model.
func TestBuiltinIsPossible(t *testing.T) {
	t.Parallel()
	for _, device := range known() {
		g := gpu(device<<16 | 0x10de)
		f := layout.Builtin([]layout.GPU{g})
		for _, name := range f.Names() {
			l, err := f.Layout(name)
			if err != nil {
				t.Fatal(err)
			}
			if c := layout.Plan(l, []layout.GPU{g}); !c.Possible() {
				t.Errorf("%x: %s: %s", device, name, c.GPUs[0].Reason)
			}
		}
		if !slices.Contains(f.Names(), layout.AllBalanced) {
			t.Errorf("%x: no %s", device, layout.AllBalanced)
		}
	}
}

// TestBalanced: what all-balanced has on GPUs of seven and of four compute slices, and of no other
// number.
func TestBalanced(t *testing.T) {
	t.Parallel()
	profile := func(name string, count int) inventory.MIGProfile {
		return inventory.MIGProfile{Name: name, Count: count, Size: 1, Starts: []int{0}}
	}
	seven := []inventory.MIGProfile{profile("1g.20gb", 4), profile("1g.10gb", 7), profile("1g.10gb+me", 9),
		profile("2g.20gb", 3),
		profile("3g.40gb", 2), profile("7g.80gb", 1)}
	for name, tt := range map[string]struct {
		profiles []inventory.MIGProfile
		want     map[string]int
	}{
		"seven": {seven, map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}},
		"four":  {profilesOf(b30), map[string]int{"1g.6gb": 2, "2g.12gb": 1}},
		"five":  {[]inventory.MIGProfile{profile("1g.6gb", 5), profile("5g.30gb", 1)}, nil},
		"as many as needed": {[]inventory.MIGProfile{profile("1g.6gb", 2), profile("2g.12gb", 1),
			profile("4g.24gb", 1)}, map[string]int{"1g.6gb": 2, "2g.12gb": 1}},
		"fewer than needed": {[]inventory.MIGProfile{profile("1g.6gb", 1), profile("2g.12gb", 1),
			profile("4g.24gb", 1)}, nil},
		"one size is missing": {seven[:5:5], nil},
		"none":                {nil, nil},
	} {
		g := layout.GPU{UUID: "GPU-0", Partitions: inventory.Partitions{Mode: inventory.MIGEnabled,
			Profiles: tt.profiles}}
		var got map[string]int
		if l, err := layout.Builtin([]layout.GPU{g}).Layout(layout.AllBalanced); err == nil {
			got = l.Items[0].Devices
		}
		if diff := gocmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
