package manifests

import (
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// lookedUp renders the chart in a cluster that has these objects.
func lookedUp(values string, there ...string) (rendered, notes string, err error) {
	out, notes, err := renderIn(newest, chartutil.DefaultVersionSet, values, there...)
	return string(out), notes, err
}

const (
	plainNode    = `{apiVersion: v1, kind: Node, metadata: {name: a, labels: {x: y}}}`
	operatorNode = `{apiVersion: v1, kind: Node, metadata: {name: b, labels: {nvidia.com/gpu.deploy.client: paused-for-mig-change}}}`
)

// set is a DaemonSet of a chart.
func set(namespace, name, release, chart, selector string) string {
	return `{apiVersion: apps/v1, kind: DaemonSet, metadata: {namespace: ` + namespace + `, name: ` + name +
		`, labels: {app.kubernetes.io/instance: ` + release +
		`, helm.sh/chart: ` + chart + `}}, spec: {selector: {matchLabels: ` + selector + `}}}`
}

// TestClientOfTheOperator: the pods have the label of the operator's clients in their nodeSelector
// only if that is asked for, and never where no node has it.
func TestClientOfTheOperator(t *testing.T) {
	t.Parallel()
	const label, refusal = "nvidia.com/gpu.deploy.client", "no Node has the label nvidia.com/gpu.deploy.client"
	for _, tt := range []struct {
		values string
		nodes  []string
		want   bool
		err    string
	}{
		{"{}", []string{operatorNode}, false, ""},
		{"{gpuOperatorClient: null, dra: {enabled: null}}", nil, false, ""},
		{"{gpuOperatorClient: true}", []string{plainNode, operatorNode}, true, ""},
		{"{gpuOperatorClient: true, nodeSelector: {a: b}}", nil, true, ""}, // helm template
		{"{gpuOperatorClient: true}", []string{plainNode}, false, refusal},
	} {
		text, _, err := lookedUp(tt.values, tt.nodes...)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s with %v: error %v, want %q", tt.values, tt.nodes, err, tt.err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		selector := daemonSet(t, decode(t, "chart", []byte(text)), "gpu-device-plugin").Spec.Template.Spec.NodeSelector
		if got := selector[label] == "true"; got != tt.want {
			t.Errorf("%s: the nodeSelector is %v", tt.values, selector)
		}
		if strings.Contains(tt.values, "a: b") && selector["a"] != "b" {
			t.Errorf("%s: the nodeSelector is %v", tt.values, selector)
		}
	}
}

// TestClaimsBesideTheOperator: with claims the pod stays when the operator changes its labels, and
// follows them. It has the driver in a way that outlives the driver container. A selector by which
// the pod would leave is refused.
func TestClaimsBesideTheOperator(t *testing.T) {
	t.Parallel()
	const claims = "dra: {enabled: true}, gpuOperatorClient: true"
	for _, tt := range []struct {
		values           string
		quiesce          string
		root, mount, env string // the node's folder, its place in the pod, and that of the driver there
	}{
		{"{" + claims + "}", "true", "/", "/driver-root", ""},
		{"{" + claims + ", nvidiaDriverRoot: /run/nvidia/driver}", "true", "/run/nvidia", "/driver-root",
			"/driver-root/driver"},
		{"{" + claims + ", nvidiaDriverRoot: /run/nvidia/driver/, features: {quiesce: true}}", "true", "/run/nvidia",
			"/driver-root", "/driver-root/driver"},
		{"{dra: {enabled: true, mode: plugin}, gpuOperatorClient: true}", "true", "/", "/driver-root", ""}, // on the way back
		{"{dra: {enabled: true}, nvidiaDriverRoot: /run/nvidia/driver}", "", "/run/nvidia/driver", "/driver-root", ""},
	} {
		text, _, err := lookedUp(tt.values, plainNode) // an operator before 26.7 has no label of clients
		if err != nil {
			t.Errorf("%s: %v", tt.values, err)
			continue
		}
		pod := daemonSet(t, decode(t, "chart", []byte(text)), "gpu-device-plugin").Spec.Template.Spec
		if len(pod.NodeSelector) != 1 || pod.Affinity == nil {
			t.Errorf("%s: the nodeSelector is %v, and the affinity %v", tt.values, pod.NodeSelector, pod.Affinity)
		}
		container := pod.Containers[0]
		environment := map[string]string{}
		for _, e := range container.Env {
			environment[e.Name] = e.Value
		}
		if environment["NODE_QUIESCE"] != tt.quiesce || environment["DRIVER_ROOT_CTR_PATH"] != tt.env {
			t.Errorf("%s: NODE_QUIESCE is %q and DRIVER_ROOT_CTR_PATH %q, want %q and %q", tt.values,
				environment["NODE_QUIESCE"],
				environment["DRIVER_ROOT_CTR_PATH"], tt.quiesce, tt.env)
		}
		root, mount := "", corev1.VolumeMount{}
		for _, v := range pod.Volumes {
			if v.Name == "driver-root" {
				root = v.HostPath.Path
			}
		}
		for _, m := range container.VolumeMounts {
			if m.Name == "driver-root" {
				mount = m
			}
		}
		if root != tt.root || mount.MountPath != tt.mount ||
			ptr.Deref(mount.MountPropagation, "") != corev1.MountPropagationHostToContainer {
			t.Errorf("%s: the driver's folder is %s, mounted as %+v", tt.values, root, mount)
		}
		if rule := "gpu-device-plugin.github.io/quiesce.state"; (tt.quiesce == "true") != strings.Contains(text, rule) {
			t.Errorf("%s: the admission policy allows %s: %v", tt.values, rule, tt.quiesce != "true")
		}
	}
	for values, want := range map[string]string{
		"{dra: {enabled: true}, nodeSelector: {nvidia.com/gpu.deploy.device-plugin: 'true'}}": "nodeSelector has the label " +
			"nvidia.com/gpu.deploy.device-plugin",
		"{" + claims + ", nodeSelector: {nvidia.com/gpu.deploy.client: 'true'}}": "nodeSelector has the label " +
			"nvidia.com/gpu.deploy.client",
		"{dra: {enabled: true, mode: split}, affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"{nodeSelectorTerms: [{matchExpressions: [{key: nvidia.com/gpu.deploy.dcgm-exporter, operator: Exists}]}]}}}}": "affinity has the label nvidia.com/gpu.deploy.dcgm-exporter",
		"{" + claims + ", features: {quiesce: false}}":                                            "features.quiesce is false",
		"{" + claims + ", nvidiaDriverRoot: /run/nvidia/driver, nvidiaDriverRootFolders: [/usr]}": "nvidiaDriverRootFolders is given",
	} {
		if _, _, err := lookedUp(values, operatorNode); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", values, err, want)
		}
	}
	if _, _, err := lookedUp("{"+claims+", nodeSelector: {nvidia.com/gpu.present: 'true'}, nvidiaDriverRootFolders: "+
		"[/usr]}", operatorNode); err != nil {
		t.Error(err)
	}
}

// TestSelectorOfAnotherChart: a DaemonSet that is there with another selector is refused before the
// API server refuses it, and the value that the message names helps.
func TestSelectorOfAnotherChart(t *testing.T) {
	t.Parallel()
	theirs := set("kube-system", "gpus", "nvdp", "nvidia-device-plugin-0.20.0",
		"{app.kubernetes.io/name: nvidia-device-plugin, app.kubernetes.io/instance: nvdp}")
	_, _, err := lookedUp("{fullnameOverride: gpus}", theirs)
	const value = `selectorLabelsOverride: {"app.kubernetes.io/instance":"nvdp","app.kubernetes.io/name":"nvidia-device-plugin"}`
	if err == nil || !strings.Contains(err.Error(), value) {
		t.Fatalf("error %v, want one with %s", err, value)
	}
	other := strings.Replace(theirs, "metadata: {", "metadata: {annotations: {meta.helm.sh/release-name: nvdp}, ", 1)
	if _, _, err := lookedUp("{fullnameOverride: gpus}", other); err == nil ||
		!strings.Contains(err.Error(), "is of the release nvdp: give another fullnameOverride") {
		t.Errorf("error %v", err)
	}
	mps := strings.Replace(other, "name: gpus", "name: gpus-mps-control-daemon", 1)
	if _, _, err := lookedUp("{fullnameOverride: gpus, mps: {enabled: true}}", mps); err == nil ||
		!strings.Contains(err.Error(), "is of the release nvdp") {
		t.Errorf("error %v", err)
	}
	ours := set("kube-system", "gpu-device-plugin", "gpu-device-plugin", "gpu-device-plugin-1",
		"{app.kubernetes.io/name: gpu-device-plugin, app.kubernetes.io/instance: gpu-device-plugin}")
	for values, there := range map[string]string{"{fullnameOverride: gpus, " + value + "}": theirs, "{}": ours} {
		if _, _, err := lookedUp(values, there); err != nil {
			t.Errorf("%s: %v", values, err)
		}
	}
}

// TestClassesOfAnotherDriver: a DeviceClass that is there, and not of this release, is refused with
// the value that helps.
func TestClassesOfAnotherDriver(t *testing.T) {
	t.Parallel()
	served := append(slices.Clone(chartutil.DefaultVersionSet), "resource.k8s.io/v1/DeviceClass")
	class := func(name, annotations string) string {
		return "{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: " + name + ", annotations: {" +
			annotations + "}}}"
	}
	ours := "meta.helm.sh/release-name: gpu-device-plugin, meta.helm.sh/release-namespace: kube-system"
	for _, tt := range []struct{ values, there, want string }{
		{"{dra: {enabled: true}}", class("gpu.nvidia.com", ""),
			"there is a DeviceClass gpu.nvidia.com, which is not of this release: set dra.deviceClasses to false"},
		{"{dra: {enabled: true}}", class("mig.nvidia.com", strings.Replace(ours, "kube-system", "other", 1)),
			"set dra.deviceClasses to false"},
		{"{dra: {enabled: true, deviceClasses: false}}", class("gpu.nvidia.com", ""), ""},
		{"{dra: {enabled: true, driverName: gpu.example.com}}", class("gpu.nvidia.com", ""), ""},
		{"{dra: {enabled: true}}", class("gpu.nvidia.com", ours), ""},
		{"{dra: {enabled: true, classes: [{name: big, selector: a}]}}", class("big", ""), "leave it out of dra.classes"},
		{"{}", class("gpu.nvidia.com", ""), ""},
	} {
		_, _, err := renderIn(newest, served, tt.values, tt.there)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s with %s: error %v, want %q", tt.values, tt.there, err, tt.want)
		}
	}
}

// TestNodeFeatureDiscoveryOfNVIDIAsChart: NOTES.txt warns where the removal of NVIDIA's release
// takes node-feature-discovery away.
func TestNodeFeatureDiscoveryOfNVIDIAsChart(t *testing.T) {
	t.Parallel()
	plugin := func(namespace string) string {
		return set(namespace, "nvdp-nvidia-device-plugin", "nvdp", "nvidia-device-plugin-0.20.0", "{a: b}")
	}
	nfd := func(namespace, release string) string {
		return set(namespace, release+"-node-feature-discovery-worker", release, "node-feature-discovery-0.19.0", "{a: b}")
	}
	for _, tt := range []struct {
		values string
		there  []string
		warns  bool
	}{
		{"{}", nil, false},
		{"{}", []string{plugin("kube-system"), nfd("kube-system", "nvdp")}, true},
		{"{}", []string{plugin("kube-system"), nfd("kube-system", "nfd")}, false},
		{"{}", []string{plugin("nvidia"), nfd("nvidia", "nvdp")}, false}, // no right in other namespaces is taken for granted
		{"{features: {labels: node}}", []string{plugin("nvidia"), nfd("nvidia", "nvdp")}, true},
	} {
		_, notes, err := lookedUp(tt.values, tt.there...)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(notes, "helm uninstall nvdp removes that"); got != tt.warns {
			t.Errorf("%s with %v: warned %t, want %t:\n%s", tt.values, tt.there, got, tt.warns, notes)
		}
	}
}

// TestKAIScheduler: NOTES.txt says what a KAI Scheduler that is there cannot do with claims, by the
// version of its operator.
func TestKAIScheduler(t *testing.T) {
	t.Parallel()
	operator := func(name, image string) string {
		return `{apiVersion: apps/v1, kind: Deployment, metadata: {namespace: kai-scheduler, name: ` + name +
			`}, spec: {template: {spec: {containers: [{name: operator, image: "` + image +
			`"}]}}}}`
	}
	const counters, plain = "KAI-Scheduler#2100", "KAI-Scheduler#937"
	for _, tt := range []struct {
		values, name, image string
		want                []string
	}{
		{"{dra: {enabled: true}}", "kai-operator", "ghcr.io/kai-scheduler/kai-scheduler/operator:v0.16.4",
			[]string{counters, plain}},
		{"{dra: {enabled: true}}", "kai-operator", "localhost:5000/operator:0.17.0-fips", []string{counters}},
		{"{dra: {enabled: true}}", "kai-operator", "localhost:5000/operator:v0.12.3", []string{counters}},
		{"{dra: {enabled: true}}", "kai-operator", "localhost:5000/operator:v0.18.0", nil},
		{"{dra: {enabled: true}}", "kai-operator", "localhost:5000/operator@sha256:0123", nil},
		{"{dra: {enabled: true}}", "another", "localhost:5000/operator:v0.16.4", nil},
		{"{}", "kai-operator", "localhost:5000/operator:v0.16.4", nil},
	} {
		_, notes, err := lookedUp(tt.values, operator(tt.name, tt.image))
		if err != nil {
			t.Fatal(err)
		}
		for _, words := range []string{counters, plain} {
			if got, want := strings.Contains(notes, words), slices.Contains(tt.want, words); got != want {
				t.Errorf("%s with %s of %s: %s is named: %t, want %t:\n%s", tt.values, tt.image, tt.name, words, got, want, notes)
			}
		}
	}
}

// TestGPUCluster: NOTES.txt names a GPUCluster of NVIDIA's GPU operator, whose driver gives out the
// same GPUs.
func TestGPUCluster(t *testing.T) {
	t.Parallel()
	const there, says = "{apiVersion: nvidia.com/v1alpha1, kind: GPUCluster, metadata: {name: gpu-cluster}}", "The GPUCluster gpu-cluster of NVIDIA's GPU operator"
	served := append(slices.Clone(chartutil.DefaultVersionSet), "nvidia.com/v1alpha1/GPUCluster")
	for _, tt := range []struct {
		served chartutil.VersionSet
		there  []string
		want   bool
	}{{chartutil.DefaultVersionSet, []string{there}, false}, {served, nil, false}, {served, []string{there}, true}} {
		_, notes, err := renderIn(newest, tt.served, "{}", tt.there...)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(notes, says) != tt.want {
			t.Errorf("with %v: %q is %t in NOTES.txt, want %t:\n%s", tt.there, says, !tt.want, tt.want, notes)
		}
	}
}

// TestNetworkPolicy: only who is named reaches the port of the metrics.
func TestNetworkPolicy(t *testing.T) {
	t.Parallel()
	for values, want := range map[string][]string{
		"{}":                         {"", "NetworkPolicy"},
		"{metrics: {allowFrom: []}}": {"policyTypes: [Ingress]", "ports:\n        - {protocol"},
		"{metrics: {allowFrom: [{ipBlock: {cidr: 192.0.2.0/24}}]}}": {"port: 9400}\n      from:\n        - ipBlock:\n",
			"ingress: []"},
	} {
		text := string(render(t, values))
		_, policy, found := strings.Cut(text, "kind: NetworkPolicy")
		if !found {
			policy = text
		}
		policy, _, _ = strings.Cut(policy, "\n---")
		if !strings.Contains(policy, want[0]) || strings.Contains(policy, want[1]) {
			t.Errorf("%s: want %q and not %q in:\n%s", values, want[0], want[1], policy)
		}
	}
}

// TestOpenShift: the account of the pods may use what the value names.
func TestOpenShift(t *testing.T) {
	t.Parallel()
	for values, account := range map[string]string{"openshiftSCC: privileged": "default",
		"openshiftSCC: privileged, features: {events: true}": "gpu-device-plugin"} {
		text := string(render(t, "{"+values+"}"))
		if !strings.Contains(text, `name: "system:openshift:scc:privileged"`) ||
			!strings.Contains(text, "{kind: ServiceAccount, name: "+account+",") {
			t.Errorf("%s renders no binding for %s:\n%s", values, account, text)
		}
	}
	if strings.Contains(string(render(t, "{}")), "openshift") {
		t.Error("the defaults bind an SCC")
	}
}
