package config

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Defaults of options that other packages also need.
const (
	// DefaultControlSocket is the socket for commands.
	DefaultControlSocket = "/run/gpu-device-plugin/control.sock"
	// DefaultKubeletSocket is the socket of a kubelet with default settings.
	DefaultKubeletSocket = "/var/lib/kubelet/device-plugins/kubelet.sock"
)

// Config is the whole configuration of the daemon. Load returns it complete and valid. It is
// immutable, including its contents.
type Config struct {
	Startup
	Live
	// started are the values of the options with restart, by their flags.
	started map[string]string
}

// Startup has the settings that need a restart. The daemon uses their values from its start; a
// change of the configuration file has an effect on them only in the next process.
type Startup struct {
	// FailOnInitError ends the process if NVML cannot be initialised; otherwise the process waits
	// for the driver.
	FailOnInitError bool
	// Simulate is the profile of the simulated node, a name or a path; empty for the real node.
	Simulate string
	// KubeletRoot is the root directory of the kubelet, with the same path for the kubelet and this
	// process. Plugin sockets are elsewhere.
	KubeletRoot string
	// KubeletSocket is the registration socket of the kubelet. Plugin sockets are created in its
	// directory. If empty, the daemon does not register.
	KubeletSocket string
	// PodResourcesSocket is the PodResources socket of the kubelet; empty to do without.
	PodResourcesSocket string
	// ControlSocket is the socket for commands; empty for none.
	ControlSocket string
	// NodeName is the name of the node. If it is empty, metrics use the host's name.
	NodeName string
	// Namespace and PodName identify this program's pod; PodName is empty if unknown.
	Namespace, PodName string
	// Kubeconfig is the file with the address and credentials of the API server; empty for the
	// pod's service account.
	Kubeconfig string
	// NodeConfig chooses the configuration file by a label of the node.
	NodeConfig NodeConfig
	// DRADriver is the name of the driver of Dynamic Resource Allocation.
	DRADriver string
	// LoggingFormat is the format of log lines.
	LoggingFormat LoggingFormat
	// Record is the directory for a recording of the driver's answers from the start; empty for
	// none. RecordRedact replaces UUIDs and PCI addresses in the recording.
	Record       string
	RecordRedact bool
	// StateDir is the directory for state that survives a restart; empty for none.
	StateDir string
	// Driver has the paths of the driver.
	Driver Driver
	// CDIDir is the directory of CDI specs.
	CDIDir string
	// MPSRoot is the path of the host's MPS state for this process.
	MPSRoot string
}

// Live has the settings that follow the configuration file while the daemon runs. Code that runs
// longer than one decision reads them from Watcher.Configs.
type Live struct {
	// File is the path of the configuration file; empty if there is none. NodeConfig can choose
	// another file.
	File string
	// MetricsAddress is the TCP address of metrics and probes; empty for none.
	MetricsAddress string
	// GPUMetrics chooses the metrics of GPUs.
	GPUMetrics GPUMetrics
	// Features chooses the labels, Events, conditions and taints of the node.
	Features Features
	// MIG decides how GPUs are divided. A change of Enabled from false to true needs a restart.
	MIG MIG
	// Rollout limits how many nodes change at the same time.
	Rollout Rollout
	// DRA chooses the GPUs that pods get by Dynamic Resource Allocation.
	DRA DRA
	// Discovery is only for the program gpu-feature-discovery. Oneshot needs a restart.
	Discovery Discovery
	// Compatibility decides whether keys that NVIDIA's device plugin ignores have an effect.
	Compatibility Compatibility
	// Accepted are the driver versions with which devices are offered.
	Accepted DriverRange
	// IMEXRequired makes devices Unhealthy while the node lacks the IMEX channel for containers.
	IMEXRequired bool
	// Health are the rules by which faults open and close.
	Health health.Policy
	// KernelLog also reads XIDs from the kernel's log.
	KernelLog bool
	// RebootFile is the file that requests a restart of the node; empty for none.
	RebootFile string
	// Repair is what happens to GPUs whose remedy is a reset.
	Repair repair.Mode
	// DriverChange is the driver to which the node changes.
	DriverChange DriverChange
	// Validate withholds devices until CUDA works on them.
	Validate bool
	// Resource decides what is offered.
	Resource resource.Options
	// CDI decides the content of CDI specs.
	CDI cdi.Options
	// Edits decide what a container gets. A change of MPSRoot between a path and empty needs a
	// restart before claims can use MPS.
	Edits containeredits.Options
	// PreStart chooses the checks and resets before a container starts.
	PreStart PreStart
}

// GPUMetrics chooses the metrics of GPUs.
type GPUMetrics struct {
	// Enabled is false if another program serves the metrics.
	Enabled bool
	// Interval is the time between two samples, 1 s to 2 min.
	Interval time.Duration
	// PCIeThroughput also measures the PCIe throughput, which blocks for 40 ms for each GPU.
	PCIeThroughput bool
	// HostnameLabel is the name of the label with the node's name; empty for none.
	HostnameLabel string
	// PodUIDs adds the UID of the pod to series that name a pod.
	PodUIDs bool
}

// Driver has the paths of the driver. All of them are absolute.
type Driver struct {
	// Root is the host's directory below which the driver is installed.
	Root string
	// DevRoot is the host's directory that contains dev/ with the device nodes.
	DevRoot string
	// ContainerRoot is the path of Root for this process.
	ContainerRoot string
	// SearchPath are folders below Root that are searched first for libraries, without a leading
	// slash.
	SearchPath []string
}

// PreStart chooses the checks and resets of a container's devices before it starts.
type PreStart struct {
	Checks PreStartChecks
	// Reset is the state to reset on unshared whole GPUs; empty without PreStartClean.
	Reset []inventory.Remnant
}

// PreStartChecks are the checks before a container starts.
type PreStartChecks int

// The checks. Each includes the previous ones.
const (
	PreStartNone   PreStartChecks = iota
	PreStartHealth                // the devices are Healthy
	PreStartClean                 // no process computes on the GPUs
)

func (p PreStartChecks) String() string {
	switch p {
	case PreStartNone:
		return "none"
	case PreStartHealth:
		return "health"
	case PreStartClean:
		return "clean"
	}
	return fmt.Sprintf("PreStartChecks(%d)", int(p))
}

// LoggingFormat is the format of log lines.
type LoggingFormat int

// The formats of log lines.
const (
	LogText LoggingFormat = iota // klog's format
	LogJSON                      // one JSON object for each line
)

func (f LoggingFormat) String() string {
	if f == LogJSON {
		return "json"
	}
	return "text"
}

// Compatibility decides whether keys of the file that NVIDIA's device plugin ignores have an
// effect: resources, and rename and devices of sharing.
type Compatibility int

// The values.
const (
	CompatibilityUnset  Compatibility = iota // the keys have an effect, with a warning
	CompatibilityNone                        // the keys have an effect
	CompatibilityNVIDIA                      // the keys have no effect, with a warning
)

func (c Compatibility) String() string {
	switch c {
	case CompatibilityUnset:
		return ""
	case CompatibilityNone:
		return "none"
	case CompatibilityNVIDIA:
		return "nvidia"
	}
	return fmt.Sprintf("Compatibility(%d)", int(c))
}
