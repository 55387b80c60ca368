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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cdi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// TestTwoProcesses: two daemons overlap in a roll-out, and kubelet calls one or the other. No two claims have a device at a time, whichever
// of the two was asked, and each gives back what the other has prepared.
func TestTwoProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	first, _ := r.start()
	second, _ := r.start()
	both := []*claims.Claims{first, second}
	devices := [][]string{{gpuA}, {gpuA, migB0}, {migB0, gpuC}, {migB1}, {gpuC, gpuA}, {migB1, migB0}}
	var owners [4]atomic.Pointer[string] // by the device
	index := map[string]int{gpuA: 0, migB0: 1, migB1: 2, gpuC: 3}
	var kubelet sync.WaitGroup
	var got atomic.Int32
	for n, wanted := range devices {
		kubelet.Go(func() {
			for i := range 30 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				_, err := both[(n+i)%2].Prepare(t.Context(), claim(uid, wanted...))
				if err != nil && !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					got.Add(1)
					for _, d := range wanted {
						if other := owners[index[d]].Swap(&uid); other != nil {
							t.Errorf("%s has %s, and so has %s", uid, d, *other)
						}
					}
					if _, err := both[(n+i+1)%2].Prepare(t.Context(), claim(uid, wanted...)); err != nil {
						t.Errorf("%s, once more at the other process: %v", uid, err)
					}
					for _, d := range wanted {
						owners[index[d]].Store(nil)
					}
				}
				if err := both[(n+i+1)%2].Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
		})
	}
	kubelet.Wait()
	if got.Load() < 30 {
		t.Errorf("only %d claims were prepared", got.Load())
	}
	if left := files(t, r.options.CDIDir); len(left) != 0 {
		t.Errorf("left specs: %v", left)
	}
}

// TestOtherProcessIsShown: what another process prepares is in use here, too, at the next look.
func TestOtherProcessIsShown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		first, stopFirst := r.start()
		second, stopSecond := r.start()
		defer stopFirst()
		defer stopSecond()
		if _, err := first.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.Every)
		synctest.Wait()
		if len(second.InUse().Value()["GPU-a"]) != 1 {
			t.Errorf("in use at the other process: %v", second.InUse().Value())
		}
	})
}

// TestLatePrepare: a Prepare that began before the claim was given back does not bring it back; one that begins later does.
func TestLatePrepare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		prepared, stop := r.start()
		defer stop()
		if _, err := prepared.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
			t.Fatal(err)
		}
		slow := claims.New(r.options) // it has not read the records: calls wait
		late := make(chan error, 1)
		go func() {
			_, err := slow.Prepare(t.Context(), claim("uid-1", gpuA))
			late <- err
		}()
		synctest.Wait()
		for range 2 {
			if err := prepared.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
				t.Fatal(err)
			}
		}
		defer r.run(slow)()
		if err := <-late; err == nil || !strings.Contains(err.Error(), "the claim was unprepared while it was being prepared") {
			t.Errorf("the late Prepare() = %v", err)
		}
		if r.record("uid-1") != "" || r.spec("uid-1") != nil {
			t.Errorf("a late Prepare has left %s", r.record("uid-1"))
		}
		if _, err := slow.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
			t.Errorf("the next Prepare() = %v", err)
		}
	})
}

// TestNobodyWaits: a call that kubelet has given up does not prepare anything.
func TestNobodyWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	ctx, cancel := context.WithCancel(t.Context())
	r.mu.Lock()
	r.asked = cancel
	r.mu.Unlock()
	if _, err := c.Prepare(ctx, claim("uid-1", gpuA)); !errors.Is(err, context.Canceled) || r.record("uid-1") != "" {
		t.Errorf("Prepare() = %v, record %q", err, r.record("uid-1"))
	}
}

// TestRestartOfTheNode: claims of another boot block nobody, are prepared anew, and can be given back.
func TestRestartOfTheNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	for uid, device := range map[string]string{"uid-1": gpuA, "uid-2": gpuC} {
		if _, err := c.Prepare(t.Context(), claim(uid, device)); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := os.RemoveAll(r.options.CDIDir); err != nil {
		t.Fatal(err)
	}
	r.options.BootID = "two"
	c, _ = r.start()
	if got := files(t, r.options.CDIDir); len(got) != 0 {
		t.Errorf("specs of claims without containers: %v", got)
	}
	if s := c.Status().Value(); len(s) != 2 || !s[0].Restarted || len(c.InUse().Value()) != 2 {
		t.Errorf("status %s, in use %v", text(t, s), c.InUse().Value())
	}
	answer, err := c.Prepare(t.Context(), claim("uid-1", gpuA))
	if err != nil {
		t.Fatal(err)
	}
	r.nodes(ids(answer)...)
	if s := c.Status().Value(); s[0].Restarted || !s[1].Restarted {
		t.Errorf("status %s", text(t, s))
	}
	if _, err := c.Prepare(t.Context(), claim("uid-3", gpuC)); err != nil {
		t.Errorf("a record of before the restart blocks another claim: %v", err)
	}
	if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || r.record("uid-2") != "" {
		t.Errorf("Unprepare() = %v, record %q", err, r.record("uid-2"))
	}
}

// TestPreparedClaimOfASickGPU: the containers of a claim that is prepared have the GPU, whatever becomes of it, and so have those that are
// restarted; giving it back needs no driver.
func TestPreparedClaimOfASickGPU(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
		t.Fatal(err)
	}
	s := snapshot()
	s.GPUs[0].Health = inventory.Health{State: inventory.Lost}
	r.publish(s)
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
		t.Errorf("the GPU is lost: %v", err)
	}
	stop()
	r.publish(inventory.Snapshot{})
	c, _ = r.start()
	answer, err := c.Prepare(t.Context(), claim("uid-1", gpuA))
	if err != nil {
		t.Fatalf("the driver has not answered yet: %v", err)
	}
	r.nodes(ids(answer)...)
	if _, err := c.Prepare(t.Context(), claim("uid-2", gpuC)); err == nil {
		t.Error("a claim was prepared without a driver")
	}
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || r.spec("uid-1") != nil {
		t.Errorf("Unprepare() = %v", err)
	}
	if err := claims.New(r.options).Unprepare(t.Context(), "uid-9", "default", "x"); err != nil {
		t.Errorf("Unprepare() of a claim that nobody knows, before Run: %v", err)
	}
}

// TestSpecsFollowTheDriver: when files of the driver have other places, and when somebody removes a spec, containers that are restarted find
// what is there now.
func TestSpecsFollowTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
			t.Fatal(err)
		}
		mounts := func() string {
			var all []string
			for _, m := range r.spec("uid-1").ContainerEdits.Mounts {
				all = append(all, m.HostPath)
			}
			return strings.Join(all, " ")
		}
		if !strings.Contains(mounts(), "libcuda.so.580.95.05") {
			t.Fatalf("mounts %s", mounts())
		}
		lib := filepath.Join(r.driver, "usr/lib/x86_64-linux-gnu/libcuda.so.")
		if err := os.Rename(lib+"580.95.05", lib+"590.48.01"); err != nil {
			t.Fatal(err)
		}
		s := snapshot()
		s.Generation, s.Driver.Version = 2, "590.48.01"
		r.publish(s)
		synctest.Wait()
		if !strings.Contains(mounts(), "libcuda.so.590.48.01") || strings.Contains(mounts(), "580.95.05") {
			t.Errorf("mounts with another driver: %s", mounts())
		}
		if err := os.RemoveAll(r.options.CDIDir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.Every)
		synctest.Wait()
		if r.spec("uid-1") == nil {
			t.Error("a spec that somebody removed was not written again")
		}
		configured := r.configs.Value()
		configured.Edits.DevRoot = "/run/nvidia/driver"
		r.configs.Publish(configured)
		synctest.Wait()
		if n := r.spec("uid-1").Devices[0].ContainerEdits.DeviceNodes[0]; n.HostPath != "/run/nvidia/driver/dev/nvidia0" {
			t.Errorf("with another configuration: %+v", n)
		}
	})
}

// TestLeak: a claim that neither a pod nor the API server has is given back, ten minutes after that is known; no answer is no evidence.
func TestLeak(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*rig)
		leaks  bool
	}{
		"nobody has it":                  {func(*rig) {}, true},
		"a pod has it":                   {func(r *rig) { r.claimed["default/claim-uid-1"] = true }, false},
		"the API server has it":          {func(r *rig) { r.existing["uid-1"] = true }, false},
		"the API server has another":     {func(r *rig) { r.existing["uid-2"] = true }, true},
		"the API server does not answer": {func(r *rig) { r.exists = errors.New("timeout") }, false},
		"the API server is not asked":    {func(r *rig) { r.asksAPI = false }, false},
		"kubelet is not asked":           {func(r *rig) { r.options.Claimed = nil }, false},
		"kubelet does not answer": {func(r *rig) {
			r.options.Claimed = func(context.Context) (map[string]bool, error) { return nil, errors.New("x") }
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				tt.change(r)
				c, stop := r.start()
				defer stop()
				if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
					t.Fatal(err)
				}
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

// TestDamagedRecord: a record that cannot be read is set aside, and the others go on; its claim can be given back or prepared again.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) string{
		"cut":            func(s string) string { return s[:len(s)/2] },
		"a changed bit":  func(s string) string { return strings.Replace(s, "GPU-a", "GPU-c", 1) },
		"empty":          func(string) string { return "" },
		"zeros":          func(s string) string { return strings.Repeat("\x00", len(s)) },
		"another's":      func(s string) string { return strings.ReplaceAll(s, "uid-1", "uid-7") },
		"something else": func(string) string { return `{"a":1}` },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			c, stop := r.start()
			for uid, device := range map[string]string{"uid-1": gpuA, "uid-2": gpuC} {
				if _, err := c.Prepare(t.Context(), claim(uid, device)); err != nil {
					t.Fatal(err)
				}
			}
			stop()
			folder := filepath.Join(r.options.StateDir, "claims")
			if err := os.WriteFile(filepath.Join(folder, "uid-1.json"), []byte(damage(r.record("uid-1"))), 0o600); err != nil {
				t.Fatal(err)
			}
			c, _ = r.start()
			if in := c.InUse().Value(); len(in) != 1 || len(in["GPU-c"]) != 1 {
				t.Errorf("in use %v", in)
			}
			if got := files(t, folder); !slices.Equal(got, []string{"uid-1.json.damaged", "uid-2.json"}) {
				t.Errorf("the folder has %q", got)
			}
			if r.spec("uid-1") == nil {
				t.Error("the spec of a claim that may have containers is gone")
			}
			if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
				t.Errorf("prepared again: %v", err)
			}
			if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
				t.Fatal(err)
			}
			if got := files(t, folder); !slices.Equal(got, []string{"uid-1.gone", "uid-2.json"}) {
				t.Errorf("after Unprepare the folder has %q", got)
			}
		})
	}
}

// TestFullDisk: a claim whose record cannot be written is not prepared; one whose spec cannot be written is prepared by the next call.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	folder := filepath.Join(r.options.StateDir, "claims")
	if err := errors.Join(os.MkdirAll(r.options.StateDir, 0o700), os.WriteFile(folder, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err == nil || r.spec("uid-1") != nil {
		t.Errorf("Prepare() = %v, spec %v", err, r.spec("uid-1"))
	}
	if err := errors.Join(os.Remove(folder), os.RemoveAll(r.options.CDIDir), os.WriteFile(r.options.CDIDir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err == nil || r.record("uid-1") == "" {
		t.Errorf("Prepare() = %v, record %q", err, r.record("uid-1"))
	}
	if err := os.Remove(r.options.CDIDir); err != nil {
		t.Fatal(err)
	}
	answer, err := c.Prepare(t.Context(), claim("uid-1", gpuA))
	if err != nil {
		t.Fatal(err)
	}
	r.nodes(ids(answer)...)
}

// TestFieldsOfANewerVersion stay in a record that this version writes again.
func TestFieldsOfANewerVersion(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
		t.Fatal(err)
	}
	stop()
	newer := strings.Replace(r.record("uid-1"), `"request":"gpu"`, `"request":"gpu","clocks":{"sm":1}`, 1)
	newer = strings.Replace(newer, `"namespace":`, `"later":[1,2],"namespace":`, 1)
	path := filepath.Join(r.options.StateDir, "claims", "uid-1.json")
	if err := os.WriteFile(path, []byte(claims.Signed(newer)), 0o600); err != nil {
		t.Fatal(err)
	}
	r.options.BootID = "two"
	c, _ = r.start()
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"clocks":{"sm":1}`, `"later":[1,2]`, `"boot":"two"`} {
		if strings.Count(r.record("uid-1"), want) != 1 {
			t.Errorf("the record does not have %s: %s", want, r.record("uid-1"))
		}
	}
}

// TestNoGrowth prepares and unprepares 200 claims. Ten minutes later nothing of them is left.
func TestNoGrowth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		open := len(files(t, "/proc/self/fd"))
		left := filepath.Join(r.options.StateDir, "claims", ".uid-0.json.123.tmp")
		for i := range 200 {
			uid := fmt.Sprintf("uid-%d", i)
			if _, err := c.Prepare(t.Context(), claim(uid, gpuA, migB1)); err != nil {
				t.Fatal(err)
			}
			if err := c.Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
				t.Fatal(err)
			}
		}
		old := time.Now().Add(-time.Hour)
		spec := cdi.ClaimFile(r.options.CDIDir, "uid-0")
		spec = filepath.Join(filepath.Dir(spec), "."+filepath.Base(spec)+".5.tmp") // of a process that was killed
		others := filepath.Join(r.options.CDIDir, ".another.yaml.5.tmp")
		for _, path := range []string{left, spec, others} {
			if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, old, old)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got := files(t, filepath.Join(r.options.StateDir, "claims")); len(got) != 0 {
			t.Errorf("the folder of records has %d files: %q", len(got), got[:min(len(got), 5)])
		}
		if got := files(t, r.options.CDIDir); !slices.Equal(got, []string{filepath.Base(others)}) {
			t.Errorf("the folder of specs has %q", got)
		}
		if now := len(files(t, "/proc/self/fd")); now > open+20 { // other tests open some, too
			t.Errorf("%d open files, before there were %d", now, open)
		}
		if len(c.InUse().Value()) != 0 || len(c.Status().Value()) != 0 {
			t.Errorf("in use %v", c.InUse().Value())
		}
	})
}

// TestCauses: each failure has a cause for metrics, and a success has none.
func TestCauses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	counted := &metrics{}
	r.options.Metrics = counted
	c, _ := r.start()
	other := claim("uid-2", gpuA)
	mps := claim("uid-3", gpuC)
	mps.Configs = []dra.OpaqueConfig{{Parameters: []byte(`{}`)}}
	for _, wanted := range []dra.Claim{claim("uid-1", gpuA), other, claim("uid-4", "gpu-9"), mps, claim("/", gpuA)} {
		_, _ = c.Prepare(t.Context(), wanted)
	}
	_ = c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1")
	if got, want := strings.Join(counted.causes, ","), ",in-use,device,configuration,malformed,-"; got != want {
		t.Errorf("causes %s, want %s", got, want)
	}
	if !slices.Contains(claims.Causes(), claims.CauseLate) {
		t.Error("Causes() is not complete")
	}
}

type metrics struct{ causes []string }

func (m *metrics) Prepared(_ time.Duration, cause string)   { m.causes = append(m.causes, cause) }
func (m *metrics) Unprepared(_ time.Duration, cause string) { m.causes = append(m.causes, "-"+cause) }
