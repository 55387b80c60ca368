package monitoring

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
	"time"
)

// The picture has two charts in a row. Sizes are in pixels.
const (
	chartWidth, chartHeight   = 430, 190
	left, top, right, bottom  = 52, 26, 12, 40
	plotWidth, plotHeight     = chartWidth - left - right, chartHeight - top - bottom
	chartsInRow, legendLength = 2, 6
)

var colors = []string{"#1b6ca8", "#d1495b", "#3c8d2f", "#8e5fb0", "#c77d0a", "#1a9e96", "#6b6b6b", "#b03a8c"}

// A chart is a panel's data over the time of the run.
type chart struct {
	title  string
	series []series
}

// draw returns the charts as an SVG image.
func draw(charts []chart, from, to time.Time) string {
	var out strings.Builder
	rows := (len(charts) + chartsInRow - 1) / chartsInRow
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="10">`+"\n",
		chartWidth*chartsInRow, chartHeight*rows)
	fmt.Fprintln(&out, `<rect width="100%" height="100%" fill="white"/>`)
	for i, c := range charts {
		fmt.Fprintf(&out, `<g transform="translate(%d,%d)">`+"\n", i%chartsInRow*chartWidth, i/chartsInRow*chartHeight)
		c.draw(&out, from, to)
		fmt.Fprintln(&out, `</g>`)
	}
	fmt.Fprintln(&out, `</svg>`)
	return out.String()
}

func (c chart) draw(out *strings.Builder, from, to time.Time) {
	low, high := 0.0, 0.0
	for _, s := range c.series {
		for _, pair := range s.Values {
			low, high = min(low, number(pair)), max(high, number(pair))
		}
	}
	if high == low {
		high = low + 1
	}
	fmt.Fprintf(out, `<text x="%d" y="16" font-size="12" font-weight="bold">%s</text>`+"\n", left, html.EscapeString(c.title))
	for _, share := range []float64{0, 0.5, 1} {
		y := top + plotHeight*(1-share)
		fmt.Fprintf(out, `<path d="M%d %.1fh%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			left, y, plotWidth, left-5, y+3, short(low+share*(high-low)))
		fmt.Fprintf(out, `<text x="%.1f" y="%d" text-anchor="middle">%.0f s</text>`+"\n",
			left+share*plotWidth, top+plotHeight+14, share*to.Sub(from).Seconds())
	}
	names := make([]string, 0, legendLength)
	for i, s := range c.series {
		points := make([]string, 0, len(s.Values))
		for _, pair := range s.Values {
			seconds, _ := pair[0].(float64)
			x := (seconds - float64(from.UnixMilli())/1000) / to.Sub(from).Seconds()
			points = append(points, fmt.Sprintf("%.1f,%.1f", left+x*plotWidth, top+plotHeight*(1-(number(pair)-low)/(high-low))))
		}
		color := colors[i%len(colors)]
		fmt.Fprintf(out, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.3"/>`+"\n", strings.Join(points, " "), color)
		if len(names) < legendLength {
			names = append(names, fmt.Sprintf(`<tspan fill=%q dx="6">%s</tspan>`, color, html.EscapeString(s.label())))
		}
	}
	fmt.Fprintf(out, `<text x="%d" y="%d" font-size="9">%s</text>`+"\n", left-6, top+plotHeight+30, strings.Join(names, ""))
}

// label returns what tells a series from the others of its chart.
func (s series) label() string {
	for _, name := range []string{"state", "cure", "xid", "method", "cause", "result", "gpu", "exported_pod", "resource", "group"} {
		if value, ok := s.Metric[name]; ok {
			if name == "gpu" || name == "xid" {
				return strings.ToUpper(name) + " " + value
			}
			return value
		}
	}
	return s.Metric["__name__"]
}

// short returns a number with about three digits.
func short(value float64) string {
	switch size := math.Abs(value); {
	case size >= 1e9:
		return fmt.Sprintf("%.3gG", value/1e9)
	case size >= 1e6:
		return fmt.Sprintf("%.3gM", value/1e6)
	case size >= 1e4:
		return fmt.Sprintf("%.3gk", value/1e3)
	}
	return fmt.Sprintf("%.2g", value)
}

// byLabel orders series so that the same one has the same color in each picture.
func byLabel(all []series) []series {
	slices.SortFunc(all, func(a, b series) int { return strings.Compare(a.label(), b.label()) })
	return all
}
