package daemon

import (
	"maps"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestNVIDIADevicePlugin: under NVIDIA's name the daemon ignores what NVIDIA's ignores, arguments
// included, also when it reads the file again, unless the file says otherwise.
func TestNVIDIADevicePlugin(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "nvidia-device-plugin")
	if err := os.Symlink(binary, program); err != nil {
		t.Fatal(err)
	}
	const shared = "version: v1\nresources: {gpus: [{pattern: '*', name: large}]}\n" +
		"sharing: {timeSlicing: {resources: [{name: gpu, rename: gpu.dev, devices: [0], replicas: 2}, {name: gpu, replicas: 4}]}}\n"
	s := open(t, node.Setup{Daemon: program})
	file := s.write("config.yaml", shared)
	s.Args = []string{"--config-file", file, "serve", "--mig-strategy=many"}
	s.start()
	s.logs("Ignoring arguments")
	s.logs("is ignored, as by NVIDIA's device plugin")
	has := func(when string, want map[string]int) {
		t.Helper()
		s.eventually(when, func() bool {
			got := map[string]int{}
			for name, quantity := range s.Resources() {
				if quantity != (standin.Quantity{}) {
					got[name] = quantity.Allocatable
				}
			}
			return maps.Equal(got, want)
		})
	}
	has("all GPUs are shared by four", map[string]int{gpu: 32})

	s.write("config.yaml", "flags: {migStrategy: none}\n"+shared)
	s.signal(s.Running(), syscall.SIGHUP)
	has("the file was read again", map[string]int{gpu: 32})

	s.write("config.yaml", "flags: {compatibility: none}\n"+shared)
	s.signal(s.Running(), syscall.SIGHUP)
	has("the file has its effect", map[string]int{"nvidia.com/large": 8})
}
