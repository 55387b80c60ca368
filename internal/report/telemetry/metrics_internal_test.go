package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

var at = time.Date(2026, 11, 22, 1, 2, 3, 0, time.UTC)

// full is a status with every part.
func full() status.Status {
	zero, one := 0, 1
	return status.Status{
		DRA: &status.DRA{
			Slices: 2, Devices: 16, Generation: 3, Problem: "no", Claims: []status.DRAClaim{{UID: "uid-1"},
				{UID: "uid-2", Released: "in use"}},
		},
		Version: "v1.2.3", Driver: "580.95.05", CUDA: "13.0", Generation: 7, Looked: at, Stale: "no answer", Hanging: 2,
		Calls: []status.Call{{GPU: &one, Function: "nvmlDeviceGetFieldValues", Since: at.Add(-time.Minute)},
			{Function: "f", Since: at}},
		Repair:       &repair.Status{Repaired: 2, Failed: 1, Steps: []repair.Step{{UUID: "GPU-a", State: repair.Manual}}},
		MIG:          &status.MIGLayout{Layout: "all-1g.10gb", State: "failed"},
		DriverChange: &driverchange.Status{Wanted: "580.1", State: driverchange.Changing, Percent: 52, Since: at},
		Validation: &status.Validation{Devices: []status.Validated{{Index: "0", UUID: "GPU-a", Result: status.Proven},
			{Index: "1", Result: status.Failed}}},
		Steps:     []status.ReadyStep{{Name: status.StepDriver, Reached: true, Since: time.Unix(1, 0)}},
		Readiness: status.Readiness{Ready: true}, Lead: status.Lead{This: true, Since: at,
			PreviousLeader: "a"}, ConfigGeneration: 2, ConfigError: "bad", ConfigLoaded: at, Reexecutions: 1, Kubelets: 3,
		GPUs: []status.Device{
			{
				Index: "0", UUID: "GPU-a", Model: "H100", PCI: "0000:1b:00.0", Minor: &zero, State: "Unhealthy", Since: at,
				UnitsMiB: 1024,
				Faults: []status.Fault{{Source: "xid", XID: 79, Remedy: "reboot", Since: at},
					{Source: "lost", Remedy: "reconnect", Since: at}},
			},
			{Index: "1", UUID: "GPU-b", Model: "H100", PCI: "0000:4c:00.0", Minor: &one, State: "Healthy", Since: at},
			{
				Index: "1:0", UUID: "MIG-0", GPU: "GPU-b", Model: "MIG 1g.10gb", Profile: "1g.10gb", State: "Unhealthy",
				Faults: []status.Fault{{Source: "xid", XID: 94, Remedy: "reset", Since: at}},
			},
			{Index: "1:1", UUID: "MIG-1", GPU: "GPU-b", Model: "MIG 1g.10gb", Profile: "1g.10gb", State: "Suspect"},
		},
		LeftOut: []string{"GPU 2: x"}, Warnings: []string{"x", "y"},
		Holds: []status.Hold{{Resource: "a/b", Device: "GPU-a", Reason: "x"},
			{Resource: "a/b", Device: "GPU-a", Reason: "y", Waits: true}}, // one device
		Resources: []status.Resource{
			{Name: "a/b", Planned: true, Devices: 8, Healthy: 7, Server: "serving", Agreed: true,
				Departing: []status.Departing{{ID: "GPU-z"}}},
			{Name: "a/c", Devices: 1, Server: "standing by: another server has registered"},
		},
	}
}

// counted are counters with every count.
func counted() *Counters {
	c := NewCounters([]string{"kubelet-restarted", "other"})
	c.XID("GPU-a", 79, at)
	c.XID("GPU-a", 79, at.Add(time.Second))
	c.XID("GPU-a", 31, at)
	c.Recovered("GPU-b", inventory.RemedyReset)
	c.Registered("a/b", true)
	c.Registered("a/c", false)
	c.StreamEnded("a/b", "kubelet-restarted")
	c.Answered("Allocate", "OK", 2*time.Millisecond)
	c.Prepared(3*time.Millisecond, "")
	c.Prepared(time.Millisecond, "in-use")
	c.Unprepared(time.Millisecond, "")
	c.PreparedWithoutKubelet()
	c.DriverCalled("reading", 200*time.Microsecond)
	c.DriverCalled("reading", 3*time.Second)
	c.DriverFailed("reading", "GPU_IS_LOST")
	c.APIRequested("PATCH", "nodes/status", 200)
	c.APIRequested("POST", "events", 0)
	c.EventDropped("queue")
	c.HealthEventsSent(true, 8)
	c.HealthEventsSent(false, 1)
	c.SwitchError("0000:c4:00.0", 20034, true, time.Unix(1795309325, 0))
	return c
}

// scrape returns the answer of an Exporter with a status and counters, in the format that accept
// requests.
func scrape(t *testing.T, s status.Status, failed error, c *Counters, accept string) *httptest.ResponseRecorder {
	t.Helper()
	e := New(Options{Status: func(context.Context) (status.Status, error) { return s, failed }, Counters: c,
		PCIGPUs: func() (own, away int) { return 8, 2 }})
	request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody)
	request.Header.Set("Accept", accept)
	recorder := httptest.NewRecorder()
	e.handler.ServeHTTP(recorder, request)
	if recorder.Code != http.StatusOK {
		t.Fatalf("answered with %d: %s", recorder.Code, recorder.Body)
	}
	return recorder
}

// ours returns the lines about the program's own metrics.
func ours(text string) string {
	return strings.Join(regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?gpu_device_plugin_.*\n`).FindAllString(text, -1), "")
}

// TestExposition checks all series of a full daemon, also with Prometheus' linter.
func TestExposition(t *testing.T) {
	t.Parallel()
	got := ours(scrape(t, full(), nil, counted(), "").Body.String())
	const golden = "testdata/daemon.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("exposition (-want +got); go test ./internal/report/telemetry -run TestExposition -update writes it "+
			"anew:\n%s", diff)
	}
	problems, err := promlint.New(strings.NewReader(got)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
}

// TestEveryMetric: the rows of the daemon equal its series in types, units and labels.
func TestEveryMetric(t *testing.T) {
	t.Parallel()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(ours(scrape(t, full(), nil, counted(),
		"").Body.String())))
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[metricType]dto.MetricType{gauge: dto.MetricType_GAUGE, counter: dto.MetricType_COUNTER,
		histogram: dto.MetricType_HISTOGRAM}
	for _, m := range daemonMetrics {
		family := families[m.name]
		delete(families, m.name)
		if family == nil {
			t.Errorf("%s is not there", m.name)
			continue
		}
		if family.GetType() != kinds[m.kind] || family.GetHelp() != m.help {
			t.Errorf("%s is a %v, with help %q; want a %s", m.name, family.GetType(), family.GetHelp(), m.kind)
		}
		for _, series := range family.GetMetric() {
			var labels []string
			for _, l := range series.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if diff := cmp.Diff(sorted(m.labels), sorted(labels)); diff != "" {
				t.Errorf("%s: labels (-want +got):\n%s", m.name, diff)
			}
		}
	}
	for name := range families {
		t.Errorf("%s has no row", name)
	}
}

func sorted(labels []string) []string {
	all := slices.Clone(labels)
	slices.Sort(all)
	return all
}

// TestFormats: clients can get OpenMetrics, and in protobuf native histograms besides the classic
// ones.
func TestFormats(t *testing.T) {
	t.Parallel()
	open := scrape(t, full(), nil, counted(), "application/openmetrics-text;version=1.0.0")
	if got := open.Header().Get("Content-Type"); !strings.HasPrefix(got, "application/openmetrics-text; version=1.0.0") {
		t.Errorf("content type %s", got)
	}
	if got := open.Header().Get("Vary"); got != "Accept, Accept-Encoding" {
		t.Errorf("a proxy that keeps the answer is told that it varies by %q", got)
	}
	text := open.Body.String()
	if !strings.HasSuffix(text, "# EOF\n") || !strings.Contains(text, "# TYPE gpu_device_plugin_xid_events counter\n") ||
		!strings.Contains(text, `gpu_device_plugin_xid_events_total{UUID="GPU-a",gpu="0",xid="79"} 2.0`) {
		t.Errorf("not OpenMetrics: %s", text)
	}
	binary := scrape(t, full(), nil, counted(),
		"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited")
	decoder := expfmt.NewDecoder(binary.Body, expfmt.ResponseFormat(binary.Header()))
	for {
		var family dto.MetricFamily
		if err := decoder.Decode(&family); err != nil {
			t.Fatalf("no histogram of calls: %v", err)
		}
		if family.GetName() != callDuration.name {
			continue
		}
		h := family.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 2 || len(h.GetBucket()) != len(buckets) || len(h.GetPositiveSpan()) == 0 {
			t.Errorf("histogram %v, want 2 calls in classic and native buckets", h)
		}
		return
	}
}

// TestNoStatus: metrics of a stuck monitor show what is known without it; /healthz reports the
// problem.
func TestNoStatus(t *testing.T) {
	t.Parallel()
	text := scrape(t, status.Status{}, errors.New("no answer"), counted(), "").Body.String()
	if strings.Contains(text, "gpu_device_plugin_gpu_health") || !strings.Contains(text, "go_goroutines") {
		t.Errorf("got %s", text)
	}
}

// TestTextThatIsNotUTF8: a driver version with invalid text does not break the daemon or the
// metrics.
func TestTextThatIsNotUTF8(t *testing.T) {
	t.Parallel()
	s := full()
	s.Driver = "580\xff\xfe"
	text := scrape(t, s, nil, counted(), "").Body.String()
	if !strings.Contains(text, `driver_info{cuda="13.0",version="580�"} 1`) ||
		!strings.Contains(text, "gpu_device_plugin_gpu_health") {
		t.Errorf("got %s", text)
	}
}

// TestDepartedSeries: the counts of a removed GPU or resource are shown for two minutes and then
// dropped.
func TestDepartedSeries(t *testing.T) {
	t.Parallel()
	c, now := counted(), at
	c.now = func() time.Time { return now }
	s := full()
	shows := func() (gpu, resource bool) {
		text := scrape(t, s, nil, c, "").Body.String()
		return strings.Contains(text, `xid_events_total{UUID="GPU-a"`), strings.Contains(text,
			`stream_ends_total{cause="kubelet-restarted",resource="a/b"}`)
	}
	for _, step := range []struct {
		after time.Duration
		there bool
		want  bool
	}{
		{0, true, true},
		{0, false, true},
		{time.Minute, false, true},
		{0, true, true}, // the GPU returned
		{10 * time.Minute, false, true},
		{119 * time.Second, false, true},
		{time.Second, false, false},
	} {
		now = now.Add(step.after)
		s = full()
		if !step.there {
			s.GPUs, s.Resources = s.GPUs[1:], s.Resources[1:]
		}
		if gpu, resource := shows(); gpu != step.want || resource != step.want {
			t.Fatalf("step %+v: shown: GPU %t, resource %t", step, gpu, resource)
		}
	}
	if len(c.gpus) != 1 || len(c.resources) != 1 {
		t.Errorf("%d GPUs and %d resources are remembered, want one each", len(c.gpus), len(c.resources))
	}
}

// TestBounds: the number of series is limited for any number of GPUs, codes and resources.
func TestBounds(t *testing.T) {
	t.Parallel()
	c := NewCounters(nil)
	for i := range 1000 {
		c.XID("GPU-a", uint64(i), at)
		c.XID(fmt.Sprint("GPU-", i), 79, at)
		c.Registered(fmt.Sprint("a/", i), true)
	}
	text := scrape(t, full(), nil, c, "").Body.String()
	if n := strings.Count(text, `xid_events_total{UUID="GPU-a"`); n != maxXIDs+1 {
		t.Errorf("%d series of XIDs of one GPU, want %d", n, maxXIDs+1)
	}
	if !strings.Contains(text, `xid_events_total{UUID="GPU-a",gpu="0",xid="other"} 968`) {
		t.Error("XIDs beyond the bound are not counted as other")
	}
	if len(c.gpus) != maxCounted || len(c.resources) != maxCounted {
		t.Errorf("%d GPUs and %d resources are counted, want %d", len(c.gpus), len(c.resources), maxCounted)
	}
}
