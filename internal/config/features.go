package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// Features chooses the labels, Events, conditions and taints that the node writes to the cluster.
type Features struct {
	// Labels is how labels that describe the GPUs reach the node.
	Labels LabelsOutput
	// LabelsFile is the file for node-feature-discovery.
	LabelsFile string
	// LabelsTimestamp adds the label with the time of the last change of the configuration.
	LabelsTimestamp bool
	// MachineTypeFile is the file with the name of the machine; empty for none.
	MachineTypeFile string
	// Events writes Events of the node about its GPUs.
	Events bool
	// PodEvents also writes Events for the pods that hold a GPU.
	PodEvents bool
	// Condition writes the health of the GPUs as a condition of the node.
	Condition bool
	// ConditionTypes are further types of the condition; they need Condition.
	ConditionTypes []ConditionType
	// Taint taints the node while none of its GPUs is healthy.
	Taint bool
	// ChangeTaint taints the node before a change of the configuration takes devices away.
	ChangeTaint bool
	// StartupTaint removes the start-up taint of the node when its GPUs are allocatable.
	StartupTaint bool
	// HealthEvents is the address of NVSentinel's platform connector, "unix:///PATH"; empty if no
	// health events are sent.
	HealthEvents string
	// HealthEventsStrategy says whether NVSentinel may act on the events.
	HealthEventsStrategy EventsStrategy
	// HealthEventsMachine is the kind of machine for which the events recommend a repair.
	HealthEventsMachine Machine
	// Quiesce releases the driver at an annotation or a label of the node.
	Quiesce bool
}

// NeedAPIServer reports whether an enabled feature needs the API server.
func (f Features) NeedAPIServer() bool {
	return f.Labels == LabelsNodeFeature || f.Labels == LabelsNode || f.Events || f.Condition || f.Taint ||
		f.ChangeTaint || f.StartupTaint || f.Quiesce
}

// LabelsOutput is how labels about the GPUs reach the node.
type LabelsOutput int

// The outputs, one at a time.
const (
	LabelsOff         LabelsOutput = iota
	LabelsFile                     // a file for node-feature-discovery
	LabelsNodeFeature              // an object for node-feature-discovery
	LabelsNode                     // on the node itself
)

func (l LabelsOutput) String() string {
	switch l {
	case LabelsOff:
		return "off"
	case LabelsFile:
		return "file"
	case LabelsNodeFeature:
		return "nodeFeature"
	case LabelsNode:
		return "node"
	}
	return fmt.Sprintf("LabelsOutput(%d)", int(l))
}

// UnixScheme begins the address of a Unix socket.
const UnixScheme = "unix://"

// EventsStrategy is what NVSentinel may do with a health event.
type EventsStrategy int

// The strategies.
const (
	StoreOnly          EventsStrategy = iota // store the event
	ExecuteRemediation                       // also cordon, drain and repair the node by its rules
)

func (s EventsStrategy) String() string {
	switch s {
	case StoreOnly:
		return "storeOnly"
	case ExecuteRemediation:
		return "executeRemediation"
	}
	return fmt.Sprintf("EventsStrategy(%d)", int(s))
}

// Machine is the kind of a machine.
type Machine int

// The kinds.
const (
	BareMetal Machine = iota
	VM
)

func (m Machine) String() string {
	switch m {
	case BareMetal:
		return "bareMetal"
	case VM:
		return "vm"
	}
	return fmt.Sprintf("Machine(%d)", int(m))
}

// setHealthEvents sets the receiver of health events.
func setHealthEvents(c *Config, text string) error {
	path, ok := strings.CutPrefix(text, UnixScheme)
	switch {
	case text == "":
	case !ok || !filepath.IsAbs(path) || strings.HasSuffix(path, "/"):
		return fmt.Errorf("%q is not the address of a Unix socket, such as unix:///var/run/nvsentinel/nvsentinel.sock",
			text)
	case len(path) > statefile.MaxSocketPath:
		return fmt.Errorf("the path of the socket has %d bytes; the kernel allows %d", len(path),
			statefile.MaxSocketPath)
	}
	c.Features.HealthEvents = text
	return nil
}

// A ConditionType is a further type of the condition, for a program that acts on this type.
type ConditionType struct {
	// Name is the type of the condition, such as "AcceleratedHardwareReady".
	Name string
	// Problem is true for a condition whose status True means a problem.
	Problem bool
}

// GPUHealthy is the type of the condition that every node with Features.Condition gets.
const GPUHealthy = "GPUHealthy"

// maxConditionTypes limits the writes of a node for one change.
const maxConditionTypes = 8

// kubeletConditions are the types that the kubelet or the node controller writes.
var kubeletConditions = []string{"Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"}

// conditionName is the form of the type of a condition.
var conditionName = regexp.MustCompile(`^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)

// setConditionTypes sets the further types of the condition.
func setConditionTypes(c *Config, text string) error {
	for _, item := range splitList(text) {
		name, meaning, marked := strings.Cut(item, "=")
		switch {
		case marked && meaning != "problem":
			return fmt.Errorf("%q: write TYPE, or TYPE=problem if True means a problem", item)
		case !conditionName.MatchString(name):
			return fmt.Errorf("%q is not a type of a condition", name)
		case slices.Contains(kubeletConditions, name):
			return fmt.Errorf("%s belongs to the kubelet; a second writer would change the node's own state", name)
		case name == GPUHealthy:
			return errors.New("GPUHealthy is always written; name further types only")
		case slices.ContainsFunc(c.Features.ConditionTypes, func(t ConditionType) bool { return t.Name == name }):
			return fmt.Errorf("%s is there twice", name)
		case len(c.Features.ConditionTypes) == maxConditionTypes:
			return fmt.Errorf("more than %d types", maxConditionTypes)
		}
		c.Features.ConditionTypes = append(c.Features.ConditionTypes, ConditionType{Name: name, Problem: marked})
	}
	return nil
}

// NodeConfig is how a label of the node chooses the configuration file.
type NodeConfig struct {
	// Dir is the directory with the files; empty if the label chooses none.
	Dir string
	// Label is the name of the label; its value is the name of a file.
	Label string
	// Default is the name of the file for a node without the label; empty for the Fallbacks.
	Default string
	// Fallbacks are tried in order for a node without the label.
	Fallbacks []Fallback
}

// A Fallback is a way to choose the configuration of a node without the label.
type Fallback string

// The fallbacks.
const (
	FallbackNamed  Fallback = "named"  // the file named "default"
	FallbackSingle Fallback = "single" // the only file
	FallbackEmpty  Fallback = "empty"  // no file
)

// DefaultMachineTypeFile has the firmware's name of the machine.
const DefaultMachineTypeFile = "/sys/class/dmi/id/product_name"

// clusterOptions are the settings of the node's reports to the cluster and of its reads.
var clusterOptions = []option{
	{
		flag: "kubeconfig", env: []string{"KUBECONFIG"},
		usage: "file with the address and the credentials of the API server; default: those " +
			"of the pod's service account",
		set: text(func(c *Config) *string { return &c.Kubeconfig }),
	},
	{
		flag: "node-config-dir", env: []string{"CONFIG_FILE_SRCDIR"},
		usage: "directory of configuration files, from which a label of the node chooses one; not together with " +
			"--config-file; empty: no choice",
		set: absolute(func(c *Config) *string { return &c.NodeConfig.Dir }),
	},
	{
		flag: "node-config-label", env: []string{"NODE_LABEL"}, fallback: "nvidia.com/device-plugin.config",
		usage: "label of the node with the name of the file in --node-config-dir",
		set:   text(func(c *Config) *string { return &c.NodeConfig.Label }),
	},
	{
		flag: "node-config-default", env: []string{"DEFAULT_CONFIG"},
		usage: "name of the file in --node-config-dir for a node without the label",
		set:   text(func(c *Config) *string { return &c.NodeConfig.Default }),
	},
	{
		flag: "node-config-fallbacks", env: []string{"FALLBACK_STRATEGIES"}, kind: kindList,
		usage: "fallbacks for a node without the label and without --node-config-default, the first possible one: " +
			"named (the file \"default\"), single (the only file), empty (no file)",
		set: setFallbacks,
	},
	{
		flag: "node-labels", common: true, env: []string{"NODE_LABELS"}, key: "features.labels", fallback: "off",
		usage: "labels of the node that describe its GPUs: off; file, for node-feature-discovery; nodeFeature, an " +
			"object for node-feature-discovery; node, on the node itself",
		set: choice(func(c *Config) *LabelsOutput { return &c.Features.Labels }, LabelsOff, LabelsFile,
			LabelsNodeFeature, LabelsNode),
	},
	{
		flag: "node-labels-file", env: []string{"NODE_LABELS_FILE"}, key: "features.labelsFile",
		fallback: "/etc/kubernetes/node-feature-discovery/features.d/gpu-device-plugin",
		usage:    "file of --node-labels=file",
		set:      absolute(func(c *Config) *string { return &c.Features.LabelsFile }),
	},
	{
		flag: "node-labels-timestamp", env: []string{"NODE_LABELS_TIMESTAMP"}, key: "features.labelsTimestamp",
		fallback: "false", kind: kindBool,
		usage: "add the label nvidia.com/gfd.timestamp; it changes with each start and each configuration",
		set:   truth(func(c *Config) *bool { return &c.Features.LabelsTimestamp }),
	},
	{
		flag: "machine-type-file", env: []string{"MACHINE_TYPE_FILE"}, key: "features.machineTypeFile",
		fallback: DefaultMachineTypeFile, empty: true,
		usage: "file with the name of the machine, for the label nvidia.com/gpu.machine; empty: the label is unknown",
		set:   absolute(func(c *Config) *string { return &c.Features.MachineTypeFile }),
	},
	{
		flag: "namespace", env: []string{"NAMESPACE"}, fallback: "default",
		usage: "namespace of this program's pod; objects of --node-labels=nodeFeature are in it",
		set:   text(func(c *Config) *string { return &c.Namespace }),
	},
	{
		flag: "pod-name", env: []string{"POD_NAME"},
		usage: "name of this program's pod: its owner also owns the object of --node-labels=nodeFeature",
		set:   text(func(c *Config) *string { return &c.PodName }),
	},
	{
		flag: "node-events", common: true, env: []string{"NODE_EVENTS"}, key: "features.events", fallback: "false",
		kind:  kindBool,
		usage: "write Events about the GPUs: false; true, of the node; pods, also of the pods that hold a GPU",
		set:   setEvents,
	},
	{
		flag: "node-condition", env: []string{"NODE_CONDITION"}, key: "features.condition", fallback: "false",
		kind:  kindBool,
		usage: "write the node condition GPUHealthy: whether the GPUs of the node are healthy",
		set:   truth(func(c *Config) *bool { return &c.Features.Condition }),
	},
	{
		flag: "node-condition-types", env: []string{"NODE_CONDITION_TYPES"}, key: "features.conditionTypes",
		kind: kindList,
		usage: "further types of the condition of --node-condition, such as AcceleratedHardwareReady: TYPE, or " +
			"TYPE=problem if True means a problem",
		set: setConditionTypes,
	},
	{
		flag: "node-taint", env: []string{"NODE_TAINT"}, key: "features.taint", fallback: "false", kind: kindBool,
		usage: "taint the node while none of its GPUs is healthy",
		set:   truth(func(c *Config) *bool { return &c.Features.Taint }),
	},
	{
		flag: "node-change-taint", env: []string{"NODE_CHANGE_TAINT"}, key: "features.changeTaint", fallback: "false",
		kind: kindBool,
		usage: "taint the node before a change of the configuration takes devices away, so that no pod is scheduled " +
			"to them",
		set: truth(func(c *Config) *bool { return &c.Features.ChangeTaint }),
	},
	{
		flag: "node-startup-taint", env: []string{"NODE_STARTUP_TAINT"}, key: "features.startupTaint",
		fallback: "false",
		kind:     kindBool,
		usage: "remove the taint startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin of the node when " +
			"its GPUs are allocatable",
		set: truth(func(c *Config) *bool { return &c.Features.StartupTaint }),
	},
	{
		flag: "health-events", env: []string{"HEALTH_EVENTS"}, key: "features.healthEvents",
		usage: "address of NVSentinel's platform connector, to which each change of a GPU's health is sent, such as " +
			"unix:///var/run/nvsentinel/nvsentinel.sock; empty: no health events",
		set: setHealthEvents,
	},
	{
		flag: "health-events-strategy", env: []string{"HEALTH_EVENTS_STRATEGY"}, key: "features.healthEventsStrategy",
		fallback: "storeOnly",
		usage: "what NVSentinel may do with these events: storeOnly; executeRemediation, also cordon, drain and " +
			"repair the node by its rules",
		set: choice(func(c *Config) *EventsStrategy { return &c.Features.HealthEventsStrategy }, StoreOnly,
			ExecuteRemediation),
	},
	{
		flag: "health-events-machine", env: []string{"HEALTH_EVENTS_MACHINE"}, key: "features.healthEventsMachine",
		fallback: "bareMetal",
		usage: "the machine in these events: bareMetal, with RESTART_BM for a restart and CONTACT_SUPPORT for broken " +
			"hardware; vm, with RESTART_VM and REPLACE_VM",
		set: choice(func(c *Config) *Machine { return &c.Features.HealthEventsMachine }, BareMetal, VM),
	},
	{
		flag: "node-quiesce", env: []string{"NODE_QUIESCE"}, key: "features.quiesce", fallback: "false", kind: kindBool,
		usage: "release the driver while the node has the annotation gpu-device-plugin.github.io/quiesce.until with " +
			"a time in the future, or while nvidia.com/gpu.deploy.device-plugin or .client is paused-for-...",
		set: truth(func(c *Config) *bool { return &c.Features.Quiesce }),
	},
}

// setFallbacks sets the fallbacks for a node without the label.
func setFallbacks(c *Config, text string) error {
	for _, name := range splitList(text) {
		f := Fallback(name)
		if !slices.Contains([]Fallback{FallbackNamed, FallbackSingle, FallbackEmpty}, f) {
			return fmt.Errorf("%q is not one of: named, single, empty", name)
		}
		c.NodeConfig.Fallbacks = append(c.NodeConfig.Fallbacks, f)
	}
	return nil
}

// setEvents sets which Events are written.
func setEvents(c *Config, text string) error {
	if text == "pods" {
		c.Features.Events, c.Features.PodEvents = true, true
		return nil
	}
	if truth(func(c *Config) *bool { return &c.Features.Events })(c, text) != nil {
		return fmt.Errorf("%q is not one of: false, true, pods", text)
	}
	return nil
}

// features checks the settings that need the API server.
func (d *document) features(c *Config, s Sources) {
	if c.NodeConfig.Dir != "" && s.Program != AnyProgram && s.filePath() != "" {
		d.problem("--node-config-dir", 0, "chooses the configuration file; remove --config-file")
	}
	if len(c.Features.ConditionTypes) > 0 && !c.Features.Condition {
		d.problem("features.conditionTypes", d.line("features.conditionTypes"), "are types of the condition; also set "+
			"features.condition: true")
	}
	if c.Features.HealthEvents != "" && s.Program == DevicePlugin && !s.Discovery {
		d.problem("features.healthEvents", d.line("features.healthEvents"), "needs gpu-node-agent, which has the same "+
			"settings; this program sends no health events")
	}
	if c.Features.HealthEvents != "" && s.Program == NodeAgent && c.NodeName == "" {
		d.problem("features.healthEvents", d.line("features.healthEvents"),
			"needs the name of the node: set --node-name or NODE_NAME")
	}
	needs := "features"
	if s.Discovery {
		needs = "--use-node-feature-api"
	}
	switch {
	case c.NodeConfig.Dir != "":
		needs = "--node-config-dir"
	case c.Features.NeedAPIServer():
	case c.MIG.NeedsAPIServer():
		needs = "mig"
	case c.Repair.Acts():
		needs = "health.repair"
	case c.DriverChange.Version != "":
		needs = "driver.version"
	case c.DRA.Mode != DRAOff && !s.Discovery:
		needs = "dra"
	default:
		return
	}
	switch {
	case s.Program == DevicePlugin:
		d.problem(needs, d.line(needs), noClient)
	case s.Program == NodeAgent && c.NodeName == "":
		d.problem(needs, d.line(needs), "needs the name of the node: set --node-name or NODE_NAME")
	}
}

// noClient is the problem of a program without access to the API server.
const noClient = "needs the API server, which this program does not talk to: run gpu-node-agent instead, with the " +
	"same settings"
