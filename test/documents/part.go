package documents

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// HoldPart compares a part of a document with what the code makes of it. The part stands between
// "<!-- NAME: written by … TESTNAME -->" and "<!-- end of NAME -->", each on a line of its own. With
// update, HoldPart writes the part instead.
func HoldPart(t *testing.T, path, name, want string, update bool) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := string(content)
	end := "<!-- end of " + name + " -->\n"
	begin := regexp.MustCompile("<!-- " + regexp.QuoteMeta(name) + ": written by .*" + t.Name() + " -->\n").
		FindStringIndex(text)
	if len(begin) == 0 || !strings.Contains(text[begin[1]:], end) {
		t.Fatalf("%s has no place for the part %q", path, name)
	}
	before := text[:begin[1]]
	have, after, _ := strings.Cut(text[begin[1]:], end)
	switch {
	case have == want:
	case !update:
		t.Errorf("the part %q of %s differs from the code; in the folder of this test, run: go test -run %s -update",
			name, path, t.Name())
	default:
		if err := os.WriteFile(path, []byte(before+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
