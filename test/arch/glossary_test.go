package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

const (
	glossaryFile  = "docs/dev/architecture.md"
	glossaryBegin = "## Glossary\n"
	retiredBegin  = "Not used in exported names:"
)

func TestGlossary(t *testing.T) {
	problems, err := judgeNames(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
}

// TestGlossaryFindsProblems breaks each rule once.
func TestGlossaryFindsProblems(t *testing.T) {
	t.Parallel()
	const glossary = "# A\n" + glossaryBegin + "| word | what it is | types |\n|---|---|---|\n| hold | x | `a.Hold`, `b.Hold` |\n| gpu | x | `a.GPU` |\n" +
		"\n" + retiredBegin + " `eye`, `truth`.\n"
	const fine = "type (GPU int; Hold int)"
	for name, tt := range map[string]struct{ a, b, want string }{
		"nothing":                    {fine, "type Hold int", ""},
		"not exported":               {fine + "; type eye int", "type Hold int; type truth int", ""},
		"a part of a word":           {fine + "; type Eyelash int", "type Hold int", ""},
		"a second type of that name": {fine, "type (Hold int; GPU int)", ""},
		"a type that is gone":        {fine, "type Other int", "b.Hold: the glossary names this type"},
		"a retired type": {fine + "; type EyeOpener int", "type Hold int",
			"a.EyeOpener: the glossary does not use the word eye"},
		"a retired method": {fine + "; func (GPU) LastTruth() {}", "type Hold int",
			"a.LastTruth: the glossary does not use the word truth"},
		"a retired function": {fine + "; func OpenEye() {}", "type Hold int", "a.OpenEye: the glossary"},
		"a retired field": {fine + "; type T struct { U struct { Truth int } }", "type Hold int",
			"a.Truth: the glossary"},
		"a retired constant":          {fine + "; const Truth = 1", "type Hold int", "a.Truth: the glossary"},
		"a retired word in an import": {fine + "; var X = eye.Eye", "type Hold int", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			problems, err := judgeNames(fstest.MapFS{
				glossaryFile:                 {Data: []byte(glossary)},
				"internal/a/a.go":            {Data: []byte("package a\n" + tt.a)},
				"internal/b/b.go":            {Data: []byte("package b\n" + tt.b)},
				"internal/b/b_test.go":       {Data: []byte("package b\ntype GPU int")},
				"internal/b/testdata/x":      {Data: []byte("no Go")},
				"internal/app/cli/output.go": {Data: []byte("package cli\ntype GPU int")},
			})
			if err != nil {
				t.Fatal(err)
			}
			all := strings.Join(problems, "\n")
			if tt.want == "" && all != "" || !strings.HasPrefix(all, tt.want) {
				t.Errorf("problems %q, want %q", all, tt.want)
			}
		})
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][]string{
		"LastLook": {"last", "look"}, "GPUSet": {"gpu", "set"}, "MIGDevice": {"mig",
			"device"}, "UUID": {"uuid"}, "ErrQuiet": {"err", "quiet"},
	} {
		if diff := cmp.Diff(want, words(name)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// judgeNames returns which exported names of internal/ break the glossary: a name with a word that
// the glossary retires, and a type that the glossary names and no package has. Package cli, which
// no other package imports, is left out.
func judgeNames(tree fs.FS) ([]string, error) {
	text, err := fs.ReadFile(tree, glossaryFile)
	if err != nil {
		return nil, err
	}
	_, glossary, found := strings.Cut(string(text), glossaryBegin)
	table, retired, alsoFound := strings.Cut(glossary, retiredBegin)
	if !found || !alsoFound {
		return nil, fmt.Errorf("%s has no glossary with the parts %q and %q", glossaryFile, glossaryBegin, retiredBegin)
	}
	retired, _, _ = strings.Cut(retired, "\n\n")
	spans := regexp.MustCompile("`([A-Za-z]+\\.)?[A-Za-z]+`")
	listed := spans.FindAllString(table, -1)
	unused := spans.FindAllString(retired, -1)

	known := map[string]bool{} // the types of internal/, as the glossary names them
	var problems []string
	err = fs.WalkDir(tree, "internal", func(name string, entry fs.DirEntry, err error) error {
		dir := path.Base(path.Dir(name))
		if err != nil || entry.IsDir() || path.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") || dir == "cli" {
			return err
		}
		source, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for id, isType := range declared(file) {
			if isType {
				known["`"+dir+"."+id+"`"] = true
			}
			for _, word := range words(id) {
				if slices.Contains(unused, "`"+word+"`") {
					problems = append(problems, fmt.Sprintf("%s.%s: the glossary does not use the word %s", dir, id, word))
				}
			}
		}
		return nil
	})
	for _, span := range listed {
		if strings.Contains(span, ".") && !known[span] {
			problems = append(problems, strings.Trim(span, "`")+": the glossary names this type, and there is none")
		}
	}
	slices.Sort(problems)
	return problems, err
}

// declared returns the exported names that a file declares, fields included, and whether they are
// types.
func declared(file *ast.File) map[string]bool {
	names := map[string]bool{}
	note := func(id *ast.Ident, isType bool) {
		if id.IsExported() {
			names[id.Name] = names[id.Name] || isType
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.TypeSpec:
			note(n.Name, true)
		case *ast.FuncDecl:
			note(n.Name, false)
			return false
		case *ast.ValueSpec:
			for _, id := range n.Names {
				note(id, false)
			}
		case *ast.Field:
			for _, id := range n.Names {
				note(id, false)
			}
		}
		return true
	})
	return names
}

// words returns the words of a name in lower case: "gpu" and "set" of GPUSet.
func words(name string) []string {
	var all []string
	letters := []rune(name)
	start := 0
	for i := 1; i <= len(letters); i++ {
		begins := i == len(letters) || unicode.IsUpper(letters[i]) && (!unicode.IsUpper(letters[i-1]) ||
			i+1 < len(letters) && unicode.IsLower(letters[i+1]))
		if begins {
			all = append(all, strings.ToLower(string(letters[start:i])))
			start = i
		}
	}
	return all
}
