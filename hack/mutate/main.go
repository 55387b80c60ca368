// Command mutate measures how much of a package its own tests hold. It changes one place of the
// package's code at a time, at random, and runs those tests of the package that reach the place. A
// change that the tests do not notice is printed: it is a rule without a test.
//
//	go run ./hack/mutate -n 60 -seed 1 ./internal/gpu/health ./internal/plan/containeredits
//
// The working tree is not touched: the compiler reads the changed files by -overlay. Most changes
// are built into one program, which makes the one that its environment names, because building
// takes longer than most tests. First each test runs alone without a change: so it is known what it
// reaches and how long it takes, and those that fail do not judge. Quick tests run before slow
// ones, and see no process but their own. A test that fails must fail twice, because some need a
// quiet machine.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// maxMemory bounds what a test may use, in bytes: a changed loop may never end.
const maxMemory = 12 << 30

// A mutation is one change of one file.
type mutation struct {
	file       string
	at         place
	function   block // the function that it is in, if it is in one
	start, end int   // offsets in the file
	text       string
	what       string
	chosen     func(k int) string // code that makes the change only where k is chosen; nil if there is none
}

// maxTime is how long the tests may take without a mutation.
const maxTime = 10 * time.Minute

func main() {
	n := flag.Int("n", 60, "how many mutations of each package, chosen at random; 0 for all")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "the seed of the choice")
	jobs := flag.Int("j", 2, "how many mutations are tested at a time")
	tests := flag.String("tests", "", "the folder of the tests that judge; each package's own if empty")
	only := flag.String("files", ".", "mutate only files whose names match this regular expression")
	flag.Parse()
	fmt.Printf("seed %d\n", *seed)
	limit := syscall.Rlimit{Cur: maxMemory, Max: maxMemory}
	if err := syscall.Setrlimit(syscall.RLIMIT_AS, &limit); err != nil {
		fail(err)
	}
	for _, dir := range flag.Args() {
		if err := run(dir, cmp.Or(*tests, dir), regexp.MustCompile(*only), *n, *seed, *jobs); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "mutate:", err)
	os.Exit(1)
}

// run mutates the package in dir and prints what the tests of another one, or its own, let through.
func run(dir, tests string, only *regexp.Regexp, n int, seed uint64, jobs int) error {
	all, err := mutations(dir, only)
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(seed, 0))
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if n <= 0 || n > len(all) {
		n = len(all)
	}
	tmp, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	judge, err := newJudge(dir, tests, tmp, jobs)
	if err != nil {
		return err
	}
	tried, killed, late := 0, 0, 0
	for next := 0; tried < n && next < len(all); {
		some := all[next:min(len(all), next+n-tried)]
		next += len(some)
		err := judge.try(some, func(m mutation, o outcome) {
			if o == noBuild { // the compiler holds it
				return
			}
			tried++
			switch o {
			case noticed:
				killed++
			case tooLong:
				killed++
				late++
				fmt.Printf("%s:%d: took too long: %s\n", m.file, m.at.line, m.what)
			case unreached:
				fmt.Printf("%s:%d: no test runs it: %s\n", m.file, m.at.line, m.what)
			default:
				fmt.Printf("%s:%d: %s\n", m.file, m.at.line, m.what)
			}
		})
		if err != nil {
			return err
		}
	}
	fmt.Printf("%s: %d of %d mutations killed (%d %%), %d of them by the time limit, %d places\n",
		dir, killed, tried, 100*killed/max(1, tried), late, len(all))
	return nil
}

// mutations returns all places of the package's code that can be changed, and how.
func mutations(dir string, only *regexp.Regexp) ([]mutation, error) {
	var all []mutation
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if !mutable(entry) || !only.MatchString(entry.Name()) {
			continue
		}
		name := filepath.Join(dir, entry.Name())
		source, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, source, 0)
		if err != nil {
			return nil, err
		}
		add := func(start, end token.Pos, text, what string, chosen func(k int) string) {
			at := set.Position(start)
			m := mutation{
				file: name, at: place{at.Line, at.Column}, start: at.Offset, end: set.Position(end).Offset, text: text,
				what: what, chosen: chosen,
			}
			for _, d := range file.Decls {
				if f, is := d.(*ast.FuncDecl); is && f.Pos() <= start && start < f.End() {
					from, to := set.Position(f.Pos()), set.Position(f.End())
					m.function = block{filepath.Base(name), place{from.Line, from.Column}, place{to.Line, to.Column},
						false}
				}
			}
			all = append(all, m)
		}
		text := func(n ast.Node) string {
			return string(source[set.Position(n.Pos()).Offset:set.Position(n.End()).Offset])
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if logs(n) {
				return false
			}
			change(n, text, add)
			return true
		})
	}
	return all, nil
}

func mutable(entry fs.DirEntry) bool {
	name := entry.Name()
	return strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") &&
		!strings.HasPrefix(name, "zz_generated")
}

// others are the operators that stand in for an operator.
var others = map[token.Token][]token.Token{
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL},
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.LAND: {token.LOR}, token.LOR: {token.LAND},
	token.ADD: {token.SUB}, token.SUB: {token.ADD}, token.MUL: {token.QUO}, token.QUO: {token.MUL},
}

// An adder adds a change of the code between two positions.
type adder func(start, end token.Pos, text, what string, chosen func(k int) string)

// change adds the changes of one node.
func change(n ast.Node, text func(ast.Node) string, add adder) {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		if strings.Contains(text(n), `"`) && n.Op == token.ADD { // there is no other operator for strings
			return
		}
		for _, op := range others[n.Op] {
			other := text(n.X) + " " + op.String() + " " + text(n.Y)
			what := fmt.Sprintf("%s became %s in: %s", n.Op, op, short(text(n)))
			chosen := eitherBool(text(n), other)
			if n.Op == token.ADD || n.Op == token.SUB || n.Op == token.MUL || n.Op == token.QUO {
				chosen = eitherValue(text(n), other)
			}
			add(n.Pos(), n.End(), other, what, chosen)
		}
		if n.Op == token.LAND || n.Op == token.LOR { // each side alone
			add(n.Pos(), n.End(), text(n.X), "only the left of: "+short(text(n)), eitherBool(text(n), text(n.X)))
			add(n.Pos(), n.End(), text(n.Y), "only the right of: "+short(text(n)), eitherBool(text(n), text(n.Y)))
		}
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			add(n.Pos(), n.End(), text(n.X), "no ! in: "+short(text(n)), eitherBool(text(n), text(n.X)))
		}
	case *ast.IfStmt:
		cond := text(n.Cond)
		add(n.Cond.Pos(), n.Cond.End(), "!("+cond+")", "the opposite of: if "+short(cond),
			eitherBool(cond, "!("+cond+")"))
	case *ast.Ident:
		if other := map[string]string{"true": "false", "false": "true"}[n.Name]; other != "" {
			add(n.Pos(), n.End(), other, n.Name+" became "+other, eitherBool(n.Name, other))
		}
	case *ast.BasicLit:
		if number, err := strconv.ParseInt(n.Value, 0, 64); err == nil && n.Kind == token.INT {
			other := strconv.FormatInt(number+1, 10)
			add(n.Pos(), n.End(), other, n.Value+" became "+other, eitherValue(n.Value, other))
		}
	case *ast.BlockStmt:
		drop(n.List, text, add)
	case *ast.CaseClause:
		drop(n.Body, text, add)
	case *ast.CommClause:
		drop(n.Body, text, add)
	}
}

// drop adds that each statement of a block is left out.
func drop(list []ast.Stmt, text func(ast.Node) string, add adder) {
	for i, s := range list {
		switch s := s.(type) {
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.BranchStmt, *ast.DeferStmt, *ast.IfStmt, *ast.GoStmt, *ast.SendStmt:
		default:
			continue
		}
		if logs(s) {
			continue
		}
		chosen := func(k int) string { return fmt.Sprintf("if mutationOf != %d { %s }", k, text(s)) }
		if i == len(list)-1 && (strings.HasPrefix(text(s), "if ") || strings.HasPrefix(text(s), "panic(")) {
			chosen = nil // a function may end with it
		}
		add(s.Pos(), s.End(), "", "without: "+short(text(s)), chosen)
	}
}

// eitherBool is code for one of two expressions, which may have effects.
func eitherBool(a, b string) func(k int) string {
	return func(k int) string {
		return fmt.Sprintf("eitherOf(%d, func() bool { return %s }, func() bool { return %s })", k, a, b)
	}
}

// eitherValue is code for one of two expressions of any type, or nil if they may have effects.
func eitherValue(a, b string) func(k int) string {
	if strings.ContainsAny(a, "(<") {
		return nil
	}
	return func(k int) string { return fmt.Sprintf("valueOf(%d, %s, %s)", k, a, b) }
}

// logs reports whether code only logs, which is nobody's rule: a call of a logger, the verbosity of
// one, or a condition of such calls.
func logs(n ast.Node) bool {
	if s, is := n.(*ast.IfStmt); is { // one that only decides whether to log
		return s.Init == nil && s.Else == nil &&
			!slices.ContainsFunc(s.Body.List, func(s ast.Stmt) bool { return !logs(s) })
	}
	if s, is := n.(*ast.ExprStmt); is {
		n = s.X
	}
	call, is := n.(*ast.CallExpr)
	if !is {
		return false
	}
	method, is := call.Fun.(*ast.SelectorExpr)
	return is && (slices.Contains([]string{"Info", "V"}, method.Sel.Name) ||
		method.Sel.Name == "Error" && len(call.Args) > 1)
}

// short is a piece of code on one line.
func short(code string) string {
	code = strings.Join(strings.Fields(code), " ")
	if len(code) > 90 {
		code = code[:90] + "…"
	}
	return code
}
