package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// functionLines is how many lines a function may have, outside of files named _test.go.
const functionLines = 60

func TestFunctionsAreShort(t *testing.T) {
	t.Parallel()
	for _, root := range []string{"api", "cmd", "hack", "internal", "test"} {
		err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, name, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, declared := range file.Decls {
				f, is := declared.(*ast.FuncDecl)
				if !is {
					continue
				}
				if lines := files.Position(f.End()).Line - files.Position(f.Pos()).Line + 1; lines > functionLines {
					t.Errorf("%s: function %s has %d lines; at most %d are allowed", name, f.Name.Name, lines, functionLines)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
