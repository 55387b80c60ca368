package manifests

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// A feature is a setting of the chart, and what the pod may do because of it.
type feature struct {
	values string // without braces
	grants []string
}

// features can be set in any combination.
var features = []feature{
	{"migStrategy: mixed", []string{"SYS_ADMIN", "escalation"}},
	{"deviceListStrategy: [volume-mounts, envvar]", []string{"SYS_ADMIN", "escalation"}},
	{"cdi: {enabled: true}", []string{"/var/run/cdi rw"}},
	{"kernelLog: true", []string{"SYSLOG", "/dev/kmsg ro"}},
	{"preStartChecks: clean", []string{"hostPID"}},
	{"preStartChecks: reset-clocks", []string{"SYS_ADMIN", "escalation", "hostPID"}},
	{"mps: {enabled: true}", []string{"/run/nvidia/mps rw", "/run/nvidia/mps/shm rw"}},
	{"compatWithCPUManager: true", []string{"privileged"}},
	{"mig: {enabled: true, layout: all-balanced}", []string{"privileged", "/dev rw"}},
	{"features: {labels: file}", []string{"/etc/kubernetes/node-feature-discovery/features.d rw"}},
}

// always is what the pod may do whatever the values are.
var always = []string{
	"/var/lib/kubelet/device-plugins rw", "/var/lib/kubelet/pod-resources ro", "/ ro", "/var/lib/gpu-device-plugin rw",
}

// grants returns what a pod may do that any pod may not: folders of the node, capabilities and the like.
func grants(t *testing.T, pod corev1.PodSpec) []string {
	t.Helper()
	found := map[string]bool{
		"hostPID": pod.HostPID, "hostNetwork": pod.HostNetwork, "hostIPC": pod.HostIPC,
		"token":              pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken,
		"service account":    pod.ServiceAccountName != "default",
		"several containers": len(pod.Containers)+len(pod.InitContainers) != 1,
	}
	c := pod.Containers[0]
	for _, p := range c.Ports {
		found["hostPort"] = found["hostPort"] || p.HostPort != 0
	}
	context := c.SecurityContext
	if context.Privileged != nil && *context.Privileged {
		found["privileged"] = true
	} else {
		found["escalation"] = context.AllowPrivilegeEscalation == nil || *context.AllowPrivilegeEscalation
		found["writable root"] = context.ReadOnlyRootFilesystem == nil || !*context.ReadOnlyRootFilesystem
		found["no seccomp profile"] = context.SeccompProfile == nil || context.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault
		found["all capabilities of containers"] = !slices.Equal(context.Capabilities.Drop, []corev1.Capability{"ALL"})
		for _, added := range context.Capabilities.Add {
			found[string(added)] = true
		}
	}
	for _, v := range pod.Volumes {
		if v.HostPath == nil {
			continue
		}
		for _, m := range c.VolumeMounts {
			if m.Name == v.Name {
				how := "rw"
				if m.ReadOnly {
					how = "ro"
				}
				found[v.HostPath.Path+" "+how] = true
			}
		}
	}
	maps.DeleteFunc(found, func(_ string, is bool) bool { return !is })
	return slices.Sorted(maps.Keys(found))
}

// TestGrants: with each combination of features the pod may do what these need, and nothing else.
func TestGrants(t *testing.T) {
	t.Parallel()
	for combination := range 1 << len(features) {
		values, want := []string{}, map[string]bool{}
		for _, g := range always {
			want[g] = true
		}
		for i, f := range features {
			if combination&(1<<i) == 0 {
				continue
			}
			values = append(values, f.values)
			for _, g := range f.grants {
				want[g] = true
			}
		}
		if want["privileged"] { // which has all of them
			for _, g := range []string{"SYS_ADMIN", "SYSLOG", "escalation"} {
				delete(want, g)
			}
		}
		if want["/dev rw"] {
			delete(want, "/dev/kmsg ro") // it is in that folder
		}
		text := "{" + strings.Join(values, ", ") + "}"
		pod := daemonSet(t, decode(t, "chart", render(t, text)), "gpu-device-plugin").Spec.Template.Spec
		if diff := cmp.Diff(slices.Sorted(maps.Keys(want)), grants(t, pod)); diff != "" {
			t.Errorf("%s: grants (-want +got):\n%s", text, diff)
		}
	}
}

// TestGrantsOfFiles: what a configuration file asks for is granted where the chart can read it, and where it cannot, so that it works.
// Values that few give are here, too.
func TestGrantsOfFiles(t *testing.T) {
	t.Parallel()
	file := func(flags string) string { return fmt.Sprintf("{config: {map: {a: %q}}}", "flags: "+flags) }
	for _, tt := range []struct {
		values string
		want   []string
	}{
		{file("{plugin: {deviceListStrategy: cdi-cri}}"), []string{"/var/run/cdi rw"}},
		{file("{plugin: {deviceListStrategy: [envvar, cdi-annotations]}}"), []string{"/var/run/cdi rw"}},
		{file("{plugin: {deviceListStrategy: envvar}}"), nil},
		{file("{migStrategy: mixed}"), []string{"SYS_ADMIN", "escalation"}},
		{`{config: {map: {a: "mig: {enabled: true}"}}}`, []string{"privileged", "/dev rw"}},
		{"{mig: {enabled: true}, hostDev: false}", []string{"SYS_ADMIN", "escalation"}},
		{"{mig: {enabled: true}, simulate: dgx-h100}", []string{"SYS_ADMIN", "escalation"}},
		{"{mig: {enabled: true}, securityContext: {privileged: true}}", []string{"privileged", "/dev rw"}},
		{"{hostDev: true, kernelLog: true}", []string{"privileged", "/dev rw"}},
		{`{config: {map: {a: "mig: {enabled: true}"}}, mig: {enabled: false}}`, nil},
		{"{mig: {enabled: true, disruption: pause}}", []string{"privileged", "/dev rw", "hostPID", "service account", "token"}},
		{"{mig: {enabled: true, disruption: pause}, hostDev: false}", []string{"SYS_ADMIN", "SYS_PTRACE", "escalation", "hostPID", "service account", "token"}},
		{"{mig: {disruption: pause}}", nil},
		{"{mig: {layout: all-balanced, replace: true, label: true, disruption: evict, config: {name: layouts}}}", nil},
		{"{deviceListStrategy: envvar, " + file("{plugin: {deviceListStrategy: cdi-cri}}")[1:], nil},
		{"{devicePlugin: {enableHostNetwork: true}}", []string{"hostNetwork"}},
		{"{deviceListStrategy: [cdi-cri]}", []string{"/var/run/cdi rw"}},
		{"{deviceListStrategy: cdi-cri, cdi: {enabled: false}}", nil},
		{"{migStrategy: none, config: {name: mine, default: a}, features: {nodeConfig: false}}", []string{"/var/run/cdi rw", "/run/nvidia/mps rw"}},
	} {
		pod := daemonSet(t, decode(t, "chart", render(t, tt.values)), "gpu-device-plugin").Spec.Template.Spec
		want := slices.Sorted(slices.Values(append(slices.Clone(always), tt.want...)))
		if diff := cmp.Diff(want, grants(t, pod)); diff != "" {
			t.Errorf("%s: grants (-want +got):\n%s", tt.values, diff)
		}
	}
}

// TestHostDevNeedsPrivileges: the node's devices are of no use to a container that may not open them.
func TestHostDevNeedsPrivileges(t *testing.T) {
	t.Parallel()
	if _, err := renderChart("{hostDev: true, securityContext: {runAsUser: 0}}"); err == nil || !strings.Contains(err.Error(), "securityContext is not privileged") {
		t.Errorf("error %v", err)
	}
	pod := daemonSet(t, decode(t, "chart", render(t, "{mig: {enabled: true}, securityContext: {runAsUser: 0, capabilities: {drop: [ALL], add: [SYS_ADMIN]}}}")), "gpu-device-plugin").Spec.Template.Spec
	if all := grants(t, pod); slices.Contains(all, "/dev rw") {
		t.Errorf("grants %v", all)
	}
}

// TestGrantsAreExplained: values.yaml and docs/security.md name each grant.
func TestGrantsAreExplained(t *testing.T) {
	t.Parallel()
	words := map[string]string{ // as the values of the chart call them
		"escalation": "more privileges", "/var/lib/kubelet/device-plugins rw": "device-plugins, rw", "/ ro": "nvidiaDriverRoot, ro",
		"/var/lib/kubelet/pod-resources ro": "pod-resources, ro", "/var/lib/gpu-device-plugin rw": "/var/lib/gpu-device-plugin, rw",
		"/var/run/cdi rw": "/var/run/cdi", "/dev rw": "/dev", "/dev/kmsg ro": "/dev/kmsg", "/run/nvidia/mps rw": "MPS state", "/run/nvidia/mps/shm rw": "shm",
		"/etc/kubernetes/node-feature-discovery/features.d rw": "/etc/kubernetes/node-feature-discovery/features.d",
	}
	all := append(slices.Clone(always), "hostNetwork", "SYS_PTRACE")
	for _, f := range features {
		all = append(all, f.grants...)
	}
	values, security := string(read(t, filepath.Join(chart, "values.yaml"))), string(read(t, "../../docs/security.md"))
	for _, g := range all {
		word := g
		if words[g] != "" {
			word = words[g]
		}
		if !strings.Contains(values, word) {
			t.Errorf("values.yaml does not say %q, for the grant %s", word, g)
		}
		if !strings.Contains(security, strings.TrimSuffix(strings.TrimSuffix(word, ", rw"), ", ro")) {
			t.Errorf("docs/security.md does not say %q, for the grant %s", word, g)
		}
	}
}

// TestNothingIsAskedForWithoutItsGrant: what a variable, an argument or a security context of one's own leaves the pod without is refused, with
// the value that grants it.
func TestNothingIsAskedForWithoutItsGrant(t *testing.T) {
	t.Parallel()
	env := func(name, value string) string {
		return fmt.Sprintf("devicePlugin: {containers: {main: {env: [{name: %s, value: %q}]}}}", name, value)
	}
	for values, want := range map[string]string{
		env("DEVICE_LIST_STRATEGY", "cdi-cri"):                                           "set deviceListStrategy or cdi.enabled",
		env("DEVICE_LIST_STRATEGY", "cdi-cri") + ", cdi: {enabled: true}":                "",
		env("DEVICE_LIST_STRATEGY", "envvar"):                                            "",
		env("DEVICE_LIST_STRATEGY", "volume-mounts"):                                     "set deviceListStrategy",
		env("MIG_STRATEGY", "mixed"):                                                     "set migStrategy",
		env("MIG_STRATEGY", "mixed") + ", migStrategy: single":                           "",
		env("MIG_STRATEGY", "none"):                                                      "",
		env("NODE_LABELS", "node"):                                                       "set features.labels",
		env("NODE_LABELS", "off"):                                                        "",
		env("DRA_MODE", "split"):                                                         "set dra.enabled",
		"extraArgs: [--device-list-strategy=cdi-annotations]":                            "set deviceListStrategy or cdi.enabled",
		"extraArgs: [--mig-strategy=mixed]":                                              "set migStrategy",
		"extraArgs: [--pre-start-checks=reset-ecc], hostPID: true":                       "set preStartChecks",
		"extraArgs: [--kernel-log=true]":                                                 "set kernelLog",
		"extraArgs: [--mig-enabled=true]":                                                "set mig.enabled",
		"extraArgs: [--node-events=pods]":                                                "set features.events",
		"extraArgs: [--v=5, --mig-strategy=none]":                                        "",
		"migStrategy: mixed, securityContext: {runAsUser: 0}":                            "add capabilities: {add: [SYS_ADMIN]}",
		"migStrategy: mixed, securityContext: {capabilities: {add: [SYS_ADMIN]}}":        "",
		"migStrategy: mixed, securityContext: {privileged: true}":                        "",
		"securityContext: {runAsUser: 0}":                                                "",
		"preStartChecks: clean, " + env("PRE_START_CHECKS", "clean") + ", hostDev: true": "",
	} {
		_, err := renderChart("{" + values + "}")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", values, err, want)
		}
	}
}
