package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// TestRightsOfStartupTaint: the account changes nodes, and the policy lets it change that taint
// alone.
func TestRightsOfStartupTaint(t *testing.T) {
	t.Parallel()
	want := append([]string{"cluster:  nodes patch", "policy gpu-device-plugin-nodes"}, anyRights...)
	slices.Sort(want)
	for _, values := range []string{"{features: {startupTaint: true}}",
		"{config: {map: {a: \"features: {startupTaint: true}\"}}}"} {
		text := render(t, values)
		if diff := cmp.Diff(want, rights(t, decode(t, "chart", text))); diff != "" {
			t.Errorf("%s: rights (-want +got):\n%s", values, diff)
		}
		if n := strings.Count(string(text), "!(t.key in ['"+kubeapi.Startup.String()+"'])"); n != 2 {
			t.Errorf("%s: the policy names the taint %d times, want 2", values, n)
		}
	}
}

// TestRightsOfFewerDevices: the account taints the node and lists pods; the policy lets it change
// that taint alone, and the other one where both are on.
func TestRightsOfFewerDevices(t *testing.T) {
	t.Parallel()
	want := append([]string{"cluster:  nodes patch", "cluster:  pods list", "policy gpu-device-plugin-nodes"},
		anyRights...)
	slices.Sort(want)
	for values, keys := range map[string]string{
		"{features: {changeTaint: true}}":                         "['gpu-device-plugin.github.io/fewer-devices']",
		"{config: {map: {a: \"features: {changeTaint: true}\"}}}": "['gpu-device-plugin.github.io/fewer-devices']",
		"{features: {changeTaint: true, taint: true}}":            "['gpu-device-plugin.github.io/no-healthy-gpu','gpu-device-plugin.github.io/fewer-devices']",
	} {
		text := render(t, values)
		if diff := cmp.Diff(want, rights(t, decode(t, "chart", text))); diff != "" {
			t.Errorf("%s: rights (-want +got):\n%s", values, diff)
		}
		if n := strings.Count(string(text), "!(t.key in "+keys+")"); n != 2 {
			t.Errorf("%s: the policy names %s %d times, want 2", values, keys, n)
		}
	}
}

// TestRightsOfConditionTypes: the policy lets the account change the conditions of the values, and no
// others. A file alone cannot add a type, because the policy would refuse the write.
func TestRightsOfConditionTypes(t *testing.T) {
	t.Parallel()
	text := string(render(t, "{features: {condition: true, conditionTypes: [A, B=problem]}}"))
	if n := strings.Count(text, "filter(c, !(c.type in ['GPUHealthy', 'A', 'B']))"); n != 2 {
		t.Errorf("the policy names the types %d times, want 2", n)
	}
	const file = `{config: {map: {a: "features: {condition: true, conditionTypes: [A]}"}}}`
	if text := string(render(t, file)); !strings.Contains(text, "filter(c, c.type != 'GPUHealthy')") {
		t.Error("a file gives rights for a type")
	}
}
