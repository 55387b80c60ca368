package manifests

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// A chartValue is a value that NVIDIA's chart has: v0.20's values.yaml and templates were read for
// it, and for untagged ones those after it.
type chartValue struct {
	key, theirs string // the name, and NVIDIA's default
	here        string // what docs/migrate.md says of it
	values      string // that give it
	want        string // what is rendered because of it
	gone        string // what is not rendered because of it
	refused     string // part of the error, where the value is refused
	note        string // part of NOTES.txt, where the value has no effect
}

var update = flag.Bool("update", false, "rewrite the golden renders and the tables of docs/migrate.md")

// untagged are the keys that later versions of NVIDIA's chart have, or that were proposed for it.
var untagged = []string{
	"logVerbosity", "nvidiaDriverCapabilities", "componentSelectorLabels", "devicePlugin.containers", "devicePlugin.resources", "gfd.resources", "mps.resources", "configManager",
}

func env(name, value string) string { return fmt.Sprintf(`{"name":%q,"value":%q}`, name, value) }

var nvidiaValues = []chartValue{
	{key: "config.name", theirs: `""`, here: "same. Without `config.default` the fallbacks count; the label of the node chooses among its files",
		values: "{config: {name: mine}}", want: "configMap: {name: mine}"},
	{key: "config.map", theirs: "{}", here: "same. The label of the node chooses where there are several files",
		values: "{config: {map: {a: \"{}\"}}}", want: "kind: ConfigMap"},
	{key: "config.default", theirs: `""`, here: "same", values: "{config: {map: {a: \"{}\", b: \"{}\"}, default: b}}",
		want: env("DEFAULT_CONFIG", "b")},
	{key: "config.fallbackStrategies", theirs: "[named, single]", here: "same, `empty` too",
		values: "{config: {map: {a: \"{}\"}, fallbackStrategies: [empty]}}", want: env("FALLBACK_STRATEGIES", "empty")},
	{key: "compatWithCPUManager", theirs: "null", here: "same", values: "{compatWithCPUManager: true}",
		want: "privileged: true"},
	{key: "migStrategy", theirs: "null", here: "same", values: "{migStrategy: mixed}", want: env("MIG_STRATEGY", "mixed")},
	{key: "failOnInitError", theirs: "null", here: "same; false where the daemon runs on nodes without a GPU: with `gfd.enabled`, or with `affinity: null` and no `nodeSelector`",
		values: "{failOnInitError: false}", want: env("FAIL_ON_INIT_ERROR", "false")},
	{key: "deviceListStrategy", theirs: "null", here: "same; a list, too",
		values: "{deviceListStrategy: \"envvar,cdi-cri\"}", want: env("DEVICE_LIST_STRATEGY", "envvar,cdi-cri")},
	{key: "deviceIDStrategy", theirs: "null", here: "same", values: "{deviceIDStrategy: index}",
		want: env("DEVICE_ID_STRATEGY", "index")},
	{key: "deviceDiscoveryStrategy", theirs: "null", here: "same: `auto`, `nvml`",
		values: "{deviceDiscoveryStrategy: nvml}", want: env("DEVICE_DISCOVERY_STRATEGY", "nvml")},
	{key: "deviceDiscoveryStrategy: tegra", theirs: "", here: "refused: Jetson is not supported",
		values: "{deviceDiscoveryStrategy: tegra}", refused: "Jetson"},
	{key: "nvidiaDriverRoot", theirs: "null", here: "same. Where it is null, the folder that the file of `config.map` names is mounted, or `/`",
		values: "{config: {map: {a: \"flags: {nvidiaDriverRoot: /run/nvidia/driver}\"}}}", want: "hostPath: {path: /run/nvidia/driver, type: DirectoryOrCreate}"},
	{key: "nvidiaDevRoot", theirs: "null", here: "same", values: "{nvidiaDevRoot: /x}",
		want: env("NVIDIA_DEV_ROOT", "/x")},
	{key: "nvidiaDriverCapabilities", theirs: "null", here: "same", values: "{nvidiaDriverCapabilities: all}",
		want: env("NVIDIA_DRIVER_CAPABILITIES", "all")},
	{key: "gdrcopyEnabled", theirs: "null", here: "same", values: "{gdrcopyEnabled: true}",
		want: env("GDRCOPY_ENABLED", "true")},
	{key: "gdsEnabled", theirs: "null", here: "same", values: "{gdsEnabled: true}", want: env("GDS_ENABLED", "true")},
	{key: "mofedEnabled", theirs: "null", here: "same", values: "{mofedEnabled: true}",
		want: env("MOFED_ENABLED", "true")},
	{key: "gdrcopyEnabled: auto", theirs: "", here: "on nodes that have it, without a warning on others; also for `gdsEnabled` and `mofedEnabled`",
		values: "{gdrcopyEnabled: auto, gdsEnabled: auto, mofedEnabled: auto}", want: env("GDRCOPY_ENABLED", "auto")},
	{key: "logVerbosity", theirs: "null", here: "`--v` of the daemon", values: "{logVerbosity: 3}", want: "- --v=3"},
	{key: "nameOverride", theirs: `""`, here: "same", values: "{nameOverride: x}", want: "app.kubernetes.io/name: x\n"},
	{key: "fullnameOverride", theirs: `""`, here: "same", values: "{fullnameOverride: x}", want: "name: x\n"},
	{key: "namespaceOverride", theirs: `""`, here: "same", values: "{namespaceOverride: x}", want: "namespace: x\n"},
	{key: "selectorLabelsOverride", theirs: "{}", here: "same, for the daemon's DaemonSet. That of MPS keeps labels of its own: the two never select each other's pods",
		values: "{selectorLabelsOverride: {a: b}}", want: "matchLabels:\n      a: b\n"},
	{key: "componentSelectorLabels.enabled", theirs: "false",
		here:   "same; the DaemonSets have selectors of their own without it, too",
		values: "{componentSelectorLabels: {enabled: true}}", want: "app.kubernetes.io/component: device-plugin"},
	{key: "allowDefaultNamespace", theirs: "false", here: "same: without it, the namespace `default` is refused",
		values: "{namespaceOverride: default}", refused: "set allowDefaultNamespace to true"},
	{key: "allowDefaultNamespace: true", theirs: "", here: "same",
		values: "{namespaceOverride: default, allowDefaultNamespace: true}", want: "namespace: default"},
	{key: "imagePullSecrets", theirs: "[]", here: "same", values: "{imagePullSecrets: [{name: x}]}",
		want: "imagePullSecrets:\n        - name: x"},
	{key: "image.repository", theirs: "nvcr.io/nvidia/k8s-device-plugin", here: "same, with our image",
		values: "{image: {repository: a/b}}", want: "image: a/b:"},
	{key: "image.pullPolicy", theirs: "IfNotPresent", here: "same; Kubernetes' default if null",
		values: "{image: {pullPolicy: Always}}", want: "imagePullPolicy: Always"},
	{key: "image.tag", theirs: `""`, here: "same", values: "{image: {tag: 7}}", want: "gpu-device-plugin:7\n"},
	{key: "updateStrategy", theirs: "{type: RollingUpdate}",
		here:   "same. With RollingUpdate and neither of the two numbers the new pod serves before the old one ends",
		values: "{updateStrategy: {type: OnDelete}}", want: "type: OnDelete"},
	{key: "updateStrategy.rollingUpdate.maxUnavailable", theirs: "", here: "same, without a surge",
		values: "{updateStrategy: {rollingUpdate: {maxUnavailable: 3}}}", gone: "maxSurge"},
	{key: "updateStrategy.rollingUpdate.maxSurge", theirs: "", here: "same, with `maxUnavailable: 0`",
		values: "{updateStrategy: {rollingUpdate: {maxSurge: 50%}}}", want: "maxSurge: 50%\n      maxUnavailable: 0"},
	{key: "podAnnotations", theirs: "{}", here: "same", values: "{podAnnotations: {a: b}}",
		want: "annotations:\n        a: b"},
	{key: "podSecurityContext", theirs: "{}", here: "same", values: "{podSecurityContext: {fsGroup: 7}}",
		want: "fsGroup: 7"},
	{key: "securityContext", theirs: "{}", here: "same", values: "{securityContext: {runAsGroup: 7}}",
		want: "securityContext:\n            runAsGroup: 7\n"},
	{key: "resources", theirs: "{}", here: "same, for the daemon's container; the default requests 10m of CPU and 64Mi",
		values: "{resources: {limits: {memory: 65Mi}}}", want: "memory: 65Mi"},
	{key: "nodeSelector", theirs: "{}", here: "same", values: "{nodeSelector: {a: b}}",
		want: "nodeSelector:\n        a: b"},
	{key: "affinity", theirs: "three labels, of which one is enough",
		here: "same; the default also has the labels of stock node-feature-discovery, the clouds and Karpenter", values: "{affinity: null}", gone: "affinity"},
	{key: "tolerations", theirs: "CriticalAddonsOnly, nvidia.com/gpu", here: "same", values: "{tolerations: [{key: x}]}",
		want: "- key: x"},
	{key: "priorityClassName", theirs: "system-node-critical", here: "same", values: "{priorityClassName: x}",
		want: "priorityClassName: x"},
	{key: "runtimeClassName", theirs: "null", here: "same", values: "{runtimeClassName: nvidia}",
		want: "runtimeClassName: nvidia"},
	{key: "devicePlugin.enabled", theirs: "true", here: "false is refused: nothing would be installed",
		values: "{devicePlugin: {enabled: false}}", refused: "do not install it"},
	{key: "devicePlugin.enableHostNetwork", theirs: "null",
		here:   "same; metrics are on the node's address then, and probes run a command",
		values: "{devicePlugin: {enableHostNetwork: true}}", want: "hostNetwork: true"},
	{key: "devicePlugin.resources", theirs: "null", here: "same",
		values: "{devicePlugin: {resources: {limits: {memory: 65Mi}}}}", want: "memory: 65Mi"},
	{key: "devicePlugin.containers.main.env", theirs: "NVIDIA_VISIBLE_DEVICES, NVIDIA_DRIVER_CAPABILITIES",
		here:   "same; the image has these two",
		values: "{devicePlugin: {containers: {main: {env: [{name: DP_DISABLE_HEALTHCHECKS, value: xids}]}}}}", want: env("DP_DISABLE_HEALTHCHECKS", "xids")},
	{key: "gfd.enabled", theirs: "false", here: "the daemon writes the same labels to its Node, and needs no node-feature-discovery for that",
		values: "{gfd: {enabled: true}}", want: env("NODE_LABELS", "node")},
	{key: "gfd.noTimestamp", theirs: "null", here: "has the effect of `noTimestamp`, and counts before it; null is without the label, which NVIDIA's has", values: "{gfd: {enabled: true, noTimestamp: false}}",
		want: env("NODE_LABELS_TIMESTAMP", "true")},
	{key: "noTimestamp", theirs: "", here: "same: v0.20's templates read this one, and not `gfd.noTimestamp`",
		values: "{gfd: {enabled: true}, noTimestamp: false}",
		want:   env("NODE_LABELS_TIMESTAMP", "true")},
	{key: "gfd.sleepInterval", theirs: "null", here: "no effect, as before", values: "{gfd: {sleepInterval: 60s}}",
		note: "gfd.sleepInterval"},
	{key: "sleepInterval", theirs: "", here: "no effect: labels are written when they change",
		values: "{sleepInterval: 60s}", note: "sleepInterval"},
	{key: "gfd.nameOverride", theirs: "gpu-feature-discovery",
		here:   "no effect: there is no DaemonSet of gpu-feature-discovery",
		values: "{gfd: {nameOverride: x}}", note: "gfd.nameOverride"},
	{key: "gfd.namespaceOverride", theirs: `""`, here: "no effect, as before", values: "{gfd: {namespaceOverride: x}}",
		note: "gfd.namespaceOverride"},
	{key: "gfd.securityContext", theirs: "{privileged: true}", here: "no effect, as before: labels need no privileges",
		values: "{gfd: {securityContext: {privileged: true}}}", note: "gfd.securityContext"},
	{key: "gfd.enableHostNetwork", theirs: "null", here: "no effect, as before",
		values: "{gfd: {enableHostNetwork: true}}", note: "gfd.enableHostNetwork"},
	{key: "gfd.resources", theirs: "null", here: "no effect, as before", values: "{gfd: {resources: {limits: {cpu: 1}}}}",
		note: "gfd.resources"},
	{key: "nfd.enabled", theirs: "null", here: "true is refused: node-feature-discovery has a chart of its own",
		values: "{nfd: {enabled: true}}", refused: "Install its own chart"},
	{key: "nfd.enabled: false", theirs: "", here: "the cluster has one: with `gfd.enabled`, `affinity` counts as it is",
		values: "{gfd: {enabled: true}, nfd: {enabled: false}, failOnInitError: true}", want: env("NODE_LABELS", "node")},
	{key: "nfd.nameOverride", theirs: "node-feature-discovery",
		here: "no effect: node-feature-discovery is no part of this chart", values: "{nfd: {nameOverride: x}}", note: "nfd.*"},
	{key: "nfd.master", theirs: "a mapping", here: "no effect, as before",
		values: "{nfd: {master: {config: {extraLabelNs: [nvidia.com]}}}}", note: "nfd.*"},
	{key: "nfd.worker", theirs: "a mapping", here: "no effect, as before", values: "{nfd: {worker: {tolerations: []}}}",
		note: "nfd.*"},
	{key: "configManager.resources", theirs: "null", here: "no effect: the daemon itself follows the label of the node",
		values: "{configManager: {resources: {limits: {cpu: 1}}}}",
		note:   "configManager.resources"},
	{key: "mps.root", theirs: "/run/nvidia/mps", here: "same", values: "{mps: {enabled: true, root: /x}}",
		want: "hostPath: {path: /x/shm,"},
	{key: "mps.enableHostPID", theirs: "true", here: "same", values: "{mps: {enabled: true, enableHostPID: false}}",
		gone: "hostPID"},
	{key: "mps.enableHostNetwork", theirs: "null", here: "same", values: "{mps: {enabled: true, enableHostNetwork: true}}",
		want: "hostNetwork: true"},
	{key: "mps.resources", theirs: "null", here: "same", values: "{mps: {enabled: true, resources: {limits: {memory: 65Mi}}}}", want: "memory: 65Mi"},
	{key: "cdi.nvidiaHookPath", theirs: "null", here: "same", values: "{cdi: {nvidiaHookPath: /x}}",
		want: env("NVIDIA_CDI_HOOK_PATH", "/x")},
	{key: "cdi.featureFlags", theirs: "null", here: "accepted; the daemon's log says that they have no effect",
		values: "{cdi: {featureFlags: \"a,b\"}}",
		want:   env("CDI_FEATURE_FLAGS", "a,b")},
}

// TestNVIDIAValues: each value of NVIDIA's chart has its effect, or none and NOTES.txt says so, or
// is refused with the reason. docs/migrate.md names each.
func TestNVIDIAValues(t *testing.T) {
	t.Parallel()
	base := string(render(t, "{}"))
	var rows strings.Builder
	var same []string
	for _, v := range nvidiaValues {
		if v.here == "same" {
			same = append(same, "`"+v.key+"`")
		} else {
			fmt.Fprintf(&rows, "| `%s` | %s | %s |\n", v.key, v.theirs, v.here)
		}
		t.Run(v.key, func(t *testing.T) {
			t.Parallel()
			rendered, notes, err := renderFor(newest, v.values)
			if v.refused != "" {
				if err == nil || !strings.Contains(err.Error(), v.refused) {
					t.Errorf("error %v, want one with %q", err, v.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			decode(t, "chart", rendered)
			text := string(rendered)
			switch {
			case v.note != "":
				if text != base || !strings.Contains(notes, v.note+" has no effect") {
					t.Errorf("NOTES.txt does not say that it has no effect, or it has one:\n%s\n%s", notes, cmp.Diff(base, text))
				}
			case v.gone != "":
				if isMPS := strings.HasPrefix(v.key, "mps."); !isMPS && !strings.Contains(base, v.gone) ||
					strings.Contains(text, v.gone) {
					t.Errorf("%q is rendered, or was not before (-before +after):\n%s", v.gone, cmp.Diff(base, text))
				}
			case !strings.Contains(text, v.want) || strings.Contains(base, v.want):
				t.Errorf("%q is not rendered, or was before (-before +after):\n%s", v.want, cmp.Diff(base, text))
			}
		})
	}
	heldTo(t, "../../docs/migrate.md", "nvidia", "The same are "+strings.Join(same, ", ")+".\n\n"+
		"The tag v0.20.0 does not have `"+strings.Join(untagged, "`, `")+"`.\n\n"+
		"| NVIDIA's value | its default | here |\n|---|---|---|\n"+rows.String())
}

// heldTo fails the test if the part of a document between two marks is not text.
func heldTo(t *testing.T, file, mark, text string) {
	t.Helper()
	begin, end := fmt.Sprintf("<!-- %s: written by %s; go test -update -->\n", mark,
		t.Name()), fmt.Sprintf("<!-- end of %s -->", mark)
	document := string(read(t, file))
	before, rest, found := strings.Cut(document, begin)
	inside, after, foundEnd := strings.Cut(rest, end)
	if !found || !foundEnd {
		t.Fatalf("%s has no part between %q and %q", file, begin, end)
	}
	if inside == text {
		return
	}
	if !*update {
		t.Errorf("%s: go test -update writes (-have +want):\n%s", file, cmp.Diff(inside, text))
		return
	}
	if err := os.WriteFile(file, []byte(before+begin+text+end+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestValuesWithoutEffect: a value that does nothing without another one says so.
func TestValuesWithoutEffect(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		"{gfd: {noTimestamp: true}}":                      "gfd.noTimestamp has no effect",
		"{gfd: {noTimestamp: true, enabled: true}}":       "",
		"{gfd: {noTimestamp: false}}":                     "gfd.noTimestamp has no effect",
		"{noTimestamp: true, features: {labels: off}}":    "noTimestamp has no effect",
		"{dra: {shares: 4}}":                              "dra.shares has no effect",
		"{dra: {claimStatus: false}}":                     "dra.claimStatus has no effect",
		"{dra: {driverName: gpu.example.com}}":            "dra.driverName has no effect",
		"{mps: {enableHostNetwork: true}}":                "mps.enableHostNetwork has no effect",
		"{mig: {layout: all-balanced}}":                   "mig.layout has no effect",
		"{mig: {layout: all-balanced, enabled: true}}":    "",
		"{config: {default: a}}":                          "config.default has no effect",
		"{features: {nodeConfigLabel: a}}":                "features.nodeConfigLabel has no effect",
		"{dra: {shares: 4, enabled: true}}":               "",
		"{mps: {resources: {}}}":                          "",
		"{mps: {resources: {limits: {cpu: 1}}}}":          "mps.resources has no effect",
		"{config: {name: mine}}":                          "cannot read the ConfigMap mine",
		"{config: {map: {a: \"{}\"}}, migStrategy: none}": "",
	} {
		_, notes, err := renderFor(newest, values)
		if err != nil {
			t.Fatal(err)
		}
		if want != "" && !strings.Contains(notes, want) || want == "" &&
			(strings.Contains(notes, "has no effect") || strings.Contains(notes, "cannot read")) {
			t.Errorf("%s: want %q in NOTES.txt:\n%s", values, want, notes)
		}
	}
}

// TestNotesOfFiles: NOTES.txt names the label that chooses a file of config.map, what each file has
// the pods' rights for, and what it asks for that the pods have no rights for, with the value that
// gives them.
func TestNotesOfFiles(t *testing.T) {
	t.Parallel()
	const chooses, lacks = "The label nvidia.com/device-plugin.config of a Node chooses a file of config.map", "for which the pods have no rights"
	two := func(a, b, more string) string {
		return fmt.Sprintf("{config: {default: a, map: {a: %q, b: %q}}%s}", a, b, more)
	}
	for _, tt := range []struct {
		values string
		want   []string
		not    string
	}{
		{"{}", nil, chooses},
		{two("{}", "flags: {migStrategy: mixed}", ""), []string{chooses, "\n  a: none\n  b: flags.migStrategy\n"}, lacks},
		// the value counts
		{two("{}", "flags: {migStrategy: mixed}", ", migStrategy: none"), []string{"\n  b: none\n"}, lacks},
		{two("mig: {enabled: true}", "{features: {events: pods, labels: node}, sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}", ""),
			[]string{"\n  a: mig.enabled\n", "\n  b: features.labels, sharing.mps, features.events\n"}, lacks},
		{two("{}", "features: {labels: off, events: false}", ""), []string{"\n  b: none\n"}, lacks},
		{two("{}", "{flags: {plugin: {deviceListStrategy: [envvar, cdi-cri], preStartChecks: [clean]}}}", ""),
			[]string{"\n  b: flags.plugin.deviceListStrategy\n", "The file b of config.map has flags.plugin.preStartChecks, " +
				lacks + ": set preStartChecks, or hostPID."}, ""},
		{two("{}", "{flags: {plugin: {preStartChecks: [clean]}}}", ", hostPID: true"),
			[]string{"\n  b: flags.plugin.preStartChecks\n"}, lacks},
		{two("{}", "{flags: {plugin: {deviceListStrategy: volume-mounts}}}", ""),
			[]string{lacks + ": set deviceListStrategy."}, ""},
		{two("{}", "{flags: {plugin: {deviceListStrategy: volume-mounts}}}", ", hostDev: true"),
			[]string{"\n  b: flags.plugin.deviceListStrategy\n"}, lacks},
		{two("{}", "health: {kernelLog: true}", ""), []string{"has health.kernelLog, " + lacks + ": set kernelLog."}, ""},
		{two("{}", "dra: {mode: split}", ""), []string{"has dra.mode, " + lacks + ": set dra.enabled."}, ""},
		{two("{}", "dra: {mode: split}", ", features: {nodeConfigLabel: pool}"), []string{"The label pool of a Node"}, ""},
		// the only one
		{"{config: {map: {a: 'health: {kernelLog: true}'}}}", []string{"The file a of config.map has health.kernelLog"},
			chooses},
		// b never counts
		{two("{}", "health: {kernelLog: true}", ", features: {nodeConfig: false}"), nil, lacks},
		{"{config: {name: mine}}", []string{"of which the label nvidia.com/device-plugin.config of a Node chooses a file"},
			lacks},
		{"{config: {name: mine, default: a}, features: {nodeConfig: false}}",
			[]string{"cannot read the ConfigMap mine. Where"}, chooses},
	} {
		_, notes, err := renderFor(newest, tt.values)
		if err != nil {
			t.Errorf("%s: %v", tt.values, err)
			continue
		}
		if tt.not != "" && strings.Contains(notes, tt.not) {
			t.Errorf("%s: NOTES.txt has %q:\n%s", tt.values, tt.not, notes)
		}
		for _, want := range tt.want {
			if !strings.Contains(notes, want) {
				t.Errorf("%s: want %q in NOTES.txt:\n%s", tt.values, want, notes)
			}
		}
	}
}

// TestNVIDIADefaults: NVIDIA's values.yaml as a whole is accepted.
func TestNVIDIADefaults(t *testing.T) {
	t.Parallel()
	decode(t, "chart", render(t, string(read(t, "testdata/nvidia-values.yaml"))))
}

// TestWithoutNFD: where no node-feature-discovery labels nodes with GPUs, the daemon runs on all
// nodes, and waits where there is no driver.
func TestWithoutNFD(t *testing.T) {
	t.Parallel()
	for values, want := range map[string][2]bool{ // affinity, waits for a driver
		"{}":                     {true, false},
		"{gfd: {enabled: true}}": {false, true},
		"{gfd: {enabled: true}, mps: {enabled: true}, failOnInitError: true}": {false, false},
		"{gfd: {enabled: true}, nfd: {enabled: false}}":                       {true, false},
		"{affinity: null}": {false, true},
		"{affinity: null, nodeSelector: {kubernetes.io/os: linux}}": {false, true},
		"{affinity: null, nodeSelector: {gpu: \"on\"}}":             {false, false}, // these nodes were chosen
		"{affinity: null, failOnInitError: true}":                   {false, false},
		"{gfd: {enabled: true}, affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: " +
			"{nodeSelectorTerms: [{matchExpressions: [{key: feature.node.kubernetes.io/pci-10de.present, operator: Exists}]}]}}}}": {true, true},
	} {
		text := string(render(t, values))
		got := [2]bool{strings.Contains(text, "nodeAffinity"), strings.Contains(text, env("FAIL_ON_INIT_ERROR", "false"))}
		if got != want {
			t.Errorf("%s: affinity and waiting are %v, want %v", values, got, want)
		}
	}
}

// TestOwnVariables: a variable of the values replaces the chart's: the API refuses two of one name.
func TestOwnVariables(t *testing.T) {
	t.Parallel()
	pod := daemonSet(t, decode(t, "chart", render(t, "{devicePlugin: {containers: {main: {env: [{name: MPS_ROOT, value: /x}]}}}}")), "gpu-device-plugin")
	var found []string
	for _, e := range pod.Spec.Template.Spec.Containers[0].Env {
		if e.Name == "MPS_ROOT" {
			found = append(found, e.Value)
		}
	}
	if !slices.Equal(found, []string{"/x"}) {
		t.Errorf("MPS_ROOT is %v", found)
	}
}

// TestSelectors: each DaemonSet selects its own pods and never those of the other, whatever labels
// the values give.
func TestSelectors(t *testing.T) {
	t.Parallel()
	for _, values := range []string{
		"mps: {enabled: true}",
		"mps: {enabled: true}, selectorLabelsOverride: {a: b}",
		"mps: {enabled: true}, selectorLabelsOverride: {app.kubernetes.io/name: x}, podLabels: {app.kubernetes.io/name: other}",
		"mps: {enabled: true}, componentSelectorLabels: {enabled: true}, nameOverride: x",
		"mps: {enabled: true}, podLabels: {app.kubernetes.io/name: x, app.kubernetes.io/component: other}, componentSelectorLabels: {enabled: true}",
	} {
		objects := decode(t, "chart", render(t, "{fullnameOverride: gpu-device-plugin, "+values+"}"))
		sets := []*appsv1.DaemonSet{daemonSet(t, objects, "gpu-device-plugin"),
			daemonSet(t, objects, "gpu-device-plugin-mps-control-daemon")}
		for _, selecting := range sets {
			for _, of := range sets {
				selects := true
				for key, value := range selecting.Spec.Selector.MatchLabels {
					selects = selects && of.Spec.Template.Labels[key] == value
				}
				if selects != (selecting == of) {
					t.Errorf("%s: that %s selects the pods of %s is %t", values, selecting.Name, of.Name, selects)
				}
			}
		}
	}
}

// TestAccountAnnotations: the account that is made has the annotations of the values.
func TestAccountAnnotations(t *testing.T) {
	t.Parallel()
	account := only[*corev1.ServiceAccount](t, decode(t, "chart",
		render(t, "{features: {events: true}, serviceAccount: {annotations: {a: b}}}")))
	if account.Annotations["a"] != "b" {
		t.Errorf("annotations %v", account.Annotations)
	}
}

// A schemaNode is what the tests read of values.schema.json.
type schemaNode struct {
	Description string                 `json:"description"`
	Properties  map[string]*schemaNode `json:"properties"`
	Additional  any                    `json:"additionalProperties"`
}

// TestSchema: values.schema.json has each key of values.yaml, with a description, and no others but
// those that NVIDIA's chart has and that have no effect here, and those of options that were
// removed. It refuses unknown keys.
func TestSchema(t *testing.T) {
	t.Parallel()
	var schema schemaNode
	if err := json.Unmarshal(read(t, chart+"/values.schema.json"), &schema); err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(read(t, chart+"/values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	// Their keys are the API server's, or the user's.
	ofKubernetes := []string{
		"resources", "readinessProbe", "livenessProbe", "mps.updateStrategy", "affinity", "monitoring.labels", "monitoring.dashboard.labels",
	}
	elsewhere := []string{"global", "enabled", "tags", "nfd.nameOverride", "updateStrategy.rollingUpdate.maxSurge",
		"updateStrategy.rollingUpdate.maxUnavailable"}
	for _, v := range nvidiaValues {
		if v.note != "" {
			elsewhere = append(elsewhere, v.key, strings.Split(v.key, ".")[0])
		}
	}
	var walk func(path string, schema *schemaNode, values map[string]any)
	walk = func(path string, schema *schemaNode, values map[string]any) {
		for key, value := range values {
			known := schema.Properties[key]
			if known == nil {
				t.Errorf("values.yaml has %s, which values.schema.json lacks: add it there, with a description", path+key)
				continue
			}
			if inner, is := value.(map[string]any); is && known.Properties == nil && len(inner) > 0 &&
				!slices.Contains(ofKubernetes, path+key) {
				t.Errorf("values.schema.json does not have the keys of %s", path+key)
			}
		}
		for key, known := range schema.Properties {
			if known.Properties != nil {
				inner, _ := values[key].(map[string]any)
				walk(path+key+".", known, inner)
			}
			if known.Description == "" {
				t.Errorf("values.schema.json does not describe %s", path+key)
			}
			removed := known.Description == "Removed: the template refuses it."
			if _, is := values[key]; !is && !removed && !slices.Contains(elsewhere, path+key) {
				t.Errorf("values.schema.json has %s, which values.yaml lacks: add it there, with a comment", path+key)
			}
		}
		if schema.Additional != false && path != "nfd." {
			t.Errorf("values.schema.json takes unknown keys in %q", path)
		}
	}
	walk("", &schema, values)
	for key, known := range schema.Properties {
		if known.Properties == nil {
			continue
		}
		// NVIDIA's chart takes null for them
		if slices.Contains([]string{"configManager", "updateStrategy", "componentSelectorLabels"}, key) {
			render(t, "{"+key+": null}")
			continue
		}
		if _, err := renderChart("{" + key + ": null}"); err == nil ||
			!strings.Contains(err.Error(), "missing property '"+key+"'") {
			t.Errorf("%s: null gives the error %v, want one that says that it is missing: add it to required in values.schema.json", key, err)
		}
	}
	for _, unknown := range []string{"{unknown: 1}", "{metrics: {unknown: 1}}", "{legacyDaemonsetAPI: true}",
		"{namespace: x}"} {
		if _, err := renderChart(unknown); err == nil || !strings.Contains(err.Error(), "additional properties") {
			t.Errorf("%s: error %v, want one that names the unknown key", unknown, err)
		}
	}
}
