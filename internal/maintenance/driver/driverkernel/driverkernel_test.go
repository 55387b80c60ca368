package driverkernel_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

const version = "580.95.05"

func put(t *testing.T, file, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// modulesIn writes modules into a new folder. A module's value are the modules on which it depends.
func modulesIn(t *testing.T, modules map[string]string) (folder string, m driverfolder.Manifest) {
	t.Helper()
	folder = t.TempDir()
	m = driverfolder.Manifest{Version: version, Architecture: runtime.GOARCH,
		Kernels: []driverfolder.Kernel{{Release: standinkernel.Release}}}
	for name, depends := range modules {
		content := standinkernel.Module(map[string]string{"name": name, "version": version, "depends": depends,
			"vermagic": standinkernel.Release + " SMP"})
		sum := sha256.Sum256(content)
		f := driverfolder.File{Path: driverfolder.ModuleFolder(standinkernel.Release) + "/" + name + ".ko", Mode: "0600",
			Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
		m.Files = append(m.Files, f)
		put(t, filepath.Join(folder, f.Path), string(content))
	}
	return folder, m
}

func ignore(int, int) {}

func TestOrderOfModules(t *testing.T) {
	t.Parallel()
	k := standinkernel.New(t)
	put(t, filepath.Join(k.Root, "sys/module/ecc/refcnt"), "0")
	folder, m := modulesIn(t, map[string]string{"nvidia-drm": "drm,nvidia-modeset", "nvidia-uvm": "nvidia",
		"nvidia-modeset": "video,nvidia", "nvidia": "ecc", "nvidia-peermem": "nvidia,ib_core"})
	kernel := driverkernel.Kernel{Root: k.Root, Calls: k, Parameters: map[string]string{"nvidia": " NVreg_A=1"}}
	if err := kernel.Load(t.Context(), folder, m, ignore); err != nil {
		t.Fatal(err)
	}
	want := "load nvidia 580.95.05 NVreg_A=1\nload nvidia_uvm 580.95.05\nmodprobe video\nload nvidia_modeset 580.95.05\n" +
		"modprobe drm\nload nvidia_drm 580.95.05\n" // nothing loads modules of InfiniBand
	if diff := cmp.Diff(want, k.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	k.Forget()
	if err := kernel.Load(t.Context(), folder, m, ignore); err != nil || k.Calls() != "" {
		t.Errorf("what is loaded is loaded again: %v, %s", err, k.Calls())
	}
	if err := kernel.Unload(ignore); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff("unload nvidia_uvm\nunload nvidia_drm\nunload nvidia_modeset\nunload nvidia\n", k.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestDeviceNodes(t *testing.T) {
	t.Parallel()
	k := standinkernel.New(t)
	for file, content := range map[string]string{
		"proc/devices": "Character devices:\n195 nvidia-frontend\n235 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n195 nvidia\n",
		"proc/driver/nvidia/gpus/0000:0a:00.0/information": "Model: \t\t NVIDIA A100\nDevice Minor: \t 3\n",
		"proc/driver/nvidia/gpus/0000:0b:00.0/information": "Model: \t\t lost\n",
		"proc/driver/nvidia/capabilities/mig/config":       "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
		"proc/driver/nvidia/capabilities/mig/monitor":      "DeviceFileMinor: 2\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"dev/nvidia-uvm": "510:0", // of a former driver
	} {
		put(t, filepath.Join(k.Root, file), content)
	}
	kernel := driverkernel.Kernel{Root: k.Root, Calls: k}
	if err := kernel.MakeNodes(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"nvidiactl": "195:255 -rw-rw-rw-", "nvidia-modeset": "195:254 -rw-rw-rw-",
		"nvidia3": "195:3 -rw-rw-rw-", "nvidia-uvm": "511:0 -rw-rw-rw-", "nvidia-uvm-tools": "511:1 -rw-rw-rw-",
		"nvidia-caps/nvidia-cap1": "235:1 -r--------", "nvidia-caps/nvidia-cap2": "235:2 -r--r--r--"} {
		file := filepath.Join(k.Root, "dev", name)
		text, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
			continue
		}
		info, err := os.Stat(file)
		if err != nil || string(text)+" "+info.Mode().String() != want {
			t.Errorf("/dev/%s is %s %v, want %s", name, text, info.Mode(), want)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(k.Root, "dev")); err != nil || len(entries) != 7 { // and null
		t.Errorf("/dev has %v, %v", entries, err)
	}
}

// The sentences for folders that cannot be loaded, and for refusals of the kernel.
func TestFoldersThatAreRefused(t *testing.T) {
	t.Parallel()
	good := map[string]string{"nvidia": "", "nvidia-uvm": "nvidia"}
	module := driverfolder.ModuleFolder(standinkernel.Release) + "/nvidia.ko"
	for name, tt := range map[string]struct {
		prepare func(t *testing.T, k *standinkernel.Kernel, folder string, m *driverfolder.Manifest)
		want    string
	}{
		"no modules for the kernel": {func(_ *testing.T, _ *standinkernel.Kernel, _ string, m *driverfolder.Manifest) {
			m.Files = nil
		}, "driver 580.95.05 has no modules for the kernel " + standinkernel.Release},
		"a changed module": {func(t *testing.T, _ *standinkernel.Kernel, folder string, _ *driverfolder.Manifest) {
			t.Helper()
			put(t, filepath.Join(folder, module), "changed")
		}, "nvidia.ko: it has the digest"},
		"a link to another module": {func(t *testing.T, _ *standinkernel.Kernel, folder string, _ *driverfolder.Manifest) {
			t.Helper()
			if err := errors.Join(os.Remove(filepath.Join(folder, module)),
				os.Symlink("nvidia-uvm.ko", filepath.Join(folder, module))); err != nil {
				t.Fatal(err)
			}
		}, "nvidia.ko: it is not a regular file"},
		"another version": {func(_ *testing.T, _ *standinkernel.Kernel, _ string, m *driverfolder.Manifest) {
			m.Version = "590.1.1"
		}, "the kernel says that driver 580.95.05 is loaded, and the folder has 590.1.1"},
		"firmware of another program": {func(t *testing.T, k *standinkernel.Kernel, folder string, _ *driverfolder.Manifest) {
			t.Helper()
			put(t, filepath.Join(folder, "lib/firmware/nvidia/gsp.bin"), "")
			put(t, filepath.Join(k.Root, "sys/module/firmware_class/parameters/path"), "/opt/firmware\n")
		}, "the kernel looks for firmware in /opt/firmware, which another program has set"},
		"a signature that the kernel does not know": {func(_ *testing.T, k *standinkernel.Kernel, _ string, _ *driverfolder.Manifest) {
			k.Refuse("nvidia", unix.EKEYREJECTED)
		}, "it demands signed modules, and knows no key with which this one is signed"},
		"nouveau has the GPU": {func(_ *testing.T, k *standinkernel.Kernel, _ string, _ *driverfolder.Manifest) {
			k.Refuse("nvidia", unix.EBUSY)
		}, "another driver, such as nouveau or vfio-pci, has the GPUs"},
		"an unknown reason": {func(_ *testing.T, k *standinkernel.Kernel, _ string, _ *driverfolder.Manifest) {
			k.Refuse("nvidia", unix.EFBIG)
		}, "the kernel log may have the reason (file too large)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := standinkernel.New(t)
			folder, m := modulesIn(t, good)
			tt.prepare(t, k, folder, &m)
			kernel := driverkernel.Kernel{Root: k.Root, Calls: k}
			if err := kernel.Load(t.Context(), folder, m, ignore); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}
