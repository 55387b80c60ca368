package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// A Remark is something about a configuration that its author should know: a problem, because of which it is not used,
// or a warning.
type Remark struct {
	// Where is the key's path in the file, the flag or the environment variable that it is about.
	Where string
	// Line is the line of the file, from 1; 0 for what does not stand in the file.
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

// sortRemarks orders remarks by line; those that stand in no file come first.
func sortRemarks(remarks []Remark) {
	slices.SortFunc(remarks, func(a, b Remark) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Text, b.Text))
	})
}

// Invalid is the error of a configuration with problems.
type Invalid struct {
	// File is the path of the configuration file; empty if there is none.
	File string
	// Problems are all of them, sorted; at least one.
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
