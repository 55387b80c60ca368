package field_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestLeftovers: the temporary files of a daemon that was killed while it wrote are gone after the
// next start (E3). Half-made device nodes need the right to make them:
// TestNodesOfAProcessThatWasKilled of internal/plan/devnodes has them.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	h := newHost(t, "--device-list-strategy=cdi-cri")
	h.stop()
	left := []string{"state/.faults.json.1.gpu-device-plugin.tmp", "state/.quiesce.json.2.gpu-device-plugin.tmp",
		"cdi/.x.json.3.gpu-device-plugin.tmp"}
	kept := []string{"state/faults.json.damaged", "cdi/.another.json.3.tmp", "cdi/another.tmp"}
	for _, name := range append(left, kept...) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(h.folder, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(h.folder, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	specs, err := filepath.Glob(filepath.Join(h.folder, "cdi/*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range specs { // so that the next daemon writes in the folder
		if err := os.Remove(spec); err != nil {
			t.Fatal(err)
		}
	}
	h.start("--device-list-strategy=cdi-cri")
	there := func(name string) bool {
		_, err := os.Lstat(filepath.Join(h.folder, name))
		return err == nil
	}
	for _, name := range left {
		poll.Until(t, name+" is removed", func() bool { return !there(name) })
	}
	for _, name := range kept {
		if !there(name) {
			t.Errorf("%s is removed", name)
		}
	}
	h.do("quiesce")
	h.do("resume")
	h.stop()
	for _, folder := range []string{"state", "cdi"} {
		entries, err := os.ReadDir(filepath.Join(h.folder, folder))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), ".gpu-device-plugin.tmp") {
				t.Errorf("a daemon that ends leaves %s", e.Name())
			}
		}
	}
}
