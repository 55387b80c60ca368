package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// options are all settings with a flag or an environment variable.
var options = slices.Concat(daemonOptions, clusterOptions, rolloutOptions, migOptions, draOptions)

// daemonOptions are the options of NVIDIA's device plugin, then our own.
var daemonOptions = []option{
	{
		flag: "mig-strategy", common: true, env: []string{"MIG_STRATEGY"}, key: "flags.migStrategy", fallback: "none",
		empty: true, usage: "MIG strategy: none, single or mixed",
		set: choice(func(c *Config) *resource.MIGStrategy { return &c.Resource.MIG }, resource.MIGNone,
			resource.MIGSingle, resource.MIGMixed),
	},
	{
		flag: "fail-on-init-error", common: true,
		env: []string{"FAIL_ON_INIT_ERROR"}, key: "flags.failOnInitError", fallback: "true", kind: kindBool,
		usage: "exit with an error if NVML cannot be initialized; if false, wait for the driver",
		set:   truth(func(c *Config) *bool { return &c.FailOnInitError }), restart: true,
	},
	{
		flag: "driver-root", common: true,
		aliases: []string{"nvidia-driver-root"}, env: []string{"NVIDIA_DRIVER_ROOT"}, key: "flags.nvidiaDriverRoot",
		fallback: "/", empty: true, usage: "directory on the host below which the driver is installed",
		set: rooted(func(c *Config) *string { return &c.Driver.Root }), restart: true,
	},
	{
		flag: "dev-root", aliases: []string{"nvidia-dev-root"}, env: []string{"NVIDIA_DEV_ROOT"},
		key:   "flags.nvidiaDevRoot",
		empty: true, usage: "directory on the host that contains dev/; default: the driver root",
		set: rooted(func(c *Config) *string { return &c.Driver.DevRoot }), restart: true,
	},
	{
		flag: "pass-device-specs", common: true,
		env: []string{"PASS_DEVICE_SPECS"}, key: "flags.plugin.passDeviceSpecs", fallback: "false", kind: kindBool,
		usage: "also give containers the device nodes of their devices",
		set:   truth(func(c *Config) *bool { return &c.Edits.DeviceNodes }),
	},
	{
		flag: "device-list-strategy", common: true,
		env: []string{"DEVICE_LIST_STRATEGY"}, key: "flags.plugin.deviceListStrategy", fallback: "envvar",
		kind:  kindList,
		empty: true, usage: "how devices are passed to the container runtime: one or more of envvar, volume-mounts, " +
			"cdi-annotations and cdi-cri",
		set: setStrategies,
	},
	{
		flag: "device-id-strategy", env: []string{"DEVICE_ID_STRATEGY"}, key: "flags.plugin.deviceIDStrategy",
		fallback: "uuid",
		empty:    true, usage: "how devices are named for the container runtime: uuid or index",
		set: choice(func(c *Config) *containeredits.IDStrategy { return &c.Edits.IDs }, containeredits.ByUUID,
			containeredits.ByIndex),
	},
	{
		flag: "gdrcopy-enabled", env: []string{"GDRCOPY_ENABLED"}, key: "flags.gdrcopyEnabled", fallback: "false",
		kind:  kindBool,
		usage: "give containers GDRCopy: true, false, or auto (on nodes with /dev/gdrdrv)",
		set:   companion(func(c *Config) *containeredits.Companion { return &c.Edits.GDRCopy }),
	},
	{
		flag: "gds-enabled", env: []string{"GDS_ENABLED"}, key: "flags.gdsEnabled", fallback: "false", kind: kindBool,
		usage: "give containers GPUDirect Storage: true, false, or auto (on nodes with /dev/nvidia-fs0)",
		set:   companion(func(c *Config) *containeredits.Companion { return &c.Edits.GDS }),
	},
	{
		flag: "mofed-enabled", env: []string{"MOFED_ENABLED"}, key: "flags.mofedEnabled", fallback: "false",
		kind: kindBool,
		usage: "give containers the RDMA devices of MOFED: true, false, or auto (on nodes with /dev/nvidia-fs0 and " +
			"/dev/infiniband/rdma_cm)",
		set: companion(func(c *Config) *containeredits.Companion { return &c.Edits.MOFED }),
	},
	{
		flag: "cdi-annotation-prefix", env: []string{"CDI_ANNOTATION_PREFIX"}, key: "flags.plugin.cdiAnnotationPrefix",
		fallback: "cdi.k8s.io/",
		empty:    true, usage: "prefix of CDI annotations",
		set: text(func(c *Config) *string { return &c.Edits.AnnotationPrefix }),
	},
	{
		flag: "nvidia-cdi-hook-path", aliases: []string{"nvidia-ctk-path"}, env: []string{"NVIDIA_CDI_HOOK_PATH",
			"NVIDIA_CTK_PATH"},
		key:   "flags.plugin.nvidiaCTKPath",
		empty: true,
		usage: "path on the host of nvidia-cdi-hook or nvidia-ctk, for CDI specs; default: found in /usr/bin",
		set:   rooted(func(c *Config) *string { return &c.CDI.HookPath }),
	},
	{
		flag: "driver-root-ctr-path", common: true,
		aliases: []string{"container-driver-root"}, env: []string{"DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"},
		key: "flags.plugin.containerDriverRoot", fallback: "/driver-root",
		empty: true, usage: "path of the driver root in this container",
		set: rooted(func(c *Config) *string { return &c.Driver.ContainerRoot }), restart: true,
	},
	{
		flag: "library-search-path", env: []string{"LIBRARY_SEARCH_PATH"}, kind: kindList,
		usage: "folders below the driver root to search first for the driver's libraries",
		set:   setSearchPath,
	},
	{
		flag: "mps-root", common: true,
		env: []string{"MPS_ROOT"}, key: "flags.mpsRoot", empty: true, usage: "directory on the host with the MPS state",
		set: rooted(func(c *Config) *string { return &c.Edits.MPSRoot }),
	},
	{
		flag: "mps-root-ctr-path", env: []string{"MPS_ROOT_CTR_PATH"}, fallback: "/mps",
		usage: "path of the MPS root in this container",
		set:   absolute(func(c *Config) *string { return &c.MPSRoot }),
	},
	{
		flag: "shared-devices-allocation-policy", env: []string{"SHARED_DEVICES_ALLOCATION_POLICY"},
		key: "flags.plugin.sharedDevicesAllocationPolicy", fallback: "distributed",
		empty: true, usage: "which shared devices a container preferably gets: distributed, packed or distinct",
		set: choice(func(c *Config) *resource.Policy { return &c.Resource.Policy },
			resource.PolicyDistributed, resource.PolicyPacked, resource.PolicyDistinct),
	},
	{
		flag: "device-discovery-strategy", env: []string{"DEVICE_DISCOVERY_STRATEGY"},
		key:      "flags.deviceDiscoveryStrategy",
		fallback: "auto",
		empty:    true, usage: "how GPUs are found: auto or nvml; both use NVML", set: setDiscovery,
	},
	{
		flag: "imex-channel-ids", env: []string{"IMEX_CHANNEL_IDS"}, key: "imex.channelIDs", kind: kindList,
		usage: "IMEX channels for containers: 0, or empty for none", set: setIMEX,
	},
	{
		flag: "imex-required", env: []string{"IMEX_REQUIRED"}, key: "imex.required", fallback: "false", kind: kindBool,
		usage: "make devices Unhealthy while the node has no IMEX channel",
		set:   truth(func(c *Config) *bool { return &c.IMEXRequired }),
	},
	{
		flag: "kubelet-root", env: []string{"KUBELET_ROOT"}, key: "flags.kubeletRoot", fallback: "/var/lib/kubelet",
		usage: "root directory of the kubelet (its --root-dir) with plugins_registry, plugins and pod-resources, but " +
			"without device-plugins",
		set: setKubeletRoot, restart: true,
	},
	{
		flag: "kubelet-socket", env: []string{"KUBELET_SOCKET"}, fallback: DefaultKubeletSocket, empty: true,
		usage: "registration socket of the kubelet; empty: do not register",
		set:   socket(rooted(func(c *Config) *string { return &c.KubeletSocket })),
	},
	{
		flag: "config-file", common: true, env: []string{"CONFIG_FILE"}, empty: true,
		usage: "path of the configuration file",
		set:   text(func(c *Config) *string { return &c.File }),
	},
	{
		flag: "cdi-feature-flags", env: []string{"CDI_FEATURE_FLAGS"}, kind: kindList,
		usage:   "feature flags of NVIDIA's CDI spec generator; accepted, no effect",
		warning: "has no effect: this program does not use NVIDIA's CDI spec generator",
		set:     func(*Config, string) error { return nil },
	},
	{
		flag: "cdi-disable-hooks", env: []string{"CDI_DISABLE_HOOKS"}, kind: kindList,
		usage: "hooks to omit from CDI specs, or all",
		set:   func(c *Config, text string) error { c.CDI.DisabledHooks = splitList(text); return nil },
	},
	{
		flag: "pod-resources-socket", env: []string{"POD_RESOURCES_SOCKET"}, empty: true,
		usage: "PodResources socket of the kubelet; default: pod-resources/kubelet.sock in --kubelet-root; empty: do " +
			"not use it",
		set: socket(absolute(func(c *Config) *string { return &c.PodResourcesSocket })),
	},
	{
		flag: "control-socket", env: []string{"CONTROL_SOCKET"}, fallback: DefaultControlSocket, empty: true,
		usage: "socket for commands such as status; empty: none",
		set:   socket(absolute(func(c *Config) *string { return &c.ControlSocket })),
	},
	{
		flag: "compatibility", env: []string{"COMPATIBILITY"}, key: "flags.compatibility",
		usage: "nvidia: ignore the keys resources, sharing.*.resources[].rename and sharing.*.resources[].devices " +
			"of the file, as NVIDIA's device plugin does; none: use them; default: use them with a warning, or " +
			"ignore them if the program runs under the name of one of NVIDIA's",
		set: choice(func(c *Config) *Compatibility { return &c.Compatibility }, CompatibilityNone, CompatibilityNVIDIA),
	},
	{
		flag: "logging-format", env: []string{"LOGGING_FORMAT"}, key: "flags.loggingFormat", fallback: "text",
		usage: "format of log lines: text or json",
		set:   choice(func(c *Config) *LoggingFormat { return &c.LoggingFormat }, LogText, LogJSON), restart: true,
	},
	{
		flag: "state-dir", env: []string{"STATE_DIR"}, fallback: "/var/lib/gpu-device-plugin", empty: true,
		usage: "directory for state that survives a restart; empty: none",
		set:   text(func(c *Config) *string { return &c.StateDir }),
	},
	{
		flag: "cdi-dir", env: []string{"CDI_DIR"}, fallback: cdi.DefaultDir, usage: "directory for CDI specs",
		set: absolute(func(c *Config) *string { return &c.CDIDir }),
	},
	{
		flag: "simulate", common: true, env: []string{"SIMULATE"},
		usage: "simulate a node: name of a profile, or path of a profile file",
		set:   text(func(c *Config) *string { return &c.Simulate }),
	},
	{
		flag: "record", env: []string{"RECORD"},
		usage: "directory for a recording of the driver's answers; empty: none",
		empty: true, set: text(func(c *Config) *string { return &c.Record }),
	},
	{
		flag: "record-redact", env: []string{"RECORD_REDACT"}, fallback: "false", kind: kindBool,
		usage: "replace UUIDs and PCI addresses in the recording",
		set:   truth(func(c *Config) *bool { return &c.RecordRedact }),
	},
	{
		flag: "metrics-address", common: true, env: []string{"METRICS_ADDRESS"}, key: "flags.metricsAddress",
		empty: true,
		usage: "HTTP address of metrics and probes, host:port, such as :9400 or 127.0.0.1:9400; empty: none",
		set:   setAddress(func(c *Config) *string { return &c.MetricsAddress }),
	},
	{
		flag: "gpu-metrics", env: []string{"GPU_METRICS"}, key: "flags.gpuMetrics", fallback: "true", kind: kindBool,
		usage: "also serve metrics of the GPUs under the names of dcgm-exporter; set false if dcgm-exporter runs",
		set:   truth(func(c *Config) *bool { return &c.GPUMetrics.Enabled }),
	},
	{
		flag: "gpu-metrics-interval", env: []string{"GPU_METRICS_INTERVAL"}, key: "flags.gpuMetricsInterval",
		fallback: "15s",
		usage:    "time between two measurements of a GPU for metrics, 1s to 2m",
		set: setInterval(func(c *Config) *time.Duration { return &c.GPUMetrics.Interval }, time.Second,
			2*time.Minute),
	},
	{
		flag: "gpu-metrics-pcie-throughput", env: []string{"GPU_METRICS_PCIE_THROUGHPUT"},
		key:      "flags.gpuMetricsPCIeThroughput",
		fallback: "false", kind: kindBool,
		usage: "also measure the PCIe throughput, which takes 40 ms for each GPU",
		set:   truth(func(c *Config) *bool { return &c.GPUMetrics.PCIeThroughput }),
	},
	{
		flag: "gpu-metrics-hostname-label", env: []string{"GPU_METRICS_HOSTNAME_LABEL"},
		key:      "flags.gpuMetricsHostnameLabel",
		fallback: "hostname", usage: "name of the label with the name of the node: hostname, Hostname or none",
		set: setHostnameLabel,
	},
	{
		flag: "gpu-metrics-pod-uid", env: []string{"GPU_METRICS_POD_UID"}, key: "flags.gpuMetricsPodUID",
		fallback: "false", kind: kindBool,
		usage: "add the label pod_uid to metrics that name a pod",
		set:   truth(func(c *Config) *bool { return &c.GPUMetrics.PodUIDs }),
	},
	{
		flag: "node-name", common: true, env: []string{"NODE_NAME"},
		usage: "name of the node; required for features that need the API server; default: the host name, in " +
			"metrics only",
		set: text(func(c *Config) *string { return &c.NodeName }),
	},
	{
		flag: "void-visible-devices", env: []string{"VOID_VISIBLE_DEVICES"}, key: "flags.plugin.voidVisibleDevices",
		fallback: "true",
		kind:     kindBool,
		usage: "set NVIDIA_VISIBLE_DEVICES=void in containers that get devices by CDI, so that the value of the " +
			"image has no effect",
		set: truth(func(c *Config) *bool { return &c.Edits.Void }),
	},
	{
		flag: "kernel-log", env: []string{"KERNEL_LOG"}, key: "health.kernelLog", fallback: "false", kind: kindBool,
		usage: "also read XIDs from the kernel log, /dev/kmsg: some drivers report XID 79 and others only there",
		set:   truth(func(c *Config) *bool { return &c.KernelLog }),
	},
	{
		flag: "health-interval", env: []string{"HEALTH_INTERVAL"}, key: "health.interval", fallback: "4s",
		usage: "time between two health checks of a healthy GPU, 1s to 1m",
		set:   setInterval(func(c *Config) *time.Duration { return &c.Health.Interval }, time.Second, time.Minute),
	},
	{
		flag: "driver-at-least", env: []string{"DRIVER_AT_LEAST"}, key: "driver.atLeast",
		usage: "offer GPUs only with this driver version or newer, such as 580 or 580.95.05",
		set:   driverVersion(func(c *Config) *string { return &c.Accepted.AtLeast }),
	},
	{
		flag: "driver-below", env: []string{"DRIVER_BELOW"}, key: "driver.below",
		usage: "offer GPUs only with drivers older than this version",
		set:   driverVersion(func(c *Config) *string { return &c.Accepted.Below }),
	},
	{
		flag: "driver-version", env: []string{"DRIVER_VERSION"}, key: "driver.version",
		usage: "the driver to which the node changes by gpu-driver, with a slot of the cluster, see --rollout-slots: " +
			"a version such as 580.95.05, or the digest of a driver folder such as sha256:0a...; empty: none",
		set: setDriverChange,
	},
	{
		flag: "driver-source", env: []string{"DRIVER_SOURCE"}, key: "driver.source",
		usage: "URL, with http or https, from which gpu-driver downloads the driver of --driver-version, with " +
			"--driver-sha256: an archive that gpu-driver pack has written; empty: gpu-driver has the driver",
		set: setDriverSource,
	},
	{
		flag: "driver-sha256", env: []string{"DRIVER_SHA256"}, key: "driver.sha256",
		usage: "SHA-256 digest of the archive at --driver-source, in hexadecimal; required with --driver-source",
		set:   setDriverSHA256,
	},
	{
		flag: "driver-pods", env: []string{"DRIVER_PODS"}, key: "driver.pods", fallback: "wait",
		usage: "what happens to pods with GPUs before the driver changes: wait: the change waits until they have " +
			"ended; evict: they are evicted within their disruption budgets; none: they are left alone, and the next " +
			"boot changes the driver",
		set: choice(func(c *Config) *driverchange.Pods { return &c.DriverChange.Pods }, driverchange.Wait,
			driverchange.Evict, driverchange.None),
	},
	{
		flag: "reboot-file", env: []string{"REBOOT_FILE"}, key: "health.rebootFile",
		usage: "file that requests a restart of the node while a GPU needs one; empty: none",
		set:   absolute(func(c *Config) *string { return &c.RebootFile }),
	},
	{
		flag: "repair", env: []string{"REPAIR"}, key: "health.repair", fallback: "off",
		usage: "what happens to a GPU whose remedy is a reset: off: nothing; plan: status, Events and metrics say " +
			"what idle would do; idle: reset it while nobody uses it, with a slot of the cluster, see " +
			"--rollout-slots; evict: also evict its pods, within their disruption budgets",
		set: setRepair,
	},
	{
		flag: "validate", env: []string{"VALIDATE"}, key: "health.validate", fallback: "false", kind: kindBool,
		usage: "offer devices only after a test of CUDA on them",
		set:   truth(func(c *Config) *bool { return &c.Validate }),
	},
	{
		flag: "pre-start-checks", env: []string{"PRE_START_CHECKS"}, key: "flags.plugin.preStartChecks",
		fallback: "none",
		kind:     kindList,
		usage: "checks before a container starts: none; health: its devices are Healthy; clean: its GPUs also have " +
			"no other compute processes; reset-clocks and reset-ecc: clean, and reset application clocks or " +
			"volatile ECC error counts on unshared whole GPUs",
		set: setChecks,
	},
}

// setRepair sets what happens to GPUs whose remedy is a reset. In YAML, off may be read as false.
func setRepair(c *Config, text string) error {
	if text == "false" {
		text = repair.Off.String()
	}
	return choice(func(c *Config) *repair.Mode { return &c.Repair }, repair.Off, repair.Plan, repair.Idle,
		repair.Evict)(c, text)
}

// choice returns a setter for one of the values of an enumeration.
func choice[T fmt.Stringer](field func(*Config) *T, values ...T) func(*Config, string) error {
	return func(c *Config, text string) error {
		var names []string
		for _, v := range values {
			if v.String() == text {
				*field(c) = v
				return nil
			}
			names = append(names, v.String())
		}
		return fmt.Errorf("%q is not one of: %s", text, strings.Join(names, ", "))
	}
}

// truth returns a setter for true or false.
func truth(field func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, text string) error {
		value, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("must be true or false, not %q", text)
		}
		*field(c) = value
		return nil
	}
}

// companion returns a setter for true, false or auto.
func companion(field func(*Config) *containeredits.Companion) func(*Config, string) error {
	return func(c *Config, text string) error {
		if text == containeredits.Auto.String() {
			*field(c) = containeredits.Auto
			return nil
		}
		on, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("must be true, false or auto, not %q", text)
		}
		if *field(c) = containeredits.Never; on {
			*field(c) = containeredits.Always
		}
		return nil
	}
}

// text returns a setter for any text.
func text(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, text string) error {
		*field(c) = text
		return nil
	}
}

// absolute returns a setter for an absolute path, or empty if there is no default.
func absolute(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, path string) error {
		if path != "" && !filepath.IsAbs(path) {
			return fmt.Errorf("%q is not an absolute path, such as /run/nvidia/driver", path)
		}
		*field(c) = path
		return nil
	}
}

// rooted returns a setter for a path. NVIDIA's device plugin accepts relative paths, and runs in /.
func rooted(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, path string) error {
		*field(c) = path
		if path == "" || filepath.IsAbs(path) {
			return nil
		}
		*field(c) = filepath.Join("/", path)
		return caution(fmt.Sprintf("%q is not an absolute path; %s is used", path, *field(c)))
	}
}

// setKubeletRoot sets the root directory of the kubelet, and the socket in it.
func setKubeletRoot(c *Config, path string) error {
	if err := absolute(func(c *Config) *string { return &c.KubeletRoot })(c, path); err != nil {
		return err
	}
	return socket(text(func(c *Config) *string { return &c.PodResourcesSocket }))(c,
		filepath.Join(path, "pod-resources", "kubelet.sock"))
}

// socket returns a setter for the path of a Unix socket, or empty for none, from a setter for
// paths.
func socket(set func(*Config, string) error) func(*Config, string) error {
	return func(c *Config, path string) error {
		if excess := len(path) - statefile.MaxSocketPath; excess > 0 {
			return fmt.Errorf("%q has %d bytes and the path of a socket at most %d: shorten it by %d bytes",
				path, len(path), statefile.MaxSocketPath, excess)
		}
		return set(c, path)
	}
}

// setInterval returns a setter for a duration within limits.
func setInterval(field func(*Config) *time.Duration, least, most time.Duration) func(*Config, string) error {
	return func(c *Config, text string) error {
		value, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf(`%q is not a duration with a unit, such as "15s"`, text)
		}
		if value < least || value > most {
			return fmt.Errorf("%v is not between %v and %v", value, least, most)
		}
		*field(c) = value
		return nil
	}
}

// setHostnameLabel sets the label with the node's name. The name of the label differs between
// releases of dcgm-exporter.
func setHostnameLabel(c *Config, text string) error {
	switch text {
	case "Hostname", "hostname":
		c.GPUMetrics.HostnameLabel = text
	case "none":
		c.GPUMetrics.HostnameLabel = ""
	default:
		return fmt.Errorf("%q is not one of: hostname, Hostname, none", text)
	}
	return nil
}

// setAddress returns a setter for a TCP address, or empty for none.
func setAddress(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, address string) error {
		*field(c) = address
		if address == "" {
			return nil
		}
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return fmt.Errorf("%q is not host:port, such as :9400, 127.0.0.1:9400 or [::1]:9400", address)
		}
		if strings.HasPrefix(address, "[]") {
			host = "[]"
		}
		if _, err := netip.ParseAddr(host); host != "" && err != nil {
			return fmt.Errorf("%q is not an IP address, such as 127.0.0.1 or [::1]; leave it empty for all addresses",
				host)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Errorf("port %q is not a number from 1 to 65535", port)
		}
		return nil
	}
}

// setStrategies sets the device list strategies.
func setStrategies(c *Config, text string) error {
	if splitList(text) == nil {
		return fmt.Errorf("is empty; use one or more of %s", strategyNames())
	}
	var unknown []string
	seen := map[string]bool{}
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); seen[name] {
			continue
		}
		seen[name] = true
		i := slices.IndexFunc(containeredits.AllStrategies[:],
			func(s containeredits.Strategy) bool { return s.String() == name })
		if i < 0 {
			unknown = append(unknown, strconv.Quote(name))
			continue
		}
		c.Edits.Strategies = append(c.Edits.Strategies, containeredits.AllStrategies[i])
	}
	if unknown != nil {
		return fmt.Errorf("%s: not one of: %s", strings.Join(unknown, ", "), strategyNames())
	}
	return nil
}

func strategyNames() string {
	names := make([]string, len(containeredits.AllStrategies))
	for i, s := range containeredits.AllStrategies {
		names[i] = s.String()
	}
	return strings.Join(names, ", ")
}

func setIMEX(c *Config, text string) error {
	if text == "" {
		return nil
	}
	if id, err := strconv.Atoi(strings.TrimSpace(text)); err != nil || id != 0 {
		return fmt.Errorf("channelIDs must be [] or [0], not [%s]", text)
	}
	c.Edits.IMEX = true
	return nil
}

// setChecks sets the checks before a container starts. Checks with a reset can be combined; of the
// others the strictest counts.
func setChecks(c *Config, text string) error {
	for _, name := range splitList(text) {
		check := PreStartClean
		switch name {
		case "none":
			check = PreStartNone
		case "health":
			check = PreStartHealth
		case "clean":
		case "reset-clocks":
			c.PreStart.Reset = append(c.PreStart.Reset, inventory.RemnantClocks)
		case "reset-ecc":
			c.PreStart.Reset = append(c.PreStart.Reset, inventory.RemnantECC)
		default:
			return fmt.Errorf("%q is not one of: none, health, clean, reset-clocks, reset-ecc", name)
		}
		c.PreStart.Checks = max(c.PreStart.Checks, check)
	}
	return nil
}

func setDiscovery(_ *Config, text string) error {
	if text == "tegra" {
		return errors.New("tegra is not supported: GPUs are found only by NVML; use auto or nvml")
	}
	if text != "auto" && text != "nvml" {
		return fmt.Errorf("%q is not one of: auto, nvml", text)
	}
	return nil // both mean NVML
}
