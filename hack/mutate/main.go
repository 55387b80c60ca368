// Command mutate measures how much of a package its own tests hold. It changes one place of the package's code at a time,
// at random, and runs the package's tests. A change that the tests do not notice is printed: it is a rule without a test.
//
//	go run ./hack/mutate -n 60 -seed 1 ./internal/health ./internal/edits
//
// The working tree is not touched: the compiler reads the changed file by -overlay.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxMemory bounds what a test may use, in bytes: a changed loop may never end.
const maxMemory = 12 << 30

// A mutation is one change of one file.
type mutation struct {
	file       string
	line       int
	start, end int // offsets in the file
	text       string
	what       string
}

func main() {
	n := flag.Int("n", 60, "how many mutations of each package, chosen at random; 0 for all")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "the seed of the choice")
	jobs := flag.Int("j", 1, "how many tests run at a time")
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
	tmp, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	binary := filepath.Join(tmp, "test")
	if out, err := build(tests, binary); err != nil {
		return fmt.Errorf("the tests in %s cannot be built: %s", tests, out)
	}
	began := time.Now()
	if outcome, out := test(tests, binary, 10*time.Minute); outcome != survived {
		return fmt.Errorf("the tests in %s fail without a mutation:\n%s", tests, out)
	}
	timeout := max(20*time.Second, 4*time.Since(began))
	r := rand.New(rand.NewPCG(seed, 0))
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })

	var lock sync.Mutex
	var wait sync.WaitGroup
	tried, killed, late, next := 0, 0, 0, 0
	for range jobs {
		wait.Go(func() {
			for {
				lock.Lock()
				if next == len(all) || n > 0 && tried >= n {
					lock.Unlock()
					return
				}
				m := all[next]
				next, tried = next+1, tried+1
				lock.Unlock()

				outcome, err := try(tests, m, timeout)
				lock.Lock()
				switch {
				case err != nil:
					fmt.Println(m.file, err)
					tried--
				case outcome == noBuild:
					tried-- // the compiler holds it
				case outcome == noticed:
					killed++
				case outcome == tooLong:
					killed++
					late++
					fmt.Printf("%s:%d: took too long: %s\n", m.file, m.line, m.what)
				default:
					fmt.Printf("%s:%d: %s\n", m.file, m.line, m.what)
				}
				lock.Unlock()
			}
		})
	}
	wait.Wait()
	fmt.Printf("%s: %d of %d mutations killed (%d %%), %d of them by the time limit of %s, %d places\n",
		dir, killed, tried, 100*killed/max(1, tried), late, timeout.Round(time.Second), len(all))
	return nil
}

// An outcome is what the tests made of a mutation.
type outcome int

const (
	survived outcome = iota
	noticed
	tooLong
	noBuild
)

// try runs the tests with one mutation.
func try(tests string, m mutation, timeout time.Duration) (outcome, error) {
	source, err := os.ReadFile(m.file)
	if err != nil {
		return survived, err
	}
	changed := slices.Concat(source[:m.start], []byte(m.text), source[m.end:])
	tmp, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return survived, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	mutant, overlay, binary := filepath.Join(tmp, "mutant.go"), filepath.Join(tmp, "overlay.json"), filepath.Join(tmp, "test")
	path, err := filepath.Abs(m.file)
	if err != nil {
		return survived, err
	}
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{path: mutant}})
	if err != nil {
		return survived, err
	}
	if err := os.WriteFile(mutant, changed, 0o600); err != nil {
		return survived, err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return survived, err
	}
	if _, err := build(tests, binary, "-overlay", overlay); err != nil {
		return noBuild, nil
	}
	outcome, _ := test(tests, binary, timeout)
	return outcome, nil
}

// build makes the tests of the package in dir, without the race detector.
func build(dir, binary string, flags ...string) (string, error) {
	args := append([]string{"test", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary}, flags...)
	out, err := exec.CommandContext(context.Background(), "go", append(args, "./"+filepath.Clean(dir))...).CombinedOutput()
	return string(out), err
}

// test runs tests in dir until one has failed.
func test(dir, binary string, timeout time.Duration) (outcome, string) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "-test.failfast", "-test.paniconexit0", "-test.parallel=8")
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what the tests start ends with them
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out := &failure{found: cancel}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	said := out.String()
	if i := strings.Index(said, failed); i > 0 { // what came before is of other tests
		said = said[i:]
	}
	switch {
	case err == nil:
		return survived, said
	case ctx.Err() == context.DeadlineExceeded:
		return tooLong, said
	}
	return noticed, said
}

// failed begins what a test prints that has failed.
const failed = "--- FAIL: "

// A failure is what tests print, up to the first that has failed.
type failure struct {
	bytes.Buffer
	found func()
}

func (f *failure) Write(p []byte) (int, error) {
	n, err := f.Buffer.Write(p)
	if bytes.Contains(p, []byte(failed)) {
		f.found()
	}
	return n, err
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
		add := func(start, end token.Pos, text, what string) {
			at := set.Position(start)
			all = append(all, mutation{
				file: name, line: at.Line, start: at.Offset, end: set.Position(end).Offset, text: text, what: what,
			})
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
	return strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && !strings.HasPrefix(name, "zz_generated")
}

// others are the operators that stand in for an operator.
var others = map[token.Token][]token.Token{
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL},
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.LAND: {token.LOR}, token.LOR: {token.LAND},
	token.ADD: {token.SUB}, token.SUB: {token.ADD}, token.MUL: {token.QUO}, token.QUO: {token.MUL},
}

// change adds the changes of one node.
func change(n ast.Node, text func(ast.Node) string, add func(start, end token.Pos, text, what string)) {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		for _, op := range others[n.Op] {
			what := fmt.Sprintf("%s became %s in: %s", n.Op, op, short(text(n)))
			add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), op.String(), what)
		}
		if n.Op == token.LAND || n.Op == token.LOR { // each side alone
			add(n.Pos(), n.End(), text(n.X), "only the left of: "+short(text(n)))
			add(n.Pos(), n.End(), text(n.Y), "only the right of: "+short(text(n)))
		}
	case *ast.UnaryExpr:
		if n.Op == token.NOT {
			add(n.Pos(), n.End(), text(n.X), "no ! in: "+short(text(n)))
		}
	case *ast.IfStmt:
		add(n.Cond.Pos(), n.Cond.End(), "!("+text(n.Cond)+")", "the opposite of: if "+short(text(n.Cond)))
	case *ast.Ident:
		if other := map[string]string{"true": "false", "false": "true"}[n.Name]; other != "" {
			add(n.Pos(), n.End(), other, n.Name+" became "+other)
		}
	case *ast.BasicLit:
		if number, err := strconv.ParseInt(n.Value, 0, 64); err == nil && n.Kind == token.INT {
			add(n.Pos(), n.End(), strconv.FormatInt(number+1, 10), fmt.Sprintf("%s became %d", n.Value, number+1))
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
func drop(list []ast.Stmt, text func(ast.Node) string, add func(start, end token.Pos, text, what string)) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.BranchStmt, *ast.DeferStmt, *ast.IfStmt, *ast.GoStmt, *ast.SendStmt:
		default:
			continue
		}
		if !logs(s) {
			add(s.Pos(), s.End(), "", "without: "+short(text(s)))
		}
	}
}

// logs reports whether code only logs, which is nobody's rule: a call of a logger, or the verbosity of one.
func logs(n ast.Node) bool {
	if s, is := n.(*ast.ExprStmt); is {
		n = s.X
	}
	call, is := n.(*ast.CallExpr)
	if !is {
		return false
	}
	method, is := call.Fun.(*ast.SelectorExpr)
	return is && (slices.Contains([]string{"Info", "V"}, method.Sel.Name) || method.Sel.Name == "Error" && len(call.Args) > 1)
}

// short is a piece of code on one line.
func short(code string) string {
	code = strings.Join(strings.Fields(code), " ")
	if len(code) > 90 {
		code = code[:90] + "…"
	}
	return code
}
