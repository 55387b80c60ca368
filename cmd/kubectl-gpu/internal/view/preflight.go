package view

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Preflight is the answer of driver preflight on a node.
type Preflight struct {
	Node string
	// Err is why there is no report; nil if there is one.
	Err error
	// Exit is the exit status of the command: 0, 2 for a warning or 3 for an error.
	Exit int
	// Report is the whole report, as the node gave it.
	Report map[string]any

	Verdict, Summary           string
	Driver, Kernel, NextKernel string
	Holders, NotChecked        int
}

// The exit statuses of driver preflight for a warning and for an error.
const (
	ExitWarning = 2
	ExitError   = 3
)

// The verdicts of driver preflight.
const (
	Ready   = "ready"
	InUse   = "in use"
	Blocked = "blocked"
)

// NewPreflight reads the output of driver preflight with its exit status, or says why there is none.
func NewPreflight(node string, text []byte, exit int, err error) Preflight {
	p := Preflight{Node: node, Exit: exit}
	if err != nil && exit != ExitWarning && exit != ExitError {
		p.Err = err
		if strings.Contains(err.Error(), "unknown command") {
			p.Err = errors.New("its version has no driver preflight: upgrade the daemon")
		}
		return p
	}
	var read struct {
		Verdict, Summary           string
		Driver, Kernel, NextKernel string
		Holders                    []any
		NotChecked                 int
	}
	if err := errors.Join(json.Unmarshal(text, &p.Report), json.Unmarshal(text, &read)); err != nil {
		p.Err = fmt.Errorf("its answer cannot be read: %w", err)
		return p
	}
	p.Report["node"] = node
	p.Verdict, p.Summary, p.Driver = read.Verdict, read.Summary, read.Driver
	p.Kernel, p.NextKernel = read.Kernel, read.NextKernel
	p.Holders, p.NotChecked = len(read.Holders), read.NotChecked
	if !slices.Contains([]string{Ready, InUse, Blocked}, p.Verdict) {
		p.Err = errors.New("its answer has no verdict")
	}
	return p
}

// SortPreflights puts nodes without a report first, then blocked nodes and nodes in use.
func SortPreflights(all []Preflight) {
	order := []string{"", Blocked, InUse, Ready}
	slices.SortStableFunc(all, func(a, b Preflight) int {
		return cmp.Or(slices.Index(order, a.Verdict)-slices.Index(order, b.Verdict), b.Exit-a.Exit,
			cmp.Compare(a.Node, b.Node))
	})
}

// PreflightTotals returns a sentence with the number of nodes by verdict.
func PreflightTotals(all []Preflight) string {
	counts, none := map[string]int{}, 0
	for _, p := range all {
		if p.Err != nil {
			none++
			continue
		}
		counts[p.Verdict]++
	}
	text := fmt.Sprintf("Nodes: %d: %d ready, %d in use, %d blocked", len(all), counts[Ready], counts[InUse],
		counts[Blocked])
	if none > 0 {
		text += fmt.Sprintf(", %d without an answer", none)
	}
	return text + "."
}
