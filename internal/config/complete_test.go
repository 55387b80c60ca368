package config

import (
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
)

// leaves returns the key paths of a block of the schema that hold no further block.
func leaves(block reflect.Type, path string) []string {
	var all []string
	for i := range block.NumField() {
		field := block.Field(i)
		kind := field.Type
		if kind.Kind() == reflect.Pointer {
			kind = kind.Elem()
		}
		if kind.Kind() == reflect.Struct {
			all = append(all, leaves(kind, join(path, tag(field)))...)
			continue
		}
		all = append(all, join(path, tag(field)))
	}
	return all
}

// TestEveryKeyOfFlagsIsAnOption keeps a new key of the schema from being forgotten.
func TestEveryKeyOfFlagsIsAnOption(t *testing.T) {
	t.Parallel()
	known := slices.Concat(leaves(reflect.TypeFor[v1.Flags](), "flags"), leaves(reflect.TypeFor[v1.IMEX](), "imex"),
		leaves(reflect.TypeFor[v1.Features](), "features"), leaves(reflect.TypeFor[v1.MIG](), "mig"),
		[]string{"health.kernelLog", "dra.mode", "dra.registryDir", "dra.pluginsDir", "dra.dynamicMIG", "dra.shares"}) // the rest of the blocks is in the file alone
	var claimed []string
	for _, o := range options {
		if o.key != "" {
			claimed = append(claimed, o.key)
		}
	}
	for _, key := range known {
		// keys of GPU feature discovery have no effect here
		if gfd := strings.HasPrefix(key, "flags.gfd.") || key == "flags.useNodeFeatureAPI"; gfd == slices.Contains(claimed, key) {
			t.Errorf("key %s: is for feature discovery: %v, and has an option: %v", key, gfd, !gfd)
		}
	}
	for _, key := range claimed {
		if !slices.Contains(known, key) {
			t.Errorf("option for the key %s, which the schema does not have", key)
		}
	}
}

// TestEveryDurationHasAUnitAndBounds: a number without a unit is not taken for nanoseconds, and no length of time of the daemon is negative
// or so long that it never ends. That of feature discovery has the bounds of NVIDIA's program.
func TestEveryDurationHasAUnitAndBounds(t *testing.T) {
	t.Parallel()
	for path, discovery := range durations(reflect.TypeFor[v1.Config](), "") {
		for _, value := range []string{"10", "-1m", "100000h"} {
			if discovery && value != "10" {
				continue
			}
			keys := strings.Split(path, ".")
			_, _, err := Sources{}.Resolve("", []byte(strings.Join(keys, ": {")+": "+value+strings.Repeat("}", len(keys)-1)))
			var invalid *Invalid
			if !errors.As(err, &invalid) || len(invalid.Problems) != 1 || !strings.Contains(invalid.Error(), path) {
				t.Errorf("%s: %s: %v, want that it is refused", path, value, err)
			}
		}
	}
}

// durations returns the key paths of a block of the schema that take a length of time, and whether they are of feature discovery.
func durations(block reflect.Type, path string) map[string]bool {
	all := map[string]bool{}
	for i := range block.NumField() {
		field := block.Field(i)
		kind := field.Type
		if kind.Kind() == reflect.Pointer {
			kind = kind.Elem()
		}
		at := tag(field)
		if path != "" {
			at = join(path, at)
		}
		switch {
		case kind == reflect.TypeFor[v1.Duration](), kind == reflect.TypeFor[v1.Interval]():
			all[at] = kind == reflect.TypeFor[v1.Interval]()
		case kind.Kind() == reflect.Struct:
			maps.Copy(all, durations(kind, at))
		}
	}
	return all
}

// TestNamesAreUnique keeps two options from sharing a flag, a variable or a key.
func TestNamesAreUnique(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, o := range options {
		names := slices.Concat([]string{"--" + o.flag}, o.env)
		for _, alias := range o.aliases {
			names = append(names, "--"+alias)
		}
		if o.key != "" {
			names = append(names, o.key)
		}
		for _, name := range names {
			if seen[name] {
				t.Errorf("%s belongs to two options", name)
			}
			seen[name] = true
		}
		if len(o.env) == 0 || o.usage == "" {
			t.Errorf("--%s has no environment variable or no usage", o.flag)
		}
	}
}

// TestEveryFieldOfConfigIsSet keeps a new field of Config from being without a way to set it: a configuration that says
// something of everything leaves no field zero.
func TestEveryFieldOfConfigIsSet(t *testing.T) {
	t.Parallel()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(flags)
	if err := flags.Parse(everything); err != nil {
		t.Fatal(err)
	}
	c, _, err := Sources{Flags: flags}.Resolve("a.yaml", []byte(everyBlock))
	if err != nil {
		t.Fatal(err)
	}
	c.Discovery = Discovery{true, true, 1, APIOn}                             // of another program
	c.Resource.MIGParents = true                                              // where resources has no effect
	c.Resource.Elsewhere = map[string]string{}                                // of those who make plans
	c.DRA.GPUs.Exclude, c.DRA.GPUs.Rename, c.DRA.GPUs.Replicas = true, "a", 1 // it only selects
	for _, path := range zeros(reflect.ValueOf(c), "Config") {
		t.Errorf("%s is not set by anything", path)
	}
}

var everything = []string{
	"--device-discovery-strategy=nvml", "--simulate=dgx-h100", "--mps-root=/mps", "--mig-strategy=single",
	"--shared-devices-allocation-policy=packed", "--device-id-strategy=index", "--pass-device-specs", "--gds-enabled",
	"--gdrcopy-enabled", "--mofed-enabled", "--imex-channel-ids=0", "--imex-required",
	"--nvidia-cdi-hook-path=/hook", "--cdi-disable-hooks=all", "--pre-start-checks=clean", "--pre-start-reset=clocks",
	"--kernel-log", "--metrics-address=:9400", "--gpu-metrics-pcie-throughput", "--node-name=n", "--logging-format=json",
	"--compatibility=none", "--kubeconfig=/kubeconfig", "--node-config-dir=/configs", "--node-config-default=a", "--node-config-fallbacks=named",
	"--node-labels=file", "--node-labels-timestamp", "--pod-name=p", "--node-events", "--pod-events", "--node-condition", "--node-taint",
	"--mig-enabled", "--mig-layout=a", "--mig-config-file=/layouts", "--mig-label", "--mig-replace", "--mig-evict", "--mig-pause-clients",
	"--dra-mode=split", "--dra-dynamic-mig", "--dra-shares=4",
}

const everyBlock = `
resources: {gpus: [{pattern: a, name: a}], mig: [{pattern: a, name: b}]}
selectors: [{indices: [0], exclude: true}]
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
