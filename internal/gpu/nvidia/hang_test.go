package nvidia_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// within returns a context that ends after d.
func (r *rig) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(r.ctx, d)
	r.t.Cleanup(cancel)
	return ctx
}

// noAnswer checks that a call ends with ErrNoAnswer after exactly so long.
func (r *rig) noAnswer(call string, after time.Duration, f func() error) {
	r.t.Helper()
	start := time.Now()
	err := f()
	if took := time.Since(start); !errors.Is(err, inventory.ErrNoAnswer) || took != after {
		r.t.Errorf("%s: got error %v after %v, want ErrNoAnswer after %v", call, err, took, after)
	}
}

// stalls checks that a call ends after exactly so long because another one does not return.
func (r *rig) stalls(call string, after time.Duration, on string, f func() error) {
	r.t.Helper()
	start := time.Now()
	err := f()
	var stall *inventory.Stall
	if !errors.As(err, &stall) || stall.Call.String() != on || time.Since(start) != after {
		r.t.Errorf("%s: got error %v after %v, want that %s does not return after %v", call, err, time.Since(start), on,
			after)
	}
}

// hanging checks which calls hang.
func (r *rig) hanging(want ...string) {
	r.t.Helper()
	var got []string
	for _, c := range r.driver.Calls() {
		got = append(got, c.String())
	}
	compare(r.t, "calls that hang", want, got)
}

func (r *rig) read(gpu int) error {
	_, err := r.Read(r.ctx, r.uuid(gpu))
	return err
}

func (r *rig) look() error {
	_, err := r.Scan(r.ctx)
	return err
}

func hang(gpu, call string) simulator.Fault {
	return simulator.Fault{Kind: simulator.KindHang, GPU: gpu, Call: call}
}

var restore = simulator.Fault{Kind: simulator.KindRestore}

// TestHang has calls hang, and then go on: time is exact in these tests, and nothing may be left
// running at their end.
func TestHang(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(t *testing.T){
		"a call about a GPU": func(t *testing.T) {
			const call = "nvmlDeviceGetMemoryInfo of GPU 3"
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(hang("3", "DeviceGetMemoryInfo"))
			start := time.Now()
			compare(t, "the node while a call hangs", before, r.scan())
			compare(t, "the time it took", gpuPatience, time.Since(start))
			r.hanging(call)
			compare(t, "the node at the next look", before, r.scan())
			r.stalls("Read of the GPU", 0, call, func() error { return r.read(3) })
			for _, other := range []int{0, 1, 2, 4, 5, 6, 7} {
				if err := r.read(other); err != nil {
					t.Errorf("GPU %d: %v", other, err)
				}
			}
			if _, err := r.Processes(r.ctx, r.uuid(4)); err != nil {
				t.Error(err)
			}
			_, err := r.Processes(r.ctx, r.uuid(3))
			r.stalls("Processes of the GPU", 0, call, func() error { return err })
			compare(t, "the time that all this took", gpuPatience, time.Since(start))
			r.stalls("Close", 3*time.Second, call, func() error { return r.Close(r.within(3 * time.Second)) })
			if err := r.read(0); err != nil {
				t.Errorf("after a Close that failed: %v", err)
			}
			r.inject(restore)
			synctest.Wait() // the call has returned
			r.hanging()
			compare(t, "the node afterwards", before, r.scan())
			if err := r.read(3); err != nil {
				t.Errorf("once the call has returned: %v", err)
			}
		},
		"calls about two GPUs": func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(hang("3", ""), hang("5", ""), simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "7",
				Action: "reset"})
			start := time.Now()
			compare(t, "the node while they hang", before, r.scan())
			compare(t, "the time it took", 2*gpuPatience, time.Since(start))
			r.hanging("nvmlDeviceGetHandleByIndex of GPU 3", "nvmlDeviceGetHandleByIndex of GPU 5")
			for range 2 {
				start := time.Now()
				r.scan()
				for _, other := range []int{0, 1, 2, 4, 6, 7} {
					reading, err := r.Read(r.ctx, r.uuid(other))
					if asks := reading.RecoveryAction.Value == inventory.RecoveryGPUReset; err != nil ||
						asks != (other == 7) {
						t.Errorf("GPU %d: %+v, %v", other, reading.RecoveryAction, err)
					}
				}
				compare(t, "the time of a look at the others", 0, time.Since(start))
			}
			r.inject(restore)
		},
		"calls about all GPUs but one": func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			hang := []int{0, 1, 2, 3, 4, 6, 7}
			for _, gpu := range hang {
				r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: strconv.Itoa(gpu)})
			}
			start := time.Now()
			compare(t, "the node while they hang", before, r.scan())
			compare(t, "the time it took", 2*gpuPatience+5*shortPatience, time.Since(start))
			compare(t, "how many calls hang", len(hang), len(r.driver.Calls()))
			r.inject(simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "5", Action: "reset"})
			start = time.Now()
			for range 3 {
				compare(t, "the node at the next look", before, r.scan())
				for _, gpu := range hang {
					call := fmt.Sprintf("nvmlDeviceGetHandleByIndex of GPU %d", gpu)
					r.stalls("Read", 0, call, func() error { return r.read(gpu) })
				}
				reading, err := r.Read(r.ctx, r.uuid(5))
				if err != nil || reading.RecoveryAction.Value != inventory.RecoveryGPUReset {
					t.Errorf("the GPU that answers: %+v, %v", reading.RecoveryAction, err)
				}
			}
			compare(t, "the time of three looks", 0, time.Since(start))
			compare(t, "how many calls hang then", len(hang), len(r.driver.Calls()))
			r.inject(restore)
			synctest.Wait()
			compare(t, "the node afterwards", before, r.scan())
			for gpu := range 8 {
				if err := r.read(gpu); err != nil {
					t.Errorf("GPU %d: %v", gpu, err)
				}
			}
		},
		"calls that return, one after the other": func(t *testing.T) {
			r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindSlow, GPU: "3", Delay: "1900ms"})
			start := time.Now()
			r.scan()
			if took := time.Since(start); took > jobPatience+gpuPatience {
				t.Errorf("a look took %v", took)
			}
			for start := time.Now(); r.read(3) != nil; time.Sleep(time.Second) { // the bubble's clock
				if time.Since(start) > 5*time.Minute {
					t.Fatal("the GPU was not read in five minutes")
				}
				_ = r.look()
			}
			r.inject(restore)
			time.Sleep(time.Minute)
			r.scan()
		},
		"a call about no GPU": func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(hang("", "DeviceGetCount"))
			r.stalls("Scan", nodePatience, "nvmlDeviceGetCount", r.look)
			r.stalls("second Scan", 0, "nvmlDeviceGetCount", r.look)
			r.inject(restore)
			synctest.Wait()
			compare(t, "the node afterwards", before, r.scan())
		},
		"a look that is told to stop": func(t *testing.T) {
			r := newRig(t, "t4")
			r.inject(hang("", "DeviceGetUUID"))
			ctx, cancel := context.WithCancel(r.ctx)
			time.AfterFunc(time.Second, cancel)
			if _, err := r.Scan(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want that of the context", err)
			}
			// Nobody has lost patience with that call yet.
			start := time.Now()
			_ = r.look()
			compare(t, "the time of the next look", gpuPatience-time.Second, time.Since(start))
			r.inject(restore)
		},
		"a wait for events": func(t *testing.T) {
			r := newRig(t, "t4", hang("", "EventSetWait"))
			next := func() error { _, err := r.Next(r.ctx); return err }
			r.stalls("first Next", waitStep+waitPatience, "nvmlEventSetWait", next)
			r.stalls("second Next", 0, "nvmlEventSetWait", next)
			r.hanging("nvmlEventSetWait")
			r.scan() // the other calls go on
			r.stalls("Close", time.Second, "nvmlEventSetWait", func() error { return r.Close(r.within(time.Second)) })
			r.scan()
			r.inject(restore)
			time.Sleep(waitStep) // the bubble's clock
			synctest.Wait()
			r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31})
			if e := r.next(); e.XID != 31 {
				t.Errorf("the event after the hang is %+v", e)
			}
		},
		"shutdown": func(t *testing.T) {
			r := newRig(t, "t4", hang("", "Shutdown"))
			r.noAnswer("Close", time.Second, func() error { return r.Close(r.within(time.Second)) })
			r.stalls("Close again", time.Second, "nvmlShutdown", func() error { return r.Close(r.within(time.Second)) })
			r.inject(restore)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, test)
		})
	}
}

// TestOpenThatComesLate: a session that is opened when nobody waits for it any more is the next
// caller's.
func TestOpenThatComesLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t, "dgx-h100")
		r := &rig{t: t, ctx: t.Context(), node: node, driver: nvidia.New(nvidia.Options{Library: node.NVML(),
			Root: node.Root()})}
		r.inject(hang("", "Init"))
		open := func() error { _, err := r.driver.Open(r.ctx); return err }
		r.stalls("first Open", openPatience, "nvmlInit", open)
		r.stalls("second Open", 0, "nvmlInit", open)
		r.inject(restore)
		synctest.Wait()
		r.inject(hang("", "Init")) // from now on, the initialization of NVML hangs
		s, err := r.driver.Open(r.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if sessions := node.Stats().Sessions; sessions != 1 {
			t.Errorf("%d sessions are open, want one", sessions)
		}
		r.inject(restore)
		if err := s.Close(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.clean()
		if s, err = r.driver.Open(r.ctx); err != nil { // a new one
			t.Fatal(err)
		}
		if _, err := s.Scan(r.ctx); err != nil {
			t.Error(err)
		}
		if err := s.Close(r.ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// TestOpenWithAGPUThatHangs: the others are met, and the one that hangs joins them once its call
// has returned.
func TestOpenWithAGPUThatHangs(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceRegisterEvents", ""} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			r := newRig(t, "dgx-h100", hang("3", call))
			s := r.scan()
			compare(t, "the time until the others are there", gpuPatience, time.Since(start))
			if call == "" {
				call = "DeviceGetHandleByIndex"
			}
			compare(t, "what is left out", []inventory.LeftOut{{
				Index: 3, Reason: "the GPU cannot be identified: nvml" + call + " does not return",
			}}, s.LeftOut)
			compare(t, "what gives no events",
				[]inventory.LeftOut{{Index: 3, Reason: "nvml" + call + " does not return"}}, r.Unwatched())
			compare(t, "how many are there", 7, len(s.GPUs))
			for _, g := range s.GPUs {
				if reading, err := r.Read(r.ctx, g.UUID); err != nil || reading.Contact != inventory.ContactGood {
					t.Errorf("GPU %d: %+v, %v", g.Index, reading, err)
				}
			}
			r.inject(restore)
			synctest.Wait()
			if s := r.scan(); len(s.GPUs) != 8 || len(s.LeftOut) > 0 {
				t.Errorf("afterwards %d GPUs are there, and left out are %v", len(s.GPUs), s.LeftOut)
			}
			_, _ = r.Next(r.within(time.Second))
			compare(t, "what gives no events afterwards", 0, len(r.Unwatched()))
			r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 31})
			if e := r.next(); e.XID != 31 || e.UUID != r.uuid(3) {
				t.Errorf("the event of the GPU is %+v", e)
			}
		})
	}
}

// TestGPUThatHangsAgainAndAgain: it is asked when its call has returned, and when that call hangs,
// too, only after Retry.
func TestGPUThatHangsAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		// The call never returns in the instant in which the loop below looks: then the job is between
		// two calls.
		r := newRig(t, "dgx-h100", simulator.Fault{Kind: simulator.KindSlow, GPU: "3", Call: "DeviceGetMinorNumber",
			Delay: "45500ms"})
		r.ctx = t.Context()
		asked := 0
		last := time.Time{}
		for range 3600 {
			r.scan()
			_ = r.read(3)
			for _, c := range r.driver.Calls() {
				if !c.Since.Equal(last) {
					asked, last = asked+1, c.Since
				}
			}
			time.Sleep(time.Second)
		}
		compare(t, "how often it was asked within an hour", maxHangs, asked)
		r.inject(restore)
		if err := r.read(3); err == nil {
			t.Error("it was read without Retry")
		}
		if err := r.Retry(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.scan()
		if err := r.read(3); err != nil {
			t.Errorf("after Retry: %v", err)
		}
	})
}

// TestConcurrentCallers has more callers than workers.
func TestConcurrentCallers(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	want := r.scan()
	errs := make(chan error)
	const callers, calls = 8, 20
	for i := range callers {
		go func() {
			for range calls {
				snapshot, err := r.Scan(r.ctx)
				if err == nil && !snapshot.Equal(want) {
					err = errors.New("got another Snapshot")
				}
				if err == nil {
					_, err = r.Read(r.ctx, r.uuid(i))
				}
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range callers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// TestNothingLeft counts goroutines, so it does not run beside other tests.
func TestNothingLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	r := newRig(t, "dgx-h100")
	r.scan()
	ctx, cancel := context.WithCancel(r.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := r.Next(ctx); err != nil {
				return
			}
		}
	}()
	r.inject(hang("", "DeviceGetMemoryInfo"))
	if _, err := r.Scan(r.within(time.Millisecond)); !errors.Is(err, inventory.ErrNoAnswer) {
		t.Errorf("got error %v, want ErrNoAnswer", err)
	}
	r.inject(simulator.Fault{Kind: simulator.KindRestore})
	cancel()
	<-ended
	if err := r.Close(r.ctx); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for runtime.NumGoroutine() > before && time.Now().Before(deadline) {
		runtime.Gosched()
	}
	if after := runtime.NumGoroutine(); after > before {
		stacks := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after Close:\n%s", before, after, stacks[:runtime.Stack(stacks, true)])
	}
}
