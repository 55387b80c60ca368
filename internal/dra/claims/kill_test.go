package claims_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The variables of a process that is to be killed: the folder of its rig, what it does, and at
// which step it is killed.
const (
	killFolder = "TEST_CLAIMS_FOLDER"
	killCall   = "TEST_CLAIMS_CALL"
	killStep   = "TEST_CLAIMS_STEP"
)

// calls are the calls of kubelet's that are killed, by name.
var calls = map[string]func(context.Context, *claims.Claims) error{
	"Prepare": func(ctx context.Context, c *claims.Claims) error {
		_, err := ask(ctx, c, shared("uid-1", gpuA, migB0))
		return err
	},
	"Unprepare": func(ctx context.Context, c *claims.Claims) error {
		return c.Unprepare(ctx, "uid-1", "default", "claim-uid-1")
	},
}

// madeClaim is a claim for which a MIG device is made, shared by MPS if the call says so.
func madeClaim(call string) dra.Claim {
	switch {
	case strings.Contains(call, "whole"):
		return claim("uid-1", gpuB)
	case strings.Contains(call, "MPS"):
		return byMPS("uid-1", `"defaultActiveThreadPercentage":50`, half0)
	}
	return claim("uid-1", half0)
}

// madeCalls are the calls for such claims.
var madeCalls = []string{
	"Prepare of a MIG device that is made", "Unprepare of a MIG device that is made",
	"Prepare of a MIG device that is made, with MPS", "Unprepare of a MIG device that is made, with MPS",
}

// shareCalls are those for a share of a GPU that is used by MPS.
var shareCalls = map[string]func(context.Context, *claims.Claims) error{
	"Prepare of a share": func(ctx context.Context, c *claims.Claims) error {
		_, err := ask(ctx, c, partByMPS("uid-1", 40))
		return err
	},
	"Unprepare of a share": calls["Unprepare"],
}

// TestKilledAtEachWrite kills a process with SIGKILL before, in and after each change that it makes
// of a file. Whatever it leaves, there is no CDI spec without a record, no other claim gets a GPU
// that is recorded, and kubelet's next call succeeds and leaves nothing behind.
func TestKilledAtEachWrite(t *testing.T) {
	t.Parallel()
	if os.Getenv(killFolder) != "" {
		dieAtStep(t)
		return
	}
	killedWhileDividing(t)
	killedWhileSwitching(t)
	killedWhileSharing(t)
	for name := range calls {
		for _, before := range []string{"nothing", "prepared", "prepared before a restart of the node"} {
			t.Run(name+" after "+before, func(t *testing.T) {
				t.Parallel()
				for step := 1; ; step++ {
					dir := t.TempDir()
					if before != "nothing" {
						r := killRig(t, dir)
						if before != "prepared" {
							r.options.BootID = "zero"
						}
						c, stop := r.start()
						r.prepare(c, shared("uid-1", gpuA, migB0))
						stop()
						if before != "prepared" {
							_ = os.Remove(filepath.Join(dir, "GPU-a.slice")) // the driver forgets it
						}
					}
					if !killed(t, dir, name, step) {
						if step < 3 {
							t.Errorf("the call has %d steps", step-1)
						}
						return
					}
					recovers(t, dir, fmt.Sprintf("%s, killed at step %d", name, step))
				}
			})
		}
	}
}

// killedWhileDividing does so with a MIG device that is made for the claim: the instance that
// another program made always stays.
func killedWhileDividing(t *testing.T) {
	for _, name := range madeCalls {
		for _, then := range []string{"given back", "retried", "another program is faster"} {
			if then == "another program is faster" && strings.Contains(name, "MPS") {
				continue // of which no control daemon knows
			}
			t.Run(name+", "+then, func(t *testing.T) {
				t.Parallel()
				for step := 1; ; step++ {
					dir := t.TempDir()
					r := killRig(t, dir)
					r.divide().other("1g.10gb", 6, 1)
					if strings.HasPrefix(name, "Unprepare") {
						c, stop := r.start()
						r.prepare(c, madeClaim(name))
						stop()
					}
					if !killed(t, dir, name, step) {
						if step < 6 {
							t.Errorf("the call has %d steps", step-1)
						}
						return
					}
					madeRecovers(t, dir, fmt.Sprintf("%s, killed at step %d", name, step), madeClaim(name), then)
				}
			})
		}
	}
}

// killedWhileSharing does so with a share of a GPU, alone and beside that of another claim: the
// daemon of both is there as long as one needs it.
func killedWhileSharing(t *testing.T) {
	for name := range shareCalls {
		for _, beside := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, another one %v", name, beside), func(t *testing.T) {
				t.Parallel()
				for step := 1; ; step++ {
					dir := t.TempDir()
					r := killRig(t, dir)
					c, stop := r.start()
					for uid, before := range map[string]bool{"uid-1": strings.HasPrefix(name, "Unprepare"), "uid-2": beside} {
						if !before {
							continue
						}
						r.prepare(c, partByMPS(uid, 40))
					}
					stop()
					if !killed(t, dir, name, step) {
						if step < 4 {
							t.Errorf("the call has %d steps", step-1)
						}
						return
					}
					shareRecovers(t, dir, fmt.Sprintf("%s, killed at step %d", name, step), beside)
				}
			})
		}
	}
}

// shareRecovers is recovers for a share.
func shareRecovers(t *testing.T, dir, what string, beside bool) {
	t.Helper()
	const daemon = "gpu.GPU-a"
	r := killRig(t, dir)
	if r.spec("uid-1") != nil && r.record("uid-1") == "" {
		t.Errorf("%s: there is a CDI spec without a record", what)
	}
	recorded := r.record("uid-1") != ""
	c, _ := r.start()
	if beside && (r.mps()[daemon] == "" || r.record("uid-2") == "") {
		t.Errorf("%s: the daemon of another claim has ended: %v", what, r.mps())
	}
	if _, err := ask(t.Context(), c, claim("whole", gpuA)); (err == nil) == (recorded || beside) ||
		err == nil && len(r.mps()) > 0 {
		t.Errorf("%s: recorded %v, another share %v, and the whole GPU: %v, with daemons %v", what, recorded, beside, err,
			r.mps())
	}
	r.unprepare(c, "whole")
	if _, err := ask(t.Context(), c, partByMPS("uid-1", 40)); err != nil || r.mps()[daemon] == "" ||
		r.spec("uid-1") == nil {
		t.Errorf("%s: the next Prepare: %v, daemons %v", what, err, r.mps())
	}
	r.unprepare(c, "uid-1")
	if (r.mps()[daemon] != "") != beside || r.record("uid-1") != "" || r.spec("uid-1") != nil {
		t.Errorf("%s: left after Unprepare: record %q, spec %v, daemons %v", what, r.record("uid-1"), r.spec("uid-1"),
			r.mps())
	}
}

// killed has a process make a call that is killed at a step, and reports whether it got there.
func killed(t *testing.T, dir, call string, step int) bool {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledAtEachWrite$")
	c.Env = append(os.Environ(), killFolder+"="+dir, killCall+"="+call, killStep+"="+strconv.Itoa(step))
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return false
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		return true
	}
	t.Fatalf("%s, to be killed at step %d: %v: %s", call, step, err, out)
	return false
}

// killRig is a rig whose containers get metadata files, which are written and removed, too.
func killRig(t *testing.T, dir string) *rig {
	t.Helper()
	r := newRigAt(t, dir)
	r.withMetadata(true)
	return r
}

// dieAtStep is the process that is killed.
func dieAtStep(t *testing.T) {
	last, err := strconv.Atoi(os.Getenv(killStep))
	if err != nil {
		t.Fatal(err)
	}
	r := killRig(t, os.Getenv(killFolder))
	name := os.Getenv(killCall)
	call := calls[name]
	if call == nil {
		call = shareCalls[name]
	}
	if call == nil {
		if strings.Contains(name, "switched") {
			r.switching().inUse = strings.Contains(name, "again")
		} else {
			r.divide()
		}
		if call = calls["Unprepare"]; strings.HasPrefix(name, "Prepare") {
			call = func(ctx context.Context, c *claims.Claims) error {
				_, err := ask(ctx, c, madeClaim(name))
				return err
			}
		}
	}
	c := claims.New(r.options)
	var armed atomic.Bool
	var steps atomic.Int32
	c.AtEachStep(func() {
		if armed.Load() && int(steps.Add(1)) == last {
			if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
				t.Error(err)
			}
			select {}
		}
	})
	r.run(c)
	armed.Store(true)
	if err := call(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// recovers looks at what a killed process has left, and goes on as kubelet does.
func recovers(t *testing.T, dir, what string) {
	t.Helper()
	r := killRig(t, dir)
	recorded := strings.Contains(r.record("uid-1"), `"boot":"one"`)
	if r.spec("uid-1") != nil && r.record("uid-1") == "" {
		t.Errorf("%s: there is a CDI spec without a record", what)
	}
	c, _ := r.start()
	if has := len(c.InUse().Value()["GPU-a"]) > 0; has != (r.record("uid-1") != "") {
		t.Errorf("%s: in use %v", what, c.InUse().Value())
	}
	if released := strings.Contains(r.record("uid-1"), `"released":true`); recorded && !released &&
		r.spec("uid-1") == nil {
		t.Errorf("%s: the CDI spec of a recorded claim was not restored", what)
	}
	other := claim("uid-2", gpuA, migB0)
	if _, err := ask(t.Context(), c, other); (err == nil) == recorded ||
		err == nil && (r.slice("GPU-a") != "0" || len(r.mps()) > 0) {
		t.Errorf("%s: recorded %v, and another claim: %v, with time slice %s and daemons %v", what, recorded, err,
			r.slice("GPU-a"), r.mps())
	}
	if err := c.Unprepare(t.Context(), other.UID, other.Namespace, other.Name); err != nil {
		t.Fatal(err)
	}
	answer, err := ask(t.Context(), c, shared("uid-1", gpuA, migB0))
	if err != nil || r.slice("GPU-a") != "3" || r.mps()["uid-1-1"] == "" {
		t.Fatalf("%s: the next Prepare: %v, with time slice %s and daemons %v", what, err, r.slice("GPU-a"), r.mps())
	}
	r.nodes(ids(answer)...)
	if _, err := ask(t.Context(), c, other); err == nil {
		t.Errorf("%s: another claim got the GPU", what)
	}
	if err := calls["Unprepare"](t.Context(), c); err != nil {
		t.Fatalf("%s: the next Unprepare: %v", what, err)
	}
	if r.record("uid-1") != "" || r.spec("uid-1") != nil || r.slice("GPU-a") != "0" || len(r.mps())+len(r.metadata()) > 0 {
		t.Errorf("%s: left after Unprepare: record %q, spec %v, daemons %v, metadata %v", what, r.record("uid-1"),
			r.spec("uid-1"), r.mps(), r.metadata())
	}
	if _, err := ask(t.Context(), c, other); err != nil {
		t.Errorf("%s: after Unprepare another claim: %v", what, err)
	}
}
