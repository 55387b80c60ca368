package config_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestDRA(t *testing.T) {
	t.Parallel()
	const uuid = "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c"
	const file = `{dra: {mode: split, gpus: {uuids: [` + uuid + `], indices: ["3"], pci: ["1B:00.0"], models: ["*T4*"]}},
		selectors: [{indices: [4, 3], exclude: true}]}`
	s := sources(t, "NODE_NAME=n", "")
	s.Program = config.NodeAgent
	c, warnings, err := s.Resolve("a.yaml", []byte(file))
	want := config.DRA{Mode: config.DRASplit, ShareBy: "memory", GPUs: resource.Selector{
		Where: "dra.gpus", Devices: []resource.Ref{uuid, "3"}, PCI: []string{"0000:1b:00.0"},
		Models: []resource.Pattern{"*T4*"}}}
	if diff := cmp.Diff(want, c.DRA); diff != "" || len(warnings) > 0 || err != nil {
		t.Fatalf("%v, warnings %v (-want +got):\n%s", err, warnings, diff)
	}
	gpus := []inventory.GPU{{UUID: uuid, Index: 0}, {UUID: "b", Index: 1}, {UUID: "c", Index: 2, Model: "Tesla T4"},
		{UUID: "d", Index: 3},
		{UUID: "e", Index: 4}, {UUID: "f", Index: 5, BDF: "0000:1b:00.0"}, {UUID: "g", Index: 6, Model: "NVIDIA DGX Display"}}
	given := func() (all []int) {
		for _, g := range gpus {
			if c.GivenByDRA(g) {
				all = append(all, g.Index)
			}
		}
		return all
	}
	for mode, want := range map[config.DRAMode][]int{config.DRAOff: nil, config.DRAAll: {0, 1, 2, 5},
		config.DRASplit: {0, 2, 5}} {
		if c.DRA.Mode = mode; !slices.Equal(given(), want) {
			t.Errorf("%s: GPUs %v, want %v", mode, given(), want)
		}
	}
}

// TestShares: how many claims can have parts of one GPU, by the file, the environment and the flag.
func TestShares(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{"0": 0, "2": 2, "48": 48, "1": -1, "49": -1, "-2": -1, "many": -1} {
		for way, given := range map[string][3]string{
			"file": {"dra: {shares: " + text + "}", "", ""}, "environment": {"", "DRA_SHARES=" + text, ""}, "flag": {"", "",
				"--dra-shares=" + text},
		} {
			c, _, err := sources(t, given[1], given[2]).Resolve("a.yaml", []byte(given[0]))
			if refused := want < 0; (err != nil) != refused || !refused && c.DRA.Shares != want {
				t.Errorf("%s by the %s: %d, %v", text, way, c.DRA.Shares, err)
			}
		}
	}
}

// TestDriverName: the name of the driver is one that Kubernetes takes.
func TestDriverName(t *testing.T) {
	t.Parallel()
	longest := strings.Repeat("a.", 30) + "aaa"
	for text, good := range map[string]bool{
		"gpu.example.com": true, "gpu": true, "a-b.9.x": true, longest: true, longest + "a": false, "GPU.example.com": false,
		"gpu_example": false, "-gpu.example.com": false, "gpu..com": false, "gpu.example.com.": false,
		"gpu.example.com/x": false,
	} {
		c, _, err := sources(t, "", "").Resolve("a.yaml", []byte("dra: {driverName: "+text+"}"))
		const remedy = "must be a DNS subdomain of at most 63 characters, such as gpu.example.com, not"
		if (err == nil) != good || good && c.DRADriver != text || !good && !strings.Contains(err.Error(), remedy) {
			t.Errorf("%s: %q, %v", text, c.DRADriver, err)
		}
	}
	if c, _, err := sources(t, "DRA_DRIVER_NAME=a.b", "--dra-driver-name=c.d").Resolve("a.yaml",
		[]byte("dra: {driverName: e.f}")); err != nil || c.DRADriver != "c.d" {
		t.Errorf("the flag beside the others: %q, %v", c.DRADriver, err)
	}
	if c, _, err := sources(t, "", "").Resolve("", nil); err != nil || c.DRADriver != "gpu.nvidia.com" {
		t.Errorf("by default %q, %v", c.DRADriver, err)
	}
}

// TestClaimStatus: nothing is written into claims by default.
func TestClaimStatus(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]bool{"version: v1": false, "dra: {claimStatus: true}": true} {
		if c, _, err := sources(t, "", "").Resolve("a.yaml", []byte(file)); err != nil || c.DRA.ClaimStatus != want {
			t.Errorf("%q: %v, %v", file, c.DRA.ClaimStatus, err)
		}
	}
}

// TestMetadata: containers get no metadata files by default.
func TestMetadata(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]bool{"version: v1": false, "dra: {metadata: true}": true} {
		if c, _, err := sources(t, "", "").Resolve("a.yaml", []byte(file)); err != nil || c.DRA.Metadata != want {
			t.Errorf("%q: %v, %v", file, c.DRA.Metadata, err)
		}
	}
}

// TestShareBy: memory is the default; by count it is to be said how many shares there are.
func TestShareBy(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"version: v1":                              "memory",
		"dra: {shares: 4, shareBy: memory}":        "memory",
		"dra: {dynamicMIG: true, switchMIG: true}": "memory",
		"dra: {switchMIG: true}":                   "error: needs dra.dynamicMIG: true",
		"dra: {dynamicMIG: true, switchMIG: true, shares: 4}": "error: a GPU of which MIG devices can be made is " +
			"not given in shares",
		"dra: {dynamicMIG: true, switchMIG: true, shareBy: unlimited}": "error: a GPU of which MIG devices can be made is " +
			"not given in shares",
		"dra: {shares: 4, shareBy: count}": "count",
		"dra: {shareBy: unlimited}":        "unlimited",
		"dra: {shareBy: count}":            "error: count needs dra.shares",
		"dra: {shares: 4, shareBy: size}": "error: must be memory, count or unlimited, not " +
			"\"size\"",
		"dra: {shares: 4, shareBy: unlimited}": "warning: has no effect with dra.shareBy: unlimited",
	} {
		c, warnings, err := sources(t, "", "").Resolve("a.yaml", []byte(file))
		got := string(c.DRA.ShareBy)
		for _, w := range warnings {
			got = "warning: " + w.String()
		}
		if err != nil {
			got = "error: " + err.Error()
		}
		kind, text, _ := strings.Cut(want, ": ")
		if !strings.HasPrefix(got, kind) || !strings.Contains(got, text) {
			t.Errorf("%q: %s, want %s", file, got, want)
		}
	}
}

// TestDRAThatIsRefused: no file gives a GPU twice, and nothing is started that lacks what it needs.
func TestDRAThatIsRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file, args string
		program          config.Program
		want             string // empty: is taken without a warning
	}{
		{name: "the program without a client", file: "dra: {mode: dra}", program: config.DevicePlugin,
			want: "run gpu-node-agent instead"},
		{name: "that program with the default", file: "dra: {mode: plugin}", program: config.DevicePlugin},
		{name: "no node name", file: "dra: {mode: dra}", program: config.NodeAgent, want: "set --node-name or NODE_NAME"},
		{name: "unknown mode", file: "dra: {mode: both}", want: `"both" is not one of: plugin, dra, split`},
		{name: "nothing selected", file: "dra: {mode: split}", want: "dra.gpus: selects nothing"},
		{name: "nothing selected by what is there", file: "dra: {mode: split, gpus: {}}", want: "dra.gpus: selects nothing"},
		{name: "a part of a GPU", file: `dra: {mode: split, gpus: {indices: ["0:1"]}}`,
			want: `"0:1" is a MIG device; name its GPU`},
		{name: "a MIG device", file: "dra: {mode: split, gpus: {uuids: [MIG-4404041a-04cf-1ccf-9e70-f139a9b1e23c]}}",
			want: "name its GPU"},
		{name: "no state", file: "dra: {mode: dra}", args: "--state-dir=", want: "dra needs --state-dir"},
		{name: "no kubelet", file: "dra: {mode: dra}", args: "--kubelet-socket=", want: "dra needs --kubelet-socket"},
		{name: "no account of pods", file: "dra: {mode: dra}", args: "--pod-resources-socket=",
			want: "dra needs --pod-resources-socket"},
		{name: "a relative path", file: "{dra: {mode: dra}, flags: {kubeletRoot: kubelet}}", want: "is not an absolute path"},
		{name: "shared and in slices", file: "{dra: {mode: dra}, sharing: {timeSlicing: {resources: [{name: " +
			"nvidia.com/gpu, replicas: 2}]}}}",
			want: "with dra no GPU is shared by the device plugin"},
		{name: "renamed and in slices", file: "{dra: {mode: dra}, selectors: [{indices: [0], rename: nvidia.com/a}]}",
			want: "selectors[0]: renames or shares"},
		{name: "renamed and selected", file: "{dra: {mode: split, gpus: {indices: [1, 0]}}, selectors: [{indices: [2], " +
			"rename: nvidia.com/a}, {indices: [0], replicas: 2}]}",
			want: "selectors[1]: overlaps with dra.gpus"},
		{name: "a part of it renamed", file: `{dra: {mode: split, gpus: {indices: [0]}}, selectors: [{indices: ["0:1"], rename: nvidia.com/a}]}`,
			want: "selectors[0]: overlaps with dra.gpus"},
		{name: "shared and selected", file: "{dra: {mode: split, gpus: {indices: [0]}}, sharing: {timeSlicing: {resources: " +
			"[{name: nvidia.com/gpu, rename: nvidia.com/a, devices: [0], replicas: 2}]}}}", args: "--compatibility=none",
			want: "overlaps with dra.gpus"},
		{name: "models in common", file: "{dra: {mode: split, gpus: {models: ['*H100*']}}, selectors: [{models: " +
			"['NVIDIA*'], replicas: 2}]}",
			want: "have models in common"},
		{name: "apart", file: "{dra: {mode: split, gpus: {indices: [0]}}, selectors: [{indices: [1], replicas: 2}], " +
			"sharing: {timeSlicing: {resources: " +
			"[{name: nvidia.com/gpu, replicas: 2}]}}}", args: "--compatibility=none"},
		{name: "excluded and selected", file: "{dra: {mode: split, gpus: {indices: [0, 1]}}, selectors: [{indices: [0], " +
			"exclude: true}]}"},
		{name: "selected for nothing", file: "dra: {gpus: {indices: [0]}}", want: "has no effect without the mode split"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := sources(t, "", tt.args)
			s.Program = tt.program
			_, warnings, err := s.Resolve("", []byte(tt.file))
			said := ""
			for _, w := range warnings {
				said += w.String() + "\n"
			}
			if err != nil {
				said += err.Error()
			}
			if tt.want == "" && said != "" || !strings.Contains(said, tt.want) {
				t.Errorf("%q, want %q", said, tt.want)
			}
		})
	}
}
