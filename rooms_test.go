package arch

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	roomsBegin = "<!-- rooms: written by make look -->\n"
	roomsEnd   = "<!-- end of rooms -->\n"
)

// TestRooms holds the picture of the rooms in docs/dev/architecture.md to the imports. `make look` writes it anew.
func TestRooms(t *testing.T) {
	text, err := os.ReadFile(glossaryFile)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), roomsBegin)
	have, after, ends := strings.Cut(rest, roomsEnd)
	if !begins || !ends {
		t.Fatalf("%s has no place for the rooms: %q … %q", glossaryFile, roomsBegin, roomsEnd)
	}
	imported, err := readImports(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	switch want := drawRooms(imported); {
	case have == want:
	case !*update:
		t.Errorf("the rooms in %s are not those of the imports; run: make look", glossaryFile)
	default:
		if err := os.WriteFile(glossaryFile, []byte(before+roomsBegin+want+roomsEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDrawRooms draws five rooms: what one imports twice over is left out.
func TestDrawRooms(t *testing.T) {
	t.Parallel()
	want := "```text\n 2  cmd/a  b c\n 1  b      d\n 1  c      d\n 0  d, e\n```\n"
	if got := drawRooms(map[string][]string{"cmd/a": {"b", "c", "d"}, "b": {"d"}, "c": {"d"}, "d": nil, "e": nil}); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}

// readImports returns the rooms of both programs, each with the rooms that it imports. A folder below a room belongs to it.
func readImports(tree fs.FS) (map[string][]string, error) {
	imported := map[string][]string{}
	room := func(folder string) string { return strings.TrimPrefix(owner(folder), "internal/") }
	for _, root := range []string{"api", "cmd", "internal"} {
		err := fs.WalkDir(tree, root, func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			source, err := fs.ReadFile(tree, name)
			if err != nil {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.ImportsOnly)
			if err != nil {
				return err
			}
			from := room(path.Dir(name))
			imported[from] = slices.Clip(imported[from])
			for _, spec := range file.Imports {
				target, _ := strconv.Unquote(spec.Path.Value) // the parser has checked it
				folder, ours := strings.CutPrefix(target, module)
				if to := room(folder); ours && to != from && !slices.Contains(imported[from], to) {
					imported[from] = append(imported[from], to)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return imported, nil
}

// drawRooms returns a line for each room, the highest floor first: its floor, its name, and the rooms that it stands on. A room that one of
// these imports is left out. Rooms that import none are in one line.
func drawRooms(imported map[string][]string) string {
	floors := map[string]int{}
	var floor func(room string) int
	floor = func(room string) int {
		if _, known := floors[room]; !known {
			floors[room] = 0
			for _, below := range imported[room] {
				floors[room] = max(floors[room], floor(below)+1)
			}
		}
		return floors[room]
	}
	var reaches func(from, to string) bool
	reaches = func(from, to string) bool {
		return slices.ContainsFunc(imported[from], func(r string) bool { return r == to || reaches(r, to) })
	}
	rooms := slices.SortedFunc(maps.Keys(imported), func(a, b string) int {
		if floor(a) != floor(b) {
			return floor(b) - floor(a)
		}
		return strings.Compare(a, b)
	})
	width := 0
	for _, r := range rooms {
		if floors[r] > 0 {
			width = max(width, len(r))
		}
	}
	var ground []string
	var b strings.Builder
	b.WriteString("```text\n")
	for _, r := range rooms {
		if floors[r] == 0 {
			ground = append(ground, r)
			continue
		}
		direct := slices.DeleteFunc(slices.Sorted(slices.Values(imported[r])), func(below string) bool {
			return slices.ContainsFunc(imported[r], func(other string) bool { return other != below && reaches(other, below) })
		})
		fmt.Fprintf(&b, "%2d  %-*s  %s\n", floors[r], width, r, strings.Join(direct, " "))
	}
	fmt.Fprintf(&b, " 0  %s\n```\n", strings.Join(ground, ", "))
	return b.String()
}
