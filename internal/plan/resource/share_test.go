package resource_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// counts is what a plan offers, in one line for each resource: name, and the indices of its devices
// with the number of replicas of each.
func counts(p resource.Plan) []string {
	var lines []string
	for _, r := range p.Resources {
		line := r.Name
		var indices []string
		replicas := map[string]int{}
		for d := range r.All() {
			if replicas[d.Index] == 0 {
				indices = append(indices, d.Index)
			}
			if replicas[d.Index]++; d.ID == d.UUID {
				replicas[d.Index] = -1
			}
		}
		for _, i := range indices {
			line += " " + i
			if replicas[i] > 0 {
				line += fmt.Sprintf("×%d", replicas[i])
			}
		}
		lines = append(lines, line)
	}
	return lines
}

func TestSharingAndSelection(t *testing.T) {
	t.Parallel()
	const whole = "nvidia.com/gpu"
	slicing := func(rules ...resource.SharingRule) resource.Sharing {
		return resource.Sharing{Mode: resource.TimeSliced, Rules: rules}
	}
	four := []inventory.GPU{gpu(0), gpu(1), gpu(2), gpu(3)}
	partitioned := []inventory.GPU{gpu(0, "1g.10gb", "2g.20gb"), gpu(1), gpu(2, "1g.10gb")}
	old := gpu(1)
	old.ComputeCapability = inventory.ComputeCapability{Major: 6, Minor: 1}
	newer := gpu(0)
	newer.ComputeCapability = inventory.ComputeCapability{Major: 7, Minor: 0}
	other := gpu(3)
	other.Model, other.BDF = "NVIDIA L40S", "0000:1b:00.0"

	for _, tt := range []struct {
		name    string
		gpus    []inventory.GPU
		options resource.Options
		want    []string
		leftOut []string
		warns   []string // a part of each warning
	}{
		{
			name: "all devices of a resource", gpus: four,
			options: resource.Options{Sharing: slicing(resource.SharingRule{Name: whole, Replicas: 3})},
			want:    []string{"nvidia.com/gpu 0×3 1×3 2×3 3×3"},
		},
		{
			name: "two rules with as many replicas", gpus: four[:1],
			options: resource.Options{Sharing: slicing(resource.SharingRule{Name: whole, Replicas: 3,
				Rename: "nvidia.com/first"},
				resource.SharingRule{Name: whole, Replicas: 3, Rename: "nvidia.com/second"})},
			want: []string{"nvidia.com/first 0×3"},
		},
		{
			name: "renamed by default", gpus: four,
			options: resource.Options{Sharing: resource.Sharing{
				Mode: resource.TimeSliced, RenameByDefault: true, Rules: []resource.SharingRule{{Name: whole, Replicas: 2}},
			}},
			want: []string{"nvidia.com/gpu.shared 0×2 1×2 2×2 3×2"},
		},
		{
			name: "some devices, named", gpus: four,
			options: resource.Options{Sharing: slicing(
				resource.SharingRule{Name: whole, Rename: "nvidia.com/gpu.small", Devices: []resource.Ref{"0", "GPU-c"},
					Replicas: 4},
				resource.SharingRule{Name: whole, Devices: []resource.Ref{"1"}, Replicas: 2},
			)},
			want:  []string{"nvidia.com/gpu 1×2 3", "nvidia.com/gpu.small 0×4 2×4"},
			warns: []string{"resource nvidia.com/gpu has shared devices (1) and unshared devices (3)"},
		},
		{
			name: "a number of devices", gpus: four,
			options: resource.Options{Sharing: slicing(resource.SharingRule{Name: whole, Rename: "nvidia.com/few", First: 2,
				Replicas: 2})},
			want: []string{"nvidia.com/few 0×2 1×2", "nvidia.com/gpu 2 3"},
		},
		{
			name: "MIG devices, by profile, index and UUID", gpus: partitioned,
			options: resource.Options{MIG: resource.MIGMixed, Sharing: slicing(
				resource.SharingRule{Name: "nvidia.com/mig-1g.10gb", Devices: []resource.Ref{"0:0"}, Replicas: 2},
				resource.SharingRule{Name: "nvidia.com/mig-2g.20gb", Devices: []resource.Ref{"MIG-a1"}, Replicas: 3},
				resource.SharingRule{Name: "nvidia.com/mig-7g.80gb", Replicas: 3},
			)},
			want:  []string{"nvidia.com/gpu 1", "nvidia.com/mig-1g.10gb 0:0×2 2:0", "nvidia.com/mig-2g.20gb 0:1×3"},
			warns: []string{"resource nvidia.com/mig-1g.10gb has shared devices (0:0) and unshared devices (2:0)"},
		},
		{
			name: "a rule for devices that the node lacks", gpus: four,
			options: resource.Options{Sharing: slicing(resource.SharingRule{
				Where: "rules[0]", Name: whole, Devices: []resource.Ref{"1", "9", "GPU-z"}, Replicas: 2,
			})},
			want: []string{"nvidia.com/gpu 0 1×2 2 3"},
			warns: []string{
				"rules[0] names device 9,", "rules[0] names device GPU-z,",
				"shared devices (1) and unshared devices (0, 2, 3): a container cannot know its kind of device; give the shared " +
					"devices a resource name of " +
					"their own with rename",
			},
		},
		{
			name: "a rule for devices of other resources", gpus: partitioned,
			options: resource.Options{MIG: resource.MIGMixed, Sharing: slicing(
				resource.SharingRule{Where: "rules[0]", Name: whole, Devices: []resource.Ref{"0", "1", "0:1"}, Replicas: 2},
				resource.SharingRule{Where: "rules[1]", Name: "nvidia.com/mig-1g.10gb", Devices: []resource.Ref{"0", "2"},
					Replicas: 2},
			)},
			want: []string{"nvidia.com/gpu 1×2", "nvidia.com/mig-1g.10gb 0:0×2 2:0×2", "nvidia.com/mig-2g.20gb 0:1"},
			warns: []string{
				"rules[0] names device 0, which belongs not to resource nvidia.com/gpu but to nvidia.com/mig-1g.10gb, " +
					"nvidia.com/mig-2g.20gb",
				"rules[0] names device 0:1, which belongs not to resource nvidia.com/gpu but to nvidia.com/mig-2g.20gb",
			},
		},
		{
			name: "patterns of models and profiles", gpus: append(slices.Clone(partitioned), other),
			options: resource.Options{
				MIG: resource.MIGMixed, GPUs: []resource.Naming{{Pattern: "*L40*", Name: "nvidia.com/l40s"}},
				MIGs: []resource.Naming{{Pattern: "1g.*", Name: "nvidia.com/small"}, {Pattern: "*", Name: "nvidia.com/large"}},
			},
			want: []string{"nvidia.com/gpu 1", "nvidia.com/l40s 3", "nvidia.com/large 0:1", "nvidia.com/small 0:0 2:0"},
		},
		{
			name: "MPS where it can be", gpus: []inventory.GPU{newer, old, gpu(2, "1g.10gb")},
			options: resource.Options{MIG: resource.MIGMixed, Sharing: resource.Sharing{Mode: resource.MPS,
				Rules: []resource.SharingRule{
					{Name: whole, Replicas: 17}, {Name: "nvidia.com/mig-1g.10gb", Replicas: 2},
				}}},
			want: []string{"nvidia.com/gpu 0×17"}, leftOut: []string{"1", "2:0"},
			warns: []string{"17 replicas are configured, and MPS serves at most 16 clients", "sharing by MPS is not supported"},
		},
		{
			name: "MPS clients", gpus: []inventory.GPU{newer},
			options: resource.Options{Sharing: resource.Sharing{Mode: resource.MPS,
				Rules: []resource.SharingRule{{Name: whole, Replicas: 49}}}},
			leftOut: []string{"0"}, warns: []string{"at most 48 clients"},
		},
		{
			name: "exclude by UUID, index, PCI address and model", gpus: []inventory.GPU{gpu(0), gpu(1), gpu(2), other},
			options: resource.Options{Selectors: []resource.Selector{
				{Where: "s0", Devices: []resource.Ref{"GPU-a", "1"}, Exclude: true}, {Where: "s1", PCI: []string{"0000:1b:00.0"},
					Exclude: true},
				{Where: "s2", Models: []resource.Pattern{"*A100*"}, Exclude: true},
			}},
			want: []string{"nvidia.com/gpu 2"}, leftOut: []string{"0", "1",
				"3"}, warns: []string{"s2 selects no device of this node"},
		},
		{
			name: "excluded devices have no vote", gpus: partitioned,
			options: resource.Options{MIG: resource.MIGSingle, Selectors: []resource.Selector{
				{Where: "s0", Devices: []resource.Ref{"0:0", "2:0"}, Exclude: true},
			}},
			want: []string{"nvidia.com/gpu 0:1"}, leftOut: []string{"0:0", "1", "2:0"}, warns: []string{"GPU-b"},
		},
		{
			name: "replicas and names of selected devices", gpus: []inventory.GPU{gpu(0), gpu(1), gpu(2), other},
			options: resource.Options{
				Selectors: []resource.Selector{
					{Where: "s0", Devices: []resource.Ref{"0"}, Replicas: 1},
					{Where: "s1", Devices: []resource.Ref{"1"}, Rename: "nvidia.com/best"},
					{Where: "s2", Models: []resource.Pattern{"*L40S"}, Rename: "nvidia.com/l40s", Replicas: 8},
				},
				Sharing: resource.Sharing{Mode: resource.TimeSliced, RenameByDefault: true, Rules: []resource.SharingRule{
					{Name: whole, Replicas: 2}, {Name: "nvidia.com/best", Replicas: 3},
				}},
			},
			want: []string{"nvidia.com/best.shared 1×3", "nvidia.com/gpu 0", "nvidia.com/gpu.shared 2×2", "nvidia.com/l40s 3×8"},
		},
		{
			name: "replicas without a sharing block are slices of time", gpus: four[:2],
			options: resource.Options{Selectors: []resource.Selector{{Where: "s0", Devices: []resource.Ref{"1"}, Replicas: 2}}},
			want:    []string{"nvidia.com/gpu 0 1×2"},
			warns:   []string{"shared devices (1) and unshared devices (0)"},
		},
		{
			name: "selectors that meet on this node", gpus: []inventory.GPU{other},
			options: resource.Options{Selectors: []resource.Selector{
				{Where: "s0", Devices: []resource.Ref{"3"}, Rename: "nvidia.com/a"}, {Where: "s1", Models: []resource.Pattern{"*"},
					Rename: "nvidia.com/b"},
			}},
			want: []string{"nvidia.com/a 3"}, warns: []string{"device 3 (GPU-d) is selected by s0 and by s1; the first counts"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			plan := resource.New(inventory.Snapshot{GPUs: tt.gpus}, tt.options)
			if diff := cmp.Diff(tt.want, counts(plan)); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			var leftOut []string
			for _, l := range plan.LeftOut {
				leftOut = append(leftOut, l.Index)
			}
			if diff := cmp.Diff(tt.leftOut, leftOut); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
			if len(plan.Warnings) != len(tt.warns) {
				t.Fatalf("warnings %q, want %q", plan.Warnings, tt.warns)
			}
			for i, part := range tt.warns {
				if !strings.Contains(plan.Warnings[i], part) {
					t.Errorf("warning %q does not say %q", plan.Warnings[i], part)
				}
			}
		})
	}
}

func TestReplicasAreNumberedAndOrdered(t *testing.T) {
	t.Parallel()
	o := resource.Options{Sharing: resource.Sharing{
		Mode: resource.MPS, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 11}},
	}}
	plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(5)}}, o)
	devices := plan.Resources[0].Devices
	for n, d := range devices {
		want := resource.Device{
			ID: fmt.Sprintf("GPU-f::%d", n), UUID: "GPU-f", GPU: "GPU-f", Index: "5", Resource: "nvidia.com/gpu",
			Sharing: resource.MPS, Minor: 2, GI: -1, CI: -1, NUMANode: 1, Healthy: true,
		}
		if diff := cmp.Diff(want, d); diff != "" {
			t.Errorf("replica %d (-want +got):\n%s", n, diff)
		}
	}
	if len(devices) != 11 {
		t.Errorf("%d replicas, want 11", len(devices))
	}
}

func TestAdmitOnePerRequest(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		sharing resource.Sharing
		devices int
		refused bool
	}{
		{name: "unshared", sharing: resource.Sharing{OnePerRequest: true}, devices: 2},
		{name: "not limited", sharing: resource.Sharing{Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}},
			devices: 2},
		{
			name: "one", sharing: resource.Sharing{OnePerRequest: true,
				Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}},
			devices: 1,
		},
		{
			name: "two", sharing: resource.Sharing{OnePerRequest: true,
				Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}},
			devices: 2, refused: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu(0), gpu(1)}},
				resource.Options{Sharing: tt.sharing}).Resources[0]
			err := r.Admit(r.Devices[:tt.devices])
			if (err != nil) != tt.refused {
				t.Errorf("got %v, refused %v", err, tt.refused)
			}
			if tt.refused && !strings.Contains(err.Error(),
				`"nvidia.com/gpu": invalid request: maximum request size for shared resources is 1; found 2`) {
				t.Errorf("message %q", err)
			}
		})
	}
}

func TestListsThatKubeletRefusesAreLeftOut(t *testing.T) {
	t.Parallel()
	const replicas = 70_000
	for _, node := range []int{inventory.NoNUMANode, 0, 1, 300} {
		t.Run(fmt.Sprint("node ", node), func(t *testing.T) {
			t.Parallel()
			g, small := gpu(4), gpu(0)
			g.UUID, g.NUMANode = "GPU-00000000-0000-0000-0000-000000000000", node
			many := func(replicas int) resource.Plan {
				return resource.New(inventory.Snapshot{GPUs: []inventory.GPU{small, g}},
					resource.Options{Selectors: []resource.Selector{
						{Devices: []resource.Ref{"4"}, Rename: "nvidia.com/many", Replicas: replicas},
					}})
			}
			plan := many(replicas)
			fit := fitting(g.UUID, node)
			want := fmt.Sprintf("resource nvidia.com/many is not offered: the list of its %d devices would have", replicas)
			if len(plan.Resources) != 1 || len(plan.Warnings) != 1 || !strings.HasPrefix(plan.Warnings[0], want) ||
				!strings.Contains(plan.Warnings[0], fmt.Sprintf("(%d devices fit)", fit)) {
				t.Errorf("%d resources, warnings %q; %d devices should fit", len(plan.Resources), plan.Warnings, fit)
			}
			if len(plan.LeftOut) != 1 || plan.LeftOut[0].UUID != g.UUID || plan.LeftOut[0].Index != "4" {
				t.Errorf("left out %+v", plan.LeftOut)
			}
			if len(many(fit).Resources) != 2 || len(many(fit+1).Resources) != 1 {
				t.Errorf("%d devices should be the most that fit", fit)
			}
			// A slip of the pen: so many devices would not fit into memory either.
			for _, replicas := range []int{1 << 40, math.MaxInt} {
				plan := many(replicas)
				if len(plan.Resources) != 1 || len(plan.LeftOut) != 1 || len(plan.Warnings) != 1 ||
					!strings.Contains(plan.Warnings[0], fmt.Sprintf("(%d devices fit)", fit)) {
					t.Errorf("%d replicas: %d resources, %d left out, warnings %q", replicas, len(plan.Resources), len(plan.LeftOut),
						plan.Warnings)
				}
			}
		})
	}
}

// fitting is how many unhealthy replicas of a device fit into 4 MiB, by protobuf's own account.
func fitting(uuid string, node int) int {
	total := 0
	for n := 0; ; n++ {
		d := &pluginapi.Device{ID: fmt.Sprintf("%s::%d", uuid, n), Health: pluginapi.Unhealthy}
		if node >= 0 {
			d.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(node)}}}
		}
		if total += proto.Size(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{d}}); total > 4<<20 {
			return n
		}
	}
}

// A list of exactly 4 MiB is one that kubelet accepts; with one byte more it is not.
func TestAListOfExactly4MiB(t *testing.T) {
	t.Parallel()
	for _, more := range []int{0, 1} {
		const replicas = 90_000
		size := func(name string) int {
			return proto.Size(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{ID: name,
				Health: pluginapi.Unhealthy}}})
		}
		many := gpu(0)
		many.NUMANode = inventory.NoNUMANode
		total := 0
		for n := range replicas {
			total += size(fmt.Sprintf("%s::%d", many.UUID, n))
		}
		// The ID of the second GPU fills what is left.
		rest := 4<<20 - total
		long := gpu(1)
		long.NUMANode = inventory.NoNUMANode
		long.UUID = strings.Repeat("x", rest-(size(strings.Repeat("x", rest))-rest))
		for size(long.UUID) < rest {
			long.UUID += "x"
		}
		if size(long.UUID) != rest {
			t.Fatalf("the last device takes %d bytes, want %d", size(long.UUID), rest)
		}
		long.UUID += strings.Repeat("x", more)
		plan := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{many, long}}, resource.Options{
			Selectors: []resource.Selector{{Devices: []resource.Ref{"0"}, Replicas: replicas}},
		})
		if offered := len(plan.Resources) == 1; offered != (more == 0) {
			t.Errorf("4 MiB and %d bytes more: offered %v; %q", more, offered, plan.Warnings)
		}
	}
}

func BenchmarkPlanOf8000Replicas(b *testing.B) {
	var gpus []inventory.GPU
	for i := range 8 {
		gpus = append(gpus, gpu(i))
	}
	o := resource.Options{Sharing: resource.Sharing{
		Mode: resource.TimeSliced, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 1000}},
	}}
	for b.Loop() {
		if plan := resource.New(inventory.Snapshot{GPUs: gpus}, o); len(plan.Resources[0].Devices) != 8000 {
			b.Fatalf("%d devices", len(plan.Resources[0].Devices))
		}
	}
}
