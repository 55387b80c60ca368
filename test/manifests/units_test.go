package manifests

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// mutating is an API server with MutatingAdmissionPolicies.
var mutating = append(slices.Clone(chartutil.DefaultVersionSet),
	"admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")

// unitsFile is a configuration file with GPUs in units.
func unitsFile(block string) string {
	return fmt.Sprintf("config: {map: {default: %q}}", "version: v1\nselectors: [{indices: [0], units: true}]\nunits: {"+
		block+"}")
}

// TestPolicyOfUnits: the policy is there where GPUs are in units with percentages, about the names
// of the files or the values. That it refuses the right pods is shown at a real API server.
func TestPolicyOfUnits(t *testing.T) {
	t.Parallel()
	const memory, percentage = "['volcano.sh/gpu-mem.128Mi']", "['volcano.sh/gpu-core.percentage']"
	for values, want := range map[string][2]string{ // the resources of memory and of percentages
		"{}":                              {},
		"{units: {enabled: true}}":        {memory, percentage},
		"{" + unitsFile("fit: sum") + "}": {memory, percentage},
		"{" + unitsFile("size: 1Gi, name: a.b/c, percentage: a.b/d") +
			"}": {"['a.b/c.1Gi']", "['a.b/d.percentage']"},
		"{" + unitsFile("size: 1Gi") + ", units: {name: a.b/c, size: 256Mi, percentage: a.b/d}}":                                    {"['a.b/c.256Mi']", "['a.b/d.percentage']"},
		"{" + unitsFile(`percentage: ""`) + "}":                                                                                     {},
		"{" + unitsFile("enforce: driver") + "}":                                                                                    {},
		"{" + unitsFile("enforce: none") + "}":                                                                                      {},
		"{" + unitsFile("") + ", units: {enabled: false}}":                                                                          {},
		"{" + unitsFile("") + ", admissionPolicy: {enabled: false}}":                                                                {},
		"{config: {map: {default: \"units: {size: 1Gi}\"}}}":                                                                        {},
		"{config: {default: a, map: {a: \"selectors: [{units: true}]\", b: \"{selectors: [{units: true}], units: {size: 1Gi}}\"}}}": {"['volcano.sh/gpu-mem.128Mi','volcano.sh/gpu-mem.1Gi']", percentage},
		"{config: {name: theirs, default: a}, units: {enabled: true, percentage: \"\"}}":                                            {},
		"{config: {name: theirs, default: a}, units: {enabled: true, name: a.b/c, size: 1Gi}, features: {nodeConfig: false}}":       {"['a.b/c.1Gi']", percentage},
	} {
		var got [2]string
		for _, o := range decode(t, "chart", render(t, values)) {
			if policy, is := o.(*admissionv1.ValidatingAdmissionPolicy); is && policy.Name == "gpu-device-plugin-units" {
				_, got[1], _ = strings.Cut(policy.Spec.MatchConditions[0].Expression, "exists(c, ")
				got[1], _, _ = strings.Cut(got[1], ".exists(p")
				_, got[0], _ = strings.Cut(policy.Spec.Variables[0].Expression, "&& !")
				got[0], _, _ = strings.Cut(got[0], ".exists(m")
			}
		}
		if got != want {
			t.Errorf("%s: memory and percentages %q, want %q", values, got, want)
		}
	}
	objects, _, err := renderFor("1.29", "{units: {enabled: true}}")
	if err != nil || bytes.Contains(objects, []byte("AdmissionPolicy")) {
		t.Errorf("a policy for Kubernetes 1.29, or error %v", err)
	}
}

// TestMPSOfUnits: the chart has the control daemons where limits of units are enforced by them,
// with the file of the units, and the daemon finds their state.
func TestMPSOfUnits(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]bool{
		"{" + unitsFile("") + "}":                                                     true,
		"{" + unitsFile("fit: sum, enforce: mps") + "}":                               true,
		"{" + unitsFile("enforce: none") + "}":                                        false,
		"{config: {map: {default: \"units: {size: 1Gi}\"}}}":                          false, // nothing selects a GPU
		"{config: {default: a, map: {a: \"{}\", b: \"selectors: [{units: true}]\"}}}": true,  // a node may choose it
	} {
		var there, finds bool
		for _, o := range decode(t, "chart", render(t, values)) {
			d, is := o.(*appsv1.DaemonSet)
			if !is {
				continue
			}
			there = there || d.Name == "gpu-device-plugin-mps-control-daemon"
			for _, c := range d.Spec.Template.Spec.Containers {
				finds = finds || d.Name == "gpu-device-plugin" && slices.ContainsFunc(c.Env,
					func(e corev1.EnvVar) bool { return e.Name == "MPS_ROOT" })
			}
		}
		if there != want || want && !finds {
			t.Errorf("%s: control daemons %t, their state for the daemon %t, want %t", values, there, finds, want)
		}
	}
}

// TestWordsOfHAMi: the pair of policies is there where it is wanted and the API server has both
// kinds.
func TestWordsOfHAMi(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		values  string
		served  chartutil.VersionSet
		objects int    // of the pair, with their bindings
		words   string // in the policies, or in the error
		note    bool
	}{
		{values: "{" + unitsFile("") + "}", served: mutating},
		{values: "{" + unitsFile("") + ", units: {hami: true}}", served: mutating, objects: 4,
			words: "asInteger() + 127) / 128)"},
		{values: "{" + unitsFile("size: 1Gi") + ", units: {hami: true}}", served: mutating, objects: 4,
			words: "volcano.sh/gpu-mem.1Gi'),\n          value: string((e.mib.asInteger() + 1023) / 1024)"},
		{values: "{" + unitsFile("enforce: none") + ", units: {hami: true}}", served: mutating, objects: 4,
			words: "nvidia.com/gpucores be left out"},
		{values: "{" + unitsFile("") + ", units: {hami: true, hamiNamespaces: {matchLabels: {a: b}}}}", served: mutating,
			objects: 4,
			words:   "matchResources:\n    namespaceSelector:\n      matchLabels:\n        a: b"},
		{values: "{" + unitsFile("") + ", units: {hami: true}}", served: chartutil.DefaultVersionSet, note: true},
		{values: "{config: {name: a, default: a}, units: {hami: true, enabled: true}}", served: mutating, objects: 4,
			words: "volcano.sh/gpu-mem.128Mi"},
		{values: "{units: {hami: true}}", served: mutating, words: "no file of config.map has a selector with units",
			objects: -1},
		{values: "{units: {hami: true}, config: {default: a, map: {a: \"selectors: [{units: true}]\", b: \"{selectors: [{units: true}], units: {size: 1Gi}}\"}}}",
			served: mutating, words: "the files of config.map have several resources", objects: -1},
	} {
		objects, notes, err := renderServed(newest, tt.served, tt.values)
		if tt.objects < 0 {
			if err == nil || !strings.Contains(err.Error(), tt.words) {
				t.Errorf("%s: error %v, want one with %q", tt.values, err, tt.words)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := bytes.Count(objects, []byte("name: gpu-device-plugin-hami\n  labels")); got != tt.objects ||
			!bytes.Contains(objects, []byte(tt.words)) {
			t.Errorf("%s: %d objects, want %d with %q", tt.values, got, tt.objects, tt.words)
		}
		if got := strings.Contains(notes, "units.hami has no effect"); got != tt.note {
			t.Errorf("%s: NOTES.txt says that it has no effect: %t", tt.values, got)
		}
	}
}
