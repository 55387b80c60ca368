package nodefacts_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// TestDRADrivers has a kubelet's folders with the registration sockets of several drivers, one of
// them dead.
func TestDRADrivers(t *testing.T) {
	t.Parallel()
	folder := loopback.Folder(t)
	plugins, registry := filepath.Join(folder, "device-plugins"), filepath.Join(folder, "plugins_registry")
	for _, made := range []string{plugins, registry} {
		if err := os.Mkdir(made, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	listen := func(path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	listen(filepath.Join(plugins, "kubelet.sock"))
	rolled := filepath.Join(registry, "gpu.nvidia.com-0b1c-reg.sock")
	listen(rolled)
	listen(filepath.Join(registry, "compute-domain.nvidia.com-reg.sock"))
	killed := listen(filepath.Join(registry, "gpu.nvidia.com-reg.sock"))
	killed.SetUnlinkOnClose(false)
	if err := killed.Close(); err != nil {
		t.Fatal(err)
	}
	facts := nodefacts.Places{Kernel: fstest.MapFS{}, Hidden: "hidden",
		KubeletSocket: filepath.Join(plugins, "kubelet.sock")}.Gather(t.Context())
	if diff := cmp.Diff([]string{rolled}, facts.Kubelet.Value.DRADrivers); diff != "" ||
		facts.Kubelet.Value.Refused != "" {
		t.Errorf("%+v, drivers (-want +got):\n%s", facts.Kubelet, diff)
	}
}
