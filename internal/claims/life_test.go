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

// TestTwoProcesses: two daemons overlap in a roll-out, and kubelet calls one or the other, also for claims whose pods were deleted by force
// and made again. No two claims have a device node at a time, as their containers see it, whichever of the two daemons was asked, and each
// gives back what the other has prepared.
func TestTwoProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	first, _ := r.start()
	second, _ := r.start()
	both := []*claims.Claims{first, second}
	devices := [][]string{{gpuA}, {gpuA, migB0}, {migB0, gpuC}, {migB1}, {gpuC, gpuA}, {migB1, migB0}}
	var owners sync.Map // claims by the device node
	var kubelet sync.WaitGroup
	var got atomic.Int32
	for n, wanted := range devices {
		kubelet.Go(func() {
			for i := range 40 {
				uid := fmt.Sprintf("uid-%d-%d", n, i)
				_, err := both[(n+i)%2].Prepare(t.Context(), claim(uid, wanted...))
				if err != nil && !strings.Contains(err.Error(), "is in use by the claim") {
					t.Errorf("%s: %v", uid, err)
				}
				if err == nil {
					got.Add(1)
					var nodes []string
					for _, d := range r.spec(uid).Devices {
						for _, node := range d.ContainerEdits.DeviceNodes {
							if node.Path != "/dev/nvidia1" { // both MIG devices need that of their GPU
								nodes = append(nodes, node.Path)
							}
						}
					}
					if len(nodes) < len(wanted) {
						t.Errorf("%s has the device nodes %v for %v", uid, nodes, wanted)
					}
					for _, node := range nodes {
						if other, taken := owners.Swap(node, uid); taken {
							t.Errorf("%s has %s, and so has %s", uid, node, other)
						}
					}
					if _, err := both[(n+i+1)%2].Prepare(t.Context(), claim(uid, wanted...)); err != nil {
						t.Errorf("%s, once more at the other process: %v", uid, err)
					}
					for _, node := range nodes {
						owners.Delete(node)
					}
				}
				if err := both[(n+i+1)%2].Unprepare(t.Context(), uid, "default", "claim-"+uid); err != nil {
					t.Errorf("%s: %v", uid, err)
				}
			}
		})
	}
	kubelet.Wait()
	if got.Load() < 40 {
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
		r.prepare(first, claim("uid-1", gpuA))
		time.Sleep(claims.Every)
		synctest.Wait()
		if len(second.InUse().Value()["GPU-a"]) != 1 {
			t.Errorf("in use at the other process: %v", second.InUse().Value())
		}
	})
}

// TestNotPrepared: the device plugin of another process, which does not know of the claim yet, does not give its GPU away.
func TestNotPrepared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	other := claims.New(r.options)
	for _, prepared := range []bool{false, true, false} {
		if err := other.NotPrepared([]string{"GPU-c", "GPU-a"}); (err != nil) != prepared {
			t.Errorf("prepared %v: %v", prepared, err)
		}
		if err := other.NotPrepared([]string{"GPU-c"}); err != nil {
			t.Error(err)
		}
		var err error
		if prepared {
			err = c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1")
		} else {
			_, err = c.Prepare(t.Context(), claim("uid-1", gpuA))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestLatePrepare: a Prepare that began before the claim was given back does not bring it back; one that begins later does.
func TestLatePrepare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		prepared, stop := r.start()
		defer stop()
		r.prepare(prepared, claim("uid-1", gpuA))
		slow := claims.New(r.options) // it has not read the records: calls wait
		late := make(chan error, 1)
		go func() {
			_, err := slow.Prepare(t.Context(), claim("uid-1", gpuA))
			late <- err
		}()
		synctest.Wait()
		for range 2 {
			r.unprepare(prepared, "uid-1")
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
		r.prepare(c, claim(uid, device))
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
	r.prepare(c, claim("uid-1", gpuA))
	s := snapshot()
	s.GPUs[0].Health = inventory.Health{State: inventory.Lost}
	r.publish(s)
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err != nil {
		t.Errorf("the GPU is lost: %v", err)
	}
	s.GPUs = s.GPUs[1:]
	for what, now := range map[string]inventory.Snapshot{"the GPU is gone": s, "the driver has not answered yet": {}} {
		stop()
		r.publish(now)
		c, stop = r.start()
		answer, err := c.Prepare(t.Context(), claim("uid-1", gpuA))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		r.nodes(ids(answer)...)
	}
	stop()
	r.publish(inventory.Snapshot{})
	c, _ = r.start()
	if err := os.Remove(cdi.ClaimFile(r.options.CDIDir, "uid-1")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Prepare(t.Context(), claim("uid-1", gpuA)); err == nil || !strings.Contains(err.Error(), "is not known yet") {
		t.Errorf("without a driver and a spec: %v", err)
	}
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
		r.prepare(c, claim("uid-1", gpuA))
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
		moved := filepath.Join(r.driver, "usr/lib64")
		if err := os.Rename(filepath.Join(r.driver, "usr/lib/x86_64-linux-gnu"), moved); err != nil {
			t.Fatal(err)
		}
		time.Sleep(claims.Every)
		synctest.Wait()
		if !strings.Contains(mounts(), "/usr/lib64/libcuda.so.590.48.01") {
			t.Errorf("mounts after the files were moved: %s", mounts())
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
			r.prepare(c, claim(uid, gpuA, migB1))
			r.unprepare(c, uid)
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
	_ = c.Unprepare(t.Context(), "/", "default", "x")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, _ = claims.New(r.options).Prepare(ended, claim("uid-1", gpuA)) // nobody runs it
	if got, want := strings.Join(counted.causes, ","), ",in-use,device,configuration,malformed,-,-malformed,not-ready"; got != want {
		t.Errorf("causes %s, want %s", got, want)
	}
}

type metrics struct{ causes []string }

func (m *metrics) Prepared(_ time.Duration, cause string)   { m.causes = append(m.causes, cause) }
func (m *metrics) Unprepared(_ time.Duration, cause string) { m.causes = append(m.causes, "-"+cause) }
