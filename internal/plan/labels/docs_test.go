package labels_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocs holds the table of docs/reference.md to the labels of all sets.
func TestDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/reference.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "<!-- labels: held by internal/plan/labels TestDocs -->\n")
	table, _, _ = strings.Cut(table, "<!-- end of labels -->")
	documented := map[string]bool{} // whether a set has it
	for line := range strings.Lines(table) {
		cell, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
		for _, label := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
			if _, twice := documented[label[1]]; twice {
				t.Errorf("docs/reference.md names %s twice", label[1])
			}
			documented[label[1]] = false
		}
	}
	files, err := filepath.Glob("testdata/sets/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	profile := regexp.MustCompile(`^(nvidia\.com/mig-)[0-9]+[cg]\.[0-9]+g.*?` +
		`\.(count|product|memory|replicas|sharing-strategy|multiprocessors|slices|engines)`)
	for _, file := range files {
		for key := range readSet(t, file).all {
			row := profile.ReplaceAllString(key, "$1<profile>.$2")
			if _, known := documented[row]; !known {
				t.Errorf("docs/reference.md has no row for %s", row)
			}
			documented[row] = true
		}
	}
	for row, used := range documented {
		if !used {
			t.Errorf("no set has %s of docs/reference.md", row)
		}
	}
}
