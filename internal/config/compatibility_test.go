package config_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// A row is one of a table of docs/dev/differences.md or docs/dev/compatibility.md.
type row struct {
	place string // file and line
	text  string
	tests []string // that its last cell names
}

// compatibilityRows returns the rows of all tables that have the column Test: those that differ
// from NVIDIA's plugin for users are in docs/dev/differences.md, all others in
// docs/dev/compatibility.md.
func compatibilityRows(t *testing.T) []row {
	t.Helper()
	var rows []row
	for _, file := range []string{"docs/dev/differences.md", "docs/dev/compatibility.md"} {
		data, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		tested, before, known := false, "", len(rows)
		for i, line := range strings.Split(string(data), "\n") {
			switch {
			case !strings.HasPrefix(line, "|"):
				tested = false
			case strings.HasPrefix(line, "|---"):
				tested = strings.HasSuffix(before, "| Test |")
			case tested:
				cells := strings.Split(strings.Trim(line, "|"), " | ")
				last := cells[len(cells)-1]
				r := row{fmt.Sprintf("%s:%d", file, i+1), line, testName.FindAllString(last, -1)}
				if len(r.tests) == 0 && !strings.Contains(last, "none: ") {
					t.Errorf("%s: the row names no test, and does not say why: %.100s", r.place, line)
				}
				rows = append(rows, r)
			}
			before = line
		}
		if len(rows) == known {
			t.Fatalf("%s has no table with the column Test", file)
		}
	}
	return rows
}

var (
	testName = regexp.MustCompile("Test[A-Za-z0-9_]+")
	testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(`)
)

// TestCompatibilityRows: each flag, variable and key has a row with a test. Without
// a row it has no argument for being what it is.
func TestCompatibilityRows(t *testing.T) {
	t.Parallel()
	rows := compatibilityRows(t)
	inOne := func(names []string) bool {
		return slices.ContainsFunc(rows, func(r row) bool {
			return !slices.ContainsFunc(names, func(name string) bool { return !strings.Contains(r.text, "`"+name+"`") })
		})
	}
	for _, o := range append(config.Options(), config.DiscoveryOptions()...) {
		names := append([]string{"--" + o.Flag}, o.Env...)
		for _, alias := range o.Aliases {
			names = append(names, "--"+alias)
		}
		if o.Key != "" {
			names = append(names, o.Key)
		}
		if !inOne(names) {
			t.Errorf("docs/dev/differences.md and docs/dev/compatibility.md have no row with %q", names)
		}
	}
	for key := range keysOf(reflect.TypeFor[v1.Config](), "") {
		if !inOne([]string{key}) {
			t.Errorf("docs/dev/differences.md and docs/dev/compatibility.md have no row with the key `%s`", key)
		}
	}
	for _, variable := range []string{"DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"} {
		if !inOne([]string{variable}) {
			t.Errorf("docs/dev/differences.md and docs/dev/compatibility.md have no row with the variable %s", variable)
		}
	}
}

// keysOf returns the paths of all keys of a block of the schema that hold no further block, with
// their types. [] stands for the items of a list.
func keysOf(block reflect.Type, path string) map[string]reflect.Type {
	all := map[string]reflect.Type{}
	for i := range block.NumField() {
		field := block.Field(i)
		kind := field.Type
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		at := strings.TrimPrefix(path+"."+name, ".")
		if kind.Kind() == reflect.Pointer {
			kind = kind.Elem()
		}
		if kind.Kind() == reflect.Slice && kind.Elem().Kind() == reflect.Struct {
			kind, at = kind.Elem(), at+"[]"
		}
		if _, special := reflect.New(kind).Interface().(json.Unmarshaler); special || kind.Kind() != reflect.Struct {
			all[at] = kind
			continue
		}
		maps.Copy(all, keysOf(kind, at))
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
				t.Errorf("%s names %s, which does not exist", r.place, name)
			}
		}
	}
}
