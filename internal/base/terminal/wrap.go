package terminal

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Wrap breaks a text into lines of at most width columns, without an indentation of the first line
// that the caller writes before it. Each line has an end of line. All lines but
// the last end with more, and all lines but the first begin with indent, at most 4 columns longer
// than the indentation of the first line. A word that no later line has room for is cut.
// Unprintable characters are shown as "?".
func Wrap(text string, width int, more, indent string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
	var b strings.Builder
	column, left := 0, width-len(more)
	later := max(left-4, 1)
	for word := range strings.FieldsSeq(text) {
		if utf8.RuneCountInString(word) > later {
			word = string([]rune(word)[:later-1]) + "…"
		}
		length := utf8.RuneCountInString(word)
		switch {
		case column == 0:
		case column+1+length > left:
			b.WriteString(more + "\n" + indent)
			column, left = 0, later
		default:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column += length
	}
	return b.String() + "\n"
}
