package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// sources are the sources of a node with a GPU, a GPU in MIG mode, and a GPU that cannot be
// measured.
type sources struct{ telemetry.GPUs }

func newSources(now time.Time) sources {
	var whole, parent, small, large inventory.Measures
	whole.Set(inventory.Temperature, 61)
	whole.Set(inventory.PowerUsage, 312.5)
	whole.Set(inventory.MemoryUsed, 1024)
	whole.Set(inventory.NVLinkReceived, 4096)
	whole.Set(inventory.ClockEventReasons, 0x40|0x08)
	parent.Set(inventory.Temperature, 40)
	small.Set(inventory.MemoryUsed, 5)
	small.Set(inventory.MemoryReserved, 1)
	large.Set(inventory.MemoryUsed, 7)
	healthy := inventory.Health{State: inventory.Healthy}
	return sources{telemetry.GPUs{
		Settings: feed.New(telemetry.GPUSettings{Every: 15 * time.Second, HostnameLabel: "Hostname"}),
		Snapshots: feed.New(inventory.Snapshot{GPUs: []inventory.GPU{
			{UUID: "GPU-a", Index: 0, BDF: "0000:1b:00.0", Model: "NVIDIA H100 80GB HBM3", Health: healthy},
			{UUID: "GPU-b", Index: 1, BDF: "0000:4c:00.0", Model: "NVIDIA H100 80GB HBM3", Health: healthy,
				MIG: inventory.MIGEnabled,
				MIGDevices: []inventory.MIGDevice{
					{UUID: "MIG-1", GI: 1, CI: 0, Profile: "1c.3g.40gb"}, {UUID: "MIG-2", GI: 1, CI: 1, Profile: "1c.3g.40gb"},
					{UUID: "MIG-3", GI: 7, Profile: "1g.10gb"},
				}},
			{UUID: "GPU-c", Index: 2, Health: healthy},
		}}),
		Samples: feed.New([]inventory.Sample{
			{UUID: "GPU-a", Taken: now, LastXID: 48, Values: whole},
			{UUID: "GPU-b", Taken: now, Values: parent, Instances: []inventory.InstanceSample{
				{GI: 1, Profile: "3g.40gb", Values: large}, {GI: 7, Profile: "1g.10gb", Values: small},
				{GI: 9, Profile: "1g.10gb", Values: small}, // destroyed since
			}},
		}),
		Pods: feed.New(telemetry.PodDevices{}), Hostname: "node-1",
		XIDName: func(xid uint64) string { return fmt.Sprint("name of ", xid) }, Now: func() time.Time { return now },
	}}
}

// hold sets the containers that hold devices.
func (s sources) hold(devices ...kubelet.ContainerDevice) {
	s.Pods.Publish(telemetry.PodDevices{Asked: s.Now(), Devices: devices})
}

// scrape returns the series of GPUs, without times.
func (s sources) scrape(t *testing.T) []string {
	t.Helper()
	return s.series(t, "DCGM_", "gpu_device_plugin_nvlink", "gpu_device_plugin_gpu_slowed",
		"gpu_device_plugin_pod_device{")
}

// series returns the series with the given prefixes.
func (s sources) series(t *testing.T, prefixes ...string) []string {
	t.Helper()
	at := freeAddress(t)
	start(t, telemetry.Options{Address: feed.New(at), GPUs: &s.GPUs})
	var body string
	poll.Until(t, "it serves", func() bool {
		var code int
		code, body = get(t, at, "/metrics")
		return code == http.StatusOK
	})
	var all []string
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		for _, prefix := range prefixes {
			if strings.HasPrefix(line, prefix) {
				all = append(all, line)
			}
		}
	}
	return all
}

const (
	labelsA = `Hostname="node-1",UUID="GPU-a",device="nvidia0",%sgpu="0",modelName="NVIDIA H100 80GB HBM3",%spci_bus_id="00000000:1B:00.0"%s`
	labelsB = `Hostname="node-1",UUID="GPU-b",%sdevice="nvidia1",%sgpu="1",modelName="NVIDIA H100 80GB HBM3",%spci_bus_id="00000000:4C:00.0"%s`
)

// TestGPUMetrics: names, labels and values equal those of dcgm-exporter. Unmeasured values are
// absent, and no series occurs twice.
func TestGPUMetrics(t *testing.T) {
	t.Parallel()
	s := newSources(time.Now())
	a := fmt.Sprintf(labelsA, "", "", "")
	xidA := fmt.Sprintf(labelsA, `err_code="48",err_msg="name of 48",`, "", "")
	b := fmt.Sprintf(labelsB, "", "", "", "")
	xidB := fmt.Sprintf(labelsB, "", `err_code="0",err_msg="No Error",`, "", "")
	want := []string{
		`DCGM_FI_DEV_CLOCKS_EVENT_REASONS{` + a + `} 72`,
		`DCGM_FI_DEV_FB_RESERVED{GPU_I_ID="7",GPU_I_PROFILE="1g.10gb",` + b + `} 1`,
		`DCGM_FI_DEV_FB_USED{` + a + `} 1024`,
		`DCGM_FI_DEV_FB_USED{GPU_I_ID="1",GPU_I_PROFILE="3g.40gb",` + b + `} 7`,
		`DCGM_FI_DEV_FB_USED{GPU_I_ID="7",GPU_I_PROFILE="1g.10gb",` + b + `} 5`,
		`DCGM_FI_DEV_GPU_TEMP{` + a + `} 61`,
		`DCGM_FI_DEV_GPU_TEMP{` + b + `} 40`,
		`DCGM_FI_DEV_POWER_USAGE{` + a + `} 312.5`,
		`DCGM_FI_DEV_XID_ERRORS{` + xidA + `} 48`,
		`DCGM_FI_DEV_XID_ERRORS{` + xidB + `} 0`,
		`gpu_device_plugin_gpu_slowed{UUID="GPU-a",gpu="0",reason="hw_thermal"} 1`,
		`gpu_device_plugin_gpu_slowed{UUID="GPU-a",gpu="0",reason="hw_power_brake"} 0`,
		`gpu_device_plugin_gpu_slowed{UUID="GPU-a",gpu="0",reason="sw_thermal"} 0`,
		`gpu_device_plugin_gpu_slowed{UUID="GPU-a",gpu="0",reason="sw_power_cap"} 0`,
		`gpu_device_plugin_nvlink_received_bytes_total{UUID="GPU-a",gpu="0"} 4096`,
	}
	if diff := cmp.Diff(want, s.scrape(t)); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

// TestSlowed: each bit of NVML's nvmlClocksEventReasons is one reason, or no reason that slows a
// GPU down.
func TestSlowed(t *testing.T) {
	t.Parallel()
	reasons := map[uint64]string{0x04: "sw_power_cap", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
	for bit := uint64(1); bit <= 0x100; bit <<= 1 {
		s := newSources(time.Now())
		sample := inventory.Sample{UUID: "GPU-a", Taken: s.Now()}
		sample.Values.Set(inventory.ClockEventReasons, float64(bit))
		s.Samples.Publish([]inventory.Sample{sample})
		for _, line := range s.series(t, "gpu_device_plugin_gpu_slowed") {
			is := strings.HasSuffix(line, "} 1")
			if want := reasons[bit] != "" && strings.Contains(line, strconv.Quote(reasons[bit])); is != want {
				t.Errorf("with %#x: %s", bit, line)
			}
		}
	}
}

// TestTimesOfSamples: each measured GPU has the time of its sample, and the pods have the time of
// the kubelet's answer.
func TestTimesOfSamples(t *testing.T) {
	t.Parallel()
	s := newSources(time.Unix(1_700_000_000, 250_000_000))
	s.hold()
	want := []string{
		`gpu_device_plugin_pod_devices_timestamp_seconds 1.70000000025e+09`,
		`gpu_device_plugin_sample_timestamp_seconds{UUID="GPU-a",gpu="0"} 1.70000000025e+09`,
		`gpu_device_plugin_sample_timestamp_seconds{UUID="GPU-b",gpu="1"} 1.70000000025e+09`,
	}
	if diff := cmp.Diff(want, s.series(t, "gpu_device_plugin_sample_timestamp",
		"gpu_device_plugin_pod_devices_timestamp")); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

// TestGPUMetricsOfPods: series name a container that holds the device alone. Containers that share
// a device have separate series to join with.
func TestGPUMetricsOfPods(t *testing.T) {
	t.Parallel()
	device := func(id, pod string) kubelet.ContainerDevice {
		return kubelet.ContainerDevice{ID: id, Namespace: "ns", Pod: pod, Container: "main"}
	}
	joins := func(uuid, gi string, pods ...string) (all []string) {
		for _, pod := range pods {
			all = append(all, fmt.Sprintf(`gpu_device_plugin_pod_device{GPU_I_ID=%q,UUID=%q,container="main",namespace="ns",pod=%q} 1`, gi, uuid, pod))
		}
		return all
	}
	for name, tt := range map[string]struct {
		held  []kubelet.ContainerDevice
		pods  map[string]string // labels of the used memory of a GPU or GPU instance
		joins []string
	}{
		"nobody": {},
		"one": {
			held: []kubelet.ContainerDevice{device("GPU-a", "p")}, pods: map[string]string{`UUID="GPU-a"`: "p"},
			joins: joins("GPU-a", "", "p"),
		},
		"a GPU that two share": {
			held: []kubelet.ContainerDevice{device("GPU-a::0", "p"), device("GPU-a::3", "q")}, joins: joins("GPU-a", "", "p",
				"q"),
		},
		"a GPU that can be shared": {held: []kubelet.ContainerDevice{device("GPU-a::0", "p")},
			joins: joins("GPU-a", "", "p")},
		"two replicas": {
			held: []kubelet.ContainerDevice{device("GPU-a::0", "p"), device("GPU-a::1", "p")}, joins: joins("GPU-a", "", "p"),
		},
		"a device that was shared in between": {
			held: []kubelet.ContainerDevice{device("GPU-a", "p"),
				device("GPU-a::0", "p")}, pods: map[string]string{`UUID="GPU-a"`: "p"},
			joins: joins("GPU-a", "", "p"),
		},
		"a MIG device": {
			held: []kubelet.ContainerDevice{device("MIG-3", "p")}, pods: map[string]string{`GPU_I_ID="7"`: "p"},
			joins: joins("GPU-b", "7", "p"),
		},
		"two MIG devices of a GPU instance": {
			held: []kubelet.ContainerDevice{device("MIG-1", "p"), device("MIG-2", "q")}, joins: joins("GPU-b", "1", "p", "q"),
		},
		"a device of another program": {held: []kubelet.ContainerDevice{device("nic-0", "p")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSources(time.Now())
			s.hold(tt.held...)
			pods := map[string]string{}
			var joined []string
			for _, line := range s.scrape(t) {
				if strings.HasPrefix(line, "gpu_device_plugin_pod_device{") {
					joined = append(joined, line)
				}
				if _, rest, ok := strings.Cut(line, `,pod="`); ok && strings.HasPrefix(line, "DCGM_FI_DEV_FB_USED{") {
					for _, which := range []string{`UUID="GPU-a"`, `GPU_I_ID="1"`, `GPU_I_ID="7"`} {
						if strings.Contains(line, which) {
							pods[which], _, _ = strings.Cut(rest, `"`)
						}
					}
				}
			}
			if tt.pods == nil {
				tt.pods = map[string]string{}
			}
			if diff := cmp.Diff(tt.pods, pods); diff != "" {
				t.Errorf("pods (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.joins, joined); diff != "" {
				t.Errorf("series to join with (-want +got):\n%s", diff)
			}
		})
	}
}

// TestClaimsInMetrics: the series of a device held by a claim name pod and claim like
// dcgm-exporter, also for a MIG device created for the claim. Two pods may share the device by one
// claim; shares of a GPU belong to several claims.
func TestClaimsInMetrics(t *testing.T) {
	t.Parallel()
	device := func(uuid, pod, claim, name, share string) kubelet.ContainerDevice {
		return kubelet.ContainerDevice{ID: uuid, Namespace: "ns", Pod: pod, Container: "main", Claim: kubelet.ClaimResource{
			Namespace: "ns", Name: claim, Driver: "gpu.nvidia.com", Pool: "node-1", Device: name, ShareID: share,
		}}
	}
	s := newSources(time.Now())
	s.hold(device("GPU-a", "p", "one", "gpu-0", ""), device("MIG-3", "q", "two", "gpu-1-mig", ""))
	lines := s.scrape(t)
	for _, want := range []string{
		`DCGM_FI_DEV_FB_USED{Hostname="node-1",UUID="GPU-a",container="main",device="nvidia0",dra_claim_name="one",dra_claim_namespace="ns",` +
			`dra_device_name="gpu-0",dra_driver_name="gpu.nvidia.com",dra_pool_name="node-1",gpu="0",`,
		`DCGM_FI_DEV_FB_USED{GPU_I_ID="7",GPU_I_PROFILE="1g.10gb",Hostname="node-1",UUID="GPU-b",container="main",device="nvidia1",` +
			`dra_claim_name="two",dra_claim_namespace="ns",dra_device_name="gpu-1-mig",dra_driver_name="gpu.nvidia.com",` +
			`dra_mig_device_uuid="MIG-3",dra_mig_profile="1g.10gb",dra_pool_name="node-1",gpu="1",`,
		`gpu_device_plugin_pod_device{GPU_I_ID="7",UUID="GPU-b",container="main",namespace="ns",pod="q"} 1`,
	} {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, want) }) {
			t.Errorf("no series %s in:\n%s", want, strings.Join(lines, "\n"))
		}
	}
	s.hold(device("GPU-a", "p", "one", "gpu-0", ""), device("GPU-a", "q", "one", "gpu-0", ""))
	shared := strings.Join(s.scrape(t), "\n")
	if !strings.Contains(shared, `dra_claim_name="one"`) ||
		strings.Contains(shared, `DCGM_FI_DEV_GPU_TEMP{Hostname="node-1",UUID="GPU-a",container`) {
		t.Errorf("two pods of one claim:\n%s", shared)
	}
	s.hold(device("GPU-a", "p", "one", "gpu-0", "s1"))
	if share := strings.Join(s.scrape(t), "\n"); strings.Contains(share, "dra_claim_name") ||
		!strings.Contains(share, `gpu_device_plugin_pod_device{GPU_I_ID="",UUID="GPU-a",container="main",namespace="ns",pod="p"`) {
		t.Errorf("a share:\n%s", share)
	}
}

// TestGPUMetricsOfLostAndOldSamples: a lost GPU keeps only the XID, which may be the reason, and an
// old sample only the time.
func TestGPUMetricsOfLostAndOldSamples(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, tt := range map[string]struct {
		change func(*sources)
		want   int // series of the first GPU, including its XID
	}{
		"fresh":    {func(*sources) {}, 10},
		"old":      {func(s *sources) { s.Now = func() time.Time { return now.Add(5*time.Minute + time.Second) } }, 1},
		"just not": {func(s *sources) { s.Now = func() time.Time { return now.Add(5 * time.Minute) } }, 10},
		"lost": {func(s *sources) {
			lost := s.Snapshots.Value()
			lost.GPUs = slices.Clone(lost.GPUs)
			lost.GPUs[0].Health.State = inventory.Lost
			s.Snapshots.Publish(lost)
		}, 1},
		"gone": {func(s *sources) { s.Snapshots.Publish(inventory.Snapshot{}) }, 0},
		"off":  {func(s *sources) { s.Settings.Publish(telemetry.GPUSettings{}) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSources(now)
			tt.change(&s)
			var got []string
			for _, line := range s.scrape(t) {
				if strings.Contains(line, "GPU-a") {
					got = append(got, line)
				}
			}
			if len(got) != tt.want {
				t.Errorf("%d series, want %d:\n%s", len(got), tt.want, strings.Join(got, "\n"))
			}
		})
	}
}

// TestMetricsOfUnits: the holders of units, their sizes and layers, and the number of holders with
// differences.
func TestMetricsOfUnits(t *testing.T) {
	t.Parallel()
	s := newSources(time.Now())
	s.Pods.Publish(telemetry.PodDevices{Asked: s.Now(), Units: []status.Holder{
		{Device: "GPU-a", Namespace: "ns", Pod: "p", Container: "c",
			Receipt: &status.Receipt{MemoryMiB: 1024, Percentage: 25, Layer: "mps"}},
		{Device: "GPU-a", Namespace: "ns", Pod: "q", Container: "c",
			Receipt: &status.Receipt{MemoryMiB: 2048, Differences: []string{"x", "y"}}},
		{Device: "GPU-b", Namespace: "ns", Pod: "r", Container: "c", Receipt: &status.Receipt{MemoryMiB: 128, Layer: "none"}},
	}})
	want := []string{
		`gpu_device_plugin_unit_differences{UUID="GPU-a",gpu="0"} 1`,
		`gpu_device_plugin_unit_differences{UUID="GPU-b",gpu="1"} 0`,
		`gpu_device_plugin_unit_memory_limit_bytes{UUID="GPU-a",container="c",gpu="0",layer="",namespace="ns",pod="q"} 2.147483648e+09`,
		`gpu_device_plugin_unit_memory_limit_bytes{UUID="GPU-a",container="c",gpu="0",layer="mps",namespace="ns",pod="p"} 1.073741824e+09`,
		`gpu_device_plugin_unit_memory_limit_bytes{UUID="GPU-b",container="c",gpu="1",layer="none",namespace="ns",pod="r"} 1.34217728e+08`,
		`gpu_device_plugin_unit_thread_percentage{UUID="GPU-a",container="c",gpu="0",layer="mps",namespace="ns",pod="p"} 25`,
	}
	got := s.series(t, "gpu_device_plugin_unit_")
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

// TestPodUIDInMetrics: all series that name a pod have the label pod_uid where its UID is known, and
// no series an empty one.
func TestPodUIDInMetrics(t *testing.T) {
	t.Parallel()
	s := newSources(time.Now())
	s.Pods.Publish(telemetry.PodDevices{
		Asked: s.Now(), Devices: []kubelet.ContainerDevice{
			{ID: "GPU-a", Namespace: "ns", Pod: "p", Container: "c", PodUID: "1-2"},
			{ID: "MIG-3", Namespace: "ns", Pod: "q", Container: "c"},
		}, Units: []status.Holder{
			{Device: "GPU-a", Namespace: "ns", Pod: "p", Container: "c", Receipt: &status.Receipt{MemoryMiB: 1, Layer: "mps"}},
		},
	})
	named := 0
	for _, line := range append(s.scrape(t), s.series(t, "gpu_device_plugin_unit_memory_limit_bytes")...) {
		if strings.Contains(line, `pod="p"`) != strings.Contains(line, `pod_uid="1-2"`) || strings.Contains(line, `pod_uid=""`) {
			t.Error(line)
		}
		if strings.Contains(line, `pod="p"`) {
			named++
		}
	}
	if named < 3 {
		t.Errorf("%d series name the pod", named)
	}
}

func TestHostnameLabel(t *testing.T) {
	t.Parallel()
	for label, want := range map[string]string{"Hostname": `{Hostname="node-1",UUID`, "hostname": `,hostname="node-1",`,
		"": `{UUID="GPU-a",device="nvidia0",gpu=`} {
		s := newSources(time.Now())
		s.Settings.Publish(telemetry.GPUSettings{Every: time.Second, HostnameLabel: label})
		if line := s.scrape(t)[0]; !strings.Contains(line, want) {
			t.Errorf("label %q: %s", label, line)
		}
	}
	s := newSources(time.Now())
	s.Hostname = "node\xff"
	if line := s.scrape(t)[0]; !strings.Contains(line, "{Hostname=\"node\uFFFD\",UUID") {
		t.Errorf("a name that is not UTF-8: %s", line)
	}
}

// TestManyPods: the number of series is limited for any number of containers.
func TestManyPods(t *testing.T) {
	t.Parallel()
	s := newSources(time.Now())
	var held []kubelet.ContainerDevice
	for i := range 10_000 {
		held = append(held, kubelet.ContainerDevice{ID: fmt.Sprint("GPU-a::", i), Namespace: "ns", Pod: fmt.Sprint("p", i),
			Container: "main"})
	}
	s.hold(held...)
	if got := len(s.scrape(t)); got > 4096+20 {
		t.Errorf("%d series", got)
	}
}

// lister is a kubelet under control of a test.
type lister struct {
	mu      sync.Mutex // guards all following fields
	devices []kubelet.ContainerDevice
	err     error
	hangs   bool
	asked   int
	disk    chan struct{} // if not nil, receipts of units wait until it is closed
}

func (l *lister) set(change func(*lister)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
}

func (l *lister) ContainerDevices(ctx context.Context) (devices []kubelet.ContainerDevice, err error) {
	hangs := false
	l.set(func(l *lister) {
		l.asked++
		devices, err, hangs = l.devices, l.err, l.hangs
	})
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return devices, err
}

func (l *lister) WithPodUIDs(devices []kubelet.ContainerDevice) []kubelet.ContainerDevice {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].PodUID = "uid-of-" + devices[i].Pod
	}
	return devices
}

func (l *lister) UnitHolders(_ context.Context, devices []kubelet.ContainerDevice) []status.Holder {
	var disk chan struct{}
	if l.set(func(l *lister) { disk = l.disk }); disk != nil {
		<-disk
	}
	return make([]status.Holder, len(devices))
}

// TestFollowPods: the kubelet is asked at the interval of samples. Its last answer survives short
// failures. Without metrics the kubelet is not asked.
func TestFollowPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		l := &lister{devices: []kubelet.ContainerDevice{{ID: "GPU-a", Pod: "p"}}}
		settings, pods := feed.New(telemetry.GPUSettings{}), feed.New(telemetry.PodDevices{})
		done := make(chan struct{})
		go func() {
			telemetry.FollowPods(ctx, l, settings, pods)
			close(done)
		}()
		pass := func(d time.Duration) {
			time.Sleep(d) // the bubble's clock
			synctest.Wait()
		}
		holds := func(what string, asked, devices int, age time.Duration) {
			t.Helper()
			got := pods.Value()
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.asked != asked || len(got.Devices) != devices || time.Since(got.Asked) != age {
				t.Errorf("%s: asked %d times, %d devices, %v old", what, l.asked, len(got.Devices), time.Since(got.Asked))
			}
		}
		pass(time.Hour)
		l.set(func(l *lister) {
			if l.asked != 0 {
				t.Errorf("asked %d times while there are no metrics", l.asked)
			}
		})
		settings.Publish(telemetry.GPUSettings{Every: 10 * time.Second})
		pass(time.Second)
		holds("at first", 1, 1, time.Second)
		pass(10 * time.Second)
		holds("later", 2, 1, time.Second)
		l.set(func(l *lister) { l.devices = nil })
		pass(10 * time.Second)
		holds("the pod ended", 3, 0, time.Second)
		l.set(func(l *lister) { l.devices = []kubelet.ContainerDevice{{ID: "GPU-a", Pod: "q"}} })
		pass(10 * time.Second)
		l.set(func(l *lister) { l.err = errors.New("refused") })
		pass(20 * time.Second)
		holds("two failures", 6, 1, 21*time.Second)
		l.set(func(l *lister) { l.hangs = true })
		pass(13 * time.Second)
		holds("three failures", 7, 0, 34*time.Second)
		l.set(func(l *lister) { l.err, l.hangs = nil, false })
		pass(10 * time.Second)
		if got := pods.Value(); len(got.Devices) != 1 {
			t.Errorf("kubelet answers again: %+v", got)
		}
		settings.Publish(telemetry.GPUSettings{})
		pass(time.Second)
		if got := pods.Value(); len(got.Devices) != 0 {
			t.Errorf("metrics are off: %+v", got)
		}
		cancel()
		<-done
	})
}

// TestFollowPodsWhileTheDiskHangs: receipts of units need the kubelet's disk. While the disk hangs,
// pods have no receipts, and everything else goes on, including the shutdown.
func TestFollowPodsWhileTheDiskHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		disk := make(chan struct{})
		l := &lister{devices: []kubelet.ContainerDevice{{ID: "GPU-a", Pod: "p"}}, disk: disk}
		settings, pods := feed.New(telemetry.GPUSettings{Every: 10 * time.Second}), feed.New(telemetry.PodDevices{})
		done := make(chan struct{})
		go func() {
			telemetry.FollowPods(ctx, l, settings, pods)
			close(done)
		}()
		has := func(what string, units int) {
			t.Helper()
			time.Sleep(30 * time.Second) // the bubble's clock
			synctest.Wait()
			got := pods.Value()
			if age := time.Since(got.Asked); len(got.Devices) != 1 || len(got.Units) != units || age > 20*time.Second {
				t.Errorf("%s: %+v, %v old", what, got, age)
			}
		}
		has("the disk hangs", 0)
		l.set(func(l *lister) { l.disk = nil })
		close(disk)
		has("it answers again", 1)
		disk = make(chan struct{})
		l.set(func(l *lister) { l.disk = disk })
		has("it hangs again", 0)
		cancel()
		<-done
		close(disk)
	})
}
