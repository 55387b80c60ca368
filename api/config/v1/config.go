// Package v1 is the schema of the configuration file, `version: v1`: that of NVIDIA's device
// plugin, key by key, and the extensions of this program, which are marked as such.
//
// A nil pointer, an empty string in a pointer's place or a missing block means that the file says
// nothing about it, so that pointers are needed here; nothing else of the program holds them. The
// types decode from JSON, and from YAML by way of it; they judge the shape of what they read, and
// package config its sense. Only config and programs that write such files import this package.
package v1

// Version is the version of the schema, and what a file without one has.
const Version = "v1"

// Config is the whole file.
type Config struct {
	// Version is Version, or empty for the same.
	Version string `json:"version"`
	// Flags are defaults for command-line flags.
	Flags *Flags `json:"flags,omitempty"`
	// Resources gives resource names to GPUs and MIG profiles.
	Resources *Resources `json:"resources,omitempty"`
	// Sharing says which devices are shared by how many containers.
	Sharing *Sharing `json:"sharing,omitempty"`
	// IMEX says which IMEX channels containers are given.
	IMEX *IMEX `json:"imex,omitempty"`
	// Selectors single devices of the node out. An extension.
	Selectors []Selector `json:"selectors,omitempty"`
	// Units says how GPUs are offered in units of their memory. An extension.
	Units *Units `json:"units,omitempty"`
	// Health changes how faults are judged. An extension.
	Health *Health `json:"health,omitempty"`
	// Driver says which versions of the driver are accepted. An extension.
	Driver *Driver `json:"driver,omitempty"`
	// Features says what the node tells the cluster. An extension.
	Features *Features `json:"features,omitempty"`
	// MIG says how GPUs are to be divided in multi-instance mode. An extension.
	MIG *MIG `json:"mig,omitempty"`
	// DRA says which GPUs pods get by Dynamic Resource Allocation. An extension.
	DRA *DRA `json:"dra,omitempty"`
}

// Driver is an extension: with a driver of another version no device is given to pods.
type Driver struct {
	// AtLeast is the oldest version that is accepted, such as "580" or "580.95.05"; none by default.
	AtLeast *string `json:"atLeast,omitempty"`
	// Below is the oldest version that is not accepted any more; none by default.
	Below *string `json:"below,omitempty"`
}

// DRA is an extension: which GPUs pods get by Dynamic Resource Allocation. Anything but the mode
// plugin needs the program gpu-node-agent.
type DRA struct {
	// Mode is plugin (default): no GPU; dra: all GPUs; or split: those of GPUs. The other GPUs are
	// those of the device plugin.
	Mode *string `json:"mode,omitempty"`
	// DriverName is the name of the driver at kubelet, in ResourceSlices and in claims: a DNS
	// subdomain of at most 63 characters; by default gpu.nvidia.com. It counts from a restart on, and
	// not before no claim has a device under the name before.
	DriverName *string `json:"driverName,omitempty"`
	// GPUs selects GPUs with the mode split.
	GPUs *GPUSelection `json:"gpus,omitempty"`
	// DynamicMIG has MIG devices made for claims, and destroyed with them, on GPUs in MIG mode without
	// other MIG devices.
	DynamicMIG *bool `json:"dynamicMIG,omitempty"`
	// SwitchMIG has claims get MIG devices or the whole of a GPU: MIG mode is switched on and off for
	// them, where that needs no reset.
	SwitchMIG *bool `json:"switchMIG,omitempty"`
	// Shares is how many claims at most can have parts of the memory of one GPU, from 2 to 48; 0
	// (default): a claim has a GPU alone.
	Shares *int `json:"shares,omitempty"`
	// ShareBy is memory (default): claims share GPUs by parts of the memory; count: each claim has one
	// of Shares shares of a device; or unlimited: any number of claims can have one.
	ShareBy *string `json:"shareBy,omitempty"`
	// ClaimStatus has the status of each claim say which devices it has, and whether they are ready
	// and healthy.
	ClaimStatus *bool `json:"claimStatus,omitempty"`
	// Metadata has the containers of each claim that is prepared from then on find a file that says
	// which devices they have (KEP-5304).
	Metadata *bool `json:"metadata,omitempty"`
}

// GPUSelection selects the GPUs that any entry of any list matches.
type GPUSelection struct {
	// UUIDs of GPUs.
	UUIDs []string `json:"uuids,omitempty"`
	// Indices of GPUs.
	Indices []string `json:"indices,omitempty"`
	// PCI addresses, such as 0000:1b:00.0; the domain may be left out when it is 0.
	PCI []string `json:"pci,omitempty"`
	// Models are patterns of the GPU's model; "*" stands for any characters.
	Models []string `json:"models,omitempty"`
}

// MIG is an extension: how the GPUs of the node are to be divided in multi-instance mode. Nothing
// is changed unless Enabled is true.
type MIG struct {
	// Enabled has layouts changed.
	Enabled *bool `json:"enabled,omitempty"`
	// Layout is the name of the layout that the node is to have; without one GPUs stay as they are.
	Layout *string `json:"layout,omitempty"`
	// ConfigFile is the path of a configuration file of mig-parted with the layouts; without one they
	// are the built-in ones.
	ConfigFile *string `json:"configFile,omitempty"`
	// Label has the label nvidia.com/mig.config of the node name the layout. It needs the program
	// gpu-node-agent.
	Label *bool `json:"label,omitempty"`
	// Replace allows that MIG devices are destroyed that this program did not make.
	Replace *bool `json:"replace,omitempty"`
	// ResetInVM allows that GPUs are reset for a change of their MIG mode where the node is a virtual
	// machine.
	ResetInVM *bool `json:"resetInVM,omitempty"`
	// Disruption is none (default); evict: the pods are evicted that hold a GPU which is to change; or
	// pause: DaemonSets that have such a GPU open are also paused, by the labels
	// nvidia.com/gpu.deploy.NAME of the node. The last two need the program gpu-node-agent.
	Disruption *string `json:"disruption,omitempty"`
	// EvictTimeout is how long pods are evicted before the change is given up for a while: 1m to 24h.
	EvictTimeout *Duration `json:"evictTimeout,omitempty"`
}

// Features is an extension: what the node tells the cluster. All is off where the file, a flag or
// the environment does not ask for it. All but labels in a file need the program gpu-node-agent.
type Features struct {
	// Labels is how the labels of the node are set: off (default); file, for node-feature-discovery;
	// nodeFeature, an object for node-feature-discovery; or node, on the node itself.
	Labels *string `json:"labels,omitempty"`
	// LabelsFile is the file for node-feature-discovery.
	LabelsFile *string `json:"labelsFile,omitempty"`
	// LabelsTimestamp adds the label nvidia.com/gfd.timestamp.
	LabelsTimestamp *bool `json:"labelsTimestamp,omitempty"`
	// MachineTypeFile is the file with the name of the machine.
	MachineTypeFile *string `json:"machineTypeFile,omitempty"`
	// Events is true: what happens to GPUs is written as Events of the node; pods: also as Events of
	// the pods that hold a GPU; or false (default).
	Events *Word `json:"events,omitempty"`
	// Condition has the health of the GPUs written as a condition of the node.
	Condition *bool `json:"condition,omitempty"`
	// Taint has the node tainted while none of its GPUs is healthy.
	Taint *bool `json:"taint,omitempty"`
	// ChangeTaint has the node tainted before a change of the configuration takes devices away.
	ChangeTaint *bool `json:"changeTaint,omitempty"`
	// StartupTaint has the taint startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin
	// of the node removed when its GPUs are allocatable.
	StartupTaint *bool `json:"startupTaint,omitempty"`
	// Quiesce has the driver released while the node has the annotation
	// gpu-device-plugin.github.io/quiesce.until with a time to come.
	Quiesce *bool `json:"quiesce,omitempty"`
}

// Flags are defaults for command-line flags; a flag or environment variable that is set wins over
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
	// MetricsAddress is an extension: the TCP address on which metrics and probes are served.
	MetricsAddress *string `json:"metricsAddress,omitempty"`
	// The following are extensions: which metrics of GPUs there are, how often they are measured, and
	// the label with the node's name.
	GPUMetrics               *bool     `json:"gpuMetrics,omitempty"`
	GPUMetricsInterval       *Duration `json:"gpuMetricsInterval,omitempty"`
	GPUMetricsPCIeThroughput *bool     `json:"gpuMetricsPCIeThroughput,omitempty"`
	GPUMetricsHostnameLabel  *string   `json:"gpuMetricsHostnameLabel,omitempty"`
	// Compatibility is an extension: nvidia ignores Resources, and Rename and Devices of Sharing, as
	// NVIDIA's device plugin does; none does not.
	Compatibility *string `json:"compatibility,omitempty"`
	// LoggingFormat is an extension: text or json.
	LoggingFormat *string `json:"loggingFormat,omitempty"`
	// KubeletRoot is an extension: the root directory of kubelet.
	KubeletRoot *string `json:"kubeletRoot,omitempty"`

	Plugin *PluginFlags `json:"plugin,omitempty"`
	GFD    *GFDFlags    `json:"gfd,omitempty"`
}

// PluginFlags are defaults for flags of the device plugin alone.
type PluginFlags struct {
	PassDeviceSpecs               *bool       `json:"passDeviceSpecs,omitempty"`
	DeviceListStrategy            *StringList `json:"deviceListStrategy,omitempty"`
	DeviceIDStrategy              *string     `json:"deviceIDStrategy,omitempty"`
	CDIAnnotationPrefix           *string     `json:"cdiAnnotationPrefix,omitempty"`
	CDIHookPath                   *string     `json:"nvidiaCTKPath,omitempty"`
	ContainerDriverRoot           *string     `json:"containerDriverRoot,omitempty"`
	SharedDevicesAllocationPolicy *string     `json:"sharedDevicesAllocationPolicy,omitempty"`
	// VoidVisibleDevices is an extension: where containers are given CDI devices alone,
	// NVIDIA_VISIBLE_DEVICES is void.
	VoidVisibleDevices *bool `json:"voidVisibleDevices,omitempty"`
	// PreStartChecks is an extension: what is checked, and reset on whole GPUs, before a container
	// starts.
	PreStartChecks *StringList `json:"preStartChecks,omitempty"`
}

// GFDFlags are defaults for flags of GPU feature discovery. They are read and have no effect here,
// so that one file can serve both programs.
type GFDFlags struct {
	Oneshot         *bool     `json:"oneshot,omitempty"`
	NoTimestamp     *bool     `json:"noTimestamp,omitempty"`
	SleepInterval   *Interval `json:"sleepInterval,omitempty"`
	OutputFile      *string   `json:"outputFile,omitempty"`
	MachineTypeFile *string   `json:"machineTypeFile,omitempty"`
}

// Resources gives resource names to devices. The first pattern that matches wins; what none matches
// has its usual name.
type Resources struct {
	// GPUs has patterns for the model of whole GPUs.
	GPUs []Resource `json:"gpus,omitempty"`
	// MIGs has patterns for the profile of MIG devices.
	MIGs []Resource `json:"mig,omitempty"`
}

// Resource is a resource name and a pattern of what is to have it.
type Resource struct {
	// Pattern matches the whole string; "*" stands for any characters.
	Pattern *string `json:"pattern"`
	// Name is a resource name; "nvidia.com/" is put before it when it is missing.
	Name string `json:"name"`
}

// IMEX says which IMEX channels containers are given.
type IMEX struct {
	// ChannelIDs is empty or holds 0.
	ChannelIDs []int `json:"channelIDs,omitempty"`
	// Required makes a channel that the node lacks an error.
	Required *bool `json:"required,omitempty"`
}

// Selector is an extension: it singles devices out and says what is different about them. A device
// that matches any entry of any list is selected, and a GPU with all that stands on it.
type Selector struct {
	// UUIDs of GPUs or MIG devices.
	UUIDs []string `json:"uuids,omitempty"`
	// Indices of GPUs "i" or MIG devices "i:j".
	Indices []string `json:"indices,omitempty"`
	// PCI addresses, such as 0000:1b:00.0; the domain may be left out when it is 0.
	PCI []string `json:"pci,omitempty"`
	// Models are patterns of the GPU's model; "*" stands for any characters.
	Models []string `json:"models,omitempty"`

	// Exclude leaves the devices out of every resource. It stands alone.
	Exclude *bool `json:"exclude,omitempty"`
	// Rename is the resource they belong to.
	Rename *string `json:"rename,omitempty"`
	// Replicas is how many containers share each of them, 1 for none; it wins over the sharing block.
	Replicas *int `json:"replicas,omitempty"`
	// Units offers the GPUs in units of their memory, as the block units says. It stands alone.
	Units *bool `json:"units,omitempty"`
}

// Units is an extension: how GPUs are offered in units of their memory. It counts for GPUs of
// selectors with units.
type Units struct {
	// Name is the beginning of the name of the resource, which the size ends; volcano.sh/gpu-mem by
	// default.
	Name *string `json:"name,omitempty"`
	// Size of a unit: 128Mi (default), 256Mi or 1Gi.
	Size *string `json:"size,omitempty"`
	// Percentage is the beginning of the name of the resource of percentages, which ".percentage"
	// ends; volcano.sh/gpu-core by default. Empty: there is none.
	Percentage *string `json:"percentage,omitempty"`
	// ReserveMiB is the memory of each GPU that no container gets, in MiB: 0 or more. By default it is
	// what NVML says that the driver keeps, and 512 more with MPS; 1024 where NVML does not say.
	ReserveMiB *int `json:"reserveMiB,omitempty"`
	// Fit is one (default): what is free on the GPU with the most free units is on offer; or sum: what
	// is free on all.
	Fit *string `json:"fit,omitempty"`
	// Fill is fullest (default): a container gets the fullest GPU that has enough; or emptiest.
	Fill *string `json:"fill,omitempty"`
	// Enforce is mps (default): limits are enforced by CUDA's Multi-Process Service; driver: by the
	// driver, from 615 on; or none: units are only counted.
	Enforce *string `json:"enforce,omitempty"`
}

// Health is an extension: it changes how faults are judged.
type Health struct {
	// XIDs are rules for the driver's error numbers; the catalog judges all others.
	XIDs *XIDRules `json:"xids,omitempty"`
	// Recovery is auto (default) or manual: with manual, an operator has to clear every fault.
	Recovery *string `json:"recovery,omitempty"`
	// Fabric is gate (default) or report: with report, a GPU is given new work whatever the state of
	// its NVSwitch fabric.
	Fabric *string `json:"fabric,omitempty"`
	// IMEX is report (default) or gate: with gate, a GPU gets no new work while the driver asks for
	// the recovery of its IMEX domain.
	IMEX *string `json:"imex,omitempty"`
	// EnergyEvidence is true if a fall of a GPU's energy counter is evidence that the GPU was reset;
	// the default is false.
	EnergyEvidence *bool `json:"energyEvidence,omitempty"`
	// Reopen is careful, or always: then NVML is opened anew to find a lost GPU also where that makes
	// a GPU without persistence mode forget its power limits, clocks and compute mode.
	Reopen *string `json:"reopen,omitempty"`
	// Interval is the time between two health checks of a healthy GPU, 1s to 1m; the default is 4s.
	Interval *Duration `json:"interval,omitempty"`
	// KernelLog is true to read XIDs from the kernel log as well; the default is false.
	KernelLog *bool `json:"kernelLog,omitempty"`
	// RebootFile is the absolute path of the file by which a restart of the node is asked for while a
	// GPU needs one, such as /var/run/reboot-required, which kured takes; none by default.
	RebootFile *string `json:"rebootFile,omitempty"`
	// Validate is true to offer devices only after CUDA is proven to work on them; the default is
	// false.
	Validate *bool `json:"validate,omitempty"`
	// SuspectLimit is how long a device may be Suspect before it becomes Unhealthy.
	SuspectLimit *Duration `json:"suspectLimit,omitempty"`
	// UnknownGrace is how long a device may be given new work after the driver stopped answering.
	UnknownGrace *Duration `json:"unknownGrace,omitempty"`
	// FlapLimit is how many recoveries within FlapWindow are accepted: 1 or more.
	FlapLimit *int `json:"flapLimit,omitempty"`
	// FlapWindow is the time over which recoveries are counted.
	FlapWindow *Duration `json:"flapWindow,omitempty"`
}

// XIDRules are rules for XIDs, each of which has one rule at most.
type XIDRules struct {
	// Ignore are only counted.
	Ignore []int `json:"ignore,omitempty"`
	// Suspect make the device Suspect: the recovery action of the driver decides.
	Suspect []int `json:"suspect,omitempty"`
	// Fatal make the device Unhealthy at once.
	Fatal []int `json:"fatal,omitempty"`
}
