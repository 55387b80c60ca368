package manifests

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"testing"

	spdx "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
)

// TestSBOM reads the document with SPDX's own library, and has it check that every relationship is
// about something that is there.
func TestSBOM(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "gpu-device-plugin")
	root := func(args ...string) []byte {
		t.Helper()
		cmd := exec.Command("go", args...)
		cmd.Dir = "../.."
		var problems bytes.Buffer
		cmd.Stderr = &problems
		output, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", args[0], err, problems.String())
		}
		return output
	}
	root("build", "-trimpath", "-ldflags=-s -w", "-o", binary, "./cmd/gpu-device-plugin")
	doc, err := spdx.Read(bytes.NewReader(root("run", "./hack/sbom", "-libc", "2.36", binary)))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(doc); err != nil {
		t.Error(err)
	}
	described, err := spdxlib.GetDescribedPackageIDs(doc)
	if err != nil || len(described) != 1 || len(doc.Packages) < 20 || len(doc.Relationships) != len(doc.Packages) {
		t.Errorf("the document describes %v, %v; it has %d packages and %d relationships", described, err, len(doc.Packages),
			len(doc.Relationships))
	}
}
