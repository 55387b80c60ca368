package dra_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestDocs holds the tables of docs/dra.md to the devices of all simulated machines, of which one
// is in a fabric.
func TestDocs(t *testing.T) {
	t.Parallel()
	docs, err := os.ReadFile("../../../docs/dra.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(docs), "<!-- attributes: held by internal/plan/dra TestDocs -->\n")
	table, _, _ = strings.Cut(table, "<!-- end of attributes -->")
	documented := map[string]string{} // type and devices
	rows := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (\\w+) \\| ([\\w ]+) \\|")
	for _, row := range rows.FindAllStringSubmatch(table, -1) {
		documented[row[1]] = row[2] + " on " + row[3]
	}
	found := map[string]string{}
	capacity := regexp.MustCompile(`\d+$`)
	for _, name := range simulator.Names() {
		s := scan(t, name)
		s.GPUs[0].Clique = "3a1f2b4c-0d5e-4f60-8172-93a4b5c6d7e8.5"
		for _, slice := range pool(s).SharedBy(dra.ByCount, 2).Slices {
			for _, d := range slice.Devices {
				on := map[string]string{"gpu": "GPU", "mig": "MIG device"}[d.Attributes["type"].Value]
				for name, a := range d.Attributes {
					text := fmt.Sprintf("%s on %s", a.Type, on)
					if before, known := found[name]; known && before != text {
						text = fmt.Sprintf("%s on both", a.Type)
					}
					found[name] = text
				}
				for name := range d.Capacity {
					if row := "`" + capacity.ReplaceAllString(name, "<i>") + "`"; !strings.Contains(string(docs), row) {
						t.Errorf("docs/dra.md does not name the capacity %s", row)
					}
				}
			}
		}
	}
	for name, text := range found {
		if documented[name] != text {
			t.Errorf("docs/dra.md says of %s %q, and it is %q", name, documented[name], text)
		}
	}
	for name := range documented {
		if found[name] == "" {
			t.Errorf("no device has the attribute %s of docs/dra.md", name)
		}
	}
	taints := regexp.MustCompile("(?m)^\\| `(gpu\\.nvidia\\.com/[^`]+)` \\|").FindAllStringSubmatch(string(docs), -1)
	var keys []string
	for _, row := range taints {
		keys = append(keys, row[1])
	}
	if want := []string{dra.TaintXID, dra.TaintLost, dra.TaintUnmonitored, dra.TaintUnhealthy,
		dra.TaintLeaving}; !slices.Equal(keys, want) {
		t.Errorf("docs/dra.md has the taints %v, want %v", keys, want)
	}
}
