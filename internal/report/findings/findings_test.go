package findings_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/findings"
)

// TestFindingsInNumbers: the first line counts findings, the worst first, and leaves out what there
// is none of.
func TestFindingsInNumbers(t *testing.T) {
	t.Parallel()
	of := func(severities ...diagnosis.Severity) (made []diagnosis.Finding) {
		for _, s := range severities {
			made = append(made, diagnosis.Finding{Severity: s, Check: "c", Message: "m", Evidence: []string{"e"}})
		}
		return made
	}
	for want, all := range map[string][]diagnosis.Finding{
		"doctor: no problems found: 1 ok (at)":    of(diagnosis.OK),
		"doctor: no problems found: 2 ok (at)":    of(diagnosis.OK, diagnosis.OK),
		"doctor: 1 warning (at)":                  of(diagnosis.Warning),
		"doctor: 1 error, 1 warning, 1 info (at)": of(diagnosis.Info, diagnosis.Warning, diagnosis.Error),
		"doctor: 2 errors, 3 warnings, 2 not checked (at)": of(diagnosis.NotChecked, diagnosis.NotChecked, diagnosis.Error,
			diagnosis.Error, diagnosis.Warning,
			diagnosis.Warning, diagnosis.Warning),
	} {
		got := findings.Text("doctor", "at", all, 100)
		if first, _, _ := strings.Cut(got, "\n"); first != want {
			t.Errorf("%q, want %q", first, want)
		}
		if seen := strings.Count(got, "seen: e"); seen != strings.Count(got, "c  ")-strings.Count(got, "\nok ") {
			t.Errorf("the evidence of what is not ok: %d times in\n%s", seen, got)
		}
	}
	all := []diagnosis.Finding{
		{Severity: diagnosis.Error, Check: "driver", Message: "broken", Evidence: []string{"file"}, Remedy: []string{"fix it"}},
		{Severity: diagnosis.OK, Check: "kubelet", Message: "well", Evidence: []string{"file"}, Remedy: []string{"fix it"}},
	}
	for width, want := range map[int]string{
		100: "\nerror        driver             broken\n" + strings.Repeat(" ", 32) +
			"seen: file\n    $ fix it\n\nok           kubelet            well\n",
		99: "\nerror        driver\n    broken\n    seen: file\n    $ fix it\n\nok           kubelet            well\n",
	} {
		if _, got, _ := strings.Cut(findings.Text("doctor", "", all, width), "\n"); got != want {
			t.Errorf("%d columns: %q, want %q", width, got, want)
		}
	}
}

// TestFindingsFitTheScreen: findings fit the screen for any contents of the node's files.
func TestFindingsFitTheScreen(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("/a-long-folder", 40)
	for i, text := range []string{
		"short", strings.Repeat("word ", 100), long, "a " + long + " b " + long, "\x1b[2J\x00\r\n\u202e" +
			long, strings.Repeat("é", 300),
		strings.Repeat("x", 68), strings.Repeat("x", 64) + " y", strings.Repeat("ab ", 32) + "c", "",
	} {
		printed := findings.Text("doctor", text, []diagnosis.Finding{
			{Check: "container-runtime", Severity: diagnosis.NotChecked, Message: text, Evidence: []string{text, "b"},
				Remedy: []string{text, "ls"}},
			{Check: "driver", Severity: diagnosis.OK, Message: text, Evidence: []string{text}},
		}, 100-i%2*20)
		for line := range strings.Lines(printed) {
			if width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); width > 100-i%2*20 {
				t.Errorf("%d columns: %q", width, line)
			}
			if strings.ContainsAny(line, "\x1b\r\x00\u202e") {
				t.Errorf("what a file has controls the terminal: %q", line)
			}
		}
	}
}

// TestCommandsThatAreCopied: a command longer than a line stays one command.
func TestCommandsThatAreCopied(t *testing.T) {
	t.Parallel()
	command := "kubectl" + strings.Repeat(" --flag=value", 20)
	printed := findings.Text("doctor", "", []diagnosis.Finding{{Severity: diagnosis.Error, Remedy: []string{command}}}, 100)
	_, copied, _ := strings.Cut(printed, "$ ")
	joined := strings.Join(strings.Fields(strings.ReplaceAll(copied, "\\\n", " ")), " ")
	if joined != command {
		t.Errorf("copied: %q, want %q", joined, command)
	}
}
