package claims_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
)

// TestTimeSlices: a claim gets the time slice that it wants, on its whole GPUs alone, and the GPU
// is set back when it is given back.
func TestTimeSlices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	for range 2 {
		r.prepare(c, sliced("uid-1", gpuA, migB0))
	}
	looks := sliced("uid-2", gpuC)
	looks.Results[0].AdminAccess = true
	r.prepare(c, looks)
	if got := r.slice("GPU-a") + r.slice("GPU-b") + r.slice("GPU-c"); got != "300" {
		t.Errorf("time slices %s, want 3, 0 and 0", got)
	}
	for _, uid := range []string{"uid-2", "uid-1"} {
		r.unprepare(c, uid)
	}
	if got := r.slice("GPU-a"); got != "0" {
		t.Errorf("after Unprepare the time slice is %s", got)
	}
	if got := files(t, filepath.Join(r.options.StateDir, "claims")); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
}

// TestSharesWithTimeSlices: as long as one share has the time slice, the GPU keeps it. Shares with
// another one are refused.
func TestSharesWithTimeSlices(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	for _, uid := range []string{"uid-1", "uid-2", "uid-3"} {
		wanted := part(uid, 20, gpuA)
		if uid != "uid-3" {
			wanted.Configs = sliced(uid).Configs
		}
		if _, err := ask(t.Context(), c, wanted); (err == nil) == (uid == "uid-3") {
			t.Errorf("%s: %v", uid, err)
		}
	}
	for i, want := range []string{"3", "0"} {
		uid := []string{"uid-1", "uid-2"}[i]
		r.unprepare(c, uid)
		if got := r.slice("GPU-a"); got != want {
			t.Errorf("after Unprepare of %s the time slice is %s, want %s", uid, got, want)
		}
	}
}

// TestTimeSliceThatCannotBeSet: the claim is refused, its pod gets it when the program works again,
// and giving it back never waits for that: no other claim gets the GPU before it is set back.
func TestTimeSliceThatCannotBeSet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		smi := func(err error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.smi = err
		}
		smi(errors.New("nvidia-smi: exit status 3"))
		if _, err := ask(t.Context(), c, sliced("uid-1", gpuA)); err == nil ||
			!strings.Contains(err.Error(), "exit status 3") || r.spec("uid-1") != nil {
			t.Errorf("Prepare() = %v", err)
		}
		smi(nil)
		if _, err := ask(t.Context(), c, sliced("uid-1", gpuA)); err != nil || r.slice("GPU-a") != "3" {
			t.Errorf("Prepare() = %v, time slice %s", err, r.slice("GPU-a"))
		}
		smi(errors.New("nvidia-smi: exit status 9"))
		if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil || r.record("uid-1") != "" {
			t.Errorf("Unprepare() = %v, record %q", err, r.record("uid-1"))
		}
		for range 3 { // the second call finds a record, and the third one the CDI spec that the loop has written
			if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err == nil ||
				!strings.Contains(err.Error(), "exit status 9") {
				t.Errorf("another claim on a GPU that was not set back: %v", err)
			}
			r.configs.Publish(r.configs.Value())
			synctest.Wait()
		}
		smi(nil)
		time.Sleep(claims.RefreshInterval)
		synctest.Wait()
		if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err != nil || r.slice("GPU-a") != "0" {
			t.Errorf("Prepare() = %v, time slice %s", err, r.slice("GPU-a"))
		}
	})
}

// TestTimeSlicesOfAnotherBoot are gone by themselves: nothing is run for them.
func TestTimeSlicesOfAnotherBoot(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, stop := r.start()
	r.prepare(c, sliced("uid-1", gpuA))
	stop()
	r.options.BootID, r.smi = "two", errors.New("nobody needs it")
	c, stop = r.start()
	if _, err := ask(t.Context(), c, claim("uid-4", gpuA)); err != nil {
		t.Errorf("a claim that wants the default: %v", err)
	}
	if err := c.Unprepare(t.Context(), "uid-4", "default", "claim-uid-4"); err != nil {
		t.Error(err)
	}
	r.mu.Lock()
	r.smi = nil
	r.mu.Unlock()
	if _, err := ask(t.Context(), c, sliced("uid-5", gpuA)); err != nil || r.slice("GPU-a") != "3" {
		t.Errorf("a claim of this boot: %v, time slice %s", err, r.slice("GPU-a"))
	}
	if err := c.Unprepare(t.Context(), "uid-5", "default", "claim-uid-5"); err != nil || r.slice("GPU-a") != "0" {
		t.Errorf("its Unprepare: %v, time slice %s, which a claim of another boot wanted", err, r.slice("GPU-a"))
	}
	if err := c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1"); err != nil {
		t.Error(err)
	}
	if _, err := ask(t.Context(), c, claim("uid-2", gpuA)); err != nil {
		t.Error(err)
	}
	for i, boot := range []string{"two", "", "three"} { // a boot that is not known may be the same
		if _, err := ask(t.Context(), c, sliced(fmt.Sprint("uid-6", i), gpuC)); err != nil || r.slice("GPU-c") != "3" {
			t.Errorf("Prepare() = %v, time slice %s", err, r.slice("GPU-c"))
		}
		stop()
		r.options.BootID = boot
		c, stop = r.start()
		if err := c.Unprepare(t.Context(), fmt.Sprint("uid-6", i), "default", "x"); err != nil || r.slice("GPU-c") != "0" {
			t.Errorf("Unprepare() with boot %q: %v, time slice %s", boot, err, r.slice("GPU-c"))
		}
	}
	stop()
	r.options.SetTimeSlice = nil
	c, _ = r.start()
	_, err := ask(t.Context(), c, sliced("uid-3", gpuC))
	if want := "sharing.timeSlicingConfig.interval: only Default is supported on this node"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("where no program sets it: %v, want %s", err, want)
	}
	if _, err := os.Stat(filepath.Join(r.options.StateDir, "claims", "GPU-c.timeslice")); !os.IsNotExist(err) {
		t.Errorf("a mark without a time slice: %v", err)
	}
}

// TestTimeSliceOfASilentGPU: a claim is given back without a wait for another GPU whose time slice
// cannot be set back.
func TestTimeSliceOfASilentGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		set := r.options.SetTimeSlice
		r.options.SetTimeSlice = func(ctx context.Context, gpu string, interval int) error {
			if gpu == "GPU-a" && interval == 0 {
				<-ctx.Done()
				return ctx.Err()
			}
			return set(ctx, gpu, interval)
		}
		c, stop := r.start()
		defer stop()
		r.prepare(c, shared("uid-1", gpuA))
		r.prepare(c, shared("uid-2", gpuC))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := c.Unprepare(ctx, "uid-1", "default", "claim-uid-1"); err != nil {
			t.Error(err)
		}
		began := time.Now()
		if err := c.Unprepare(t.Context(), "uid-2", "default", "claim-uid-2"); err != nil || time.Since(began) > 0 {
			t.Errorf("Unprepare() = %v after %v", err, time.Since(began))
		}
	})
}
