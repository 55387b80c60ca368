package healthevents_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/healthevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/nvsentinel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A sender is the daemon of a node: processes with a Reporter, one after the other.
type sender struct {
	t         *testing.T
	clock     *clocktesting.FakeClock
	configs   *feed.Feed[config.Config]
	snapshots *feed.Feed[inventory.Snapshot]
	unproven  *feed.Feed[map[string]string]
	repairs   *feed.Feed[repair.Status]
	dir       string
	timeout   time.Duration
	leads     atomic.Bool
	accepted  atomic.Int64 // events
	failed    atomic.Int64
	stop      func()
}

// newSender returns a sender for a receiver, with two healthy GPUs, and starts its process.
func newSender(t *testing.T, r *nvsentinel.Receiver) *sender {
	t.Helper()
	s := &sender{
		t: t, clock: clocktesting.NewFakeClock(time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)), dir: t.TempDir(),
		configs:   feed.New(config.Config{Live: config.Live{Features: config.Features{HealthEvents: "unix://" + r.Socket}}}),
		snapshots: feed.New(inventory.Snapshot{}), unproven: feed.New(map[string]string(nil)), stop: func() {},
		repairs: feed.New(repair.Status{}),
	}
	s.leads.Store(true)
	s.gpus(is(inventory.Healthy, ""), is(inventory.Healthy, ""))
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

// start starts a process in place of the present one, which is killed.
func (s *sender) start() {
	s.stop()
	ctx, cancel := context.WithCancel(s.t.Context())
	reporter := healthevents.New(healthevents.Options{
		Configs: s.configs, Snapshots: s.snapshots, Node: "node-1", StateDir: s.dir, Clock: s.clock, Timeout: s.timeout,
		Unproven: func(inventory.Snapshot) (map[string]string, <-chan struct{}) { return s.unproven.Latest() },
		Repairs:  s.repairs,
		Lead: func() error {
			if !s.leads.Load() {
				return errors.New("another process leads")
			}
			return nil
		},
		Sent: func(accepted bool, events int) {
			if accepted {
				s.accepted.Add(int64(events))
			} else {
				s.failed.Add(int64(events))
			}
		},
	})
	var running sync.WaitGroup
	running.Go(func() { reporter.Run(ctx) })
	s.stop = func() { cancel(); running.Wait() }
}

// is returns the health of a GPU.
func is(state inventory.State, remedy inventory.Remedy) inventory.Health {
	h := inventory.Health{State: state, Remedy: remedy}
	if state == inventory.Unhealthy {
		h.Reason, h.XID = "XID 48", 48
	}
	return h
}

// gpus sets the health of the GPUs.
func (s *sender) gpus(health ...inventory.Health) {
	now := inventory.Snapshot{Generation: s.snapshots.Value().Generation + 1}
	for i, h := range health {
		digit := string(rune('0' + i))
		now.GPUs = append(now.GPUs, inventory.GPU{Index: i, UUID: "GPU-" + digit, BDF: "0000:0" + digit + ":00.0", Health: h})
	}
	s.snapshots.Publish(now)
}

// until lets time go by until something is so.
func (s *sender) until(what string, so func() bool) {
	s.t.Helper()
	poll.Until(s.t, what, func() bool {
		if s.clock.HasWaiters() {
			s.clock.Step(time.Second)
		}
		return so()
	})
}

// pass lets minutes go by in which everything could happen.
func (s *sender) pass() {
	s.t.Helper()
	end := s.clock.Now().Add(3 * time.Minute)
	s.until("three minutes", func() bool { return s.clock.Now().After(end) })
}

// gets waits until the receiver has exactly these events, and until no further one can come.
func (s *sender) gets(r *nvsentinel.Receiver, want ...string) {
	s.t.Helper()
	s.until("events", func() bool { return len(r.Received()) >= len(want) })
	s.pass()
	if diff := cmp.Diff(want, r.Received()); diff != "" {
		s.t.Fatalf("events (-want +got):\n%s", diff)
	}
}

const (
	gpu0 = " GPU_UUID=GPU-0 PCI=0000:00:00.0"
	gpu1 = " GPU_UUID=GPU-1 PCI=0000:01:00.0"
)

// TestOneEventForEachChange: a GPU has one event when it is first seen and one for each change, with
// the action for its remedy. No two events of a node have the same time.
func TestOneEventForEachChange(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	want := []string{"store healthy" + gpu0, "store healthy" + gpu1}
	s.gets(r, want...)
	for _, tt := range []struct {
		health inventory.Health
		want   string // empty for no event
	}{
		{is(inventory.Suspect, ""), ""},
		{is(inventory.Unhealthy, inventory.RemedyReset), "store action 2 XID 48"},
		{is(inventory.Unknown, ""), ""},
		{is(inventory.Unhealthy, inventory.RemedyReset), ""},
		{is(inventory.Unhealthy, inventory.RemedyReboot), "store action 24 XID 48"},
		{is(inventory.Unhealthy, inventory.RemedyHardware), "store action 5 XID 48"},
		{is(inventory.Lost, inventory.RemedyReconnect), "store action 5"},
		{is(inventory.Lost, inventory.RemedyDrain), "store action 2"},
		{is(inventory.Healthy, ""), "store healthy"},
	} {
		s.gpus(tt.health, is(inventory.Healthy, ""))
		if tt.want != "" {
			want = append(want, tt.want+gpu0)
		}
		s.gets(r, want...)
	}
	times := r.Times()
	slices.SortFunc(times, time.Time.Compare)
	if n := len(slices.Compact(times)); n != len(want) {
		t.Errorf("%d times of %d events", n, len(want))
	}
	if n := s.accepted.Load(); n != int64(len(want)) || s.failed.Load() != 0 {
		t.Errorf("%d events counted as accepted, %d as failed", n, s.failed.Load())
	}
}

// TestActionsOfVMs: with machine vm, a restart and broken hardware have the actions for a virtual
// machine, and with executeRemediation the receiver may act. It may then also act on the healthy
// event that clears the fault, whatever the configuration says by then.
func TestActionsOfVMs(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	c := s.configs.Value()
	c.Features.HealthEventsMachine, c.Features.HealthEventsStrategy = config.VM, config.ExecuteRemediation
	s.configs.Publish(c)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReboot), is(inventory.Unhealthy, inventory.RemedyHardware))
	s.gets(r, "execute action 15 XID 48"+gpu0, "execute action 25 XID 48"+gpu1)
	c.Features.HealthEventsStrategy = config.StoreOnly
	s.configs.Publish(c)
	s.gpus(is(inventory.Healthy, ""), is(inventory.Unhealthy, inventory.RemedyHardware))
	s.gets(r, "execute action 15 XID 48"+gpu0, "execute action 25 XID 48"+gpu1, "execute healthy"+gpu0)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Unhealthy, inventory.RemedyHardware))
	s.gets(r, "execute action 15 XID 48"+gpu0, "execute action 25 XID 48"+gpu1, "execute healthy"+gpu0,
		"store action 2 XID 48"+gpu0)
}

// TestResetsThatDidNotRepair: a GPU that the daemon's own resets did not repair needs a person, and no
// third reset by NVSentinel.
func TestResetsThatDidNotRepair(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Unhealthy, inventory.RemedyReset))
	want := []string{"store action 2 XID 48" + gpu0, "store action 2 XID 48" + gpu1}
	s.gets(r, want...)
	s.repairs.Publish(repair.Status{Mode: repair.Idle, Steps: []repair.Step{
		{UUID: "GPU-0", State: repair.Manual}, {UUID: "GPU-1", State: repair.Waiting},
	}})
	s.gets(r, append(want, "store action 5 XID 48"+gpu0)...)
}

// TestHealthyNeedsProof: a repaired GPU is healthy for the receiver only when CUDA is proven on it,
// the driver answers, and both last.
func TestHealthyNeedsProof(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset))
	s.gets(r, "store action 2 XID 48"+gpu0)
	s.unproven.Publish(map[string]string{"GPU-0": "CUDA is not proven on it yet"})
	s.gpus(is(inventory.Healthy, ""))
	s.gets(r, "store action 2 XID 48"+gpu0)
	stale := s.snapshots.Value()
	stale.Stale = "the driver does not answer"
	s.snapshots.Publish(stale)
	s.unproven.Publish(nil)
	s.gets(r, "store action 2 XID 48"+gpu0)
	s.gpus(is(inventory.Healthy, ""))
	s.gets(r, "store action 2 XID 48"+gpu0, "store healthy"+gpu0)
}

// TestFaultOfMIGDevice: the fault of a MIG device is an event of its GPU.
func TestFaultOfMIGDevice(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	now := s.snapshots.Value()
	now.GPUs = slices.Clone(now.GPUs)
	now.GPUs[1].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1", Health: is(inventory.Unhealthy, inventory.RemedyReset)}}
	s.snapshots.Publish(now)
	s.gets(r, "store action 2 XID 48"+gpu1, "store healthy"+gpu0)
}

// TestRestartOfSender: a new process sends nothing again, and sends what changed while no process
// ran.
func TestRestartOfSender(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gpus(is(inventory.Healthy, ""), is(inventory.Unhealthy, inventory.RemedyReset))
	want := []string{"store action 2 XID 48" + gpu1, "store healthy" + gpu0}
	s.gets(r, want...)
	s.start()
	s.gets(r, want...)
	s.stop()
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReboot), is(inventory.Unhealthy, inventory.RemedyReset))
	s.start()
	s.gets(r, append(want, "store action 24 XID 48"+gpu0)...)
}

// TestRestartOfReceiver: a new receiver gets the last event of each GPU again, byte by byte, also if
// nothing changed, and if the sender restarted at the same time. A receiver that was away gets what
// is so now.
func TestRestartOfReceiver(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Healthy, ""))
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1, "store action 2 XID 48"+gpu0)
	before := r.Raw()
	again := []string{"store healthy" + gpu1, "store action 2 XID 48" + gpu0}
	r.Start()
	s.gets(r, again...)
	if after := r.Raw(); after != before {
		t.Errorf("the event is %q and was %q", after, before)
	}
	s.stop()
	r.Start()
	s.start()
	s.gets(r, again...)
	r.Stop()
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReboot), is(inventory.Healthy, ""))
	s.pass()
	s.gpus(is(inventory.Healthy, ""), is(inventory.Healthy, ""))
	s.pass()
	r.Start()
	s.gets(r, "store healthy"+gpu1, "store healthy"+gpu0)
}

// TestLostAnswer: an event that may have arrived is sent again unchanged, also by a new process; and
// what follows it is sent even if that is the state from before.
func TestLostAnswer(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
	r.Break(nil, true)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Healthy, ""))
	s.until("an event", func() bool { return len(r.Received()) == 3 })
	first := r.Raw()
	s.start()
	s.until("the event again", func() bool { return len(r.Received()) > 3 })
	if again := r.Raw(); again != first {
		t.Errorf("the event is %q and was %q", again, first)
	}
	s.gpus(is(inventory.Healthy, ""), is(inventory.Healthy, ""))
	r.Break(nil, false)
	s.until("the next event", func() bool {
		events := r.Received()
		return events[len(events)-1] == "store healthy"+gpu0
	})
}

// TestHungReceiver: a call that hangs ends by its deadline, and ends with the process.
func TestHungReceiver(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	hangs := make(chan struct{})
	r.Break(func(ctx context.Context) error {
		select {
		case <-hangs:
		case <-ctx.Done():
		}
		return ctx.Err()
	}, false)
	s := newSender(t, r)
	s.stop()
	s.timeout = 50 * time.Millisecond
	s.start()
	s.until("failures", func() bool { return s.failed.Load() >= 4 })
	s.timeout = time.Hour
	s.start()
	s.stop() // while a call may hang
	r.Break(nil, false)
	close(hangs)
	s.start()
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
}

// TestRefusals: a receiver that refuses is asked less and less often, and gets each event once when
// it accepts.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]error{
		"busy":     status.Error(codes.Unavailable, "batch not processed"),
		"rejected": status.Error(codes.InvalidArgument, "no"),
		"old":      status.Error(codes.Unimplemented, "unknown method"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := nvsentinel.New(t)
			r.Start()
			var calls atomic.Int64
			r.Break(func(context.Context) error { calls.Add(1); return fault }, false)
			s := newSender(t, r)
			s.pass()
			s.pass()
			if n := calls.Load(); n < 5 || n > 14 { // 1, 2, 4 ... 60 s
				t.Errorf("%d calls in six minutes", n)
			}
			r.Break(nil, false)
			s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
		})
	}
}

// TestNoSocket: without a receiver, with a file in its place and with none configured, nothing is
// sent, and everything is once there is one.
func TestNoSocket(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	if err := os.WriteFile(r.Socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s := newSender(t, r)
	s.pass()
	if err := os.Remove(r.Socket); err != nil {
		t.Fatal(err)
	}
	s.pass()
	r.Start()
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
	c := s.configs.Value()
	s.configs.Publish(config.Config{})
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Healthy, ""))
	poll.Until(t, "nothing to wait for", func() bool {
		s.clock.Step(time.Minute)
		return !s.clock.HasWaiters()
	})
	if n := len(r.Received()); n != 2 {
		t.Errorf("%d events while switched off", n)
	}
	s.configs.Publish(c)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1, "store action 2 XID 48"+gpu0)
}

// TestLoserOfTheLead: a process that no longer leads sends and writes nothing.
func TestLoserOfTheLead(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
	s.leads.Store(false)
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset), is(inventory.Healthy, ""))
	s.pass()
	if n := len(r.Received()); n != 2 {
		t.Errorf("%d events, want 2", n)
	}
	s.leads.Store(true)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1, "store action 2 XID 48"+gpu0)
}

// TestBadFile: without the record of earlier events, all GPUs are sent once more; a disk that takes
// no file does not keep events back.
func TestBadFile(t *testing.T) {
	t.Parallel()
	r := nvsentinel.New(t)
	r.Start()
	s := newSender(t, r)
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1)
	s.stop()
	file := filepath.Join(s.dir, healthevents.File)
	if err := os.WriteFile(file, []byte(`{"version": 1, "gpus": 7}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.gets(r, "store healthy"+gpu0, "store healthy"+gpu1, "store healthy"+gpu0, "store healthy"+gpu1)
	s.stop()
	s.dir = filepath.Join(file, "not a folder")
	s.gpus(is(inventory.Unhealthy, inventory.RemedyReset))
	s.start()
	s.until("the event", func() bool { return slices.Contains(r.Received(), "store action 2 XID 48"+gpu0) })
}
