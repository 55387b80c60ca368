package main

import (
	"bytes"
	"context"
	"crypto/elliptic"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

const root = "../.."

// smallRelease writes what hack/release hands to hack/attest into a folder, with small programs in
// place of the real ones, and a key.
func smallRelease(t *testing.T) (folder string, artefacts []string) {
	t.Helper()
	folder, bin := t.TempDir(), t.TempDir()
	for program, source := range map[string]string{
		"gpu-device-plugin": "./hack/image/write", "gpu-node-agent": "./hack/provenance", "kubectl-gpu": "./hack/provenance",
		"gpu-driver": "./hack/image/write"} {
		name := program + "-" + version.Number + "-linux-" + runtime.GOARCH
		file := filepath.Join(folder, name)
		command(t, root, nil, "go", "build", "-o", file, source)
		sbom := []string{"run", "./hack/sbom", "-libc", "2.36+1", file}
		if program == "gpu-driver" { // which has no C library
			sbom = slices.Delete(sbom, 2, 4)
		}
		put(t, file+sbomSuffix, command(t, root, []string{"SOURCE_DATE_EPOCH=1790000000"}, "go", sbom...))
		artefacts = append(artefacts, name)
	}
	put(t, filepath.Join(bin, "program"), "a program")
	for _, tag := range []string{version.Number, version.Number + "-compat", version.Number + "-driver"} {
		name := "gpu-device-plugin-" + tag + archiveSuffix
		if err := image.FromFolder(bin, []string{"/program"}, "registry.example.com/x/gpu-device-plugin:"+tag,
			filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
		artefacts = append(artefacts, name)
	}
	command(t, root, nil, "make", "chart", "DIST="+folder)
	artefacts = append(artefacts, "gpu-device-plugin-"+strings.TrimPrefix(version.Number, "v")+".tgz")
	writeKeys(t, folder, newKey(t, elliptic.P256()))
	return folder, artefacts
}

func attest(t *testing.T, folder string) {
	t.Helper()
	key := filepath.Join(folder, "release.pem")
	command(t, root, []string{"SOURCE_DATE_EPOCH=1790000000", "KEY=" + key, "BUILDER="}, "hack/attest", folder, version.Number,
		"registry.example.com/x/gpu-device-plugin", commit, "pkg:golang/stdlib@1.26.8",
		"pkg:deb/debian/busybox-static@1:1.35?arch=amd64 sha256:00ff", "pkg:deb/debian/busybox-static@1:1.35?arch=arm64 sha256:11ff")
}

func command(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	c := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...)
	c.Dir, c.Env = dir, append(os.Environ(), env...)
	var output, problems bytes.Buffer
	c.Stdout, c.Stderr = &output, &problems
	if err := c.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, output.String(), problems.String())
	}
	return output.String()
}

// TestRelease attests a small release twice: each artefact has an SBOM and a statement that verifies,
// and the second time gives the same bytes. Then the commands of docs/dev/verify.md verify it.
func TestRelease(t *testing.T) {
	t.Parallel()
	folder, artefacts := smallRelease(t)
	attest(t, folder)
	first := filesOf(t, folder)
	var want []string
	for _, name := range artefacts {
		want = append(want, name, name+sbomSuffix, name+envelopeSuffix)
	}
	for _, name := range want {
		if first[name] == "" || !strings.Contains(first["SHA256SUMS"], "  "+name+"\n") {
			t.Errorf("%s is not there, or not in SHA256SUMS:\n%s", name, first["SHA256SUMS"])
		}
	}
	if len(first) != len(want)+len([]string{"SHA256SUMS", "release.pem", "release.pub"}) {
		t.Errorf("there are %d files, want %d and SHA256SUMS and the keys", len(first), len(want))
	}
	attest(t, folder)
	if diff := cmp.Diff(first, filesOf(t, folder)); diff != "" {
		t.Errorf("the same artefacts have other statements (-first +second):\n%s", diff)
	}
	for _, name := range artefacts {
		if err := run([]string{"-verify", "-key", filepath.Join(folder, "release.pub"), filepath.Join(folder, name)},
			&bytes.Buffer{}); err != nil {
			t.Error(err)
		}
	}
	t.Run("what the statements and SBOMs name", func(t *testing.T) { names(t, folder, first) })
	t.Run("commands of docs/dev/verify.md", func(t *testing.T) { runDocument(t, folder) })
}

func filesOf(t *testing.T, folder string) map[string]string {
	t.Helper()
	files := map[string]string{}
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		files[entry.Name()] = string(must(os.ReadFile(filepath.Join(folder, entry.Name()))))
	}
	return files
}

// names looks into the statement of an image and into the SBOMs of image and chart.
func names(t *testing.T, folder string, files map[string]string) {
	t.Helper()
	archive := "gpu-device-plugin-" + version.Number + archiveSuffix
	reference, digest, err := image.Reference(filepath.Join(folder, archive))
	if err != nil {
		t.Fatal(err)
	}
	var e envelope
	if err := json.Unmarshal([]byte(files[archive+envelopeSuffix]), &e); err != nil {
		t.Fatal(err)
	}
	var s statement
	if err := json.Unmarshal(must(decode(e.Payload)), &s); err != nil {
		t.Fatal(err)
	}
	if last := s.Subject[len(s.Subject)-1]; last.Name != reference || "sha256:"+last.Digest["sha256"] != digest {
		t.Errorf("the statement is about %+v, want also %s %s", s.Subject, reference, digest)
	}
	if diff := cmp.Diff([]resource{
		{URI: "git+" + repository, Digest: map[string]string{"gitCommit": commit}},
		{URI: "pkg:golang/stdlib@1.26.8"},
		{URI: "pkg:deb/debian/busybox-static@1:1.35?arch=amd64", Digest: map[string]string{"sha256": "00ff"}},
		{URI: "pkg:deb/debian/busybox-static@1:1.35?arch=arm64", Digest: map[string]string{"sha256": "11ff"}},
	}, s.Predicate.Definition.Dependencies); diff != "" {
		t.Errorf("dependencies (-want +got):\n%s", diff)
	}
	purl := `"pkg:oci/gpu-device-plugin@` + strings.ReplaceAll(digest, ":", "%3A") +
		"?repository_url=registry.example.com/x/gpu-device-plugin&tag=" + version.Number + `"`
	compat := "gpu-device-plugin-" + version.Number + "-compat" + archiveSuffix
	driver := "gpu-device-plugin-" + version.Number + "-driver" + archiveSuffix
	for name, want := range map[string][]string{
		archive: {purl, "SPDXRef-write-" + runtime.GOARCH, "SPDXRef-provenance-" + runtime.GOARCH, "SPDXRef-libc6-" + runtime.GOARCH},
		driver:  {"SPDXRef-write-" + runtime.GOARCH},
		compat:  {"SPDXRef-write-" + runtime.GOARCH, "SPDXRef-busybox-static-amd64", "SPDXRef-busybox-static-arm64"},
		"gpu-device-plugin-" + strings.TrimPrefix(version.Number, "v") + ".tgz": {purl, `"DEPENDS_ON"`},
	} {
		for _, text := range want {
			if !strings.Contains(files[name+sbomSuffix], text) {
				t.Errorf("the SBOM of %s has no %s:\n%s", name, text, files[name+sbomSuffix])
			}
		}
	}
	if strings.Contains(files[archive+sbomSuffix], "busybox") {
		t.Error("the SBOM of the image without a shell has busybox")
	}
	if strings.Contains(files[driver+sbomSuffix], "libc6") {
		t.Error("the SBOM of the image of gpu-driver has a C library")
	}
}

// TestKeysOfDocument makes a key as docs/dev/develop.md shows, and signs and verifies with it.
func TestKeysOfDocument(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("the document shows commands of openssl, which is not here")
	}
	commands, err := documents.Commands(root)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for _, c := range commands {
		if c.File == "docs/dev/develop.md" && strings.HasPrefix(c.Text, "openssl ") {
			command(t, folder, nil, "sh", "-c", c.Text)
		}
	}
	file := filepath.Join(folder, artefact)
	put(t, file, "a program")
	put(t, file+sbomSuffix, "what it has")
	for _, args := range [][]string{
		{"-version", "v0.1.0", "-image", "ghcr.io/x/y", "-commit", commit, "-key", filepath.Join(folder, "release.pem"), file},
		{"-verify", "-key", filepath.Join(folder, "release.pub"), file},
	} {
		if err := run(args, &bytes.Buffer{}); err != nil {
			t.Error(err)
		}
	}
}

// runDocument runs the commands of docs/dev/verify.md in order: those of this repository's program
// at the root, all others in the folder of the release.
func runDocument(t *testing.T, folder string) {
	t.Helper()
	for _, program := range []string{"openssl", "jq"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the document shows commands of %s, which is not here", program)
		}
	}
	commands, err := documents.Commands(root)
	if err != nil {
		t.Fatal(err)
	}
	here := []string{"set -euo pipefail", "cd " + folder}
	for _, c := range commands {
		text := strings.NewReplacer("v0.1.0", version.Number, "amd64", runtime.GOARCH).Replace(c.Text)
		switch {
		case c.File != "docs/dev/verify.md":
		case strings.HasPrefix(text, "go run "):
			text = strings.ReplaceAll(strings.ReplaceAll(text, "dist/", folder+"/"), "release.pub", folder+"/release.pub")
			output := command(t, root, nil, "sh", "-c", text)
			if strings.Count(output, ": verified\n") != 4 /* two files and their SBOMs */ || !strings.Contains(output, "  image registry.example.com/x/") {
				t.Errorf("%s prints\n%s", text, output)
			}
		default:
			here = append(here, text)
		}
	}
	output := command(t, folder, nil, "bash", "-c", strings.Join(here, "\n"))
	artefact := "gpu-device-plugin-" + version.Number + "-linux-" + runtime.GOARCH
	for _, want := range []string{"Verified OK\n", artefact + ": OK\n", artefact + sbomSuffix + ": OK\n",
		`"gitCommit": "` + commit + `"`} {
		if !strings.Contains(output, want) {
			t.Errorf("the commands do not print %q:\n%s", want, output)
		}
	}
}
