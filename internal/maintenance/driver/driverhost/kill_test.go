package driverhost_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

// The process ends before and after each change of the disk and of the kernel, and with it the boot in
// every second case. The next process has one whole driver, the old or the new one, and brings the
// change to its end.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	swap := func(n *node) { n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}) }
	for name, tt := range map[string]struct {
		bare    bool // a node without a driver
		prepare func(n *node)
		story   func(n *node)
		end     driverapi.Step
	}{
		"swap":          {story: swap, end: driverapi.StepUnproven},
		"first install": {bare: true, story: swap, end: driverapi.StepUnproven},
		"services": {
			prepare: func(n *node) {
				n.kernel.Hold(900, "nvidia-persistenced", "nvidia-persistenced.service")
				n.kernel.Refresh()
			}, story: swap, end: driverapi.StepUnproven},
		"kernel that refuses": {
			prepare: func(n *node) { n.kernel.Refuse("nvidia_uvm="+newVersion, unix.ENODEV) },
			story:   swap, end: driverapi.StepFailed},
		"revert": {prepare: swap, story: func(n *node) {
			n.do(driverapi.CallRevert, driverapi.Arguments{Reason: "no CUDA"})
		}, end: driverapi.StepFailed},
		"next boot": {story: func(n *node) {
			if n.status().Change == nil {
				n.do(driverapi.CallNextBoot, driverapi.Arguments{Digest: n.new})
			}
			n.boot()
		}, end: driverapi.StepUnproven},
	} {
		for _, boots := range []bool{false, true} {
			t.Run(name+map[bool]string{false: "", true: " and boots"}[boots], func(t *testing.T) {
				t.Parallel()
				most := 200
				for at := 1; at < most; at++ {
					n := newNode(t)
					if n.start(); !tt.bare {
						n.swap(n.old)
					}
					if tt.prepare != nil {
						tt.prepare(n)
					}
					killed := n.killed(at, tt.story)
					n.step = nil
					if boots {
						n.boot()
					} else {
						n.start()
					}
					n.isWhole(tt.bare)
					if s := n.status(); s.Change == nil || s.Change.Step == driverapi.StepNextBoot {
						tt.story(n) // the call was lost, or its boot
					} else if s.Change.Step == driverapi.StepUnproven && tt.end == driverapi.StepFailed {
						tt.story(n)
					}
					if c := n.status().Change; c == nil || c.Step != tt.end {
						t.Fatalf("killed at step %d: the change is %+v, want %s", at, c, tt.end)
					}
					n.isWhole(tt.bare)
					if calls := n.kernel.Calls(); strings.LastIndex(calls, "systemctl stop") > strings.LastIndex(calls, "systemctl start") {
						t.Fatalf("killed at step %d: the services are not started: %s", at, calls)
					}
					if !killed {
						if at < 20 {
							t.Errorf("only %d steps: the process is not killed at each change", at)
						}
						return
					}
					if t.Failed() {
						t.Fatalf("killed at step %d", at)
					}
				}
				t.Fatalf("the story has more than %d steps", most)
			})
		}
	}
}

type kill struct{}

// killed runs a story in a new process, which ends at a step. It reports whether that step came.
func (n *node) killed(at int, story func(*node)) (killed bool) {
	n.Helper()
	return n.killedWhen(func(string) bool {
		at--
		return at == 0
	}, story)
}

func (n *node) killedWhen(is func(name string) bool, story func(*node)) (killed bool) {
	n.Helper()
	n.stop()
	n.step = func(name string) {
		if is(name) {
			panic(kill{})
		}
	}
	defer func() {
		if p := recover(); p != nil {
			if _, is := p.(kill); !is {
				panic(p)
			}
			killed = true
		}
	}()
	n.start()
	story(n)
	return false
}

// isWhole fails the test unless the node has one whole driver, or none if it may be bare.
func (n *node) isWhole(bare bool) {
	n.Helper()
	switch s := n.status(); {
	case s.Current == "" && bare && len(n.kernel.Modules()) == 0:
	case s.Current == n.old || s.Current == n.new:
		n.has(s.Current)
	default:
		n.Errorf("current is %q, loaded are %v", s.Current, n.kernel.Modules())
	}
}

// A process is killed between two modules, and a user comes before the next one starts: the user finds
// a whole driver, and the end of the change leaves it.
func TestUserAfterAKill(t *testing.T) {
	t.Parallel()
	n := newNode(t).withOld()
	unloads := 0
	if !n.killedWhen(func(name string) bool {
		if name == "before unload nvidia" {
			unloads++
		}
		return unloads > 0
	}, func(n *node) { n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new}) }) {
		t.Fatal("the process was not killed")
	}
	if left := n.kernel.Modules(); len(left) != 1 {
		t.Fatalf("loaded are %v, want nvidia alone", left)
	}
	n.step = nil
	n.kernel.Hold(77, "train", "user.slice")
	n.kernel.Refresh()
	n.start()
	n.isIn(driverapi.StepUnloading, "train (77)")
	n.has(n.old)
	n.do(driverapi.CallCancel, driverapi.Arguments{})
	n.has(n.old)
}

// No journal can be written for a while, from each write on: the node has a whole driver meanwhile, and
// the change comes to its end afterwards.
func TestFullDiskAtEachWrite(t *testing.T) {
	t.Parallel()
	for _, back := range []bool{false, true} {
		for at := 1; ; at++ {
			n := newNode(t).withOld()
			if back {
				n.do(driverapi.CallSwap, driverapi.Arguments{Digest: n.new})
			}
			journal := filepath.Join(n.directory, "change.json")
			left, isFull := at, false
			n.step = func(name string) {
				if name != "before the journal" || isFull {
					return
				}
				if left--; left == 0 { // a folder cannot be replaced by a file
					isFull = true
					if err := errors.Join(os.Rename(journal, journal+".old"), os.Mkdir(journal, 0o755)); err != nil {
						t.Error(err)
					}
				}
			}
			n.start()
			do := func() error {
				call, a := driverapi.CallSwap, driverapi.Arguments{Digest: n.new}
				if back {
					call, a = driverapi.CallRevert, driverapi.Arguments{Reason: "no CUDA"}
				}
				_, err := n.host.Call(t.Context(), call, a)
				n.drive()
				return err
			}
			err := do()
			n.isWhole(false)
			if isFull {
				if err := errors.Join(os.Remove(journal), os.Rename(journal+".old", journal)); err != nil {
					t.Fatal(err)
				}
				if n.drive(); err != nil {
					if err := do(); err != nil {
						t.Error(err)
					}
				}
			}
			want := driverapi.StepUnproven
			if back {
				want = driverapi.StepFailed
			}
			n.isWhole(false)
			if c := n.status().Change; c == nil || c.Step != want {
				t.Errorf("the change is %+v, want %s", c, want)
			}
			if t.Failed() {
				t.Fatalf("full at write %d", at)
			}
			if !isFull {
				if at < 3 {
					t.Errorf("only %d writes", at)
				}
				break
			}
		}
	}
}
