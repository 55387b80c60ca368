package command

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	yamlv3 "go.yaml.in/yaml/v3"
	"golang.org/x/text/width"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

// The size limits of texts from other programs. A longer text would make every row of its table as
// long.
const (
	maxCell     = 400  // characters
	maxSentence = 4000 // characters
)

// toJSON returns a value as JSON without control characters for terminals.
func toJSON(value any) (string, error) {
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(value)
	return terminal.Printable(b.String(), terminal.Escape), err
}

// toYAML converts printable JSON to YAML.
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

// inQuotes puts the texts of a document that need an escape in double quotes.
func inQuotes(n *yamlv3.Node) *yamlv3.Node {
	if strings.ContainsFunc(n.Value, terminal.IsControl) {
		n.Style = yamlv3.DoubleQuotedStyle
	}
	for _, part := range n.Content {
		inQuotes(part)
	}
	return n
}

// align aligns the columns of a table whose cells end with tabs. A wide character counts as two.
func align(table string) string {
	const second = "\x00" // not printable
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, r := range table {
		_, _ = io.WriteString(w, string(r)) // writes to memory never fail
		if kind := width.LookupRune(r).Kind(); kind == width.EastAsianWide || kind == width.EastAsianFullwidth {
			_, _ = io.WriteString(w, second)
		}
	}
	_ = w.Flush()
	return strings.ReplaceAll(b.String(), second, "")
}

// The columns whose cells move to a separate line, and the column that gets narrower, if
// the table is wider than the terminal.
const (
	remedyTitle, reasonTitle, modelTitle = "REMEDY", "REASON", "MODEL"
	minModel                             = 8
)

// fit returns a table with cells separated by tabs in at most so many columns; 0 for any
// number. In a too wide table, reasons and remedies follow their row, the model gets
// narrower, and the last columns are left out. A line without tabs is folded.
func fit(table string, columns int) string {
	aligned := align(table)
	if columns == 0 || !slices.ContainsFunc(strings.Split(aligned, "\n"), func(line string) bool {
		return utf8.RuneCountInString(line) > columns
	}) {
		return aligned
	}
	var b strings.Builder
	var rows [][]string
	for line := range strings.Lines(table) {
		if cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t"); len(cells) > 1 {
			rows = append(rows, cells)
		} else {
			b.WriteString(terminal.Fold(line, columns, "") + "\n")
		}
	}
	if len(rows) == 0 {
		return b.String()
	}
	notes := make([]string, len(rows))
	titles := slices.Clone(rows[0])
	for _, title := range []string{remedyTitle, reasonTitle} {
		at := slices.Index(titles, title)
		if at < 0 {
			continue
		}
		titles = slices.Delete(titles, at, at+1)
		for i := range rows {
			if text := rows[i][at]; i > 0 && text != "-" {
				notes[i] += "; " + strings.ToLower(title) + ": " + text
			}
			rows[i] = slices.Delete(rows[i], at, at+1)
		}
	}
	kept := narrow(rows, columns)
	for i, line := range strings.Split(strings.TrimSuffix(align(kept), "\n"), "\n") {
		b.WriteString(line + "\n")
		if i < len(notes) && notes[i] != "" {
			b.WriteString(terminal.Fold(strings.TrimPrefix(notes[i], "; "), columns, "  ") + "\n")
		}
	}
	return b.String()
}

// narrow returns the rows as text with tabs: models are cut and the last columns are left out until
// the table fits.
func narrow(rows [][]string, columns int) string {
	const gap = 3
	widths := make([]int, len(rows[0]))
	for _, cells := range rows {
		for i, text := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	count, total, model := len(widths), -gap, slices.Index(rows[0], modelTitle)
	for _, width := range widths {
		total += width + gap
	}
	spare := 0 // columns to take from the model
	if model >= 0 {
		spare = max(0, widths[model]-minModel)
	}
	for count > 2 && total-spare > columns {
		count--
		total -= widths[count] + gap
	}
	var b strings.Builder
	for _, cells := range rows {
		if excess := min(spare, total-columns); excess > 0 && model < count {
			cells[model] = cut(cells[model], widths[model]-excess)
		}
		b.WriteString(strings.Join(cells[:count], "\t") + "\n")
	}
	return b.String()
}

// cut takes the middle out of a text wider than width: models often differ at their end.
func cut(text string, width int) string {
	runes := []rune(text)
	if len(runes) <= width {
		return text
	}
	front := (width - 1) / 2
	return string(runes[:front]) + "…" + string(runes[len(runes)-(width-1-front):])
}

// toCell returns a text for a cell of a table: one line, no tabs, limited length.
func toCell(text string) string { return truncate(text, maxCell) }

// printLine prints a sentence on a line. Parts of the sentence may come from other
// programs, such as the note of an Event, and may contain terminal escape sequences.
func printLine(out io.Writer, sentence string) error {
	_, err := io.WriteString(out, terminal.Printable(truncate(sentence, maxSentence), terminal.Caret)+"\n")
	return err
}

// lines limits the number of lines and the length of a text from another program.
func lines(text string) string {
	const most = 50
	var kept []string
	for line := range strings.Lines(text) {
		if len(kept) == most {
			kept = append(kept, "...")
			break
		}
		if line = strings.TrimRight(line, "\n"); len(line) > maxSentence {
			line = truncate(line, maxSentence)
		}
		kept = append(kept, line)
	}
	return strings.Join(kept, "\n") + "\n"
}

// truncate returns a text on one line with at most limit characters.
func truncate(text string, limit int) string {
	text = strings.Join(strings.Fields(text[:min(len(text), 2*utf8.UTFMax*limit)]), " ")
	n := 0
	for at := range text {
		if n++; n > limit {
			return text[:at] + "..."
		}
	}
	return text
}
