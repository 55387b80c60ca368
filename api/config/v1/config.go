// Package v1 is the schema of the configuration file, `version: v1`: the schema of
// NVIDIA's device plugin, key by key, and the extensions of this program, which are
// marked.
//
// A nil pointer, an empty string in a pointer's place or a missing block means that the
// file has no value. The schema therefore needs pointers; the rest of the program has none
// of them. The types decode from JSON, and from YAML by way of JSON. They check the form
// of values, package config their meaning. Only config and programs that write such files
// import this package.
package v1

// Version is the version of the schema, and the default of files without a version.
const Version = "v1"

// Config is the whole file.
type Config struct {
	// Version is Version, or empty for the same.
	Version string `json:"version"`
	// Flags are defaults for command-line flags.
	Flags *Flags `json:"flags,omitempty"`
	// Resources gives resource names to GPUs and MIG profiles.
	Resources *Resources `json:"resources,omitempty"`
	// Sharing decides how many containers share which devices.
	Sharing *Sharing `json:"sharing,omitempty"`
	// IMEX chooses the IMEX channels of containers.
	IMEX *IMEX `json:"imex,omitempty"`
	// Selectors treat single devices of the node differently. An extension.
	Selectors []Selector `json:"selectors,omitempty"`
	// Units offers GPUs in units of their memory. An extension.
	Units *Units `json:"units,omitempty"`
	// Health changes the rules for faults. An extension.
	Health *Health `json:"health,omitempty"`
	// Driver is about the driver of the node. An extension.
	Driver *Driver `json:"driver,omitempty"`
	// Features chooses the reports of the node to the cluster. An extension.
	Features *Features `json:"features,omitempty"`
	// MIG decides how GPUs are divided in multi-instance mode. An extension.
	MIG *MIG `json:"mig,omitempty"`
	// Rollout limits how many nodes change at the same time.
	Rollout *Rollout `json:"rollout,omitempty"`
	// DRA chooses the GPUs that pods get by Dynamic Resource Allocation. An extension.
	DRA *DRA `json:"dra,omitempty"`
}

// Driver is an extension: the driver versions with which devices are offered, and the driver that
// gpu-node-agent loads.
type Driver struct {
	// AtLeast is the oldest accepted version, such as "580" or "580.95.05"; none by
	// default.
	AtLeast *string `json:"atLeast,omitempty"`
	// Below is the oldest version that is too new; none by default.
	Below *string `json:"below,omitempty"`
	// Version is the driver that the node changes to, a version such as "580.95.05" or the
	// digest of a driver folder such as "sha256:0a..."; none by default.
	Version *string `json:"version,omitempty"`
	// Pods is what happens to pods with GPUs before the change: wait, evict or none; wait by
	// default.
	Pods *string `json:"pods,omitempty"`
	// Source is the URL of an archive with the driver, and SHA256 the digest of the archive in
	// hexadecimal. One needs the other.
	Source *string `json:"source,omitempty"`
	SHA256 *string `json:"sha256,omitempty"`
}

// DRA is an extension: it chooses the GPUs that pods get by Dynamic Resource Allocation.
// All modes but plugin need the program gpu-node-agent.
type DRA struct {
	// Mode is plugin (default): no GPU; dra: all GPUs; or split: the GPUs in GPUs. The
	// device plugin offers the other GPUs.
	Mode *string `json:"mode,omitempty"`
	// DriverName is the name of the driver for the kubelet, in ResourceSlices and in
	// claims: a DNS subdomain of at most 63 characters; by default gpu.nvidia.com. A
	// change needs a restart, and takes effect only when no claim has a device under the
	// previous name.
	DriverName *string `json:"driverName,omitempty"`
	// GPUs selects the GPUs for the mode split.
	GPUs *GPUSelection `json:"gpus,omitempty"`
	// DynamicMIG creates MIG devices for claims, and destroys them with the claims, on
	// GPUs in MIG mode without other MIG devices.
	DynamicMIG *bool `json:"dynamicMIG,omitempty"`
	// SwitchMIG lets claims get MIG devices or the whole of a GPU. The program switches
	// MIG mode on and off for them, if that needs no reset.
	SwitchMIG *bool `json:"switchMIG,omitempty"`
	// Shares is the maximum number of claims with parts of the memory of one GPU, from 2
	// to 48; 0 (default): a claim has a GPU alone.
	Shares *int `json:"shares,omitempty"`
	// ShareBy is memory (default): claims share GPUs by parts of the memory; count: each
	// claim has one of Shares shares of a device; or unlimited: any number of claims can
	// have a device.
	ShareBy *string `json:"shareBy,omitempty"`
	// ClaimStatus writes the devices of each claim, and whether they are ready and
	// healthy, into the status of the claim.
	ClaimStatus *bool `json:"claimStatus,omitempty"`
	// Metadata gives the containers of newly prepared claims a file about their devices
	// (KEP-5304).
	Metadata *bool `json:"metadata,omitempty"`
}

// GPUSelection selects the GPUs that match any entry of any list.
type GPUSelection struct {
	// UUIDs of GPUs.
	UUIDs []string `json:"uuids,omitempty"`
	// Indices of GPUs.
	Indices []string `json:"indices,omitempty"`
	// PCI addresses, such as 0000:1b:00.0; a domain of 0 may be omitted.
	PCI []string `json:"pci,omitempty"`
	// Models are patterns of the GPU's model; "*" stands for any characters.
	Models []string `json:"models,omitempty"`
}

// MIG is an extension: it decides how the GPUs of the node are divided in multi-instance
// mode. Nothing changes unless Enabled is true.
type MIG struct {
	// Enabled allows changes of layouts.
	Enabled *bool `json:"enabled,omitempty"`
	// Layout is the name of the node's layout; without a layout GPUs stay unchanged.
	Layout *string `json:"layout,omitempty"`
	// ConfigFile is the path of a mig-parted configuration file with the layouts; by
	// default, layouts are built in.
	ConfigFile *string `json:"configFile,omitempty"`
	// Label makes the label nvidia.com/mig.config of the node name the layout. It needs
	// the program gpu-node-agent.
	Label *bool `json:"label,omitempty"`
	// Replace allows destroying MIG devices that this program did not create.
	Replace *bool `json:"replace,omitempty"`
	// ResetInVM allows resetting GPUs for a change of their MIG mode in a virtual machine.
	ResetInVM *bool `json:"resetInVM,omitempty"`
	// Disruption is none (default); evict: evict pods on a GPU before its change; or
	// pause: also pause DaemonSets with such a GPU open, by the labels
	// nvidia.com/gpu.deploy.NAME of the node. The last two need the program
	// gpu-node-agent.
	Disruption *string `json:"disruption,omitempty"`
	// EvictTimeout is the time limit of evictions before the change is postponed: 1m to
	// 24h.
	EvictTimeout *Duration `json:"evictTimeout,omitempty"`
	// Budget makes a change of the layout take a slot of Rollout.
	Budget *bool `json:"budget,omitempty"`
}

// Rollout is an extension: it limits how many nodes of the cluster change at the same time. It needs
// the program gpu-node-agent.
type Rollout struct {
	// Slots is how many nodes may change at the same time, up to 1000; 0 (default) for none.
	Slots *int `json:"slots,omitempty"`
	// Namespace is the namespace of the Leases, which are the slots; by default that of the pod.
	Namespace *string `json:"namespace,omitempty"`
	// WaveLabel is the label of nodes with the number of their wave: a wave begins when all nodes of
	// the earlier waves have changed. Nodes without the label are the last wave.
	WaveLabel *string `json:"waveLabel,omitempty"`
	// WaveSoak is how long all nodes of the earlier waves must have been well: 1m to 168h.
	WaveSoak *Duration `json:"waveSoak,omitempty"`
	// TopologyLabel is a label of nodes, for example of their rack: of the nodes with the same value
	// only one changes at a time.
	TopologyLabel *string `json:"topologyLabel,omitempty"`
	// Windows are the times in UTC at which a change may begin, such as "Sat 22:00-04:00",
	// "Mon-Fri 01:00-05:00" or "22:00-04:00"; without any, a change may begin at any time.
	Windows *StringList `json:"windows,omitempty"`
}

// Features is an extension: it chooses the reports of the node to the cluster. All are off
// by default. All but labels in a file need the program gpu-node-agent.
type Features struct {
	// Labels is how the labels of the node are set: off (default); file, for
	// node-feature-discovery; nodeFeature, an object for node-feature-discovery; or node,
	// on the node itself.
	Labels *string `json:"labels,omitempty"`
	// LabelsFile is the file for node-feature-discovery.
	LabelsFile *string `json:"labelsFile,omitempty"`
	// LabelsTimestamp adds the label nvidia.com/gfd.timestamp.
	LabelsTimestamp *bool `json:"labelsTimestamp,omitempty"`
	// MachineTypeFile is the file with the name of the machine.
	MachineTypeFile *string `json:"machineTypeFile,omitempty"`
	// Events is true: write events of GPUs as Events of the node; pods: also as Events of
	// the pods that hold a GPU; or false (default).
	Events *Word `json:"events,omitempty"`
	// Condition writes the health of the GPUs as a condition of the node.
	Condition *bool `json:"condition,omitempty"`
	// ConditionTypes are further types under which the node also gets the condition, for programs
	// that act on a type of their own: TYPE, or TYPE=problem where True means a problem.
	ConditionTypes *StringList `json:"conditionTypes,omitempty"`
	// Taint taints the node while none of its GPUs is healthy.
	Taint *bool `json:"taint,omitempty"`
	// ChangeTaint taints the node before a change of the configuration takes devices away.
	ChangeTaint *bool `json:"changeTaint,omitempty"`
	// StartupTaint removes the taint
	// startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin of the node when
	// its GPUs are allocatable.
	StartupTaint *bool `json:"startupTaint,omitempty"`
	// HealthEvents is the address of NVSentinel's platform connector, "unix:///PATH", to which each
	// change of a GPU's health is sent; empty (default) for no health events.
	HealthEvents *string `json:"healthEvents,omitempty"`
	// HealthEventsStrategy is what NVSentinel may do with them: storeOnly (default) or
	// executeRemediation.
	HealthEventsStrategy *string `json:"healthEventsStrategy,omitempty"`
	// HealthEventsMachine is the machine for which they recommend a repair: bareMetal (default) or vm.
	HealthEventsMachine *string `json:"healthEventsMachine,omitempty"`
	// Quiesce releases the driver while the node has the annotation
	// gpu-device-plugin.github.io/quiesce.until with a time in the future, or while one of
	// the labels nvidia.com/gpu.deploy.device-plugin and .client has a value with
	// paused-for-.
	Quiesce *bool `json:"quiesce,omitempty"`
}

// Flags are defaults for command-line flags; flags and environment variables override
// them.
type Flags struct {
	MIGStrategy             *string `json:"migStrategy,omitempty"`
	FailOnInitError         *bool   `json:"failOnInitError,omitempty"`
	MPSRoot                 *string `json:"mpsRoot,omitempty"`
	DriverRoot              *string `json:"nvidiaDriverRoot,omitempty"`
	DevRoot                 *string `json:"nvidiaDevRoot,omitempty"`
	GDRCopyEnabled          *Word   `json:"gdrcopyEnabled,omitempty"`
	GDSEnabled              *Word   `json:"gdsEnabled,omitempty"`
	MOFEDEnabled            *Word   `json:"mofedEnabled,omitempty"`
	UseNodeFeatureAPI       *bool   `json:"useNodeFeatureAPI,omitempty"`
	DeviceDiscoveryStrategy *string `json:"deviceDiscoveryStrategy,omitempty"`
	// MetricsAddress is an extension: the TCP address of metrics and probes.
	MetricsAddress *string `json:"metricsAddress,omitempty"`
	// The following are extensions: the choice of GPU metrics, the interval of
	// measurements, the label with the node's name, and the one with the UID of the pod.
	GPUMetrics               *bool     `json:"gpuMetrics,omitempty"`
	GPUMetricsInterval       *Duration `json:"gpuMetricsInterval,omitempty"`
	GPUMetricsPCIeThroughput *bool     `json:"gpuMetricsPCIeThroughput,omitempty"`
	GPUMetricsHostnameLabel  *string   `json:"gpuMetricsHostnameLabel,omitempty"`
	GPUMetricsPodUID         *bool     `json:"gpuMetricsPodUID,omitempty"`
	// Compatibility is an extension: nvidia ignores Resources, and Rename and Devices of
	// Sharing, as NVIDIA's device plugin does; none uses them.
	Compatibility *string `json:"compatibility,omitempty"`
	// LoggingFormat is an extension: text or json.
	LoggingFormat *string `json:"loggingFormat,omitempty"`
	// KubeletRoot is an extension: the root directory of the kubelet.
	KubeletRoot *string `json:"kubeletRoot,omitempty"`

	Plugin *PluginFlags `json:"plugin,omitempty"`
	GFD    *GFDFlags    `json:"gfd,omitempty"`
}

// PluginFlags are defaults for flags that only the device plugin has.
type PluginFlags struct {
	PassDeviceSpecs               *bool       `json:"passDeviceSpecs,omitempty"`
	DeviceListStrategy            *StringList `json:"deviceListStrategy,omitempty"`
	DeviceIDStrategy              *string     `json:"deviceIDStrategy,omitempty"`
	CDIAnnotationPrefix           *string     `json:"cdiAnnotationPrefix,omitempty"`
	CDIHookPath                   *string     `json:"nvidiaCTKPath,omitempty"`
	ContainerDriverRoot           *string     `json:"containerDriverRoot,omitempty"`
	SharedDevicesAllocationPolicy *string     `json:"sharedDevicesAllocationPolicy,omitempty"`
	// VoidVisibleDevices is an extension: it sets NVIDIA_VISIBLE_DEVICES=void in
	// containers that get devices only by CDI.
	VoidVisibleDevices *bool `json:"voidVisibleDevices,omitempty"`
	// PreStartChecks is an extension: the checks, and resets of whole GPUs, before a
	// container starts.
	PreStartChecks *StringList `json:"preStartChecks,omitempty"`
}

// GFDFlags are defaults for flags of GPU feature discovery. They have no effect in the
// device plugin; one file can serve both programs.
type GFDFlags struct {
	Oneshot         *bool     `json:"oneshot,omitempty"`
	NoTimestamp     *bool     `json:"noTimestamp,omitempty"`
	SleepInterval   *Interval `json:"sleepInterval,omitempty"`
	OutputFile      *string   `json:"outputFile,omitempty"`
	MachineTypeFile *string   `json:"machineTypeFile,omitempty"`
}

// Resources gives resource names to devices. The first matching pattern counts; a device
// without a match has its usual name.
type Resources struct {
	// GPUs has patterns for the model of whole GPUs.
	GPUs []Resource `json:"gpus,omitempty"`
	// MIGs has patterns for the profile of MIG devices.
	MIGs []Resource `json:"mig,omitempty"`
}

// Resource is a resource name and the pattern of its devices.
type Resource struct {
	// Pattern matches the whole string; "*" stands for any characters.
	Pattern *string `json:"pattern"`
	// Name is a resource name; "nvidia.com/" may be omitted.
	Name string `json:"name"`
}

// IMEX chooses the IMEX channels of containers.
type IMEX struct {
	// ChannelIDs is empty or contains 0.
	ChannelIDs []int `json:"channelIDs,omitempty"`
	// Required makes a missing channel of the node an error.
	Required *bool `json:"required,omitempty"`
}

// Selector is an extension: it selects devices and their treatment. It selects the devices
// that match any entry of any list, and with a GPU all its MIG devices.
type Selector struct {
	// UUIDs of GPUs or MIG devices.
	UUIDs []string `json:"uuids,omitempty"`
	// Indices of GPUs "i" or MIG devices "i:j".
	Indices []string `json:"indices,omitempty"`
	// PCI addresses, such as 0000:1b:00.0; a domain of 0 may be omitted.
	PCI []string `json:"pci,omitempty"`
	// Models are patterns of the GPU's model; "*" stands for any characters.
	Models []string `json:"models,omitempty"`

	// Exclude leaves the devices out of every resource. It cannot be combined with the
	// other settings.
	Exclude *bool `json:"exclude,omitempty"`
	// Rename is the resource of the devices.
	Rename *string `json:"rename,omitempty"`
	// Replicas is the number of containers that share each device, 1 for no sharing; it
	// overrides the sharing block.
	Replicas *int `json:"replicas,omitempty"`
	// Units offers the GPUs in units of their memory, by the rules of the block units. It
	// cannot be combined with the other settings.
	Units *bool `json:"units,omitempty"`
}

// Units is an extension: it offers GPUs in units of their memory. It applies to GPUs of
// selectors with units.
type Units struct {
	// Name begins the name of the resource, followed by the size; volcano.sh/gpu-mem by
	// default.
	Name *string `json:"name,omitempty"`
	// Size of a unit: 128Mi (default), 256Mi or 1Gi.
	Size *string `json:"size,omitempty"`
	// Percentage begins the name of the resource of percentages, followed by
	// ".percentage"; volcano.sh/gpu-core by default. Empty for no percentages.
	Percentage *string `json:"percentage,omitempty"`
	// ReserveMiB is the memory of each GPU that no container gets, in MiB: 0 or more. By
	// default it is the driver's reserve according to NVML, plus 512 with MPS; 1024 if
	// NVML does not report the reserve.
	ReserveMiB *int `json:"reserveMiB,omitempty"`
	// Fit is one (default): offer the free units of the GPU with the most free units; or
	// sum: offer the free units of all GPUs.
	Fit *string `json:"fit,omitempty"`
	// Fill is fullest (default): a container gets the fullest GPU with enough units; or
	// emptiest.
	Fill *string `json:"fill,omitempty"`
	// Enforce is mps (default): CUDA's Multi-Process Service enforces limits; driver: the
	// driver enforces limits, from 615 on; or none: units are only counted.
	Enforce *string `json:"enforce,omitempty"`
}

// Health is an extension: it changes the rules for faults.
type Health struct {
	// XIDs are rules for the driver's error numbers; the catalog applies to all others.
	XIDs *XIDRules `json:"xids,omitempty"`
	// Recovery is auto (default) or manual: with manual, an operator has to clear every
	// fault.
	Recovery *string `json:"recovery,omitempty"`
	// Fabric is gate (default) or report: with report, a GPU is given new work in every
	// state of its NVSwitch fabric.
	Fabric *string `json:"fabric,omitempty"`
	// IMEX is report (default) or gate: with gate, a GPU gets no new work while the driver
	// requests the recovery of its IMEX domain.
	IMEX *string `json:"imex,omitempty"`
	// EnergyEvidence is true if a fall of a GPU's energy counter proves a reset of the
	// GPU; the default is false.
	EnergyEvidence *bool `json:"energyEvidence,omitempty"`
	// Reopen is careful, or always: with always, the program reopens NVML to find a lost
	// GPU even if a GPU without persistence mode then loses its power limits, clocks and
	// compute mode.
	Reopen *string `json:"reopen,omitempty"`
	// Interval is the time between two health checks of a healthy GPU, 1s to 1m; the
	// default is 4s.
	Interval *Duration `json:"interval,omitempty"`
	// KernelLog is true to also read XIDs from the kernel log; the default is false.
	KernelLog *bool `json:"kernelLog,omitempty"`
	// RebootFile is the absolute path of the file that requests a restart of the node
	// while a GPU needs one, such as /var/run/reboot-required for kured; none by default.
	RebootFile *string `json:"rebootFile,omitempty"`
	// Repair is off (default); plan: report which GPUs would be reset, because a reset is their
	// remedy; or idle: reset such a GPU while nobody uses it.
	Repair *Word `json:"repair,omitempty"`
	// Validate is true to offer devices only after a test of CUDA on them; the default is
	// false.
	Validate *bool `json:"validate,omitempty"`
	// SuspectLimit is how long a device may be Suspect before it becomes Unhealthy.
	SuspectLimit *Duration `json:"suspectLimit,omitempty"`
	// UnknownGrace is how long a device may be given new work after the driver stopped
	// responding.
	UnknownGrace *Duration `json:"unknownGrace,omitempty"`
	// FlapLimit is the number of accepted recoveries within FlapWindow: 1 or more.
	FlapLimit *int `json:"flapLimit,omitempty"`
	// FlapWindow is the time over which recoveries are counted.
	FlapWindow *Duration `json:"flapWindow,omitempty"`
}

// XIDRules are rules for XIDs. An XID can have one rule.
type XIDRules struct {
	// Ignore are only counted.
	Ignore []int `json:"ignore,omitempty"`
	// Suspect make the device Suspect: the recovery action of the driver decides.
	Suspect []int `json:"suspect,omitempty"`
	// Fatal make the device Unhealthy at once.
	Fatal []int `json:"fatal,omitempty"`
}
