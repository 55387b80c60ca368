package nodeevents

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// TestLine: 1024 bytes stay unchanged. Longer text keeps as many complete characters as leave room
// for the mark.
func TestLine(t *testing.T) {
	t.Parallel()
	x := strings.Repeat("x", maxText-3)
	for text, want := range map[string]string{
		x + "abc": x + "abc", x + "abcd": x + "…", x + "é": x + "é", "é" + x + "a": "é" + x + "a", "é" + x + "ab": "é" +
			x[:maxText-5] + "…",
		x[1:] + "éabc": x[1:] + "…", "a \n b": "a b",
	} {
		if got := line(text); got != want || len(got) > maxText || !utf8.ValidString(got) {
			t.Errorf("%d bytes became %d that end in %q, want %d", len(text), len(got), got[max(0, len(got)-8):], len(want))
		}
	}
}

// TestList: text that fits to the byte is complete. Every item but the last leaves room for the
// number of omitted items.
func TestList(t *testing.T) {
	t.Parallel()
	x := func(n int) string { return strings.Repeat("x", n) }
	const more = len("; and 1000 more")
	for name, tt := range map[string]struct {
		items []string
		want  string
	}{
		"none":                   {nil, "of:"},
		"two":                    {[]string{"a", "b"}, "of: a; b"},
		"the last fits":          {[]string{"a", x(maxText - 7)}, "of: a; " + x(maxText-7)},
		"the last does not":      {[]string{"a", x(maxText - 6)}, "of: a; and 1 more"},
		"another one fits":       {[]string{x(maxText - 4 - more), "b"}, "of: " + x(maxText-4-more) + "; b"},
		"another one does not":   {[]string{x(maxText - 3 - more), "b"}, "of: and 2 more"},
		"the second of the four": {[]string{"a", x(maxText), "b", "c"}, "of: a; and 3 more"},
	} {
		if got := list("of: ", tt.items); got != tt.want {
			t.Errorf("%s: %.40q, %d bytes; want %.40q, %d bytes", name, got, len(got), tt.want, len(tt.want))
		}
	}
}
