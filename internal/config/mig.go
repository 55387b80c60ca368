package config

import (
	"fmt"
	"regexp"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// MIG decides how the GPUs of the node are divided in multi-instance mode, and what is allowed for
// a change.
type MIG struct {
	// Enabled is false if layouts are never changed.
	Enabled bool
	// Layout is the name of the node's layout; empty for none.
	Layout string
	// File is the configuration file of mig-parted with the layouts; empty for the built-in ones.
	File string
	// Label makes the label nvidia.com/mig.config of the node name the layout.
	Label bool
	// Replace allows destroying MIG devices that this program did not create.
	Replace bool
	// ResetInVM allows resetting GPUs for a change of their MIG mode in a virtual machine.
	ResetInVM bool
	// Evict evicts the pods that hold a GPU before its change.
	Evict bool
	// EvictTimeout is the time limit of evictions, 1 min to 24 h.
	EvictTimeout time.Duration
	// PauseClients also pauses DaemonSets whose pods have such a GPU open, by the labels
	// nvidia.com/gpu.deploy.NAME of the node. It is never set without Evict.
	PauseClients bool
	// Budget makes a change of the layout take a slot of the cluster.
	Budget bool
}

// NeedsAPIServer reports whether these settings need the API server.
func (m MIG) NeedsAPIServer() bool { return m.Enabled && (m.Label || m.Evict || m.Budget) }

// migOptions are the settings of layouts.
var migOptions = []option{
	{
		flag: "mig-enabled", common: true, env: []string{"MIG_ENABLED"}, key: "mig.enabled", fallback: "false",
		kind: kindBool,
		usage: "change how GPUs are divided in multi-instance mode (MIG); needs root, CAP_SYS_ADMIN and the MIG " +
			"config capability device",
		set: truth(func(c *Config) *bool { return &c.MIG.Enabled }),
	},
	{
		flag: "mig-layout", common: true, env: []string{"MIG_LAYOUT"}, key: "mig.layout",
		usage: "name of the MIG layout of the node, such as all-balanced; empty: GPUs stay unchanged",
		set:   text(func(c *Config) *string { return &c.MIG.Layout }),
	},
	{
		flag: "mig-config-file", env: []string{"MIG_CONFIG_FILE"}, key: "mig.configFile",
		usage: "path of a mig-parted configuration file with the layouts; default: the built-in layouts",
		set:   absolute(func(c *Config) *string { return &c.MIG.File }),
	},
	{
		flag: "mig-label", env: []string{"MIG_LABEL"}, key: "mig.label", fallback: "false", kind: kindBool,
		usage: "follow the label nvidia.com/mig.config of the node: its value is the name of the layout",
		set:   truth(func(c *Config) *bool { return &c.MIG.Label }),
	},
	{
		flag: "mig-replace", env: []string{"MIG_REPLACE"}, key: "mig.replace", fallback: "false", kind: kindBool,
		usage: "also destroy MIG devices that this program did not create",
		set:   truth(func(c *Config) *bool { return &c.MIG.Replace }),
	},
	{
		flag: "mig-reset-in-vm", env: []string{"MIG_RESET_IN_VM"}, key: "mig.resetInVM", fallback: "false",
		kind: kindBool,
		usage: "also change the MIG mode of GPUs that need a reset for it (A100, A30) in a virtual machine, where " +
			"the reset may fail",
		set: truth(func(c *Config) *bool { return &c.MIG.ResetInVM }),
	},
	{
		flag: "mig-disruption", env: []string{"MIG_DISRUPTION"}, key: "mig.disruption", fallback: "none",
		usage: "allowed disruption of pods on a GPU whose layout changes: none; evict: evict pods that hold the GPU, " +
			"within their disruption budgets; pause: also pause DaemonSets that have the GPU open, by " +
			"nvidia.com/gpu.deploy.NAME, which needs hostPID and CAP_SYS_PTRACE",
		set: setDisruption,
	},
	{
		flag: "mig-evict-timeout", env: []string{"MIG_EVICT_TIMEOUT"}, key: "mig.evictTimeout", fallback: "10m",
		usage: "time limit for evicting pods before the change is postponed, 1m to 24h",
		set:   setInterval(func(c *Config) *time.Duration { return &c.MIG.EvictTimeout }, time.Minute, 24*time.Hour),
	},
	{
		flag: "mig-budget", env: []string{"MIG_BUDGET"}, key: "mig.budget", fallback: "false", kind: kindBool,
		usage: "change the layout only with a slot of the cluster; see --rollout-slots",
		set:   truth(func(c *Config) *bool { return &c.MIG.Budget }),
	},
}

// setDisruption sets what is allowed to happen to pods for a change of the layout.
func setDisruption(c *Config, text string) error {
	switch text {
	case "none":
	case "evict":
		c.MIG.Evict = true
	case "pause":
		c.MIG.Evict, c.MIG.PauseClients = true, true
	default:
		return fmt.Errorf("%q is not one of: none, evict, pause", text)
	}
	return nil
}

// builtinLayout matches the names of built-in layouts. Which of them a node has depends on its
// GPUs.
var builtinLayout = regexp.MustCompile(`^all-(disabled|enabled|balanced|[0-9]g\.[0-9]+gb([.-][a-z.]+)?)$`)

// mig checks the settings of layouts.
func (d *document) mig(c *Config, s Sources) {
	m := c.MIG
	if !d.reads("mig-enabled", "mig-layout", "mig-config-file", "mig-budget", "rollout-slots") {
		return
	}
	if !m.Enabled {
		if m.Layout != "" || m.Label {
			d.warn("mig", d.line("mig"), "layouts are not changed; also set mig.enabled")
		}
		return
	}
	if m.File == "" && m.Layout != "" && !builtinLayout.MatchString(m.Layout) {
		d.refuse("mig.layout", fmt.Sprintf("%q is not a built-in layout: use all-disabled, all-enabled, "+
			"all-balanced or all-PROFILE, such as all-1g.10gb, or give mig.configFile, which has others", m.Layout))
	}
	if m.Budget && c.Rollout.Slots == 0 {
		d.refuse("mig.budget", "the cluster has no slots, so no layout could change: set rollout.slots")
	}
	if m.Budget && c.Rollout.WaveLabel != "" && !m.Label {
		d.refuse("rollout.waveLabel", "other nodes see whether a node has its layout by the label "+
			"nvidia.com/mig.config.state only: set mig.label, and choose the layout by the label nvidia.com/mig.config")
	}
	if m.PauseClients && s.OwnPIDNamespace && c.Simulate == "" {
		d.warn("mig.disruption", d.line("mig.disruption"),
			"nothing can be paused here: the kernel does not show the processes of other "+
				"containers; set hostPID: true in the daemon's pod")
	}
	if c.Resource.MIG == resource.MIGNone && m.Layout != "" && m.Layout != "all-disabled" {
		d.warn("mig.layout", d.line("mig.layout"),
			"MIG devices are not offered with the MIG strategy none; use single or mixed")
	}
}
