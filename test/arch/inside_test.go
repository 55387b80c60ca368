package arch

import (
	"bytes"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
)

// A test inside a package sees the package's private names, and each change of them then has to
// change the test too. So a test speaks to what its package offers (package foo_test). A test is
// inside only where something cannot be seen from outside; the head of its file says why.
const (
	insideLines = 3173 // the lines of all inside tests below internal; this number may only become smaller
	insideSlack = 200  // a number that is larger than the lines by more than this has to be lowered
)

func TestInsideTestsBecomeFewer(t *testing.T) {
	t.Parallel()
	lines, err := countInside(os.DirFS("../../internal"))
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case lines > insideLines:
		t.Errorf("inside tests have %d lines, and %d are allowed: write the new test outside of the package (package foo_test)",
			lines, insideLines)
	case lines < insideLines-insideSlack:
		t.Errorf("inside tests have %d lines: lower insideLines from %d to %[1]d", lines, insideLines)
	}
}

// countInside returns the number of lines of the test files that belong to the package they test. A
// file that only exports private names to tests counts too. What lies in testdata does not.
func countInside(tree fs.FS) (int, error) {
	lines := 0
	err := fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path.Base(name) == "testdata":
			return fs.SkipDir
		case entry.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		source, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.PackageClauseOnly)
		if err == nil && !strings.HasSuffix(file.Name.Name, "_test") {
			lines += bytes.Count(source, []byte("\n"))
		}
		return err
	})
	return lines, err
}
