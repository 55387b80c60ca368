package config

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/edits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// options are all settings that a flag or an environment variable can give: those of NVIDIA's device plugin, then ours.
var options = []option{
	{
		flag: "mig-strategy", env: []string{"MIG_STRATEGY"}, key: "flags.migStrategy", fallback: "none",
		usage: "how GPUs in multi-instance mode are offered: none, single or mixed",
		set:   choice(func(c *Config) *resource.MIGStrategy { return &c.Resource.MIG }, resource.MIGNone, resource.MIGSingle, resource.MIGMixed),
	},
	{
		flag: "fail-on-init-error", env: []string{"FAIL_ON_INIT_ERROR"}, key: "flags.failOnInitError", fallback: "true", kind: kindBool,
		usage: "end with an error when NVML cannot be initialised, instead of waiting for the driver",
		set:   truth(func(c *Config) *bool { return &c.FailOnInitError }),
	},
	{
		flag: "driver-root", aliases: []string{"nvidia-driver-root"}, env: []string{"NVIDIA_DRIVER_ROOT"}, key: "flags.nvidiaDriverRoot",
		fallback: "/", usage: "the host's directory that the driver is installed below",
		set: absolute(func(c *Config) *string { return &c.Driver.Root }),
	},
	{
		flag: "dev-root", aliases: []string{"nvidia-dev-root"}, env: []string{"NVIDIA_DEV_ROOT"}, key: "flags.nvidiaDevRoot",
		usage: "the host's directory that holds dev/; the driver root if empty",
		set:   absolute(func(c *Config) *string { return &c.Driver.DevRoot }),
	},
	{
		flag: "pass-device-specs", env: []string{"PASS_DEVICE_SPECS"}, key: "flags.plugin.passDeviceSpecs", fallback: "false", kind: kindBool,
		usage: "give containers the device nodes of their devices, too",
		set:   truth(func(c *Config) *bool { return &c.Edits.DeviceNodes }),
	},
	{
		flag: "device-list-strategy", env: []string{"DEVICE_LIST_STRATEGY"}, key: "flags.plugin.deviceListStrategy", fallback: "envvar",
		kind:  kindList,
		usage: "how the runtime is told of a container's devices: one or several of envvar, volume-mounts, cdi-annotations and cdi-cri",
		set:   setStrategies,
	},
	{
		flag: "device-id-strategy", env: []string{"DEVICE_ID_STRATEGY"}, key: "flags.plugin.deviceIDStrategy", fallback: "uuid",
		usage: "how the runtime is told of a device: by uuid or by index",
		set:   choice(func(c *Config) *edits.IDStrategy { return &c.Edits.IDs }, edits.ByUUID, edits.ByIndex),
	},
	{
		flag: "gdrcopy-enabled", env: []string{"GDRCOPY_ENABLED"}, key: "flags.gdrcopyEnabled", fallback: "false", kind: kindBool,
		usage: "give containers GDRCopy", set: truth(func(c *Config) *bool { return &c.Edits.GDRCopy }),
	},
	{
		flag: "gds-enabled", env: []string{"GDS_ENABLED"}, key: "flags.gdsEnabled", fallback: "false", kind: kindBool,
		usage: "give containers GPUDirect Storage", set: truth(func(c *Config) *bool { return &c.Edits.GDS }),
	},
	{
		flag: "mofed-enabled", env: []string{"MOFED_ENABLED"}, key: "flags.mofedEnabled", fallback: "false", kind: kindBool,
		usage: "give containers the RDMA devices of MOFED", set: truth(func(c *Config) *bool { return &c.Edits.MOFED }),
	},
	{
		flag: "cdi-annotation-prefix", env: []string{"CDI_ANNOTATION_PREFIX"}, key: "flags.plugin.cdiAnnotationPrefix", fallback: "cdi.k8s.io/",
		usage: "the prefix of CDI annotations", set: text(func(c *Config) *string { return &c.Edits.AnnotationPrefix }),
	},
	{
		flag: "nvidia-cdi-hook-path", aliases: []string{"nvidia-ctk-path"}, env: []string{"NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"},
		key:   "flags.plugin.nvidiaCTKPath",
		usage: "the host's path of nvidia-cdi-hook or nvidia-ctk, for CDI specs; looked for in /usr/bin if empty",
		set:   absolute(func(c *Config) *string { return &c.CDI.HookPath }),
	},
	{
		flag: "driver-root-ctr-path", aliases: []string{"container-driver-root"}, env: []string{"DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"},
		key: "flags.plugin.containerDriverRoot", fallback: "/driver-root",
		usage: "where this process sees the driver root", set: absolute(func(c *Config) *string { return &c.Driver.ContainerRoot }),
	},
	{
		flag: "mps-root", env: []string{"MPS_ROOT"}, key: "flags.mpsRoot", usage: "the host's directory of MPS state",
		set: absolute(func(c *Config) *string { return &c.Edits.MPSRoot }),
	},
	{
		flag: "mps-root-ctr-path", env: []string{"MPS_ROOT_CTR_PATH"}, fallback: "/mps", usage: "where this process sees the MPS root",
		set: absolute(func(c *Config) *string { return &c.MPSRoot }),
	},
	{
		flag: "shared-devices-allocation-policy", env: []string{"SHARED_DEVICES_ALLOCATION_POLICY"},
		key: "flags.plugin.sharedDevicesAllocationPolicy", fallback: "distributed",
		usage: "which of shared devices a container is preferably given: distributed, packed or distinct",
		set: choice(func(c *Config) *resource.Policy { return &c.Resource.Policy },
			resource.PolicyDistributed, resource.PolicyPacked, resource.PolicyDistinct),
	},
	{
		flag: "device-discovery-strategy", env: []string{"DEVICE_DISCOVERY_STRATEGY"}, key: "flags.deviceDiscoveryStrategy", fallback: "auto",
		usage: "how GPUs are found: auto or nvml", set: setDiscovery,
	},
	{
		flag: "imex-channel-ids", env: []string{"IMEX_CHANNEL_IDS"}, key: "imex.channelIDs", kind: kindList,
		usage: "the IMEX channels that containers are given: 0, or none", set: setIMEX,
	},
	{
		flag: "imex-required", env: []string{"IMEX_REQUIRED"}, key: "imex.required", fallback: "false", kind: kindBool,
		usage: "give out no device while the node lacks its IMEX channel", set: truth(func(c *Config) *bool { return &c.IMEXRequired }),
	},
	{
		flag: "kubelet-socket", env: []string{"KUBELET_SOCKET"}, fallback: DefaultKubeletSocket, empty: true,
		usage: "the socket of kubelet to register with; empty to register nowhere",
		set:   socket(func(c *Config) *string { return &c.KubeletSocket }),
	},
	{
		flag: "config-file", env: []string{"CONFIG_FILE"}, usage: "the configuration file", set: text(func(c *Config) *string { return &c.File }),
	},
	{
		flag: "cdi-feature-flags", env: []string{"CDI_FEATURE_FLAGS"}, kind: kindList,
		usage:   "feature flags of NVIDIA's spec generator; accepted, and without effect",
		warning: "has no effect: specs are made by this program, not by NVIDIA's generator",
		set:     func(*Config, string) error { return nil },
	},
	{
		flag: "cdi-disable-hooks", env: []string{"CDI_DISABLE_HOOKS"}, kind: kindList, usage: "hooks to leave out of CDI specs, or all",
		set: func(c *Config, text string) error { c.CDI.DisabledHooks = splitList(text); return nil },
	},
	{
		flag: "pod-resources-socket", env: []string{"POD_RESOURCES_SOCKET"}, fallback: "/var/lib/kubelet/pod-resources/kubelet.sock", empty: true,
		usage: "the socket on which kubelet tells which pod holds which device; empty to do without",
		set:   socket(func(c *Config) *string { return &c.PodResourcesSocket }),
	},
	{
		flag: "control-socket", env: []string{"CONTROL_SOCKET"}, fallback: DefaultControlSocket, empty: true,
		usage: "the socket for commands such as status; empty to take none",
		set:   socket(func(c *Config) *string { return &c.ControlSocket }),
	},
	{
		flag: "state-dir", env: []string{"STATE_DIR"}, fallback: "/var/lib/gpu-device-plugin", empty: true,
		usage: "the directory of what outlives the process; empty to keep nothing",
		set:   text(func(c *Config) *string { return &c.StateDir }),
	},
	{
		flag: "cdi-dir", env: []string{"CDI_DIR"}, fallback: cdi.DefaultDir, usage: "the directory of CDI specs",
		set: absolute(func(c *Config) *string { return &c.CDIDir }),
	},
	{
		flag: "simulate", env: []string{"SIMULATE"}, usage: "serve a simulated node: the name of a profile, or the path of one",
		set: text(func(c *Config) *string { return &c.Simulate }),
	},
	{
		flag: "void-visible-devices", env: []string{"VOID_VISIBLE_DEVICES"}, key: "flags.plugin.voidVisibleDevices", fallback: "true",
		kind:  kindBool,
		usage: "set NVIDIA_VISIBLE_DEVICES=void where containers are given CDI devices alone, so that an image's own value has no effect",
		set:   truth(func(c *Config) *bool { return &c.Edits.Void }),
	},
	{
		flag: "kernel-log", env: []string{"KERNEL_LOG"}, key: "health.kernelLog", fallback: "false", kind: kindBool,
		usage: "also read XIDs from the kernel's log, /dev/kmsg: some drivers report XID 79 and others only there",
		set:   truth(func(c *Config) *bool { return &c.KernelLog }),
	},
	{
		flag: "wait-for-release", env: []string{"WAIT_FOR_RELEASE"}, key: "flags.plugin.waitForRelease", fallback: "true", kind: kindBool,
		usage: "do not offer a GPU under another resource name, shared otherwise or in another MIG mode while a pod holds it as it was " +
			"offered before",
		set: truth(func(c *Config) *bool { return &c.WaitForRelease }),
	},
	{
		flag: "pre-start-checks", env: []string{"PRE_START_CHECKS"}, key: "flags.plugin.preStartChecks", fallback: "none",
		usage: "what a container is refused for when it starts: none; health, if its devices are not Healthy then; or clean, also if " +
			"something computes on its GPUs already",
		set: choice(func(c *Config) *PreStartChecks { return &c.PreStart.Checks }, PreStartNone, PreStartHealth, PreStartClean),
	},
	{
		flag: "pre-start-reset", env: []string{"PRE_START_RESET"}, key: "flags.plugin.preStartReset", kind: kindList,
		usage: "what --pre-start-checks=clean takes back on unshared whole GPUs when a container starts: clocks (application clocks) " +
			"and ecc (volatile counts of memory errors)",
		set: setReset, // after the checks
	},
}

// choice sets an option to one of the values of an enumeration.
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
		return fmt.Errorf("%q is none of %s", text, strings.Join(names, ", "))
	}
}

// truth sets an option that is true or false.
func truth(field func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, text string) error {
		value, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		*field(c) = value
		return nil
	}
}

// text sets an option that is any text.
func text(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, text string) error {
		*field(c) = text
		return nil
	}
}

// absolute sets an option that is an absolute path, or empty where it has no default.
func absolute(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, path string) error {
		if path != "" && !filepath.IsAbs(path) {
			return fmt.Errorf("%q is not an absolute path, such as /run/nvidia/driver", path)
		}
		*field(c) = path
		return nil
	}
}

// socket sets an option that is the path of a Unix socket, or empty for none.
func socket(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, path string) error {
		if excess := len(path) - files.MaxSocketPath; excess > 0 {
			return fmt.Errorf("%q has %d bytes and the path of a socket at most %d: shorten it by %d bytes",
				path, len(path), files.MaxSocketPath, excess)
		}
		return absolute(field)(c, path)
	}
}

// setStrategies sets the device list strategies.
func setStrategies(c *Config, text string) error {
	names := splitList(text)
	if len(names) == 0 {
		return fmt.Errorf("names no strategy; known are %s", strategyNames())
	}
	var unknown []string
	for _, name := range names {
		i := slices.IndexFunc(edits.AllStrategies[:], func(s edits.Strategy) bool { return s.String() == name })
		if i < 0 {
			unknown = append(unknown, strconv.Quote(name))
			continue
		}
		c.Edits.Strategies = append(c.Edits.Strategies, edits.AllStrategies[i])
	}
	if unknown != nil {
		return fmt.Errorf("%s is none of %s", strings.Join(unknown, ", "), strategyNames())
	}
	return nil
}

func strategyNames() string {
	names := make([]string, len(edits.AllStrategies))
	for i, s := range edits.AllStrategies {
		names[i] = s.String()
	}
	return strings.Join(names, ", ")
}

func setIMEX(c *Config, text string) error {
	for _, channel := range splitList(text) {
		if channel != "0" {
			return fmt.Errorf("channelIDs must be [] or [0], not [%s]", text)
		}
		c.Edits.IMEX = true
	}
	return nil
}

func setReset(c *Config, text string) error {
	known := []inventory.Remnant{inventory.RemnantClocks, inventory.RemnantECC}
	for _, name := range splitList(text) {
		i := slices.IndexFunc(known, func(r inventory.Remnant) bool { return r.String() == name })
		if i < 0 {
			return fmt.Errorf("%q is none of clocks, ecc", name)
		}
		c.PreStart.Reset = append(c.PreStart.Reset, known[i])
	}
	if len(c.PreStart.Reset) > 0 && c.PreStart.Checks != PreStartClean {
		return errors.New("needs --pre-start-checks=clean: nothing is taken from a GPU that somebody may be using")
	}
	return nil
}

func setDiscovery(_ *Config, text string) error {
	if text == "tegra" {
		return errors.New("tegra is not supported: this program knows GPUs by NVML alone, so use auto or nvml")
	}
	if text != "auto" && text != "nvml" {
		return fmt.Errorf("%q is none of auto, nvml", text)
	}
	return nil // both mean NVML
}
