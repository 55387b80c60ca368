package config_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// sources returns Sources of an environment "A=1 B=2" and of arguments "--a=1 --b=2".
func sources(t *testing.T, env, args string) config.Sources {
	t.Helper()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse(strings.Fields(args)); err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{}
	for _, pair := range strings.Fields(env) {
		name, value, _ := strings.Cut(pair, "=")
		variables[name] = value
	}
	return config.Sources{Flags: flags, Env: func(name string) (string, bool) { v, ok := variables[name]; return v, ok }}
}

// defaults is the Config of no file, no environment and no flags.
func defaults() config.Config {
	return config.Config{
		Startup: config.Startup{
			FailOnInitError:    true,
			KubeletSocket:      "/var/lib/kubelet/device-plugins/kubelet.sock",
			PodResourcesSocket: "/var/lib/kubelet/pod-resources/kubelet.sock",
			ControlSocket:      "/run/gpu-device-plugin/control.sock",
			StateDir:           "/var/lib/gpu-device-plugin",
			Driver:             config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/driver-root"},
			CDIDir:             "/var/run/cdi",
			MPSRoot:            "/mps",
			KubeletRoot:        "/var/lib/kubelet",
			NodeConfig:         config.NodeConfig{Label: "nvidia.com/device-plugin.config"},
			DRADriver:          "gpu.nvidia.com",
			Namespace:          "default",
		},
		Live: config.Live{
			GPUMetrics: config.GPUMetrics{Enabled: true, Interval: 15 * time.Second, HostnameLabel: "hostname"},
			CDI:        cdi.Options{DriverRoot: "/", ContainerDriverRoot: "/driver-root"},
			Health:     health.Default(),
			Features: config.Features{
				LabelsFile:      "/etc/kubernetes/node-feature-discovery/features.d/gpu-device-plugin",
				MachineTypeFile: "/sys/class/dmi/id/product_name",
			},
			MIG:     config.MIG{EvictTimeout: 10 * time.Minute},
			Rollout: config.Rollout{WaveSoak: 10 * time.Minute},
			DRA:     config.DRA{ShareBy: "memory"},
			Edits: containeredits.Options{Strategies: []containeredits.Strategy{containeredits.EnvVar}, Void: true, DevRoot: "/",
				AnnotationPrefix: "cdi.k8s.io/"},
		},
	}
}

func TestSourcesAndTheirOrder(t *testing.T) {
	t.Parallel()
	with := func(change func(*config.Config)) config.Config {
		c := defaults()
		change(&c)
		c.CDI.DriverRoot, c.CDI.ContainerDriverRoot, c.CDI.DevicesOnly = c.Driver.Root, c.Driver.ContainerRoot,
			c.Simulate != ""
		return c
	}
	for _, tt := range []struct {
		name, file, env, args string
		want                  config.Config
	}{
		{name: "nothing", want: defaults()},
		{name: "a version alone", file: "version: v1", want: defaults()},
		{name: "file", file: "flags: {migStrategy: mixed}",
			want: with(func(c *config.Config) { c.Resource.MIG = resource.MIGMixed })},
		{
			name: "environment over file", file: "flags: {migStrategy: mixed}", env: "MIG_STRATEGY=single",
			want: with(func(c *config.Config) { c.Resource.MIG = resource.MIGSingle }),
		},
		{
			name: "flag over environment", file: "flags: {migStrategy: mixed}", env: "MIG_STRATEGY=single",
			args: "--mig-strategy=none",
			want: defaults(),
		},
		{
			name: "an empty variable says nothing", file: "flags: {gpuMetricsInterval: 1m}\nimex: {channelIDs: [0]}",
			env:  "GPU_METRICS_INTERVAL= IMEX_CHANNEL_IDS=",
			want: with(func(c *config.Config) { c.GPUMetrics.Interval, c.Edits.IMEX = time.Minute, true }),
		},
		{name: "an empty truth is false", env: "FAIL_ON_INIT_ERROR=",
			want: with(func(c *config.Config) { c.FailOnInitError = false })},
		{
			name: "an empty socket is none", env: "KUBELET_SOCKET= CONTROL_SOCKET=",
			args: "--pod-resources-socket= --state-dir=",
			want: with(func(c *config.Config) {
				c.KubeletSocket, c.ControlSocket, c.PodResourcesSocket, c.StateDir = "", "", "", ""
			}),
		},
		{name: "an empty address is none", file: "flags: {metricsAddress: ':9400'}", env: "METRICS_ADDRESS=",
			want: defaults()},
		{
			name: "false in a flag over true in the file", file: "flags: {failOnInitError: true}",
			args: "--fail-on-init-error=false",
			want: with(func(c *config.Config) { c.FailOnInitError = false }),
		},
		{
			name: "a truth needs no value", env: "FAIL_ON_INIT_ERROR=false", args: "--fail-on-init-error",
			want: defaults(),
		},
		{
			name: "old flag names", args: "--nvidia-driver-root=/run/nvidia/driver --nvidia-dev-root=/ " +
				"--container-driver-root=/drv",
			want: with(func(c *config.Config) {
				c.Driver = config.Driver{Root: "/run/nvidia/driver", DevRoot: "/", ContainerRoot: "/drv"}
			}),
		},
		{
			name: "the device root follows the driver root", args: "--driver-root=/run/nvidia/driver",
			want: with(func(c *config.Config) {
				c.Driver.Root, c.Driver.DevRoot, c.Edits.DevRoot = "/run/nvidia/driver", "/run/nvidia/driver", "/run/nvidia/driver"
			}),
		},
		{
			name: "CDI specs", env: "NVIDIA_CTK_PATH=/a/nvidia-ctk CDI_DISABLE_HOOKS=all", args: "--cdi-dir=/c",
			want: with(func(c *config.Config) {
				c.CDIDir, c.CDI.HookPath, c.CDI.DisabledHooks = "/c", "/a/nvidia-ctk", []string{"all"}
			}),
		},
		{
			name: "second names of variables", env: "CONTAINER_DRIVER_ROOT=/old",
			want: with(func(c *config.Config) { c.Driver.ContainerRoot = "/old" }),
		},
		{
			name: "first names of variables win", env: "CONTAINER_DRIVER_ROOT=/old DRIVER_ROOT_CTR_PATH=/new",
			want: with(func(c *config.Config) { c.Driver.ContainerRoot = "/new" }),
		},
		{
			name: "JSON", file: `{"version": "v1", "flags": {"plugin": {"deviceIDStrategy": "index", "sharedDevicesAllocationPolicy": "packed"}}}`,
			want: with(func(c *config.Config) { c.Edits.IDs, c.Resource.Policy = containeredits.ByIndex, resource.PolicyPacked }),
		},
		{
			name: "strategy as a string, a list and a repeated flag",
			file: "flags: {plugin: {deviceListStrategy: [envvar, envvar]}}",
			args: "--device-list-strategy=envvar --device-list-strategy=envvar,envvar", want: defaults(),
		},
		{
			name: "of merged mappings the first counts",
			file: "x: &x {migStrategy: mixed}\ny: &y {migStrategy: single, failOnInitError: no}\nflags: {<<: [*x, *y]}\n",
			want: with(func(c *config.Config) { c.Resource.MIG, c.FailOnInitError = resource.MIGMixed, false }),
		},
		{
			name: "anchors and merged mappings", file: "x: &x {migStrategy: mixed}\nflags:\n  <<: *x\n  failOnInitError: no\n",
			want: with(func(c *config.Config) { c.Resource.MIG, c.FailOnInitError = resource.MIGMixed, false }),
		},
		{
			name: "health checks", env: "DP_DISABLE_HEALTHCHECKS=48 DP_ENABLE_HEALTHCHECKS=31",
			want: with(func(c *config.Config) {
				c.Health.Overrides = c.Health.Overrides.With(48, health.RuleIgnore).With(31, health.RuleFatal)
			}),
		},
		{
			name: "flags of feature discovery", file: "flags: {useNodeFeatureAPI: true, gfd: {oneshot: true, noTimestamp: " +
				"false, sleepInterval: 60s, " +
				"outputFile: /a, machineTypeFile: /b}}", want: defaults(),
		},
		{
			name: "what containers are given", file: "flags: {gdsEnabled: true, plugin: {passDeviceSpecs: true, " +
				"voidVisibleDevices: false}}\nimex: {channelIDs: [0], required: true}",
			env:  "MOFED_ENABLED=true MPS_ROOT=/run/nvidia/mps",
			args: "--gdrcopy-enabled --device-list-strategy cdi-annotations,cdi-cri --cdi-annotation-prefix=x/",
			want: with(func(c *config.Config) {
				c.Edits = containeredits.Options{
					Strategies: []containeredits.Strategy{containeredits.CDIAnnotations,
						containeredits.CDICRI}, DeviceNodes: true, DevRoot: "/", AnnotationPrefix: "x/",
					IMEX: true, GDRCopy: containeredits.Always, GDS: containeredits.Always, MOFED: containeredits.Always,
					MPSRoot: "/run/nvidia/mps",
				}
				c.IMEXRequired, c.Resource.Required = true, inventory.NodeIMEXChannel0
			}),
		},
		{name: "no IMEX channel", file: "imex: {channelIDs: [], required: true}",
			want: with(func(c *config.Config) { c.IMEXRequired = true })},
		{
			name: "checks before a start", file: "flags: {plugin: {preStartChecks: health}}",
			want: with(func(c *config.Config) { c.PreStart.Checks = config.PreStartHealth }),
		},
		{
			name: "resets before a start", file: "flags: {plugin: {preStartChecks: [reset-ecc, health, reset-clocks]}}",
			want: with(func(c *config.Config) {
				c.PreStart.Checks = config.PreStartClean
				c.PreStart.Reset = []inventory.Remnant{inventory.RemnantECC, inventory.RemnantClocks}
			}),
		},
		{
			name: "another root directory of kubelet", file: "flags: {kubeletRoot: /data/kubelet}",
			want: with(func(c *config.Config) {
				c.KubeletRoot, c.PodResourcesSocket = "/data/kubelet", "/data/kubelet/pod-resources/kubelet.sock"
			}),
		},
		{
			name: "a socket that is not in the root directory of kubelet", env: "KUBELET_ROOT=/data/kubelet",
			args: "--pod-resources-socket=/a/b",
			want: with(func(c *config.Config) { c.KubeletRoot, c.PodResourcesSocket = "/data/kubelet", "/a/b" }),
		},
		{name: "MPS root", env: "MPS_ROOT_CTR_PATH=/x", want: with(func(c *config.Config) { c.MPSRoot = "/x" })},
		{name: "metrics of GPUs", file: "flags: {gpuMetrics: false, gpuMetricsInterval: 1m}",
			args: "--gpu-metrics-hostname-label none --node-name n",
			want: with(func(c *config.Config) {
				c.GPUMetrics, c.NodeName = config.GPUMetrics{Interval: time.Minute}, "n"
			})},
		{name: "simulated node", args: "--simulate dgx-h100", want: with(func(c *config.Config) { c.Simulate = "dgx-h100" })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := sources(t, tt.env, tt.args)
			got, _, err := s.Resolve("", []byte(tt.file))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.IgnoreUnexported(got)); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAllProblemsAreReportedInOrder(t *testing.T) {
	t.Parallel()
	long := "/" + strings.Repeat("s", 120)
	for _, tt := range []struct {
		name, file, env, args string
		want                  []string
	}{
		{
			name: "several, by line",
			file: "version: v2\nflags:\n  plugin:\n    deviceIDStrategy: name\n    passDeviceSpecs: perhaps\n" +
				"  migStrategy: [mixed]\n  failOnInitError: \"true\"\n",
			want: []string{
				`line 1: version: unknown version "v2"; use v1`,
				`line 4: flags.plugin.deviceIDStrategy: "name" is not one of: uuid, index`,
				`line 5: flags.plugin.passDeviceSpecs: must be true or false, not "perhaps"`,
				`line 6: flags.migStrategy: must be a string`,
				`line 7: flags.failOnInitError: must be true or false, not "true"`,
			},
		},
		{name: "environment", env: "MIG_STRATEGY=double",
			want: []string{`MIG_STRATEGY: "double" is not one of: none, single, mixed`}},
		{name: "a path", args: "--cdi-dir=x", want: []string{`--cdi-dir: "x" is not an absolute path, such as /run/nvidia/driver`}},
		{name: "a problem that is overruled is none", file: "flags: {migStrategy: double}", args: "--mig-strategy=single"},
		{name: "an interval", file: "flags: {gpuMetricsInterval: 3m}", env: "GPU_METRICS_HOSTNAME_LABEL=host", want: []string{
			`GPU_METRICS_HOSTNAME_LABEL: "host" is not one of: hostname, Hostname, none`,
			"line 1: flags.gpuMetricsInterval: 3m0s is not between 1s and 2m0s",
		}},
		{name: "an interval without a unit", args: "--gpu-metrics-interval=15", want: []string{
			`--gpu-metrics-interval: "15" is not a duration with a unit, such as "15s"`,
		}},
		{name: "truth", args: "--fail-on-init-error=maybe",
			want: []string{`--fail-on-init-error: must be true or false, not "maybe"`}},
		{
			name: "unknown strategy", args: "--device-list-strategy=envvar,cdi",
			want: []string{`--device-list-strategy: "cdi": not one of: envvar, volume-mounts, cdi-annotations, cdi-cri`},
		},
		{
			name: "two unknown strategies", args: "--device-list-strategy=cdi,envvar,volumes",
			want: []string{`--device-list-strategy: "cdi", "volumes": not one of: envvar, volume-mounts, cdi-annotations, cdi-cri`},
		},
		{
			name: "parts of numbers", file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.5}]}}\n" +
				"imex: {channelIDs: [0.7]}\nhealth: {flapLimit: 1e-1}\n",
			want: []string{
				`line 1: sharing.timeSlicing.resources[0].replicas: must be a whole number, not "2.5"`,
				`line 2: imex.channelIDs[0]: must be a whole number, not "0.7"`,
				`line 3: health.flapLimit: must be a whole number, not "1e-1"`,
			},
		},
		{
			name: "forms that JSON does not have",
			file: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: {1: 2}}]}}\n" +
				"flags: {plugin: {deviceListStrategy: .inf}}\n",
			want: []string{
				`line 1: sharing.timeSlicing.resources[0].devices: must be "all", a number of devices greater than 0, or a list of GPU indices (0), MIG indices ("0:1") and UUIDs`,
				"line 2: flags.plugin.deviceListStrategy: must be a string or a list of strings",
			},
		},
		{
			name: "what is malformed is said once",
			file: "sharing:\n  timeSlicing: {resources: {name: gpu}}\n  mps: {resources: [{name: gpu, replicas: \"2\"}]}\n",
			args: "--mps-root=/run/nvidia/mps",
			want: []string{
				"line 2: sharing.timeSlicing.resources: must be a list",
				`line 3: sharing.mps.resources[0].replicas: must be a whole number, not "2"`,
			},
		},
		{
			name: "no strategy", file: "flags: {plugin: {deviceListStrategy: [\"\", \"\"]}}",
			want: []string{`line 1: flags.plugin.deviceListStrategy: is empty; use one or more of envvar, volume-mounts, cdi-annotations, cdi-cri`},
		},
		{
			name: "no NVML", args: "--device-discovery-strategy=tegra",
			want: []string{"--device-discovery-strategy: tegra is not supported: GPUs are found only by NVML; use auto or nvml"},
		},
		{
			name: "unknown check", args: "--pre-start-checks=clean,dirty",
			want: []string{`--pre-start-checks: "dirty" is not one of: none, health, clean, reset-clocks, reset-ecc`},
		},
		{name: "unknown discovery", args: "--device-discovery-strategy=x",
			want: []string{`--device-discovery-strategy: "x" is not one of: auto, nvml`}},
		{
			name: "long socket", args: "--kubelet-socket=" + long,
			want: []string{`--kubelet-socket: "` + long +
				`" has 121 bytes and the path of a socket at most 107: shorten it by 14 bytes`},
		},
		{
			name: "not a block", file: "flags: yes\nimex: []",
			want: []string{
				"line 1: flags: must be a mapping with the keys migStrategy, failOnInitError, mpsRoot, nvidiaDriverRoot, " +
					"nvidiaDevRoot, gdrcopyEnabled, gdsEnabled, " +
					"mofedEnabled, useNodeFeatureAPI, deviceDiscoveryStrategy, metricsAddress, gpuMetrics, gpuMetricsInterval, " +
					"gpuMetricsPCIeThroughput, " +
					"gpuMetricsHostnameLabel, gpuMetricsPodUID, compatibility, loggingFormat, kubeletRoot, plugin, gfd",
				"line 2: imex: must be a mapping with the keys channelIDs, required",
			},
		},
		{name: "not YAML", file: "\tflags", want: []string{"file: is neither YAML nor JSON: found character that cannot " +
			"start any token"}},
		{name: "two documents", file: "version: v1\n---\nversion: v1\n",
			want: []string{"file: has a second document at line 3; only one is allowed"}},
		{name: "separators", file: "---\nversion: v1\n---\n# nothing\n---\n...\n---\nnull\n"},
		{
			name: "text after JSON", file: `{"version": "v1"}` + "\nversion: v1\n",
			want: []string{"file: has text after its document that is not YAML: line 1: did not find expected <document start>"},
		},
		{name: "not a mapping", file: "- 1", want: []string{"line 1: file: must be a mapping with the keys version, flags, " +
			"resources, sharing, imex, selectors, units, health, driver, features, mig, rollout, dra"}},
		{name: "merge of nothing", file: "flags:\n  <<: 1\n", want: []string{"line 2: flags: << must refer to a mapping"}},
		{name: "anchor in itself", file: "flags: &a\n  <<: *a\n", want: []string{"file: has an anchor that contains itself"}},
		{
			name: "too much of little", want: []string{"file: has more than 131072 values; aliases count as often as they " +
				"are used"},
			file: "a: &a {b: 1}\nb: &b {<<: [" + strings.Repeat("*a, ", 400) + "]}\nflags: {<<: [" + strings.Repeat("*b, ",
				400) + "]}\n",
		},
		{name: "IMEX channels", file: "imex: {channelIDs: [0, 1]}",
			want: []string{"line 1: imex.channelIDs: channelIDs must be [] or [0], not [0,1]"}},
		{name: "duration", file: "flags: {gfd: {sleepInterval: soon}}",
			want: []string{`line 1: flags.gfd.sleepInterval: must be "infinite" or a duration with a unit, such as "60s" or "1h30m"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, _, err := sources(t, tt.env, tt.args).Resolve("", []byte(tt.file))
			var got []string
			if invalid := (*config.Invalid)(nil); errors.As(err, &invalid) {
				for _, p := range invalid.Problems {
					got = append(got, p.String())
				}
			} else if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// TestCleanNeedsVisibleProcesses: in the node's PID namespace, or on a node that is
// simulated.
func TestCleanNeedsVisibleProcesses(t *testing.T) {
	t.Parallel()
	for args, refused := range map[string]bool{
		"--pre-start-checks=clean": true, "--pre-start-checks=health": false,
		"--pre-start-checks=clean --simulate=dgx-h100": false,
	} {
		for _, confined := range []bool{true, false} {
			s := sources(t, "", args)
			s.OwnPIDNamespace = confined
			_, _, err := s.Resolve("", nil)
			if (err != nil) != (refused && confined) || err != nil && !strings.Contains(err.Error(), "hostPID: true") {
				t.Errorf("%s, confined %t: got error %v", args, confined, err)
			}
		}
	}
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	file := "version: v1\nflag: {}\nflags:\n  MigStrategy: mixed\n  plugin:\n    deviceIdStrategies: uuid\n" +
		"    passDeviceSpecs: false\n    passDeviceSpecs: false\n"
	_, warnings, err := sources(t, "DP_DISABLE_HEALTHCHECKS=48,often CDI_FEATURE_FLAGS=x", "").Resolve("", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range warnings {
		got = append(got, w.String())
	}
	want := []string{
		"CDI_FEATURE_FLAGS: has no effect: this program does not use NVIDIA's CDI spec generator",
		`environment: DP_DISABLE_HEALTHCHECKS: "often" is neither an XID nor "all" and is left out`,
		"line 2: flag: unknown key, ignored; known keys: version, flags, resources, sharing, imex, selectors, units, " +
			"health, driver, features, mig, rollout, dra",
		"line 4: flags.MigStrategy: is read as migStrategy",
		"line 6: flags.plugin.deviceIdStrategies: unknown key, ignored; known keys: passDeviceSpecs, deviceListStrategy, " +
			"deviceIDStrategy, cdiAnnotationPrefix, nvidiaCTKPath, containerDriverRoot, sharedDevicesAllocationPolicy, " +
			"voidVisibleDevices, " +
			"preStartChecks",
		"line 8: flags.plugin.passDeviceSpecs: is set more than once; the last value counts",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

func TestLoadOfNamedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("flags: {migStrategy: single}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]config.Sources{
		"flag":        sources(t, "CONFIG_FILE=/nowhere", "--config-file="+path),
		"environment": sources(t, "CONFIG_FILE="+path, ""),
	} {
		c, _, err := config.Load(s)
		if err != nil || c.Resource.MIG != resource.MIGSingle || c.File != path {
			t.Errorf("%s: got %+v, %v", name, c, err)
		}
	}
	if _, _, err := config.Load(sources(t, "", "--config-file=/nowhere/x.yaml")); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), "--config-file") {
		t.Errorf("missing file: %v", err)
	}
	if err := os.WriteFile(path, make([]byte, 1<<20+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := config.Load(sources(t, "", "--config-file="+path)); err == nil ||
		!strings.Contains(err.Error(), "larger than") {
		t.Errorf("huge file: %v", err)
	}
	c, warnings, err := config.Load(sources(t, "", "--config-file="+os.DevNull))
	if err != nil || !c.FailOnInitError || len(warnings) != 1 ||
		warnings[0].String() != "file: is empty; the defaults apply" {
		t.Errorf("empty file: %+v, %v, %v", c, warnings, err)
	}
}

// equal reports whether two Configs say the same.
func equal(a, b config.Config) bool { return reflect.DeepEqual(a, b) }

// TestLibrarySearchPath: folders are below the driver root, in their order, also without a slash in
// front.
func TestLibrarySearchPath(t *testing.T) {
	t.Parallel()
	c, _, err := sources(t, "LIBRARY_SEARCH_PATH=/opt/a/,b/../c", "").Resolve("", nil)
	if want := []string{"opt/a", "c"}; err != nil || !slices.Equal(c.Driver.SearchPath, want) ||
		!slices.Equal(c.CDI.SearchPath, want) {
		t.Errorf("%q and %q, want %q: %v", c.Driver.SearchPath, c.CDI.SearchPath, want, err)
	}
	if _, _, err := sources(t, "", "--library-search-path=/").Resolve("", nil); err == nil {
		t.Error("the driver root itself is accepted")
	}
}
