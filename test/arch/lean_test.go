package arch

import (
	"io/fs"
	"os/exec"
	"strings"
	"testing"
)

// TestTheDevicePluginLinksNoClient: the program without the API server is small because nothing
// that it imports imports a client.
func TestTheDevicePluginLinksNoClient(t *testing.T) {
	t.Parallel()
	for program, isLean := range map[string]bool{lean: true, "cmd/gpu-node-agent": false} {
		output, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../../"+program).Output()
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

// TestNothingSetsTemplates: the linker leaves out what nothing calls, unless something calls
// methods by name, as text/template does. cobra calls that only where one of its templates is set.
func TestNothingSetsTemplates(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{"cmd", "internal"} {
		err := fs.WalkDir(root, folder, func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			text, err := fs.ReadFile(root, file)
			for _, setter := range []string{".SetVersionTemplate(", ".SetHelpTemplate(", ".SetUsageTemplate("} {
				if strings.Contains(string(text), setter) {
					t.Errorf("%s calls %s: the programs get 4 MB larger by that", file, setter)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
