package nvidia_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
)

// TestLengthsOfLists: a driver returns lengths that cannot be. The process goes on, uses no memory
// for them, and says that the driver gave no answer.
func TestLengthsOfLists(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"-DLIES=1", "-DLIES=2"} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			if out, code := runStub(t, "lengths", flag); code != 0 ||
				!strings.Contains(out, "--- PASS: TestStubProcess") {
				t.Fatalf("the process exited with %d:\n%s", code, out)
			}
		})
	}
}

func lengths(t *testing.T, d *nvidia.Driver, _ string) {
	s, err := d.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found, err := s.Processes(t.Context(), stubUUID(0)); err == nil {
		t.Errorf("%d processes, want an error", len(found))
	}
	if placements, instances := s.ListMIG(t.Context(), stubUUID(0)); placements != nvml.ERROR_UNKNOWN ||
		instances != nvml.ERROR_UNKNOWN {
		t.Errorf("places: %v, instances: %v", placements, instances)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		var kB int
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kB); n == 1 && kB > 200_000 {
			t.Errorf("the process had %d kB", kB)
		}
	}
}

// TestManyProcesses: a GPU has as many processes as fit into the list, or more.
func TestManyProcesses(t *testing.T) {
	t.Parallel()
	for _, many := range []string{"64", "65", "4096", "4097"} {
		t.Run(many, func(t *testing.T) {
			t.Parallel()
			out, code := runStubWith(t, "many processes", []string{"MANY=" + many}, "-DMANY="+many)
			if code != 0 || !strings.Contains(out, "--- PASS: TestStubProcess") {
				t.Fatalf("the process exited with %d:\n%s", code, out)
			}
		})
	}
}

func manyProcesses(t *testing.T, d *nvidia.Driver, _ string) {
	s, err := d.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	found, err := s.Processes(t.Context(), stubUUID(0))
	if many := os.Getenv("MANY"); many == "4097" {
		if err == nil || !strings.Contains(err.Error(), "nvmlDeviceGetComputeRunningProcesses") {
			t.Errorf("%d processes, %v", len(found), err)
		}
	} else if err != nil || fmt.Sprint(len(found)) != many || found[len(found)-1].PID != len(found)-1 {
		t.Errorf("%d processes, %v", len(found), err)
	}
}

// TestAnswerThatCannotBe: the driver has no handle of a GPU and says that it has. That GPU stays as
// it was last seen, the others are read, and the process goes on.
func TestAnswerThatCannotBe(t *testing.T) {
	t.Parallel()
	wrong := false
	r := newRigWith(t, "dgx-h100", hook(hookedLibrary{device: func(index int, d nvml.Device) nvml.Device {
		if wrong && index == 3 {
			return nil
		}
		return d
	}}))
	before := r.scan()
	wrong = true
	compare(t, "the node meanwhile", before, r.scan()) // GPU 3 as it was last seen
	for _, other := range []int{0, 1, 2, 4, 5, 6, 7} {
		if err := r.read(other); err != nil {
			t.Errorf("GPU %d: %v", other, err)
		}
	}
	wrong = false
	compare(t, "the node afterwards", before, r.scan())
}
