package holders

// Inside: the table of states is private, and no call from outside tells one state from another
// that counts the same.

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestTheTableOfHoldings: the documents have the steps that the code has.
func TestTheTableOfHoldings(t *testing.T) {
	t.Parallel()
	names := []string{"unread", "lost", "held", "given", "ended", "free", "unheld"}
	text, err := os.ReadFile("../../../docs/dev/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## A device that left the plan")
	for h, name := range names {
		title := name
		if holding(h).Counts() {
			title = "**" + name + "**"
		}
		var next []string
		for _, to := range transitions[h] {
			next = append(next, names[to])
		}
		if row := "| " + title + " | " + strings.Join(next, " | ") + " |"; !slices.Contains(strings.Split(section, "\n"),
			row) {
			t.Errorf("docs/dev/architecture.md lacks the row %q", row)
		}
	}
}

// TestAHolderIsNotForgottenWithTheAccounts: once a pod was named, the device counts as held when
// the accounts cannot be read, also if it was never offered here: another process may have given
// it.
func TestAHolderIsNotForgottenWithTheAccounts(t *testing.T) {
	t.Parallel()
	p := State{holding: unheld}
	for i, step := range []struct {
		finding observation
		counts  bool
	}{{saysNothing, false}, {namesPod, true}, {saysNothing, true}, {namesNone, false}, {saysNothing, false}} {
		p.holding = transitions[p.holding][step.finding]
		if p.Counts() != step.counts {
			t.Errorf("step %d: it counts as held: %v", i, p.Counts())
		}
	}
}
