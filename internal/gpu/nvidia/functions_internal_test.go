package nvidia

// This test is inside: a function that is called and was never looked up behaves like one that the
// library lacks, and only the sources tell the two apart.

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// TestTableHasAllFunctions compares the names by which functions are called with those that are
// looked up.
func TestTableHasAllFunctions(t *testing.T) {
	t.Parallel()
	var called []string
	for file, calls := range map[string]struct{ prefix, pattern string }{
		"device.go":       {"nvmlDevice", `(?:query|queryFor|command)\(d, "(\w+)"`},
		"instances.go":    {"nvmlDevice", `(?:query|queryFor|command)\(d, "(\w+)"`},
		"sampledevice.go": {"nvmlDevice", `(?:query|queryFor)\(d, "(\w+)"`},
		"gpm.go":          {"", `(?:query|queryFor|invoke|act)\((?:d|a|d\.api), "(\w+)"`},
		"functions.go":    {"nvml", `(?:invoke\(a, |function = )"nvml(\w+)"`},
	} {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile(calls.pattern).FindAllStringSubmatch(string(source), -1) {
			called = append(called, calls.prefix+match[1])
		}
		if file == "instances.go" {
			called = append(called, regexp.MustCompile(`nvml[A-Z]\w+`).FindAllString(string(source), -1)...)
		}
	}
	if len(called) < 50 {
		t.Fatalf("found %d calls in the sources: %v", len(called), called)
	}
	for _, name := range called {
		if !slices.Contains(functions, name) {
			t.Errorf("%s is called and never looked up", name)
		}
	}
}
