package manifests

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	spdx "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
)

// TestSBOM reads the documents of a program, an image and the chart with SPDX's own library, and has
// it check that every relationship is about something that is there.
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
	ofBinary := root("run", "./hack/sbom", "-libc", "2.36", binary)
	isValidSBOM(t, ofBinary, 20)

	folder := t.TempDir()
	for _, layer := range []string{"plugin", "agent"} {
		if err := os.MkdirAll(filepath.Join(folder, layer, "usr"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	archive, chart := filepath.Join(folder, "gpu.oci.tar"), filepath.Join(folder, "gpu.tgz")
	root("run", "./hack/image/write", "registry.example.com/gpu:v1", archive, "amd64="+folder)
	for name, text := range map[string][]byte{binary + ".spdx.json": ofBinary, chart: []byte("a chart")} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	isValidSBOM(t, root("run", "./hack/sbom", "-contains", binary+".spdx.json",
		"-package", "pkg:deb/debian/busybox-static@1.35?arch=amd64 GPL-2.0-only", archive), 22)
	isValidSBOM(t, root("run", "./hack/sbom", "-image", archive, chart), 2)
}

// isValidSBOM has SPDX's library read and check a document about one package, with at least so many
// packages, each of them with a relationship.
func isValidSBOM(t *testing.T, text []byte, packages int) {
	t.Helper()
	doc, err := spdx.Read(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if err := spdxlib.ValidateDocument(doc); err != nil {
		t.Error(err)
	}
	described, err := spdxlib.GetDescribedPackageIDs(doc)
	if err != nil || len(described) != 1 || len(doc.Packages) < packages || len(doc.Relationships) != len(doc.Packages) {
		t.Errorf("the document describes %v, %v; it has %d packages and %d relationships", described, err, len(doc.Packages),
			len(doc.Relationships))
	}
}
