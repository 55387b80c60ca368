package arch

import (
	"os/exec"
	"strings"
	"testing"
)

// TestTheDevicePluginLinksNoClient: the program without the API server is small because nothing that it imports imports a client.
func TestTheDevicePluginLinksNoClient(t *testing.T) {
	t.Parallel()
	for program, isLean := range map[string]bool{lean: true, "cmd/gpu-node-agent": false} {
		output, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "./"+program).Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		var found []string
		for dependency := range strings.Lines(string(output)) {
			for _, forbidden := range notLean {
				if dependency = strings.TrimSpace(dependency); isBelow(dependency, forbidden) {
					found = append(found, dependency)
				}
			}
		}
		if isLean && len(found) > 0 {
			t.Errorf("%s links %s", program, strings.Join(found, ", "))
		}
		if !isLean && len(found) == 0 {
			t.Errorf("%s links none of %s: this test finds nothing", program, strings.Join(notLean, ", "))
		}
	}
}
