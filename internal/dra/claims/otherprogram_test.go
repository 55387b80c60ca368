package claims_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// TestAnotherProgramIsFaster: another program makes an instance of the profile that a claim wants,
// at the same place. What it made is never the claim's, and is never destroyed, at whatever moment
// it is made; but for one that has no compute instance and is made while the claim's record intends
// one there and no call works on it.
func TestAnotherProgramIsFaster(t *testing.T) {
	t.Parallel()
	const theirs, without = "3g.40gb@0/1", "3g.40gb@0/0"
	for name, tt := range map[string]struct {
		when     string
		computes []int
		want     string // what the GPU has after Prepare
	}{
		"before it is looked at again":                        {"looks", []int{3}, theirs},
		"before it is looked at again, without compute":       {"looks", nil, without},
		"just before ours is made":                            {"makes", []int{3}, theirs},
		"just before ours is made, without compute":           {"makes", nil, without},
		"after a call that gave no answer":                    {"later", []int{3}, theirs},
		"after a call that gave no answer, other compute":     {"later", []int{1}, theirs},
		"after a call that gave no answer and did not happen": {"later", nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, retried := range []bool{true, false} {
				r := newRig(t)
				d := r.divide()
				c, _ := r.start()
				asked := 0
				switch tt.when {
				case "looks": // first to see whether there is room, and then to make it
					d.looks = func() {
						if asked++; asked == 2 {
							d.other("3g.40gb", 0, 4, tt.computes...)
						}
					}
				case "makes":
					d.makes = sync.OnceFunc(func() { d.other("3g.40gb", 0, 4, tt.computes...) })
				case "later":
					d.fail(nil, inventory.ErrNoAnswer)
				}
				_, err := ask(t.Context(), c, claim("uid-1", half0))
				if tt.when == "later" {
					d.fail(nil, nil)
					d.other("3g.40gb", 0, 4, tt.computes...)
					if retried {
						_, err = ask(t.Context(), c, claim("uid-1", half0))
					}
				}
				prepared := retried && tt.want == ""
				if prepared != (err == nil) || d.has() != tt.want && retried && !prepared {
					t.Errorf("Prepare() = %v, and the GPU has %q", err, d.has())
				}
				if err != nil && retried && r.record("uid-1") != "" {
					t.Errorf("a claim that was refused has the record %s", r.record("uid-1"))
				}
				if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || d.has() != tt.want ||
					r.record("uid-1") != "" {
					t.Errorf("given back: %v, and the GPU has %q, record %q", err, d.has(), r.record("uid-1"))
				}
			}
		})
	}
}

// TestMadeAfterAll: a call made an instance and gave no answer. The next one makes it again, or has
// it destroyed.
func TestMadeAfterAll(t *testing.T) {
	t.Parallel()
	for _, retried := range []bool{true, false} {
		r := newRig(t)
		d := r.divide()
		c, _ := r.start()
		d.late = inventory.ErrNoAnswer
		if _, err := ask(t.Context(), c, claim("uid-1", half0)); err == nil || d.has() != "3g.40gb@0/0" {
			t.Fatalf("without an answer: %v, and the GPU has %q", err, d.has())
		}
		d.late = nil
		if retried {
			if _, err := ask(t.Context(), c, claim("uid-1", half0)); err != nil || d.has() != "3g.40gb@0/1" {
				t.Errorf("the next call: %v, and the GPU has %q", err, d.has())
			}
		}
		if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || d.has() != "" {
			t.Errorf("given back: %v, and the GPU has %q", err, d.has())
		}
	}
}

// TestMPSOnMadeDevices: a MIG device that is made for a claim has a control daemon of its own, from
// when it is there until before it is destroyed.
func TestMPSOnMadeDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, _ := r.start()
	set := func(daemon string, stays error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.daemon, r.stays = daemon, stays
	}
	wanted := byMPS("uid-1", `"defaultActiveThreadPercentage":30,"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}`, small0,
		half4)
	unprepare := func() error { return c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") }

	set("it has died", nil)
	// There may be a spec by now: the MIG devices that were made are a new Snapshot, for which the
	// specs of all records are written.
	if _, err := ask(t.Context(), c, wanted); err == nil || !strings.Contains(err.Error(), "it has died") {
		t.Errorf("a daemon that does not serve: %v", err)
	}
	if err := unprepare(); err != nil || d.has() != "" || r.spec("uid-1") != nil {
		t.Errorf("given back without a daemon: %v, the GPU has %s", err, d.has())
	}
	set("", nil)
	r.prepare(c, wanted)
	want := map[string]string{
		"uid-1-0": `{"devices":[{"uuid":"MIG-2"}],"activeThreadPercentage":30}`, // the large one is made first
		"uid-1-1": `{"devices":[{"uuid":"MIG-1","memoryLimit":1073741824}],"activeThreadPercentage":30}`,
	}
	if diff := cmp.Diff(want, r.mps()); diff != "" {
		t.Errorf("control daemons (-want +got):\n%s", diff)
	}
	if env := r.spec("uid-1").Devices[1].ContainerEdits.Env; !slices.Contains(env,
		"CUDA_MPS_PIPE_DIRECTORY=/mps/claims/uid-1-1/pipe") {
		t.Errorf("containers have the environment %q", env)
	}
	d.busy(true) // by a process that is no client: its clients end with a daemon
	if err := unprepare(); err == nil || !strings.Contains(err.Error(), "is still in use") ||
		d.has() != "1g.10gb@0/1 3g.40gb@4/1" {
		t.Errorf("while a process computes: %v, the GPU has %s", err, d.has())
	}
	d.busy(false)
	if err := unprepare(); err != nil || d.has() != "" || r.record("uid-1") != "" || len(r.mps()) > 0 {
		t.Errorf("given back: %v, the GPU has %s, daemons %v", err, d.has(), r.mps())
	}

	r.prepare(c, wanted)
	set("", errors.New("it does not end"))
	if err := unprepare(); err != nil || d.has() != "1g.10gb@0/1 3g.40gb@4/1" || released(c) != "uid-1: it does not end" {
		t.Errorf("a daemon that does not end: %v, the GPU has %s, status %q", err, d.has(), released(c))
	}
	if _, err := ask(t.Context(), c, claim("uid-2", small0)); err == nil ||
		!strings.Contains(err.Error(), "are not released yet") {
		t.Errorf("another claim: %v", err)
	}
	set("", nil)
	c.RetryReleases(t.Context())
	if d.has() != "" || r.record("uid-1") != "" {
		t.Errorf("the daemon has ended: the GPU has %s, record %q", d.has(), r.record("uid-1"))
	}
}

// TestMPSOnMadeDevicesOfBefore: the control daemons of another boot have ended with it, and are not
// waited for.
func TestMPSOnMadeDevicesOfBefore(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := r.divide()
	c, stop := r.start()
	r.prepare(c, byMPS("uid-1", ``, small0))
	stop()
	d.write(nil) // the instances, too
	r.options.BootID, r.stays = "two", errors.New("nobody is to wait for it")
	c, _ = r.start()
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || r.record("uid-1") != "" {
		t.Errorf("Unprepare() = %v, record %q", err, r.record("uid-1"))
	}
}
