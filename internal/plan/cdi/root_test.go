package cdi_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestDriverRootThatIsNotMounted: where this process sees nothing at the path of the driver root in
// its container, it looks at the host's path.
func TestDriverRootThatIsNotMounted(t *testing.T) {
	t.Parallel()
	var paths []string
	for _, p := range driverFiles() {
		paths = append(paths, strings.TrimPrefix(p, "driver-root/"))
	}
	h := newHost(t, paths...)
	h.apply(t, wanted())
	var mounts []string
	for _, m := range h.spec(t, "gpu").ContainerEdits.Mounts {
		mounts = append(mounts, m.HostPath)
	}
	if !slices.Contains(mounts, "/usr/bin/nvidia-smi") {
		t.Errorf("mounts: %v, want nvidia-smi among them", mounts)
	}
}

// TestSpecOfAnotherKind: names in a file of ours that is of another kind are nobody's.
func TestSpecOfAnotherKind(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	h.apply(t, wanted())
	files, err := filepath.Glob(filepath.Join(h.specs, "*gpu*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("spec files: %v, %v", files, err)
	}
	other := `{"cdiVersion": "0.5.0", "kind": "example.com/other", "devices": [` +
		`{"name": "foreign", "containerEdits": {"env": ["A=b"]}}]}`
	if err := os.WriteFile(files[0], []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	h.apply(t, wanted())
	for _, d := range h.spec(t, "gpu").Devices {
		if d.Name == "foreign" {
			t.Error("a device of another kind is in the spec")
		}
	}
}

func TestSimulatedNodesNeedNoLibraries(t *testing.T) {
	t.Parallel()
	for _, version := range []string{version, ""} {
		h := newHost(t, "driver-root/usr/bin/nvidia-cdi-hook") // which has no libraries to tell of
		w := wanted()
		w.Options.DevicesOnly, w.Edits.Void, w.Snapshot.Driver.Version = true, false, version
		h.apply(t, w)
		if e := h.spec(t, "gpu").ContainerEdits; len(e.Mounts) != 0 || len(e.Env) != 0 || len(e.DeviceNodes) != 2 {
			text, _ := json.Marshal(e)
			t.Errorf("version %q: edits %s", version, text)
		}
	}
}
