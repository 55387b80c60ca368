package cdi_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
)

// Debian's alternatives are absolute links: they lead inside the driver root, wherever that is for
// the process that looks and for the host.
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
		h.link(t, filepath.Join("driver-root", link), target)
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

// The host's hook and its files for GPUDirect Storage, too, are where links lead below the host's
// root, not below this process's.
func TestLinksOfTheHostLeadInsideItsRoot(t *testing.T) {
	t.Parallel()
	here := newHost(t, "cufile.json", "hook") // as this process sees them
	for _, tt := range []struct {
		name, prefix string
		want         []string
	}{
		{"to what the host has", "/opt/", []string{"/usr/bin/nvidia-cdi-hook", "/etc/cufile.json"}},
		{"to what only this process sees", here.root + "/", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, driverFiles("driver-root/opt/cufile.json", "driver-root/opt/hook", "dev/nvidia-fs0")...)
			h.link(t, "driver-root/etc/cufile.json", tt.prefix+"cufile.json")
			h.link(t, "driver-root/usr/bin/nvidia-cdi-hook", tt.prefix+"hook")
			w := wanted()
			w.Edits.GDS = containeredits.Always
			w.Snapshot.Control |= inventory.NodeGDS
			h.apply(t, w)
			var got []string
			if hooks := h.spec(t, "gpu").ContainerEdits.Hooks; len(hooks) > 0 {
				got = append(got, hooks[0].Path)
			}
			for _, m := range h.spec(t, "gds").Devices[0].ContainerEdits.Mounts {
				got = append(got, m.HostPath)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("hook and mounts (-want +got):\n%s", diff)
			}
		})
	}
}

// link makes a symbolic link.
func (h *host) link(t *testing.T, path, target string) {
	t.Helper()
	path = filepath.Join(h.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}
