package config

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

// A Remark tells the author of a configuration about a problem, because of which the configuration
// is not used, or about a warning.
type Remark struct {
	// Where is the key's path in the file, the flag or the environment variable.
	Where string
	// Line is the line of the file, from 1; 0 for a Remark outside the file.
	Line int
	// Text says what is wrong, and what would be right.
	Text string
}

func (r Remark) String() string {
	if r.Line > 0 {
		return fmt.Sprintf("line %d: %s: %s", r.Line, r.Where, r.Text)
	}
	return fmt.Sprintf("%s: %s", r.Where, r.Text)
}

const (
	// maxRemarks is the number of problems, and of warnings, that are listed for one configuration;
	// further ones are counted.
	maxRemarks = 50
	// maxText is the length of a Remark's text, and of its place, in bytes.
	maxText = 1000
)

// remarks are the first maxRemarks, and the number of further ones.
type remarks struct {
	kept []Remark
	more int
}

func (r *remarks) add(remark Remark) {
	if len(r.kept) == maxRemarks {
		r.more++
		return
	}
	remark.Where, remark.Text = cut(remark.Where), cut(remark.Text)
	r.kept = append(r.kept, remark)
}

func (r *remarks) count() int { return len(r.kept) + r.more }

// list returns the remarks by line. Remarks outside the file come first, and the number of unlisted
// ones comes last.
func (r *remarks) list() []Remark {
	order.Sort(r.kept, func(a, b Remark) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Text, b.Text))
	})
	if r.more == 0 {
		return r.kept
	}
	return append(r.kept, Remark{Where: "file", Text: fmt.Sprintf("has %d more of these; they are not listed", r.more)})
}

// cut shortens a long text.
func cut(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText], "") + "…"
}

// Invalid is the error of a configuration with problems.
type Invalid struct {
	// File is the path of the configuration file; empty if there is none.
	File string
	// Problems are at least one and at most 51, by line; the last may be the number of further
	// problems.
	Problems []Remark
}

func (e *Invalid) Error() string {
	texts := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		texts[i] = p.String()
	}
	if e.File == "" {
		return "configuration is not valid: " + strings.Join(texts, "; ")
	}
	return fmt.Sprintf("configuration (file %s) is not valid: %s", e.File, strings.Join(texts, "; "))
}
