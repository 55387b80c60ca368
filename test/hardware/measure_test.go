package hardware_test

import (
	"math"
	"os/exec"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// watched is how often metrics are read in a test: they change each second.
const watched = 200 * time.Millisecond

// A sample is what metrics say of a GPU, each in the unit of nvidia-smi dmon: percent, or watts.
type sample map[string]float64

// compared are the metrics, by the columns of nvidia-smi dmon that say the same, with what they are
// multiplied by.
var compared = map[string]struct {
	metric string
	factor float64
	within float64 // that far from what dmon says
}{
	"gract":  {"DCGM_FI_PROF_GR_ENGINE_ACTIVE", 100, 5},
	"smutil": {"DCGM_FI_PROF_SM_ACTIVE", 100, 5},
	"fp32":   {"DCGM_FI_PROF_PIPE_FP32_ACTIVE", 100, 5},
	"sm":     {"DCGM_FI_DEV_GPU_UTIL", 1, 5},
	"pwr":    {"DCGM_FI_DEV_POWER_USAGE", 1, 70},
}

// busy is the share of graphics activity, in percent, from which on a sample is one of the load.
const busy = 90

// TestMeasurements: metrics say of a known load what nvidia-smi dmon says of it, and nothing before
// and after.
func TestMeasurements(t *testing.T) {
	m := measured(t, "--gpu-metrics-interval", "1s")
	gpu := m.status().GPUs[0]
	poll.Until(t, "the driver counts activity, or the daemon says that it does not", func() bool {
		_, found := m.sample(gpu.UUID)["gract"]
		return found || len(m.status().MetricsAbsent) > 0
	})
	if absent := m.status().MetricsAbsent; len(absent) > 0 {
		t.Skipf("the driver does not let the daemon measure: %v", absent)
	}
	if _, err := exec.LookPath("nvidia-smi"); err != nil {
		t.Skip("nvidia-smi is not in the PATH")
	}
	said := make(chan string, 1)
	c := exec.CommandContext(t.Context(), "nvidia-smi", "dmon", "-i", gpu.Index, "-s", "pucm", "--gpm-metrics", "1,2,12",
		"-d", "1", "-c", "11")
	go func() {
		out, err := c.CombinedOutput()
		if err != nil {
			out = append(out, err.Error()...)
		}
		said <- string(out)
	}()
	if before := m.sample(gpu.UUID); before["gract"] > 1 || before["fp32"] > 1 {
		t.Errorf("the GPU is idle, and metrics say %v", before)
	}

	load := started(t, gpu.UUID, "6s")
	ours := m.watch(gpu.UUID, load)
	if a := load.next(t); a.Seconds > 0 {
		t.Logf("the load: %.1f TFLOP/s in single precision, kernels of %.2f ms", 2*a.FMAs/a.Seconds/1e12,
			1000*a.Seconds/float64(a.Launches))
	}
	load.end(t)
	poll.Until(t, "metrics say that the GPU is idle again", func() bool { return m.sample(gpu.UUID)["gract"] < 1 })

	text := <-said
	theirs := parseDmon(text)
	for column, c := range compared {
		got, want := median(ours[column]), median(under(theirs, column))
		if math.IsNaN(want) {
			t.Logf("nvidia-smi dmon has no column %s of the load:\n%s", column, text)
			continue
		}
		t.Logf("%s under load: %.1f in %d samples; nvidia-smi dmon says %.1f", c.metric, got, len(ours[column]), want)
		if !(math.Abs(got-want) <= c.within) {
			t.Errorf("%s is %.1f, nvidia-smi dmon says %.1f", c.metric, got, want)
		}
	}
}

// sample returns what metrics say of a GPU now.
func (m *machine) sample(gpu string) sample {
	m.Helper()
	return m.scrape().sample(gpu)
}

func (s series) sample(gpu string) sample {
	values := sample{}
	for column, c := range compared {
		if v, found := s.value(c.metric, `UUID="`+gpu+`"`); found {
			values[column] = v * c.factor
		}
	}
	return values
}

// watch returns what metrics say while a client computes, by the columns of dmon, from the seconds
// that were busy.
func (m *machine) watch(gpu string, load *program) map[string][]float64 {
	m.Helper()
	all := map[string][]float64{}
	tick := time.NewTicker(watched)
	defer tick.Stop()
	for last := 0.0; len(load.answers) == 0; {
		select {
		case <-tick.C:
		case <-load.ended:
			return all
		}
		metrics := m.scrape()
		taken, _ := metrics.value("gpu_device_plugin_sample_timestamp_seconds", `UUID="`+gpu+`"`)
		now := metrics.sample(gpu)
		if taken == last || now["gract"] < busy {
			continue
		}
		last = taken
		for column, v := range now {
			all[column] = append(all[column], v)
		}
	}
	return all
}

// under returns the values of a column while the GPU was busy.
func under(rows []map[string]float64, column string) (values []float64) {
	for _, r := range rows {
		if v, found := r[column]; found && r["gract"] >= busy {
			values = append(values, v)
		}
	}
	return values
}
