package telemetry

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// BenchmarkScrape is a scrape of the daemon's own metrics, of 16 GPUs with 7 MIG devices each, compressed or not.
func BenchmarkScrape(b *testing.B) {
	s := full()
	s.GPUs = nil
	for i := range 16 {
		uuid := fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)
		s.GPUs = append(s.GPUs, status.Device{
			Index: fmt.Sprint(i), UUID: uuid, Model: "NVIDIA H100 80GB HBM3", PCI: fmt.Sprintf("0000:%02x:00.0", i), State: "Healthy", Since: at,
		})
		for j := range 7 {
			s.GPUs = append(s.GPUs, status.Device{
				Index: fmt.Sprintf("%d:%d", i, j), UUID: fmt.Sprintf("MIG-%08d-0000-0000-0000-00000000000%d", i, j), GPU: uuid,
				Profile: "1g.10gb", State: "Healthy", Since: at,
			})
		}
	}
	e := New(Options{Status: func(context.Context) (status.Status, error) { return s, nil }, Counters: counted()})
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
