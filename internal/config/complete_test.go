package config_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestEveryKeyIsAnOption keeps a new key of the schema from being forgotten: each key of these
// blocks has an option, and each option has a key that is there.
func TestEveryKeyIsAnOption(t *testing.T) {
	t.Parallel()
	var known []string
	for key := range keysOf(reflect.TypeFor[v1.Config](), "") {
		block, _, _ := strings.Cut(key, ".")
		if slices.Contains([]string{"flags", "imex", "features", "mig", "rollout", "driver"}, block) {
			known = append(known, key)
		}
	}
	// the others have no flag
	known = append(known, "health.kernelLog", "health.interval", "health.rebootFile", "health.repair", "health.validate", "dra.mode",
		"dra.driverName", "dra.dynamicMIG", "dra.switchMIG", "dra.shares", "dra.shareBy", "dra.claimStatus", "dra.metadata")
	var claimed []string
	for _, o := range config.Options() {
		if o.Key != "" {
			claimed = append(claimed, o.Key)
		}
	}
	for _, key := range known {
		// keys of GPU feature discovery have no effect here
		if gfd := strings.HasPrefix(key, "flags.gfd.") || key == "flags.useNodeFeatureAPI"; gfd == slices.Contains(claimed,
			key) {
			t.Errorf("key %s: is for feature discovery: %v, and has an option: %v", key, gfd, !gfd)
		}
	}
	for _, key := range claimed {
		if !slices.Contains(known, key) {
			t.Errorf("option for the key %s, which the schema does not have", key)
		}
	}
}

// TestEveryDurationHasAUnitAndBounds: a number without a unit is not taken for nanoseconds, and no
// length of time of the daemon is negative or so long that it never ends. That of feature discovery
// has the bounds of NVIDIA's program.
func TestEveryDurationHasAUnitAndBounds(t *testing.T) {
	t.Parallel()
	found := 0
	for path, kind := range keysOf(reflect.TypeFor[v1.Config](), "") {
		discovery := kind == reflect.TypeFor[v1.Interval]()
		if kind != reflect.TypeFor[v1.Duration]() && !discovery {
			continue
		}
		found++
		for _, value := range []string{"10", "-1m", "100000h"} {
			if discovery && value != "10" {
				continue
			}
			keys := strings.Split(path, ".")
			_, _, err := config.Sources{}.Resolve("", []byte(strings.Join(keys, ": {")+": "+value+strings.Repeat("}",
				len(keys)-1)))
			var invalid *config.Invalid
			if !errors.As(err, &invalid) || len(invalid.Problems) != 1 || !strings.Contains(invalid.Error(), path) {
				t.Errorf("%s: %s: %v, want that it is refused", path, value, err)
			}
		}
	}
	if found == 0 {
		t.Error("the schema has no lengths of time")
	}
}

// TestNamesAreUnique keeps two options from sharing a flag, a variable or a key.
func TestNamesAreUnique(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, o := range config.Options() {
		names := append([]string{"--" + o.Flag}, o.Env...)
		for _, alias := range o.Aliases {
			names = append(names, "--"+alias)
		}
		if o.Key != "" {
			names = append(names, o.Key)
		}
		for _, name := range names {
			if seen[name] {
				t.Errorf("%s belongs to two options", name)
			}
			seen[name] = true
		}
		if len(o.Env) == 0 || o.Usage == "" {
			t.Errorf("--%s has no environment variable or no usage", o.Flag)
		}
	}
}

// TestEveryFieldOfConfigIsSet keeps a new field of Config from being without a way to set it: a
// configuration that says something of everything leaves no field zero.
func TestEveryFieldOfConfigIsSet(t *testing.T) {
	t.Parallel()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse(everything); err != nil {
		t.Fatal(err)
	}
	c, _, err := config.Sources{Flags: flags}.Resolve("a.yaml", []byte(everyBlock))
	if err != nil {
		t.Fatal(err)
	}
	c.Discovery = config.Discovery{On: true, Oneshot: true, Sleep: 1, API: config.APIOn} // of another program
	c.Resource.MIGParents = true                                                         // where resources has no effect
	c.Resource.NotOffered = map[string]string{}                                          // of those who make plans
	c.DRA.GPUs.Exclude, c.DRA.GPUs.Rename, c.DRA.GPUs.Replicas = true, "a", 1            // it only selects
	c.DRA.GPUs.Units = true
	c.Resource.Units.Driver = true // excludes MPS
	c.DRA.SwitchMIG = true         // excludes shares
	for _, path := range zeros(reflect.ValueOf(c), "Config") {
		t.Errorf("%s is not set by anything", path)
	}
}

var everything = []string{
	"--device-discovery-strategy=nvml", "--simulate=dgx-h100", "--mps-root=/mps", "--mig-strategy=single",
	"--record=/recordings", "--record-redact",
	"--shared-devices-allocation-policy=packed", "--device-id-strategy=index", "--pass-device-specs", "--gds-enabled",
	"--gdrcopy-enabled", "--mofed-enabled", "--imex-channel-ids=0", "--imex-required",
	"--nvidia-cdi-hook-path=/hook", "--cdi-disable-hooks=all", "--library-search-path=/opt/lib",
	"--pre-start-checks=reset-clocks",
	"--kernel-log", "--metrics-address=:9400", "--gpu-metrics-pcie-throughput", "--gpu-metrics-pod-uid", "--node-name=n", "--logging-format=json",
	"--compatibility=none", "--kubeconfig=/kubeconfig", "--node-config-dir=/configs", "--node-config-default=a",
	"--node-config-fallbacks=named",
	"--node-labels=file", "--node-labels-timestamp", "--pod-name=p", "--node-events=pods", "--node-condition",
	"--node-condition-types=A=problem", "--health-events=unix:///a/b", "--health-events-strategy=executeRemediation",
	"--health-events-machine=vm",
	"--node-taint", "--node-quiesce", "--node-change-taint", "--node-startup-taint",
	"--mig-enabled", "--mig-layout=a", "--mig-config-file=/layouts", "--mig-label", "--mig-replace", "--mig-reset-in-vm",
	"--mig-disruption=pause", "--mig-budget", "--rollout-slots=1", "--rollout-namespace=a", "--rollout-wave-label=a",
	"--rollout-topology-label=a", "--rollout-windows=22:00-04:00",
	"--driver-at-least=580", "--driver-below=600", "--validate", "--reboot-file=/reboot", "--repair=idle", "--dra-mode=split",
	"--driver-version=580.95.05", "--driver-pods=evict", "--driver-source=https://drivers.example.com/580.tar.gz",
	"--driver-sha256=0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a",
	"--dra-dynamic-mig", "--dra-shares=4", "--dra-claim-status",
	"--dra-metadata",
}

const everyBlock = `
resources: {gpus: [{pattern: a, name: a}], mig: [{pattern: a, name: b}]}
selectors: [{indices: [0], exclude: true}, {indices: [1], units: true}]
units: {fit: sum, fill: emptiest}
dra: {gpus: {indices: [0], pci: ["0000:00:00.0"], models: [a]}}
sharing: {timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2}]}}
health: {recovery: manual, fabric: report, imex: gate, reopen: always, energyEvidence: true, xids: {ignore: [1]}}
`

// zeros returns the paths of exported fields that are zero.
func zeros(v reflect.Value, path string) []string {
	if v.Kind() != reflect.Struct || v.NumField() > 0 && !v.Type().Field(0).IsExported() {
		if v.IsZero() {
			return []string{path}
		}
		return nil
	}
	var all []string
	for i := range v.NumField() {
		all = append(all, zeros(v.Field(i), path+"."+v.Type().Field(i).Name)...)
	}
	return all
}
