// Package fleet measures how a real API server answers many nodes that start at once, and has it
// and a real scheduler take the devices of Dynamic Resource Allocation.
package fleet

import (
	"bufio"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A histogram has the number of observations up to each bound, in seconds.
type histogram map[float64]float64

// histograms reads histograms from metrics in Prometheus' text format, by name, and by name and
// verb. Series are added up, but for those of watches, which last as long as they are wanted.
func histograms(from io.Reader) map[string]histogram {
	all := map[string]histogram{}
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, rest, found := strings.Cut(lines.Text(), "_bucket{")
		if !found || strings.Contains(rest, `verb="WATCH"`) {
			continue
		}
		_, bound, _ := strings.Cut(rest, `le="`)
		bound, _, _ = strings.Cut(bound, `"`)
		le, err := strconv.ParseFloat(bound, 64)
		if err != nil {
			continue
		}
		value, err := strconv.ParseFloat(rest[strings.LastIndex(rest, " ")+1:], 64)
		if err != nil {
			continue
		}
		_, verb, _ := strings.Cut(rest, `verb="`)
		verb, _, _ = strings.Cut(verb, `"`)
		for _, key := range []string{name, name + " " + verb} {
			if all[key] == nil {
				all[key] = histogram{}
			}
			all[key][le] += value
		}
	}
	return all
}

// since returns the observations that were made after an older state.
func (h histogram) since(before histogram) histogram {
	later := histogram{}
	for le, n := range h {
		later[le] = n - before[le]
	}
	return later
}

func (h histogram) count() int { return int(h[math.Inf(1)]) }

// quantile returns the bound that this share of the observations does not pass.
func (h histogram) quantile(q float64) time.Duration {
	bounds := make([]float64, 0, len(h))
	for le := range h {
		bounds = append(bounds, le)
	}
	slices.Sort(bounds)
	for _, le := range bounds {
		if h[le] >= q*h[math.Inf(1)] {
			return time.Duration(min(le, 1e6) * float64(time.Second))
		}
	}
	return 0
}
