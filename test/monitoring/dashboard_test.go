package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
)

// A panel is a panel of the dashboard, as far as the tests and the picture need it.
type panel struct {
	Type, Title string
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct {
		Defaults  field
		Overrides []struct {
			Matcher    struct{ Options string }
			Properties []struct {
				ID    string
				Value json.RawMessage
			}
		}
	}
	Interval        string // the least time between two values
	Targets         []target
	Transformations []struct {
		Options struct {
			IndexByName  map[string]int
			RenameByName map[string]string
		}
	}
	Options struct {
		SortBy []struct {
			DisplayName string
			Desc        bool
		}
	}

	row string // the title of the row above
}

// A field says how values of a panel or a column are shown.
type field struct {
	Unit     string
	Decimals *int
	Min, Max *float64
	Custom   struct{ DrawStyle string }
}

// A target is a query of a panel.
type target struct{ Expr, LegendFormat string }

// variables are Grafana's variables in the tests: all nodes and GPUs, the time between two values,
// and the time range.
var variables = strings.NewReplacer("$node", ".*", "$gpu", ".*", "$top", "10", "$__rate_interval", "10s", "$__interval",
	"10s", "$__range_s", "300", "$__range", "5m")

// panels returns the panels of the dashboard, rows included. Variables in their expressions have
// their values.
func panels(t *testing.T) []panel {
	t.Helper()
	var dashboard struct{ Panels []panel }
	text, err := os.ReadFile(filepath.Join(folder, dashboardFile))
	if err == nil {
		err = json.Unmarshal(text, &dashboard)
	}
	if err != nil {
		t.Fatal(err)
	}
	row := ""
	for i := range dashboard.Panels {
		p := &dashboard.Panels[i]
		if p.Type == "row" {
			row = p.Title
			continue
		}
		p.row = row
		if len(p.Targets) == 0 {
			t.Errorf("panel %q has no query", p.Title)
		}
		for j := range p.Targets {
			p.Targets[j].Expr = variables.Replace(p.Targets[j].Expr)
		}
	}
	return dashboard.Panels
}

// mappings returns the texts that a column of a table shows for values.
func (p panel) mappings(t *testing.T, column string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, o := range p.FieldConfig.Overrides {
		for _, property := range o.Properties {
			if o.Matcher.Options != column || property.ID != "mappings" {
				continue
			}
			var all []struct {
				Options map[string]struct{ Text string }
			}
			if err := json.Unmarshal(property.Value, &all); err != nil {
				t.Fatal(err)
			}
			for _, mapping := range all {
				for value, shown := range mapping.Options {
					texts[value] = shown.Text
				}
			}
		}
	}
	return texts
}

// TestXIDsOfTheDashboard: where the dashboard shows an XID, it says what the catalogue says.
func TestXIDsOfTheDashboard(t *testing.T) {
	t.Parallel()
	want := map[string]string{}
	for code := range uint64(1000) {
		if x := health.Lookup(code); x.Name != "" {
			want[fmt.Sprint(code)] = fmt.Sprintf("%d %s", code, x.Name)
		}
	}
	tables := 0
	for _, p := range panels(t) {
		texts := p.mappings(t, "XID")
		if p.Type != "table" || len(texts) == 0 {
			continue
		}
		tables++
		for code, text := range want {
			if texts[code] != text {
				t.Errorf("%s: XID %s is %q, want %q", p.Title, code, texts[code], text)
			}
		}
		for code := range texts {
			if want[code] == "" {
				t.Errorf("%s: the catalogue has no XID %s", p.Title, code)
			}
		}
	}
	if tables != 2 {
		t.Errorf("%d tables name XIDs, want 2", tables)
	}
}

// TestDashboardIsByNode: the dashboard tells nodes apart by the label node and never by instance,
// which is the address of a pod.
func TestDashboardIsByNode(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(folder, dashboardFile))
	if err != nil {
		t.Fatal(err)
	}
	queries := regexp.MustCompile(`"(expr|legendFormat|query)": "(\\"|[^"])*"`).FindAllString(string(text), -1)
	if len(queries) < 40 {
		t.Errorf("%d queries and legends", len(queries))
	}
	for _, query := range queries {
		if regexp.MustCompile(`\binstance\b`).MatchString(query) {
			t.Errorf("the dashboard uses the label instance: %s", query)
		}
	}
	if first := slices.IndexFunc(panels(t), func(p panel) bool { return p.Type == "table" }); panels(t)[first].Title != "Faulty GPUs: reason and remedy" {
		t.Errorf("the first table is %q", panels(t)[first].Title)
	}
}

// TestRollOutCountsOnce has promtool play a node whose daemon rolls out, beside another one,
// against the panels of testdata/dashboard.yaml.
func TestRollOutCountsOnce(t *testing.T) {
	t.Parallel()
	titles := map[string]panel{}
	for _, p := range panels(t) {
		titles[p.Title] = p
	}
	play, err := template.New("dashboard.yaml").Funcs(template.FuncMap{
		"panel": func(title string, query int) (string, error) {
			if p, known := titles[title]; known && query < len(p.Targets) {
				quoted, err := json.Marshal(p.Targets[query].Expr)
				return string(quoted), err
			}
			return "", fmt.Errorf("no query %d of a panel %q", query, title)
		},
	}).ParseFiles("testdata/dashboard.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := play.Execute(&text, nil); err != nil {
		t.Fatal(err)
	}
	playTest(t, text.String())
}

// TestPanelsOfALargeFleet: with 640 GPUs on 80 nodes, of which each daemon rolls out, no chart has
// more than 20 lines.
func TestPanelsOfALargeFleet(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	var tests strings.Builder
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			for _, name := range regexp.MustCompile(`(gpu_device_plugin|DCGM|process)_\w+|\bup\b`).FindAllString(target.Expr,
				-1) {
				names[name] = true
			}
			if p.Type == "table" {
				continue
			}
			fmt.Fprintf(&tests, "      - {expr: %q, eval_time: 4m, exp_samples: []}\n", "count("+target.Expr+") > 20")
			if p.row != "Claims" { // so that the test cannot pass by a query of nothing
				fmt.Fprintf(&tests, "      - {expr: %q, eval_time: 4m, exp_samples: [{value: 1}]}\n",
					"count("+target.Expr+") > bool 0")
			}
		}
	}
	var series strings.Builder
	for name := range names {
		for node := range 80 {
			for gpu := range 8 {
				for pod := range 2 {
					values := "1+1x60"
					if strings.HasSuffix(name, "_leads") {
						values = fmt.Sprintf("%dx60", pod)
					}
					fmt.Fprintf(&series, "      - {series: '%s{node=\"n%d\",instance=\"10.%d.0.%d:9400\",pod=\"p%d\",job=\"gpu-device-plugin\",gpu=\"%d\",UUID=\"u-%d-%d\","+
						"le=\"+Inf\",state=\"Unhealthy\",version=\"v%d\",model=\"m\",resource=\"r\",health=\"healthy\",xid=\"79\",source=\"xid\",cure=\"reboot\",reason=\"hw_thermal\","+
						"exported_namespace=\"x\",exported_pod=\"e-%d-%d\",method=\"Allocate\",group=\"reading\",result=\"failed\",cause=\"c\",call=\"prepare\"}', values: '%s'}\n",
						name, node, node, pod, pod, gpu, node, gpu, pod, node, gpu, values)
				}
			}
		}
	}
	playTest(t, "evaluation_interval: 1m\ntests:\n  - interval: 4s\n    input_series:\n"+series.String()+
		"    promql_expr_test:\n"+tests.String())
}

// playTest has promtool play a file of tests.
func playTest(t *testing.T, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, nil, "test", "rules", file)
}
