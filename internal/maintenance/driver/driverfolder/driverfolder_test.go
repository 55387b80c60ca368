package driverfolder_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
)

const (
	library = "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"
	link    = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
	module  = "lib/modules/6.8.0/nvidia.ko"
)

func digestOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func manifest() driverfolder.Manifest {
	return driverfolder.Manifest{
		Schema: 1, Version: "580.95.05", Architecture: "amd64", Source: digestOf("run"),
		Kernels: []driverfolder.Kernel{{Release: "6.8.0", Open: true, Vermagic: "6.8.0 SMP"}},
		Files: []driverfolder.File{
			{Path: module, Mode: "0644", Size: 6, SHA256: digestOf("module")},
			{Path: link, Link: "libcuda.so.580.95.05"},
			{Path: library, Mode: "0755", Size: 4, SHA256: digestOf("cuda")},
		},
	}
}

// folder writes the driver folder of manifest.
func folder(t *testing.T) string {
	t.Helper()
	top := t.TempDir()
	text, err := manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{module: "module", library: "cuda", driverfolder.ManifestName: string(text)} {
		if err := os.MkdirAll(filepath.Join(top, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(top, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.Chmod(filepath.Join(top, module), 0o644), os.Chmod(filepath.Join(top, library), 0o755),
		os.Symlink("libcuda.so.580.95.05", filepath.Join(top, link)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return top
}

func TestVerify(t *testing.T) {
	t.Parallel()
	type at func(name string) string
	for name, tt := range map[string]struct {
		change func(at) error
		want   string // empty for a good folder
	}{
		"good":        {func(at) error { return nil }, ""},
		"other bytes": {func(at at) error { return os.WriteFile(at(library), []byte("CUDA"), 0) }, library + ": has the digest "},
		"shorter":     {func(at at) error { return os.Truncate(at(library), 1) }, library + ": has 1 bytes, and should have 4"},
		"setuid": {func(at at) error { return os.Chmod(at(library), fs.ModeSetuid|0o755) },
			library + ": has the mode urwxr-xr-x, and should have -rwxr-xr-x"},
		"missing":         {func(at at) error { return os.Remove(at(library)) }, library + ": is missing"},
		"more":            {func(at at) error { return os.WriteFile(at("usr/x"), nil, 0o600) }, "usr/x: is not in the manifest"},
		"one folder more": {func(at at) error { return os.MkdirAll(at("opt/x"), 0o700) }, "opt: is not in the manifest"},
		"a named pipe": {func(at at) error { return errors.Join(os.Remove(at(library)), syscall.Mkfifo(at(library), 0o755)) },
			library + ": is a named pipe, and should be a regular file"},
		"a link for a file": {func(at at) error {
			return errors.Join(os.Rename(at(library), at("../cuda")), os.Symlink(at("../cuda"), at(library)))
		}, library + ": is a link, and should be a regular file"},
		"a link for a folder": {func(at at) error {
			return errors.Join(os.Rename(at("usr"), at("../usr")), os.Symlink("../usr", at("usr")))
		}, "usr: is a link where a folder should be"},
		"another link": {func(at at) error { return errors.Join(os.Remove(at(link)), os.Symlink("/etc/passwd", at(link))) },
			link + `: is a link to "/etc/passwd", and should be a link to "libcuda.so.580.95.05"`},
		"a file for a link": {func(at at) error { return errors.Join(os.Remove(at(link)), os.WriteFile(at(link), nil, 0o600)) },
			link + ": is a regular file, and should be a link"},
		"no manifest": {func(at at) error { return os.Remove(at(driverfolder.ManifestName)) }, "manifest.json: no such file or directory"},
		"a link for the manifest": {func(at at) error {
			name := driverfolder.ManifestName
			return errors.Join(os.Rename(at(name), at("m")), os.Symlink("m", at(name)))
		}, "manifest.json: not a regular file"},
		"an endless manifest": {func(at at) error {
			name := driverfolder.ManifestName
			return errors.Join(os.Remove(at(name)), syscall.Mkfifo(at(name), 0o644))
		}, "manifest.json: not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inside := filepath.Join(t.TempDir(), "folder")
			if err := os.Rename(folder(t), inside); err != nil {
				t.Fatal(err)
			}
			if err := tt.change(func(name string) string { return filepath.Join(inside, name) }); err != nil {
				t.Fatal(err)
			}
			_, _, err := driverfolder.Verify(t.Context(), inside)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %s", err, tt.want)
			}
		})
	}
}

func TestManifestsThatLie(t *testing.T) {
	t.Parallel()
	good, err := manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	file := func(format string, args ...any) string {
		return strings.Replace(string(good), `"files": [`, `"files": [`+fmt.Sprintf(format, args...)+",", 1)
	}
	const aDigest = `"sha256": "0000000000000000000000000000000000000000000000000000000000000000"`
	for name, tt := range map[string]struct{ text, want string }{
		"good":              {string(good), ""},
		"empty":             {"", "not JSON of a driver folder"},
		"of another schema": {strings.Replace(string(good), `"schemaVersion": 1`, `"schemaVersion": 2`, 1), "schemaVersion 2 is unknown: this program knows version 1"},
		"of no driver":      {strings.Replace(string(good), `"580.95.05"`, `"../x"`, 1), `driverVersion "../x" is not the version of a driver`},
		"of a machine":      {strings.Replace(string(good), `"amd64"`, `"sparc"`, 1), `architecture "sparc" is neither amd64 nor arm64`},
		"without a source":  {strings.Replace(string(good), digestOf("run"), "", 1), `runSHA256 "" is not a digest`},
		"two objects":       {string(good) + "{}", "text after the end of the JSON object"},
		"a path out":        {file(`{"path": "../x", "mode": "0644", %s}`, aDigest), `"../x" is not a path inside the folder`},
		"an absolute path":  {file(`{"path": "/etc/passwd", "mode": "0644", %s}`, aDigest), `"/etc/passwd" is not a path inside the folder`},
		"itself":            {file(`{"path": "manifest.json", "mode": "0644", %s}`, aDigest), `"manifest.json" is not a path inside the folder`},
		"a link out":        {file(`{"path": "a/b", "link": "../../x"}`), `the link a/b leads out of the folder: "../../x"`},
		"a link out and in": {file(`{"path": "a/b", "link": "../../folder/usr"}`), `the link a/b leads out of the folder`},
		"an absolute link":  {file(`{"path": "a/b", "link": "/etc"}`), `the link a/b leads out of the folder: "/etc"`},
		"a link and a file": {file(`{"path": "a/b", "link": "c", "mode": "0644"}`), "a/b is a link, and has a mode, a size or a digest"},
		"setuid":            {file(`{"path": "a", "mode": "4755", %s}`, aDigest), "the mode of a is not like 0755"},
		"no digest":         {file(`{"path": "a", "mode": "0755"}`), `the digest of a is not a SHA-256 digest: ""`},
		"a negative size":   {file(`{"path": "a", "mode": "0755", "size": -1, %s}`, aDigest), "the size of a is -1"},
		"a path twice":      {file(`{"path": "%s", "mode": "0755", %s}`, module, aDigest), module + " is named twice or not in order"},
		"a file as a folder": {file(`{"path": "lib/modules", "mode": "0755", %s}`, aDigest),
			"lib/modules is a file, and the folder of " + module},
		"a kernel without files": {strings.Replace(string(good), `"6.8.0"`, `"6.9.0"`, 1), "kernel 6.9.0 has no files in lib/modules/6.9.0/"},
		"a kernel that is a path": {strings.Replace(string(good), `"6.8.0"`, `"../6"`, 1),
			`"../6" is not the release of a kernel`},
		"too large": {strings.Repeat(" ", 17<<20), "manifest.json: larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, digest, err := driverfolder.Read(fstest.MapFS{driverfolder.ManifestName: {Data: []byte(tt.text), Mode: 0o644}})
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error %v, want %s", err, tt.want)
				}
				return
			}
			if err != nil || digest != digestOf(tt.text) || !m.HasKernel("6.8.0") || len(m.ModuleFiles("6.8.0")) != 1 {
				t.Errorf("%+v, digest %s: %v", m, digest, err)
			}
		})
	}
}
