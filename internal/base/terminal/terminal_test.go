package terminal_test

import (
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
)

func TestLine(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                          "",
		"NVIDIA H100 80GB  HBM3 é":  "NVIDIA H100 80GB  HBM3 é",
		"a\x1b[2Jb":                 "a^[[2Jb",
		"a\nready: yes\tb\r":        "a ready: yes b",
		"\u202egnp.exe\u2028\u009b": `\u202egnp.exe\u2028\u009b`,
		"\xff":                      `\xff`,
		"\x7f\a":                    "^?^G",
	} {
		if got := terminal.Line(text); got != want {
			t.Errorf("Line(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestClean(t *testing.T) {
	t.Parallel()
	type inner struct{ Name string }
	type outer struct {
		Text   string
		List   []inner
		Map    map[string]string
		Of     *inner
		None   *inner
		Any    any
		hidden string
	}
	const bad, good = "a\nb", "a b"
	v := outer{bad, []inner{{bad}}, map[string]string{"k": bad}, &inner{bad}, nil, bad, bad}
	terminal.Clean(&v)
	want := outer{good, []inner{{good}}, map[string]string{"k": good}, &inner{good}, nil, bad, bad}
	if diff := cmp.Diff(want, v, cmp.AllowUnexported(outer{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestWriter: the output is the same for any partition of the input.
func TestWriter(t *testing.T) {
	t.Parallel()
	const text = "é\x1b[31mLost\x1b[0m\x1b[8m\u202e\xff\n"
	for parts := 1; parts <= len(text); parts++ {
		var b strings.Builder
		w := &terminal.Writer{To: &b}
		for rest := text; rest != ""; {
			n := min(parts, len(rest))
			if _, err := io.WriteString(w, rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if want := `é^[[31mLost^[[0m^[[8m\u202e\xff` + "\n"; b.String() != want {
			t.Errorf("in parts of %d: %q, want %q", parts, b.String(), want)
		}
	}
	var b strings.Builder
	if _, err := io.WriteString(&terminal.Writer{To: &b, Keep: []string{"\x1b[0m", "\x1b[31m"}}, text); err != nil {
		t.Fatal(err)
	}
	if want := "é\x1b[31mLost\x1b[0m" + `^[[8m\u202e\xff` + "\n"; b.String() != want {
		t.Errorf("with colours: %q, want %q", b.String(), want)
	}
}
