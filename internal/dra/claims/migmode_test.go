package claims_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A switched is a rig whose GPU-b changes its MIG mode for claims.
type switched struct {
	*rig
	*divider
	c    *claims.Claims
	stop func()
}

func newSwitched(t *testing.T) *switched {
	t.Helper()
	r := newRig(t)
	s := &switched{rig: r, divider: r.switching()}
	s.c, s.stop = r.start()
	return s
}

// again is the next process.
func (s *switched) again() {
	s.tb.Helper()
	s.stop()
	s.c, s.stop = s.rig.start()
}

// refused has a claim that must be refused, and leaves no record.
func (s *switched) refused(want string, wanted dra.Claim) {
	s.tb.Helper()
	if _, err := ask(s.tb.Context(), s.c, wanted); err == nil || !strings.Contains(err.Error(), want) {
		s.tb.Errorf("%s: error %v, want %q", wanted.UID, err, want)
	}
	if r := s.record(wanted.UID); r != "" {
		s.tb.Errorf("%s was refused, and has the record %s", wanted.UID, r)
	}
}

// is holds the GPU to its mode and its instances, and no mode to be pending.
func (s *switched) is(when string, mode inventory.MIGMode, instances string) {
	s.tb.Helper()
	now, err := s.Partitions(s.tb.Context(), "GPU-b")
	if has := s.has(); err != nil || now.Mode != mode || now.Pending != mode || has != instances {
		s.tb.Errorf("%s: the mode is %s, %s is pending, and the GPU has %q; want %s and %q (%v)", when, now.Mode, now.Pending,
			has, mode, instances, err)
	}
}

// TestSwitchedMode: one GPU is given as a whole or in parts. Its mode follows the claims, and is
// off when there are none; the next process goes on with that.
func TestSwitchedMode(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	for range 2 {
		s.prepare(s.c, claim("small", small0))
		s.is("a small one", inventory.MIGEnabled, "1g.10gb@0/1")
		s.refused("is in use by the claim default/claim-small", claim("whole", gpuB))
		s.prepare(s.c, claim("half", half4))
		s.unprepare(s.c, "small")
		s.is("one that goes on", inventory.MIGEnabled, "3g.40gb@4/1")
		s.again()
		s.refused("is in use by the claim default/claim-half", claim("whole", gpuB))
		s.unprepare(s.c, "half")
		s.is("none", inventory.MIGDisabled, "")

		given, err := ask(t.Context(), s.c, claim("whole", gpuB))
		if err != nil {
			t.Fatal(err)
		}
		if nodes := s.nodes(ids(given)...); nodes != "nvidia1 nvidiactl nvidia-uvm" && !strings.HasPrefix(nodes, "nvidia1") ||
			strings.Contains(nodes, "caps") {
			t.Errorf("the whole GPU has the device nodes %s", nodes)
		}
		s.refused("is in use by the claim default/claim-whole", claim("small", small0))
		steps := s.steps
		s.again()
		s.prepare(s.c, claim("whole", gpuB))
		s.unprepare(s.c, "whole")
		if s.is("the whole, given back", inventory.MIGDisabled, ""); s.steps != steps {
			t.Errorf("%d steps for a GPU whose mode is off", s.steps-steps)
		}
	}
}

// TestModeThatWasOn: the whole GPU is given also where something else has left MIG mode on, unless
// that has made an instance. adminAccess changes nothing.
func TestModeThatWasOn(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	if err := s.turn(inventory.MIGEnabled); err != nil {
		t.Fatal(err)
	}
	for _, seen := range []bool{false, true} {
		if seen {
			s.show()
		}
		s.other("1g.10gb", 3, 1)
		s.refused("blocks gpu-1, and does not belong to a claim", claim("whole", gpuB))
		s.write(nil)
		if admin := claim("admin", gpuB); seen {
			admin.Results[0].AdminAccess = true
			s.refused("no longer exists", admin)
		}
		s.set(func() { s.processes = []inventory.Process{{PID: 77}} })
		s.refused("the MIG mode of GPU GPU-b cannot change while process 77 uses the GPU", claim("whole", gpuB))
		s.is("in use", inventory.MIGEnabled, "")
		s.set(func() { s.processes, s.inUse = nil, true })
		s.refused("cannot switch the MIG mode of the GPU off:  ", claim("whole", gpuB))
		s.is("in use by something that the driver does not show", inventory.MIGEnabled, "")
		s.set(func() { s.inUse = false })
		s.prepare(s.c, claim("whole", gpuB))
		s.is("the whole", inventory.MIGDisabled, "")
		s.unprepare(s.c, "whole")
		if err := s.turn(inventory.MIGEnabled); err != nil {
			t.Fatal(err)
		}
	}
	s.prepare(s.c, claim("small", small0))
	s.other("1g.10gb", 3, 1)
	s.unprepare(s.c, "small")
	s.is("another program's instance", inventory.MIGEnabled, "1g.10gb@3/0")
	if r := s.record("small"); r != "" {
		t.Errorf("the claim has the record %s", r)
	}
}

// TestModeInUse: the mode of a GPU that is in use is never changed. A claim waits for it, and can
// end without it; what ended keeps no claim waiting, but the GPU from the device plugin.
func TestModeInUse(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	s.set(func() { s.processes = []inventory.Process{{PID: 77}} })
	s.refused("the MIG mode of GPU GPU-b cannot change while process 77 uses the GPU", claim("small", small0))
	s.set(func() { s.processes, s.inUse = nil, true })
	s.refused("cannot create the MIG devices of the claim: ", claim("small", small0))
	s.is("in use", inventory.MIGDisabled, "")
	s.set(func() { s.inUse = false })
	s.prepare(s.c, claim("small", small0))

	s.set(func() { s.inUse = true })
	s.unprepare(s.c, "small")
	s.is("given back", inventory.MIGEnabled, "")
	left := func(want string) {
		t.Helper()
		if got := released(s.c); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("the status says %q, want %q", got, want)
		}
		if held := len(s.c.InUse().Value()["GPU-b"]) > 0; want != "" && !held {
			t.Error("the device plugin can have a GPU whose MIG mode is on still")
		}
	}
	left("small: ")
	if release, err := s.c.Reserve(t.Context(), "GPU-b", "GPU-b"); err != nil {
		t.Errorf("a GPU that no claim has is not reserved: %v", err)
	} else {
		release()
	}
	s.again()
	s.refused("cannot switch the MIG mode of the GPU off:  ", claim("whole", gpuB))
	s.prepare(s.c, claim("next", small0)) // at the same place
	s.is("the next one", inventory.MIGEnabled, "1g.10gb@0/1")
	s.c.RetryReleases(t.Context()) // the next one has the mode now
	left("")
	s.is("the next one, later", inventory.MIGEnabled, "1g.10gb@0/1")
	s.unprepare(s.c, "next")
	left("next: ")
	s.set(func() { s.inUse = false })
	s.prepare(s.c, claim("whole", gpuB))
	s.is("the whole", inventory.MIGDisabled, "")
	s.c.RetryReleases(t.Context())
	left("")
	s.unprepare(s.c, "whole")

	s.prepare(s.c, claim("last", half0))
	s.set(func() { s.inUse = true })
	s.unprepare(s.c, "last")
	s.set(func() { s.inUse = false })
	s.c.RetryReleases(t.Context())
	left("")
	s.is("the last one", inventory.MIGDisabled, "")
}

// TestTheSameClaimAgain: a claim that was given back while something keeps the MIG mode from being
// switched off is prepared again as another claim would be, with devices of that GPU and of another
// one. The mode is off when it can be.
func TestTheSameClaimAgain(t *testing.T) {
	t.Parallel()
	for _, again := range []string{small0, half4, gpuC, gpuB} {
		s := newSwitched(t)
		for range 2 {
			s.prepare(s.c, claim("one", small0))
			s.set(func() { s.inUse = true })
			s.unprepare(s.c, "one")
		}
		given, err := ask(t.Context(), s.c, claim("one", again))
		if whole := again == gpuB; (err == nil) == whole || whole &&
			!strings.Contains(err.Error(), "cannot switch the MIG mode of the GPU off:  ") {
			t.Errorf("%s: %v", again, err)
		}
		if s.nodes(ids(given)...); len(s.c.InUse().Value()["GPU-b"]) == 0 {
			t.Errorf("%s: the device plugin can have a GPU whose MIG mode is on still", again)
		}
		s.again()
		s.unprepare(s.c, "one")
		s.is(again+", given back", inventory.MIGEnabled, "")
		s.set(func() { s.inUse = false })
		s.c.RetryReleases(t.Context())
		s.is(again+", at last", inventory.MIGDisabled, "")
		if left := files(t, filepath.Join(s.options.StateDir, "claims")); len(left) > 0 {
			t.Errorf("%s: left are %q", again, left)
		}
	}
}

// TestSwitchingIsTurnedOff while claims have MIG devices: the mode is off after the last one. A
// restart of the node has switched it off.
func TestSwitchingIsTurnedOff(t *testing.T) {
	t.Parallel()
	for _, boot := range []string{"one", "two"} {
		s := newSwitched(t)
		s.prepare(s.c, claim("small", small0))
		s.prepare(s.c, claim("half", half4))
		configured := s.configs.Value()
		configured.DRA = s.rig.configs.Value().DRA
		configured.DRA.SwitchMIG, configured.DRA.DynamicMIG = false, false
		s.configs.Publish(configured)
		s.options.BootID = boot
		s.again()
		steps := s.steps
		s.unprepare(s.c, "small")
		s.unprepare(s.c, "half")
		if boot == "one" {
			s.is("turned off", inventory.MIGDisabled, "")
		} else if s.steps != steps || s.record("small")+s.record("half") != "" {
			t.Errorf("after a restart of the node: %d steps, records %q %q", s.steps-steps, s.record("small"), s.record("half"))
		}
	}
}

// TestStepsThatFail: where the mode was switched, and the MIG device cannot be made, the mode is
// off again.
func TestStepsThatFail(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	s.makes = func() { s.set(func() { s.step = errors.New("no") }) }
	if _, err := ask(t.Context(), s.c, claim("small", small0)); err == nil {
		t.Error("a MIG device is made that cannot be")
	}
	s.makes = nil
	s.set(func() { s.step = nil })
	s.unprepare(s.c, "small")
	s.is("it failed", inventory.MIGDisabled, "")
	s.prepare(s.c, claim("whole", gpuB))
}

// TestSwitchWithoutAnswer: a switch of the mode that gives no answer has happened or has not.
// Whichever it is, the next call for the claim goes on, a pod can end, and other claims get the
// GPU; in the end the mode is off and no record is left.
func TestSwitchWithoutAnswer(t *testing.T) {
	t.Parallel()
	for _, lost := range []bool{false, true} {
		for _, then := range []string{"again", "given back"} {
			s := newSwitched(t)
			when := fmt.Sprintf("lost %v, %s", lost, then)
			silent := func(err error) { s.set(func() { s.silent, s.lost = err, lost }) }
			silent(inventory.ErrNoAnswer)
			if _, err := ask(t.Context(), s.c, claim("one", small0)); err == nil {
				t.Errorf("%s: a claim is prepared without an answer of the driver", when)
			}
			if len(s.c.InUse().Value()["GPU-b"]) == 0 {
				t.Errorf("%s: the device plugin can have a GPU whose MIG mode may be on", when)
			}
			if then == "again" {
				silent(nil)
				s.prepare(s.c, claim("one", small0))
				s.prepare(s.c, claim("two", half4))
				s.unprepare(s.c, "two")
				silent(inventory.ErrNoAnswer)
			}
			s.unprepare(s.c, "one")
			silent(nil)
			s.prepare(s.c, claim("next", small0))
			s.unprepare(s.c, "next")
			s.c.RetryReleases(t.Context())
			s.is(when, inventory.MIGDisabled, "")

			if err := s.turn(inventory.MIGEnabled); err != nil {
				t.Fatal(err)
			}
			silent(inventory.ErrNoAnswer)
			if _, err := ask(t.Context(), s.c, claim("whole", gpuB)); err == nil {
				t.Errorf("%s: the whole GPU is given without an answer of the driver", when)
			}
			if silent(nil); then == "again" {
				s.prepare(s.c, claim("whole", gpuB))
				s.is(when+", the whole", inventory.MIGDisabled, "")
			}
			s.unprepare(s.c, "whole")
			s.prepare(s.c, claim("last", small0))
			s.unprepare(s.c, "last")
			s.is(when+", at last", inventory.MIGDisabled, "")
			if left := files(t, filepath.Join(s.options.StateDir, "claims")); len(left) > 0 {
				t.Errorf("%s: left are %q", when, left)
			}
		}
	}
}

// TestSwitchedAtOnce: of claims with the whole GPU and with parts of it, those that have it at a
// time go together.
func TestSwitchedAtOnce(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	var kubelet sync.WaitGroup
	for _, device := range []string{small0, small1, half4, gpuB} {
		kubelet.Go(func() {
			for i := range 8 {
				uid := device + "-" + string(rune('a'+i))
				_, err := ask(t.Context(), s.c, claim(uid, device))
				now, problem := s.Partitions(t.Context(), "GPU-b")
				if whole := device == gpuB; err == nil && (problem != nil || (now.Mode == inventory.MIGDisabled) != whole ||
					whole && s.has() != "") {
					t.Errorf("%s is prepared, and MIG mode is %s, with %q", uid, now.Mode, s.has())
				}
				if err != nil && !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("%s: %v", uid, err)
				}
				if err := s.c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
		})
	}
	kubelet.Wait()
	s.is("at last", inventory.MIGDisabled, "")
}

// TestSwitchedDivisions: the GPU is published in both ways whichever mode it has; one that needs a
// reset in one way, with the reason.
func TestSwitchedDivisions(t *testing.T) {
	t.Parallel()
	s := newSwitched(t)
	s.options.Divisions = feed.New(dra.Divisions(nil))
	is := func(when string, want dra.Divided) {
		t.Helper()
		divisions, err := claims.New(s.options).Divisions(t.Context(), s.snapshots.Value())
		if got := divisions["GPU-b"]; err != nil || got.Switched != want.Switched || got.Fixed != want.Fixed {
			t.Errorf("%s: %+v, %v, want %+v", when, got, err, want)
		}
	}
	is("off", dra.Divided{Switched: true})
	s.prepare(s.c, claim("small", small0))
	is("on", dra.Divided{Switched: true})
	s.unprepare(s.c, "small")
	s.set(func() { s.switches, s.divider.mode = false, inventory.MIGDisabled })
	s.show()
	is("a GPU that needs a reset", dra.Divided{Fixed: "MIG mode is off, and switching it on needs a reset of the GPU"})
	s.set(func() { s.divider.mode = inventory.MIGEnabled })
	s.show()
	is("a GPU that needs a reset, in MIG mode", dra.Divided{})
}

// killedWhileSwitching kills a process at each step of a call that switches MIG mode.
func killedWhileSwitching(t *testing.T) {
	for _, name := range []string{
		"Prepare of a switched MIG device", "Unprepare of a switched MIG device", "Prepare of a switched whole GPU", "Prepare of a switched MIG device again",
	} {
		for _, then := range []string{"given back", "retried"} {
			t.Run(name+", "+then, func(t *testing.T) {
				t.Parallel()
				for step := 1; ; step++ {
					dir := t.TempDir()
					r := killRig(t, dir)
					d := r.switching()
					if again := strings.Contains(name, "again"); again || strings.HasPrefix(name, "Unprepare") {
						c, stop := r.start()
						if r.prepare(c, madeClaim(name)); again { // the mode cannot be switched off
							d.set(func() { d.inUse = true })
							r.unprepare(c, "uid-1")
						}
						stop()
					}
					if strings.Contains(name, "whole") { // something else has left the mode on
						if err := os.WriteFile(d.path()+".mig", nil, 0o600); err != nil {
							t.Fatal(err)
						}
					}
					if !killed(t, dir, name, step) {
						if step < 6 {
							t.Errorf("the call has %d steps", step-1)
						}
						return
					}
					switchRecovers(t, dir, name, then, step)
				}
			})
		}
	}
}

// switchRecovers is recovers for a claim for which MIG mode is switched.
func switchRecovers(t *testing.T, dir, name, then string, step int) {
	t.Helper()
	r := newRigAt(t, dir)
	s := &switched{rig: r, divider: r.switching()}
	folder := filepath.Join(r.options.StateDir, "claims")
	recorded := len(files(t, folder)) > 0
	whole := strings.Contains(name, "whole")
	if now := s.now(); now == inventory.MIGEnabled && !recorded && !whole {
		t.Errorf("%s, killed at step %d: MIG mode is on, and nothing is recorded", name, step)
	}
	s.c, s.stop = r.start()
	if then == "retried" {
		answer, err := ask(t.Context(), s.c, madeClaim(name))
		if err != nil {
			t.Fatalf("%s, killed at step %d: the next Prepare: %v", name, step, err)
		}
		r.nodes(ids(answer)...)
		if whole {
			s.is("retried", inventory.MIGDisabled, "")
		} else {
			s.is("retried", inventory.MIGEnabled, "3g.40gb@0/1")
		}
	}
	r.unprepare(s.c, "uid-1")
	if s.c.RetryReleases(t.Context()); !whole {
		s.is(name+" and given back", inventory.MIGDisabled, "")
	}
	left := slices.DeleteFunc(files(t, folder), func(name string) bool { return strings.HasSuffix(name, ".tmp") })
	if len(left) > 0 || r.spec("uid-1") != nil {
		t.Errorf("%s, killed at step %d: left are records %q and spec %v", name, step, left, r.spec("uid-1"))
	}
	r.prepare(s.c, claim("whole", gpuB))
	s.is("the whole", inventory.MIGDisabled, "")
}
