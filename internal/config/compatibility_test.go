package config

import (
	"errors"
	"io/fs"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
)

// A row is one of a table of docs/compatibility.md.
type row struct {
	line  int
	text  string
	tests []string // that its last cell names
}

// compatibilityRows returns the rows of all tables of docs/compatibility.md that have the column Test.
func compatibilityRows(t *testing.T) []row {
	t.Helper()
	data, err := os.ReadFile("../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	var rows []row
	tested, before := false, ""
	for i, line := range strings.Split(string(data), "\n") {
		switch {
		case !strings.HasPrefix(line, "|"):
			tested = false
		case strings.HasPrefix(line, "|---"):
			tested = strings.HasSuffix(before, "| Test |")
		case tested:
			cells := strings.Split(strings.Trim(line, "|"), " | ")
			rows = append(rows, row{i + 1, line, testName.FindAllString(cells[len(cells)-1], -1)})
			if last := cells[len(cells)-1]; len(rows[len(rows)-1].tests) == 0 && !strings.Contains(last, "none: ") {
				t.Errorf("line %d: the row names no test, and does not say why: %.100s", i+1, line)
			}
		}
		before = line
	}
	if len(rows) == 0 {
		t.Fatal("docs/compatibility.md has no table with the column Test")
	}
	return rows
}

var (
	testName = regexp.MustCompile("Test[A-Za-z0-9_]+")
	testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(`)
)

// TestCompatibilityHasARowForEverything: each flag, variable and key has a row of docs/compatibility.md with a test. Without a row it has no
// argument for being what it is.
func TestCompatibilityHasARowForEverything(t *testing.T) {
	t.Parallel()
	rows := compatibilityRows(t)
	inOne := func(names []string) bool {
		return slices.ContainsFunc(rows, func(r row) bool {
			return !slices.ContainsFunc(names, func(name string) bool { return !strings.Contains(r.text, "`"+name+"`") })
		})
	}
	own := slices.DeleteFunc(slices.Clone(discoveryOptions), func(d option) bool {
		return slices.ContainsFunc(options, func(o option) bool { return o.flag == d.flag && slices.Equal(o.env, d.env) })
	})
	for _, o := range slices.Concat(options, own) {
		names := []string{"--" + o.flag}
		for _, alias := range o.aliases {
			names = append(names, "--"+alias)
		}
		names = append(names, o.env...)
		if o.key != "" {
			names = append(names, o.key)
		}
		if !inOne(names) {
			t.Errorf("docs/compatibility.md has no row with %q", names)
		}
	}
	for _, key := range allKeys(reflect.TypeFor[v1.Config](), "") {
		if !inOne([]string{key}) {
			t.Errorf("docs/compatibility.md has no row with the key `%s`", key)
		}
	}
	for _, variable := range []string{"DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"} {
		if !inOne([]string{variable}) {
			t.Errorf("docs/compatibility.md has no row with the variable %s", variable)
		}
	}
}

// allKeys returns the paths of all keys of the schema that hold no further block. [] stands for the items of a list.
func allKeys(block reflect.Type, path string) []string {
	var all []string
	for i := range block.NumField() {
		field := block.Field(i)
		kind, at := field.Type, join(path, tag(field))
		if kind.Kind() == reflect.Pointer {
			kind = kind.Elem()
		}
		if kind.Kind() == reflect.Slice && kind.Elem().Kind() == reflect.Struct {
			kind, at = kind.Elem(), at+"[]"
		}
		if kind.Kind() != reflect.Struct || isSpecial(reflect.New(kind)) {
			all = append(all, at)
			continue
		}
		all = append(all, allKeys(kind, at)...)
	}
	return all
}

// TestCompatibilityNamesTestsThatExist holds the last column of the tables to the tests.
func TestCompatibilityNamesTestsThatExist(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	err := fs.WalkDir(os.DirFS("../.."), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile("../../" + path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // another test's
		}
		for _, found := range testFunc.FindAllSubmatch(data, -1) {
			known[string(found[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range compatibilityRows(t) {
		for _, name := range r.tests {
			if !known[name] {
				t.Errorf("line %d of docs/compatibility.md names %s, which does not exist", r.line, name)
			}
		}
	}
}
