// Package manifests holds the tests of what is deployed: every object of deployments/static and of
// the Helm chart is one that a cluster's API takes, and the chart's defaults give the static
// DaemonSet. It is a module of its own, so that Kubernetes' and Helm's types stay out of the
// daemon's dependencies.
package manifests

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
)

const (
	static = "../../deployments/static"
	chart  = "../../deployments/helm/gpu-device-plugin"
)

// kustomization is what deployments/static uses of kustomize's file.
type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Resources  []string `json:"resources"`
	Patches    []struct {
		Target struct{ Kind, Name string } `json:"target"`
		Patch  string                      `json:"patch"` // as in RFC 6902
	} `json:"patches,omitempty"`
}

// mpsFolder is not in static, as it needs a ConfigMap.
const mpsFolder = "../../deployments/mps-control-daemon"

// cleanupFolder is for after the program.
const cleanupFolder = "../../deployments/cleanup"

func TestStaticManifestsAreListed(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{static, mpsFolder, cleanupFolder} {
		data, err := os.ReadFile(filepath.Join(folder, "kustomization.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var got kustomization
		if err := yaml.UnmarshalStrict(data, &got); err != nil {
			t.Fatal(err)
		}
		want := kustomization{APIVersion: "kustomize.config.k8s.io/v1beta1", Kind: "Kustomization"}
		files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if name := filepath.Base(f); name != "kustomization.yaml" {
				decode(t, name, read(t, f))
				want.Resources = append(want.Resources, name)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("kustomization.yaml of %s (-want +got):\n%s", folder, diff)
		}
	}
}

func TestChartGivesTheStaticDaemonSet(t *testing.T) {
	t.Parallel()
	for manifest, values := range map[string]string{
		// It cannot know which strategy it will be given.
		filepath.Join(static, "gpu-device-plugin.yaml"): "{cdi: {enabled: true}, failOnInitError: false, nvidiaDriverRoot: /, affinity: null}",
		filepath.Join(mpsFolder, "mps-control-daemon.yaml"): "{mps: {enabled: true}, nvidiaDriverRoot: /, affinity: null, " +
			"config: {name: gpu-device-plugin-config, default: config.yaml}, features: {nodeConfig: false}}",
	} {
		t.Run(filepath.Base(manifest), func(t *testing.T) {
			t.Parallel()
			want := only[*appsv1.DaemonSet](t, decode(t, "static", read(t, manifest)))
			got := daemonSet(t, decode(t, "chart", render(t, values)), want.Name)
			// Helm tells releases apart by a label of its own, and names the object after the release.
			instance := map[string]string{"app.kubernetes.io/instance": "gpu-device-plugin"}
			maps.Copy(want.Spec.Selector.MatchLabels, instance)
			maps.Copy(want.Spec.Template.Labels, instance)
			if diff := cmp.Diff(want.Spec, got.Spec); diff != "" {
				t.Errorf("spec (-static +chart):\n%s", diff)
			}
			if got.Namespace != want.Namespace {
				t.Errorf("chart gives the namespace %s, want %s", got.Namespace, want.Namespace)
			}
		})
	}
}

func TestChartValuesOfMPS(t *testing.T) {
	t.Parallel()
	objects := decode(t, "chart", render(t, "{mps: {enabled: true, root: /x, enableHostPID: false}, migStrategy: single, simulate: t4, nodeSelector: {a: b}}"))
	pod := daemonSet(t, objects, "gpu-device-plugin-mps-control-daemon").Spec.Template.Spec
	if pod.HostPID || !maps.Equal(pod.NodeSelector, map[string]string{"a": "b", "nvidia.com/mps.capable": "true",
		"kubernetes.io/os": "linux"}) {
		t.Errorf("host PIDs %t, nodes %v", pod.HostPID, pod.NodeSelector)
	}
	env := map[string]string{}
	for _, e := range pod.Containers[0].Env {
		env[e.Name] = e.Value
	}
	want := map[string]string{
		"MIG_STRATEGY": "single", "SIMULATE": "t4", "CONTAINER_DRIVER_ROOT": "/driver-root", "MPS_ROOT": "/x",
	}
	if diff := cmp.Diff(want, env); diff != "" {
		t.Errorf("env (-want +got):\n%s", diff)
	}
	paths := map[string]string{}
	for _, v := range pod.Volumes {
		paths[v.Name] = v.HostPath.Path
	}
	if diff := cmp.Diff(map[string]string{"driver-root": "/", "mps": "/x", "mps-shm": "/x/shm"}, paths); diff != "" {
		t.Errorf("volumes (-want +got):\n%s", diff)
	}
	mounts(t, pod)
}

func TestChartValues(t *testing.T) {
	t.Parallel()
	base := map[string]string{
		"CONTAINER_DRIVER_ROOT": "/driver-root",
		"MPS_ROOT":              "/run/nvidia/mps", "POD_IP": "status.podIP", "METRICS_ADDRESS": "[$(POD_IP)]:9400", "GPU_METRICS": "true",
		"NODE_NAME": "spec.nodeName",
	}
	noMetrics := map[string]string{"POD_IP": "-", "METRICS_ADDRESS": "-", "GPU_METRICS": "-", "NODE_NAME": "-"}
	tests := []struct {
		name, values string
		env          map[string]string // beside base; "-" takes one away
		admin        bool              // the container has CAP_SYS_ADMIN
		log          bool              // the container may read the kernel's log
		privileged   bool
		pids         bool              // the pod is in the node's PID namespace
		config       string            // ConfigMap that is mounted
		made         map[string]string // what the chart's own ConfigMap holds
	}{
		{name: "defaults"},
		{name: "empty is as null: the file counts", admin: true,
			values: "{migStrategy: \"\", deviceListStrategy: [], deviceIDStrategy: \"\", nvidiaDriverRoot: \"\", logVerbosity: \"\", " +
				"config: {map: {a: \"flags: {migStrategy: mixed, nvidiaDriverRoot: /x}\"}}}",
			env: map[string]string{"CONFIG_FILE": "/config/a", "NVIDIA_MIG_MONITOR_DEVICES": "all"}, config: "gpu-device-plugin-config"},
		{name: "as NVIDIA's plugin takes the file", values: "{compatibility: nvidia}",
			env: map[string]string{"COMPATIBILITY": "nvidia"}},
		{name: "what NVIDIA's chart leaves to the file", values: "{failOnInitError: null, nvidiaDriverRoot: null}"},
		{name: "every setting",
			values: "{migStrategy: none, failOnInitError: true, deviceListStrategy: envvar, deviceIDStrategy: index, " +
				"deviceDiscoveryStrategy: nvml, sharedDevicesAllocationPolicy: packed, nvidiaDriverRoot: /run/nvidia/driver, " +
				"simulate: dgx-h100, gdsEnabled: true, mofedEnabled: false, gdrcopyEnabled: true, cdi: {nvidiaHookPath: /usr/bin/nvidia-ctk}}",
			env: map[string]string{"MIG_STRATEGY": "none", "FAIL_ON_INIT_ERROR": "true", "DEVICE_LIST_STRATEGY": "envvar",
				"DEVICE_ID_STRATEGY": "index", "DEVICE_DISCOVERY_STRATEGY": "nvml", "SIMULATE": "dgx-h100",
				"SHARED_DEVICES_ALLOCATION_POLICY": "packed", "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "GDS_ENABLED": "true",
				"MOFED_ENABLED": "false", "GDRCOPY_ENABLED": "true", "NVIDIA_CDI_HOOK_PATH": "/usr/bin/nvidia-ctk"}},
		{name: "no metrics", values: "{metrics: {enabled: false}}", env: noMetrics},
		{name: "metrics on all addresses, without those of GPUs", values: "{metrics: {listen: all, port: 9000, gpu: false}}",
			env: map[string]string{"POD_IP": "-", "METRICS_ADDRESS": ":9000", "GPU_METRICS": "false"}},
		{name: "metrics for a sidecar", values: "{metrics: {listen: loopback, gpuInterval: 30s, pcieThroughput: true, hostnameLabel: none, podUID: true}}",
			env: map[string]string{"POD_IP": "-", "METRICS_ADDRESS": "127.0.0.1:9400", "GPU_METRICS_INTERVAL": "30s",
				"GPU_METRICS_PCIE_THROUGHPUT": "true", "GPU_METRICS_HOSTNAME_LABEL": "none", "GPU_METRICS_POD_UID": "true"}},
		{name: "device nodes", values: "{compatWithCPUManager: true}", privileged: true,
			env: map[string]string{"PASS_DEVICE_SPECS": "true"}},
		{name: "flags of NVIDIA's spec generator, so that the daemon says that they have no effect",
			values: "{cdi: {featureFlags: [a, b]}}",
			env:    map[string]string{"CDI_FEATURE_FLAGS": "a,b"}},
		{name: "list of strategies", values: "{deviceListStrategy: [envvar, cdi-cri]}",
			env: map[string]string{"DEVICE_LIST_STRATEGY": "envvar,cdi-cri"}},
		{name: "files as names of devices, which NVIDIA's runtime may want of all who cannot administrate", admin: true,
			values: "{deviceListStrategy: [volume-mounts, cdi-cri]}", env: map[string]string{"DEVICE_LIST_STRATEGY": "volume-mounts,cdi-cri"}},
		{name: "folders of libraries", values: "{librarySearchPath: [/opt/a, /opt/b]}",
			env: map[string]string{"LIBRARY_SEARCH_PATH": "/opt/a,/opt/b"}},
		{name: "health before a start", values: "{preStartChecks: health}",
			env: map[string]string{"PRE_START_CHECKS": "health"}},
		{name: "clean before a start", values: "{preStartChecks: clean}", pids: true,
			env: map[string]string{"PRE_START_CHECKS": "clean"}},
		{name: "reset before a start", values: "{preStartChecks: [reset-clocks, reset-ecc]}", pids: true, admin: true,
			env: map[string]string{"PRE_START_CHECKS": "reset-clocks,reset-ecc"}},
		{name: "JSON logs", values: "{loggingFormat: json}", env: map[string]string{"LOGGING_FORMAT": "json"}},
		{name: "kernel log", values: "{kernelLog: true}", log: true, env: map[string]string{"KERNEL_LOG": "true"}},
		{name: "kernel log and MIG", values: "{kernelLog: true, migStrategy: single}", log: true, admin: true,
			env: map[string]string{"KERNEL_LOG": "true", "MIG_STRATEGY": "single", "NVIDIA_MIG_MONITOR_DEVICES": "all"}},
		{
			name: "drivers that are accepted", values: `{driver: {atLeast: 580, below: "595.10"}}`,
			env: map[string]string{"DRIVER_AT_LEAST": "580", "DRIVER_BELOW": "595.10"},
		},
		{name: "CUDA is proven first", values: "{validate: true}", env: map[string]string{"VALIDATE": "true"}},
		{name: "GPUs are read less often", values: "{healthInterval: 30s}", env: map[string]string{"HEALTH_INTERVAL": "30s"}},
		{name: "no kernel log, whatever the file says", values: "{kernelLog: false}",
			env: map[string]string{"KERNEL_LOG": "false"}},
		{name: "the node's processes, for what a file asks for", values: "{hostPID: true}", pids: true},
		{name: "MIG", values: "{migStrategy: mixed}", admin: true,
			env: map[string]string{"MIG_STRATEGY": "mixed", "NVIDIA_MIG_MONITOR_DEVICES": "all"}},
		{name: "one configuration file", values: "{config: {map: {a.yaml: \"version: v1\\nflags: {}\"}}}",
			env:    map[string]string{"CONFIG_FILE": "/config/a.yaml"},
			config: "gpu-device-plugin-config", made: map[string]string{"a.yaml": "version: v1\nflags: {}"}},
		{name: "the file called default", values: "{features: {nodeConfig: false}, config: {map: {a: \"version: v1\", default: \"version: v1\"}}}",
			env:    map[string]string{"CONFIG_FILE": "/config/default"},
			config: "gpu-device-plugin-config", made: map[string]string{"a": "version: v1", "default": "version: v1"}},
		{name: "the only file, whatever it is called", values: "{config: {fallbackStrategies: [single], map: {default: \"version: v1\"}}}",
			env:    map[string]string{"CONFIG_FILE": "/config/default"},
			config: "gpu-device-plugin-config", made: map[string]string{"default": "version: v1"}},
		{name: "MIG by a configuration file", admin: true,
			values: "{features: {nodeConfig: false}, config: {map: {default: \"version: v1\\nflags: {migStrategy: single}\", a: \"\"}}}",
			env:    map[string]string{"CONFIG_FILE": "/config/default", "NVIDIA_MIG_MONITOR_DEVICES": "all"},
			config: "gpu-device-plugin-config"},
		{name: "MIG by another file than the one that counts",
			values: "{features: {nodeConfig: false}, config: {map: {default: \"\", a: \"flags: {migStrategy: single}\"}}}",
			env:    map[string]string{"CONFIG_FILE": "/config/default"}, config: "gpu-device-plugin-config"},
		{name: "no MIG, whatever a file says", values: "{migStrategy: none, config: {map: {default: \"flags: {migStrategy: mixed}\"}}}",
			env: map[string]string{"CONFIG_FILE": "/config/default",
				"MIG_STRATEGY": "none"}, config: "gpu-device-plugin-config"},
		{name: "one of several files", admin: true,
			values: "{config: {default: b, map: {a: \"flags: {migStrategy: single}\", b: \"\"}}}",
			env: map[string]string{"CONFIG_FILE_SRCDIR": "/config", "DEFAULT_CONFIG": "b", "FALLBACK_STRATEGIES": "named,single",
				"NVIDIA_MIG_MONITOR_DEVICES": "all"},
			config: "gpu-device-plugin-config"},
		{name: "no file, unless the label says so", values: "{config: {fallbackStrategies: [empty], map: {a: '{}'}}}",
			env:    map[string]string{"CONFIG_FILE_SRCDIR": "/config", "FALLBACK_STRATEGIES": "empty"},
			config: "gpu-device-plugin-config"},
		{name: "no file", values: "{config: {fallbackStrategies: [named, empty], map: {a: b}}, features: {nodeConfig: false}}",
			config: "gpu-device-plugin-config"},
		{name: "a ConfigMap that is there, and no MIG", values: "{migStrategy: none, config: {name: mine, default: b}, features: {nodeConfig: false}}",
			env: map[string]string{"CONFIG_FILE": "/config/b", "MIG_STRATEGY": "none"}, config: "mine"},
		{name: "a ConfigMap that is there", values: "{config: {name: mine}}", admin: true,
			env: map[string]string{"CONFIG_FILE_SRCDIR": "/config", "FALLBACK_STRATEGIES": "named,single",
				"NVIDIA_MIG_MONITOR_DEVICES": "all"},
			config: "mine"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			objects := decode(t, "chart", render(t, tt.values))
			pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
			container := pod.Containers[0]

			env := map[string]string{}
			for _, e := range container.Env {
				env[e.Name] = e.Value
				if e.ValueFrom != nil {
					env[e.Name] = e.ValueFrom.FieldRef.FieldPath
				}
			}
			want := maps.Clone(base)
			maps.Copy(want, tt.env)
			maps.DeleteFunc(want, func(_, value string) bool { return value == "-" })
			if diff := cmp.Diff(want, env); diff != "" {
				t.Errorf("env (-want +got):\n%s", diff)
			}

			if pod.HostPID != tt.pids {
				t.Errorf("hostPID: %t, want %t", pod.HostPID, tt.pids)
			}
			if privileged := container.SecurityContext.Privileged; (privileged != nil && *privileged) != tt.privileged {
				t.Errorf("privileged: %v, want %t", privileged, tt.privileged)
			}
			capabilities := container.SecurityContext.Capabilities
			admin := capabilities != nil && slices.Contains(capabilities.Add, "SYS_ADMIN")
			if admin != tt.admin {
				t.Errorf("SYS_ADMIN: %t, want %t", admin, tt.admin)
			}
			node := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
				return v.HostPath != nil && v.HostPath.Path == "/dev/kmsg" && *v.HostPath.Type == corev1.HostPathCharDev
			})
			mounted := slices.ContainsFunc(container.VolumeMounts,
				func(m corev1.VolumeMount) bool { return m.MountPath == "/dev/kmsg" })
			if able := capabilities != nil && slices.Contains(capabilities.Add, "SYSLOG"); node != tt.log || mounted != tt.log ||
				able != tt.log {
				t.Errorf("kernel log: volume %t, mounted %t, SYSLOG %t, want %t", node, mounted, able, tt.log)
			}
			// The API refuses a container that is given SYS_ADMIN and denied privilege escalation.
			if escalation := container.SecurityContext.AllowPrivilegeEscalation; admin && escalation != nil && !*escalation {
				t.Error("SYS_ADMIN without privilege escalation")
			}

			config := ""
			for _, v := range pod.Volumes {
				if v.ConfigMap != nil {
					config = v.ConfigMap.Name
				}
			}
			if config != tt.config {
				t.Errorf("ConfigMap %q is mounted, want %q", config, tt.config)
			}
			if tt.made != nil {
				if diff := cmp.Diff(tt.made, only[*corev1.ConfigMap](t, objects).Data); diff != "" {
					t.Errorf("ConfigMap (-want +got):\n%s", diff)
				}
			}
			mounts(t, pod)
		})
	}
}

// Its pods are privileged, which a cluster may forbid: they are only there where they are needed.
// Where they are, the plugin's container sees the memory that MPS servers and clients share, as it
// asks the servers whether they are there.
func TestChartHasMPSOnlyWhereItIsConfigured(t *testing.T) {
	t.Parallel()
	const byMPS = "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
	for _, tt := range []struct {
		values string
		want   bool
	}{
		{"", false},
		{"{config: {map: {a: \"version: v1\"}}}", false},
		{"{config: {map: {a: \"sharing: {timeSlicing: {resources: []}}\"}}}", false},
		{"{config: {map: {a: \"sharing: null\"}}}", false},
		{"{config: {map: {a: \"" + byMPS + "\"}}}", true},
		{"{features: {nodeConfig: false}, config: {map: {default: \"\", a: \"" + byMPS + "\"}}}", false},
		{"{config: {map: {default: \"\", a: \"" + byMPS + "\"}}}", true}, // a label may choose it
		{"{config: {name: mine, default: a}}", false},
		{"{mps: {enabled: true}, config: {name: mine, default: a}}", true},
		{"{mps: {enabled: true}, dra: {enabled: true}}", true}, // for claims
		{"{mps: {enabled: false}, config: {map: {a: \"" + byMPS + "\"}}}", false},
	} {
		t.Run(tt.values, func(t *testing.T) {
			t.Parallel()
			objects := decode(t, "chart", render(t, tt.values))
			privileged := slices.ContainsFunc(objects, func(o runtime.Object) bool {
				d, is := o.(*appsv1.DaemonSet)
				return is && d.Name == "gpu-device-plugin-mps-control-daemon"
			})
			if privileged != tt.want {
				t.Errorf("a DaemonSet for MPS: %t, want %t", privileged, tt.want)
			}
			pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
			mounts(t, pod)
			shared := slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == "/dev/shm" && m.MountPropagation != nil &&
					*m.MountPropagation == corev1.MountPropagationHostToContainer
			})
			if shared != tt.want {
				t.Errorf("the plugin's container sees MPS' memory: %t, want %t", shared, tt.want)
			}
		})
	}
}

// TestNodesOfMPS: pods of control daemons are on nodes with a label of GPU feature discovery. For
// claims nobody sets that label but the daemon of the chart: where it sets no labels, they are on
// all of its nodes.
func TestNodesOfMPS(t *testing.T) {
	t.Parallel()
	const claims, capable = "mps: {enabled: true}, dra: {enabled: true}", "nvidia.com/mps.capable"
	for values, want := range map[string]map[string]string{
		"{mps: {enabled: true}}":                        {capable: "true"},
		"{" + claims + "}":                              nil,
		"{" + claims + ", nodeSelector: {gpu: \"on\"}}": {"gpu": "on"},
		"{" + claims + ", features: {labels: node}}":    {capable: "true"},
		"{" + claims + ", features: {labels: \"off\"}}": nil,
		"{" + claims + ", gfd: {enabled: true}}":        {capable: "true"},
		"{" + claims + ", features: {labels: nodeFeature}, " +
			"nodeSelector: {gpu: \"on\"}}": {capable: "true", "gpu": "on"},
		"{" + claims + ", config: {map: {a: \"features: {labels: file}\"}}}": {capable: "true"},
	} {
		got := daemonSet(t, decode(t, "chart", render(t, values)),
			"gpu-device-plugin-mps-control-daemon").Spec.Template.Spec.NodeSelector
		want = maps.Clone(want)
		if want == nil {
			want = map[string]string{}
		}
		want["kubernetes.io/os"] = "linux"
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: nodes (-want +got):\n%s", values, diff)
		}
	}
}

// An update of the control daemon would end the work of all its clients.
func TestMPSIsUpdatedWhenThePodIsDeleted(t *testing.T) {
	t.Parallel()
	d := daemonSet(t, decode(t, "chart", render(t, "{mps: {enabled: true}}")), "gpu-device-plugin-mps-control-daemon")
	if got := d.Spec.UpdateStrategy.Type; got != appsv1.OnDeleteDaemonSetStrategyType {
		t.Errorf("update strategy %s", got)
	}
}

func TestChartRefusesValues(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, values, want string }{
		{"several driver roots in one pod", "{config: {map: {default: \"\", a: \"flags: {nvidiaDriverRoot: /x}\"}}}",
			"several driver roots (/, /x)"},
		{"a label that chooses among no files", "{features: {nodeConfig: true}}", "neither is given"},
		{"two ConfigMaps", "{config: {name: a, map: {b: c}}}", "config.map and config.name are both given"},
		{"no file chosen", "{config: {map: {a: b, c: d}}}", "config.default is empty"},
		{"several files, and only a single one may be chosen",
			"{config: {fallbackStrategies: [single], map: {a: b, default: d}}}", "config.default is empty"},
		{"file called default that may not be chosen", "{config: {fallbackStrategies: [named], map: {a: b}}}",
			"config.default is empty"},
		{"unknown way to choose", "{config: {fallbackStrategies: [first], map: {a: b}}}", "fallbackStrategies"},
		{"file of a ConfigMap not chosen", "{config: {name: a}, features: {nodeConfig: false}}", "config.default is empty"},
		{"file that is not there", "{config: {default: x, map: {a: b, c: d}}}",
			`config.default is "x", and config.map has only a, c`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := renderChart(tt.values)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// mounts fails the test if a container mounts a volume that the pod lacks, or the pod has one that
// nobody mounts.
func mounts(t *testing.T, pod corev1.PodSpec) {
	t.Helper()
	var volumes, mounted []string
	for _, v := range pod.Volumes {
		volumes = append(volumes, v.Name)
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		mounted = append(mounted, m.Name)
	}
	if diff := cmp.Diff(volumes, mounted); diff != "" {
		t.Errorf("volumes (-pod +mounted):\n%s", diff)
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// decode returns the Kubernetes objects of a YAML stream, and fails the test at a kind, a field or
// a value that the API does not know.
func decode(t *testing.T, name string, data []byte) []runtime.Object {
	t.Helper()
	objects, err := decodeAll(data)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return objects
}

func decodeAll(data []byte) ([]runtime.Object, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, admissionv1.AddToScheme, resourcev1.AddToScheme, nodev1.AddToScheme,
		networkingv1.AddToScheme, batchv1.AddToScheme, monitoringv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	var objects []runtime.Object
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(data)))
	for {
		document := make([]byte, len(data))
		n, err := documents.Read(document)
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		if document = bytes.TrimSpace(document[:n]); len(document) == 0 {
			continue
		}
		object, _, err := strict.Decode(document, &schema.GroupVersionKind{}, nil)
		if err != nil {
			return nil, fmt.Errorf("%w\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// daemonSet returns the one DaemonSet of a name.
func daemonSet(t *testing.T, objects []runtime.Object, name string) *appsv1.DaemonSet {
	t.Helper()
	return only[*appsv1.DaemonSet](t, slices.DeleteFunc(slices.Clone(objects), func(o runtime.Object) bool {
		d, is := o.(*appsv1.DaemonSet)
		return is && d.Name != name
	}))
}

// only returns the one object of a type.
func only[T runtime.Object](t *testing.T, objects []runtime.Object) T {
	t.Helper()
	var found []T
	for _, o := range objects {
		if match, ok := o.(T); ok {
			found = append(found, match)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %T, want one", len(found), *new(T))
	}
	return found[0]
}
