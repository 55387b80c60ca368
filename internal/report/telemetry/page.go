package telemetry

import (
	"cmp"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

// A page is the program's own metrics in one scrape. Prometheus' client could also collect and
// write them, but most of the time of a scrape would go into comparing all series with each other
// and formatting the same labels for each series of a GPU.
type page struct {
	families map[string]*family // by name
}

// A family is the series of a metric, with different labels.
type family struct {
	*metric
	series []series
}

type series struct {
	labels *labels
	value  float64
}

// labels are the labels of a series. Many series of a GPU share them.
type labels struct {
	pairs []label // by name
	text  string  // in the text formats: {gpu="0"}
}

type label struct{ name, value string }

var escaped = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// newLabels returns labels. Values may contain arbitrary bytes from the driver. Invalid UTF-8 is
// replaced, because Prometheus would reject the whole page.
func newLabels(pairs []label) *labels {
	if len(pairs) == 0 {
		return &labels{}
	}
	order.Sort(pairs, func(a, b label) int { return cmp.Compare(a.name, b.name) })
	var text strings.Builder
	text.Grow(28 * len(pairs)) // on average
	separator := byte('{')
	for i, p := range pairs {
		p.value = strings.ToValidUTF8(p.value, "\uFFFD")
		pairs[i] = p
		text.WriteByte(separator)
		text.WriteString(p.name)
		text.WriteString(`="`)
		_, _ = escaped.WriteString(&text, p.value) // a Builder never fails
		text.WriteByte('"')
		separator = ','
	}
	text.WriteByte('}')
	return &labels{pairs, text.String()}
}

// add adds a value of a metric.
func (p *page) add(m *metric, value float64, l *labels) {
	f := p.families[m.name]
	if f == nil {
		f = &family{metric: m}
		p.families[m.name] = f
	}
	f.series = append(f.series, series{l, value})
}

// write writes the page in the client's format.
func (p *page) write(out io.Writer, format expfmt.Format) error {
	text := make([]byte, 0, 32<<10)
	for _, name := range slices.Sorted(maps.Keys(p.families)) {
		f := p.families[name]
		switch format.FormatType() {
		case expfmt.TypeTextPlain:
			text = f.appendText(text[:0], false)
		case expfmt.TypeOpenMetrics:
			text = f.appendText(text[:0], true)
		default:
			if err := expfmt.NewEncoder(out, format).Encode(f.message()); err != nil {
				return err
			}
			continue
		}
		if _, err := out.Write(text); err != nil {
			return err
		}
	}
	return nil
}

// appendText appends the family in Prometheus' text format, or in OpenMetrics.
func (f *family) appendText(to []byte, open bool) []byte {
	name, kind := f.name, string(f.kind)
	if open && f.kind == counter {
		short, regular := strings.CutSuffix(name, "_total")
		if name = short; !regular {
			kind = "unknown" // counters of dcgm-exporter lack the suffix
		}
	}
	to = append(to, "# HELP "+name+" "+f.help+"\n# TYPE "+name+" "+kind+"\n"...)
	for _, s := range f.series {
		to = append(append(append(to, f.name...), s.labels.text...), ' ')
		begin := len(to)
		to = strconv.AppendFloat(to, s.value, 'g', -1, 64)
		if open && !strings.ContainsAny(string(to[begin:]), "e.IN") {
			to = append(to, ".0"...)
		}
		to = append(to, '\n')
	}
	return to
}

// message returns the family as a message of Prometheus' client, for the other formats.
func (f *family) message() *dto.MetricFamily {
	message := &dto.MetricFamily{Name: &f.name, Help: &f.help, Type: dto.MetricType_GAUGE.Enum()}
	if f.kind == counter {
		message.Type = dto.MetricType_COUNTER.Enum()
	}
	for i := range f.series {
		s := &f.series[i]
		one := &dto.Metric{}
		if f.kind == counter {
			one.Counter = &dto.Counter{Value: &s.value}
		} else {
			one.Gauge = &dto.Gauge{Value: &s.value}
		}
		for j := range s.labels.pairs {
			l := &s.labels.pairs[j]
			one.Label = append(one.Label, &dto.LabelPair{Name: &l.name, Value: &l.value})
		}
		message.Metric = append(message.Metric, one)
	}
	return message
}
