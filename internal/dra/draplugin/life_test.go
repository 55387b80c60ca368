package draplugin_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestRollOut: two processes serve one kubelet. The later process starts, the earlier process
// stops, and claims are prepared all the time: no call fails, and the kubelet knows the health of
// devices.
func TestRollOut(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.publish(inventory.Health{State: inventory.Unhealthy, Reason: "XID 79"})
	k := n.startKubelet(t)
	earlier := n.start(t, nil)
	earlier.awaitRegistered(t)
	var calls sync.WaitGroup
	done := make(chan struct{})
	made := 0
	calls.Go(func() {
		for ; ; made++ {
			uid := "claim-" + strconv.Itoa(made)
			answers, err := k.Prepare(t.Context(), dra.Driver, claim(uid))
			// A kubelet that waits for a CPU between its choice of a driver and the call may have forgotten
			// the driver: the call does not arrive.
			lost := status.Code(err) == codes.Canceled && !n.claims.isPrepared(uid)
			if (err != nil || answers[uid].GetError() != "") && !lost {
				t.Errorf("call %d: %v %v", made, err, answers)
			}
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	later := n.start(t, nil)
	later.awaitRegistered(t)
	poll.Until(t, "two drivers are registered", func() bool { return len(k.Registered()) == 2 })
	awaitCalled(t, k)
	earlier.stop()
	poll.Until(t, "one driver is registered", func() bool { return len(k.Registered()) == 1 })
	poll.Until(t, "the health of gpu-0 is known", func() bool {
		return k.Health("gpu-0").GetHealth() == healthv1.HealthStatus_UNHEALTHY
	})
	close(done)
	calls.Wait()
	if made == 0 {
		t.Error("no call was made")
	}
	if got := later.Status().Value(); !got.Registered || got.Registrations != 1 {
		t.Errorf("the later process: %+v", got)
	}
}

// TestRollBack: the later process stops, and the earlier process continues.
func TestRollBack(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	earlier := n.start(t, nil)
	earlier.awaitRegistered(t)
	later := n.start(t, nil)
	later.awaitRegistered(t)
	later.stop()
	poll.Until(t, "one driver is registered", func() bool { return len(k.Registered()) == 1 })
	if said := prepare(t, k, "a"); said["a"] != "" {
		t.Error(said)
	}
}

// TestLastCallsOfProcess are answered although the process accepts no more connections: the
// other process does not treat it as killed.
func TestLastCallsOfProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	earlier := n.startProcess(t, draplugin.Options{Reader: n.claims,
		Claims: &claims{prepare: func(context.Context, dra.Claim) error {
			close(began)
			<-goOn
			return nil
		}}})
	earlier.awaitRegistered(t)
	first := n.sockets(t)[0]
	answer := make(chan error, 1)
	go func() {
		answers, err := k.Prepare(t.Context(), dra.Driver, claim("a"))
		if said := answers["a"].GetError(); said != "" {
			err = errors.New(said)
		}
		answer <- err
	}()
	<-began
	c := clocktesting.NewFakeClock(time.Now())
	later := n.start(t, c)
	stepUntil(t, c, "registered", func() bool { return later.Status().Value().Registered })
	ended := make(chan struct{})
	go func() { defer close(ended); earlier.stop() }()
	poll.Until(t, "the earlier process accepts no connections", func() bool {
		return errors.Is(kubelet.DialOnce(t.Context(), n.socket(first)), syscall.ECONNREFUSED)
	})
	before := c.Now()
	stepUntil(t, c, "the later process has looked", func() bool { return c.Since(before) >= 40*time.Second })
	if !slices.Contains(n.sockets(t), first) {
		t.Error("the socket of a process that answers a call was removed")
	}
	close(goOn)
	if err := <-answer; err != nil {
		t.Error(err)
	}
	<-ended
}

// TestLeftovers: sockets of killed processes of this program are removed; uncertain sockets stay.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	for _, name := range []string{
		"gpu-device-plugin-dra-0000000000aa-1.sock", "gpu-device-plugin-dra-vvvvvvvvvvaa-7.sock",
		"gpu-device-plugin-dra-.sock", "csi-reg.sock",
	} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.socket(name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(n.socket("gpu-device-plugin-dra-0000000000bb-1.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := clocktesting.NewFakeClock(time.Now())
	d := n.start(t, c)
	stepUntil(t, c, "the sockets of killed processes are gone", func() bool { return len(n.sockets(t)) == 4 })
	d.awaitRegistered(t)
	for _, name := range []string{"gpu-device-plugin-dra-.sock", "csi-reg.sock",
		"gpu-device-plugin-dra-0000000000bb-1.sock"} {
		if !slices.Contains(n.sockets(t), name) {
			t.Errorf("%s was removed", name)
		}
	}
	if said := prepare(t, k, "a"); said["a"] != "" {
		t.Error(said)
	}
}

// TestKubeletRestarts: the driver reports a missing kubelet, and counts registrations when the
// kubelet is back.
func TestKubeletRestarts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	before := k.Registered()
	prepare(t, k, "before") // the kubelet is connected by then: a short connection is noticed
	k.Stop()
	status := d.await(t, "not registered", func(s draplugin.Status) bool { return !s.Registered })
	if status.Problem != "the kubelet ended its connection" {
		t.Errorf("problem %q", status.Problem)
	}
	k = n.startKubelet(t)
	status = d.await(t, "registered", func(s draplugin.Status) bool { return s.Registered })
	if status.Problem != "" {
		t.Errorf("problem %q", status.Problem)
	}
	d.await(t, "registered twice", func(s draplugin.Status) bool { return s.Registrations == 2 })
	if after := k.Registered(); !slices.Equal(before, after) {
		t.Errorf("registered %q, and %q before: a socket that works is not given up", after, before)
	}
	if said := prepare(t, k, "a"); said["a"] != "" {
		t.Error(said)
	}
}

// stepUntil moves a clock on until something holds.
func stepUntil(t *testing.T, c *clocktesting.FakeClock, what string, holds func() bool) {
	t.Helper()
	poll.Until(t, what, func() bool {
		if holds() {
			return true
		}
		if c.HasWaiters() {
			c.Step(500 * time.Millisecond)
		}
		return false
	})
}

// TestKubeletIsAway: without a registration, or after a lost connection, the driver offers a new
// socket after half a minute, and not earlier.
func TestKubeletIsAway(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := clocktesting.NewFakeClock(time.Now())
	began := c.Now()
	d := n.start(t, c)
	poll.Until(t, "a socket", func() bool { return len(n.sockets(t)) == 1 })
	first := n.sockets(t)[0]
	stepUntil(t, c, "another socket", func() bool { s := n.sockets(t); return len(s) == 1 && s[0] != first })
	if took := c.Since(began); took < 30*time.Second {
		t.Errorf("another socket after %v", took)
	}
	status := d.Status().Value()
	if ready, reason := d.Ready(t.Context()); ready || !strings.Contains(reason, "has not registered the driver") {
		t.Errorf("%+v, ready %v: %s", status, ready, reason)
	}
	k := n.startKubelet(t)
	stepUntil(t, c, "registered", func() bool { return d.Status().Value().Registered })
	second := k.Registered()
	prepare(t, k, "before")
	k.Stop()
	d.await(t, "not registered", func(s draplugin.Status) bool { return !s.Registered })
	began = c.Now()
	stepUntil(t, c, "another socket", func() bool { s := n.sockets(t); return len(s) == 1 && s[0] != second[0] })
	if took := c.Since(began); took < 30*time.Second {
		t.Errorf("another socket %v after kubelet left", took)
	}
	k = n.startKubelet(t)
	stepUntil(t, c, "registered", func() bool { return d.Status().Value().Registered })
	if said := prepare(t, k, "a"); said["a"] != "" {
		t.Error(said)
	}
}

// TestRefused: the kubelet's reason for a refusal is reported, and the driver offers a new socket.
func TestRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := plugins.Start(plugins.Options{Dir: n.dir, Services: []string{"v2.DRAPlugin"}})
	defer k.Stop()
	d := n.start(t, nil)
	status := d.await(t, "refused", func(s draplugin.Status) bool { return strings.Contains(s.Problem, "refused") })
	if !strings.Contains(status.Problem, "none of the services") || status.Registered || status.Registrations != 0 {
		t.Errorf("%+v", status)
	}
	k.Stop()
	n.startKubelet(t)
	d.awaitRegistered(t)
}

// TestSocketRemoved: a driver creates a new socket after the removal of its socket.
func TestSocketRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	first := n.sockets(t)[0]
	removeFile(t, n.socket(first))
	d.await(t, "registered again", func(s draplugin.Status) bool { return s.Registered && s.Registrations == 2 })
	if now := k.Registered(); len(now) != 1 || now[0] == first {
		t.Errorf("registered %q, and %q before", now, first)
	}
}

// TestFolders: an unusable folder is a problem with a cause, and the driver keeps trying.
func TestFolders(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	long := filepath.Join(n.dir, strings.Repeat("x", 100))
	missing := filepath.Join(n.dir, "missing")
	for dir, want := range map[string]string{long: "bytes shorter", missing: "listen in the kubelet's plugin folder"} {
		d := (&node{dir: dir, claims: n.claims, pools: n.pools, snapshots: n.snapshots}).start(t, nil)
		status := d.await(t, want, func(s draplugin.Status) bool {
			return s.Problem != "" && !strings.HasPrefix(s.Problem, "kubelet has not")
		})
		if !strings.Contains(status.Problem, want) {
			t.Errorf("problem %q, want %q", status.Problem, want)
		}
		if dir == missing {
			if err := os.Mkdir(dir, 0o750); err != nil {
				t.Fatal(err)
			}
			k := plugins.Start(plugins.Options{Dir: dir})
			t.Cleanup(k.Stop)
			d.awaitRegistered(t)
		}
	}
}

// TestRunsAgain: a stopped driver can be started again, as when the mode of a node changes twice.
func TestRunsAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.startKubelet(t)
	d := n.start(t, nil)
	d.awaitRegistered(t)
	d.stop()
	if s := d.Status().Value(); s != (draplugin.Status{Registrations: 1}) {
		t.Errorf("stopped: %+v", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var run sync.WaitGroup
	run.Go(func() { _ = d.Run(ctx) })
	d.await(t, "registered again", func(s draplugin.Status) bool { return s.Registered && s.Registrations == 2 })
	cancel()
	run.Wait()
}

// TestHealthIsSentAgain: unchanged health is sent every ten seconds, and every second while another
// process serves.
func TestHealthIsSentAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := n.startKubelet(t)
	c := clocktesting.NewFakeClock(time.Now())
	d := n.start(t, c)
	stepUntil(t, c, "registered", func() bool { return d.Status().Value().Registered })
	reports := func(count int) time.Duration {
		t.Helper()
		before, began := k.HealthReports(), c.Now()
		stepUntil(t, c, "more reports", func() bool { return k.HealthReports() >= before+count })
		return c.Since(began)
	}
	reports(1)
	if took := reports(2); took < 10*time.Second {
		t.Errorf("two reports in %v: nothing changed", took)
	}
	other, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.socket("gpu-device-plugin-dra-0000000000aa-1.sock"),
		Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	reports(2)
	became := func(tries int, paceIs func(time.Duration) bool) bool {
		for range tries {
			if paceIs(reports(3)) {
				return true
			}
		}
		return false
	}
	if !became(3, func(took time.Duration) bool { return took < 10*time.Second }) {
		t.Error("three reports take ten seconds and more beside another process")
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if !became(20, func(took time.Duration) bool { return took >= 20*time.Second }) {
		t.Error("three reports take less than twenty seconds after another process ended")
	}
}
