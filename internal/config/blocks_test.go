package config_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

func TestBlocksBecomeResourceOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, file, args string
		want             resource.Options
	}{
		{
			name: "time-slicing, as documented by the reference",
			file: `
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
`,
			want: resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced, Rules: []resource.SharingRule{
				{Where: "sharing.timeSlicing.resources[0]", Name: "nvidia.com/gpu", Replicas: 10},
			}}},
		},
		{
			name: "time-slicing with everything",
			file: `
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - {name: gpu, devices: all, replicas: 2, rename: gpu.half}
    - {name: mig-1g.10gb, devices: 3, replicas: 3}
    - {name: nvidia.com/mig-2g.20gb, devices: [0, "1:2", GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30, MIG-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30], replicas: 4}
`,
			want: resource.Options{Sharing: resource.Sharing{
				Mode: resource.TimeSliced, RenameByDefault: true, OnePerRequest: true, Rules: []resource.SharingRule{
					{Where: "sharing.timeSlicing.resources[0]", Name: "nvidia.com/gpu", Rename: "nvidia.com/gpu.half", Replicas: 2},
					{Where: "sharing.timeSlicing.resources[1]", Name: "nvidia.com/mig-1g.10gb", First: 3, Replicas: 3},
					{
						Where: "sharing.timeSlicing.resources[2]", Name: "nvidia.com/mig-2g.20gb",
						Devices: []resource.Ref{"0", "1:2", "GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30",
							"MIG-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30"}, Replicas: 4,
					},
				},
			}},
		},
		{
			name: "MPS wins and refuses requests for more than one", args: "--mps-root=/run/nvidia/mps",
			file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, " +
				"replicas: 5}]}}",
			want: resource.Options{Sharing: resource.Sharing{Mode: resource.MPS, OnePerRequest: true,
				Rules: []resource.SharingRule{
					{Where: "sharing.mps.resources[0]", Name: "nvidia.com/gpu", Replicas: 5},
				}}},
		},
		{
			name: "MPS that allows requests for more than one", args: "--mps-root=/run/nvidia/mps",
			file: "sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 5}]}}",
			want: resource.Options{Sharing: resource.Sharing{Mode: resource.MPS, Rules: []resource.SharingRule{
				{Where: "sharing.mps.resources[0]", Name: "nvidia.com/gpu", Replicas: 5},
			}}},
		},
		{
			name: "names by pattern",
			file: `
resources:
  gpus:
  - {pattern: "*H100*", name: h100}
  - {pattern: "*", name: nvidia.com/other}
  mig:
  - {pattern: 1g.10gb, name: small}
`,
			want: resource.Options{
				GPUs: []resource.Naming{{Pattern: "*H100*", Name: "nvidia.com/h100"}, {Pattern: "*", Name: "nvidia.com/other"}},
				MIGs: []resource.Naming{{Pattern: "1g.10gb", Name: "nvidia.com/small"}},
			},
		},
		{
			name: "selectors",
			file: `
selectors:
- {uuids: [GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30], indices: [1, "2:0"], exclude: true}
- {pci: ["1B:00.0"], rename: odd}
- {models: ["*L40S"], replicas: 4, rename: l40s, exclude: false}
`,
			want: resource.Options{Selectors: []resource.Selector{
				{Where: "selectors[0]", Devices: []resource.Ref{"GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30", "1", "2:0"},
					Exclude: true},
				{Where: "selectors[1]", PCI: []string{"0000:1b:00.0"}, Rename: "nvidia.com/odd"},
				{Where: "selectors[2]", Models: []resource.Pattern{"*L40S"}, Rename: "nvidia.com/l40s", Replicas: 4},
			}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, _, err := sources(t, "", tt.args).Resolve("", []byte(tt.file))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, c.Resource); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
		})
	}
}

// problems returns the problems that a file has, one to a line.
func problems(t *testing.T, file, args string) string {
	t.Helper()
	_, _, err := sources(t, "", args).Resolve("", []byte(file))
	var invalid *config.Invalid
	if err == nil {
		return ""
	}
	if !errors.As(err, &invalid) {
		t.Fatal(err)
	}
	var lines []string
	for _, p := range invalid.Problems {
		lines = append(lines, p.String())
	}
	return strings.Join(lines, "\n")
}

func TestProblemsOfBlocks(t *testing.T) {
	t.Parallel()
	const devices = `must be "all", a number of devices greater than 0, or a list of GPU indices (0), MIG indices ("0:1") and UUIDs`
	for _, tt := range []struct{ name, file, args, want string }{
		{
			name: "sharing without resources", file: "sharing:\n  timeSlicing: {}\n",
			want: "line 2: sharing.timeSlicing.resources: no resources specified; add at least one entry with name and replicas",
		},
		{
			name: "sharing with an empty list", file: "sharing:\n  timeSlicing:\n    resources: []\n",
			want: "line 3: sharing.timeSlicing.resources: no resources specified; add at least one entry with name and replicas",
		},
		{
			name: "an entry without anything", file: "sharing:\n  timeSlicing:\n    resources:\n    - {}\n",
			want: "line 4: sharing.timeSlicing.resources[0].name: no resource name specified; use a name such as " +
				"nvidia.com/gpu\n" +
				"line 4: sharing.timeSlicing.resources[0].replicas: no replicas specified; set the number of containers that " +
				"share a device, 2 or more",
		},
		{
			name: "too few replicas", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].replicas: number of replicas must be >= 2, not 1",
		},
		{
			name: "names", file: "sharing: {timeSlicing: {resources: [{name: a+b, rename: amd.com/gpu, replicas: 2}]}}",
			want: `line 1: sharing.timeSlicing.resources[0].name: "a+b" is not a resource name: after nvidia.com/ come lower-case letters, digits, '-' and '.', a letter or digit first, last and on both sides of each '.'` + "\n" +
				`line 1: sharing.timeSlicing.resources[0].rename: "amd.com/gpu" is not a resource name: after nvidia.com/ come lower-case letters, digits, '-' and '.', a letter or digit first, last and on both sides of each '.'`,
		},
		{
			name: "devices, a word", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: some}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].devices: " + devices,
		},
		{
			name: "devices, none", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 0}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].devices: " + devices,
		},
		{
			name: "devices, a fraction", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1.5}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].devices: " + devices,
		},
		{
			name: "devices, a block", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: {a: 1}}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].devices: " + devices,
		},
		{
			name: "devices, a bad item", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, " +
				"null, [1]]}]}}",
			want: "line 1: sharing.timeSlicing.resources[0].devices: " + devices,
		},
		{
			name: "devices, a bad reference", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: " +
				"[0, GPU]}]}}",
			want: `line 1: sharing.timeSlicing.resources[0].devices[1]: "GPU" does not name a device: write a GPU's index (0), a MIG device's index (0:1) or a UUID as nvidia-smi -L prints it`,
		},
		{
			name: "MPS without a directory, with mixed", file: "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}",
			args: "--mig-strategy=mixed",
			want: "line 1: sharing.mps: MPS is not supported with the MIG strategy mixed; use time-slicing, or another MIG " +
				"strategy\n" +
				"line 1: sharing.mps: needs --mps-root, the directory on the host with the MPS state, such as /run/nvidia/mps",
		},
		{
			name: "namings", file: "resources:\n  gpus:\n  - name: gpu\n  mig:\n  - pattern: 1g.*\n",
			want: "line 3: resources.gpus[0].pattern: is missing; use \"*\" to match everything\n" +
				"line 5: resources.mig[0].name: is not a resource name; write one such as nvidia.com/gpu",
		},
		{
			name: "selectors that say too little or too much",
			file: "selectors:\n- {exclude: true}\n- {indices: [0]}\n- {indices: [1], exclude: true, replicas: 2}\n" +
				"- {indices: [2], replicas: 0}\n" +
				"- {uuids: [x], pci: [z], models: [\"\"], rename: \"-\"}\n",
			want: `line 2: selectors[0]: selects nothing; set uuids, indices, pci or models` + "\n" +
				`line 3: selectors[1]: has no effect; set exclude: true, units: true, rename or replicas` + "\n" +
				`line 4: selectors[2]: exclude cannot be combined with rename, replicas or units; remove one of them` + "\n" +
				`line 5: selectors[3].replicas: must be 1 or more, not 0` + "\n" +
				`line 6: selectors[4].models[0]: is empty; use "*" to match everything` + "\n" +
				`line 6: selectors[4].pci[0]: "z" is not a PCI address such as 0000:1b:00.0` + "\n" +
				`line 6: selectors[4].rename: "-" is not a resource name: after nvidia.com/ come lower-case letters, digits, '-' and '.', a letter or digit first, last and on both sides of each '.'` + "\n" +
				`line 6: selectors[4].uuids[0]: "x" does not name a device: write a GPU's index (0), a MIG device's index (0:1) or a UUID as nvidia-smi -L prints it`,
		},
		{
			name: "selectors that overlap",
			file: "selectors:\n- {indices: [0], pci: [\"1b:00.0\"], models: [\"*H100*\"], exclude: true}\n" +
				"- {indices: [\"0:1\"], rename: a}\n" +
				"- {pci: [\"0000:1b:00.0\"], rename: b}\n- {models: [\"NVIDIA*\"], rename: c}\n",
			want: "line 3: selectors[1]: overlaps with selectors[0]: 0:1 is also 0 there\n" +
				"line 4: selectors[2]: overlaps with selectors[0]: 0000:1b:00.0 is also 0000:1b:00.0 there\n" +
				`line 5: selectors[3]: overlaps with selectors[0]: the models "NVIDIA*" and "*H100*" have models in common`,
		},
		{
			name: "selectors that overlap twice",
			file: "selectors:\n- {indices: [0, 1], exclude: true}\n- {indices: [0, 1], rename: a}\n",
			want: "line 3: selectors[1]: overlaps with selectors[0]: 0 is also 0 there",
		},
		{
			name: "each bound of a duration", file: "health:\n  suspectLimit: 1h1s\n  unknownGrace: 999ms\n  flapWindow: 721h\n",
			want: "line 2: health.suspectLimit: must be from 1s to 1h, not 1h0m1s\n" +
				"line 3: health.unknownGrace: must be from 1s to 24h, not 999ms\n" +
				"line 4: health.flapWindow: must be from 1m to 720h, not 721h0m0s",
		},
		{name: "durations at their bounds", file: "health: {suspectLimit: 1h, unknownGrace: 24h, flapWindow: 1m}"},
		{
			name: "health", file: "health:\n  xids: {ignore: [31, -1], fatal: [31]}\n  recovery: never\n  suspectLimit: 0s\n" +
				"  flapLimit: 0\n  flapWindow: 1\n  unknownGrace: x\n  fabric: up\n  imex: \"no\"\n",
			want: "line 2: health.xids.fatal[0]: XID 31 already has a rule at health.xids.ignore[0]\n" +
				"line 2: health.xids.ignore[1]: -1 is not an XID\n" +
				`line 3: health.recovery: "never" is not one of: auto, manual` + "\n" +
				"line 4: health.suspectLimit: must be from 1s to 1h, not 0s\n" +
				"line 5: health.flapLimit: must be 1 or more, not 0\n" +
				`line 6: health.flapWindow: must be a duration with a unit, such as "60s" or "1h30m"` + "\n" +
				`line 7: health.unknownGrace: must be a duration with a unit, such as "60s" or "1h30m"` + "\n" +
				`line 8: health.fabric: "up" is not one of: gate, report` + "\n" +
				`line 9: health.imex: "no" is not one of: report, gate`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(strings.Split(tt.want, "\n"), strings.Split(problems(t, tt.file, tt.args), "\n")); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// TestEntriesThatOverlap: of two entries for one device the one with more replicas counts, as in
// NVIDIA's device plugin, with a warning.
func TestEntriesThatOverlap(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, file, want string }{
		{
			name: "two rules for all devices", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: " +
				"nvidia.com/gpu, replicas: 3, devices: [1]}]}}",
			want: "line 1: sharing.timeSlicing.resources[1]: overlaps with sharing.timeSlicing.resources[0], which also " +
				"applies to nvidia.com/gpu; the larger number of replicas counts",
		},
		{
			name: "two rules for one device", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: " +
				"[0, 1]}, {name: gpu, replicas: 3, devices: ['1:0']}]}}",
			want: "line 1: sharing.timeSlicing.resources[1]: overlaps with sharing.timeSlicing.resources[0]: device 1:0 is " +
				"also device 1 there; the larger number of replicas counts",
		},
		{
			name: "a rule for all devices after one for some",
			file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1]}, {name: a, replicas: 2}, {name: " +
				"gpu, replicas: 3}]}}",
			want: "line 1: sharing.timeSlicing.resources[2]: overlaps with sharing.timeSlicing.resources[0], which also " +
				"applies to nvidia.com/gpu; the larger number of replicas counts",
		},
		{
			name: "a rule for a GPU after one for a MIG device on it",
			file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: ['1:0', " +
				"GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30]}, " +
				"{name: a, replicas: 2, devices: [1]}, {name: gpu, replicas: 3, devices: [11, '0:1', 1]}, {name: gpu, replicas: " +
				"3, devices: [GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30]}]}}",
			want: "line 1: sharing.timeSlicing.resources[2]: overlaps with sharing.timeSlicing.resources[0]: device 1 is also " +
				"device 1:0 there; the larger number of replicas counts\n" +
				"line 1: sharing.timeSlicing.resources[3]: overlaps with sharing.timeSlicing.resources[0]: device " +
				"GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30 is also device GPU-7ed1bb51-4d4c-4b11-8e51-4f5f4a8d0f30 there; the " +
				"larger number of replicas counts",
		},
		{name: "rules for other devices", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: " +
			"['1:0', '1:0', 2]}, {name: gpu, replicas: 3, devices: [0, '1:1', 11]}]}}"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, warnings(t, tt.file, "--compatibility=none")); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

// warnings returns the warnings of a file that is valid, one to a line.
func warnings(t *testing.T, file, args string) string {
	t.Helper()
	_, warnings, err := sources(t, "", args).Resolve("", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, w := range warnings {
		lines = append(lines, w.String())
	}
	return strings.Join(lines, "\n")
}

func TestMPSOverTimeSlicingIsAWarning(t *testing.T) {
	t.Parallel()
	file := "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, replicas: 5}]}}"
	_, warnings, err := sources(t, "", "--mps-root=/m").Resolve("", []byte(file))
	if err != nil || len(warnings) != 1 || warnings[0].Where != "sharing.timeSlicing" {
		t.Errorf("warnings %v, %v", warnings, err)
	}
}

func TestHealthRulesOfFileAndEnvironment(t *testing.T) {
	t.Parallel()
	file := `
health:
  xids: {ignore: [48, 74], suspect: [63], fatal: [31, 45]}
  recovery: manual
  fabric: report
  imex: gate
  energyEvidence: true
  reopen: always
  kernelLog: true
  interval: 10s
  validate: true
  suspectLimit: 1s
  unknownGrace: 2s
  flapLimit: 4
  flapWindow: 3h
`
	c, _, err := sources(t, "DP_ENABLE_HEALTHCHECKS=48 DP_DISABLE_HEALTHCHECKS=31", "").Resolve("", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	want := health.Default()
	want.FabricReported, want.IMEXGates, want.EnergyEvidence, want.ReopenAlways = true, true, true, true
	want.Manual, want.SuspectLimit, want.UnknownGrace, want.FlapLimit, want.FlapWindow = true, time.Second, 2*time.Second,
		4, 3*time.Hour
	want.Interval = 10 * time.Second
	want.Overrides = want.Overrides.With(48, health.RuleFatal).With(74, health.RuleIgnore).With(63, health.RuleSuspect).
		With(31, health.RuleIgnore).With(45, health.RuleFatal)
	if diff := cmp.Diff(want, c.Health); diff != "" {
		t.Errorf("policy (-want +got):\n%s", diff)
	}
	if !c.KernelLog || !c.Validate {
		t.Error("the kernel's log is not read, or CUDA not proven")
	}
	c, _, err = sources(t, "", "").Resolve("",
		[]byte("health: {recovery: auto, fabric: gate, imex: report, reopen: careful, energyEvidence: false, "+
			"kernelLog: false}"))
	if err != nil || c.Health.Manual || c.Health.FabricReported || c.Health.IMEXGates || c.Health.ReopenAlways ||
		c.Health.EnergyEvidence || c.KernelLog {
		t.Errorf("what holds anyway: %+v, %v", c.Health, err)
	}
}

// TestAllHealthChecksOff: with an XID that is enabled they are not all off.
func TestAllHealthChecksOff(t *testing.T) {
	t.Parallel()
	for env, off := range map[string]bool{
		"": false, "DP_DISABLE_HEALTHCHECKS=all": true, "DP_DISABLE_HEALTHCHECKS=xids": true,
		"DP_DISABLE_HEALTHCHECKS=48":                             false,
		"DP_DISABLE_HEALTHCHECKS=all DP_ENABLE_HEALTHCHECKS=79":  false,
		"DP_DISABLE_HEALTHCHECKS=all DP_ENABLE_HEALTHCHECKS=all": false,
	} {
		c, warnings, err := sources(t, env, "").Resolve("", []byte("health: {xids: {fatal: [31]}}"))
		if err != nil || c.Health.Overrides.Off() != off || len(warnings) > 0 != off {
			t.Errorf("%q: off %v, warnings %v, %v", env, c.Health.Overrides.Off(), warnings, err)
		}
	}
}
