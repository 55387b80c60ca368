package command

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Lengths of texts that others have written. One that is far longer than any that is meant would make each row of its table that long.
const (
	longestCell     = 400  // in characters
	longestSentence = 4000 // in characters
)

// changesTerminal reports whether a character changes the terminal, or the order in which others stand.
func changesTerminal(r rune) bool {
	return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// printable returns a text of which nothing changes a terminal: a control character is written as ^ and a letter, and others by their
// number.
func printable(text string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, changesTerminal) {
		return text
	}
	var b strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case !changesTerminal(r):
			b.WriteRune(r)
		case r < utf8.RuneSelf:
			b.WriteByte('^')
			b.WriteByte(byte(r) ^ 0x40)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		text = text[size:]
	}
	return b.String()
}

// quoted returns a text in JSON, which says the same, of which nothing changes a terminal.
func quoted(text string) string {
	if !strings.ContainsFunc(text, changesTerminal) {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if changesTerminal(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// cell returns a text for a cell of a table: in one line, without tabs, and not too long.
func cell(text string) string { return shortened(text, longestCell) }

// say prints a sentence in a line of its own. Others have written parts of it, such as the note of an Event. It may have escape sequences
// of terminals.
func say(out io.Writer, sentence string) error {
	_, err := io.WriteString(out, printable(shortened(sentence, longestSentence))+"\n")
	return err
}

// shortened returns a text in one line, of so many characters at most.
func shortened(text string, most int) string {
	text = strings.Join(strings.Fields(text[:min(len(text), 2*utf8.UTFMax*most)]), " ")
	n := 0
	for at := range text {
		if n++; n > most {
			return text[:at] + "..."
		}
	}
	return text
}

// An escaped writer writes what cannot change a terminal. What it is given may end within a character.
type escaped struct {
	to      io.Writer
	pending []byte
}

func (e *escaped) Write(part []byte) (int, error) {
	text := slices.Concat(e.pending, part)
	end := len(text)
	for tail := 1; tail < utf8.UTFMax && tail <= len(text); tail++ {
		if b := text[len(text)-tail:]; utf8.RuneStart(b[0]) {
			if !utf8.FullRune(b) {
				end -= tail
			}
			break
		}
	}
	e.pending = text[end:]
	_, err := io.WriteString(e.to, printable(string(text[:end])))
	return len(part), err
}

// Close writes what is left of a character that did not end.
func (e *escaped) Close() error {
	_, err := io.WriteString(e.to, printable(string(e.pending)))
	e.pending = nil
	return err
}
