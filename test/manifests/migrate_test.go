package manifests

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestMigrationStops runs the documented commands of each migration, with programs in place of
// kubectl and helm. NVIDIA's plugin is removed only if the new one is ready on as many nodes, and
// on one at least (kdp#1213).
func TestMigrationStops(t *testing.T) {
	t.Parallel()
	block := regexp.MustCompile("(?s)<!-- migration: run by test/manifests TestMigrationStops -->\n```console\n(.*?)\n```")
	removes := regexp.MustCompile(`(?m)^(kubectl .*delete ds/nvidia|helm uninstall nvdp|helm upgrade gpu-operator .*devicePlugin\.enabled=false)`)
	found := block.FindAllSubmatch(read(t, "../../docs/migrate.md"), -1)
	if len(found) != 3 {
		t.Fatalf("%d migrations are documented, want 3", len(found))
	}
	for _, migration := range found {
		commands := strings.ReplaceAll("\n"+string(migration[1]), "\n$ ", "\n")
		for _, tt := range []struct {
			ours, theirs string
			want         bool
		}{
			{"3", "3", true}, {"5", "3", true},
			{"0", "3", false}, {"2", "3", false}, {"0", "0", false},
			{"", "3", false}, {"3", "", false}, // kubectl fails
		} {
			t.Run(fmt.Sprintf("%q of %q%s", tt.ours, tt.theirs, strings.SplitN(commands, " -", 2)[0]), func(t *testing.T) {
				t.Parallel()
				folder := t.TempDir()
				// What a program was called with is in calls. A status of a DaemonSet is all that kubectl
				// prints.
				fake := "#!/bin/sh\necho \"${0##*/} $*\" >>" + folder + "/calls\n" +
					"case \"$*\" in *get\\ ds\\ gpu-device-plugin*) printf %s '" + tt.ours + "';; *get\\ ds*) printf %s '" +
					tt.theirs + "';; esac\n"
				for _, name := range []string{"kubectl", "helm"} {
					if err := os.WriteFile(filepath.Join(folder, name), []byte(fake), 0o700); err != nil {
						t.Fatal(err)
					}
				}
				cmd := exec.CommandContext(t.Context(), "sh", "-c", commands)
				cmd.Dir, cmd.Env = folder, []string{"PATH=" + folder + ":" + os.Getenv("PATH")}
				out, err := cmd.CombinedOutput()
				calls := read(t, filepath.Join(folder, "calls"))
				if removed := removes.Match(calls); removed != tt.want || (err == nil) != tt.want {
					t.Errorf("removed %t, ended with %v, want %t; called:\n%s\nprinted:\n%s", removed, err, tt.want, calls, out)
				}
				if !tt.want && !bytes.Contains(out, []byte("NVIDIA's on "+tt.theirs)) {
					t.Errorf("does not say why nothing was removed: %s", out)
				}
			})
		}
	}
}
