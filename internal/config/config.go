package config

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The defaults of options that other packages need, too.
const (
	// DefaultControlSocket is the socket for commands.
	DefaultControlSocket = "/run/gpu-device-plugin/control.sock"
	// DefaultKubeletSocket is the socket of a kubelet with default settings.
	DefaultKubeletSocket = "/var/lib/kubelet/device-plugins/kubelet.sock"
)

// Config is the whole configuration of the daemon. Load makes it, complete and valid. It is not
// changed afterwards, and neither is what it holds.
type Config struct {
	// File is the path of the configuration file; empty if there is none.
	File string
	// FailOnInitError ends the process when NVML cannot be initialised; otherwise it waits for the
	// driver.
	FailOnInitError bool
	// Simulate is the profile of the simulated node, a name or a path; empty for the real node.
	Simulate string

	// KubeletRoot is the root directory of kubelet, as kubelet and this process see it. Plugin sockets
	// are not below it.
	KubeletRoot string
	// KubeletSocket is the registration socket of kubelet. Plugin sockets are made in its directory.
	// Empty: do not register.
	KubeletSocket string
	// PodResourcesSocket is the PodResources socket of kubelet; empty to do without.
	PodResourcesSocket string
	// ControlSocket is the socket for commands; empty for none.
	ControlSocket string
	// MetricsAddress is the TCP address on which metrics and probes are served; empty for none.
	MetricsAddress string
	// GPUMetrics says which metrics of GPUs are served there.
	GPUMetrics GPUMetrics
	// NodeName is the name of the node. If it is empty, metrics use the host's name.
	NodeName string
	// Namespace and PodName are those of this program's pod; PodName is empty where it is not known.
	Namespace, PodName string
	// Kubeconfig is the file with the API server's address and the credentials; empty for those of the
	// pod's service account.
	Kubeconfig string
	// NodeConfig chooses the configuration file by a label of the node.
	NodeConfig NodeConfig
	// Features says which labels, Events, conditions and taints the node writes to the cluster.
	Features Features
	// MIG says how GPUs are to be divided.
	MIG MIG
	// DRA says which GPUs pods get by Dynamic Resource Allocation.
	DRA DRA
	// Discovery is for the program gpu-feature-discovery alone.
	Discovery Discovery
	// LoggingFormat is how log lines are written. It is that of the start: a change of the file needs
	// a restart.
	LoggingFormat LoggingFormat
	// Record is the directory for a recording of the driver's answers from the start; empty for none.
	// RecordRedact replaces UUIDs and PCI addresses in it.
	Record       string
	RecordRedact bool
	// StateDir is the directory for state that survives a restart; empty for none.
	StateDir string

	// Compatibility says whether keys that NVIDIA's device plugin ignores have an effect.
	Compatibility Compatibility

	// Driver says where the driver is.
	Driver Driver
	// Accepted are the versions of the driver with which devices are given to pods.
	Accepted DriverRange
	// IMEXRequired makes devices Unhealthy while the node lacks the IMEX channel that containers are
	// to be given.
	IMEXRequired bool
	// Health are the rules by which faults open and close.
	Health health.Policy
	// KernelLog has XIDs read from the kernel's log, too.
	KernelLog bool
	// RebootFile is by which a restart of the node is asked for; empty for none.
	RebootFile string
	// Validate has devices be held until CUDA is proven to work on them.
	Validate bool
	// Resource decides what is offered.
	Resource resource.Options
	// CDIDir is the directory of CDI specs.
	CDIDir string
	// CDI decides what is in them.
	CDI cdi.Options
	// Edits decide what a container is given.
	Edits containeredits.Options
	// MPSRoot is where this process sees the host's directory of MPS state.
	MPSRoot string
	// PreStart says what is checked and reset on a container's devices before it starts.
	PreStart PreStart
}

// GPUMetrics says which metrics of GPUs there are.
type GPUMetrics struct {
	// Enabled is false where another program has them.
	Enabled bool
	// Interval is the time between two samples, 1 s to 2 min.
	Interval time.Duration
	// PCIeThroughput also has the PCIe throughput measured, which blocks for 40 ms a GPU.
	PCIeThroughput bool
	// HostnameLabel is the name of the label with the node's name; empty for none.
	HostnameLabel string
}

// Driver says where the driver is. All paths are absolute.
type Driver struct {
	// Root is the host's directory that the driver is installed below.
	Root string
	// DevRoot is the host's directory that the device nodes' dev/ is in.
	DevRoot string
	// ContainerRoot is where Root is seen by this process.
	ContainerRoot string
	// SearchPath are folders below Root in which libraries are looked for before others, without a
	// slash in front.
	SearchPath []string
}

// PreStart says what is checked and reset on a container's devices before it starts.
type PreStart struct {
	Checks PreStartChecks
	// Reset is the state to reset on whole GPUs that are not shared; empty without PreStartClean.
	Reset []inventory.Remnant
}

// PreStartChecks says what is checked before a container starts.
type PreStartChecks int

// The checks, each with those before it.
const (
	PreStartNone   PreStartChecks = iota
	PreStartHealth                // its devices are Healthy
	PreStartClean                 // nothing computes on its GPUs
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

// LoggingFormat is how log lines are written.
type LoggingFormat int

// The formats of log lines.
const (
	LogText LoggingFormat = iota // klog's own
	LogJSON                      // one JSON object in each line
)

func (f LoggingFormat) String() string {
	if f == LogJSON {
		return "json"
	}
	return "text"
}

// Compatibility says whether keys of the file that NVIDIA's device plugin ignores have an effect:
// resources, and rename and devices of sharing.
type Compatibility int

// The values.
const (
	CompatibilityUnset  Compatibility = iota // they have, with a warning
	CompatibilityNone                        // they have
	CompatibilityNVIDIA                      // they have not, with a warning
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
