package command

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	yamlv3 "go.yaml.in/yaml/v3"
	"golang.org/x/text/width"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

// Lengths of texts that others have written. One that is far longer than any that is meant would
// make each row of its table that long.
const (
	longestCell     = 400  // in characters
	longestSentence = 4000 // in characters
)

// toJSON returns a value in JSON of which nothing changes a terminal.
func toJSON(value any) (string, error) {
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(value)
	return terminal.Printable(b.String(), terminal.Escape), err
}

// toYAML returns a printable text in JSON as one in YAML.
func toYAML(text string) (string, error) {
	converted, err := yaml.JSONToYAML([]byte(text))
	if err != nil || !bytes.ContainsFunc(converted, terminal.IsControl) {
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
	return terminal.Printable(b.String(), terminal.Escape), encoder.Close()
}

// inQuotes puts those texts of a document between double quotes that an escape has to be written
// in.
func inQuotes(n *yamlv3.Node) *yamlv3.Node {
	if strings.ContainsFunc(n.Value, terminal.IsControl) {
		n.Style = yamlv3.DoubleQuotedStyle
	}
	for _, part := range n.Content {
		inQuotes(part)
	}
	return n
}

// aligned returns a table whose cells end with tabs, in columns. A letter that is as wide as two
// others counts as two.
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

// say prints a sentence in a line of its own. Others have written parts of it, such as the note of
// an Event. It may have escape sequences of terminals.
func say(out io.Writer, sentence string) error {
	_, err := io.WriteString(out, terminal.Printable(shortened(sentence, longestSentence), terminal.Caret)+"\n")
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
