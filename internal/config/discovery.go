package config

import (
	"fmt"
	"slices"
	"time"

	"github.com/spf13/pflag"
)

// Discovery is the configuration of the program gpu-feature-discovery.
type Discovery struct {
	// On reports whether the Config is for that program.
	On bool
	// Oneshot writes the labels once.
	Oneshot bool
	// Sleep is the time between two writes of unchanged labels; 0 for never.
	Sleep time.Duration
	// API decides whether labels go into a NodeFeature object instead of a file.
	API NodeFeatureAPI
}

// NodeFeatureAPI decides whether labels go into a NodeFeature object of node-feature-discovery.
type NodeFeatureAPI int

// The values.
const (
	APIDefault NodeFeatureAPI = iota // true in a program that talks to the API server
	APIOff
	APIOn
)

// DefaultDiscoveryFile is the default output of gpu-feature-discovery.
const DefaultDiscoveryFile = "/etc/kubernetes/node-feature-discovery/features.d/gfd"

// discoveryOptions are all settings of gpu-feature-discovery: settings shared with the
// daemon, and settings of its own.
var discoveryOptions = append(shared(
	"mig-strategy", "fail-on-init-error", "config-file", "device-discovery-strategy", "driver-root-ctr-path",
	"library-search-path",
	"logging-format", "simulate",
	"kubeconfig", "node-name", "namespace", "pod-name", "compatibility",
), []option{
	{
		flag: "oneshot", common: true, env: []string{"GFD_ONESHOT"}, key: "flags.gfd.oneshot", fallback: "false",
		kind:  kindBool,
		usage: "write the labels once and exit", set: truth(func(c *Config) *bool { return &c.Discovery.Oneshot }),
	},
	{
		flag: "no-timestamp", env: []string{"GFD_NO_TIMESTAMP"}, key: "flags.gfd.noTimestamp", fallback: "false",
		kind:  kindBool,
		usage: "omit the label nvidia.com/gfd.timestamp",
		set: func(c *Config, text string) error {
			err := truth(func(c *Config) *bool { return &c.Features.LabelsTimestamp })(c, text)
			c.Features.LabelsTimestamp = !c.Features.LabelsTimestamp
			return err
		},
	},
	{
		flag: "sleep-interval", common: true, env: []string{"GFD_SLEEP_INTERVAL"}, key: "flags.gfd.sleepInterval",
		fallback: "60s",
		usage:    "time after which unchanged labels are written again, at least 1s, or infinite", set: setSleep,
	},
	{
		flag: "output-file", common: true,
		aliases: []string{"output"}, short: "o", env: []string{"GFD_OUTPUT_FILE"}, key: "flags.gfd.outputFile",
		fallback: DefaultDiscoveryFile, empty: true,
		usage: "feature file of node-feature-discovery; empty: standard output",
		set:   text(func(c *Config) *string { return &c.Features.LabelsFile }),
	},
	{
		flag: "machine-type-file", env: []string{"GFD_MACHINE_TYPE_FILE"}, key: "flags.gfd.machineTypeFile",
		fallback: DefaultMachineTypeFile, empty: true, usage: "file with the name of the machine; empty: unknown",
		set: text(func(c *Config) *string { return &c.Features.MachineTypeFile }),
	},
	{
		flag: "use-node-feature-api", common: true,
		env: []string{"GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"}, key: "flags.useNodeFeatureAPI",
		kind: kindBool, usage: "write a NodeFeature object instead of a file; default: true in gpu-node-agent, false " +
			"elsewhere",
		set: func(c *Config, text string) error {
			var on bool
			err := truth(func(*Config) *bool { return &on })(c, text)
			c.Discovery.API = map[bool]NodeFeatureAPI{false: APIOff, true: APIOn}[on]
			return err
		},
	},
	ignored("kube-api-qps", "KUBE_API_QPS"), ignored("kube-api-burst", "KUBE_API_BURST"),
}...)

// shared returns the daemon's options with these names.
func shared(names ...string) []option {
	return slices.DeleteFunc(slices.Clone(options), func(o option) bool { return !slices.Contains(names, o.flag) })
}

// ignored returns an option without effect.
func ignored(flag, env string) option {
	return option{
		flag: flag, env: []string{env}, usage: "accepted, no effect: 5 requests in a second, 10 at once",
		set: func(*Config, string) error { return nil },
	}
}

func setSleep(c *Config, text string) error {
	if text == "infinite" {
		c.Discovery.Sleep = 0
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf(`%q is not infinite or a duration, such as "60s"`, text)
	}
	c.Discovery.Sleep = max(d, time.Second)
	return nil
}

// AddDiscoveryFlags declares all flags of gpu-feature-discovery.
func AddDiscoveryFlags(flags *pflag.FlagSet) { addFlags(flags, discoveryOptions, nil) }

// DiscoveryEnv looks up variables like env, but first with the prefix GFD_.
func DiscoveryEnv(env func(string) (string, bool)) func(string) (string, bool) {
	return func(name string) (string, bool) {
		if text, given := env("GFD_" + name); given {
			return text, given
		}
		return env(name)
	}
}

// options returns the settings of the program.
func (s Sources) options() []option {
	if s.Discovery {
		return discoveryOptions
	}
	return options
}

// discovery completes the configuration of gpu-feature-discovery, which only writes labels.
func (c *Config) discovery(s Sources) {
	c.Discovery.On = true
	c.Features.Labels = LabelsFile
	if c.Discovery.API == APIOn || c.Discovery.API == APIDefault && s.Program == NodeAgent {
		c.Features.Labels = LabelsNodeFeature
	}
}
