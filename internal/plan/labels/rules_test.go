package labels_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestRules holds rules of single labels that no simulated node shows. A label that is to be absent
// is "-".
func TestRules(t *testing.T) {
	t.Parallel()
	gpu := func(model string, change ...func(*inventory.GPU)) inventory.GPU {
		g := inventory.GPU{Model: model, MemoryBytes: 1 << 30, ComputeCapability: inventory.ComputeCapability{Major: 9}}
		for _, c := range change {
			c(&g)
		}
		return g
	}
	clique := func(name string) func(*inventory.GPU) { return func(g *inventory.GPU) { g.Clique = name } }
	divided := func(profiles ...string) func(*inventory.GPU) {
		return func(g *inventory.GPU) {
			g.MIG = inventory.MIGEnabled
			for _, p := range profiles {
				g.MIGDevices = append(g.MIGDevices, inventory.MIGDevice{Profile: p, MemoryBytes: 1 << 30})
			}
		}
	}
	linked := func(links ...inventory.Link) func(*inventory.GPU) { return func(g *inventory.GPU) { g.Links = links } }
	switched, direct := inventory.Link{NVLinks: 1, Switched: true}, inventory.Link{NVLinks: 1}
	shared := func(rule resource.SharingRule) resource.Options {
		rule.Name, rule.Replicas = resource.WholeGPU, 2
		return resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced,
			Rules: []resource.SharingRule{rule}}}
	}
	single, mixed := resource.Options{MIG: resource.MIGSingle}, resource.Options{MIG: resource.MIGMixed}
	long := strings.Repeat("a", 62) + "." + "b"
	for name, tt := range map[string]struct {
		gpus    []inventory.GPU
		options resource.Options
		driver  string
		machine string
		claims  bool
		want    string // key without nvidia.com/, and value
	}{
		"as many GPUs of two models": {gpus: []inventory.GPU{gpu("b"), gpu("a"), gpu("a"), gpu("b")},
			want: "gpu.product=b"},
		"more GPUs of the second model": {gpus: []inventory.GPU{gpu("b"), gpu("a"), gpu("a")}, want: "gpu.count=2"},
		"a whole GPU beside more divided": {gpus: []inventory.GPU{gpu("b", divided()), gpu("b", divided()), gpu("a")},
			want: "gpu.product=a"},
		"parents of a model with a whole GPU": {gpus: []inventory.GPU{gpu("b", divided("1g.5gb")), gpu("b")},
			options: mixed, want: "gpu.replicas=1"},
		"one kind and an empty GPU": {gpus: []inventory.GPU{gpu("b", divided("1g.5gb")), gpu("b", divided())},
			options: single, want: "gpu.product=b-MIG-INVALID"},
		"one kind and an empty GPU, mixed": {gpus: []inventory.GPU{gpu("b", divided("1g.5gb")), gpu("b", divided())},
			options: mixed, want: "mig-1g.5gb.count=1"},
		"two kinds": {gpus: []inventory.GPU{gpu("b", divided("1g.5gb", "2g.10gb"))},
			options: single, want: "gpu.count=0"},
		"single without MIG": {gpus: []inventory.GPU{gpu("b")}, options: single, want: "gpu.product=b"},
		"the least memory": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.MemoryBytes = 1 << 20 })}, want: "gpu.memory=1"},
		"the first of two memories": {
			gpus: []inventory.GPU{gpu("b"), gpu("b", func(g *inventory.GPU) { g.MemoryBytes = 1 << 31 })},
			want: "gpu.memory=1024",
		},
		"resources by MPS": {
			gpus: []inventory.GPU{gpu("b")}, options: resource.Options{Sharing: resource.Sharing{Mode: resource.MPS}},
			want: "mps.capable=true",
		},
		"resources by MPS, the first GPU divided": {
			gpus:    []inventory.GPU{gpu("b", divided()), gpu("b")},
			options: resource.Options{Sharing: resource.Sharing{Mode: resource.MPS}}, want: "mps.capable=false",
		},
		"no memory": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.MemoryBytes = 0 })}, want: "gpu.memory=-"},
		"no compute capability": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.ComputeCapability.Major = 0 })}, want: "gpu.family=-"},
		"no version of CUDA": {gpus: []inventory.GPU{gpu("b")}, want: "cuda.runtime-version.full=-"},
		"a driver of four parts": {gpus: []inventory.GPU{gpu("b")}, driver: "1.2.3.4",
			want: "cuda.driver-version.full=-"},
		"a driver of one part": {gpus: []inventory.GPU{gpu("b")}, driver: "1", want: "cuda.driver.major=-"},
		"two cliques": {gpus: []inventory.GPU{gpu("b", clique("x.1")), gpu("b", clique("x.2"))},
			want: "gpu.clique=-"},
		"a GPU without a clique": {gpus: []inventory.GPU{gpu("b", clique("x.1")), gpu("b")},
			want: "gpu.clique=x.1"},
		"shared": {gpus: []inventory.GPU{gpu("b")}, options: shared(resource.SharingRule{}),
			want: "gpu.product=b-SHARED"},
		"shared under a name of its own": {gpus: []inventory.GPU{gpu("b")},
			options: shared(resource.SharingRule{Rename: "nvidia.com/c"}), want: "gpu.product=b"},
		"a class that is neither": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.Class = "0x030100" })}, want: "gpu.mode=unknown"},
		"the first GPU says the mode": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.Class = "0x030000" }), gpu("b")}, want: "gpu.mode=graphics"},
		"a long model": {gpus: []inventory.GPU{gpu(long)},
			want: "gpu.product=" + long[:58] + "-b30f"},
		"characters that are not legal":       {gpus: []inventory.GPU{gpu("A  b(TM)/c\t")}, want: "gpu.product=A-bTMc"},
		"a machine that begins with a hyphen": {machine: "- X ", want: "gpu.machine=X"},
		"a virtual GPU that does not tell": {gpus: []inventory.GPU{gpu("b",
			func(g *inventory.GPU) { g.VGPU.Present = true })}, want: "vgpu.host-driver-branch="},
		"links of which some lead to a switch": {gpus: []inventory.GPU{gpu("b", linked(switched)),
			gpu("b", linked(direct))}, want: "link=nvlink"},
		"links of which all lead to a switch": {gpus: []inventory.GPU{gpu("b", linked(switched)),
			gpu("b", linked(switched))}, want: "link=nvswitch"},
		"three GPUs of which one leads to a switch": {
			gpus: []inventory.GPU{gpu("b", linked(switched, switched)), gpu("b", linked(direct, direct)),
				gpu("b", linked(direct, direct))}, want: "link=nvlink",
		},
		"links to a switch of which none is active": {
			gpus: []inventory.GPU{gpu("b", linked(direct)), gpu("b",
				linked(inventory.Link{Switched: true}, inventory.Link{Switched: true}))}, want: "link=nvlink",
		},
		"a GPU without links to a switch": {gpus: []inventory.GPU{gpu("b", linked(switched)), gpu("b", linked())},
			want: "link=nvlink"},
		"no NVLinks": {gpus: []inventory.GPU{gpu("b", linked(inventory.Link{})), gpu("b")},
			want: "link=pcie"},
		"one GPU": {gpus: []inventory.GPU{gpu("b")}, want: "link=-"},
		"claims by MPS": {gpus: []inventory.GPU{gpu("b")}, claims: true,
			want: "mps.capable=true"},
		"neither claims nor resources by MPS": {gpus: []inventory.GPU{gpu("b")}, want: "mps.capable=false"},
	} {
		key, want, _ := strings.Cut(tt.want, "=")
		all := labels.All(inventory.Snapshot{GPUs: tt.gpus, Driver: inventory.Driver{Version: tt.driver}},
			labels.Options{Resources: tt.options, Machine: tt.machine, ClaimsByMPS: tt.claims})
		if key == "link" {
			key = labels.Link
		} else {
			key = labels.Prefix + key
		}
		if got, has := all[key]; !has && want != "-" || has && got != want {
			t.Errorf("%s: %s is %q (%v), want %q", name, key, got, has, want)
		}
	}
}

// TestFamilies has the chip generation of every compute capability.
func TestFamilies(t *testing.T) {
	t.Parallel()
	for capability, want := range map[string]string{
		"1.3": "tesla", "2.1": "fermi", "3.7": "kepler", "4.0": "undefined", "5.2": "maxwell", "6.1": "pascal",
		"7.0": "volta", "7.2": "volta",
		"7.5": "turing", "8.0": "ampere", "8.6": "ampere", "8.8": "ampere", "8.9": "ada-lovelace", "9.0": "hopper",
		"10.0": "blackwell",
		"11.0": "undefined", "12.0": "blackwell", "13.0": "rubin", "14.0": "undefined",
	} {
		var c inventory.ComputeCapability
		if _, err := fmt.Sscanf(capability, "%d.%d", &c.Major, &c.Minor); err != nil {
			t.Fatal(err)
		}
		got := labels.Discovered(inventory.Snapshot{GPUs: []inventory.GPU{{ComputeCapability: c}}},
			labels.Options{})["nvidia.com/gpu.family"]
		if got != want {
			t.Errorf("%s: %s, want %s", capability, got, want)
		}
	}
}
