package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

const containerd2Node = "{apiVersion: v1, kind: Node, metadata: {name: gpus, labels: {gpu: \"on\"}}, " +
	"status: {nodeInfo: {containerRuntimeVersion: \"containerd://2.1.4-k3s1\"}, runtimeHandlers: [{name: \"\"}, {name: runc}]}}"

// nodeWith is another Node, with this runtime.
func nodeWith(version, rest string) string {
	return "{apiVersion: v1, kind: Node, metadata: {name: other, labels: {kubernetes.io/os: linux}}, status: {nodeInfo: {containerRuntimeVersion: " +
		version + "}" + rest + "}}"
}

// class is a RuntimeClass nvidia with annotations.
func class(handler, annotations string) string {
	return "{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: nvidia, annotations: " + annotations +
		"}, handler: " + handler + "}"
}

const ofThisRelease = "{meta.helm.sh/release-name: gpu-device-plugin, meta.helm.sh/release-namespace: kube-system}"

// TestWithoutTheRuntime: the daemon has the node's /dev and the driver, containers get GPUs by CDI,
// and pods with the class start.
func TestWithoutTheRuntime(t *testing.T) {
	t.Parallel()
	for values, strategy := range map[string]string{
		"{runtime: none}": "cdi-cri",
		"{runtime: none, deviceListStrategy: [cdi-annotations, cdi-cri]}":                                            "cdi-annotations,cdi-cri",
		"{runtime: none, config: {map: {default: \"version: v1\\nflags: {plugin: {deviceListStrategy: envvar}}\"}}}": "cdi-cri",
	} {
		text, notes, err := lookedUp(values, containerd2Node)
		if err != nil {
			t.Fatal(err)
		}
		objects := decode(t, "chart", []byte(text))
		pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
		if got := grants(t, pod); !slices.Contains(got, "privileged") || !slices.Contains(got, "/dev rw") ||
			!slices.Contains(got, "/var/run/cdi rw") || pod.RuntimeClassName != nil {
			t.Errorf("%s: the pod may do %q, with the class %v", values, got, pod.RuntimeClassName)
		}
		environment := map[string]string{}
		for _, e := range pod.Containers[0].Env {
			environment[e.Name] = e.Value
		}
		if environment["DEVICE_LIST_STRATEGY"] != strategy || environment["NVIDIA_VISIBLE_DEVICES"] != "void" {
			t.Errorf("%s: the environment is %v", values, environment)
		}
		if !strings.Contains(notes, "a pod that relies on NVIDIA_VISIBLE_DEVICES alone starts without a GPU") {
			t.Errorf("%s: NOTES.txt does not say what changes:\n%s", values, notes)
		}
	}
}

// TestRuntimeClass: there is one with containerd's handler where the runtime is none, for the nodes
// of the release.
func TestRuntimeClass(t *testing.T) {
	t.Parallel()
	selected := &nodev1.Scheduling{NodeSelector: map[string]string{"gpu": "on"}}
	for values, want := range map[string]*nodev1.RuntimeClass{
		"{}":                                  nil,
		"{runtime: \"\", hostDev: true}":      nil,
		"{runtime: none, simulate: dgx-h100}": {Handler: "runc"},
		"{runtime: none, nodeSelector: {gpu: \"on\"}}": {Handler: "runc", Scheduling: selected},
	} {
		objects := decode(t, "chart", render(t, values))
		objects = slices.DeleteFunc(objects, func(o runtime.Object) bool { _, is := o.(*nodev1.RuntimeClass); return !is })
		if want == nil {
			if len(objects) > 0 {
				t.Errorf("%s: there is a RuntimeClass", values)
			}
			continue
		}
		got := only[*nodev1.RuntimeClass](t, objects)
		if got.Name != "nvidia" || got.Handler != want.Handler || cmp.Diff(want.Scheduling, got.Scheduling) != "" {
			t.Errorf("%s: %+v", values, got)
		}
	}
}

// TestRuntimeRefused: the handler of a class that is there cannot be changed, that of other
// runtimes is not known, and some values need NVIDIA's runtime.
func TestRuntimeRefused(t *testing.T) {
	t.Parallel()
	const theirs, unknown = "there is a RuntimeClass nvidia with the handler nvidia", "the Node other has the runtime"
	for _, tt := range []struct {
		values  string
		there   []string
		refused string // empty where it is rendered
	}{
		{"{runtime: none}", nil, ""}, // helm template
		{"{runtime: none}", []string{class("runc", ofThisRelease), containerd2Node}, ""},
		{"{runtime: none}", []string{class("nvidia", "{}")}, theirs},
		{"{runtime: none}", []string{class("nvidia", strings.Replace(ofThisRelease, "kube-system", "gpus", 1))}, theirs},
		{"{runtime: none}", []string{class("nvidia", strings.Replace(ofThisRelease, "gpu-device-plugin", "other", 1))},
			theirs},
		{"{hostDev: true, deviceListStrategy: cdi-cri}", []string{class("nvidia", "{}"), nodeWith("cri-o://1.34.1", "")}, ""},
		{"{runtime: none}", []string{containerd2Node, nodeWith("containerd://1.7.28", "")},
			unknown + ` "containerd://1.7.28" with the handlers []`},
		{"{runtime: none}", []string{containerd2Node, nodeWith("cri-o://1.34.1",
			", runtimeHandlers: [{name: crun}, {name: runc}]")}, unknown},
		{"{runtime: none}", []string{nodeWith("containerd://2.2.0", ", runtimeHandlers: [{name: \"\"}, {name: kata}]")},
			`"containerd://2.2.0" with the handlers [kata]`},
		{"{runtime: none}", []string{nodeWith("containerd://12.0.0", "")}, ""},
		{"{runtime: none}", []string{nodeWith("containerd://Unknown", "")}, unknown},
		{"{runtime: none}", []string{strings.Replace(plainNode, "name: a", "name: other", 1)}, unknown},
		{"{runtime: none, nodeSelector: {gpu: \"on\"}}", []string{containerd2Node, nodeWith("containerd://1.7.28", "")}, ""},
		{"{runtime: none}", []string{strings.Replace(nodeWith("containerd://1.7.28", ""), "os: linux", "os: windows", 1)},
			""},
		{"{runtime: none, deviceListStrategy: \"envvar,cdi-cri\"}", nil, "deviceListStrategy has envvar or volume-mounts"},
		{"{runtime: none, deviceListStrategy: [volume-mounts]}", nil, "deviceListStrategy has envvar or volume-mounts"},
		{"{runtime: none, hostDev: false}", nil, "hostDev is false"},
		{"{runtime: none, cdi: {enabled: false}}", nil, "cdi.enabled is false"},
		{"{runtime: none, mps: {enabled: true}}", nil, "GPUs are shared by MPS"},
		{"{runtime: none, securityContext: {runAsUser: 0}}", nil, "runtime is none, and securityContext is not privileged"},
		{"{runtime: none, securityContext: {privileged: true}}", nil, ""},
		{"{runtime: nvidia}", nil, "runtime"},
	} {
		_, _, err := lookedUp(tt.values, tt.there...)
		if tt.refused == "" && err != nil || tt.refused != "" && (err == nil || !strings.Contains(err.Error(), tt.refused)) {
			t.Errorf("%s with %v: error %v, want %q", tt.values, tt.there, err, tt.refused)
		}
	}
}
