package telemetry_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// The media types of metrics beside plain text.
const (
	openMetrics = "application/openmetrics-text;version=1.0.0"
	protobuf    = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)

// strangeNode returns a node with values and labels that the text formats write in a special way.
func strangeNode() telemetry.Options {
	var snapshot inventory.Snapshot
	var samples []inventory.Sample
	for i, value := range []float64{
		0, 1, -1, 0.5, 42, -42, 1e6, 999999, 1e20, 1e21, 1e22, 1.5e300, 1e-9, 1.795309323e+09, 123456789, math.NaN(),
		math.Inf(1), math.Inf(-1),
	} {
		sample := inventory.Sample{UUID: fmt.Sprint("GPU-", i), Taken: at}
		for _, m := range []inventory.Measure{ // a gauge, and counters with a regular and another name
			inventory.PowerUsage, inventory.NVLinkReceived, inventory.EnergyConsumption,
		} {
			sample.Values.Set(m, value)
		}
		snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{Index: i, UUID: sample.UUID})
		samples = append(samples, sample)
	}
	s := full()
	s.Resources = nil
	for _, name := range []string{"", " ", `a"b`, `a\b`, "a\nb", "a\\nb", "é", "{}=,", "\xff"} {
		s.Resources = append(s.Resources, status.Resource{Name: name})
	}
	return nodeOf(s, counted(), snapshot, samples, telemetry.PodDevices{})
}

func nodeOf(s status.Status, counters *telemetry.Counters, snapshot inventory.Snapshot, samples []inventory.Sample,
	pods telemetry.PodDevices) telemetry.Options {
	return telemetry.Options{
		Status: func(context.Context) (status.Status, error) { return s, nil }, Counters: counters,
		GPUs: &telemetry.GPUs{
			Settings:  feed.New(telemetry.GPUSettings{Every: 15 * time.Second, HostnameLabel: "Hostname"}),
			Snapshots: feed.New(snapshot), Samples: feed.New(samples), Pods: feed.New(pods), Hostname: "node-1",
			XIDName: func(uint64) string { return "name" }, Now: func() time.Time { return at },
		},
	}
}

// steady are the lines of text about metrics that do not change from scrape to scrape. Histograms
// do not count: their native buckets are in no text.
func steady(text string) (lines []string) {
	about := regexp.MustCompile(`^(# (HELP|TYPE) )?(gpu_device_plugin_|DCGM_)`)
	for line := range strings.Lines(text) {
		if about.MatchString(line) && !strings.Contains(line, "_duration_seconds") {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestTextOfPages: the text formats equal those of Prometheus' client, byte by byte.
func TestTextOfPages(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]telemetry.Options{"strange": strangeNode(), "large": largeNode()} {
		node := started(t, options)
		messages := scrape(t, node, http.Header{"Accept": {protobuf}})
		decoder := expfmt.NewDecoder(bytes.NewReader(messages.body), expfmt.ResponseFormat(messages.header))
		var families []*dto.MetricFamily
		for {
			family := &dto.MetricFamily{}
			err := decoder.Decode(family)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			families = append(families, family)
		}
		for accept, format := range map[string]expfmt.Format{
			"text/plain": expfmt.NewFormat(expfmt.TypeTextPlain), openMetrics: expfmt.NewFormat(expfmt.TypeOpenMetrics),
		} {
			var want bytes.Buffer
			encoder := expfmt.NewEncoder(&want, format)
			for _, f := range families {
				if err := encoder.Encode(f); err != nil {
					t.Fatal(err)
				}
			}
			got := scrape(t, node, http.Header{"Accept": {accept}})
			if diff := cmp.Diff(steady(want.String()), steady(string(got.body))); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", name, format, diff)
			}
		}
	}
}

// read returns the metrics in an answer of any format and encoding, without histograms of messages:
// names and labels, with values. Prometheus would reject a series that is there twice, and so does
// read.
func read(a answer) (map[string]float64, error) {
	body := io.Reader(bytes.NewReader(a.body))
	if a.header.Get("Content-Encoding") == "gzip" {
		unzipped, err := gzip.NewReader(body)
		if err != nil {
			return nil, err
		}
		body = unzipped
	}
	all := map[string]float64{}
	if format := expfmt.ResponseFormat(a.header); format.FormatType() == expfmt.TypeProtoDelim {
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
				var pairs []string
				for _, l := range m.GetLabel() {
					pairs = append(pairs, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
				}
				slices.Sort(pairs)
				name := family.GetName()
				if len(pairs) > 0 {
					name += "{" + strings.Join(pairs, ",") + "}"
				}
				if _, twice := all[name]; twice {
					return nil, fmt.Errorf("%s is there twice", name)
				}
				all[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	text, err := io.ReadAll(body)
	if open := strings.Contains(a.header.Get("Content-Type"), "openmetrics"); err == nil &&
		open != strings.HasSuffix(string(text), "\n# EOF\n") {
		err = fmt.Errorf("an answer of %s ends with %q", a.header.Get("Content-Type"), text[max(0, len(text)-20):])
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "#") {
			space := strings.LastIndexByte(line, ' ')
			value, failure := strconv.ParseFloat(line[space+1:], 64)
			if _, twice := all[line[:space]]; twice {
				err = errors.Join(err, fmt.Errorf("%s is there twice", line[:space]))
			}
			all[line[:space]], err = value, errors.Join(err, failure)
		}
	}
	return all, err
}

// formats are all ways to ask for metrics.
func formats() (all []http.Header) {
	for _, accept := range []string{
		"", openMetrics, protobuf,
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
	counters := telemetry.NewCounters(nil)
	publish := func() {
		n := published.Load() + 1
		var values inventory.Measures
		values.Set(inventory.Temperature, float64(n))
		samples.Publish([]inventory.Sample{{UUID: "GPU-a", Taken: at, Values: values}})
		counters.XID("GPU-a", 79, at)
		published.Store(n)
	}
	gpu := inventory.GPU{UUID: "GPU-a", Health: inventory.Health{State: inventory.Healthy}}
	node := started(t, telemetry.Options{
		Counters: counters,
		Status: func(context.Context) (status.Status, error) {
			return status.Status{Generation: uint64(published.Load()), GPUs: []status.Device{{UUID: "GPU-a", Index: "0"}}}, nil
		},
		GPUs: &telemetry.GPUs{
			Settings: feed.New(telemetry.GPUSettings{Every: 1}), Snapshots: feed.New(inventory.Snapshot{GPUs: []inventory.GPU{gpu}}),
			Samples: samples,
			Pods:    feed.New(telemetry.PodDevices{}), XIDName: func(uint64) string { return "" }, Now: at.Local,
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
				before := float64(published.Load())
				a, err := ask(t, node, "/metrics", header)
				if err != nil || a.code != http.StatusOK {
					t.Errorf("%v: answered with %d: %v", header, a.code, err)
					return
				}
				got, err := read(a)
				if err != nil {
					t.Errorf("%v: %v", header, err)
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
	node := started(t, largeNode())
	var first map[string]float64
	for _, header := range formats() {
		a := scrape(t, node, header)
		if got, want := a.header.Get("Content-Encoding"), header.Get("Accept-Encoding"); got != want {
			t.Errorf("%v: content encoding %q", header, got)
		}
		all, err := read(a)
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

// TestGzip: an answer is compressed if the client takes gzip with a weight other than 0.
func TestGzip(t *testing.T) {
	t.Parallel()
	node := started(t, telemetry.Options{})
	check := func(want bool, accepted ...string) {
		t.Helper()
		a := scrape(t, node, http.Header{"Accept-Encoding": accepted})
		if got := a.header.Get("Content-Encoding"); (got == "gzip") != want {
			t.Errorf("with %q, the encoding is %q", accepted, got)
		}
	}
	for accepted, want := range map[string]bool{
		"": false, "gzip": true, "GZIP": true, "identity": false, "gzip;q=0": false, "gzip; q=0.000": false,
		"gzip;q=0.5": true, "gzip;q=1": true,
		"br, gzip": true, "zstd,deflate": false, "deflate, gzip;q=1.0, *;q=0.5": true, "xgzip": false, "*": false,
	} {
		check(want, accepted)
	}
	check(true, "identity", "gzip") // both headers count
}
