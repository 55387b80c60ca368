package terminal_test

import (
	"io"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func TestFold(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text    string
		columns int
		indent  string
		want    string
	}{
		{"short", 80, "", "short"},
		{"", 80, "  ", "  "},
		{"one two three", 9, "", "one two\n  three"},
		{"one  two\nthree four", 11, "> ", "> one two\n>   three\n>   four"},
		{"exactly8 x", 8, "", "exactly8\n  x"},
		{"a-word-that-is-longer", 8, "", "a-word-t\n  hat-is\n  -longe\n  r"},
		{"ab", 1, "", "ab"},
	} {
		if got := terminal.Fold(tt.text, tt.columns, tt.indent); got != tt.want {
			t.Errorf("Fold(%q, %d, %q) = %q, want %q", tt.text, tt.columns, tt.indent, got, tt.want)
		}
	}
	if got := terminal.Columns(io.Discard); got != 0 {
		t.Errorf("io.Discard has %d columns", got)
	}
}
