package nvidia_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// event returns an event of a whole GPU.
func event(kind inventory.EventKind, uuid string) inventory.Event {
	return inventory.Event{Kind: kind, UUID: uuid, GI: inventory.Unattributed, CI: inventory.Unattributed}
}

// TestGPUThatIsLostForAWhile: a GPU that answers at once that it is lost is asked by its handle in
// each scan, and has events again when that works. One that answers so after a while is left alone.
func TestGPUThatIsLostForAWhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		before := r.scan()
		lost := simulator.Fault{Kind: simulator.KindFail, GPU: "3", Return: "GPU_IS_LOST"}
		r.inject(lost, simulator.Fault{Kind: simulator.KindFail, Call: "EventSetWait", Return: "GPU_IS_LOST"})
		compare(t, "event", event(inventory.EventLost, r.uuid(3)), r.next())
		for range 3 {
			compare(t, "the node while it is lost", before, r.scan())
			r.contacts(3, inventory.ContactLost, "GPU_IS_LOST")
		}
		// Only what its handle answers has come back.
		r.inject(restore, simulator.Fault{Kind: simulator.KindFail, GPU: "3", Call: "DeviceGetHandleByIndex",
			Return: "GPU_IS_LOST"})
		for range 3 {
			r.scan()
			r.contacts(3, inventory.ContactLost, "GPU_IS_LOST")
		}
		r.inject(restore)
		compare(t, "the node afterwards", before, r.scan())
		r.contacts(3, inventory.ContactGood, "")
		_, _ = r.Next(r.within(time.Second)) // the next wait registers for its events
		r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 31})
		if e := r.next(); e.XID != 31 || e.UUID != r.uuid(3) {
			t.Errorf("the event of the GPU is %+v", e)
		}
		r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 13})
		if e := r.next(); e.XID != 13 {
			t.Errorf("the event after it is %+v", e)
		}

		r.inject(lost, simulator.Fault{Kind: simulator.KindSlow, GPU: "3", Delay: "5s"})
		_ = r.look()
		time.Sleep(time.Minute) // the bubble's clock
		r.inject(restore)
		_ = r.look()
		r.contacts(3, inventory.ContactLost, "GPU_IS_LOST")
		r.retry()
		r.scan()
		r.contacts(3, inventory.ContactGood, "")
	})
}

func TestEvents(t *testing.T) {
	t.Parallel()
	xid := func(r *rig, gpu int, xid uint64, gi, ci int) inventory.Event {
		return inventory.Event{Kind: inventory.EventXID, UUID: r.uuid(gpu), XID: xid, GI: gi, CI: ci}
	}
	const none = inventory.Unattributed
	one := 1
	for name, test := range map[string]struct {
		fault simulator.Fault
		want  func(r *rig) []inventory.Event
	}{
		"XID on a GPU": {
			fault: simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 31},
			want:  func(r *rig) []inventory.Event { return []inventory.Event{xid(r, 1, 31, none, none)} },
		},
		"XID with a recovery action": {
			fault: simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 95},
			want: func(r *rig) []inventory.Event {
				return []inventory.Event{xid(r, 1, 95, none, none), event(inventory.EventRecoveryAction, r.uuid(1))}
			},
		},
		"XID on a GPU instance": {
			fault: simulator.Fault{Kind: simulator.KindXID, GPU: "6", XID: 94, GI: &one},
			want:  func(r *rig) []inventory.Event { return []inventory.Event{xid(r, 6, 94, 1, none)} },
		},
		"XID on a compute instance": {
			fault: simulator.Fault{Kind: simulator.KindXID, GPU: "6:1", XID: 43},
			want:  func(r *rig) []inventory.Event { return []inventory.Event{xid(r, 6, 43, 1, 1)} },
		},
		"MIG layout": {
			fault: simulator.Fault{Kind: simulator.KindMIG, GPU: "2", Profiles: []string{"7g.80gb"}},
			want: func(r *rig) []inventory.Event {
				return []inventory.Event{event(inventory.EventMIGChange, r.uuid(2))}
			},
		},
		"uncorrected memory error": {
			fault: simulator.Fault{Kind: simulator.KindECC, GPU: "0"},
			want: func(r *rig) []inventory.Event {
				return []inventory.Event{event(inventory.EventDoubleBitECC, r.uuid(0))}
			},
		},
		"fatal poison": {
			fault: simulator.Fault{Kind: simulator.KindEvent, GPU: "0", Event: "fatal-poison"},
			want: func(r *rig) []inventory.Event {
				return []inventory.Event{event(inventory.EventFatalPoison, r.uuid(0))}
			},
		},
		"corrected memory error, which nobody asked for": {
			fault: simulator.Fault{Kind: simulator.KindEvent, GPU: "0", Event: "single-bit-ecc"},
			want:  func(*rig) []inventory.Event { return nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "a100-mig-mixed")
			if unwatched := r.Unwatched(); len(unwatched) > 0 {
				t.Fatalf("GPUs without events: %v", unwatched)
			}
			r.inject(test.fault)
			// Shows that there is nothing else before it.
			r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "7", XID: 13})
			for _, want := range append(test.want(r), xid(r, 7, 13, none, none)) {
				compare(t, "event", want, r.next())
			}
		})
	}
}

// TestEventsAfterLoss loses three GPUs of eight: each is said to be lost once, and events of the
// others go on.
func TestEventsAfterLoss(t *testing.T) {
	t.Parallel()
	r := newRig(t, "dgx-h100")
	xid := func(gpu int, xid uint64) inventory.Event {
		e := event(inventory.EventXID, r.uuid(gpu))
		e.XID = xid
		return e
	}
	r.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "3"}, simulator.Fault{Kind: simulator.KindRemove, GPU: "5"})
	compare(t, "event", event(inventory.EventBinding, ""), r.next())
	compare(t, "event", event(inventory.EventLost, r.uuid(3)), r.next())
	compare(t, "event", event(inventory.EventLost, r.uuid(5)), r.next())
	r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 79})
	compare(t, "event", xid(4, 79), r.next())
	compare(t, "event", event(inventory.EventUnavailable, r.uuid(4)), r.next())
	compare(t, "event", event(inventory.EventLost, r.uuid(4)), r.next())
	r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "7", XID: 31})
	compare(t, "event", xid(7, 31), r.next())
	if sets := r.node.Stats().EventSets; sets != 1 {
		t.Errorf("%d event sets are there, want 1", sets)
	}
}

// TestEventsOfNobody has NVML say that some GPU is lost while none admits to it: that is said again
// and again, but ever more slowly.
func TestEventsOfNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100",
			simulator.Fault{Kind: simulator.KindFail, Call: "EventSetWait", Return: "GPU_IS_LOST"})
		r.ctx = t.Context()
		var after []time.Duration
		for start := time.Now(); len(after) < 8; after = append(after, time.Since(start)) {
			compare(t, "event", event(inventory.EventLost, ""), r.next())
		}
		const s = time.Second
		compare(t, "times", []time.Duration{0, 1 * s, 3 * s, 7 * s, 12 * s, 17 * s, 22 * s, 27 * s}, after)
		r.inject(simulator.Fault{Kind: simulator.KindRestore}, simulator.Fault{Kind: simulator.KindXID, GPU: "0",
			XID: 31})
		if got := r.next(); got.XID != 31 {
			t.Errorf("got event %+v, want XID 31", got)
		}
	})
}

// TestEventsUnwatched opens sessions in which some GPUs cannot be registered for.
func TestEventsUnwatched(t *testing.T) {
	t.Parallel()
	fail := func(gpu, call, ret string) simulator.Fault {
		return simulator.Fault{Kind: simulator.KindFail, GPU: gpu, Call: call, Return: ret}
	}
	for name, test := range map[string]struct {
		faults []simulator.Fault
		want   []inventory.LeftOut
		sets   int
	}{
		"not supported": {
			faults: []simulator.Fault{fail("0", "DeviceRegisterEvents", "NOT_SUPPORTED")},
			want: []inventory.LeftOut{
				{Index: 0, Reason: "nvmlDeviceRegisterEvents: not supported by this driver or GPU: " +
					"ERROR_NOT_SUPPORTED"},
			},
			sets: 1,
		},
		"two spoil the set, one is lost": {
			faults: []simulator.Fault{
				fail("6", "DeviceRegisterEvents", "UNKNOWN"), fail("2", "DeviceRegisterEvents", "UNKNOWN"),
				{Kind: simulator.KindLost, GPU: "4"},
			},
			want: []inventory.LeftOut{
				{Index: 2, Reason: "nvmlDeviceRegisterEvents: ERROR_UNKNOWN"},
				{Index: 4, Reason: "nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST"},
				{Index: 6, Reason: "nvmlDeviceRegisterEvents: ERROR_UNKNOWN"},
			},
			sets: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "dgx-h100", test.faults...)
			compare(t, "unwatched", test.want, r.Unwatched())
			r.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "1", XID: 31})
			if got := r.next(); got.XID != 31 || got.UUID != r.uuid(1) {
				t.Errorf("got event %+v", got)
			}
			if sets := r.node.Stats().EventSets; sets != test.sets {
				t.Errorf("%d event sets are there, want %d", sets, test.sets)
			}
		})
	}
	t.Run("no events at all", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "dgx-h100", fail("", "EventSetCreate", "NOT_SUPPORTED"))
			if unwatched := r.Unwatched(); len(unwatched) != 8 {
				t.Errorf("got %d GPUs without events, want 8", len(unwatched))
			}
			r.ctx = t.Context()
			if _, err := r.Next(r.within(time.Hour)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Next: got error %v, want that of the context", err)
			}
			if got := len(r.scan().GPUs); got != 8 {
				t.Errorf("got %d GPUs, want 8", got)
			}
		})
	})
}

func TestNextErrors(t *testing.T) {
	t.Parallel()
	t.Run("wait fails", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "t4", simulator.Fault{Kind: simulator.KindFail, Call: "EventSetWait", Return: "UNKNOWN"})
		if _, err := r.Next(r.ctx); !errors.Is(err, nvml.ERROR_UNKNOWN) {
			t.Errorf("got error %v, want ERROR_UNKNOWN", err)
		}
	})
	t.Run("driver is replaced", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "t4")
		r.inject(simulator.Fault{Kind: simulator.KindDriver, Driver: "580.95.05"})
		if _, err := r.Next(r.ctx); !errors.Is(err, inventory.ErrDriverReplaced) {
			t.Errorf("Next: got error %v, want ErrDriverReplaced", err)
		}
		if _, err := r.Scan(r.ctx); !errors.Is(err, inventory.ErrDriverReplaced) {
			t.Errorf("Scan: got error %v, want ErrDriverReplaced", err)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore})
	})
	t.Run("session is closed while waiting", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, "t4")
			ended := make(chan error)
			go func() {
				_, err := r.Next(r.ctx)
				ended <- err
			}()
			synctest.Wait() // it waits
			start := time.Now()
			if err := r.Close(r.ctx); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > waitStep {
				t.Errorf("Close took %v, want at most %v", took, waitStep)
			}
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "closed") {
				t.Errorf("Next: got error %v, want that the session is closed", err)
			}
			for name, call := range map[string]func() error{
				"Next":  func() error { _, err := r.Next(r.ctx); return err },
				"Scan":  func() error { _, err := r.Scan(r.ctx); return err },
				"Read":  func() error { _, err := r.Read(r.ctx, r.uuid(0)); return err },
				"Close": func() error { return r.Close(r.ctx) },
			} {
				if err := call(); (err == nil) != (name == "Close") ||
					err != nil && !strings.Contains(err.Error(), "the NVML session is closed") {
					t.Errorf("%s after Close: got error %v", name, err)
				}
			}
		})
	})
	t.Run("an event comes when nobody waits any more", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "t4", simulator.Fault{Kind: simulator.KindHang, Call: "EventSetWait"})
		ctx, cancel := context.WithTimeout(r.ctx, time.Millisecond)
		defer cancel()
		if _, err := r.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got error %v, want that of the context", err)
		}
		r.inject(
			simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 31},
			simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 43},
			simulator.Fault{Kind: simulator.KindRestore},
		)
		if first, second := r.next(), r.next(); first.XID != 31 || second.XID != 43 {
			t.Errorf("got %+v and %+v, want XIDs 31 and 43", first, second)
		}
	})
}
