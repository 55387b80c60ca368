// Package diagnosis contains what the checks of a node have in common: facts that may be unknown, and
// findings with a severity, evidence and a remedy. Package doctor judges a node with it, and package
// preflight judges a change of the driver.
package diagnosis

import (
	"cmp"
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

// Severity is the severity of a finding.
type Severity int

// The severities in ascending order.
const (
	OK Severity = iota
	Info
	NotChecked // a fact was not readable
	Warning    // something must be done, before the driver is changed if preflight says so
	Error      // containers get no GPU, or the change of the driver is not possible
)

var severities = [...]string{OK: "ok", Info: "info", NotChecked: "not checked", Warning: "warning", Error: "error"}

func (s Severity) String() string {
	if s < 0 || int(s) >= len(severities) {
		return fmt.Sprintf("Severity(%d)", int(s))
	}
	return severities[s]
}

// MarshalText returns the name of a severity.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Finding is a result of a check. A check may have several.
type Finding struct {
	// Check is the name of the check.
	Check string `json:"check"`
	// Code is the kind of a problem, for programs: it stays the same when Message is reworded. It is
	// empty if Severity is OK or NotChecked.
	Code     string   `json:"code,omitempty"`
	Severity Severity `json:"severity"`
	// Message is a sentence without a full stop.
	Message string `json:"message"`
	// Evidence are files of the node with their contents, and values.
	Evidence []string `json:"evidence,omitempty"`
	// Remedy are commands in order, for a root shell on the node, and comments. Commands of
	// gpu-device-plugin belong in the daemon's container.
	Remedy []string `json:"remedy,omitempty"`
}

// SortWorstFirst sorts findings by severity. Findings of equal severity keep their order.
func SortWorstFirst(all []Finding) {
	order.Sort(all, func(a, b Finding) int { return cmp.Compare(b.Severity, a.Severity) })
}

// Worst returns the highest severity of the findings, and OK if there are none.
func Worst(all []Finding) Severity {
	worst := OK
	for _, f := range all {
		worst = max(worst, f.Severity)
	}
	return worst
}

// A Fact is a reading of a part of the node.
type Fact[T any] struct {
	Value T
	// Missing is why Value is unknown, and how to make it known; empty if Value is known.
	Missing string
	// Hung is true if Value is missing because reading it did not return.
	Hung bool
}

// Known reports whether the value is known.
func (f Fact[T]) Known() bool { return f.Missing == "" }
