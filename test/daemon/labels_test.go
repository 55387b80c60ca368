package daemon

import (
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// slowLinks are faults of a driver that takes so long for links between GPUs that the first looks
// do not tell all of them.
var slowLinks = []simulator.Fault{{Kind: simulator.KindSlow, Call: "DeviceGetNvLinkState", Delay: "20ms"}}

// labeled returns the labels of the node.
func labeled(server *apiserver.Server) map[string]string {
	n, err := server.Node(nodeName)
	if err != nil {
		return map[string]string{"error": err.Error()}
	}
	return n.Labels
}

// expected returns the labels that a set of package labels has for a simulated node, without the
// timestamp.
func expected(t *testing.T, set string) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../internal/plan/labels/testdata/sets/" + set + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if !strings.HasPrefix(line, "#") && key != "nvidia.com/gfd.timestamp" {
			want[key] = value
		}
	}
	return want
}

// labelsBecome waits until the node has these labels. In a small cluster that takes less than 2 s
// on a machine that has nothing else to do.
func (s *stage) labelsBecome(server *apiserver.Server, when string, want map[string]string) {
	s.t.Helper()
	begun := time.Now()
	defer func() {
		if s.t.Failed() {
			s.t.Logf("%s (-want +got):\n%s", when, cmp.Diff(want, labeled(server)))
		}
	}()
	s.eventually(when, func() bool { return maps.Equal(labeled(server), want) })
	s.t.Logf("%s: labels after %v", when, time.Since(begun).Round(time.Millisecond))
}

// TestLabels: labels tell of what happens, stay as they are while the driver is away, and are not
// written again after a kill. An API server that is away keeps nothing from kubelet, and is told
// what it missed. The driver is slow, which makes no further write.
func TestLabels(t *testing.T) {
	t.Parallel()
	s, server := openAgent(t, "h100-mig-1g", "--node-labels=node", "--mig-strategy=mixed")
	s.broken(slowLinks...)
	s.write("machine", "DGXH100 (rev. 2)\n")
	s.Args = append(s.Args, "--machine-type-file", s.Path("machine"))
	s.start()
	all := expected(t, "h100-mig-1g-mixed")
	s.labelsBecome(server, "start", all)
	s.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0"})
	whole := expected(t, "h100-mig-1g-one-whole")
	s.labelsBecome(server, "a GPU leaves MIG mode", whole)

	s.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "no-library"})
	s.says("the driver is away", func(now status) bool { return now.Stale != "" })
	writes := server.Writes()
	s.kill()
	s.start()
	s.labelsBecome(server, "restart", all)
	if n := server.Writes() - writes; n > 1 { // the simulated node is a new one
		t.Errorf("%d writes over the absence of the driver and the restart, want 1", n)
	}

	server.Stop()
	s.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0"})
	s.allocatable(1)
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	s.eventually("the API server is told what it missed", func() bool { return maps.Equal(labeled(server), whole) })
	s.inject(simulator.Fault{Kind: simulator.KindMIG, GPU: "0", Profiles: strings.Fields(strings.Repeat("1g.10gb ", 7))})
	s.eventually("the layout is the old one", func() bool { return maps.Equal(labeled(server), all) })
}

// TestFeatureFile: the program without a client writes labels for node-feature-discovery, which
// outlive it. Beside the file of NVIDIA's program it writes nothing, and says so.
func TestFeatureFile(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{Profile: "t4"})
	s.write("machine", "DGXH100 (rev. 2)\n")
	if err := os.Mkdir(s.Path("nfd"), 0o700); err != nil {
		t.Fatal(err)
	}
	file := s.Path("nfd/features.d/gpu-device-plugin")
	at := metricsAddress(t)
	s.Args = []string{
		"--node-labels=file", "--node-labels-file", file, "--machine-type-file", s.Path("machine"), "--metrics-address", at,
	}
	read := func() map[string]string {
		text, _ := os.ReadFile(file)
		found := map[string]string{}
		for line := range strings.Lines(string(text)) {
			if key, value, is := strings.Cut(strings.TrimSpace(line), "="); is && !strings.HasPrefix(line, "#") {
				found[key] = value
			}
		}
		return found
	}
	want := expected(t, "t4-none")
	s.start()
	s.eventually("the file is there", func() bool { return maps.Equal(read(), want) })
	s.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "0"})
	s.eventually("the GPU is lost", func() bool { return read()["gpu-device-plugin.github.io/gpu.health"] == "unhealthy" })
	if got := read(); got["nvidia.com/gpu.count"] != "" {
		t.Errorf("a lost GPU counts: %v", got)
	}
	withheld := func(want string) {
		t.Helper()
		s.eventually("gpu_device_plugin_labels_withheld is "+want, func() bool {
			_, body := fetch(t, at, "/metrics")
			return strings.Contains(body, "\ngpu_device_plugin_labels_withheld "+want+"\n")
		})
	}
	withheld("0")
	s.write("nfd/features.d/gfd", "nvidia.com/gpu.count=1\n")
	s.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
	withheld("1")
	if text := s.command("status"); !strings.Contains(text, "labels not written:") {
		t.Errorf("status says nothing of the labels that are not written:\n%s", text)
	}
	if err := s.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	if got := read(); got["gpu-device-plugin.github.io/gpu.health"] != "unhealthy" {
		t.Errorf("after the end of the daemon: %v", got)
	}
}
