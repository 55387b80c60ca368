package driverroot_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/driverroot"
)

// TestFindInSeveralFolders: Debian has most libraries in a folder of their own and the others above it. A library is found once, with the names
// that its folder has for it; one of another architecture is not found.
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
		folder + "/nvidia/current/libcuda.so." + version: "libcuda.so.1", folder + "/nvidia/current/libnvidia-ml.so." + version: "libnvidia-ml.so.1",
		folder + "/libnvidia-gpucomp.so." + version: "libnvidia-gpucomp.so." + version, folder + "/libnvidia-ml.so." + version: "libnvidia-ml.so.1",
		folder + "/libnvidia-egl-gbm.so.1.1.2": "libnvidia-egl-gbm.so.1", folder + "/libnvidia-egl-gbm.so.1": "libnvidia-egl-gbm.so.1",
		"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so." + version: "libglxserver_nvidia.so",
		"usr/lib/libnvidia-other.so." + version:                             "",
	} {
		c := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", "-Wl,-soname,"+soname, "-x", "c", "-o", full(name), os.DevNull)
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
		folder + "/nvidia/current/libnvidia-ml.so": "libnvidia-ml.so.1", folder + "/nvidia/current/libnvidia-ml.so.1": "libnvidia-ml.so." + version,
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
	if want := []driverroot.DataFile{{Path: "usr/share/vulkan/icd.d/nvidia_icd.json", Container: "/etc/vulkan/icd.d/nvidia_icd.json"}}; !slices.Equal(files.Others, want) {
		t.Errorf("others %q, want %q", files.Others, want)
	}
	if want := []string{"usr/lib/nvidia/current/nvidia-smi"}; !slices.Equal(files.Programs, want) {
		t.Errorf("programs %q", files.Programs)
	}
}
