package daemon

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// series returns the series of a metric that have all these labels.
func (s *stage) series(at, name string, labels ...string) []string {
	s.t.Helper()
	code, body := fetch(s.t, at, "/metrics")
	if code != http.StatusOK {
		return nil
	}
	var found []string
	for line := range strings.Lines(body) {
		has := func(label string) bool { return strings.Contains(line, label) }
		if strings.HasPrefix(line, name+"{") && !slices.ContainsFunc(labels, func(l string) bool { return !has(l) }) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// hasSeries waits until a metric has so many series with these labels.
func (s *stage) hasSeries(at string, count int, name string, labels ...string) {
	s.t.Helper()
	last := 0
	defer func() {
		if s.t.Failed() {
			s.t.Logf("%s has %d series with %v", name, last, labels)
		}
	}()
	s.eventually(strconv.Itoa(count)+" series of "+name+" with "+strings.Join(labels, ", "), func() bool {
		last = len(s.series(at, name, labels...))
		return last == count
	})
}

// admitOf has kubelet start a container with a device of a resource.
func (s *stage) admitOf(pod, resource string, count int) []string {
	s.t.Helper()
	got, err := s.Admit(s.t.Context(), standin.Container{Pod: pod, Name: "main", Resource: resource, Count: count})
	if err != nil {
		s.t.Fatal(err)
	}
	return got.IDs
}

const temperature = "DCGM_FI_DEV_GPU_TEMP"

// TestGPUMetrics: values are measured again and again. They name the node, and pods as long as the pods
// run and the kubelet tells of them. Metrics that the driver refuses are absent, and status says why. The
// configuration file switches all of them off.
func TestGPUMetrics(t *testing.T) {
	t.Parallel()
	s, at := open(t, node.Setup{}), metricsAddress(t)
	refused := simulator.Fault{Kind: simulator.KindFail, GPU: "2", Call: "GpmSampleGet", Return: "NO_PERMISSION"}
	also := refused
	also.GPU = "5"
	s.broken(refused, also)
	const config = "version: v1\nflags: {metricsAddress: %q, gpuMetricsInterval: 1s, gpuMetrics: %t}\n"
	file := s.write("config.yaml", fmt.Sprintf(config, at, true))
	s.Args = []string{"--config-file", file, "--gpu-metrics-pod-uid", "--node-name=node-1"}
	s.start()
	s.shows(8, 8)
	s.hasSeries(at, 8, temperature, `hostname="node-1"`)
	s.hasSeries(at, 8, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
	s.hasSeries(at, 6, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
	const want = "DCGM_FI_PROF_* are absent for GPUs 2, 5: no permission: add the capability SYS_ADMIN to this container"
	s.says("two GPUs have no performance monitoring", func(now status) bool {
		return len(now.MetricsAbsent) == 1 && strings.HasPrefix(now.MetricsAbsent[0], want)
	})
	energy := s.series(at, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
	s.eventually("energy is used", func() bool {
		return !slices.Equal(energy, s.series(at, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"))
	})

	device := s.admitOf("p", gpu, 1)[0]
	s.hasSeries(at, 1, temperature, `UUID="`+device+`"`, `container="main"`, `namespace="default"`, `pod="p"`, `pod_uid="p"`)
	s.hasSeries(at, 1, "gpu_device_plugin_pod_device", `pod_uid="p"`)
	s.Remove("p")
	s.hasSeries(at, 0, temperature, `pod="p"`)
	s.hasSeries(at, 0, "gpu_device_plugin_pod_device")
	s.admitOf("q", gpu, 2)
	s.hasSeries(at, 2, temperature, `pod="q"`)
	if err := os.Remove(s.PodResourcesSocket()); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	s.hasSeries(at, 0, temperature, "pod=")
	s.hasSeries(at, 8, temperature)
	s.logs("Metrics of GPUs name no pods")
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	s.hasSeries(at, 2, temperature, `pod="q"`)

	s.inject(simulator.Fault{Kind: simulator.KindThrottle, GPU: "3"},
		simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 31})
	s.hasSeries(at, 1, temperature, `gpu="3"`, "} 93")
	s.hasSeries(at, 1, "gpu_device_plugin_gpu_slowed", `gpu="3"`, `reason="hw_thermal"`, "} 1")
	s.hasSeries(at, 1, "DCGM_FI_DEV_XID_ERRORS", `gpu="4"`, `err_code="31"`, "} 31")

	s.write("config.yaml", fmt.Sprintf(config, at, false))
	s.hasSeries(at, 0, temperature)
	s.hasSeries(at, 0, "gpu_device_plugin_sample_timestamp_seconds")
	s.hasSeries(at, 1, "gpu_device_plugin_build_info")
}
