package manifests

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRepairValues: the daemon that resets GPUs has the node's devices; the plan has the same rights
// on Leases only. It makes no difference whether values or a file ask.
func TestRepairValues(t *testing.T) {
	t.Parallel()
	for values, acts := range map[string]bool{
		"{repair: idle, rollout: {slots: 1}}":               true,
		"{config: {map: {a: \"health: {repair: idle}\"}}}":  true,
		"{repair: evict, rollout: {slots: 1}}":              true,
		"{config: {map: {a: \"health: {repair: evict}\"}}}": true,
		"{repair: plan}": false,
		"{repair: off, config: {map: {a: \"health: {repair: idle}\"}}}": false,
	} {
		objects := decode(t, "chart", render(t, values))
		want := []string{"as default"}
		if !strings.HasPrefix(values, "{repair: off") {
			want = append([]string{"kube-system: coordination.k8s.io leases list,create,update,delete",
				"policy gpu-device-plugin-slots"}, anyRights...)
			if strings.Contains(values, "evict") {
				want = append(want, "cluster:  pods list", "cluster:  pods/eviction create")
			}
			slices.Sort(want)
		}
		if diff := cmp.Diff(want, rights(t, objects)); diff != "" {
			t.Errorf("%s: rights (-want +got):\n%s", values, diff)
		}
		c := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec.Containers[0]
		if privileged := c.SecurityContext.Privileged; (privileged != nil && *privileged) != acts {
			t.Errorf("%s: privileged %v", values, privileged)
		}
		for _, e := range c.Env {
			if e.Name == "REPAIR" && !strings.Contains(values, "repair: "+e.Value) {
				t.Errorf("%s: REPAIR=%s", values, e.Value)
			}
		}
	}
}
