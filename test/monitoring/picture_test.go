package monitoring

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// The picture has Grafana's grid of 24 columns. Sizes are in pixels.
const (
	column, line = 50, 30 // of the grid
	gap          = 8      // between panels
	letter       = 5.9    // mean width of a letter of the usual size
	axis         = 66     // width of the labels of the vertical axis
	titleHeight  = 36
)

var colors = []string{"#1b6ca8", "#d1495b", "#3c8d2f", "#8e5fb0", "#c77d0a", "#1a9e96", "#6b6b6b", "#b03a8c", "#4c5fd7",
	"#8a6d1f"}

// A drawn is a panel with its data.
type drawn struct {
	panel
	results [][]series // of each query
}

// picture draws panels as Grafana does, over the time from one moment to another.
type picture struct {
	strings.Builder
	t        *testing.T
	from, to time.Time
}

// draw returns the dashboard as an SVG image.
func draw(t *testing.T, all []drawn, from, to time.Time) string {
	t.Helper()
	p := &picture{t: t, from: from, to: to}
	height := 0
	for _, d := range all {
		height = max(height, d.GridPos.Y+d.GridPos.H)
	}
	fmt.Fprintf(p, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="10.5" fill="#222">`+"\n",
		24*column+gap, height*line+gap)
	fmt.Fprintln(p, `<rect width="100%" height="100%" fill="#f0f1f3"/>`)
	for _, d := range all {
		x, y := d.GridPos.X*column+gap, d.GridPos.Y*line+gap
		width, height := d.GridPos.W*column-gap, d.GridPos.H*line-gap
		fmt.Fprintf(p, `<g transform="translate(%d,%d)">`+"\n", x, y)
		if d.Type == "row" {
			p.text(2, 18, d.Title, `font-size="14" font-weight="bold"`)
		} else {
			fmt.Fprintf(p, `<rect width="%d" height="%d" rx="3" fill="white" stroke="#d8dade"/>`+"\n", width, height)
			p.text(10, 19, clip(d.Title, float64(width-20)/1.2), `font-size="12" font-weight="bold"`)
			switch d.Type {
			case "timeseries":
				p.chart(d, width, height)
			case "stat":
				p.stat(d, width, height)
			case "table":
				p.table(d, width, height)
			default:
				t.Errorf("panel %q has the type %s", d.Title, d.Type)
			}
		}
		fmt.Fprintln(p, `</g>`)
	}
	fmt.Fprintln(p, `</svg>`)
	return p.String()
}

func (p *picture) text(x, y float64, text, attributes string) {
	if attributes != "" {
		attributes = " " + attributes
	}
	fmt.Fprintf(p, `<text x="%.1f" y="%.1f"%s>%s</text>`+"\n", x, y, attributes, html.EscapeString(text))
}

// A curve is a series with its name.
type curve struct {
	name string
	series
}

// curves returns the series of a panel with their names. The same one has the same place in each
// picture.
func (d drawn) curves() (all []curve) {
	for i, result := range d.results {
		var some []curve
		for _, s := range result {
			some = append(some, curve{legend(d.Targets[i].LegendFormat, s.Metric), s})
		}
		slices.SortStableFunc(some, func(a, b curve) int { return strings.Compare(a.name, b.name) })
		all = append(all, some...)
	}
	return all
}

var placeholder = regexp.MustCompile(`{{(\w+)}}`)

// legend returns the name of a series by Grafana's format.
func legend(format string, labels map[string]string) string {
	name := placeholder.ReplaceAllStringFunc(format, func(found string) string { return labels[placeholder.FindStringSubmatch(found)[1]] })
	return strings.Join(strings.Fields(name), " ")
}

func (p *picture) chart(d drawn, width, height int) {
	const bottom = 52 // labels of the time, and two lines of names
	plotWidth, plotHeight := float64(width-axis-14), float64(height-titleHeight-bottom)
	low, high := math.Inf(1), math.Inf(-1)
	curves := d.curves()
	for _, c := range curves {
		for _, pair := range c.Values {
			low, high = min(low, number(pair)), max(high, number(pair))
		}
	}
	f := d.FieldConfig.Defaults
	if f.Min != nil {
		low = *f.Min
	}
	if f.Max != nil {
		high = *f.Max
	}
	marks := ticks(low, high, f)
	low, high = min(low, marks[0]), max(high, marks[len(marks)-1])
	at := func(value float64) float64 { return titleHeight + plotHeight*(1-(value-low)/(high-low)) }
	for _, mark := range marks {
		fmt.Fprintf(p, `<path d="M%d %.1fh%.1f" stroke="#e4e6ea"/>`+"\n", axis, at(mark), plotWidth)
		p.text(axis-6, at(mark)+3.5, format(mark, f.Unit), `text-anchor="end" fill="#555"`)
	}
	whole := p.to.Sub(p.from).Seconds()
	for second := 0.0; second <= whole; second += step(whole / 4) {
		p.text(axis+plotWidth*second/whole, titleHeight+plotHeight+14, fmt.Sprintf("%g s", second),
			`text-anchor="middle" fill="#555"`)
	}
	names := make([]string, 0, len(curves))
	for i, c := range curves {
		color := colors[i%len(colors)]
		names = append(names, c.name)
		var points []string
		flush := func() {
			if len(points) > 0 {
				fmt.Fprintf(p, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.4"/>`+"\n", strings.Join(points, " "),
					color)
			}
			points = nil
		}
		before := 0.0
		for _, pair := range c.Values {
			seconds, _ := pair[0].(float64)
			x, y := axis+plotWidth*(seconds-float64(p.from.UnixMilli())/1000)/whole, at(number(pair))
			if f.Custom.DrawStyle == "bars" {
				fmt.Fprintf(p, `<rect x="%.1f" y="%.1f" width="6" height="%.1f" fill="%s"/>`+"\n", x-3+6*float64(i), y, at(low)-y,
					color)
				continue
			}
			if before > 0 && seconds-before > 3 {
				flush() // no data in between
			}
			before = seconds
			points = append(points, fmt.Sprintf("%.1f,%.1f", x, y))
		}
		flush()
	}
	p.names(names, width, float64(height-24))
}

// names draws the names of curves in two lines, with their colors.
func (p *picture) names(names []string, width int, y float64) {
	x, lines := 10.0, 1
	for i, name := range names {
		name = clip(name, float64(width)/2)
		needed := 16 + letter*float64(utf8.RuneCountInString(name)) + 8
		if more := fmt.Sprintf("+%d", len(names)-i); lines == 2 && x+needed+letter*6 > float64(width) && i < len(names)-1 ||
			x+needed > float64(width) && lines == 2 {
			p.text(x, y, more, `fill="#555"`)
			return
		}
		if x+needed > float64(width) {
			x, y, lines = 10, y+15, lines+1
		}
		fmt.Fprintf(p, `<rect x="%.1f" y="%.1f" width="10" height="3" fill="%s"/>`+"\n", x, y-5, colors[i%len(colors)])
		p.text(x+14, y, name, "")
		x += needed
	}
}

func (p *picture) stat(d drawn, width, height int) {
	curves := d.curves()
	each := float64(width-20) / float64(max(len(curves), 1))
	for i, c := range curves {
		x := 10 + each*float64(i)
		p.text(x, float64(height)/2+12, format(number(c.Value), d.FieldConfig.Defaults.Unit), `font-size="26"`)
		p.text(x, float64(height)/2+30, clip(c.name, each-6), `fill="#555"`)
	}
}

// table draws the columns that the panel names, in its order.
func (p *picture) table(d drawn, width, height int) {
	options := d.Transformations[0].Options
	columns := slices.SortedFunc(maps.Keys(options.RenameByName), func(a, b string) int {
		return cmp.Compare(options.IndexByName[a], options.IndexByName[b])
	})
	var rows [][]string
	for _, s := range d.results[0] {
		var cells []string
		for _, name := range columns {
			shown := options.RenameByName[name]
			text := s.Metric[name]
			if name == "Value" {
				text = format(math.Round(number(s.Value)), d.unitOf(p.t, shown))
			}
			if mapped, is := d.mappings(p.t, shown)[text]; is {
				text = mapped
			}
			cells = append(cells, text)
		}
		rows = append(rows, cells)
	}
	slices.SortFunc(rows, func(a, b []string) int {
		for _, by := range d.Options.SortBy {
			i := slices.IndexFunc(columns, func(name string) bool { return options.RenameByName[name] == by.DisplayName })
			order := strings.Compare(a[i], b[i])
			if x, err := strconv.ParseFloat(a[i], 64); err == nil {
				y, _ := strconv.ParseFloat(b[i], 64)
				order = cmp.Compare(x, y)
			}
			if by.Desc {
				order = -order
			}
			if order != 0 {
				return order
			}
		}
		return slices.Compare(a, b)
	})
	header := make([]string, len(columns))
	for i, name := range columns {
		header[i] = options.RenameByName[name]
	}
	widths := make([]float64, len(columns))
	sum := 0.0
	for i := range columns {
		for _, cells := range append([][]string{header}, rows...) {
			widths[i] = max(widths[i], min(letter*float64(utf8.RuneCountInString(cells[i]))+14, 260))
		}
		sum += widths[i]
	}
	for n, cells := range append([][]string{header}, rows...) {
		y := titleHeight + 8 + 20*float64(n)
		if y > float64(height)-22 && n < len(rows) {
			p.text(12, y, fmt.Sprintf("and %d more", len(rows)-n+1), `fill="#555"`)
			return
		}
		if n > 0 && n%2 == 1 {
			fmt.Fprintf(p, `<rect x="6" y="%.1f" width="%d" height="20" fill="#f6f7f9"/>`+"\n", y-14, width-12)
		}
		x := 12.0
		for i, text := range cells {
			attributes := ""
			if n == 0 {
				attributes = `font-weight="bold" fill="#555"`
			}
			fits := widths[i] * min(1, float64(width-24)/sum)
			p.text(x, y, clip(text, fits-6), attributes)
			x += widths[i] * float64(width-24) / sum
		}
	}
}

// unitOf returns the unit of a table's column.
func (d drawn) unitOf(t *testing.T, column string) string {
	t.Helper()
	for _, o := range d.FieldConfig.Overrides {
		for _, property := range o.Properties {
			if o.Matcher.Options == column && property.ID == "unit" {
				var unit string
				if err := json.Unmarshal(property.Value, &unit); err != nil {
					t.Fatal(err)
				}
				return unit
			}
		}
	}
	return d.FieldConfig.Defaults.Unit
}

// clip shortens a text to about a width.
func clip(text string, width float64) string {
	letters := []rune(text)
	if most := max(int(width/letter), 2); len(letters) > most {
		return strings.TrimSpace(string(letters[:most-1])) + "…"
	}
	return text
}

// step returns the least of 1, 2 and 5, and their tenfolds, that is not less than a size.
func step(size float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(size)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power >= size*0.999 {
			return factor * power
		}
	}
	return 10 * power
}

// ticks returns the marks of the vertical axis, three to six.
func ticks(low, high float64, f field) (marks []float64) {
	if math.IsInf(low, 0) || high <= low {
		low, high = min(low, 0), max(low+1, 1)
		if math.IsInf(low, 0) {
			low, high = 0, 1
		}
	}
	scale := 1.0
	if f.Unit == "bytes" {
		for scale*1024 <= high {
			scale *= 1024
		}
	}
	distance := step((high-low)/scale/4) * scale
	if f.Decimals != nil && *f.Decimals == 0 {
		distance = max(distance, 1)
	}
	first := math.Floor(low/distance) * distance
	for i := 0; ; i++ {
		mark := first + float64(i)*distance
		marks = append(marks, mark)
		if mark >= high*0.999 {
			return marks
		}
	}
}

// grafanaUnits are the units of Grafana that the dashboard uses: how large a step between two names
// is, and the names.
var grafanaUnits = map[string]struct {
	step  float64
	names []string
}{
	"short":   {1000, []string{"", " K", " Mil"}},
	"percent": {0, []string{"%"}},
	"celsius": {0, []string{" °C"}},
	"watt":    {1000, []string{" W", " kW", " MW"}},
	"hertz":   {1000, []string{" Hz", " kHz", " MHz", " GHz"}},
	"bytes":   {1024, []string{" B", " KiB", " MiB", " GiB", " TiB"}},
}

// format returns a value with its unit.
func format(value float64, unit string) string {
	if unit == "s" {
		switch size := math.Abs(value); {
		case size == 0:
			return "0 s"
		case size < 0.001:
			return trim(value*1e6) + " µs"
		case size < 1:
			return trim(value*1e3) + " ms"
		}
		return trim(value) + " s"
	}
	u := grafanaUnits[unit]
	i := 0
	for u.step > 0 && math.Abs(value) >= u.step && i < len(u.names)-1 {
		value, i = value/u.step, i+1
	}
	if len(u.names) == 0 {
		return trim(value) + " " + unit
	}
	return trim(value) + u.names[i]
}

// trim returns a number with two digits behind the point at most.
func trim(value float64) string {
	text := strconv.FormatFloat(value, 'f', 2, 64)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
}

// TestFormat: values have units, as in Grafana, and no exponent.
func TestFormat(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		value float64
		unit  string
		want  string
	}{
		{660, "watt", "660 W"}, {5260, "watt", "5.26 kW"}, {93, "celsius", "93 °C"}, {1.98e9, "hertz", "1.98 GHz"}, {80 << 30,
			"bytes", "80 GiB"},
		{96, "percent", "96%"}, {0.00099, "s", "990 µs"}, {0.05, "s", "50 ms"}, {14, "s", "14 s"}, {0, "s", "0 s"}, {8,
			"short", "8"}, {2400, "short", "2.4 K"},
	} {
		if got := format(tt.value, tt.unit); got != tt.want {
			t.Errorf("%v in %s is %q, want %q", tt.value, tt.unit, got, tt.want)
		}
	}
	for _, p := range panels(t) {
		if unit := p.FieldConfig.Defaults.Unit; p.Type != "row" && unit != "s" && grafanaUnits[unit].names == nil {
			t.Errorf("panel %q has the unit %q, which the picture does not know", p.Title, unit)
		}
	}
	if got := legend("{{node}} GPU {{gpu}} {{GPU_I_ID}}", map[string]string{"node": "a", "gpu": "0"}); got != "a GPU 0" {
		t.Errorf("the legend is %q", got)
	}
}
