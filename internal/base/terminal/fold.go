package terminal

import (
	"slices"
	"strings"
)

// DefaultColumns is the width of texts without a terminal.
const DefaultColumns = 100

// Fold breaks a text into lines of at most `columns` characters, at spaces unless a word is longer
// than a line. All lines begin with the indent, and all but the first have two more columns of
// indent.
func Fold(text string, columns int, indent string) string {
	text = strings.Join(strings.Fields(text), " ")
	var lines []string
	rest := []rune(indent + text)
	columns = max(columns, len([]rune(indent))+3) // each line has at least one character of the text
	for next := []rune(indent + "  "); len(rest) > columns; {
		at := columns
		for at > len(next) && rest[at] != ' ' {
			at--
		}
		if at <= len(next) {
			at = columns // a word that is longer than a line
		}
		lines = append(lines, strings.TrimRight(string(rest[:at]), " "))
		rest = append(slices.Clone(next), []rune(strings.TrimPrefix(string(rest[at:]), " "))...)
	}
	return strings.Join(append(lines, string(rest)), "\n")
}
