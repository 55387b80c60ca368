package drivercli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/drivercli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out strings.Builder
	err := drivercli.Execute(t.Context(), args, &out)
	return out.String(), err
}

func TestWrongCalls(t *testing.T) {
	t.Parallel()
	digest := strings.Repeat("0", 64)
	for args, want := range map[string]string{
		"pack":              "pack needs the path of a .run file: gpu-driver pack RUN --sha256 DIGEST",
		"pack a b":          "pack needs the path of a .run file",
		"pack a":            "--sha256 is missing: give the digest that NVIDIA publishes beside the file",
		"pack a --sha256 1": "--folder, --image and --archive are missing: name at least one of them",
		"pack a --sha256 1 --folder f --modules m":    "--modules is there 1 times and --kernel 0 times",
		"pack a --sha256 1 --folder f":                `"1" is not a SHA-256 digest`,
		"pack none --sha256 " + digest + " --image i": "no such file or directory",
		"pack --foo":      "unknown flag: --foo; gpu-driver pack --help lists the flags",
		"build-modules a": "--sha256 is missing: SHA-256 digest of the .run file",
		"build-modules a --sha256 " + digest + " --folder f":                       "--kernel-source is missing: folder with the headers",
		"build-modules a --sha256 " + digest + " --folder f --kernel-source /none": "/none is not the folder of a built kernel or of its headers",
		"verify":                          "verify needs the path of a driver folder: gpu-driver verify FOLDER",
		"verify /none":                    "/none: no such file or directory",
		"place":                           "place needs a digest or a version, or --from: gpu-driver place",
		"place a --from b":                "place needs a digest or a version, or --from",
		"fetch":                           "fetch needs the URL of an archive: gpu-driver fetch URL --sha256 DIGEST",
		"fetch https://a":                 "--sha256 is missing: give the digest that gpu-driver pack has printed",
		"swap":                            "swap needs the digest or the version of a driver folder: gpu-driver swap DIGEST|VERSION",
		"status --socket /none/s":         "`gpu-driver serve` does not answer: start its pod, or name its socket with --socket: dial",
		"serve --module-parameter nvidia": "--module-parameter nvidia is not like MODULE.NAME=VALUE",
		"unpack":                          `unknown command "unpack"`,
	} {
		if _, err := run(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gpu-driver %s: %v, want %s", args, err, want)
		}
	}
}

func TestVerify(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	m := driverfolder.Manifest{
		Schema: driverfolder.Schema, Version: "580.95.05", Architecture: "arm64", Source: strings.Repeat("0", 64),
		Kernels: []driverfolder.Kernel{
			{Release: "6.1.0", Open: true, Signed: true, Signer: "a\x1b[2Jkey"}, {Release: "6.8.0"},
		},
	}
	for _, k := range m.Kernels {
		m.Files = append(m.Files, driverfolder.File{
			Path: driverfolder.ModuleFolder(k.Release) + "/nvidia.ko", Mode: "0644",
			SHA256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", // of nothing
		})
	}
	text, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		m.Files[0].Path: "", m.Files[1].Path: "", driverfolder.ManifestName: string(text),
	} {
		name = filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(name, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out, err := run(t, "verify", folder)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(out, "\n")
	if want := "driver   580.95.05, arm64, 2 files, 0 MB\nkernel   6.1.0: open modules, signed by a^[[2Jkey\n" +
		"kernel   6.8.0: proprietary modules, not signed\n"; rest != want || !strings.HasPrefix(out, "digest   sha256:") {
		t.Errorf("%q, want %q", out, want)
	}
	if err := os.WriteFile(filepath.Join(folder, "more"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "verify", folder); err == nil || !strings.Contains(err.Error(), "more: is not in the manifest") {
		t.Errorf("with one file more: %v", err)
	}
}
