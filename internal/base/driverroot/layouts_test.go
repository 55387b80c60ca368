package driverroot_test

import (
	"cmp"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

// TestFindInSeveralFolders: Debian has most libraries in a separate folder and the others above. A
// library is found once, with the names from the same folder; a library of another architecture is
// not found.
func TestFindInSeveralFolders(t *testing.T) {
	t.Parallel()
	const version, folder = "550.1", "usr/lib/x86_64-linux-gnu"
	root := t.TempDir()
	full := func(name string) string {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for name, soname := range map[string]string{
		folder + "/nvidia/current/libcuda.so." + version: "libcuda.so.1", folder + "/nvidia/current/libnvidia-ml.so." +
			version: "libnvidia-ml.so.1",
		folder + "/libnvidia-gpucomp.so." + version: "libnvidia-gpucomp.so." + version, folder + "/libnvidia-ml.so." +
			version: "libnvidia-ml.so.1",
		folder + "/libnvidia-egl-gbm.so.1.1.2": "libnvidia-egl-gbm.so.1", folder +
			"/libnvidia-egl-gbm.so.1": "libnvidia-egl-gbm.so.1",
		"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so." + version: "libglxserver_nvidia.so",
		"usr/lib/libnvidia-other.so." + version:                             "",
	} {
		c := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", "-Wl,-soname,"+soname, "-x", "c", "-o",
			full(name), os.DevNull)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v: %s", err, out)
		}
	}
	other := full("usr/lib/libnvidia-other.so." + version)
	text, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	text[18], text[19] = 3, 0 // EM_386, in the header of an ELF file
	if err := os.WriteFile(other, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{
		folder + "/nvidia/current/libnvidia-ml.so": "libnvidia-ml.so.1", folder +
			"/nvidia/current/libnvidia-ml.so.1": "libnvidia-ml.so." + version,
		"lib": "usr/lib",
	} {
		if err := os.Symlink(target, full(link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"usr/share/vulkan/icd.d/nvidia_icd.json", "usr/lib/nvidia/current/nvidia-smi"} {
		if err := os.WriteFile(full(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files, err := driverroot.Find(os.DirFS(root), version)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range slices.Concat(files.Libraries, files.Modules) {
		got = append(got, append([]string{l.Path, l.Soname}, l.Links...)...)
	}
	want := []string{
		folder + "/nvidia/current/libcuda.so." + version, "libcuda.so.1", "libcuda.so",
		folder + "/nvidia/current/libnvidia-ml.so." + version, "libnvidia-ml.so.1", "libnvidia-ml.so",
		folder + "/libnvidia-gpucomp.so." + version, "libnvidia-gpucomp.so." + version,
		folder + "/libnvidia-egl-gbm.so.1.1.2", "libnvidia-egl-gbm.so.1",
		"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so." + version, "libglxserver_nvidia.so",
	}
	if !slices.Equal(got, want) {
		t.Errorf("libraries and modules\n%q, want\n%q", got, want)
	}
	if want := []string{folder + "/nvidia/current", folder}; !slices.Equal(files.LibraryFolders, want) {
		t.Errorf("folders %q, want %q", files.LibraryFolders, want)
	}
	if want := []driverroot.DataFile{{Path: "usr/share/vulkan/icd.d/nvidia_icd.json",
		Container: "/etc/vulkan/icd.d/nvidia_icd.json"}}; !slices.Equal(files.Others, want) {
		t.Errorf("others %q, want %q", files.Others, want)
	}
	if want := []string{"usr/lib/nvidia/current/nvidia-smi"}; !slices.Equal(files.Programs, want) {
		t.Errorf("programs %q", files.Programs)
	}
}

// TestLibrarySearchPathIsUsed: a library is found at the place of each distribution, behind
// absolute links of NixOS, and first in the folders of the search path.
func TestLibrarySearchPathIsUsed(t *testing.T) {
	t.Parallel()
	made := filepath.Join(t.TempDir(), "library")
	c := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", "-x", "c", "-o", made, os.DevNull)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	text, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		files      []string
		links      map[string]string
		searchPath []string
		want       string
	}{
		"NixOS": {
			files: []string{"nix/store/b/lib/libnvidia-ml.so.1"}, links: map[string]string{
				"run/opengl-driver":                 "/nix/store/a",
				"nix/store/a/lib/libnvidia-ml.so.1": "/nix/store/b/lib/libnvidia-ml.so.1",
			},
			want: "nix/store/b/lib/libnvidia-ml.so.1",
		},
		"Talos":        {files: []string{"usr/local/glibc/usr/lib/libnvidia-ml.so.1"}},
		"GKE":          {files: []string{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1"}},
		"Bottlerocket": {files: []string{"usr/lib/nvidia/tesla/libnvidia-ml.so.1"}},
		"Flatcar":      {files: []string{"opt/nvidia/current/lib64/libnvidia-ml.so.1"}},
		"a named folder before the usual ones": {
			files: []string{"srv/lib/libnvidia-ml.so.1", "usr/lib64/libnvidia-ml.so.1"}, searchPath: []string{"gone",
				"srv/lib"},
		},
		"a usual folder where the named one has none": {files: []string{"usr/lib64/libnvidia-ml.so.1"},
			searchPath: []string{"srv/lib"}},
		"WSL":               {files: []string{"usr/lib/wsl/lib/libnvidia-ml.so.1"}, want: "none"},
		"an unknown folder": {files: []string{"srv/lib/libnvidia-ml.so.1"}, want: "none"},
	} {
		root := t.TempDir()
		for _, file := range tt.files {
			if err := os.MkdirAll(filepath.Join(root, filepath.Dir(file)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, file), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for link, target := range tt.links {
			if err := os.MkdirAll(filepath.Join(root, filepath.Dir(link)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(target, filepath.Join(root, link)); err != nil {
				t.Fatal(err)
			}
		}
		want := filepath.Join(root, cmp.Or(tt.want, tt.files[0]))
		if tt.want == "none" {
			want = ""
		}
		if got := driverroot.Locate(root, driverroot.NVML, tt.searchPath...); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// TestFindInTheSearchPath: the files for containers are looked for in the named folders, too.
func TestFindInTheSearchPath(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "srv/lib"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "srv/lib/libcuda.so.580.1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := driverroot.Find(os.DirFS(root), "580.1"); err == nil {
		t.Error("libraries are found where nobody said that they are")
	}
	files, err := driverroot.Find(os.DirFS(root), "580.1", "srv/lib")
	if err != nil || !slices.Equal(files.LibraryFolders, []string{"srv/lib"}) {
		t.Errorf("folders %q: %v", files.LibraryFolders, err)
	}
}

// TestIsWSL: by device node or by kernel.
func TestIsWSL(t *testing.T) {
	t.Parallel()
	const release = "proc/sys/kernel/osrelease"
	for name, tt := range map[string]struct {
		node fstest.MapFS
		want bool
	}{
		"its device node":   {fstest.MapFS{"dev/dxg": {}}, true},
		"its kernel":        {fstest.MapFS{release: {Data: []byte("6.6.87.2-microsoft-standard-WSL2\n")}}, true},
		"a virtual machine": {fstest.MapFS{release: {Data: []byte("6.8.0-1021-azure\n")}}, false},
		"a pipe":            {fstest.MapFS{release: {Mode: fs.ModeNamedPipe}}, false},
		"nothing":           {fstest.MapFS{}, false},
	} {
		if got := driverroot.IsWSL(tt.node); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
