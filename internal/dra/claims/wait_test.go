package claims_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestPrepareWaits: what passes by itself is waited for, as kubelet asks again only after a minute
// or more. The call succeeds as soon as it can.
func TestPrepareWaits(t *testing.T) {
	t.Parallel()
	other := func(r *rig, c *claims.Claims) { r.prepare(c, claim("other", gpuA)) }
	pod := []kubelet.HeldDevice{{ID: "GPU-a", Resource: "nvidia.com/gpu", Pod: "ns/pod"}}
	for name, tt := range map[string]struct {
		before, passes func(*rig, *claims.Claims)
		took           time.Duration // from when it has passed
	}{
		"another claim has the device": {other, func(r *rig, c *claims.Claims) { r.unprepare(c, "other") }, 0},
		"a pod has it by the device plugin": {func(r *rig, _ *claims.Claims) {
			r.held = pod
		}, func(r *rig, _ *claims.Claims) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.held = nil
		}, time.Second},
		"kubelet does not tell": {func(r *rig, _ *claims.Claims) {
			r.heldErr = errors.New("not yet")
		}, func(r *rig, _ *claims.Claims) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.heldErr = nil
		}, time.Second},
		"the driver has not answered": {func(r *rig, _ *claims.Claims) { r.publish(inventory.Snapshot{}) },
			func(r *rig, _ *claims.Claims) {
				r.publish(snapshot())
			}, 0},
		"the devices of the node are not known": {func(r *rig, _ *claims.Claims) { r.pools.Publish(dra.Pool{}) },
			func(r *rig, _ *claims.Claims) {
				r.publish(snapshot())
			}, 0},
		"it was allocated again": {func(r *rig, c *claims.Claims) {
			r.prepare(c, claim("uid-1", gpuC))
		}, func(r *rig, c *claims.Claims) { r.unprepare(c, "uid-1") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r, c, stop := startPatient(t)
				defer stop()
				tt.before(r, c)
				time.Sleep(300 * time.Millisecond)
				answer := make(chan error, 1)
				go func() {
					_, err := ask(t.Context(), c, claim("uid-1", gpuA))
					answer <- err
				}()
				time.Sleep(20 * time.Second)
				synctest.Wait()
				if len(answer) > 0 {
					t.Fatalf("it does not wait: %v", <-answer)
				}
				passed := time.Now()
				tt.passes(r, c)
				err := <-answer
				if name == "it was allocated again" { // the claim was unprepared while the call waited: kubelet begins again
					if err == nil || !strings.Contains(err.Error(), "unprepared while it was being prepared") {
						t.Errorf("Prepare() = %v", err)
					}
					_, err = ask(t.Context(), c, claim("uid-1", gpuA))
				}
				if took := time.Since(passed); err != nil || took > tt.took {
					t.Errorf("Prepare() = %v, %v after it could", err, took)
				}
			})
		})
	}
}

// startPatient starts claims whose calls wait for half a minute, as the daemon's do.
func startPatient(t *testing.T) (*rig, *claims.Claims, func()) {
	t.Helper()
	r := newRig(t)
	r.options.Patience = 30 * time.Second
	c, stop := r.start()
	return r, c, stop
}

// TestPrepareDoesNotWait: for what does not pass by itself there is an answer at once, and one
// about the rest after half a minute.
func TestPrepareDoesNotWait(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		wanted dra.Claim
		ill    bool
		took   time.Duration
	}{
		"a device that is not there": {wanted: claim("uid-1", "gpu-9")},
		"no device":                  {wanted: claim("uid-1")},
		"bad health":                 {wanted: claim("uid-1", gpuC), ill: true},
		"a device that is in use":    {wanted: claim("uid-1", gpuA), took: 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r, c, stop := startPatient(t)
				defer stop()
				r.prepare(c, claim("other", gpuA))
				if tt.ill {
					s := snapshot()
					s.GPUs[2].Health = inventory.Health{State: inventory.Lost}
					r.publish(s)
				}
				began := time.Now()
				if _, err := ask(t.Context(), c, tt.wanted); err == nil || time.Since(began) != tt.took {
					t.Errorf("Prepare() = %v after %v, want an error after %v", err, time.Since(began), tt.took)
				}
			})
		})
	}
}

// TestAWaitThatEnds: with the call, with the claim, and with the time in which this process leads.
func TestAWaitThatEnds(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"kubelet waits no longer": "in use by the claim", "unprepared": "unprepared while it was being prepared",
		"another process leads": dra.ErrEnded.Error(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r, c, stop := startPatient(t)
				defer stop()
				r.prepare(c, claim("other", gpuA))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				answer := make(chan error, 1)
				go func() {
					_, err := ask(ctx, c, claim("uid-1", gpuA))
					answer <- err
				}()
				time.Sleep(time.Second / 2)
				began := time.Now()
				switch name {
				case "kubelet waits no longer":
					cancel()
				case "unprepared":
					r.unprepare(c, "uid-1")
				default:
					stop()
				}
				if err := <-answer; err == nil || !strings.Contains(err.Error(), want) || time.Since(began) > 0 {
					t.Errorf("Prepare() = %v after %v, want %q", err, time.Since(began), want)
				}
			})
		})
	}
}

// TestAllocatedAnew: a claim that is prepared does not get the devices of another allocation, nor
// keeps its own under that.
func TestAllocatedAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	r.prepare(c, claim("uid-1", gpuA))
	_, err := ask(t.Context(), c, claim("uid-1", gpuC))
	if want := "it has gpu-2 now, and is prepared with gpu-0, which is not unprepared yet"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("Prepare() = %v, want %q", err, want)
	}
	if in := c.InUse().Value(); len(in["GPU-a"]) != 1 || len(in["GPU-c"]) != 0 {
		t.Errorf("in use: %v", in)
	}
	r.unprepare(c, "uid-1")
	r.prepare(c, claim("uid-1", gpuC))
}

// TestReadClaim: a claim is not prepared that cannot be read, or that is another one by now, or
// that was given back while it was read.
func TestReadClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c, _ := r.start()
	for want, read := range map[string]func(context.Context) (dra.Claim, error){
		"read the claim: no API server": func(context.Context) (dra.Claim, error) {
			return dra.Claim{}, errors.New("no API server")
		},
		"the claim was deleted and created again: its UID is uid-2 instead of uid-1": func(
			context.Context,
		) (dra.Claim, error) {
			return claim("uid-2", gpuA), nil
		},
		"the claim was unprepared while it was being prepared": func(context.Context) (dra.Claim, error) {
			r.unprepare(c, "uid-1")
			return claim("uid-1", gpuA), nil
		},
	} {
		if _, err := c.Prepare(t.Context(), "uid-1", read); err == nil || err.Error() != want || r.record("uid-1") != "" {
			t.Errorf("Prepare() = %v, want %q; record %q", err, want, r.record("uid-1"))
		}
	}
}

// TestKubeletIsSilent: where all GPUs are in slices, nothing was offered as a resource since they
// were handed over. A claim is prepared there also when kubelet does not say which pods hold GPUs,
// and that is counted; it is not where a GPU is the device plugin's.
func TestKubeletIsSilent(t *testing.T) {
	t.Parallel()
	for name, hangs := range map[string]bool{"fails": false, "hangs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				counted := &metrics{}
				owners := feed.New(dra.All(snapshot().GPUs))
				r.options.Metrics, r.options.Owners = counted, owners
				r.options.HeldDevices = func(ctx context.Context) ([]kubelet.HeldDevice, error) {
					if hangs {
						limited, cancel := context.WithTimeout(ctx, time.Minute)
						defer cancel()
						<-limited.Done()
					}
					return nil, errors.New("received message larger than max")
				}
				c, stop := r.start()
				defer stop()
				began := time.Now()
				r.prepare(c, claim("uid-1", gpuA))
				if took := time.Since(began); counted.unasked != 1 || took > 5*time.Second {
					t.Errorf("counted %d times, prepared after %v", counted.unasked, took)
				}
				split := dra.All(snapshot().GPUs)
				split["GPU-a"] = dra.OwnedByPlugin
				owners.Publish(split)
				if _, err := ask(t.Context(), c, claim("uid-2", gpuC)); err == nil ||
					!strings.Contains(err.Error(), "larger than max") && !hangs {
					t.Errorf("beside the device plugin: Prepare() = %v", err)
				}
			})
		})
	}
}

// TestUnprepareWhileAPodRuns: kubelet gives a claim back whose pod was deleted by force before the
// pod's containers have ended. The GPU is not given to another claim before that. The call waits
// without work, and is not needed any more when kubelet makes it again.
func TestUnprepareWhileAPodRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.options.Patience = 30 * time.Second
		runs, asked := map[string]bool{"pod-1": true, "pod-2": true}, 0
		r.options.PodRuns = func(uid string) bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			asked++
			return runs[uid]
		}
		c, stop := r.start()
		defer stop()
		first := claim("uid-1", gpuA)
		first.Pods = []string{"pod-1"}
		r.prepare(c, first)
		first.Pods = []string{"pod-2"} // another one that shares the claim
		r.prepare(c, first)

		early, next := make(chan error, 1), make(chan error, 1)
		go func() { early <- c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") }()
		go func() {
			_, err := ask(t.Context(), c, claim("uid-2", gpuA))
			next <- err
		}()
		end := func(uid string) {
			r.mu.Lock()
			defer r.mu.Unlock()
			runs[uid] = false
		}
		time.Sleep(10*time.Second + time.Millisecond)
		end("pod-1")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if len(early)+len(next) > 0 || r.spec("uid-1") == nil || asked > 100 {
			t.Fatalf("given back while a pod runs; it was asked %d times whether one does", asked)
		}
		end("pod-2")
		ended := time.Now()
		r.unprepare(c, "uid-1")
		if err := <-next; err != nil || time.Since(ended) > 0 {
			t.Errorf("the next claim: %v, %v after the pods have ended", err, time.Since(ended))
		}
		if err := <-early; err != nil {
			t.Errorf("the early call: %v", err)
		}
	})
}

// TestWhatIsDestroyedLaterIsNotTheNextPods: a claim is given back, and prepared for the next pod at
// once. The task that destroys later what is left of claims has seen it in between.
func TestWhatIsDestroyedLaterIsNotTheNextPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		d := r.divide()
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", small0))
		goOn := make(chan struct{})
		d.looks = func() { <-goOn }
		back, prepared := make(chan error, 1), make(chan error, 1)
		go func() { back <- c.Unprepare(t.Context(), "uid-1", "default", "claim-uid-1") }()
		time.Sleep(claims.RefreshInterval) // the task waits until the call has ended
		synctest.Wait()
		go func() {
			_, err := ask(t.Context(), c, claim("uid-1", small0))
			prepared <- err
		}()
		synctest.Wait()
		close(goOn)
		if err := errors.Join(<-back, <-prepared); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * claims.RefreshInterval)
		synctest.Wait()
		if d.has() != "1g.10gb@0/1" || strings.Contains(r.record("uid-1"), "released") || r.spec("uid-1") == nil {
			t.Errorf("the GPU has %q, record %s, spec %v", d.has(), r.record("uid-1"), r.spec("uid-1"))
		}
	})
}

// TestALeakIsNotTheNextPods: a claim that counts as leaked is given back and prepared for the next
// pod while the API server is asked about it.
func TestALeakIsNotTheNextPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.asksAPI = false
		var c *claims.Claims
		var last, again atomic.Bool
		r.options.LookUp = func(context.Context, string, string) (dra.Claim, bool, error) {
			if last.Load() && !again.Swap(true) {
				r.unprepare(c, "uid-1")
				r.prepare(c, claim("uid-1", gpuA))
			}
			return dra.Claim{}, false, nil
		}
		c, stop := r.start()
		defer stop()
		r.prepare(c, claim("uid-1", gpuA))
		time.Sleep(20*time.Minute + claims.RefreshInterval/2) // ten minutes, and ten from the first look after them
		if r.record("uid-1") == "" {
			t.Fatal("it was given back before")
		}
		last.Store(true)
		time.Sleep(2 * time.Minute)
		if !again.Load() || r.record("uid-1") == "" {
			t.Errorf("asked: %v, record %q", again.Load(), r.record("uid-1"))
		}
	})
}

// TestACallLongAfterTheClaimWasGivenBack: that is forgotten while the call is answered, which is
// not the same as that it happens then.
func TestACallLongAfterTheClaimWasGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c, stop := r.start()
		defer stop()
		for name, meanwhile := range map[string]func(){"nothing": func() {}, "given back again": func() { r.unprepare(c, "uid-1") }} {
			r.prepare(c, claim("uid-1", gpuA))
			r.unprepare(c, "uid-1")
			time.Sleep(2*time.Minute - 2*claims.RefreshInterval)
			_, err := c.Prepare(t.Context(), "uid-1", func(context.Context) (dra.Claim, error) {
				time.Sleep(4 * claims.RefreshInterval)
				meanwhile()
				return claim("uid-1", gpuA), nil
			})
			if failed := err != nil; failed != (name == "given back again") {
				t.Errorf("%s: Prepare() = %v", name, err)
			}
			r.unprepare(c, "uid-1")
		}
	})
}
