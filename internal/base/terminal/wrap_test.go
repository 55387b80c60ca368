package terminal_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func TestWrap(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		text         string
		width        int
		more, indent string
		want         string
	}{
		"nothing":                    {"", 10, "", "", "\n"},
		"short words":                {"a b c", 10, "", "", "a b c\n"},
		"as wide as may be":          {"aaaa bbbbb", 10, "", "", "aaaa bbbbb\n"},
		"one column more":            {"aaaaa bbbbb", 10, "", "", "aaaaa\nbbbbb\n"},
		"later lines have four less": {"aaaa bbbbb cc dd ee", 10, "", "    ", "aaaa bbbbb\n    cc dd\n    ee\n"},
		"a full later line": {"aaaaaa bbbbbbb ccccc dddd ee", 14, "", "    ",
			"aaaaaa bbbbbbb\n    ccccc dddd\n    ee\n"},
		"a full word on a later line": {"aaaa bbbbb cccccc", 10, "", "    ", "aaaa bbbbb\n    cccccc\n"},
		"no room":                     {"ab c", 4, "", "    ", "… c\n"},
		"spaces count":                {"aaa bbb ccc", 10, "", "", "aaa bbb\nccc\n"},
		"ends of two lines": {"aaaaaa bbbbbbb ccccc dddd ee", 16, " \\", "  ",
			"aaaaaa bbbbbbb \\\n  ccccc dddd \\\n  ee\n"},
		"ends of lines":                 {"aaaa bbb cc", 10, " \\", "  ", "aaaa bbb \\\n  cc\n"},
		"a word that is too long":       {"abcdefghij", 10, "", "", "abcde…\n"},
		"a word that is just not":       {"abcdef", 10, "", "", "abcdef\n"},
		"characters, and not bytes":     {"ääääää", 10, "", "", "ääääää\n"},
		"what is no text":               {"a\x1bb\tc\n", 10, "", "", "a?b?c?\n"},
		"more than one space is a word": {"a   b", 10, "", "", "a b\n"},
	} {
		if got := terminal.Wrap(tt.text, tt.width, tt.more, tt.indent); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
