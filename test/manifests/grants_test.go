package manifests

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
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

// grants returns what a pod may do that any pod may not: folders of the node, capabilities and the
// like.
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
		found["no seccomp profile"] = context.SeccompProfile == nil ||
			context.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault
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

// TestFoldersOfTheDriver: with nvidiaDriverRootFolders the pod sees these folders of the driver
// root alone, and the driver of each of these layouts is found through them as it is through the
// whole root.
func TestFoldersOfTheDriver(t *testing.T) {
	t.Parallel()
	const version = "550.54.15"
	compiler := filepath.Join(t.TempDir(), "library.so")
	if out, err := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", "-x", "c", "-o", compiler,
		os.DevNull).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	library := string(read(t, compiler))
	for name, tt := range map[string]struct {
		values, root string
		files        map[string]string // path → text, or the target of a link after ->
		want         []string          // what the pod sees
	}{
		"merged /usr": {"nvidiaDriverRootFolders: [/usr, /lib, /lib64, /etc]", "/", map[string]string{
			"usr/lib64/libcuda.so." + version: library, "usr/lib64/libnvidia-ml.so." +
				version: library, "usr/lib64/libnvidia-ml.so.1": "->libnvidia-ml.so." + version,
			"lib": "->usr/lib", "lib64": "->usr/lib64", "usr/lib/firmware/nvidia/" + version +
				"/gsp_ga10x.bin": "", "usr/bin/nvidia-smi": "",
			"etc/vulkan/icd.d/nvidia_icd.json": "", "root/secret": "",
		}, []string{"/usr ro", "/lib ro", "/lib64 ro", "/etc ro"}},
		"Debian's alternatives": {"nvidiaDriverRootFolders: [/usr, /etc/alternatives]", "/", map[string]string{
			"usr/lib/x86_64-linux-gnu/libcuda.so." + version: "->/etc/alternatives/nvidia--libcuda.so", "etc/alternatives/nvidia--libcuda.so": "->/usr/lib/nvidia/libcuda.so." + version,
			"usr/lib/nvidia/libcuda.so." + version: library, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->/etc/alternatives/nvidia--libnvidia-ml.so.1",
			"etc/alternatives/nvidia--libnvidia-ml.so.1": "->/usr/lib/nvidia/libnvidia-ml.so.1", "usr/lib/nvidia/libnvidia-ml.so.1": library, "etc/shadow": "",
		}, []string{"/usr ro", "/etc/alternatives ro"}},
		"a driver container": {"nvidiaDriverRoot: /run/nvidia/driver, nvidiaDriverRootFolders: [/usr]", "/run/nvidia/driver",
			map[string]string{
				"usr/lib64/libcuda.so." + version: library, "usr/lib64/libnvidia-ml.so.1": library, "etc/shadow": "",
			}, []string{"/run/nvidia/driver/usr ro"}},
	} {
		pod := daemonSet(t, decode(t, name, render(t, "{"+tt.values+"}")), "gpu-device-plugin").Spec.Template.Spec
		want := append(slices.DeleteFunc(slices.Clone(always), func(g string) bool { return g == "/ ro" }), tt.want...)
		slices.Sort(want)
		if diff := cmp.Diff(want, grants(t, pod)); diff != "" {
			t.Errorf("%s: grants (-want +got):\n%s", name, diff)
		}
		host := makeTree(t, tt.files)
		seen := mounted(t, pod, tt.root, host)
		whole, err := driverroot.Find(os.DirFS(host), version)
		if err != nil || len(whole.Libraries) == 0 {
			t.Fatalf("%s: %+v, %v", name, whole, err)
		}
		parts, err := driverroot.Find(os.DirFS(seen), version)
		if diff := cmp.Diff(whole, parts, cmpopts.IgnoreUnexported(driverroot.Files{}),
			cmpopts.IgnoreUnexported(driverroot.Library{})); diff != "" || err != nil {
			t.Errorf("%s: %v, files (-whole root +folders):\n%s", name, err, diff)
		}
		if found, _ := filepath.Rel(seen, driverroot.Locate(seen, driverroot.NVML)); !strings.Contains(found,
			"libnvidia-ml.so") {
			t.Errorf("%s: NVML is at %q", name, found)
		}
		for _, secret := range []string{"root/secret", "etc/shadow"} {
			if _, err := os.Stat(filepath.Join(seen, secret)); err == nil {
				t.Errorf("%s: the pod sees %s", name, secret)
			}
		}
	}
	for _, folder := range []string{"/", "usr", "/usr/", "/usr/../etc", "//usr"} {
		if _, err := renderChart("{nvidiaDriverRootFolders: [" + folder + "]}"); err == nil {
			t.Errorf("the folder %s is accepted", folder)
		}
	}
}

// makeTree makes a folder with these files; a text after -> is the target of a link.
func makeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if target, isLink := strings.CutPrefix(text, "->"); isLink {
			err = errors.Join(err, os.Symlink(target, path))
		} else {
			err = errors.Join(err, os.WriteFile(path, []byte(text), 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// mounted returns a folder that is for a process here what /driver-root is in the pod, of a host
// whose driver root is at root and has the content of host. A mount follows links at its source; so
// do links to it.
func mounted(t *testing.T, pod corev1.PodSpec, root, host string) string {
	t.Helper()
	dir := t.TempDir()
	for _, m := range pod.Containers[0].VolumeMounts {
		below, isDriver := strings.CutPrefix(m.MountPath, "/driver-root")
		if !isDriver {
			continue
		}
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		from, inRoot := strings.CutPrefix(pod.Volumes[i].HostPath.Path, strings.TrimSuffix(root, "/"))
		if !inRoot {
			t.Fatalf("%s of the host is not in %s", pod.Volumes[i].HostPath.Path, root)
		}
		source, err := driverroot.ResolveIn(host, from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(filepath.Join(dir, below), os.DirFS(source)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestGrantsOfFiles: what a configuration file asks for is granted where the chart can read it, and
// where it cannot, so that it works. Values that few give are here, too.
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
		{"{rebootFile: /var/run/reboot-required}", []string{"/var/run rw"}},
		{"{hostDev: true, kernelLog: true}", []string{"privileged", "/dev rw"}},
		{`{config: {map: {a: "mig: {enabled: true}"}}, mig: {enabled: false}}`, nil},
		{"{mig: {enabled: true, disruption: pause}}", []string{"privileged", "/dev rw", "hostPID", "service account",
			"token"}},
		{"{mig: {enabled: true, disruption: pause}, hostDev: false}",
			[]string{"SYS_ADMIN", "SYS_PTRACE", "escalation", "hostPID", "service account", "token"}},
		{"{mig: {disruption: pause}}", nil},
		{"{mig: {layout: all-balanced, replace: true, label: true, disruption: evict, config: {name: layouts}}}", nil},
		{"{deviceListStrategy: envvar, " + file("{plugin: {deviceListStrategy: cdi-cri}}")[1:], nil},
		{"{devicePlugin: {enableHostNetwork: true}}", []string{"hostNetwork"}},
		{"{deviceListStrategy: [cdi-cri]}", []string{"/var/run/cdi rw"}},
		{"{deviceListStrategy: cdi-cri, cdi: {enabled: false}}", nil},
		{"{migStrategy: none, config: {name: mine, default: a}, features: {nodeConfig: false}}",
			[]string{"/var/run/cdi rw", "/run/nvidia/mps rw"}},
	} {
		pod := daemonSet(t, decode(t, "chart", render(t, tt.values)), "gpu-device-plugin").Spec.Template.Spec
		want := slices.Sorted(slices.Values(append(slices.Clone(always), tt.want...)))
		if diff := cmp.Diff(want, grants(t, pod)); diff != "" {
			t.Errorf("%s: grants (-want +got):\n%s", tt.values, diff)
		}
	}
}

// TestHostDevNeedsPrivileges: the node's devices are of no use to a container that may not open
// them.
func TestHostDevNeedsPrivileges(t *testing.T) {
	t.Parallel()
	if _, err := renderChart("{hostDev: true, securityContext: {runAsUser: 0}}"); err == nil ||
		!strings.Contains(err.Error(), "securityContext is not privileged") {
		t.Errorf("error %v", err)
	}
	pod := daemonSet(t, decode(t, "chart", render(t, "{mig: {enabled: true}, securityContext: {runAsUser: 0, capabilities: {drop: [ALL], add: [SYS_ADMIN]}}}")), "gpu-device-plugin").Spec.Template.Spec
	if all := grants(t, pod); slices.Contains(all, "/dev rw") {
		t.Errorf("grants %v", all)
	}
}

// TestGrantsAreExplained: values.yaml and docs/permissions.md name each grant.
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
	values, security := string(read(t, filepath.Join(chart, "values.yaml"))), string(read(t, "../../docs/permissions.md"))
	for _, g := range all {
		word := g
		if words[g] != "" {
			word = words[g]
		}
		if !strings.Contains(values, word) {
			t.Errorf("values.yaml does not say %q, for the grant %s", word, g)
		}
		if !strings.Contains(security, strings.TrimSuffix(strings.TrimSuffix(word, ", rw"), ", ro")) {
			t.Errorf("docs/permissions.md does not say %q, for the grant %s", word, g)
		}
	}
}

// TestNothingIsAskedForWithoutItsGrant: what a variable, an argument or a security context of one's
// own leaves the pod without is refused, with the value that grants it.
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
		"extraArgs: [--reboot-file=/run/x]":                                              "set rebootFile",
		"extraArgs: [--kernel-log=true]":                                                 "set kernelLog",
		"extraArgs: [--mig-enabled=true]":                                                "set mig.enabled",
		"extraArgs: [--node-events=pods]":                                                "set features.events",
		"extraArgs: [--v=5, --mig-strategy=none]":                                        "",
		"migStrategy: mixed, securityContext: {runAsUser: 0}":                            "add capabilities: {add: [SYS_ADMIN]}",
		"migStrategy: mixed, securityContext: {capabilities: {add: [SYS_ADMIN]}}":        "",
		"migStrategy: mixed, securityContext: {privileged: true}":                        "",
		"securityContext: {runAsUser: 0}":                                                "",
		"preStartChecks: clean, " + env("PRE_START_CHECKS", "clean") + ", hostDev: true": "",

		"extraArgs: [--mig-strategy, mixed]":                                                          "set migStrategy",
		"extraArgs: [--kernel-log]":                                                                   "set kernelLog",
		"extraArgs: [--kernel-log, --v=5]":                                                            "set kernelLog",
		"extraArgs: [--kernel-log=0]":                                                                 "",
		"extraArgs: [--node-labels, node], features: {labels: file}":                                  "set features.labels",
		"extraArgs: [--node-config-dir=/config]":                                                      "set features.nodeConfig",
		"extraArgs: [--nvidia-driver-root=/run/nvidia/driver]":                                        "set nvidiaDriverRoot",
		"extraArgs: [--driver-root=/]":                                                                "",
		"extraArgs: [--kubelet-root=/data]":                                                           "set kubeletRoot",
		"extraArgs: [--kubelet-root=/data], kubeletRoot: /data/":                                      "",
		"extraArgs: ['--metrics-address=:9500']":                                                      "set metrics.port",
		"extraArgs: ['--metrics-address=127.0.0.1:9400']":                                             "set metrics.listen",
		"extraArgs: ['--metrics-address=:9400']":                                                      "",
		"extraArgs: ['--metrics-address=:9500'], metrics: {enabled: false}":                           "",
		env("KERNEL_LOG", "1"):                                                                        "set kernelLog",
		env("NODE_EVENTS", "pods") + ", features: {events: true}":                                     "set features.events",
		env("NODE_LABELS", "nodeFeature") + ", features: {labels: node}":                              "set features.labels",
		env("MIG_DISRUPTION", "evict") + ", mig: {enabled: true}":                                     "set mig.enabled and mig.disruption",
		env("MIG_DISRUPTION", "pause") + ", mig: {enabled: true, disruption: evict}":                  "set mig.enabled and mig.disruption",
		env("MIG_BUDGET", "true") + ", mig: {enabled: true}":                                          "set mig.enabled and mig.budget",
		env("ROLLOUT_NAMESPACE", "gpu") + ", mig: {enabled: true, budget: true}, rollout: {slots: 1}": "set rollout.namespace",
		env("MIG_LABEL", "true"):                                                                      "set mig.enabled and mig.label",
		env("DRA_CLAIM_STATUS", "true") + ", dra: {enabled: true}":                                    "set dra.enabled and dra.claimStatus",
		env("DRA_DYNAMIC_MIG", "true") + ", dra: {enabled: true}":                                     "set dra.enabled and dra.dynamicMIG",
		env("MIG_STRATEGY", "$(STRATEGY)"):                                                            "a value that the chart cannot read",
		"devicePlugin: {containers: {main: {env: [{name: MIG_STRATEGY, valueFrom: {configMapKeyRef: {name: a, key: b}}}]}}}": "set migStrategy",

		"kernelLog: true, securityContext: {runAsUser: 0}":                                             "add capabilities: {add: [SYSLOG]}",
		"kernelLog: true, securityContext: {capabilities: {add: [SYSLOG]}}":                            "",
		"migStrategy: mixed, securityContext: {capabilities: {add: [ALL]}}":                            "",
		"migStrategy: mixed, securityContext: {capabilities: [SYS_ADMIN]}":                             "must be a mapping",
		"mig: {enabled: true, disruption: pause}, securityContext: {capabilities: {add: [SYS_ADMIN]}}": "add capabilities: {add: [SYS_PTRACE]}",
		"config: {name: mine}, securityContext: {runAsUser: 0}":                                        "migStrategy: none and mig.enabled: false",
		"securityContext: {runAsUser: 1000}":                                                           "set securityContext.runAsUser to 0",
		"podSecurityContext: {runAsNonRoot: true}":                                                     "set securityContext.runAsNonRoot to false",
		"podSecurityContext: {runAsNonRoot: true}, securityContext: {runAsNonRoot: false}":             "",
		// the chart's context of the container counts
		"podSecurityContext: {runAsUser: 1000}":                       "",
		"podSecurityContext: {runAsUser: 1000}, hostDev: true":        "set securityContext.runAsUser to 0",
		"podSecurityContext: {runAsUser: 1000}, mps: {enabled: true}": "leave it out",
		"rebootFile: /reboot-required":                                "name a file in a folder",
	} {
		_, err := renderChart("{" + values + "}")
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v, want %q", values, err, want)
		}
	}
}
