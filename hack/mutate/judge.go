package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// An outcome is what the tests made of a mutation.
type outcome int

const (
	survived  outcome = iota
	unreached         // no test runs its line
	noticed
	tooLong
	noBuild
)

// A judge runs the tests of a folder against mutations of a package.
type judge struct {
	dir, tests, tmp string
	jobs            int // how many tests run at a time
	known           []measured
}

// newJudge measures the tests without a mutation.
func newJudge(dir, tests, tmp string, jobs int) (*judge, error) {
	j := &judge{dir: dir, tests: tests, tmp: tmp, jobs: jobs}
	if out, err := j.build("base", nil, "-cover", "-coverpkg=./"+filepath.Clean(dir)); err != nil {
		return nil, fmt.Errorf("the tests in %s cannot be built: %s", tests, out)
	}
	if err := j.measure(); err != nil {
		return nil, err
	}
	return j, nil
}

// try tells the outcome of each mutation. Those that can be chosen at run time and do not overlap
// are built together.
func (j *judge) try(all []mutation, tell func(mutation, outcome)) error {
	var together, rest []mutation
	for _, m := range all {
		overlaps := func(o mutation) bool { return m.file == o.file && m.start < o.end && o.start < m.end }
		if m.chosen == nil || slices.ContainsFunc(together, overlaps) {
			rest = append(rest, m)
		} else {
			together = append(together, m)
		}
	}
	for len(together) > 0 {
		out, err := j.build("test", together)
		if err == nil {
			break
		}
		bad := j.blamed(together, out)
		if len(bad) == 0 { // it cannot be told which
			bad = together
		}
		for _, m := range bad {
			m.chosen = nil
			rest = append(rest, m)
		}
		together = slices.DeleteFunc(together, func(m mutation) bool { return slices.ContainsFunc(bad, m.same) })
	}
	var wait sync.WaitGroup
	var one sync.Mutex
	room := make(chan struct{}, j.jobs)
	for i, m := range together {
		room <- struct{}{}
		wait.Go(func() {
			defer func() { <-room }()
			o := j.test(i+1, m)
			one.Lock()
			defer one.Unlock()
			tell(m, o)
		})
	}
	wait.Wait()
	var again []mutation
	for _, m := range rest {
		if m.chosen != nil && len(rest) > 2 && len(together) > 0 {
			again = append(again, m)
			continue
		}
		m.chosen = nil
		if _, err := j.build("test", []mutation{m}); err != nil {
			tell(m, noBuild)
		} else {
			tell(m, j.test(1, m))
		}
	}
	if len(again) > 0 {
		return j.try(again, tell)
	}
	return nil
}

func (m mutation) same(o mutation) bool {
	return m.file == o.file && m.start == o.start && m.what == o.what
}

// chooser is added to a mutated package.
const chooser = `package %s

import (
	"os"
	"strconv"
)

var mutationOf, _ = strconv.Atoi(os.Getenv("MUTATION"))

func eitherOf(k int, a, b func() bool) bool {
	if k == mutationOf {
		return b()
	}
	return a()
}

func valueOf[T any](k int, a, b T) T {
	if k == mutationOf {
		return b
	}
	return a
}

var _, _ = eitherOf, valueOf[int]
`

// source is a file with mutations, and the lines of each in it.
func source(file string, all []mutation) (string, map[int][2]int, error) {
	code, err := os.ReadFile(file)
	if err != nil {
		return "", nil, err
	}
	var order []int
	for i, m := range all {
		if m.file == file {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return all[a].start - all[b].start })
	var b strings.Builder
	lines, at := map[int][2]int{}, 0
	for _, i := range order {
		m := all[i]
		b.Write(code[at:m.start])
		first := 1 + strings.Count(b.String(), "\n")
		if m.chosen != nil {
			b.WriteString(m.chosen(i + 1))
		} else {
			b.WriteString(m.text)
		}
		lines[i] = [2]int{first, 1 + strings.Count(b.String(), "\n")}
		at = m.end
	}
	b.Write(code[at:])
	return b.String(), lines, nil
}

var position = regexp.MustCompile(`(?m)^(?:vet: )?\S*?([^/\s]+\.go):(\d+):`)

// blamed returns the mutations at which the compiler found errors.
func (j *judge) blamed(all []mutation, said string) []mutation {
	var bad []mutation
	for _, at := range position.FindAllStringSubmatch(said, -1) {
		line, err := strconv.Atoi(at[2])
		if err != nil {
			continue
		}
		file := filepath.Join(j.dir, at[1])
		_, lines, err := source(file, all)
		if err != nil {
			continue
		}
		for i, l := range lines {
			if l[0] <= line && line <= l[1] && !slices.ContainsFunc(bad, all[i].same) {
				bad = append(bad, all[i])
			}
		}
	}
	return bad
}

// build makes the program of that name: the tests with mutations, without the race detector. It
// returns what the compiler said.
func (j *judge) build(name string, all []mutation, flags ...string) (string, error) {
	replace := map[string]string{}
	write := func(path, text string) error {
		full, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		replace[full] = filepath.Join(j.tmp, filepath.Base(path))
		return os.WriteFile(replace[full], []byte(text), 0o600)
	}
	for _, m := range all {
		text, _, err := source(m.file, all)
		if err == nil {
			err = write(m.file, text)
		}
		if err != nil {
			return "", err
		}
	}
	if len(all) > 0 {
		pkg, err := exec.CommandContext(context.Background(), "go", "list", "-f", "{{.Name}}",
			"./"+filepath.Clean(j.dir)).Output()
		if err != nil {
			return "", err
		}
		text := fmt.Sprintf(chooser, strings.TrimSpace(string(pkg)))
		if err := write(filepath.Join(j.dir, "zz_generated_mutation.go"), text); err != nil {
			return "", err
		}
	}
	overlay := filepath.Join(j.tmp, "overlay.json")
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return "", err
	}
	fixed := []string{"test", "-c", "-vet=off", "-gcflags=-e", "-ldflags=-s -w", "-o", filepath.Join(j.tmp, name),
		"-overlay", overlay}
	args := slices.Concat(fixed, flags, []string{"./" + filepath.Clean(j.tests)})
	out, err := exec.CommandContext(context.Background(), "go", args...).CombinedOutput()
	return string(out), err
}

var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+) \(`)

// test runs the tests that reach a mutation, which is the k-th of the last build.
func (j *judge) test(k int, m mutation) outcome {
	reach := j.reach(m)
	if len(reach) == 0 {
		return unreached
	}
	for _, g := range groups(reach) {
		names := pattern(g.tests...)
		o, out := j.run("test", names, k, g.timeout, "-test.failfast")
		for o == tooLong && j.busy(g) { // it says nothing
			g.timeout *= 2
			o, out = j.run("test", names, k, g.timeout, "-test.failfast")
		}
		if o == tooLong {
			return tooLong
		}
		which := failed.FindStringSubmatch(out)
		if o == noticed && which != nil { // else it ended by a panic
			o, _ = j.run("test", pattern(which[1]), k, g.timeout, "-test.failfast")
		}
		if o == survived && which != nil { // it failed by chance, or is one of chance
			o, _ = j.run("test", names, k, g.timeout, "-test.failfast")
		}
		if o != survived {
			return o
		}
	}
	return survived
}

// busy reports whether tests take too long without a mutation, too: other programs need the
// machine.
func (j *judge) busy(g group) bool {
	o, _ := j.run("base", pattern(g.tests...), 0, g.timeout, "-test.failfast")
	return o == tooLong
}

// pattern is the regular expression of tests.
func pattern(tests ...string) string { return "^(" + strings.Join(tests, "|") + ")$" }

// alone runs a program where it sees no process but its own: with a mutation it may send a signal
// to all that it sees.
var alone = func() []string {
	args := []string{"unshare", "--pid", "--fork", "--mount-proc", "--kill-child"}
	if os.Getuid() != 0 {
		args = append(args, "--map-current-user")
	}
	return append(args, "sh", "-c", `"$0" "$@"; exit $?`) // the first process there takes no signals
}()

// run runs tests of a program against the k-th mutation of its build, until one has failed. What
// the processes of the program base reach goes into one folder: without a folder, each of them
// complains at its end, and a test that reads what a process writes fails.
func (j *judge) run(program, tests string, k int, timeout time.Duration, flags ...string) (outcome, string) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	env := append(os.Environ(), "MUTATION="+strconv.Itoa(k))
	if program == "base" {
		folder, err := os.MkdirTemp(j.tmp, "covered")
		if err != nil {
			return noticed, err.Error()
		}
		flags, env = append(flags, "-test.gocoverdir="+folder), append(env, "GOCOVERDIR="+folder)
	}
	flags = append(flags, "-test.paniconexit0", "-test.parallel=8", "-test.run="+tests)
	args := slices.Concat(alone, []string{filepath.Join(j.tmp, program)}, flags)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = j.tests
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what the tests start ends with them
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out := &failure{found: cancel}
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	switch {
	case err == nil:
		return survived, out.String()
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return tooLong, out.String()
	}
	return noticed, out.String()
}

// A failure is what tests print; the first that has failed ends them.
type failure struct {
	bytes.Buffer
	found func()
}

func (f *failure) Write(p []byte) (int, error) {
	n, err := f.Buffer.Write(p)
	if bytes.Contains(f.Bytes(), []byte("\n--- FAIL: ")) || bytes.HasPrefix(f.Bytes(), []byte("--- FAIL: ")) {
		f.found()
	}
	return n, err
}
