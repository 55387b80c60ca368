package telemetry_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
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
func counted() *telemetry.Counters {
	c := telemetry.NewCounters([]string{"kubelet-restarted", "other"})
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

// metricsOf returns the metrics of a daemon with a status and counters, as text.
func metricsOf(t *testing.T, s status.Status, failure error, c *telemetry.Counters) string {
	t.Helper()
	return string(scrape(t, started(t, optionsOf(s, failure, c)), nil).body)
}

func optionsOf(s status.Status, failure error, c *telemetry.Counters) telemetry.Options {
	return telemetry.Options{Status: func(context.Context) (status.Status, error) { return s, failure }, Counters: c,
		PCIGPUs: func() (own, away int) { return 8, 2 }}
}

// ours returns the lines about the program's own metrics.
func ours(text string) string {
	return strings.Join(regexp.MustCompile(`(?m)^(# (HELP|TYPE) )?gpu_device_plugin_.*\n`).FindAllString(text, -1), "")
}

// TestExposition checks all series of a full daemon, also with Prometheus' linter.
func TestExposition(t *testing.T) {
	t.Parallel()
	got := ours(metricsOf(t, full(), nil, counted()))
	const golden = "testdata/daemon.txt"
	if flag.Lookup("update").Value.String() == "true" { // of the tests of the documents
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
			"again:\n%s", diff)
	}
	problems, err := promlint.New(strings.NewReader(got)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
}

// TestEveryMetric: docs/monitoring.md has each metric of the daemon, with its type, labels and
// meaning.
func TestEveryMetric(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	_, chapter, found := strings.Cut(string(page), "\n### The daemon\n")
	chapter, _, closed := strings.Cut(chapter, "\n### The GPUs\n")
	if !found || !closed {
		t.Fatal("docs/monitoring.md has no chapter of the daemon before the one of the GPUs")
	}
	want := map[string]string{} // type; labels | meaning
	for _, row := range regexp.MustCompile(`(?m)^\| `+"`(gpu_[a-z_]+)`"+` \| (.*?) \| (.*) \|$`).
		FindAllStringSubmatch(chapter, -1) {
		kind, labels, _ := strings.Cut(strings.ReplaceAll(row[2], "`", ""), "; ")
		names := strings.Split(labels, ", ")
		slices.Sort(names)
		want[row[1]] = fmt.Sprint(kind, names, row[3])
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(ours(metricsOf(t, full(), nil, counted()))))
	if err != nil {
		t.Fatal(err)
	}
	for name, family := range families {
		for _, series := range family.GetMetric() {
			var labels []string
			for _, l := range series.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if labels == nil {
				labels = []string{""}
			}
			slices.Sort(labels)
			got := fmt.Sprint(strings.ToLower(family.GetType().String()), labels, family.GetHelp())
			if got != want[name] {
				t.Errorf("%s is %s, and docs/monitoring.md says %s", name, got, want[name])
			}
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s is not there", name)
	}
}

// TestFormats: clients can get OpenMetrics, and in protobuf native histograms besides the classic
// ones.
func TestFormats(t *testing.T) {
	t.Parallel()
	at := started(t, optionsOf(full(), nil, counted()))
	open := scrape(t, at, http.Header{"Accept": {"application/openmetrics-text;version=1.0.0"}})
	if got := open.header.Get("Content-Type"); !strings.HasPrefix(got, "application/openmetrics-text; version=1.0.0") {
		t.Errorf("content type %s", got)
	}
	if got := open.header.Get("Vary"); got != "Accept, Accept-Encoding" {
		t.Errorf("a proxy that keeps the answer is told that it varies by %q", got)
	}
	text := string(open.body)
	if !strings.HasSuffix(text, "# EOF\n") || !strings.Contains(text, "# TYPE gpu_device_plugin_xid_events counter\n") ||
		!strings.Contains(text, `gpu_device_plugin_xid_events_total{UUID="GPU-a",gpu="0",xid="79"} 2.0`) {
		t.Errorf("not OpenMetrics: %s", text)
	}
	binary := scrape(t, at, http.Header{"Accept": {protobuf}})
	decoder := expfmt.NewDecoder(bytes.NewReader(binary.body), expfmt.ResponseFormat(binary.header))
	for {
		var family dto.MetricFamily
		if err := decoder.Decode(&family); err != nil {
			t.Fatalf("no histogram of calls: %v", err)
		}
		if family.GetName() != "gpu_device_plugin_nvml_call_duration_seconds" {
			continue
		}
		h := family.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 2 || len(h.GetBucket()) != 9 || len(h.GetPositiveSpan()) == 0 {
			t.Errorf("histogram %v, want 2 calls in classic and native buckets", h)
		}
		return
	}
}

// TestNoStatus: metrics of a stuck monitor show what is known without it; /healthz reports the
// problem.
func TestNoStatus(t *testing.T) {
	t.Parallel()
	text := metricsOf(t, status.Status{}, errors.New("no answer"), counted())
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
	text := metricsOf(t, s, nil, counted())
	if !strings.Contains(text, `driver_info{cuda="13.0",version="580�"} 1`) ||
		!strings.Contains(text, "gpu_device_plugin_gpu_health") {
		t.Errorf("got %s", text)
	}
}

// TestDepartedSeries: the counts of a removed GPU or resource are shown for two minutes and then
// dropped.
func TestDepartedSeries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := counted()
		show := func(s status.Status) string {
			o := optionsOf(s, nil, c)
			o.Address, o.Problem = feed.New(freeAddress(t)), feed.New(errors.New("it does not listen yet"))
			_, listening := o.Problem.Latest()
			ctx, end := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
			ended := make(chan error, 1)
			go func() { ended <- telemetry.New(o).Run(ctx) }()
			<-listening
			text := string(scrape(t, o.Address.Value(), nil).body)
			end()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			return text
		}
		count := func(text, series string) string {
			_, value, _ := strings.Cut(text, series+" ")
			value, _, _ = strings.Cut(value, "\n")
			return value
		}
		for _, step := range []struct {
			after         time.Duration
			isPresent     bool
			xids, streams string
		}{
			{0, true, "2", "1"},
			{0, false, "2", "1"},
			{time.Minute, false, "2", "1"},
			{0, true, "2", "1"}, // the GPU returned
			{10 * time.Minute, false, "2", "1"},
			{119 * time.Second, false, "2", "1"},
			{time.Second, false, "", ""},
			{0, true, "0", "0"}, // nothing was remembered
		} {
			time.Sleep(step.after) // the bubble's clock
			s := full()
			if !step.isPresent {
				s.GPUs, s.Resources = s.GPUs[1:], s.Resources[1:]
			}
			text := show(s)
			xids := count(text, `xid_events_total{UUID="GPU-a",gpu="0",xid="79"}`)
			streams := count(text, `stream_ends_total{cause="kubelet-restarted",resource="a/b"}`)
			if xids != step.xids || streams != step.streams {
				t.Fatalf("step %+v: %q XIDs of the GPU, %q ends of the resource", step, xids, streams)
			}
		}
	})
}

// TestBounds: the number of series is limited for any number of GPUs, codes and resources.
func TestBounds(t *testing.T) {
	t.Parallel()
	const most = 256 // GPUs, and resources
	c, s := telemetry.NewCounters(nil), full()
	for i := range 1000 {
		gpu, resource := fmt.Sprint("GPU-", i), fmt.Sprint("a/", i)
		s.GPUs = append(s.GPUs, status.Device{UUID: gpu})
		s.Resources = append(s.Resources, status.Resource{Name: resource})
		c.XID("GPU-a", uint64(i), at)
		c.XID(gpu, 79, at)
		c.Registered(resource, true)
	}
	text := metricsOf(t, s, nil, c)
	if n := strings.Count(text, `xid_events_total{UUID="GPU-a"`); n != 32+1 {
		t.Errorf("%d series of XIDs of one GPU", n)
	}
	if !strings.Contains(text, `xid_events_total{UUID="GPU-a",gpu="0",xid="other"} 968`) {
		t.Error("XIDs beyond the bound are not counted as other")
	}
	gpus := len(regexp.MustCompile(`xid_events_total{UUID="[^"]*",gpu="[^"]*",xid="79"}`).FindAllString(text, -1))
	resources := len(regexp.MustCompile(`registrations_total{resource="[^"]*",result="accepted"}`).FindAllString(text, -1))
	if gpus != most || resources != most {
		t.Errorf("%d GPUs and %d resources are counted, want %d", gpus, resources, most)
	}
}
