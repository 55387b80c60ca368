package telemetry_test

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// BenchmarkScrape scrapes 16 GPUs with 7 MIG devices each and 200 pods that share them, compressed
// or not.
func BenchmarkScrape(b *testing.B) {
	node := started(b, largeNode())
	for _, encoding := range []string{"gzip", "identity"} {
		b.Run(encoding, func(b *testing.B) {
			size := 0
			for b.Loop() {
				size = len(scrape(b, node, http.Header{"Accept": {openMetrics}, "Accept-Encoding": {encoding}}).body)
			}
			b.ReportMetric(float64(size), "bytes")
		})
	}
}

// largeNode returns a node with 16 GPUs, each in seven MIG devices that two pods can
// share, and 200 pods.
func largeNode() telemetry.Options {
	s := full()
	s.GPUs = nil
	var snapshot inventory.Snapshot
	var samples []inventory.Sample
	var pods []kubelet.ContainerDevice
	ofInstances := []inventory.Measure{
		inventory.MemoryFree, inventory.MemoryUsed, inventory.MemoryReserved, inventory.MemoryTotal,
		inventory.GraphicsActive, inventory.TensorActive, inventory.DRAMActive, inventory.SMActive,
		inventory.SMOccupancy, inventory.FP64Active, inventory.FP32Active, inventory.FP16Active,
	}
	for i := range 16 {
		uuid := fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)
		gpu := inventory.GPU{
			Index: i, UUID: uuid, Model: "NVIDIA H100 80GB HBM3", BDF: fmt.Sprintf("0000:%02x:00.0", i),
			Health: inventory.Health{State: inventory.Healthy, Since: at},
		}
		sample := inventory.Sample{UUID: uuid, Taken: at}
		for m := range inventory.AllMeasures() {
			if !slices.Contains(ofInstances, m) {
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
			for _, m := range ofInstances {
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
	return nodeOf(s, counters, snapshot, samples, telemetry.PodDevices{Asked: at, Devices: pods})
}
