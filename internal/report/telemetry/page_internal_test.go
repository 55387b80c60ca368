package telemetry

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// strange is a page of values and labels with special formatting.
func strange() *page {
	out := &page{map[string]*family{}}
	for _, value := range []float64{
		0, 1, -1, 0.5, 42, -42, 1e6, 999999, 1e20, 1e21, 1e22, 1.5e300, 1e-9, 1.795309323e+09, 123456789, math.NaN(),
		math.Inf(1), math.Inf(-1),
	} {
		for _, m := range []*metric{&snapshotTime, &reexecutions, &gpuRows[5].metric} {
			out.add(m, value, newLabels(nil))
		}
	}
	for _, value := range []string{"", " ", `a"b`, `a\b`, "a\nb", "a\\nb", "é", "{}=,", "\xff"} {
		buildInfo.send(out, 1, value)
		driverInfo.send(out, 1, value, value)
	}
	return out
}

// TestTextOfPages: the text formats of a page equal those of Prometheus' client, byte by byte.
func TestTextOfPages(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]*page{"strange": strange(), "large": largeNode().page(t.Context())} {
		for _, format := range []expfmt.Format{expfmt.NewFormat(expfmt.TypeTextPlain),
			expfmt.NewFormat(expfmt.TypeOpenMetrics)} {
			var got, want bytes.Buffer
			if err := p.write(&got, format); err != nil {
				t.Fatal(err)
			}
			encoder := expfmt.NewEncoder(&want, format)
			for _, f := range ascending(p.families) {
				if err := encoder.Encode(f.message()); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(strings.Split(want.String(), "\n"), strings.Split(got.String(), "\n")); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", name, format, diff)
			}
		}
	}
}

// TestNoSeriesTwice: Prometheus rejects duplicate series.
func TestNoSeriesTwice(t *testing.T) {
	t.Parallel()
	for _, f := range largeNode().page(t.Context()).families {
		seen := map[string]bool{}
		for _, s := range f.series {
			if seen[s.labels.text] {
				t.Errorf("%s%s is there twice", f.name, s.labels.text)
			}
			seen[s.labels.text] = true
		}
	}
}

// read returns the program's own metrics in an answer of any format and encoding: names and labels,
// with values.
func read(answer *http.Response) (map[string]float64, error) {
	body := io.Reader(answer.Body)
	if answer.Header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(body)
		if err != nil {
			return nil, err
		}
		body = unzipped
	}
	all := map[string]float64{}
	if format := expfmt.ResponseFormat(answer.Header); format.FormatType() == expfmt.TypeProtoDelim {
		decoder := expfmt.NewDecoder(body, format)
		for {
			var family dto.MetricFamily
			if err := decoder.Decode(&family); err != nil {
				if errors.Is(err, io.EOF) {
					return all, nil
				}
				return nil, err
			}
			for _, m := range family.GetMetric() {
				if m.GetHistogram() != nil {
					continue
				}
				var pairs []label
				for _, l := range m.GetLabel() {
					pairs = append(pairs, label{l.GetName(), l.GetValue()})
				}
				all[family.GetName()+newLabels(pairs).text] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	text, err := io.ReadAll(body)
	if open := strings.Contains(answer.Header.Get("Content-Type"), "openmetrics"); err == nil &&
		open != strings.HasSuffix(string(text), "\n# EOF\n") {
		err = fmt.Errorf("an answer of %s ends with %q", answer.Header.Get("Content-Type"), text[max(0, len(text)-20):])
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "#") {
			space := strings.LastIndexByte(line, ' ')
			value, failed := strconv.ParseFloat(line[space+1:], 64)
			all[line[:space]], err = value, errors.Join(err, failed)
		}
	}
	return all, err
}

// formats are all ways to ask for metrics.
func formats() (all []http.Header) {
	for _, accept := range []string{
		"", "application/openmetrics-text;version=1.0.0",
		"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
	} {
		for _, encoding := range []string{"", "gzip"} {
			all = append(all, http.Header{"Accept": {accept}, "Accept-Encoding": {encoding}})
		}
	}
	return all
}

// TestScrapesAreCurrent: while samples, the status and counts change, clients ask in all formats at
// the same time. Each gets a complete answer in its format, with no value older than the question.
func TestScrapesAreCurrent(t *testing.T) {
	t.Parallel()
	var published atomic.Int64 // lower limit of all values
	samples := feed.New([]inventory.Sample(nil))
	counters := NewCounters(nil)
	publish := func() {
		n := published.Load() + 1
		var values inventory.Measures
		values.Set(inventory.Temperature, float64(n))
		samples.Publish([]inventory.Sample{{UUID: "GPU-a", Taken: at, Values: values}})
		counters.XID("GPU-a", 79, at)
		published.Store(n)
	}
	gpu := inventory.GPU{UUID: "GPU-a", Health: inventory.Health{State: inventory.Healthy}}
	e := New(Options{
		Counters: counters,
		Status: func(context.Context) (status.Status, error) {
			return status.Status{Generation: uint64(published.Load()), GPUs: []status.Device{{UUID: "GPU-a", Index: "0"}}}, nil
		},
		GPUs: &GPUs{
			Settings: feed.New(GPUSettings{Every: 1}), Snapshots: feed.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu}}),
			Samples: samples,
			Pods:    feed.New(PodDevices{}), XIDName: func(uint64) string { return "" }, Now: at.Local,
		},
	})
	publish()
	ending := make(chan struct{})
	var publisher, clients sync.WaitGroup
	publisher.Go(func() {
		for {
			select {
			case <-ending:
				return
			default:
				publish()
			}
		}
	})
	for _, header := range formats()[2:] { // as many as are rendered at a time
		clients.Go(func() {
			for range 50 {
				request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody)
				request.Header = header
				recorder := httptest.NewRecorder()
				before := float64(published.Load())
				e.handler.ServeHTTP(recorder, request)
				got, err := read(recorder.Result())
				if err != nil || recorder.Code != http.StatusOK {
					t.Errorf("%v: answered with %d: %v", header, recorder.Code, err)
					return
				}
				for _, name := range []string{
					`DCGM_FI_DEV_GPU_TEMP{UUID="GPU-a",device="nvidia0",gpu="0",modelName="",pci_bus_id=""}`,
					`gpu_device_plugin_xid_events_total{UUID="GPU-a",gpu="0",xid="79"}`, `gpu_device_plugin_snapshot_generation`,
				} {
					if got[name] < before {
						t.Errorf("%v: %s is %v, and was %v before the question", header, name, got[name], before)
					}
				}
			}
		})
	}
	clients.Wait()
	close(ending)
	publisher.Wait()
}

// TestFormatsAgree: all formats have the same values, compressed or not.
func TestFormatsAgree(t *testing.T) {
	t.Parallel()
	e := largeNode()
	var first map[string]float64
	for _, header := range formats() {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody)
		request.Header = header
		recorder := httptest.NewRecorder()
		e.handler.ServeHTTP(recorder, request)
		if got, want := recorder.Header().Get("Content-Encoding"), header.Get("Accept-Encoding"); got != want {
			t.Errorf("%v: content encoding %q", header, got)
		}
		all, err := read(recorder.Result())
		if err != nil {
			t.Fatalf("%v: %v", header, err)
		}
		for name := range all {
			if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") ||
				strings.Contains(name, "_duration_seconds") {
				delete(all, name) // these change all the time, or are histograms
			}
		}
		if first == nil {
			first = all
		}
		if diff := cmp.Diff(first, all); diff != "" {
			t.Errorf("%v (-first +this):\n%s", header, diff)
		}
	}
	if len(first) < 1500 {
		t.Errorf("%d series", len(first))
	}
}

func TestTakesGzip(t *testing.T) {
	t.Parallel()
	for accepted, want := range map[string]bool{
		"": false, "gzip": true, "GZIP": true, "identity": false, "gzip;q=0": false, "gzip; q=0.000": false,
		"gzip;q=0.5": true, "gzip;q=1": true,
		"br, gzip": true, "zstd,deflate": false, "deflate, gzip;q=1.0, *;q=0.5": true, "xgzip": false, "*": false,
	} {
		if got := takesGzip([]string{accepted}); got != want {
			t.Errorf("takesGzip(%q) = %t", accepted, got)
		}
	}
	if !takesGzip([]string{"identity", "gzip"}) {
		t.Error("of two headers, only one counts")
	}
}
