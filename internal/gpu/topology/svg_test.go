package topology_test

import (
	"fmt"
	"math"
	"strings"
)

// colours are those of the series of a chart, readable without telling red from green.
var colours = []string{"#bbbbbb", "#88ccee", "#ddaa33", "#004488", "#aa4499", "#117733"}

// A series is a named row of numbers in a chart.
type series struct {
	name   string
	values []float64
}

// bars draws values from 0 to 1 as an SVG picture: a group of horizontal bars for each label.
func bars(title string, labels []string, rows []series) string {
	const left, width, bar, gap, top = 170, 560, 8, 10, 60
	group := bar*len(rows) + gap
	height := top + group*len(labels) + 30
	var b strings.Builder
	begin(&b, left+width+60, height, title)
	legend(&b, rows, left)
	for tick := 0; tick <= 10; tick += 2 {
		x := left + width*tick/10
		fmt.Fprintf(&b, "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#dddddd\"/>\n", x, top, x, height-26)
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.1f</text>\n", x, height-10, float64(tick)/10)
	}
	for i, label := range labels {
		y := top + i*group
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", left-8, y+bar*len(rows)/2+4, label)
		for j, row := range rows {
			fmt.Fprintf(&b, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n",
				left, y+j*bar, width*row.values[i], bar-1, colours[j])
		}
	}
	return b.String() + "</svg>\n"
}

// curves draws rows over xs as an SVG picture, with values from 0.1 to 10,000 on a logarithmic
// axis.
func curves(title, xTitle string, xs []int, rows []series) string {
	const left, width, height, top, decades = 70, 640, 400, 60, 5
	var b strings.Builder
	begin(&b, left+width+30, top+height+50, title)
	legend(&b, rows, left)
	for decade := range decades + 1 {
		y := top + height - height*decade/decades
		fmt.Fprintf(&b, "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#dddddd\"/>\n", left, y, left+width, y)
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%g</text>\n", left-8, y+4,
			math.Pow(10, float64(decade-1)))
	}
	x := func(i int) float64 {
		return left + width*float64(xs[i]-xs[0])/float64(xs[len(xs)-1]-xs[0])
	}
	for i := range xs {
		fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", x(i), top+height+18, xs[i])
	}
	fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", left+width/2, top+height+40, xTitle)
	for j, row := range rows {
		var points []string
		for i, value := range row.values {
			y := top + height - height*(math.Log10(max(value, 0.1))+1)/decades
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(i), y))
		}
		fmt.Fprintf(&b, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n",
			strings.Join(points, " "), colours[j])
	}
	return b.String() + "</svg>\n"
}

func begin(b *strings.Builder, width, height int, title string) {
	fmt.Fprintf(b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "+
		"font-size=\"12\">\n",
		width, height)
	fmt.Fprintf(b, "<title>%s</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", title)
	fmt.Fprintf(b, "<text x=\"%d\" y=\"22\" text-anchor=\"middle\" font-size=\"15\">%s</text>\n", width/2, title)
}

func legend(b *strings.Builder, rows []series, left int) {
	for j, row := range rows {
		x := left + j*120
		fmt.Fprintf(b, "<rect x=\"%d\" y=\"34\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, colours[j])
		fmt.Fprintf(b, "<text x=\"%d\" y=\"45\">%s</text>\n", x+18, row.name)
	}
}
