package cluster

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// isClosed reports whether a feed has changed since.
func isClosed(changed <-chan struct{}) bool {
	select {
	case <-changed:
		return true
	default:
		return false
	}
}

// TestQueue: Events in the order in which they came; whoever waits is woken by a change alone.
func TestQueue(t *testing.T) {
	t.Parallel()
	at := time.Now()
	q := &queue{changed: feed.New(struct{}{})}
	event := func(n int) report.NodeEvent {
		return report.NodeEvent{Reason: report.GPULost, Cause: fmt.Sprint(n), At: at}
	}
	for _, step := range []struct {
		what    string
		do      func()
		room    int
		first   string
		changed bool
	}{
		{"nothing is put in", func() { q.push(nil) }, maxQueue, "", false},
		{"nothing is there to be cleared", q.clear, maxQueue, "", false},
		{"nothing is there to be dropped", func() { q.drop(event(1)) }, maxQueue, "", true},
		{"one", func() { q.push([]report.NodeEvent{event(1)}) }, maxQueue - 1, "1", true},
		{"two more", func() { q.push([]report.NodeEvent{event(2), event(3)}) }, maxQueue - 3, "1", true},
		{"another one is dropped", func() { q.drop(event(2)) }, maxQueue - 3, "1", true},
		{"the same of another time is dropped", func() { e := event(1); e.At = at.Add(1); q.drop(e) }, maxQueue - 3, "1", true},
		{"the first is dropped", func() { q.drop(event(1)) }, maxQueue - 2, "2", true},
		{"cleared", q.clear, maxQueue, "", true},
	} {
		_, changed := q.changed.Latest()
		step.do()
		e, has := q.first()
		if q.room() != step.room || has != (step.first != "") || e.Cause != step.first || isClosed(changed) != step.changed {
			t.Errorf("%s: room for %d, first is %q (%v), changed %v", step.what, q.room(), e.Cause, has, isClosed(changed))
		}
	}
}

// TestPodsOfOneFact: each pod once, and not more than a few.
func TestPodsOfOneFact(t *testing.T) {
	t.Parallel()
	var named, recorded []kubelet.HeldDevice
	for i := range maxEventPods + 3 {
		for j := range 2 { // of each pod
			id := fmt.Sprintf("GPU-1::%d-%d", i, j)
			named = append(named, kubelet.HeldDevice{Resource: "r", ID: id, Pod: fmt.Sprintf("a/pod-%d", i)})
			for range 2 { // containers
				recorded = append(recorded, kubelet.HeldDevice{Resource: "r", ID: id, Pod: fmt.Sprintf("with UID %d", i)})
			}
		}
	}
	got := pods(named, recorded, []string{"GPU-1"})
	if len(got) != maxEventPods || got[0] != (kubeapi.Pod{Namespace: "a", Name: "pod-0", UID: "0"}) || got[1].UID != "1" {
		t.Errorf("%d pods: %v", len(got), got)
	}
	if got := pods(named[:4], recorded, []string{"GPU-1"}); len(got) != 2 {
		t.Errorf("of two pods with two devices each: %v", got)
	}
}

// TestPartsOfDevices: the MIG devices of a GPU, and the given devices stay as they are.
func TestPartsOfDevices(t *testing.T) {
	t.Parallel()
	devices := append(make([]string, 0, 8), "GPU-1")
	s := status.Status{GPUs: []status.Device{{UUID: "MIG-1", GPU: "GPU-1"}, {UUID: "GPU-3"}, {UUID: "MIG-2", GPU: "GPU-1"}}}
	if d := cmp.Diff([]string{"GPU-1", "MIG-1", "MIG-2"}, withParts(s, devices)); d != "" || devices[:2][1] != "" {
		t.Errorf("%v; the given ones are %v", d, devices[:2])
	}
}

// A pen writes nothing, and says what the next write has come to.
type pen struct {
	err       error
	events    []kubeapi.EventRecord
	condition []kubeapi.Condition
	taints    []bool
}

func (p *pen) WriteEvent(_ context.Context, _ string, r kubeapi.EventRecord) error {
	p.events = append(p.events, r)
	return p.err
}

func (p *pen) PatchCondition(_ context.Context, c kubeapi.Condition) (kubeapi.Node, error) {
	p.condition = append(p.condition, c)
	return kubeapi.Node{}, p.err
}

func (p *pen) SetTaint(_ context.Context, _, _ string, wanted bool, _ time.Time) error {
	p.taints = append(p.taints, wanted)
	return p.err
}

func (p *pen) NodeCount(context.Context) (int, error) { return 1, p.err }

// TestEventsThatAreNeverTaken: one that the API server calls wrong is dropped and counted; what else it says is an error.
func TestEventsThatAreNeverTaken(t *testing.T) {
	t.Parallel()
	e := report.NodeEvent{Reason: report.GPULost, Note: "a note", Devices: []string{"GPU-1"}, At: time.Now(), AtStart: true}
	row := e.Reason.Row()
	for code, dropped := range map[int]int{400: 1, 422: 1, 403: 0, 404: 0, 409: 0, 503: 0} {
		got := 0
		api := &pen{err: &kubeapi.Refused{Code: code}}
		r := &reporter{api: api, daemon: daemon.View{EventDropped: func(cause string) {
			if cause == dropRefused {
				got++
			}
		}}}
		pod := &kubeapi.Pod{Name: "p"}
		if err := r.write(t.Context(), "u", e, pod); got != dropped || (err == nil) != (dropped == 1) {
			t.Errorf("%d: %d dropped, %v", code, got, err)
		}
		want := []kubeapi.EventRecord{{
			Pod: pod, Key: e.Key(), Reason: "GPULost", Action: row.Action, Type: row.Type, Note: "a note", At: e.At, AtStart: true,
		}}
		if d := cmp.Diff(want, api.events); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
}

// TestHolders: pods are told only by both accounts together, which are asked within a limit.
func TestHolders(t *testing.T) {
	t.Parallel()
	held := func(pod string) []kubelet.HeldDevice {
		return []kubelet.HeldDevice{{Resource: "r", ID: "GPU-1", Pod: pod}}
	}
	named := func(ctx context.Context) ([]kubelet.HeldDevice, error) {
		if at, has := ctx.Deadline(); !has || time.Until(at) > podsPatience {
			return nil, errors.New("no limit")
		}
		return held("a/one"), nil
	}
	recorded := func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{Held: held("with UID 1")}, nil }
	fails := errors.New("no answer")
	for name, tt := range map[string]struct {
		d    daemon.View
		want int
	}{
		"both":                {daemon.View{Held: named, Checkpoint: recorded}, 1},
		"no kubelet":          {daemon.View{}, 0},
		"no PodResources":     {daemon.View{Checkpoint: recorded}, 0},
		"no checkpoint":       {daemon.View{Held: named}, 0},
		"PodResources fails":  {daemon.View{Held: func(context.Context) ([]kubelet.HeldDevice, error) { return held("a/one"), fails }, Checkpoint: recorded}, 0},
		"the checkpoint does": {daemon.View{Held: named, Checkpoint: func() (kubelet.Checkpoint, error) { return kubelet.Checkpoint{Held: held("with UID 1")}, fails }}, 0},
	} {
		r := &reporter{daemon: tt.d, statuses: feed.New(status.Status{})}
		if got := r.holders(t.Context(), []string{"GPU-1"}); len(got) != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestOutranked: a process that has seen no GPU is silent while another one has its share of the lock, and for a time after that.
func TestOutranked(t *testing.T) {
	t.Parallel()
	timer := clocktesting.NewFakeClock(time.Now())
	var answer error
	gaveBack := 0
	lock := func(string) (func(), error) {
		if answer != nil {
			return nil, answer
		}
		return func() { gaveBack++ }, nil
	}
	shared := func(string) (func(), error) { return func() { t.Error("a share is given back at once") }, nil }
	r := &reporter{clock: timer, outranked: feed.New(true), lock: lock, lockShared: shared}
	for _, step := range []struct {
		what   string
		after  time.Duration
		answer error
		want   bool
	}{
		{"nobody", 0, nil, false},
		{"a lock that cannot be taken", 0, errors.New("read-only"), false},
		{"another process", 0, files.ErrLocked, true},
		{"it is gone", absence - time.Second, nil, true},
		{"it does not come back", time.Second, nil, false},
		{"it does", time.Hour, files.ErrLocked, true},
		{"the lock cannot be taken then", absence / 2, errors.New("read-only"), true},
	} {
		timer.Step(step.after)
		answer = step.answer
		if share := r.ask(t.Context(), false); share != nil || r.outranked.Value() != step.want {
			t.Errorf("%s: outranked %v, want %v", step.what, r.outranked.Value(), step.want)
		}
	}
	if gaveBack != 3 {
		t.Errorf("the lock was given back %d times, want 3", gaveBack)
	}
	if share := r.ask(t.Context(), true); share == nil {
		t.Error("a process that has seen GPUs has no share")
	}
	_, changed := r.outranked.Latest()
	if r.setOutranked(r.outranked.Value()); isClosed(changed) {
		t.Error("the same was told again")
	}
}

// TestNudge: a loop is woken at the time that was given last, if one is.
func TestNudge(t *testing.T) {
	t.Parallel()
	timer := clocktesting.NewFakeClock(time.Now())
	n := (&reporter{clock: timer}).newNudge()
	fires := func(what string, after time.Duration, want bool) {
		t.Helper()
		_, fired := n.fired.Latest()
		timer.Step(after) // which calls what is due
		for late := time.Now().Add(patience); want && !isClosed(fired) && time.Now().Before(late); {
			<-time.After(time.Millisecond)
		}
		if isClosed(fired) != want {
			t.Errorf("%s: woken %v", what, !want)
		}
	}
	n.at(timer.Now().Add(time.Second), timer.Now())
	n.at(timer.Now().Add(time.Minute), timer.Now())
	fires("the time that does not count", 59*time.Second, false)
	fires("the one that does", time.Second, true)
	n.at(timer.Now().Add(time.Second), timer.Now())
	n.at(time.Time{}, timer.Now())
	fires("none", time.Hour, false)
}

// TestReports: any of the three needs the daemon's status.
func TestReports(t *testing.T) {
	t.Parallel()
	for f, want := range map[config.Features]bool{
		{}: false, {PodEvents: true}: false, {Events: true}: true, {Condition: true}: true, {Taint: true}: true,
	} {
		if got := reports(f); got != want {
			t.Errorf("%+v: %v", f, got)
		}
	}
}
