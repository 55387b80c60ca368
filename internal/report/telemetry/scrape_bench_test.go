package telemetry

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// BenchmarkScrape scrapes 16 GPUs with 7 MIG devices each and 200 pods that share them, compressed
// or not.
func BenchmarkScrape(b *testing.B) {
	e := largeNode()
	for _, encoding := range []string{"gzip", "identity"} {
		b.Run(encoding, func(b *testing.B) {
			request := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/metrics", http.NoBody)
			request.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
			request.Header.Set("Accept-Encoding", encoding)
			size := 0
			for b.Loop() {
				recorder := httptest.NewRecorder()
				e.handler.ServeHTTP(recorder, request)
				size = recorder.Body.Len()
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}

// largeNode returns an Exporter of a node with 16 GPUs, each in seven MIG devices that two pods can
// share, and 200 pods.
func largeNode() *Exporter {
	s := full()
	s.GPUs = nil
	var snapshot inventory.Snapshot
	var samples []inventory.Sample
	var pods []kubelet.ContainerDevice
	ofInstances := map[inventory.Measure]bool{}
	for _, row := range gpuRows {
		ofInstances[row.measure] = row.series == onePerInstance
	}
	for i := range 16 {
		uuid := fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)
		gpu := inventory.GPU{
			Index: i, UUID: uuid, Model: "NVIDIA H100 80GB HBM3", BDF: fmt.Sprintf("0000:%02x:00.0", i),
			Health: inventory.Health{State: inventory.Healthy, Since: at},
		}
		sample := inventory.Sample{UUID: uuid, Taken: at}
		for m := range inventory.AllMeasures() {
			if !ofInstances[m] {
				sample.Values.Set(m, float64(1000*i)+float64(m)/7)
			}
		}
		s.GPUs = append(s.GPUs, status.Device{
			Index: fmt.Sprint(i), UUID: uuid, Model: gpu.Model, PCI: gpu.BDF, State: "Healthy", Since: at,
		})
		for j := range 7 {
			mig := fmt.Sprintf("MIG-%08d-0000-0000-0000-00000000000%d", i, j)
			gpu.MIGDevices = append(gpu.MIGDevices, inventory.MIGDevice{UUID: mig, GI: 7 + j, Profile: "1g.10gb"})
			instance := inventory.InstanceSample{GI: 7 + j, Profile: "1g.10gb"}
			for m := range ofInstances {
				instance.Values.Set(m, float64(100*i+j)+float64(m)/7)
			}
			sample.Instances = append(sample.Instances, instance)
			s.GPUs = append(s.GPUs, status.Device{
				Index: fmt.Sprintf("%d:%d", i, j), UUID: mig, GPU: uuid, Profile: "1g.10gb", State: "Healthy", Since: at,
			})
			for replica := range 2 {
				if len(pods) < 200 {
					pods = append(pods, kubelet.ContainerDevice{
						ID: fmt.Sprintf("%s::%d", mig, replica), Namespace: "default", Pod: fmt.Sprintf("training-job-worker-%d",
							len(pods)), Container: "main",
					})
				}
			}
		}
		snapshot.GPUs, samples = append(snapshot.GPUs, gpu), append(samples, sample)
	}
	counters := counted()
	for _, g := range snapshot.GPUs {
		counters.XID(g.UUID, 31, at)
	}
	return New(Options{
		Status: func(context.Context) (status.Status, error) { return s, nil }, Counters: counters,
		GPUs: &GPUs{
			Settings: feed.New(GPUSettings{Every: 15 * time.Second,
				HostnameLabel: "Hostname"}), Snapshots: feed.New(snapshot), Samples: feed.New(samples),
			Pods: feed.New(PodDevices{Asked: at, Devices: pods}), Hostname: "node-1",
			XIDName: func(uint64) string { return "name" }, Now: func() time.Time { return at },
		},
	})
}
