package claims_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestMadeDevices: a MIG device is made for a claim, given to it alone, and destroyed with it. What
// another program made stays.
func TestMadeDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	prepare := func(uid string, devices ...string) ([]dra.Prepared, error) {
		return ask(t.Context(), c, claim(uid, devices...))
	}
	unprepare := func(uid string) error { return c.Unprepare(t.Context(), uid, "default", "claim-"+uid) }
	refused := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	d.other("1g.10gb", 3, 1)
	first, err := prepare("uid-1", small0, half4)
	if err != nil {
		t.Fatal(err)
	}
	if has := d.has(); has != "1g.10gb@0/1 1g.10gb@3/0 3g.40gb@4/1" {
		t.Errorf("the GPU has %s", has)
	}
	nodes := r.nodes(ids(first)...)
	steps := d.steps
	if again, err := prepare("uid-1", small0, half4); err != nil || text(t, again) != text(t, first) || d.steps != steps {
		t.Errorf("once more: %v, %v, %d steps", again, err, d.steps-steps)
	}
	if holders := c.InUse().Value()["GPU-b"]; len(holders) != 2 || holders[0].Device == "" {
		t.Errorf("in use: %+v", holders)
	}

	_, err = prepare("uid-2", small0)
	refused("is in use by the claim default/claim-uid-1", err)
	_, err = prepare("uid-2", half0)
	refused("is in use by the claim default/claim-uid-1", err)
	admin := claim("uid-admin", half4)
	admin.Results[0].AdminAccess = true
	if seen, err := ask(t.Context(), c, admin); err != nil ||
		!strings.Contains(nodes, strings.TrimPrefix(r.nodes(ids(seen)...), "nvidia1 ")) {
		t.Errorf("a claim with adminAccess: %v", err)
	}
	if err := unprepare("uid-admin"); err != nil || d.steps != steps {
		t.Errorf("a claim with adminAccess, given back: %v, %d steps", err, d.steps-steps)
	}
	admin.Results[0].Device = small1
	_, err = ask(t.Context(), c, admin)
	refused("adminAccess creates none", err)

	d.busy(true)
	refused("is still in use", unprepare("uid-1"))
	if left := released(c); !strings.Contains(left, "uid-1: destroy: ") {
		t.Errorf("the status says of what is in use still: %q", left)
	}
	_, err = prepare("uid-2", small0)
	refused("are not released yet", err)
	d.busy(false)
	for range 2 {
		if err := unprepare("uid-1"); err != nil {
			t.Fatal(err)
		}
	}
	if has := d.has(); has != "1g.10gb@3/0" || r.record("uid-1") != "" || r.spec("uid-1") != nil {
		t.Errorf("given back: the GPU has %s, record %q", has, r.record("uid-1"))
	}
	_, err = prepare("uid-2", half0)
	refused("blocks "+half0+", and does not belong to a claim", err)
	if r.record("uid-2") != "" {
		t.Error("a claim that was refused has a record")
	}
	held := claim("uid-3", small1)
	held.Results = append(held.Results, dra.Result{Request: "gpu", Pool: "node", Device: gpuC})
	if _, err := ask(t.Context(), c, held); err != nil {
		t.Errorf("with a whole GPU: %v", err)
	}
	if err := unprepare("uid-3"); err != nil || d.has() != "1g.10gb@3/0" {
		t.Errorf("with a whole GPU, given back: %v, the GPU has %s", err, d.has())
	}
}

// TestMadeDevicesWithoutDriver: a driver that refuses leaves nothing behind; one that does not work
// keeps no claim from being given back, and what is left is destroyed when it works again.
func TestMadeDevicesWithoutDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	refused := func(want string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	d.fail(nil, inventory.ErrNoPermission)
	_, err := ask(t.Context(), c, claim("uid-1", small0))
	refused("cannot create the MIG devices of the claim", err)
	if d.has() != "" || r.record("uid-1") != "" {
		t.Errorf("a driver that refuses: the GPU has %q, record %q", d.has(), r.record("uid-1"))
	}
	d.fail(nil, inventory.ErrNoAnswer) // it may still come
	_, err = ask(t.Context(), c, claim("uid-1", small0))
	refused("cannot create the MIG devices of the claim", err)
	if r.record("uid-1") == "" {
		t.Error("the record is gone of a claim for which a MIG device may still be made")
	}
	d.fail(nil, nil)
	if _, err := ask(t.Context(), c, claim("uid-1", small0)); err != nil || d.has() != "1g.10gb@0/1" {
		t.Errorf("the next call: %v, the GPU has %q", err, d.has())
	}

	d.fail(errors.New("no driver"), nil)
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Fatalf("without a driver: %v", err)
	}
	if r.spec("uid-1") != nil || !strings.Contains(r.record("uid-1"), `"released":true`) ||
		len(c.InUse().Value()["GPU-b"]) != 1 {
		t.Errorf("without a driver: record %q, in use %v", r.record("uid-1"), c.InUse().Value())
	}
	if left := released(c); left != "uid-1: no driver" {
		t.Errorf("the status says of what could not be destroyed: %q", left)
	}
	later, stop := r.start()
	if left := released(later); left != "uid-1: the release is in progress" {
		t.Errorf("the status of the next process says: %q", left)
	}
	stop()
	_, err = ask(t.Context(), c, claim("uid-2", small0))
	refused("are not released yet", err)
	_, err = ask(t.Context(), c, claim("uid-1", small1))
	refused("claim's earlier devices are not released yet", err)
	d.fail(nil, nil)
	_, err = ask(t.Context(), c, claim("uid-2", small0))
	refused("are not released yet", err)
	c.RetryReleases(t.Context())
	if d.has() != "" || r.record("uid-1") != "" || released(c) != "" {
		t.Errorf("the driver is back: the GPU has %q, record %q", d.has(), r.record("uid-1"))
	}
	if _, err := ask(t.Context(), c, claim("uid-2", small0)); err != nil {
		t.Error(err)
	}

	// A claim that was given back without a driver, and is allocated again, has the rest destroyed
	// first.
	d.fail(errors.New("no driver"), nil)
	r.unprepare(c, "uid-2")
	d.fail(nil, nil)
	if _, err := ask(t.Context(), c, claim("uid-2", half4)); err != nil || d.has() != "3g.40gb@4/1" {
		t.Errorf("allocated again: %v, the GPU has %q", err, d.has())
	}

	// A restart of the node has ended all instances: the one at the place is another program's.
	r.options.BootID = "two"
	steps := d.steps
	after, _ := r.start()
	if err := after.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || d.steps != steps ||
		r.record("uid-2") != "" {
		t.Errorf("after a restart of the node: %v, %d steps, record %q", err, d.steps-steps, r.record("uid-2"))
	}
}

// TestMadeByAnEarlierVersion: a record without a note that a call has succeeded has the UUID of the
// MIG device. That is destroyed with the claim, also if a version that drops the note has given the
// claim back without a driver.
func TestMadeByAnEarlierVersion(t *testing.T) {
	t.Parallel()
	for _, released := range []string{"", `"released":true,`} {
		r := newRig(t)
		d := r.divide()
		c, stop := r.start()
		r.prepare(c, claim("uid-1", half0))
		stop()
		earlier := strings.NewReplacer(`"made":true,`, "", `"devices":`, released+`"devices":`).Replace(r.record("uid-1"))
		path := filepath.Join(r.options.StateDir, "claims", "uid-1.json")
		if err := os.WriteFile(path, []byte(claims.Signed(earlier)), 0o600); err != nil {
			t.Fatal(err)
		}
		c, _ = r.start()
		divisions, err := c.Divisions(t.Context(), r.snapshots.Value())
		if got := divisions["GPU-b"]; err != nil || got.Fixed != "" || len(got.Own) != 1 {
			t.Errorf("the GPU is %+v, %v", got, err)
		}
		if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || d.has() != "" ||
			r.record("uid-1") != "" {
			t.Errorf("given back: %v, the GPU has %q, record %q", err, d.has(), r.record("uid-1"))
		}
	}
}

// TestGivenBackWithoutMIGMode: a GPU that is no longer in MIG mode has nothing to destroy.
func TestGivenBackWithoutMIGMode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	r.prepare(c, claim("uid-1", half0))
	d.mu.Lock()
	d.mode = inventory.MIGDisabled
	d.mu.Unlock()
	r.unprepare(c, "uid-1")
	if r.record("uid-1") != "" || released(c) != "" {
		t.Errorf("record %q, and status says %q", r.record("uid-1"), released(c))
	}
}

// released returns what the status says of claims that were given back while their MIG devices are
// there still.
func released(c *claims.Claims) string {
	var all []string
	for _, s := range c.Status().Value() {
		if s.Released != "" {
			all = append(all, s.UID+": "+s.Released)
		}
	}
	return strings.Join(all, ", ")
}

// TestDivisions: what is published of a GPU follows who divided it.
func TestDivisions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	r.options.Divisions = feed.New(dra.Divisions(nil))
	c, _ := r.start()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Divide(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	until := func(what string, is func(found dra.Divided, has bool) bool) {
		t.Helper()
		deadline := time.After(time.Minute)
		for {
			divisions, changed := r.options.Divisions.Latest()
			if found, has := divisions["GPU-b"]; divisions != nil && is(found, has) {
				now, err := claims.New(r.options).Divisions(t.Context(), r.snapshots.Value())
				if diff := cmp.Diff(divisions, now); err != nil || diff != "" {
					t.Errorf("%s, without a daemon (-want +got):\n%s %v", what, diff, err)
				}
				return
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: %+v", what, divisions)
			}
		}
	}
	until("an empty GPU", func(f dra.Divided, has bool) bool {
		return has && f.Fixed == "" && len(f.Profiles) == 2 && len(f.Own) == 0
	})
	r.prepare(c, claim("uid-1", half0))
	until("one for a claim", func(f dra.Divided, _ bool) bool { return f.Fixed == "" && len(f.Own) == 1 && f.Own[0].Profile == 9 })
	d.other("1g.10gb", 6, 1)
	d.show() // a look that shows nothing new: it has no compute instance
	r.unprepare(c, "uid-1")
	until("one of another program", func(f dra.Divided, _ bool) bool {
		return strings.Contains(f.Fixed, "1g.10gb at memory slice 6) does not belong to a claim") && len(f.Own) == 0
	})
	if _, err := ask(t.Context(), c, claim("uid-2", small0)); err != nil { // it was allocated before
		t.Fatal(err)
	}
	configured := r.configs.Value()
	configured.DRA.DynamicMIG = false
	r.configs.Publish(configured)
	until("switched off", func(f dra.Divided, _ bool) bool { return f.Fixed == "dra.dynamicMIG is off" && len(f.Own) == 1 })
	r.unprepare(c, "uid-2")
	until("switched off, without claims", func(_ dra.Divided, has bool) bool { return !has })
	if has := d.has(); has != "1g.10gb@6/0" {
		t.Errorf("the GPU has %s", has)
	}
	configured.DRA.DynamicMIG = true
	d.fail(errors.New("no driver"), nil) // before the GPU is asked
	r.configs.Publish(configured)
	until("without a driver", func(f dra.Divided, _ bool) bool { return f.Fixed == "no driver" })
}

// TestUUIDAgain: the driver gives the UUID of a MIG device that is gone to the next one. Its
// containers are given the nodes of the next one.
func TestUUIDAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	r.prepare(c, claim("uid-1", small0))
	r.unprepare(c, "uid-1")
	d.caps = 50
	given, err := ask(t.Context(), c, claim("uid-2", half4))
	if err != nil {
		t.Fatal(err)
	}
	if nodes := r.nodes(ids(given)...); !strings.Contains(nodes, "nvidia-caps/nvidia-cap152") {
		t.Errorf("a container gets %v", nodes)
	}
}

// TestCallsAtOnceDivide: what the GPU has is never more than one of the claims that overlap allow,
// and nothing is left.
func TestCallsAtOnceDivide(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	var kubelet sync.WaitGroup
	for n, device := range []string{small0, small1, half0, half4} {
		kubelet.Go(func() {
			got := 0
			for i := range 8 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				_, err := ask(t.Context(), c, claim(uid, device))
				if err != nil && !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					got++
				}
				if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
			if device == half4 && got != 8 {
				t.Errorf("%s was prepared %d times of 8", device, got)
			}
		})
	}
	kubelet.Wait()
	if d.has() != "" {
		t.Errorf("left on the GPU: %s", d.has())
	}
}

// madeRecovers looks at what a killed process has left of a claim for which a MIG device is made,
// and goes on as kubelet does.
func madeRecovers(t *testing.T, dir, what string, wanted dra.Claim, then string) {
	t.Helper()
	r := newRigAt(t, dir)
	d := r.divide()
	c, _ := r.start()
	recorded := r.record("uid-1") != ""
	if !recorded && d.has() != "1g.10gb@6/0" {
		t.Errorf("%s: the GPU has %s, and nothing is recorded", what, d.has())
	}
	left := "1g.10gb@6/0"
	if then == "another program is faster" && d.has() == left {
		d.other("3g.40gb", 0, 4, 3) // with the ID that the claim's has or had
		left += " 3g.40gb@0/1"
	}
	if then == "retried" {
		other := claim("uid-2", half0)
		if _, err := ask(t.Context(), c, other); (err == nil) == recorded {
			t.Errorf("%s: recorded %v, and another claim: %v", what, recorded, err)
		}
		if err := c.Unprepare(t.Context(), other.UID, other.Namespace, other.Name); err != nil {
			t.Fatal(err)
		}
		answer, err := ask(t.Context(), c, wanted)
		if daemons := len(r.mps()); err != nil || d.has() != "1g.10gb@6/0 3g.40gb@0/1" || daemons != len(wanted.Configs)/2 {
			t.Fatalf("%s: the next Prepare: %v, and the GPU has %s, with %d daemons", what, err, d.has(), daemons)
		}
		r.nodes(ids(answer)...)
	}
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Fatalf("%s: the next Unprepare: %v", what, err)
	}
	if r.record("uid-1") != "" || r.spec("uid-1") != nil || d.has() != left || len(r.mps()) > 0 {
		t.Errorf("%s: left after Unprepare: record %q, spec %v, daemons %v, and the GPU has %s", what, r.record("uid-1"),
			r.spec("uid-1"), r.mps(), d.has())
	}
}

// TestNoDeviceIsMade: on a GPU of which it is not known how it is divided, or whose MIG mode is off
// or changes. Nothing is recorded, and what was prepared before stays.
func TestNoDeviceIsMade(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*rig, *divider)
		want   string
	}{
		"not read": {func(_ *rig, d *divider) { d.unread = "no permission" },
			"cannot read the MIG layout of GPU GPU-b: no permission"},
		"the mode changes": {func(_ *rig, d *divider) { d.pending = inventory.MIGDisabled },
			"the MIG mode of GPU GPU-b is being changed"},
		"the mode is off": {func(_ *rig, d *divider) { d.mode = inventory.MIGDisabled },
			"GPU GPU-b is no longer in MIG mode"},
		"the mode is known to be off": {func(r *rig, _ *divider) {
			s := r.snapshots.Value()
			s.GPUs = slices.Clone(s.GPUs)
			s.GPUs[1].MIG = inventory.MIGDisabled
			r.snapshots.Publish(s)
		}, "no longer exists or is not in MIG mode"},
		"the GPU is gone": {func(r *rig, _ *divider) {
			s := r.snapshots.Value()
			s.GPUs = s.GPUs[:1]
			r.snapshots.Publish(s)
		}, "no longer exists or is not in MIG mode"},
		"without a driver": {func(_ *rig, d *divider) { d.err = errors.New("no driver") },
			"cannot read the MIG layout of GPU GPU-b: no driver"},
	} {
		r := newRig(t)
		d := r.divide()
		c, stop := r.start()
		r.prepare(c, claim("uid-1", half0))
		d.mu.Lock()
		tt.change(r, d)
		d.mu.Unlock()
		if _, err := ask(t.Context(), c, claim("uid-2", half4)); err == nil || !strings.Contains(err.Error(), tt.want) ||
			r.record("uid-2") != "" {
			t.Errorf("%s: %v, want %q; record %q", name, err, tt.want, r.record("uid-2"))
		}
		r.prepare(c, claim("uid-1", half0))
		stop()
	}
}

// TestNoAnswerAboutAGPU: what is known of its division holds as long as the driver gives no answer,
// and is asked for again soon.
func TestNoAnswerAboutAGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		d := r.divide()
		r.options.Divisions = feed.New(dra.Divisions(nil))
		c, stop := r.start()
		defer stop()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		var asked atomic.Int32
		d.looks = func() { asked.Add(1) }
		go func() { ended <- c.Divide(ctx) }()
		is := func(when, fixed string, looks int32) {
			t.Helper()
			synctest.Wait()
			if f := r.options.Divisions.Value()["GPU-b"]; f.Fixed != fixed || asked.Load() != looks ||
				fixed == "" && len(f.Profiles) != len(profiles) {
				t.Errorf("%s: %+v, asked %d times, want %d", when, f, asked.Load(), looks)
			}
		}
		is("at first", "", 1)
		r.snapshots.Publish(r.snapshots.Value())
		is("nothing new", "", 1)
		divided := r.snapshots.Value()
		divided.GPUs = slices.Clone(divided.GPUs)
		divided.GPUs[1].MIGDevices = snapshot().GPUs[1].MIGDevices
		d.fail(errors.New("no answer"), nil)
		r.snapshots.Publish(divided)
		is("without an answer", "", 2)
		time.Sleep(9 * time.Second)
		is("9 s later", "", 2)
		time.Sleep(time.Second)
		is("10 s later", "", 3)
		d.fail(nil, nil)
		d.mu.Lock()
		d.unread = "no permission"
		d.mu.Unlock()
		time.Sleep(10 * time.Second)
		is("with one that says nothing", "", 4)
		off := divided
		off.GPUs = slices.Clone(divided.GPUs)
		off.GPUs[1].MIG = inventory.MIGDisabled
		r.snapshots.Publish(off)
		if synctest.Wait(); len(r.options.Divisions.Value()) > 0 {
			t.Errorf("not in MIG mode: %+v", r.options.Divisions.Value())
		}
		r.snapshots.Publish(divided)
		is("in MIG mode again, and not known", "no permission", 5)
		d.mu.Lock()
		d.unread = ""
		d.mu.Unlock()
		time.Sleep(10 * time.Second)
		is("known", "", 6)
		time.Sleep(time.Minute)
		is("a minute later", "", 6)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
