package daemon

import (
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestDevicesThatCannotBeNamed: GPUs with impossible UUIDs, and one with a UUID that becomes
// another's while it is served, are left out, and containers get the others by every strategy.
func TestDevicesThatCannotBeNamed(t *testing.T) {
	t.Parallel()
	for _, strategy := range []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{})
			s.Args = []string{"--device-list-strategy", strategy, "--cdi-dir", s.Path("cdi"), "--nvidia-driver-root",
				s.Path("root")}
			faults := []simulator.Fault{{Kind: simulator.KindAnswer, Call: "DeviceGetCount", Value: "4294967295"}}
			for gpu, uuid := range map[string]string{
				"1": `""`, "2": `"GPU-\xff\xfe"`, "3": `"GPU-0\nGPU-1"`, "4": "GPU-0,GPU-1", "5": "GPU/0", "6": strings.Repeat("x",
					1_000_000),
			} {
				faults = append(faults, simulator.Fault{Kind: simulator.KindAnswer, GPU: gpu, Call: "DeviceGetUUID", Value: uuid})
			}
			s.broken(faults...)
			s.start()
			s.shows(2, 2)
			first, err := s.Admit(t.Context(), standin.Container{Pod: "first", Name: "main", Resource: gpu, Count: 2})
			if err != nil {
				t.Fatal(err)
			}
			gives(t, strategy, first)
			s.says("six GPUs are left out, each for its UUID", func(now status) bool {
				return len(now.LeftOut) == 6 && !slices.ContainsFunc(now.LeftOut,
					func(why string) bool { return !strings.Contains(why, "its UUID") })
			})

			profile, err := simulator.Load("dgx-h100")
			if err != nil {
				t.Fatal(err)
			}
			kept, becomes := profile.GPUs[7].UUID, profile.GPUs[0].UUID
			s.inject(simulator.Fault{Kind: simulator.KindAnswer, GPU: "0", Call: "DeviceGetUUID", Value: kept})
			s.allocatable(1)
			if devices := s.Devices(gpu); !devices[kept] || devices[becomes] || !slices.Contains(first.IDs, becomes) {
				t.Errorf("devices: %v, want %s Healthy and %s not", devices, kept, becomes)
			}
		})
	}
}

// gives fails the test if a container is not given all of its devices in the way of a strategy.
func gives(t *testing.T, strategy string, got standin.Allocation) {
	t.Helper()
	var given []string
	switch r := got.Response; strategy {
	case "envvar":
		given = strings.Split(r.GetEnvs()["NVIDIA_VISIBLE_DEVICES"], ",")
	case "volume-mounts":
		for _, m := range r.GetMounts() {
			given = append(given, path.Base(m.GetContainerPath()))
		}
	case "cdi-annotations":
		for _, names := range r.GetAnnotations() {
			given = append(given, strings.Split(names, ",")...)
		}
	case "cdi-cri":
		for _, d := range r.GetCdiDevices() {
			given = append(given, d.GetName())
		}
	}
	for _, id := range got.IDs {
		if !slices.ContainsFunc(given, func(name string) bool { return strings.HasSuffix(name, id) }) {
			t.Errorf("by %s a container is given %q, and its devices are %q", strategy, given, got.IDs)
		}
	}
}

// TestMIGWithoutTheCapability: the driver does not tell this process the memory of GPUs in MIG
// mode. Whole GPUs are served, and status names the capability.
func TestMIGWithoutTheCapability(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Profile: "a100-mig-mixed", Args: []string{"--mig-strategy", "mixed"}})
	s.broken(simulator.Fault{Kind: simulator.KindFail, Call: "DeviceGetMemoryInfo", Return: "NO_PERMISSION"})
	s.start()
	s.shows(2, 2)
	names := func(text string) bool { return strings.Contains(text, "add the capability SYS_ADMIN") }
	s.says("status names the capability", func(now status) bool { return slices.ContainsFunc(now.LeftOut, names) })
	warns := func(line string) bool { return strings.Contains(line, "Plan warning") && names(line) }
	s.eventually("a warning of the plan names the capability", func() bool {
		log, err := os.ReadFile(s.LogPath())
		return err == nil && slices.ContainsFunc(strings.Split(string(log), "\n"), warns)
	})
}
