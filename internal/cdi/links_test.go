package cdi_test

import (
	"os"
	"path/filepath"
	"testing"
)

// Debian's alternatives are absolute links: they lead inside the driver root, wherever that is for the process that looks
// and for the host.
func TestLinksLeadInsideTheDriverRoot(t *testing.T) {
	t.Parallel()
	h := newHost(t, driverFiles("driver-root/usr/lib/nvidia/current/nvidia-debugdump", "driver-root/opt/icd.json")...)
	for link, target := range map[string]string{
		"usr/bin/nvidia-debugdump":                  "/etc/alternatives/nvidia--nvidia-debugdump",
		"etc/alternatives/nvidia--nvidia-debugdump": "/usr/lib/nvidia/current/nvidia-debugdump",
		"usr/bin/nvidia-persistenced":               "/usr/bin/nvidia-persistenced",
		"usr/bin/nvidia-imex":                       "/not/there",
		"etc/OpenCL/vendors/nvidia.icd":             "../../../opt/icd.json",
	} {
		link = filepath.Join(h.root, "driver-root", link)
		if err := os.MkdirAll(filepath.Dir(link), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	w := wanted()
	w.Options.DriverRoot = "/run/nvidia/driver"
	h.apply(t, w)
	mounts := map[string]string{} // container path → host path
	for _, m := range h.spec(t, "gpu").ContainerEdits.Mounts {
		mounts[m.ContainerPath] = m.HostPath
	}
	for container, want := range map[string]string{
		"/usr/bin/nvidia-debugdump":      "/run/nvidia/driver/usr/lib/nvidia/current/nvidia-debugdump",
		"/usr/bin/nvidia-smi":            "/run/nvidia/driver/usr/bin/nvidia-smi",
		"/usr/bin/nvidia-persistenced":   "",
		"/usr/bin/nvidia-imex":           "",
		"/etc/OpenCL/vendors/nvidia.icd": "/run/nvidia/driver/etc/OpenCL/vendors/nvidia.icd",
	} {
		if got := mounts[container]; got != want {
			t.Errorf("%s is mounted from %q, want %q", container, got, want)
		}
	}
}
