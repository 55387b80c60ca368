package nvidia

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
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

// TestHang has calls hang, and then go on: time is exact in these tests, and nothing may be left running at their end.
func TestHang(t *testing.T) {
	t.Parallel()
	hang := func(call string) simulator.Fault { return simulator.Fault{Kind: simulator.KindHang, Call: call} }
	restore := simulator.Fault{Kind: simulator.KindRestore}

	t.Run("scan", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(simulator.Fault{Kind: simulator.KindHang, GPU: "3", Call: "DeviceGetMemoryInfo"})
			scan := func() error { _, err := r.Scan(r.within(5 * time.Second)); return err }
			compare(t, "calls that hang before anybody knows", 0, r.driver.Hanging())
			r.noAnswer("first Scan", 5*time.Second, scan)
			compare(t, "calls that hang", 1, r.driver.Hanging())
			r.noAnswer("second Scan", 0, scan)
			r.noAnswer("Read", 0, func() error { _, err := r.Read(r.within(time.Second), r.uuid(0)); return err })
			r.noAnswer("Close", 3*time.Second, func() error { return r.Close(r.within(3 * time.Second)) })
			r.noAnswer("Open", 0, func() error { _, err := r.driver.Open(r.within(time.Second)); return err })
			if sessions := r.node.Stats().Sessions; sessions != 1 {
				t.Errorf("%d sessions are open while a call hangs, want 1", sessions)
			}
			r.inject(restore)
			synctest.Wait() // the call has returned
			compare(t, "calls that hang when it has returned", 0, r.driver.Hanging())
			if err := r.Close(r.ctx); err != nil {
				t.Fatal(err)
			}
			r.clean()
			s, err := r.driver.Open(r.ctx)
			if err != nil {
				t.Fatal(err)
			}
			r.Session = s
			compare(t, "the node afterwards", before, r.scan())
		})
	})
	t.Run("scan, and the session goes on", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "dgx-h100")
			before := r.scan()
			r.inject(hang("DeviceGetNvLinkState"))
			r.noAnswer("Scan", time.Second, func() error { _, err := r.Scan(r.within(time.Second)); return err })
			r.inject(restore)
			synctest.Wait()
			compare(t, "the node afterwards", before, r.scan())
		})
	})
	t.Run("scan that is told to stop", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "t4")
			r.inject(hang("DeviceGetName"))
			ctx, cancel := context.WithCancel(r.ctx)
			time.AfterFunc(time.Second, cancel)
			if _, err := r.Scan(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want that of the context", err)
			}
			// Nobody has lost patience with that call yet.
			r.noAnswer("Scan", time.Second, func() error { _, err := r.Scan(r.within(time.Second)); return err })
			r.noAnswer("Scan", 0, func() error { _, err := r.Scan(r.within(time.Second)); return err })
			r.inject(restore)
		})
	})
	t.Run("open", func(t *testing.T) {
		t.Parallel()
		for _, call := range []string{"Init", "DeviceGetHandleByIndex", "DeviceRegisterEvents"} {
			synctest.Test(t, func(t *testing.T) {
				node := newNode(t, "dgx-h100")
				r := &rig{t: t, ctx: t.Context(), node: node, driver: New(Options{Library: node.NVML(), Root: node.Root()})}
				r.inject(hang(call))
				open := func() error { _, err := r.driver.Open(r.within(time.Minute)); return err }
				r.noAnswer("first Open", time.Minute, open)
				r.noAnswer("second Open", 0, open)
				r.inject(restore)
				synctest.Wait() // the session that nobody waits for any more is closed
				r.clean()
				s, err := r.driver.Open(r.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Close(r.ctx); err != nil {
					t.Fatal(err)
				}
				r.clean()
			})
		}
	})
	t.Run("wait for events", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "t4", hang("EventSetWait"))
			next := func() error { _, err := r.Next(r.ctx); return err }
			r.noAnswer("first Next", waitStep+waitPatience, next)
			r.noAnswer("second Next", 0, next)
			compare(t, "calls that hang", 1, r.driver.Hanging())
			r.scan() // the other calls go on
			r.noAnswer("Close", time.Second, func() error { return r.Close(r.within(time.Second)) })
			r.inject(restore)
		})
	})
	t.Run("shutdown", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "t4", hang("Shutdown"))
			r.noAnswer("Close", time.Second, func() error { return r.Close(r.within(time.Second)) })
			r.noAnswer("Close again", time.Second, func() error { return r.Close(r.within(time.Second)) })
			r.inject(restore)
		})
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
	r.inject(simulator.Fault{Kind: simulator.KindHang, Call: "DeviceGetMemoryInfo"})
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
