package config

import (
	"strings"

	"github.com/spf13/pflag"
)

// A Removed option is one that an earlier version of this program had. It is refused, because its author relies on its effect.
type Removed struct {
	// Flag, Env and Key are how it was given.
	Flag, Env, Key string
	truth          bool // the flag needed no value
	// Text says what to use instead.
	Text string
}

// RemovedOptions returns the options that are refused.
func RemovedOptions() []Removed { return removed }

const (
	sameCondition = "was removed: the type of the condition is GPUHealthy, and it is written again after an hour without a change; " +
		"use --node-condition, NODE_CONDITION or features.condition alone"
	oneRoot = "was removed: use --kubelet-root, KUBELET_ROOT or flags.kubeletRoot, the root directory of kubelet with plugins_registry and " +
		"plugins in it"
)

var removed = []Removed{
	{
		"wait-for-release", "WAIT_FOR_RELEASE", "flags.plugin.waitForRelease", true,
		"was removed without a replacement: a GPU that a pod holds is never offered in another form",
	},
	{
		"pre-start-reset", "PRE_START_RESET", "flags.plugin.preStartReset", false,
		"was removed: use --pre-start-checks=reset-clocks,reset-ecc, PRE_START_CHECKS=reset-clocks,reset-ecc or " +
			"flags.plugin.preStartChecks: [reset-clocks, reset-ecc]",
	},
	{"pod-events", "POD_EVENTS", "features.podEvents", true, "was removed: use --node-events=pods, NODE_EVENTS=pods or features.events: pods"},
	{"node-condition-type", "NODE_CONDITION_TYPE", "features.conditionType", false, sameCondition},
	{"node-condition-interval", "NODE_CONDITION_INTERVAL", "features.conditionInterval", false, sameCondition},
	{"mig-evict", "MIG_EVICT", "mig.evict", true, "was removed: use --mig-disruption=evict, MIG_DISRUPTION=evict or mig.disruption: evict"},
	{
		"mig-pause-clients", "MIG_PAUSE_CLIENTS", "mig.pauseClients", true,
		"was removed: use --mig-disruption=pause, MIG_DISRUPTION=pause or mig.disruption: pause, which also evicts pods",
	},
	{"dra-registry-dir", "DRA_REGISTRY_DIR", "dra.registryDir", false, oneRoot},
	{"dra-plugins-dir", "DRA_PLUGINS_DIR", "dra.pluginsDir", false, oneRoot},
}

// addRemoved declares the flags of removed options, which no help shows, so that they can be told from what was never a flag.
func addRemoved(flags *pflag.FlagSet) {
	for _, r := range removed {
		f := flags.VarPF(&flagValue{}, r.Flag, "", "removed")
		if f.Hidden = true; r.truth {
			f.NoOptDefVal = "true"
		}
	}
}

// removedOptions refuses the removed options that flags and environment give. Decoding refuses those of the file.
func (d *document) removedOptions(s Sources) {
	for _, r := range removed {
		if s.Flags != nil && s.Flags.Changed(r.Flag) {
			d.problem("--"+r.Flag, 0, r.Text)
		}
		if s.Env == nil {
			continue
		}
		if _, given := s.Env(r.Env); given {
			d.problem(r.Env, 0, r.Text)
		}
	}
}

// removedKey returns what to say of a key that was removed; empty if there never was such a key.
func removedKey(path string) string {
	for _, r := range removed {
		if strings.EqualFold(r.Key, path) {
			return r.Text
		}
	}
	return ""
}
