package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// leastTime is how long tests may take with a mutation in any case.
const leastTime = 20 * time.Second

// slow is from when on a test runs after the others.
const slow = 300 * time.Millisecond

// most is how many slow tests run together.
const most = 8

// A measured test is one that passes without a mutation.
type measured struct {
	name   string
	took   time.Duration
	blocks []block // what it reaches
}

// A group is tests that run together: their names, and how long they may take.
type group struct {
	tests   []string
	timeout time.Duration
}

// A place is a line and a column of a file, both from 1.
type place struct{ line, column int }

func (p place) before(q place) bool {
	return cmp.Or(cmp.Compare(p.line, q.line), cmp.Compare(p.column, q.column)) < 0
}

// A block is code of which all or nothing is reached.
type block struct {
	file     string // without folder
	from, to place
	reached  bool
}

func (b block) holds(file string, p place) bool {
	return b.file == file && !p.before(b.from) && p.before(b.to)
}

var line = regexp.MustCompile(`(?m)^(\S+):(\d+)\.(\d+),(\d+)\.(\d+) \d+ (\d+)$`)

// blocks reads a profile of go test -coverprofile.
func blocks(profile string) []block {
	var all []block
	for _, m := range line.FindAllStringSubmatch(profile, -1) {
		var n [5]int
		for i := range n {
			n[i], _ = strconv.Atoi(m[2+i])
		}
		all = append(all, block{filepath.Base(m[1]), place{n[0], n[1]}, place{n[2], n[3]}, n[4] > 0})
	}
	return all
}

// measure runs each test alone, and notes how long it takes and what it reaches, also in the
// processes that it starts.
func (j *judge) measure() error {
	cmd := exec.CommandContext(context.Background(), filepath.Join(j.tmp, "base"), "-test.list=^(Test|Fuzz|Example)")
	cmd.Dir = j.tests
	list, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("the tests in %s cannot be listed: %w", j.tests, err)
	}
	var wait sync.WaitGroup
	var one sync.Mutex
	room := make(chan struct{}, j.jobs)
	for name := range strings.FieldsSeq(string(list)) {
		room <- struct{}{}
		wait.Go(func() {
			defer func() { <-room }()
			profile := filepath.Join(j.tmp, name+".cover")
			began := time.Now()
			o, out := j.run("base", pattern(name), 0, maxTime, "-test.coverprofile="+profile)
			took := time.Since(began)
			text, err := os.ReadFile(profile)
			one.Lock()
			defer one.Unlock()
			if o != survived || err != nil {
				fmt.Printf("%s: %s fails without a mutation, and judges nothing: %s\n", j.tests, name, short(out))
				return
			}
			j.known = append(j.known, measured{name, took, blocks(string(text))})
		})
	}
	wait.Wait()
	if len(j.known) == 0 {
		return fmt.Errorf("no test in %s passes without a mutation", j.tests)
	}
	slices.SortFunc(j.known, func(a, b measured) int { return cmp.Compare(a.took, b.took) })
	return nil
}

// reach returns the tests that run the code of a mutation, the fastest first. Of code that is in no
// block, such as the condition of a case, it is known only which tests run its function; of a
// constant, nothing.
func (j *judge) reach(m mutation) []measured {
	file := filepath.Base(m.file)
	at := func(b block) bool { return b.holds(file, m.at) }
	if !slices.ContainsFunc(j.known[0].blocks, at) {
		at = func(b block) bool { return b.file == file && m.function.holds(file, b.from) }
	}
	if !slices.ContainsFunc(j.known[0].blocks, at) {
		return j.known
	}
	var all []measured
	for _, t := range j.known {
		if slices.ContainsFunc(t.blocks, func(b block) bool { return b.reached && at(b) }) {
			all = append(all, t)
		}
	}
	return all
}

// groups returns the quick tests together, and then the slow ones.
func groups(tests []measured) []group {
	var all []group
	i := slices.IndexFunc(tests, func(t measured) bool { return t.took >= slow })
	if i < 0 {
		i = len(tests)
	}
	parts := slices.Collect(slices.Chunk(tests[i:], most))
	if i > 0 {
		parts = slices.Insert(parts, 0, tests[:i])
	}
	for _, part := range parts {
		g := group{timeout: leastTime}
		for _, t := range part {
			g.tests = append(g.tests, t.name)
			g.timeout += 5 * t.took
		}
		all = append(all, g)
	}
	return all
}
