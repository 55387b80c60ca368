package daemon

import (
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// measured makes a node whose daemon serves metrics of its GPUs, which it measures each second.
func measured(t *testing.T, setup node.Setup) (s *stage, at string) {
	t.Helper()
	at = metricsAddress(t)
	setup.Args = append(setup.Args, "--metrics-address", at, "--gpu-metrics-interval=1s", "--node-name=node-1")
	s = open(t, setup)
	s.start()
	return s, at
}

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

// TestGPUMetricsThatTheDriverRefuses: the other metrics are served, and status says which are
// absent and why.
func TestGPUMetricsThatTheDriverRefuses(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	refuses := simulator.Fault{Kind: simulator.KindFail, GPU: "2", Call: "GpmSampleGet", Return: "NO_PERMISSION"}
	other := refuses
	other.GPU = "5"
	s.broken(refuses, other)
	at := metricsAddress(t)
	s.Args = append(s.Args, "--metrics-address", at, "--gpu-metrics-interval=1s")
	s.start()
	s.hasSeries(at, 8, temperature)
	s.hasSeries(at, 6, "DCGM_FI_PROF_SM_ACTIVE")
	const want = "DCGM_FI_PROF_* are absent for GPUs 2, 5: no permission: add the capability SYS_ADMIN to this container"
	s.says("two GPUs have no performance monitoring", func(now status) bool {
		return len(now.MetricsAbsent) == 1 && strings.HasPrefix(now.MetricsAbsent[0], want)
	})
}

const temperature = "DCGM_FI_DEV_GPU_TEMP"

// TestGPUMetrics: values are measured again and again, pods are in the labels while they run, and
// so is the node's name.
func TestGPUMetrics(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{Args: []string{"--gpu-metrics-pod-uid"}})
	s.shows(8, 8)
	s.hasSeries(at, 8, temperature, `hostname="node-1"`)
	s.hasSeries(at, 8, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
	s.hasSeries(at, 8, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
	energy := s.series(at, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
	s.eventually("energy is used", func() bool {
		return !slices.Equal(energy, s.series(at, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"))
	})
	gpu := s.admitOf("p", gpu, 1)[0]
	s.hasSeries(at, 1, temperature, `UUID="`+gpu+`"`, `container="main"`, `namespace="default"`, `pod="p"`, `pod_uid="p"`)
	s.hasSeries(at, 1, "gpu_device_plugin_pod_device", `pod_uid="p"`)
	s.Remove("p")
	s.hasSeries(at, 0, temperature, `pod="p"`)
	s.hasSeries(at, 0, "gpu_device_plugin_pod_device")
	s.hasSeries(at, 8, temperature)
	s.inject(simulator.Fault{Kind: simulator.KindThrottle, GPU: "3"},
		simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 31})
	s.hasSeries(at, 1, temperature, `gpu="3"`, "} 93")
	s.hasSeries(at, 1, "gpu_device_plugin_gpu_slowed", `gpu="3"`, `reason="hw_thermal"`, "} 1")
	s.hasSeries(at, 1, "DCGM_FI_DEV_XID_ERRORS", `gpu="4"`, `err_code="31"`, "} 31")
}

// TestGPUMetricsOfMIG: a GPU in MIG mode has its temperature once, and each GPU instance its memory
// with the pod that holds it.
func TestGPUMetricsOfMIG(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{Profile: "h100-mig-1g", Args: []string{"--mig-strategy=single"}})
	s.hasSeries(at, 8, temperature)
	s.hasSeries(at, 0, temperature, "GPU_I_ID")
	s.hasSeries(at, 0, "DCGM_FI_DEV_GPU_UTIL")
	s.hasSeries(at, 56, "DCGM_FI_DEV_FB_USED", "GPU_I_ID", `GPU_I_PROFILE="1g.10gb"`)
	s.hasSeries(at, 56, "DCGM_FI_DEV_FB_USED")
	s.hasSeries(at, 56, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "GPU_I_ID")
	s.until("MIG devices", func() bool { return s.Allocatable(gpu) == 56 })
	s.admitOf("p", gpu, 1)
	s.hasSeries(at, 1, "DCGM_FI_DEV_FB_USED", "GPU_I_ID", `pod="p"`)
	s.hasSeries(at, 0, temperature, `pod="p"`)
	s.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0"})
	s.hasSeries(at, 49, "DCGM_FI_DEV_FB_USED", "GPU_I_ID")
	s.hasSeries(at, 50, "DCGM_FI_DEV_FB_USED")
	s.hasSeries(at, 1, "DCGM_FI_DEV_GPU_UTIL", `gpu="0"`)
}

// TestGPUMetricsOfSharedGPUs: a GPU that pods share is counted once.
func TestGPUMetricsOfSharedGPUs(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	at := metricsAddress(t)
	file := s.write("config.yaml", "version: v1\nflags: {metricsAddress: \""+at+
		"\", gpuMetricsInterval: 1s, gpuMetricsHostnameLabel: none}\n"+
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n")
	s.Args = []string{"--config-file", file}
	s.start()
	s.shows(32, 32)
	for _, pod := range []string{"p", "q", "r"} {
		s.admitOf(pod, gpu, 8)
	}
	s.hasSeries(at, 8, temperature)
	s.hasSeries(at, 0, temperature, "pod=")
	s.hasSeries(at, 0, temperature, "hostname")
	s.hasSeries(at, 0, "gpu_device_plugin_pod_device", "pod_uid")
	s.eventually("each pod is seen on its GPUs", func() bool {
		return len(s.series(at, "gpu_device_plugin_pod_device")) >= 8 &&
			len(s.series(at, "gpu_device_plugin_pod_device", `pod="r"`)) > 0
	})
	for _, pod := range []string{"p", "q", "r"} {
		s.Remove(pod)
	}
	s.hasSeries(at, 0, "gpu_device_plugin_pod_device")
	s.write("config.yaml", "version: v1\nflags: {metricsAddress: \""+at+"\", gpuMetrics: false}\n")
	s.hasSeries(at, 0, temperature)
	s.hasSeries(at, 0, "gpu_device_plugin_sample_timestamp_seconds")
	s.hasSeries(at, 1, "gpu_device_plugin_build_info")
}

// TestGPUMetricsOfGPUsThatGo: the series of a GPU that is unplugged end. Those of one that fell off
// the bus end, too, but for the XID.
func TestGPUMetricsOfGPUsThatGo(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{})
	s.hasSeries(at, 8, temperature)
	s.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "7"})
	s.hasSeries(at, 0, "DCGM_FI_DEV_XID_ERRORS", `gpu="7"`)
	s.hasSeries(at, 7, temperature)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "2", XID: 79})
	s.hasSeries(at, 6, temperature)
	s.hasSeries(at, 1, "DCGM_FI_DEV_XID_ERRORS", `gpu="2"`, "} 79")
}

// TestGPUMetricsWhileTheDriverHangs: each scrape is answered with the last values and their times;
// so it is while the driver is released.
func TestGPUMetricsWhileTheDriverHangs(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{})
	s.hasSeries(at, 8, temperature)
	s.inject(simulator.Fault{Kind: simulator.KindHang})
	s.signal(s.Running(), syscall.SIGHUP)
	s.shows(8, 0)
	times := s.series(at, "gpu_device_plugin_sample_timestamp_seconds")
	if len(times) != 8 || len(s.series(at, temperature)) != 8 {
		t.Errorf("%d times and %d temperatures", len(times), len(s.series(at, temperature)))
	}
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.shows(8, 8)
	s.eventually("GPUs are measured again", func() bool {
		now := s.series(at, "gpu_device_plugin_sample_timestamp_seconds")
		return len(now) == 8 && !slices.ContainsFunc(now, func(line string) bool { return slices.Contains(times, line) })
	})
	s.call("quiesce", nil)
	times = s.series(at, "gpu_device_plugin_sample_timestamp_seconds")
	if len(times) != 8 || len(s.series(at, temperature)) != 8 {
		t.Errorf("while the driver is released: %d times and %d temperatures", len(times), len(s.series(at, temperature)))
	}
	s.call("resume", nil)
	s.eventually("GPUs are measured after resume", func() bool {
		now := s.series(at, "gpu_device_plugin_sample_timestamp_seconds")
		return len(now) == 8 && !slices.Equal(now, times)
	})
}

// TestGPUMetricsWithoutPodResources: values are there without kubelet's account, and without the
// pods that it named before.
func TestGPUMetricsWithoutPodResources(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{})
	s.shows(8, 8)
	s.admitOf("p", gpu, 2)
	s.hasSeries(at, 2, temperature, `pod="p"`)
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
	s.hasSeries(at, 2, temperature, `pod="p"`)
}

// TestGPUMetricsBesideDamagedPodResources: values are there, and scrapes are answered at once,
// whatever answers in kubelet's place.
func TestGPUMetricsBesideDamagedPodResources(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(net.Conn){
		"silent": func(net.Conn) {},
		"damaged": func(c net.Conn) {
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\n\r\n\x00\x01\xff")) // the daemon may be gone
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{})
			socket, at := s.Path("other.sock"), metricsAddress(t)
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					answer(c)
				}
			}()
			s.Args = []string{"--metrics-address", at, "--gpu-metrics-interval=1s", "--pod-resources-socket", socket}
			s.start()
			s.hasSeries(at, 8, temperature)
			s.logs("Metrics of GPUs name no pods")
			s.hasSeries(at, 8, temperature)
			s.hasSeries(at, 0, "gpu_device_plugin_pod_device")
		})
	}
}

// TestGPUMetricsOfTwoDaemons: each measures the GPUs for itself, and one that ends takes nothing
// from the other.
func TestGPUMetricsOfTwoDaemons(t *testing.T) {
	t.Parallel()
	s, at := measured(t, node.Setup{})
	s.shows(8, 8)
	gpu := s.admitOf("p", gpu, 1)[0]
	also := metricsAddress(t)
	other := s.beside("dgx-h100", "--metrics-address", also, "--gpu-metrics-interval=1s")
	other.start()
	other.becomesReady("")
	for _, address := range []string{at, also} {
		s.hasSeries(address, 8, temperature)
		s.hasSeries(address, 1, temperature, `UUID="`+gpu+`"`, `pod="p"`)
	}
	first := s.Running()
	s.signal(first, syscall.SIGTERM)
	s.ends(first)
	times := s.series(also, "gpu_device_plugin_sample_timestamp_seconds")
	s.eventually("the other goes on measuring", func() bool {
		now := s.series(also, "gpu_device_plugin_sample_timestamp_seconds")
		return len(now) == 8 && !slices.Equal(now, times)
	})
}
