package config_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestPartOfEachOption holds the table of options to the parts of Config: an option that a changed
// file cannot change is in Startup, and every other option is in Live.
func TestPartOfEachOption(t *testing.T) {
	t.Parallel()
	flags := map[string]string{}
	for _, flag := range append(changed, everything...) {
		name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "=")
		flags[name] = flag
	}
	early := func(arguments ...string) config.Config {
		set := pflag.NewFlagSet("test", pflag.ContinueOnError)
		config.AddFlags(set)
		if err := set.Parse(arguments); err != nil {
			t.Fatal(err)
		}
		return config.Sources{Flags: set}.Early()
	}
	before := early()
	for _, o := range config.Options() {
		if flags[o.Flag] == "" {
			t.Errorf("--%s: add a value other than the default to the list changed", o.Flag)
			continue
		}
		got, want := "", "Live"
		switch after := early(flags[o.Flag]); {
		case !reflect.DeepEqual(after.Startup, before.Startup):
			got = "Startup" // fields of Live can be made from this one
		case !reflect.DeepEqual(after.Live, before.Live):
			got = "Live"
		}
		if o.Restart || o.Key == "" {
			want = "Startup"
		}
		if part, special := specialParts[o.Flag]; special {
			want = part
		}
		if got != want {
			t.Errorf("--%s: the field is in %q, want %q: its key is %q, and a change of the key needs a restart: %v",
				o.Flag, got, want, o.Key, o.Restart)
		}
		if o.Restart && o.Key == "" {
			t.Errorf("--%s: a file cannot change the option, so restart is superfluous", o.Flag)
		}
	}
}

// specialParts are the parts of options without a field, and of options without a key that are in
// Live: in a group there, or the file itself, which a label of the node can choose.
var specialParts = map[string]string{
	"device-discovery-strategy": "", "cdi-feature-flags": "", "cdi-disable-hooks": "Live", "config-file": "Live",
}

// changed has values other than the default for options that everything leaves out.
var changed = []string{
	"--fail-on-init-error=false", "--driver-root=/a", "--dev-root=/a", "--driver-root-ctr-path=/a",
	"--device-list-strategy=cdi-cri", "--cdi-annotation-prefix=a/", "--mps-root-ctr-path=/a", "--kubelet-root=/a",
	"--kubelet-socket=/a", "--config-file=/a", "--cdi-feature-flags=a", "--pod-resources-socket=/a",
	"--control-socket=/a", "--state-dir=/a", "--cdi-dir=/a", "--gpu-metrics=false", "--gpu-metrics-interval=1m",
	"--gpu-metrics-hostname-label=none", "--void-visible-devices=false", "--health-interval=1m", "--namespace=a",
	"--node-config-label=a", "--node-labels-file=/a", "--machine-type-file=/a", "--mig-evict-timeout=1h",
	"--rollout-wave-soak=1h", "--dra-driver-name=a", "--dra-switch-mig", "--dra-share-by=count",
}
