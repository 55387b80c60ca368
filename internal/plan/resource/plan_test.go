package resource_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// gpu returns a healthy GPU with MIG devices of the given profiles.
func gpu(index int, profiles ...string) inventory.GPU {
	letter := string(rune('a' + index))
	g := inventory.GPU{
		UUID: "GPU-" + letter, Index: index, Minor: 7 - index, Model: "NVIDIA H100 80GB HBM3", NUMANode: index / 4,
		MIG: inventory.MIGDisabled, Health: healthy(),
	}
	for j, profile := range profiles {
		g.MIG = inventory.MIGEnabled
		g.MIGDevices = append(g.MIGDevices, inventory.MIGDevice{
			UUID: "MIG-" + letter + string(rune('0'+j)), Index: j, GI: 7 + j, CI: 0, Profile: profile, Health: healthy(),
		})
	}
	return g
}

func healthy() inventory.Health { return inventory.Health{State: inventory.Healthy} }

// empty returns a GPU in MIG mode without MIG devices.
func empty(index int) inventory.GPU {
	g := gpu(index)
	g.MIG = inventory.MIGEnabled
	return g
}

// outline is what a plan offers, in one line for each resource: name and the indices of its
// devices.
func outline(p resource.Plan) []string {
	var lines []string
	for _, r := range p.Resources {
		var ids []string
		for _, d := range r.Devices {
			ids = append(ids, d.Index)
		}
		lines = append(lines, r.Name+" "+strings.Join(ids, " "))
	}
	return lines
}

// TestUnreadableMIGDevices: of a GPU whose MIG devices could not be read the plan says why, and not
// that there are none.
func TestUnreadableMIGDevices(t *testing.T) {
	t.Parallel()
	const why = "MIG device 1:0 cannot be read: no permission: add the capability SYS_ADMIN to this container"
	snapshot := inventory.Snapshot{
		GPUs: []inventory.GPU{gpu(0), empty(1), empty(2)}, LeftOut: []inventory.LeftOut{{Index: 1, Reason: why}},
	}
	for strategy, want := range map[resource.MIGStrategy]bool{resource.MIGNone: false, resource.MIGSingle: true,
		resource.MIGMixed: true} {
		plan := resource.New(snapshot, resource.Options{MIG: strategy})
		said := slices.ContainsFunc(plan.Warnings,
			func(w string) bool { return strings.HasSuffix(w, "is not offered: "+why) })
		if said != want {
			t.Errorf("strategy %s: warned of GPU 1: %v, want %v: %q", strategy, said, want, plan.Warnings)
		}
	}
}

func TestMIGStrategies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		strategy resource.MIGStrategy
		gpus     []inventory.GPU
		want     []string
		leftOut  []string // indices
	}{
		{name: "no GPU", gpus: nil},
		{name: "none, whole GPUs", gpus: []inventory.GPU{gpu(0), gpu(1)}, want: []string{"nvidia.com/gpu 0 1"}},
		{name: "none, order is by number", gpus: []inventory.GPU{gpu(10), gpu(2)}, want: []string{"nvidia.com/gpu 2 10"}},
		{name: "none, partitioned GPUs are whole", gpus: []inventory.GPU{gpu(0, "1g.10gb"), empty(1)},
			want: []string{"nvidia.com/gpu 0 1"}},
		{
			name: "single, whole GPUs", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0), gpu(1)}, want: []string{"nvidia.com/gpu 0 1"},
		},
		{
			name: "single, one profile", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "1g.10gb", "1g.10gb"), gpu(1, "1g.10gb")}, want: []string{"nvidia.com/gpu 0:0 0:1 1:0"},
		},
		{
			name: "single, a GPU without MIG devices is left out", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "1g.10gb"), empty(1)}, want: []string{"nvidia.com/gpu 0:0"}, leftOut: []string{"1"},
		},
		{
			name: "single, the commoner profile is kept", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "2g.20gb", "2g.20gb", "2g.20gb"), gpu(1, "1g.10gb"), gpu(2, "1g.10gb")},
			want: []string{"nvidia.com/gpu 1:0 2:0"}, leftOut: []string{"0:0", "0:1", "0:2"},
		},
		{
			name: "single, mixed modes: the commoner is kept", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "1g.10gb"), gpu(1), gpu(2)}, want: []string{"nvidia.com/gpu 1 2"},
			leftOut: []string{"0:0"},
		},
		{
			name: "single, alike: the lowest index is kept", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "1g.10gb"), gpu(1)}, want: []string{"nvidia.com/gpu 0:0"}, leftOut: []string{"1"},
		},
		{
			name: "single, mixed profiles on one GPU", strategy: resource.MIGSingle,
			gpus: []inventory.GPU{gpu(0, "1g.10gb", "2g.20gb"), gpu(1, "2g.20gb")},
			want: []string{"nvidia.com/gpu 0:1 1:0"}, leftOut: []string{"0:0"},
		},
		{
			name: "mixed", strategy: resource.MIGMixed,
			gpus: []inventory.GPU{gpu(0, "3g.40gb", "1g.10gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me", "1c.2g.20gb"),
				gpu(1), empty(2)},
			want: []string{
				"nvidia.com/gpu 1", "nvidia.com/mig-1c.2g.20gb 0:5", "nvidia.com/mig-1g.10gb.me 0:1",
				"nvidia.com/mig-1g.24gb-me 0:4",
				"nvidia.com/mig-1g.24gb.gfx 0:2", "nvidia.com/mig-1g.24gb.me.all 0:3", "nvidia.com/mig-3g.40gb 0:0",
			},
			leftOut: []string{"2"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			plan := resource.New(inventory.Snapshot{GPUs: tt.gpus}, resource.Options{MIG: tt.strategy})
			if diff := cmp.Diff(tt.want, outline(plan)); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			var leftOut []string
			for i, l := range plan.LeftOut {
				leftOut = append(leftOut, l.Index)
				if !strings.Contains(plan.Warnings[i], l.UUID) || !strings.Contains(plan.Warnings[i], l.Reason) {
					t.Errorf("warning %q does not tell of %+v", plan.Warnings[i], l)
				}
			}
			if diff := cmp.Diff(tt.leftOut, leftOut); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFieldsOfDevices(t *testing.T) {
	t.Parallel()
	gpus, o := []inventory.GPU{gpu(0, "1g.10gb"), gpu(5)}, resource.Options{MIG: resource.MIGMixed}
	plan := resource.New(inventory.Snapshot{GPUs: gpus}, o)
	want := resource.Plan{Resources: []resource.Resource{
		resource.NewResource("nvidia.com/gpu", o, topology.New(gpus), []resource.Device{
			{ID: "GPU-f", UUID: "GPU-f", GPU: "GPU-f", Index: "5", Resource: "nvidia.com/gpu", Minor: 2, GI: -1, CI: -1,
				NUMANode: 1, Healthy: true},
		}),
		resource.NewResource("nvidia.com/mig-1g.10gb", o, topology.New(gpus), []resource.Device{
			{ID: "MIG-a0", UUID: "MIG-a0", GPU: "GPU-a", Index: "0:0", Resource: "nvidia.com/mig-1g.10gb", Minor: 7, GI: 7,
				CI: 0, NUMANode: 0, Healthy: true},
		}),
	}}
	if diff := cmp.Diff(want, plan); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
}

func TestHealthOfGPUsAndMIGDevices(t *testing.T) {
	t.Parallel()
	xid := inventory.Health{State: inventory.Unhealthy, Reason: "XID 48: double-bit memory error",
		Remedy: inventory.RemedyReset}
	lost := inventory.Health{State: inventory.Lost, Reason: "it fell off the bus", Remedy: inventory.RemedyReboot}
	a, b, c, d := gpu(0, "1g.10gb", "1g.10gb"), gpu(1, "1g.10gb"), gpu(2), gpu(3)
	a.MIGDevices[1].Health = xid
	b.Health, b.MIGDevices[0].Health = lost, xid
	c.Health = inventory.Health{State: inventory.Suspect, Reason: "XID 95 is looked into"}
	d.Health = inventory.Health{}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{a, b, c, d}, Stale: "NVML does not answer"},
		resource.Options{MIG: resource.MIGMixed})
	want := map[string]string{
		"MIG-a0": "",
		"MIG-a1": "MIG-a1 is Unhealthy: XID 48: double-bit memory error; remedy: reset",
		"MIG-b0": "GPU-b is Lost: it fell off the bus; remedy: reboot",
		"GPU-c":  "",
		"GPU-d":  "GPU-d is Unknown",
	}
	got := map[string]string{}
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			got[d.ID] = d.Reason
			if d.Healthy != (d.Reason == "") {
				t.Errorf("%s: Healthy %v with reason %q", d.ID, d.Healthy, d.Reason)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
}

func TestHiddenDevices(t *testing.T) {
	t.Parallel()
	o := resource.Options{MIG: resource.MIGMixed, Sharing: resource.Sharing{Mode: resource.TimeSliced,
		Rules: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Replicas: 2},
		}}}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1), gpu(2, "1g.10gb"), empty(3)}}, o)
	if !plan.Equal(plan.Under(nil)) {
		t.Error("a plan without holds is another")
	}
	reduced := plan.Under([]resource.Hold{
		{UUID: "GPU-a", Reason: "another reason"}, {UUID: "GPU-a", Reason: "reason A", Hidden: true},
		{Resource: "nvidia.com/mig-1g.10gb", UUID: "MIG-c0", Reason: "reason B", Hidden: true}, {UUID: "MIG-c0",
			Reason: "another reason"},
		{UUID: "GPU-z", Reason: "reason C", Hidden: true}, {Resource: "nvidia.com/other", UUID: "GPU-b", Reason: "reason D",
			Hidden: true},
	})
	if diff := cmp.Diff([]string{"nvidia.com/gpu 1 1"}, outline(reduced)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	want := []resource.LeftOut{{UUID: "GPU-a", Index: "0", Reason: "reason A"},
		{UUID: "MIG-c0", Index: "2:0", Reason: "reason B"}, plan.LeftOut[0]}
	if diff := cmp.Diff(want, reduced.LeftOut); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if n := len(reduced.Warnings); n != 3 || len(plan.Warnings) != 1 {
		t.Errorf("warnings %q of %q", reduced.Warnings, plan.Warnings)
	}
	r := reduced.Resources[0]
	if d, found := r.Device("GPU-a::0"); found {
		t.Errorf("still has %+v", d)
	}
	if got, err := r.Prefer([]string{"GPU-a::0", "GPU-b::1"}, nil, 1); err != nil ||
		!slices.Equal(got, []string{"GPU-b::1"}) {
		t.Errorf("prefers %q, %v", got, err)
	}
}

func TestDevicesUnderAHold(t *testing.T) {
	t.Parallel()
	sick := gpu(1)
	sick.Health = inventory.Health{State: inventory.Lost}
	node := inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), sick, gpu(2), gpu(3)}}
	plan := resource.New(node, resource.Options{Sharing: resource.Sharing{Mode: resource.MPS,
		Rules: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Devices: []resource.Ref{"0", "1"}, Replicas: 2},
			{Name: "nvidia.com/gpu", Devices: []resource.Ref{"2"}, Rename: "nvidia.com/other", Replicas: 2},
		}}})
	if diff := cmp.Diff([]string{"nvidia.com/gpu", "nvidia.com/other"}, plan.MPSDaemons()); diff != "" {
		t.Errorf("shared by MPS (-want +got):\n%s", diff)
	}
	unfit := plan.Under([]resource.Hold{
		{Resource: "nvidia.com/gpu", UUID: "GPU-a", Reason: "no MPS"}, {UUID: "GPU-a", Reason: "a second reason"},
		{Resource: "nvidia.com/gpu", UUID: "GPU-b", Reason: "no MPS"}, {Resource: "nvidia.com/gpu", UUID: "GPU-c",
			Reason: "never"},
	})
	got := map[string]string{}
	for _, r := range unfit.Resources {
		for _, d := range r.Devices {
			got[d.ID] = d.Reason
			if found, _ := r.Device(d.ID); found != d || d.Healthy != (d.Reason == "") {
				t.Errorf("device %+v is found as %+v", d, found)
			}
		}
	}
	want := map[string]string{
		"GPU-a::0": "no MPS", "GPU-a::1": "no MPS", "GPU-b::0": "GPU-b is Lost", "GPU-b::1": "GPU-b is Lost",
		"GPU-c::0": "", "GPU-c::1": "", "GPU-d": "",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
	wantHolds := []resource.Hold{
		{Resource: "nvidia.com/gpu", UUID: "GPU-a", Reason: "no MPS"},
		{Resource: "nvidia.com/gpu", UUID: "GPU-b", Reason: "no MPS", Waits: true}, // it is Lost
	}
	if diff := cmp.Diff(wantHolds, unfit.Holds); diff != "" {
		t.Errorf("holds (-want +got):\n%s", diff)
	}
	if !plan.Resources[0].Devices[0].Healthy || !plan.Equal(plan.Under([]resource.Hold{{UUID: "GPU-z"}})) {
		t.Error("the plan itself was changed")
	}
}

func TestDevicesWithoutARequiredNodeAreUnhealthy(t *testing.T) {
	t.Parallel()
	o := resource.Options{Required: inventory.NodeIMEXChannel0}
	node := inventory.Snapshot{GPUs: []inventory.GPU{gpu(0)}, Control: inventory.NodeControl}
	d := resource.New(node, o).Resources[0].Devices[0]
	if d.Healthy || d.Reason != "this node lacks /dev/nvidia-caps-imex-channels/channel0, which the configuration "+
		"requires" {
		t.Errorf("without the node: %+v", d)
	}
	node.Control |= inventory.NodeIMEXChannel0
	if d := resource.New(node, o).Resources[0].Devices[0]; !d.Healthy || d.Control != node.Control {
		t.Errorf("with the node: %+v", d)
	}
}

func TestOtherWarningsAreNotAboutWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	display, lacking := gpu(0), resource.Selector{Where: "selectors[0]", Devices: []resource.Ref{"7"}, Exclude: true}
	display.Model = "DGX Display"
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{display, gpu(1)}},
		resource.Options{Selectors: []resource.Selector{lacking}}).
		Under([]resource.Hold{{UUID: gpu(1).UUID, Reason: "no spec", Hidden: true}})
	want := []string{"selectors[0] selects no device of this node"}
	if got := plan.OtherWarnings(); len(plan.Warnings) != 3 || len(plan.LeftOut) != 2 || !slices.Equal(got, want) {
		t.Errorf("%q of %q, want %q; left out %+v", got, plan.Warnings, want, plan.LeftOut)
	}
}

// TestDevicesThatAreNotOfferedForOneReasonAreOneWarning: also when some of them come later. Devices
// that are offered again are no news.
func TestDevicesThatAreNotOfferedForOneReasonAreOneWarning(t *testing.T) {
	t.Parallel()
	whole := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1), gpu(2), gpu(3)}}, resource.Options{
		Selectors: []resource.Selector{{Where: "selectors[0]", Devices: []resource.Ref{"7"}, Exclude: true}},
	})
	held := func(reason string, gpus ...int) (holds []resource.Hold) {
		for _, i := range gpus {
			holds = append(holds, resource.Hold{UUID: gpu(i).UUID, Reason: reason, Hidden: true})
		}
		return holds
	}
	one := whole.Under(append(held("disk full", 0, 1, 3), held("no daemon", 2)...))
	for name, tt := range map[string]struct {
		before, now resource.Plan
		want        []string
	}{
		"first": {resource.Plan{}, one, []string{
			"selectors[0] selects no device of this node", "3 devices are not offered: disk full (devices 0, 1, 3)",
			"device 2 (GPU-c) is not offered: no daemon",
		}},
		"unchanged": {one, one, nil},
		"fewer":     {one, whole.Under(held("disk full", 0, 3)), nil},
		"more": {one, whole.Under(held("disk full", 0, 1, 2, 3)),
			[]string{"device 2 (GPU-c) is not offered: disk full"}},
		"another reason": {one, whole.Under(held("no daemon", 0, 1, 2)),
			[]string{"2 devices are not offered: no daemon (devices 0, 1)"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, tt.now.WarningsSince(tt.before)); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDisplayCardIsLeftOut(t *testing.T) {
	t.Parallel()
	display := gpu(1)
	display.Model = "NVIDIA DGX Display"
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), display}}, resource.Options{})
	if diff := cmp.Diff([]string{"nvidia.com/gpu 0"}, outline(plan)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	if len(plan.LeftOut) != 1 || plan.LeftOut[0].UUID != "GPU-b" {
		t.Errorf("left out %+v, want GPU-b", plan.LeftOut)
	}
}

func TestEqualPlans(t *testing.T) {
	t.Parallel()
	node := func(change func(*inventory.GPU), o resource.Options) resource.Plan {
		g := gpu(1)
		change(&g)
		return resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), g}}, o)
	}
	base := node(func(*inventory.GPU) {}, resource.Options{})
	if !base.Equal(node(func(*inventory.GPU) {}, resource.Options{})) {
		t.Error("the plan of the same node is not Equal")
	}
	for name, other := range map[string]resource.Plan{
		"health": node(func(g *inventory.GPU) { g.Health.State = inventory.Lost }, resource.Options{}),
		"numa":   node(func(g *inventory.GPU) { g.NUMANode = 3 }, resource.Options{}),
		"policy": node(func(*inventory.GPU) {}, resource.Options{Policy: resource.PolicyPacked}),
		"links": node(func(g *inventory.GPU) { g.Links = []inventory.Link{{Peer: "GPU-a", NVLinks: 4, NVLinkVersion: 3}} },
			resource.Options{}),
		"limit":    node(func(*inventory.GPU) {}, resource.Options{Sharing: resource.Sharing{OnePerRequest: true}}),
		"left out": node(func(g *inventory.GPU) { g.Model = "DGX Display" }, resource.Options{}),
	} {
		if base.Equal(other) {
			t.Errorf("%s: plans are Equal", name)
		}
	}
}

func TestResourceAndDeviceByName(t *testing.T) {
	t.Parallel()
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1, "1g.10gb")}},
		resource.Options{MIG: resource.MIGMixed})
	for name, id := range map[string]string{"nvidia.com/gpu": "GPU-a", "nvidia.com/mig-1g.10gb": "MIG-b0"} {
		r, found := plan.Resource(name)
		if !found || r.Name != name {
			t.Fatalf("Resource(%q) = %q, %v", name, r.Name, found)
		}
		if d, found := r.Device(id); !found || d.ID != id {
			t.Errorf("Device(%q) of %s = %+v, %v", id, name, d, found)
		}
		if d, found := r.Device("GPU-z"); found {
			t.Errorf("Device(GPU-z) of %s = %+v", name, d)
		}
	}
	if r, found := plan.Resource("nvidia.com/other"); found {
		t.Errorf("Resource(nvidia.com/other) = %+v", r)
	}
}

// TestNodeDeviceByUUID: also one that is not in the plan.
func TestNodeDeviceByUUID(t *testing.T) {
	t.Parallel()
	for what, mig := range map[string]resource.MIGStrategy{"planned": resource.MIGMixed, "left out": resource.MIGNone} {
		plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1, "1g.10gb")}}, resource.Options{MIG: mig})
		for uuid, want := range map[string]bool{"GPU-a": true, "MIG-b0": mig == resource.MIGMixed, "GPU-z": false} {
			if d, found := plan.NodeDevice(uuid); found != want || found && d.UUID != uuid {
				t.Errorf("%s: NodeDevice(%q) = %+v, %v, want %v", what, uuid, d, found, want)
			}
		}
	}
}

func TestLargestRuleOfResource(t *testing.T) {
	t.Parallel()
	s := resource.Sharing{Rules: []resource.SharingRule{{Name: "nvidia.com/a", Replicas: 2},
		{Name: "nvidia.com/b", Replicas: 3}, {Name: "nvidia.com/b", Replicas: 4}}}
	for name, want := range map[string]int{"nvidia.com/a": 2, "nvidia.com/b": 4, "nvidia.com/c": 0} {
		if rule, shared := s.RuleOf(name); rule.Replicas != want || shared != (want > 0) {
			t.Errorf("RuleOf(%s) = %+v, %v, want %d replicas", name, rule, shared, want)
		}
	}
}

func TestEnumsHaveNames(t *testing.T) {
	t.Parallel()
	got := []string{
		resource.MIGNone.String(), resource.MIGSingle.String(), resource.MIGMixed.String(), resource.MIGStrategy(9).String(),
		resource.Unshared.String(), resource.TimeSliced.String(), resource.MPS.String(), resource.SharingMode(9).String(),
	}
	want := []string{"none", "single", "mixed", "MIGStrategy(9)", "none", "time-slicing", "mps", "SharingMode(9)"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
