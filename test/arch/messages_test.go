package arch

import (
	"flag"
	"fmt"
	"go/ast"
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
	"testing/fstest"
)

var update = flag.Bool("update", false, "rewrite the table of messages in docs/dev/messages.md")

const (
	messagesFile  = "docs/dev/messages.md"
	messagesBegin = "<!-- messages: written by TestMessages -->\n"
	messagesEnd   = "<!-- end of messages -->\n"
)

// A message is logged at level Info or Error. Messages of V(2) and above are for developers and
// have no row.
type message struct {
	level          string
	keys, packages []string
}

// TestMessages holds the table of messages to the source. The command
// `go test ./test/arch -run TestMessages -update` writes the table; what a message means is written
// by hand.
func TestMessages(t *testing.T) {
	if *update {
		before, meanings, after, err := readMessages(root)
		if err != nil {
			t.Fatal(err)
		}
		messages, _, err := findMessages(root)
		if err != nil {
			t.Fatal(err)
		}
		text := before + messagesBegin + messageTable(messages, meanings) + messagesEnd + after
		if err := os.WriteFile("../../"+messagesFile, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	problems, err := judgeMessages(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Error(p)
	}
}

// TestMessagesFindsProblems breaks each rule once.
func TestMessagesFindsProblems(t *testing.T) {
	t.Parallel()
	const head = "| message | level | keys | where | what it means |\n|---|---|---|---|---|\n"
	row := func(message, level, keys string) string {
		return "| " + message + " | " + level + " | " + keys + " | a | it is so |\n"
	}
	const source = `l.Info("One", "n", 1, "gpu", 2); l.Info("Two"); l.V(2).Info("For developers"); l.Error(err, "Three", "n", 1); http.Error(w, "no message", 1)`
	rows := row("One", "Info", "`n`, `gpu`") + row("Three", "Error", "`n`") + row("Two", "Info", "")
	for name, tt := range map[string]struct{ source, table, want string }{
		"nothing":                   {source, head + rows, ""},
		"a logger with a level":     {source + `; detail := l.V(4); detail.Info("Also for developers")`, head + rows, ""},
		"a message that is missing": {source + `; l.Info("Zero")`, head + rows, "Zero: has no row"},
		"a message that is gone":    {strings.Replace(source, "Two", "One", 1), head + rows, "Two: is logged nowhere"},
		"a row for nothing":         {source, head + rows + row("Zero", "Info", ""), "Zero: is logged nowhere"},
		"two levels": {source + `; l.Error(err, "Two")`, head + rows,
			"Two: is logged at the levels Info and Error"},
		"another level": {strings.Replace(source, `l.Info("Two")`, `l.Error(err, "Two")`, 1), head + rows,
			"Two: the row is stale"},
		"another key": {strings.Replace(source, `"gpu"`, `"device"`, 1), head + rows,
			"One: the row is stale"},
		"a row twice": {source, head + rows + row("Two", "Info", ""), "Two: has two rows"},
		"a message that means nothing": {source, head + strings.Replace(rows, "it is so |\n", "|\n", 1),
			"One: nobody has written"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			problems, err := judgeMessages(fstest.MapFS{
				messagesFile: {Data: []byte("x\n" + messagesBegin + tt.table + messagesEnd + "y\n")},
				"internal/a/a.go": {Data: []byte("package a\nimport \"net/http\"\nfunc f() { " + tt.source +
					" }\nfunc g() { loud.Info(\"One\") }")},
				"internal/a/a_test.go": {Data: []byte("package a\nfunc f() { l.Info(\"In a test\") }")},
				"test/a/a.go":          {Data: []byte("package a\nfunc f() { l.Info(\"In a test\") }")},
			})
			if err != nil {
				t.Fatal(err)
			}
			if all := strings.Join(problems, "\n"); tt.want == "" && all != "" || !strings.HasPrefix(all, tt.want) {
				t.Errorf("problems %q, want %q", all, tt.want)
			}
		})
	}
}

// judgeMessages returns how the table of messages differs from the source.
func judgeMessages(tree fs.FS) ([]string, error) {
	_, meanings, _, err := readMessages(tree)
	if err != nil {
		return nil, err
	}
	messages, problems, err := findMessages(tree)
	if err != nil {
		return nil, err
	}
	rows := map[string]string{} // each as it should be, but for its meaning
	for text, m := range messages {
		rows[text] = messageRow(text, m)
	}
	const remedy = "; run: go test ./test/arch -run TestMessages -update, and write what new messages mean into " +
		messagesFile
	for _, text := range slices.Sorted(maps.Keys(rows)) {
		switch found := meanings[text]; {
		case found == nil:
			problems = append(problems, text+": has no row"+remedy)
		case len(found) > 1:
			problems = append(problems, text+": has two rows")
		case found[0].row != rows[text]:
			problems = append(problems, text+": the row is stale"+remedy)
		case found[0].meaning == "":
			problems = append(problems, text+": nobody has written what it means")
		}
	}
	for _, text := range slices.Sorted(maps.Keys(meanings)) {
		if _, logged := rows[text]; !logged {
			problems = append(problems, text+": is logged nowhere"+remedy)
		}
	}
	return problems, nil
}

// A meaning is what the table says of a message: the part that is generated, and the part that is
// not.
type meaning struct{ row, meaning string }

// readMessages returns the text around the table of messages, and what is in it, by message.
func readMessages(tree fs.FS) (before string, meanings map[string][]meaning, after string, err error) {
	text, err := fs.ReadFile(tree, messagesFile)
	if err != nil {
		return "", nil, "", fmt.Errorf("read the messages: %w", err)
	}
	before, rest, begins := strings.Cut(string(text), messagesBegin)
	table, after, ends := strings.Cut(rest, messagesEnd)
	if !begins || !ends {
		return "", nil, "", fmt.Errorf("%s has no place for the messages: %q … %q", messagesFile, messagesBegin, messagesEnd)
	}
	meanings = map[string][]meaning{}
	for i, line := range strings.Split(strings.TrimSpace(table), "\n") {
		line = strings.TrimSuffix(strings.TrimRight(line, " "), "|")
		cut := strings.LastIndex(line, "|") + 1
		if i < 2 || cut == 0 {
			continue
		}
		text := strings.TrimSpace(strings.Split(line, "|")[1])
		meanings[text] = append(meanings[text], meaning{row: line[:cut], meaning: strings.TrimSpace(line[cut:])})
	}
	return before, meanings, after, nil
}

func messageTable(messages map[string]*message, meanings map[string][]meaning) string {
	var b strings.Builder
	b.WriteString("| message | level | keys | where | what it means |\n|---|---|---|---|---|\n")
	for _, text := range slices.Sorted(maps.Keys(messages)) {
		known := ""
		if found := meanings[text]; found != nil {
			known = found[0].meaning
		}
		fmt.Fprintf(&b, "%s %s |\n", messageRow(text, messages[text]), known)
	}
	return b.String()
}

// messageRow returns the part of a row that is generated.
func messageRow(text string, m *message) string {
	keys := ""
	if len(m.keys) > 0 {
		keys = "`" + strings.Join(m.keys, "`, `") + "`"
	}
	return fmt.Sprintf("| %s | %s | %s | %s |", text, m.level, keys, strings.Join(m.packages, ", "))
}

// findMessages returns all messages of the program, and those that are logged at several levels as
// problems.
func findMessages(tree fs.FS) (messages map[string]*message, problems []string, err error) {
	messages = map[string]*message{}
	err = fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name != "." && name != "internal" && name != "cmd" && !isBelow(name, "internal") &&
			!isBelow(name, "cmd"):
			return fs.SkipDir
		case entry.IsDir() || path.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") ||
			strings.Contains(name, "/testdata/"):
			return nil
		}
		source, err := fs.ReadFile(tree, name)
		if err != nil {
			return fmt.Errorf("read source: %w", err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse source: %w", err)
		}
		imported := importNames(file)
		for _, decl := range file.Decls {
			levels := map[string]string{} // of the declaration's variables that are loggers
			ast.Inspect(decl, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.AssignStmt:
					if x, ok := n.Lhs[0].(*ast.Ident); ok {
						levels[x.Name] = verbosity(n.Rhs[0], levels)
					}
				case *ast.CallExpr:
					problems = append(problems, addMessage(messages, n, imported, levels, path.Base(path.Dir(name)))...)
				}
				return true
			})
		}
		return nil
	})
	return messages, problems, err
}

// addMessage adds the message of a call, if that logs one.
func addMessage(messages map[string]*message, call *ast.CallExpr, imported, levels map[string]string,
	pkg string) []string {
	method, ok := call.Fun.(*ast.SelectorExpr)
	at, logs := map[string]int{"Info": 0, "Error": 1}[selected(method)]
	if !ok || !logs || len(call.Args) <= at {
		return nil
	}
	if x, ok := method.X.(*ast.Ident); ok && imported[x.Name] != "" {
		return nil // a package's function
	}
	text, constant := literal(call.Args[at])
	if !constant {
		return nil // judgeLog has found it
	}
	level := "Error"
	if at == 0 {
		level = verbosity(method.X, levels)
	}
	if strings.HasPrefix(level, "V(") {
		return nil // for developers, who read the source
	}
	m := messages[text]
	if m == nil {
		m = &message{level: level}
		messages[text] = m
	}
	for i := at + 1; i < len(call.Args); i += 2 {
		if key, ok := literal(call.Args[i]); ok && !slices.Contains(m.keys, key) {
			m.keys = append(m.keys, key)
		}
	}
	if !slices.Contains(m.packages, pkg) {
		m.packages = append(m.packages, pkg)
	}
	if m.level != level {
		return []string{fmt.Sprintf("%s: is logged at the levels %s and %s; the same event has one level", text, m.level,
			level)}
	}
	return nil
}

func selected(method *ast.SelectorExpr) string {
	if method == nil {
		return ""
	}
	return method.Sel.Name
}

// verbosity returns the level of a logger: "Info", or "V(2)" for one that was given a level.
func verbosity(logger ast.Expr, levels map[string]string) string {
	switch x := logger.(type) {
	case *ast.Ident:
		if level := levels[x.Name]; level != "" {
			return level
		}
	case *ast.CallExpr:
		method, ok := x.Fun.(*ast.SelectorExpr)
		if !ok {
			break
		}
		if level, ok := first(x.Args).(*ast.BasicLit); ok && method.Sel.Name == "V" {
			return "V(" + level.Value + ")"
		}
		return verbosity(method.X, levels)
	}
	return "Info"
}

func first(args []ast.Expr) ast.Expr {
	if len(args) == 0 {
		return nil
	}
	return args[0]
}

// literal returns the value of a string literal.
func literal(e ast.Expr) (string, bool) {
	text, ok := e.(*ast.BasicLit)
	if !ok || text.Kind != token.STRING {
		return "", false
	}
	value, err := strconv.Unquote(text.Value)
	return value, err == nil
}
