package config

import (
	"os"
	"strings"
	"testing"
)

// TestCompatibilityNamesEveryOption keeps docs/compatibility.md complete: an option that is not in it has no argument for
// being what it is.
func TestCompatibilityNamesEveryOption(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range options {
		for _, name := range append([]string{o.flag}, o.aliases...) {
			if !strings.Contains(string(data), "`--"+name+"`") {
				t.Errorf("docs/compatibility.md says nothing of --%s", name)
			}
		}
	}
}
