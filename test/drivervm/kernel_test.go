package drivervm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

// The stand-ins behave as modules of the driver do: numbers, references, and an order of unloading.
func TestStandIns(t *testing.T) {
	m := newMachine(t)
	g := m.mustBoot(t)
	t.Logf("the guest was ready after %v", since(g))
	folder := "/tools/drivers/" + oldDriver.version + "/lib/modules/" + m.kernel + "/"
	if _, err := g.try("load", folder+"nvidia-uvm.ko"); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("nvidia-uvm without nvidia: %v, and not ENOENT for the missing symbol", err)
	}
	for _, name := range []string{"nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"} {
		g.do("load", folder+name+".ko")
	}
	if got := g.do("driver"); strings.Count(got, oldDriver.version) != 4 {
		t.Errorf("loaded modules:\n%s", got)
	}
	g.do("run", "/bin/busybox", "mknod", "/dev/nvidiactl", "c", "195", "255")
	g.do("hold", "/dev/nvidiactl")
	for _, name := range []string{"nvidia", "nvidia_modeset"} {
		if _, err := g.try("unload", name); err == nil || !strings.Contains(err.Error(), "resource temporarily unavailable") {
			t.Errorf("unload %s with a dependent module: %v", name, err)
		}
	}
	for _, name := range []string{"nvidia_drm", "nvidia_modeset", "nvidia_uvm"} {
		g.do("unload", name)
	}
	if _, err := g.try("unload", "nvidia"); err == nil || !strings.Contains(err.Error(), "resource temporarily unavailable") {
		t.Errorf("unload nvidia with an open file: %v", err)
	}
	g.do("let-go")
	g.do("unload", "nvidia")
	g.powerOff()
}

// A guest that hangs says where: gpu-driver and the kernel write their stacks to the console.
func TestStacks(t *testing.T) {
	g := newMachine(t).mustBoot(t)
	g.serve()
	g.mustCall(driverapi.CallStatus)
	g.stacks()
	for _, want := range []string{"SIGQUIT: quit", "driverhost.", "main.stacks", "/task/1 init"} {
		if !strings.Contains(g.console.String(), want) {
			t.Errorf("the stacks of the processes do not have %q:\n%s", want, g.console.String())
		}
	}
	g.panics()
	if !strings.Contains(g.console.String(), "Kernel panic - not syncing: NMI") {
		t.Errorf("the kernel does not write its stack:\n%s", g.tail())
	}
}

func since(g *guest) time.Duration { return time.Since(g.booted).Round(100 * time.Millisecond) }

// NVIDIA's own open module for this kernel is accepted by the kernel, and finds no GPU.
func TestOpenModule(t *testing.T) {
	if !*openFlag {
		t.Skip("NVIDIA's open module is not built: make driver-vm builds it")
	}
	m := newMachine(t)
	g := m.mustBoot(t)
	_, err := g.try("load", "/tools/nvidia.ko")
	if err == nil || err.Error() != "no such device" || !strings.Contains(g.log(), "No NVIDIA GPU found") {
		t.Errorf("load NVIDIA's module: %v\n%s", err, g.tail())
	}
	g.powerOff()
}

// openModules returns the folder with NVIDIA's own open module nvidia.ko, built for a kernel.
func openModules(t *testing.T, release string) string {
	t.Helper()
	source := filepath.Join(*partsFlag, "open/source")
	version, err := os.ReadFile(filepath.Join(*partsFlag, "open/version"))
	if err != nil {
		t.Fatal(err)
	}
	// The others need minutes more, and cannot be loaded without this one.
	t.Setenv("NV_EXCLUDE_KERNEL_MODULES", "nvidia-uvm nvidia-modeset nvidia-drm nvidia-peermem")
	return buildModules(t, strings.TrimSpace(string(version)), release, filesIn(t, source))
}
