package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	yamlv3 "go.yaml.in/yaml/v3"
	"golang.org/x/text/width"
	"sigs.k8s.io/yaml"
)

// Lengths of texts that others have written. One that is far longer than any that is meant would make each row of its table that long.
const (
	longestCell     = 400  // in characters
	longestSentence = 4000 // in characters
)

// changesTerminal reports whether a character changes the terminal or the order in which others stand, or is one that no text may have.
func changesTerminal(r rune) bool {
	return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp) ||
		r == '\ufffe' || r == '\uffff'
}

// caret is how a sentence or a table has a character that changes a terminal: a control character is ^ and a letter.
func caret(r rune) string {
	if r < utf8.RuneSelf {
		return "^" + string(r^0x40)
	}
	return escape(r)
}

// escape is how JSON has it, and YAML between double quotes: it says the same.
func escape(r rune) string { return fmt.Sprintf(`\u%04x`, r) }

// printable returns a text of which nothing changes a terminal: characters that do have another form, and bytes that are no characters are
// written by their number.
func printable(text string, form func(rune) string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, changesTerminal) {
		return text
	}
	var b strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case changesTerminal(r):
			b.WriteString(form(r))
		default:
			b.WriteRune(r)
		}
		text = text[size:]
	}
	return b.String()
}

// toJSON returns a value in JSON of which nothing changes a terminal.
func toJSON(value any) (string, error) {
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(value)
	return printable(b.String(), escape), err
}

// toYAML returns a printable text in JSON as one in YAML.
func toYAML(text string) (string, error) {
	converted, err := yaml.JSONToYAML([]byte(text))
	if err != nil || !bytes.ContainsFunc(converted, changesTerminal) {
		return string(converted), err
	}
	var document yamlv3.Node
	if err := yamlv3.Unmarshal(converted, &document); err != nil {
		return "", err
	}
	var b strings.Builder
	encoder := yamlv3.NewEncoder(&b)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	if err := encoder.Encode(inQuotes(&document)); err != nil {
		return "", err
	}
	return printable(b.String(), escape), encoder.Close()
}

// inQuotes puts those texts of a document between double quotes that an escape has to be written in.
func inQuotes(n *yamlv3.Node) *yamlv3.Node {
	if strings.ContainsFunc(n.Value, changesTerminal) {
		n.Style = yamlv3.DoubleQuotedStyle
	}
	for _, part := range n.Content {
		inQuotes(part)
	}
	return n
}

// aligned returns a table whose cells end with tabs, in columns. A letter that is as wide as two others counts as two.
func aligned(table string) string {
	const second = "\x00" // nothing printable
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, r := range table {
		_, _ = io.WriteString(w, string(r)) // into memory, as all that follows
		if kind := width.LookupRune(r).Kind(); kind == width.EastAsianWide || kind == width.EastAsianFullwidth {
			_, _ = io.WriteString(w, second)
		}
	}
	_ = w.Flush()
	return strings.ReplaceAll(b.String(), second, "")
}

// cell returns a text for a cell of a table: in one line, without tabs, and not too long.
func cell(text string) string { return shortened(text, longestCell) }

// say prints a sentence in a line of its own. Others have written parts of it, such as the note of an Event. It may have escape sequences
// of terminals.
func say(out io.Writer, sentence string) error {
	_, err := io.WriteString(out, printable(shortened(sentence, longestSentence), caret)+"\n")
	return err
}

// lines returns a text of others with so many lines, and of such a length, as people read.
func lines(text string) string {
	const most = 50
	var kept []string
	for line := range strings.Lines(text) {
		if len(kept) == most {
			kept = append(kept, "...")
			break
		}
		if line = strings.TrimRight(line, "\n"); len(line) > longestSentence {
			line = shortened(line, longestSentence)
		}
		kept = append(kept, line)
	}
	return strings.Join(kept, "\n") + "\n"
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
	_, err := io.WriteString(e.to, printable(string(text[:end]), caret))
	return len(part), err
}

// Close writes what is left of a character that did not end.
func (e *escaped) Close() error {
	_, err := io.WriteString(e.to, printable(string(e.pending), caret))
	e.pending = nil
	return err
}
