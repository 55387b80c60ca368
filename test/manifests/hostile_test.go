package manifests

import (
	"bytes"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

// hostile are values, a YAML text each, that are wrong for nearly all keys, or that YAML takes for
// something else than was meant.
var hostile = []string{"null", `""`, "20240101", `"1e3"`, "[]", "{}", `"a: b"`, `"` + strings.Repeat("x", 300) + `"`}

// everything has most of the chart on.
const everything = `{features: {labels: nodeFeature, events: pods, condition: true, conditionTypes: [A], taint: true, changeTaint: true, startupTaint: true, quiesce: true, healthEvents: unix:///a/b, nodeConfig: true},
  config: {map: {a: "version: v1", b: "version: v1"}, default: a}, mps: {enabled: true}, kernelLog: true, preStartChecks: reset-clocks, mig: {enabled: true, label: true, disruption: pause},
  dra: {enabled: true, claimStatus: true, dynamicMIG: true}, metrics: {allowFrom: []},
  monitoring: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboard: {enabled: true}}, openshiftSCC: privileged, nodeSelector: {a: b}, rebootFile: /var/run/reboot-required, repair: idle, rollout: {slots: 1}, driver: {version: "580.95.05"}}`

// ofKubernetes are the values whose content the API server holds to its own types.
var ofKubernetes = []string{
	"affinity", "devicePlugin.resources", "mps.resources", "mps.updateStrategy", "resources", "readinessProbe", "livenessProbe", "podSecurityContext", "securityContext",
	"tolerations", "imagePullSecrets", "metrics.allowFrom", "units.hamiNamespaces",
}

// takes returns why the API server would not take objects.
func takes(rendered []byte) error {
	for _, sign := range []string{"<nil>", "%!", "map["} {
		if i := bytes.Index(rendered, []byte(sign)); i >= 0 {
			return fmt.Errorf("%q is rendered: %s", sign, rendered[max(0, i-60):min(len(rendered), i+60)])
		}
	}
	objects, err := decodeAll(rendered)
	if err != nil {
		return err
	}
	for _, o := range objects {
		object, err := meta.Accessor(o)
		if err != nil {
			return err
		}
		if wrong := validation.IsDNS1123Subdomain(object.GetName()); len(wrong) > 0 {
			return fmt.Errorf("%T: the name %q: %s", o, object.GetName(), wrong[0])
		}
		if wrong := validation.IsDNS1123Label(object.GetNamespace()); object.GetNamespace() != "" && len(wrong) > 0 {
			return fmt.Errorf("%T: the namespace %q: %s", o, object.GetNamespace(), wrong[0])
		}
		labels := maps.Clone(object.GetLabels())
		if set, is := o.(*appsv1.DaemonSet); is {
			maps.Copy(labels, set.Spec.Template.Labels)
			if err := takesPod(set); err != nil {
				return err
			}
		}
		for key, value := range labels {
			if wrong := append(validation.IsValidLabelValue(value), validation.IsQualifiedName(key)...); len(wrong) > 0 {
				return fmt.Errorf("%T %s: the label %s=%q: %s", o, object.GetName(), key, value, wrong[0])
			}
		}
	}
	return nil
}

func takesPod(set *appsv1.DaemonSet) error {
	pod := set.Spec.Template.Spec
	for _, v := range pod.Volumes {
		if v.HostPath != nil && (!path.IsAbs(v.HostPath.Path) || slices.Contains(strings.Split(v.HostPath.Path, "/"), "..")) {
			return fmt.Errorf("the volume %s has the path %q", v.Name, v.HostPath.Path)
		}
	}
	for _, c := range slices.Concat(pod.Containers, pod.InitContainers) {
		for _, p := range c.Ports {
			if p.ContainerPort == 0 {
				return fmt.Errorf("%s: the port %s has no number", set.Name, p.Name)
			}
		}
		if strings.ContainsAny(c.Image, "+ \n") || strings.HasPrefix(c.Image, ":") || strings.HasSuffix(c.Image, ":") {
			return fmt.Errorf("%s: the image is %q", set.Name, c.Image)
		}
	}
	for kind, name := range map[string]string{"account": pod.ServiceAccountName, "priority class": pod.PriorityClassName} {
		if wrong := validation.IsDNS1123Subdomain(name); name != "" && len(wrong) > 0 {
			return fmt.Errorf("%s: the %s %q: %s", set.Name, kind, name, wrong[0])
		}
	}
	return nil
}

// TestHostileValues: with anything in the place of any value the chart renders what an API server
// takes, or is refused by its schema or in a sentence, and never ends in an error of a template.
func TestHostileValues(t *testing.T) {
	if testing.Short() {
		t.Skip("a render for each value")
	}
	t.Parallel()
	var defaults map[string]any
	if err := yaml.Unmarshal(read(t, chart+"/values.yaml"), &defaults); err != nil {
		t.Fatal(err)
	}
	try := func(key, value string) {
		keys := strings.Split(key, ".")
		text := "{" + strings.Join(keys, ": {") + ": " + value + strings.Repeat("}", len(keys))
		var values, base map[string]any
		if err := yaml.Unmarshal([]byte(text), &values); err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal([]byte(everything), &base); err != nil {
			t.Fatal(err)
		}
		merged, err := yaml.Marshal(overlay(base, values))
		if err != nil {
			t.Fatal(err)
		}
		rendered, _, err := renderFor(newest, string(merged))
		switch {
		case err != nil && !strings.Contains(err.Error(), "execution error at") &&
			!strings.Contains(err.Error(), "don't meet the specifications of the schema"):
			t.Errorf("%s: %s: %v", key, value, err)
		case err != nil:
		case slices.Contains(ofKubernetes, key) && strings.ContainsAny(value, "[{"):
		default:
			if err := takes(rendered); err != nil {
				t.Errorf("%s: %.40s: %v", key, value, err)
			}
		}
	}
	var walk func(prefix string, values map[string]any)
	walk = func(prefix string, values map[string]any) {
		for key, value := range values {
			inner, is := value.(map[string]any)
			if is && len(inner) > 0 && !slices.Contains(ofKubernetes, prefix+key) {
				walk(prefix+key+".", inner)
			}
			for _, v := range hostile {
				try(prefix+key, v)
			}
		}
	}
	walk("", defaults)
}

// overlay puts the values of b over those of a; null is a value.
func overlay(a, b map[string]any) map[string]any {
	for key, value := range b {
		inner, is := value.(map[string]any)
		below, was := a[key].(map[string]any)
		if is && was {
			value = overlay(below, inner)
		}
		a[key] = value
	}
	return a
}

// TestHostileReleases: a release of any name that Helm takes, in any namespace, has objects that
// the API server takes.
func TestHostileReleases(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 53)
	dotted := strings.Repeat("x", 43) + "." + strings.Repeat("y", 9)
	namespaces := []string{"kube-system", "123", "1e3", "true"}
	for i, name := range []string{
		"123", "true", "null", "1e3", "0x1", "on", "a.b", long, dotted, long[:51] + ".y", strings.Repeat("a.", 26) +
			"b", strings.Repeat("a-", 26) + "b",
	} {
		namespace := namespaces[i%len(namespaces)]
		rendered, _, err := renderAs(chartutil.ReleaseOptions{Name: name, Namespace: namespace}, newest,
			chartutil.DefaultVersionSet, everything)
		if err == nil {
			err = takes(rendered)
		}
		if err != nil {
			t.Errorf("release %s in %s: %v", name, namespace, err)
		}
	}
}

// TestHostileFiles: a file of config.map in which the chart would not find what needs rights is
// refused.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"x": "not a mapping of YAML", "[1]": "not a mapping of YAML", "a: b: c": "not a mapping of YAML", "flags: x": "has flags, which must be a mapping",
		"flags: {plugin: 3}": "has flags.plugin, which must be a mapping", "mig: []": "has mig, which must be a mapping", "units: 5": "has units,",
		"selectors: 5": "selectors, which must be a list", "selectors: [5]": "each of which must be a mapping",
		"Flags: {migStrategy: mixed}": "has the key Flags: write flags", "flags: {migstrategy: mixed}": "has the key migstrategy: write migStrategy",
		"": "", "  flags: {}": "", "{}": "", "# nothing": "", "flags:": "", "{flags: {migStrategy: none}, resources: {gpus: []}}": "",
	} {
		rendered, err := renderChart(fmt.Sprintf("{config: {map: {a: %q}}}", file))
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: error %v, want %q", file, err, want)
		}
		if want == "" && err == nil {
			err = takes(rendered)
		}
		if want == "" && err != nil {
			t.Errorf("%q: %v", file, err)
		}
	}
}

// TestHostileNames: a name that Kubernetes does not take is refused with the value that gives it.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"fullnameOverride: A": "set fullnameOverride", "fullnameOverride: 'a: b'": "set fullnameOverride", "nameOverride: gpuPlugin": "set fullnameOverride",
		"nameOverride: gpuPlugin, fullnameOverride: x": "", "nameOverride: 'a b', fullnameOverride: x": "set nameOverride",
		"namespaceOverride: a.b": "set namespaceOverride", "features: {events: true}, serviceAccount: {name: a_b}": "set serviceAccount.name",
		"priorityClassName: a b": "set priorityClassName", "runtimeClassName: '123'": "", "fullnameOverride: '123'": "",
		"fullnameOverride: " + strings.Repeat("a.", 40): "",
	} {
		rendered, err := renderChart("{" + values + "}")
		if want == "" && err == nil {
			err = takes(rendered)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", values, err, want)
		}
	}
}

// ungranted are the options that need no right, folder or port that a value of the chart gives, or
// that say where something is in the container.
var ungranted = strings.Fields(`FAIL_ON_INIT_ERROR NVIDIA_DEV_ROOT LIBRARY_SEARCH_PATH PASS_DEVICE_SPECS DEVICE_ID_STRATEGY GDRCOPY_ENABLED GDS_ENABLED MOFED_ENABLED
	CDI_ANNOTATION_PREFIX NVIDIA_CDI_HOOK_PATH DRIVER_ROOT_CTR_PATH MPS_ROOT MPS_ROOT_CTR_PATH SHARED_DEVICES_ALLOCATION_POLICY DEVICE_DISCOVERY_STRATEGY
	IMEX_CHANNEL_IDS IMEX_REQUIRED KUBELET_SOCKET CONFIG_FILE CDI_FEATURE_FLAGS CDI_DISABLE_HOOKS POD_RESOURCES_SOCKET CONTROL_SOCKET COMPATIBILITY
	LOGGING_FORMAT STATE_DIR CDI_DIR SIMULATE RECORD RECORD_REDACT GPU_METRICS GPU_METRICS_INTERVAL GPU_METRICS_PCIE_THROUGHPUT
	GPU_METRICS_HOSTNAME_LABEL GPU_METRICS_POD_UID NODE_NAME VOID_VISIBLE_DEVICES HEALTH_INTERVAL DRIVER_AT_LEAST DRIVER_BELOW DRIVER_SOURCE DRIVER_SHA256 VALIDATE KUBECONFIG NODE_LABEL DEFAULT_CONFIG
	FALLBACK_STRATEGIES NODE_LABELS_FILE NODE_LABELS_TIMESTAMP MACHINE_TYPE_FILE NAMESPACE POD_NAME MIG_LAYOUT MIG_CONFIG_FILE MIG_REPLACE
	MIG_RESET_IN_VM MIG_EVICT_TIMEOUT ROLLOUT_SLOTS ROLLOUT_WAVE_LABEL ROLLOUT_WAVE_SOAK ROLLOUT_TOPOLOGY_LABEL ROLLOUT_WINDOWS
	HEALTH_EVENTS_STRATEGY HEALTH_EVENTS_MACHINE DRA_SWITCH_MIG DRA_SHARES DRA_SHARE_BY DRA_METADATA`)

// TestEachOptionIsJudged: each option of the daemon is among those for which the chart looks
// whether the pod has the rights, or among those that need none.
func TestEachOptionIsJudged(t *testing.T) {
	t.Parallel()
	_, rows, _ := strings.Cut(string(read(t, chart+"/templates/_helpers.tpl")),
		`define "gpu-device-plugin.refuseUngranted"`)
	rows, _, _ = strings.Cut(rows, "{{- $pattern :=")
	known := slices.Clone(ungranted)
	options := regexp.MustCompile("(?m)^[|] `--[^|]*[|] (`[A-Z0-9_`, ]+`) [|]").FindAllStringSubmatch(string(read(t,
		"../../docs/reference.md")), -1)
	for _, o := range options {
		names := strings.Split(strings.ReplaceAll(o[1], "`", ""), ", ")
		judged := slices.ContainsFunc(names, func(name string) bool { return strings.Contains(rows, fmt.Sprintf("(list %q", name)) })
		if judged == slices.Contains(ungranted, names[0]) {
			t.Errorf("%s: the chart judges it: %t, and so says the list of those that need no right", names[0], judged)
		}
		known = slices.DeleteFunc(known, func(name string) bool { return name == names[0] })
	}
	if len(known) > 0 {
		t.Errorf("%v are no options", known)
	}
}
