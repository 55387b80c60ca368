package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const subject = `package subject

const limit = 3

func Small(n int) bool {
	return n < limit
}

func Sign(n int) string {
	switch {
	case n < 0:
		return "-"
	}
	return "+"
}

func Nobody() bool {
	return true
}

func Elsewhere() int {
	return 5
}
`

// Each test writes down that it ran.
const itsTests = `package subject

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func ran(t *testing.T) {
	f, _ := os.OpenFile("ran", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	_, _ = f.WriteString(t.Name() + "\n")
	_ = f.Close()
}

func TestSmall(t *testing.T) {
	ran(t)
	if !Small(2) || Small(3) || Small(4) {
		t.Error("wrong")
	}
}

func TestSign(t *testing.T) {
	ran(t)
	if Sign(-1) != "-" {
		t.Error("wrong")
	}
}

func TestAlone(t *testing.T) {
	if others, _ := filepath.Glob("/proc/[0-9]*"); len(others) > 3 {
		t.Error("sees other processes:", others)
	}
}

func TestElsewhere(t *testing.T) {
	if os.Getenv("ELSEWHERE") != "" {
		if Elsewhere() != 5 {
			t.Error("wrong")
		}
		return
	}
	ran(t)
	c := exec.Command(os.Args[0], "-test.run=^TestElsewhere$", "-test.gocoverdir="+flag.Lookup("test.gocoverdir").Value.String())
	c.Env = append(os.Environ(), "ELSEWHERE=1")
	if err := c.Run(); err != nil {
		t.Error(err)
	}
}

func TestFails(t *testing.T) {
	Sign(1)
	Nobody()
	t.Error("always")
}
`

// TestOnlyTestsThatReachAPlaceJudge: a test runs for the changes of what it reaches, itself or in a
// process that it starts, and no test for those of what none reaches.
func TestOnlyTestsThatReachAPlaceJudge(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module subject\n", "subject.go": subject,
		"subject_test.go": itsTests} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	t.Setenv("GOFLAGS", "-mod=mod")
	all, err := mutations(".", regexp.MustCompile("."))
	if err != nil {
		t.Fatal(err)
	}
	j, err := newJudge(".", ".", t.TempDir(), 2)
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for i, t := range j.known {
		known = append(known, t.name)
		j.known[i].took = slow / 2 // a test that took longer, on a busy machine, would run after the others
	}
	slices.Sort(known)
	if d := cmp.Diff([]string{"TestAlone", "TestElsewhere", "TestSign", "TestSmall"}, known); d != "" {
		t.Error("tests that judge:", d)
	}
	for what, want := range map[string]string{
		"< became <= in: n < limit": "noticed by TestSmall TestSmall", // twice, because a failure may be one of chance
		"0 became 1":                "survived TestSign",              // the condition of a case is in no block
		"3 became 4":                "noticed by TestSmall TestSmall",
		"true became false":         "unreached",
		"< became >= in: n < 0":     "noticed by TestSign TestSign",
		"5 became 6":                "noticed by TestElsewhere TestElsewhere", // in a process of its own
	} {
		_ = os.Remove("ran")
		got := ""
		i := slices.IndexFunc(all, func(m mutation) bool { return m.what == what })
		if i < 0 {
			t.Fatalf("%s: is not tried", what)
		}
		err := j.try(all[i:i+1], func(_ mutation, o outcome) {
			got = map[outcome]string{survived: "survived", unreached: "unreached", noticed: "noticed by", tooLong: "too long",
				noBuild: "no build"}[o]
		})
		if err != nil {
			t.Fatal(err)
		}
		ran, _ := os.ReadFile("ran")
		names := strings.Fields(string(ran))
		slices.Sort(names)
		if got := strings.Join(append([]string{got}, names...), " "); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
}

// TestGroups: quick tests run together and first, slow ones some at a time, each group five times
// as long as it took.
func TestGroups(t *testing.T) {
	tests := []measured{{name: "A", took: slow / 3}, {name: "B", took: slow / 3}}
	tests = append(tests, slices.Repeat([]measured{{name: "S", took: time.Second}}, most+1)...)
	got := groups(tests)
	want := []group{
		{[]string{"A", "B"}, leastTime + 10*slow/3},
		{slices.Repeat([]string{"S"}, most), leastTime + 5*most*time.Second},
		{[]string{"S"}, leastTime + 5*time.Second},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(group{})); d != "" {
		t.Error(d)
	}
}
