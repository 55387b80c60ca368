package driverroot_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
)

func TestLibraryFolders(t *testing.T) {
	t.Parallel()
	for _, folder := range []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "lib64", "lib/aarch64-linux-gnu", "usr/lib64/nvidia",
		"usr/lib/aarch64-linux-gnu/nvidia/current", "usr/lib/nvidia", "usr/local/nvidia/lib64", "usr/local/nvidia/lib",
		"usr/local/lib64", "usr/local/lib/x86_64-linux-gnu", "usr/local/lib", "usr/lib", "lib",
	} {
		files, err := driverroot.Find(fstest.MapFS{folder + "/libcuda.so.580.95.05": {}}, "580.95.05")
		if err != nil || !slices.Equal(files.LibraryFolders, []string{folder}) || len(files.Libraries) != 1 {
			t.Errorf("%s: found in %q, %v", folder, files.LibraryFolders, err)
		}
	}
}

// TestFind reads a root with every kind of driver file, and with files that only look similar.
func TestFind(t *testing.T) {
	t.Parallel()
	const version, folder = "580.95.05", "usr/lib64"
	root := t.TempDir()
	full := func(name string) string {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, file := range []string{
		folder + "/libcuda.so.470.1", folder + "/libnvidia-nvvm70.so.4", folder + "/vdpau/libvdpau_nvidia.so." +
			version,
		"bin/nvidia-smi", "usr/sbin/nvidia-imex", "sbin/nvidia-imex", "usr/bin/other",
		"run/nvidia-fabricmanager/socket", "etc/OpenCL/vendors/nvidia.icd",
	} {
		if err := os.WriteFile(full(file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for library, flag := range map[string]string{"libcuda.so.": "-Wl,-soname,libcuda.so.1",
		"libplain.so.": "-Wl,--as-needed"} {
		c := exec.CommandContext(t.Context(), "gcc", "-shared", "-nostdlib", flag, "-x", "c", "-o",
			full(folder+"/"+library+version), os.DevNull)
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v: %s", err, out)
		}
	}
	if err := syscall.Mkfifo(full(folder+"/libpipe.so."+version), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/bin/nvidia-smi", full("usr/bin/nvidia-debugdump")); err != nil {
		t.Fatal(err)
	}
	got, err := driverroot.Find(os.DirFS(root), version)
	if err != nil {
		t.Fatal(err)
	}
	want := driverroot.Files{
		LibraryFolders: []string{folder},
		Libraries: []driverroot.Library{
			{Path: folder + "/libcuda.so." + version, Soname: "libcuda.so.1",
				Links: []string{"libcuda.so"}}, {Path: folder + "/libpipe.so." + version},
			{Path: folder + "/libplain.so." + version},
			{Path: folder + "/vdpau/libvdpau_nvidia.so." + version}, {Path: folder + "/libnvidia-nvvm70.so.4"},
		},
		Programs: []string{"bin/nvidia-smi", "usr/bin/nvidia-debugdump", "usr/sbin/nvidia-imex"},
		Others:   []driverroot.DataFile{{"etc/OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd"}},
		Sockets:  []string{"run/nvidia-fabricmanager/socket"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(driverroot.Files{}, driverroot.Library{}),
		cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for name, at := range map[string]string{"usr/bin/nvidia-debugdump": "bin/nvidia-smi",
		"bin/nvidia-smi": "bin/nvidia-smi"} {
		if got.At(name) != at {
			t.Errorf("%s is at %q, want %q", name, got.At(name), at)
		}
	}
}

func TestFindWithoutLibraries(t *testing.T) {
	t.Parallel()
	root := fstest.MapFS{"usr/lib64/libcuda.so.580.95.05": {}, "usr/lib64/libcuda.so.": {}}
	for _, version := range []string{"", "590.1"} {
		if _, err := driverroot.Find(root, version); !errors.Is(err, driverroot.ErrNoLibraries) {
			t.Errorf("version %q: got error %v, want driverroot.ErrNoLibraries", version, err)
		}
	}
}
