package cdi_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestTemporarilyMissingDriverRoot: while the driver root cannot be read, containers are given what was
// found in it, a device that comes then, too. Of another version nothing was found.
func TestTemporarilyMissingDriverRoot(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles()...)
	some := wanted()
	some.Plan.Resources = some.Plan.Resources[:1]
	h.apply(t, some)
	w := wanted()
	h.apply(t, w)
	before := h.spec(t, "gpu")
	h.apply(t, some) // and one device is gone

	root := filepath.Join(h.root, "driver-root")
	if err := os.Rename(root, root+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(h.specs); err != nil { // by somebody else
		t.Fatal(err)
	}
	written, err := h.writer.Apply(w)
	if err == nil || !strings.Contains(err.Error(), "below /driver-root") {
		t.Errorf("with the driver root away: got error %v", err)
	}
	if lacks := written.Lacks(w); len(lacks) > 0 {
		t.Errorf("with the driver root away: lacks %v", lacks)
	}
	if diff := cmp.Diff(before, h.spec(t, "gpu")); diff != "" {
		t.Errorf("spec with the driver root away (-want +got):\n%s", diff)
	}

	newer := wanted()
	newer.Snapshot.Driver.Version = "590.1"
	written, err = h.writer.Apply(newer)
	if lacks := written.Lacks(newer); err == nil || len(lacks) == 0 {
		t.Errorf("a version that was never seen: got error %v and lacks %v", err, lacks)
	}

	if err := os.Rename(root+".away", root); err != nil {
		t.Fatal(err)
	}
	h.apply(t, w)
}
