package main

import (
	"fmt"
	"math"
	"strings"
	"time"
)

const (
	chartWidth, panelHeight = 760, 110
	marginLeft, marginTop   = 48, 26
)

var colors = []string{"#1f77b4", "#d62728", "#2ca02c", "#9467bd"}

// A curve is the samples of one stage.
type curve struct {
	name    string
	samples []sample
}

// drawing returns an SVG with a panel for each figure and a line for each curve.
func drawing(curves []curve, during time.Duration) string {
	var b strings.Builder
	panels := []limit{limits[0], limits[2], limits[3]}
	goroutines := limits[4]
	if len(curves) > 0 && len(curves[0].samples) > 0 && curves[0].samples[len(curves[0].samples)-1].goroutines > 0 {
		panels = append(panels, goroutines)
	}
	height := marginTop + len(panels)*(panelHeight+24) + 24
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n",
		chartWidth, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", chartWidth, height)
	for i, c := range curves {
		fmt.Fprintf(&b, `<text x="%d" y="14" fill="%s">%s</text>`+"\n", marginLeft+i*170, colors[i%len(colors)], c.name)
	}
	for i, p := range panels {
		drawPanel(&b, p, curves, during, marginTop+i*(panelHeight+24))
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d">minutes</text>`+"\n</svg>\n", chartWidth/2, height-6)
	return b.String()
}

func drawPanel(b *strings.Builder, p limit, curves []curve, during time.Duration, top int) {
	most := 1.0
	for _, c := range curves {
		for _, s := range c.samples {
			most = max(most, p.of(s))
		}
	}
	most = math.Ceil(most/10) * 10
	width := float64(chartWidth - marginLeft - 10)
	x := func(at time.Duration) float64 { return marginLeft + width*at.Seconds()/during.Seconds() }
	y := func(v float64) float64 { return float64(top+panelHeight) - panelHeight*v/most }
	unit := p.unit
	if unit != "" {
		unit = " in " + unit
	}
	fmt.Fprintf(b, `<text x="%d" y="%d">%s%s</text>`+"\n", marginLeft, top+10, p.name, unit)
	for _, v := range []float64{0, most / 2, most} {
		fmt.Fprintf(b, `<path d="M%d %.0fH%d" stroke="#ccc"/><text x="%d" y="%.0f" text-anchor="end">%.0f</text>`+"\n",
			marginLeft, y(v), chartWidth-10, marginLeft-4, y(v)+4, v)
	}
	for i := range 7 {
		at := during * time.Duration(i) / 6
		fmt.Fprintf(b, `<text x="%.0f" y="%d" text-anchor="middle">%.3g</text>`+"\n", x(at), top+panelHeight+13, at.Minutes())
	}
	for i, c := range curves {
		var path strings.Builder
		for _, s := range thin(c.samples) {
			fmt.Fprintf(&path, " %.0f,%.1f", x(s.at), y(p.of(s)))
		}
		fmt.Fprintf(b, `<polyline fill="none" stroke="%s" points="%s"/>`+"\n", colors[i%len(colors)],
			strings.TrimSpace(path.String()))
	}
}

// thin leaves out samples that no eye can tell apart.
func thin(samples []sample) []sample {
	const most = 360
	step := max(1, len(samples)/most)
	var kept []sample
	for i := 0; i < len(samples); i += step {
		kept = append(kept, samples[i])
	}
	return kept
}
