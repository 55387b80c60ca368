package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRightsOfQuiesce: the account may answer the annotation by which the driver is released, and
// change no other annotation. Beside TestRights, each of whose features doubles its combinations.
func TestRightsOfQuiesce(t *testing.T) {
	t.Parallel()
	want := append([]string{"cluster:  nodes patch", "policy gpu-device-plugin-nodes"}, anyRights...)
	slices.Sort(want)
	for values, notes := range map[string]string{
		"{features: {quiesce: true}}":                         "k in ['gpu-device-plugin.github.io/quiesce.state', 'gpu-device-plugin.github.io/quiesce.answer']",
		"{config: {map: {a: \"features: {quiesce: true}\"}}}": "k in ['gpu-device-plugin.github.io/quiesce.state', 'gpu-device-plugin.github.io/quiesce.answer']",
		"{features: {quiesce: true}, mig: {enabled: true, label: true}}": "k in ['gpu-device-plugin.github.io/mig.config.reason', 'gpu-device-plugin.github.io/quiesce.state', " +
			"'gpu-device-plugin.github.io/quiesce.answer']",
	} {
		text := render(t, values)
		if diff := cmp.Diff(want, rights(t, decode(t, "chart", text))); diff != "" {
			t.Errorf("%s: rights (-want +got):\n%s", values, diff)
		}
		if !strings.Contains(string(text), "variables.changedNotes.all(k, !variables.isStatus && "+notes+")") {
			t.Errorf("%s: the policy does not hold the annotations to %s", values, notes)
		}
	}
}
