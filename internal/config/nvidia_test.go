package config_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestRefusedByNVIDIA: what NVIDIA's device plugin does not start with is a problem here, too, with
// and without its compatibility.
func TestRefusedByNVIDIA(t *testing.T) {
	t.Parallel()
	shared := func(entry string) string { return "sharing: {timeSlicing: {resources: [" + entry + "]}}" }
	for _, tt := range []struct{ name, file, env, args, where string }{
		{name: "a placeholder of a UUID", file: shared(`{name: gpu, replicas: 2, devices: ["GPU-UUID"]}`),
			where: "devices[0]"},
		{name: "a placeholder of a MIG UUID", file: shared(`{name: gpu, replicas: 2, devices: [MIG-GPU-UUID/1/0]}`),
			where: "devices[0]"},
		{name: "devices that are null", file: shared(`{name: gpu, replicas: 2, devices: }`), where: "devices"},
		{name: "devices that are negative", file: shared(`{name: gpu, replicas: 2, devices: [-1]}`), where: "devices[0]"},
		{name: "time-slicing that is null", file: "sharing: {timeSlicing: }", where: "sharing.timeSlicing.resources"},
		{name: "and MPS is given", file: "sharing: {timeSlicing: , mps: {resources: [{name: gpu, replicas: 2}]}}",
			args: "--mps-root=/m", where: "sharing.timeSlicing.resources"},
		{name: "resources that are null", file: "sharing: {timeSlicing: {resources: }}",
			where: "sharing.timeSlicing.resources"},
		{name: "a channel twice", file: "imex: {channelIDs: [0, 0]}", where: "imex.channelIDs"},
		{name: "a channel twice in a variable", env: "IMEX_CHANNEL_IDS=0,0", where: "IMEX_CHANNEL_IDS"},
		{name: "a channel twice in flags", args: "--imex-channel-ids=0 --imex-channel-ids=0", where: "--imex-channel-ids"},
		{name: "upper case", file: shared("{name: GPU, replicas: 2}"), where: "name"},
		{name: "an underscore", file: shared("{name: gpu_shared, replicas: 2}"), where: "name"},
		{name: "two dots", file: shared("{name: gpu..a, replicas: 2}"), where: "name"},
		{name: "a number as a name", file: shared("{name: 123, replicas: 2}"), where: "name"},
		{name: "a name that is null", file: shared("{name: , replicas: 2}"), where: "name"},
		{name: "a rename that is null", file: shared("{name: gpu, rename: , replicas: 2}"), where: "rename"},
		{name: "a rename that is empty", file: shared(`{name: gpu, rename: "", replicas: 2}`), where: "rename"},
		{name: "a rename in upper case", file: shared("{name: gpu, rename: GPU, replicas: 2}"), where: "rename"},
		{name: "a name of resources", file: "resources: {gpus: [{pattern: '*', name: GPU}]}",
			where: "resources.gpus[0].name"},
		{name: "a number as a pattern", file: "resources: {gpus: [{pattern: 1, name: gpu}]}",
			where: "resources.gpus[0].pattern"},
		{name: "a number as a path", file: "flags: {nvidiaDriverRoot: 1}", where: "flags.nvidiaDriverRoot"},
		{name: "a word in a list that YAML 1.1 reads as true", file: "selectors: [{models: [y], exclude: true}]",
			where: "selectors[0].models[0]"},
		{name: "a number of another form in a list", file: "selectors: [{models: [00], exclude: true}]",
			where: "selectors[0].models[0]"},
		{name: "a boolean as a prefix", file: "flags: {plugin: {cdiAnnotationPrefix: true}}",
			where: "flags.plugin.cdiAnnotationPrefix"},
		{name: "no pattern", file: "resources: {gpus: [{name: gpu}]}", where: "resources.gpus[0].pattern"},
		{name: "a strategy that is empty", env: "MIG_STRATEGY=", where: "MIG_STRATEGY"},
		{name: "an ID strategy that is empty", args: "--device-id-strategy=", where: "--device-id-strategy"},
		{name: "a policy that is empty", env: "SHARED_DEVICES_ALLOCATION_POLICY=", where: "SHARED_DEVICES_ALLOCATION_POLICY"},
		{name: "a discovery strategy that is empty", env: "DEVICE_DISCOVERY_STRATEGY=", where: "DEVICE_DISCOVERY_STRATEGY"},
		{name: "a list that is empty", env: "DEVICE_LIST_STRATEGY=", where: "DEVICE_LIST_STRATEGY"},
		{name: "a list with an empty end", env: "DEVICE_LIST_STRATEGY=envvar,", where: "DEVICE_LIST_STRATEGY"},
		{name: "a list of the file with an empty item", file: "flags: {plugin: {deviceListStrategy: [envvar, '']}}",
			where: "deviceListStrategy"},
		{name: "an empty string of the file", file: "flags: {migStrategy: ''}", where: "flags.migStrategy"},
		{name: "a flag under two names", args: "--driver-root=/a --nvidia-driver-root=/a", where: "--driver-root"},
		{name: "an empty truth in a flag", args: "--gds-enabled=", where: "--gds-enabled"},
	} {
		for _, mode := range []string{"", " --compatibility=nvidia"} {
			t.Run(tt.name+mode, func(t *testing.T) {
				t.Parallel()
				_, _, err := sources(t, tt.env, tt.args+mode).Resolve("", []byte(tt.file))
				if err == nil || !strings.Contains(err.Error(), tt.where+": ") {
					t.Errorf("%v, want a problem at %s", err, tt.where)
				}
			})
		}
	}
}

// TestTakenByNVIDIA: what NVIDIA's device plugin starts with is no problem here, with and without
// its compatibility.
func TestTakenByNVIDIA(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, file, env, args, warning string }{
		{name: "an infinite interval", file: "flags: {gfd: {sleepInterval: infinite}}"},
		{name: "flags of a generator", env: "CDI_FEATURE_FLAGS=x", warning: "CDI_FEATURE_FLAGS: has no effect"},
		{name: "MPS that is null", file: "sharing: {mps: }"},
		{name: "a pattern that is empty", file: `resources: {gpus: [{pattern: "", name: gpu}]}`,
			warning: "resources.gpus[0].pattern: is empty"},
		{name: "a pattern that is null", file: `resources: {mig: [{pattern: , name: gpu}]}`,
			warning: "resources.mig[0].pattern: is empty"},
		{name: "a date as a name", file: "sharing: {timeSlicing: {resources: [{name: 2020-01-01, replicas: 2}]}}"},
		{name: "another zero", env: "IMEX_CHANNEL_IDS=00"},
		{name: "digits as a name", file: `resources: {gpus: [{pattern: "*", name: "123"}]}`},
		{
			name: "two entries for one resource", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: " +
				"gpu, replicas: 4}]}}",
			warning: "sharing.timeSlicing.resources[1]: overlaps with",
		},
		{name: "a relative driver root", file: "flags: {nvidiaDriverRoot: run}",
			warning: `flags.nvidiaDriverRoot: "run" is not an absolute path; /run is used`},
		{name: "a relative device root", args: "--nvidia-dev-root=x", warning: "--nvidia-dev-root: "},
		{name: "a relative path of hooks", env: "NVIDIA_CTK_PATH=bin/nvidia-ctk", warning: "NVIDIA_CTK_PATH: "},
		{name: "a relative driver root here", env: "DRIVER_ROOT_CTR_PATH=driver-root", warning: "DRIVER_ROOT_CTR_PATH: "},
		{name: "a relative MPS root", env: "MPS_ROOT=run/nvidia/mps", warning: "MPS_ROOT: "},
		{name: "a relative socket", args: "--kubelet-socket=kubelet.sock", warning: "--kubelet-socket: "},
	} {
		for _, mode := range []string{"", " --compatibility=nvidia"} {
			t.Run(tt.name+mode, func(t *testing.T) {
				t.Parallel()
				_, warnings, err := sources(t, tt.env, tt.args+mode).Resolve("", []byte(tt.file))
				if err != nil {
					t.Fatal(err)
				}
				if tt.warning != "" && !slices.ContainsFunc(warnings,
					func(r config.Remark) bool { return strings.Contains(r.String(), tt.warning) }) {
					t.Errorf("warnings %v, want %q", warnings, tt.warning)
				}
			})
		}
	}
}

// TestEmptyVariables: an empty variable is as given, as for NVIDIA's device plugin, and wins over
// the file.
func TestEmptyVariables(t *testing.T) {
	t.Parallel()
	const file = "flags: {nvidiaDriverRoot: /a, nvidiaDevRoot: /b, mpsRoot: /c, gdsEnabled: true, plugin: " +
		"{nvidiaCTKPath: /d, " +
		"containerDriverRoot: /e, cdiAnnotationPrefix: f/}}"
	c, _, err := sources(t, "NVIDIA_DRIVER_ROOT= NVIDIA_DEV_ROOT= MPS_ROOT= GDS_ENABLED= NVIDIA_CDI_HOOK_PATH= "+
		"NVIDIA_CTK_PATH=/x DRIVER_ROOT_CTR_PATH= CDI_ANNOTATION_PREFIX= KUBELET_SOCKET= CONFIG_FILE=",
		"").Resolve("", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	want := config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/"}
	if !reflect.DeepEqual(c.Driver, want) || c.Edits.MPSRoot != "" || c.Edits.GDS != containeredits.Never ||
		c.CDI.HookPath != "" || c.Edits.AnnotationPrefix != "" || c.KubeletSocket != "" {
		t.Errorf("driver %+v, edits %+v, CDI %+v, socket %q", c.Driver, c.Edits, c.CDI, c.KubeletSocket)
	}
}

// TestEmptyConfigFile: an empty flag or variable is no file, whatever the other says.
func TestEmptyConfigFile(t *testing.T) {
	t.Parallel()
	for _, s := range []config.Sources{sources(t, "CONFIG_FILE=", ""),
		sources(t, "CONFIG_FILE=/nowhere/config.yaml", "--config-file=")} {
		if c, _, err := config.Load(s); err != nil || c.File != "" {
			t.Errorf("file %q, %v", c.File, err)
		}
	}
}

// TestCompatibility: what NVIDIA's device plugin ignores is ignored where that is asked for, and
// has its effect otherwise. Only --compatibility=none says nothing of it.
func TestCompatibility(t *testing.T) {
	t.Parallel()
	const file = `
resources:
  gpus: [{pattern: "*", name: a100}]
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: gpu, rename: gpu.dev, devices: [0], replicas: 2}
    - {name: gpu, rename: gpu.shared, devices: 1, replicas: 4}
    - {name: gpu, devices: [], replicas: 3}
`
	where := []string{"resources", "rename", "devices"}
	for _, tt := range []struct {
		name, args string
		nvidia     bool // the program's name
		ignored    bool
		says       string
	}{
		{name: "not given", says: "has its effect here; NVIDIA's device plugin ignores it"},
		{name: "under NVIDIA's name", nvidia: true, ignored: true, says: "is ignored, as by NVIDIA's device plugin"},
		{name: "nvidia", args: "--compatibility=nvidia", ignored: true, says: "is ignored, as by NVIDIA's device plugin"},
		{name: "none", args: "--compatibility=none"},
		{name: "none under NVIDIA's name", args: "--compatibility=none", nvidia: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			text := file
			if !tt.ignored {
				text = strings.Replace(file, "devices: []", "devices: all", 1)
			}
			s := sources(t, "", tt.args)
			s.NVIDIA = tt.nvidia
			c, warnings, err := s.Resolve("", []byte(text))
			if err != nil {
				t.Fatal(err)
			}
			var rules []resource.SharingRule
			for i, r := range c.Resource.Sharing.Rules {
				r.Where = ""
				rules = append(rules, r)
				if tt.ignored && (r.Rename != "" || r.First > 0 || r.Devices != nil) {
					t.Errorf("entry %d has an effect: %+v", i, r)
				}
			}
			if tt.ignored != (c.Resource.GPUs == nil) || tt.ignored != c.Resource.MIGParents {
				t.Errorf("names %v, MIG devices alone %v", c.Resource.GPUs, c.Resource.MIGParents)
			}
			if diff := cmp.Diff([]resource.SharingRule{
				{Name: "nvidia.com/gpu", Rename: "nvidia.com/gpu.dev", Devices: []resource.Ref{"0"}, Replicas: 2},
				{Name: "nvidia.com/gpu", First: 1, Replicas: 4}, {Name: "nvidia.com/gpu", Replicas: 3},
			}, rules); !tt.ignored && diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
			var said []string
			for _, w := range warnings {
				if tt.says != "" && strings.Contains(w.Text, tt.says) {
					said = append(said, w.Where[strings.LastIndexByte(w.Where, '.')+1:])
				}
				if tt.says == "" && strings.Contains(w.Text, "NVIDIA") {
					t.Errorf("it warns: %s", w)
				}
			}
			for _, key := range where {
				if slices.Contains(said, key) != (tt.says != "") {
					t.Errorf("warnings %v: %s is among them: %v", warnings, key, slices.Contains(said, key))
				}
			}
		})
	}
	for _, s := range []config.Sources{sources(t, "COMPATIBILITY=nvidia", ""), sources(t, "", "")} {
		c, _, err := s.Resolve("", []byte("flags: {compatibility: nvidia}"))
		if err != nil || c.Compatibility != config.CompatibilityNVIDIA {
			t.Errorf("%v, %v", c.Compatibility, err)
		}
	}
}

// TestMergedEntries: two entries for one resource share its devices as the larger says, on a node.
func TestMergedEntries(t *testing.T) {
	t.Parallel()
	c, _, err := sources(t, "", "--compatibility=nvidia").Resolve("", []byte(
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: gpu, replicas: 4, devices: [9]}, "+
			"{name: gpu, replicas: 3}]}}"))
	if err != nil {
		t.Fatal(err)
	}
	if rule, _ := c.Resource.Sharing.RuleOf("nvidia.com/gpu"); rule.Replicas != 4 || rule.Devices != nil {
		t.Errorf("rule %+v", rule)
	}
}
