package fleet

import (
	"strings"
	"testing"
	"time"
)

func TestHistogram(t *testing.T) {
	t.Parallel()
	read := func(slow string) histogram {
		return histograms(strings.NewReader(`
x_bucket{verb="GET",le="0.1"} 90
x_bucket{verb="GET",le="1"} ` + slow + `
x_bucket{verb="GET",le="+Inf"} 100
x_bucket{verb="PATCH",le="0.1"} 100
x_bucket{verb="PATCH",le="1"} 100
x_bucket{verb="PATCH",le="+Inf"} 100
x_bucket{verb="WATCH",le="0.1"} 0
x_bucket{verb="WATCH",le="+Inf"} 1000
x_count 5
`))["x"]
	}
	h := read("99")
	if h.count() != 200 || h.quantile(0.5) != 100*time.Millisecond || h.quantile(0.99) != time.Second {
		t.Errorf("%d observations, p50 %v, p99 %v, want 200, 100ms and 1s", h.count(), h.quantile(0.5), h.quantile(0.99))
	}
	if worse := read("90"); worse.quantile(0.99) < time.Hour {
		t.Errorf("p99 %v of observations beyond all bounds", worse.quantile(0.99))
	}
	if later := h.since(h); later.count() != 0 {
		t.Errorf("%d observations since the same state", later.count())
	}
}
