package claims_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
)

// TestLeak: a claim that neither a pod nor the API server has is given back, ten minutes after that
// is known; no answer is no evidence.
func TestLeak(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*rig)
		leaks  bool
	}{
		"nobody has it":                  {func(*rig) {}, true},
		"a pod has it":                   {func(r *rig) { r.claimed["default/claim-uid-1"] = true }, false},
		"the API server has it":          {func(r *rig) { r.existing["claim-uid-1"] = claim("uid-1", gpuA) }, false},
		"the API server has another":     {func(r *rig) { r.existing["claim-uid-1"] = claim("uid-2", gpuA) }, true},
		"it was given another device":    {func(r *rig) { r.existing["claim-uid-1"] = claim("uid-1", gpuC) }, true},
		"it was given none":              {func(r *rig) { r.existing["claim-uid-1"] = claim("uid-1") }, true},
		"the API server does not answer": {func(r *rig) { r.exists = errors.New("timeout") }, false},
		"the API server is not asked":    {func(r *rig) { r.asksAPI = false }, false},
		"kubelet is not asked":           {func(r *rig) { r.options.PodClaims = nil }, false},
		"kubelet does not answer": {func(r *rig) {
			r.options.PodClaims = func(context.Context) (map[string]bool, error) { return nil, errors.New("x") }
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				tt.change(r)
				c, stop := r.start()
				defer stop()
				r.prepare(c, claim("uid-1", gpuA))
				time.Sleep(19 * time.Minute)
				synctest.Wait()
				if r.record("uid-1") == "" {
					t.Error("given back too early")
				}
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				if gone := r.record("uid-1") == "" && r.spec("uid-1") == nil; gone != tt.leaks {
					t.Errorf("given back %v, want %v", gone, tt.leaks)
				}
			})
		})
	}
}

// TestClockThatWentBack: what was written at a time that is to come does not stay until then.
func TestClockThatWentBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		r.prepare(c, claim("uid-1", gpuA))
		stop()
		now, later := time.Now().UTC(), time.Now().UTC().AddDate(10, 0, 0)
		text := claims.Signed(strings.ReplaceAll(r.record("uid-1"), now.Format("2006-"), later.Format("2006-")))
		folder := filepath.Join(r.options.StateDir, "claims")
		if err := os.WriteFile(filepath.Join(folder, "uid-1.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, stop = r.start()
		defer stop()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := files(t, folder); len(got) > 0 {
			t.Errorf("left after an hour: %v", got)
		}
	})
}

// TestLeakOfAKubeletThatHangs: while kubelet does not answer, all else goes on.
func TestLeakOfAKubeletThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.options.PodClaims = func(ctx context.Context) (map[string]bool, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA))
		time.Sleep(5 * time.Minute)
		r.prepare(c, claim("uid-2", gpuC))
		if err := os.Remove(filepath.Join(r.options.StateDir, "claims", "uid-2.json")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if r.record("uid-2") == "" {
			t.Error("a record that was lost is not written again")
		}
	})
}

// TestClaimThatComesBack: a claim that is seen begins another ten minutes.
func TestClaimThatComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA))
		pass := func(minutes int, there, recorded bool) {
			t.Helper()
			r.mu.Lock()
			r.claimed["default/claim-uid-1"] = there
			r.mu.Unlock()
			time.Sleep(time.Duration(minutes) * time.Minute)
			synctest.Wait()
			if (r.record("uid-1") != "") != recorded {
				t.Errorf("record %q, want one %v", r.record("uid-1"), recorded)
			}
		}
		pass(18, false, true)
		pass(3, true, true)
		pass(8, false, true)
		pass(4, false, false)
	})
}

// TestDamagedRecord: a record that cannot be read is set aside, and the claim has the copy in its
// spec; it can be given back or prepared again.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) string{
		"cut":                         func(s string) string { return s[:len(s)/2] },
		"a changed bit":               func(s string) string { return strings.Replace(s, "GPU-a", "GPU-c", 1) },
		"empty":                       func(string) string { return "" },
		"zeros":                       func(s string) string { return strings.Repeat("\x00", len(s)) },
		"another's":                   func(s string) string { return strings.ReplaceAll(s, "uid-1", "uid-7") },
		"another's with its checksum": func(s string) string { return claims.Signed(strings.ReplaceAll(s, "uid-1", "uid-7")) },
		"something else":              func(string) string { return `{"a":1}` },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, stop := r.start()
			for uid, device := range map[string]string{"uid-1": gpuA, "uid-2": gpuC} {
				r.prepare(c, claim(uid, device))
			}
			stop()
			folder := filepath.Join(r.options.StateDir, "claims")
			if err := os.WriteFile(filepath.Join(folder, "uid-1.json"), []byte(damage(r.record("uid-1"))), 0o600); err != nil {
				t.Fatal(err)
			}
			c, _ = r.start()
			if in := c.InUse().Value(); len(in) != 2 || len(in["GPU-a"]) != 1 || len(in["GPU-c"]) != 1 {
				t.Errorf("in use %v", in)
			}
			if got := files(t, folder); !slices.Equal(got, []string{"uid-1.json", "uid-1.json.damaged", "uid-2.json"}) {
				t.Errorf("the folder has %q", got)
			}
			if r.spec("uid-1") == nil {
				t.Error("the spec of a claim that may have containers is gone")
			}
			if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err != nil {
				t.Errorf("prepared again: %v", err)
			}
			r.unprepare(c, "uid-1")
			if got := files(t, folder); !slices.Equal(got, []string{"uid-2.json"}) {
				t.Errorf("after Unprepare the folder has %q", got)
			}
		})
	}
}

// TestFullDisk: a claim whose record cannot be written is not prepared; one whose spec cannot be
// written is prepared by the next call.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	folder := filepath.Join(r.options.StateDir, "claims")
	if err := errors.Join(os.MkdirAll(r.options.StateDir, 0o700), os.WriteFile(folder, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err == nil || r.spec("uid-1") != nil {
		t.Errorf("Prepare() = %v, spec %v", err, r.spec("uid-1"))
	}
	if err := errors.Join(os.Remove(folder), os.RemoveAll(r.options.CDIDir),
		os.WriteFile(r.options.CDIDir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(t.Context(), c, claim("uid-1", gpuA)); err == nil || r.record("uid-1") == "" {
		t.Errorf("Prepare() = %v, record %q", err, r.record("uid-1"))
	}
	if err := os.Remove(r.options.CDIDir); err != nil {
		t.Fatal(err)
	}
	answer, err := ask(t.Context(), c, claim("uid-1", gpuA))
	if err != nil {
		t.Fatal(err)
	}
	r.nodes(ids(answer)...)
}

// TestFieldsOfANewerVersion stay in a record that this version writes again, those of a device with
// that device.
func TestFieldsOfANewerVersion(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	r.prepare(c, claim("uid-1", gpuA, gpuC))
	stop()
	newer := strings.Replace(r.record("uid-1"), `"request":"gpu"`, `"request":"gpu","clocks":{"sm":1}`, 1)
	newer = strings.Replace(newer, `"namespace":`, `"later":[1,2],"namespace":`, 1)
	path := filepath.Join(r.options.StateDir, "claims", "uid-1.json")
	if err := os.WriteFile(path, []byte(claims.Signed(newer)), 0o600); err != nil {
		t.Fatal(err)
	}
	r.options.BootID = "two"
	c, _ = r.start()
	r.prepare(c, claim("uid-1", gpuA, gpuC))
	for _, want := range []string{`"clocks":{"sm":1}`, `"later":[1,2]`, `"boot":"two"`} {
		if strings.Count(r.record("uid-1"), want) != 1 {
			t.Errorf("the record does not have %s: %s", want, r.record("uid-1"))
		}
	}
}

// TestStateThatIsLost: the state directory is emptied, while the program runs or while it does not.
// The claims that have containers are known by their CDI specs, so that nobody else gets their
// GPUs, and can be given back.
func TestStateThatIsLost(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		t.Run(fmt.Sprintf("running %v", running), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				c, stop := r.start()
				defer func() { stop() }() //nolint:gocritic // it is another one later
				answer, err := ask(t.Context(), c, sliced("uid-1", gpuA, migB0))
				if err != nil {
					t.Fatal(err)
				}
				inUse, record := c.InUse().Value(), r.record("uid-1")
				if !running {
					stop()
				}
				if err := os.RemoveAll(r.options.StateDir); err != nil {
					t.Fatal(err)
				}
				if !running {
					c, stop = r.start()
				}
				if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err == nil ||
					!strings.Contains(err.Error(), "default/claim-uid-1") {
					t.Errorf("another claim on the GPU: %v", err)
				}
				time.Sleep(claims.RefreshInterval + time.Second)
				synctest.Wait()
				if got := c.InUse().Value(); !reflect.DeepEqual(got, inUse) {
					t.Errorf("in use %v, want %v", got, inUse)
				}
				if got := r.record("uid-1"); got != record {
					t.Errorf("the record:\n%s\nwant:\n%s", got, record)
				}
				again, err := ask(t.Context(), c, sliced("uid-1", gpuA, migB0))
				if err != nil || text(t, again) != text(t, answer) {
					t.Errorf("prepared again: %v, %v", again, err)
				}
				r.unprepare(c, "uid-1")
				if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err != nil || r.slice("GPU-a") != "0" {
					t.Errorf("after Unprepare: %v, time slice %s", err, r.slice("GPU-a"))
				}
			})
		})
	}
}

// TestStateDirectoryThatIsNone: a file is where the state directory is to be. Nothing can be
// prepared, and what is, is known.
func TestStateDirectoryThatIsNone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	r.prepare(c, claim("uid-1", gpuA))
	stop()
	if err := errors.Join(os.RemoveAll(r.options.StateDir), os.WriteFile(r.options.StateDir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	c, _ = r.start()
	if in := c.InUse().Value(); len(in) != 1 || len(in["GPU-a"]) != 1 {
		t.Errorf("in use %v", in)
	}
	if _, err := ask(t.Context(), c, claim("uid-2", gpuC)); err == nil {
		t.Error("a claim is prepared that cannot be recorded")
	}
}

// TestQuestionsAboutLeaks: kubelet and the API server are asked once a minute, within a limit of
// time, and only about claims that are recorded.
func TestQuestionsAboutLeaks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		asked := 0
		r.options.PodClaims = func(ctx context.Context) (map[string]bool, error) {
			if until, has := ctx.Deadline(); !has || time.Until(until) > 30*time.Second {
				t.Errorf("kubelet has until %v", until)
			}
			asked++
			return nil, nil
		}
		r.existing["claim-uid-1"] = claim("uid-1", gpuA)
		c, stop := r.start()
		time.Sleep(time.Hour)
		if synctest.Wait(); asked > 0 {
			t.Errorf("without a claim kubelet is asked %d times", asked)
		}
		r.prepare(c, claim("uid-1", gpuA))
		time.Sleep(time.Hour)
		if stop(); asked < 59 || asked > 61 {
			t.Errorf("kubelet is asked %d times in an hour, want 60", asked)
		}
	})
}
