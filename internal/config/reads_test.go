package config_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestFlagsOfACommand: of the daemon's other flags and their variables, which a command
// can be given, none has an effect, not even where the daemon refuses the value. What the file says
// is judged as far as it does not depend on them.
func TestFlagsOfACommand(t *testing.T) {
	t.Parallel()
	read := []string{"simulate", "driver-root"}
	isRead := map[string]bool{}
	for _, name := range read {
		isRead[name] = true
	}
	resolve := func(others bool) (config.Config, *pflag.FlagSet) {
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		config.AddFlags(flags, read...)
		args, variables := []string{"--simulate=t4"}, map[string]string{"NVIDIA_DRIVER_ROOT": "/run/driver"}
		for _, o := range config.Options() {
			if others && !isRead[o.Flag] {
				for _, name := range append([]string{o.Flag}, o.Aliases...) {
					args = append(args, "--"+name+"=\x00")
				}
				for _, name := range o.Env {
					variables[name] = "\x00"
				}
			}
		}
		if err := flags.Parse(args); err != nil {
			t.Fatal(err)
		}
		s := config.Sources{Flags: flags, Env: func(name string) (string, bool) {
			text, given := variables[name]
			return text, given
		}}
		file := "{sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}, mig: {enabled: true, layout: mine}, " +
			"dra: {mode: split}}"
		c, warnings, err := s.Resolve("", []byte(file))
		if err != nil || len(warnings) > 0 {
			t.Fatal(err, warnings)
		}
		return c, flags
	}
	want, flags := resolve(false)
	if got, _ := resolve(true); !reflect.DeepEqual(got, want) {
		t.Errorf("with flags that the command does not read: %+v, want %+v", got, want)
	}
	if want.Simulate != "t4" || want.Driver.Root != "/run/driver" {
		t.Errorf("what it reads: %q, %q", want.Simulate, want.Driver.Root)
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden == isRead[f.Name] {
			t.Errorf("--%s is hidden: %v", f.Name, f.Hidden)
		}
	})
	if usage := flags.FlagUsages(); strings.Count(usage, "--") != len(read) {
		t.Errorf("the help shows:\n%s", usage)
	}
}
