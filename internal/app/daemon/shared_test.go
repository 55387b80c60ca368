package daemon_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A publisher is a process with its shared state.
type publisher struct {
	*daemon.Shared
	lead     *lead.Lead
	owners   *feed.Feed[dra.Owners]
	dividing *feed.Feed[map[string]resource.GPUHold]
	proofs   *feed.Feed[cudacheck.Records]
	resets   *feed.Feed[reset.Status]
	driver   *feed.Feed[driverchange.Status]
}

// newPublisher returns a process that does not change layouts.
func newPublisher(dir, token string) *publisher {
	p := &publisher{
		lead: lead.New(lead.Options{Dir: dir, Name: token, Token: token}), owners: feed.New(dra.Owners(nil)),
		dividing: feed.New(map[string]resource.GPUHold(nil)), proofs: feed.New(cudacheck.Records(nil)),
		resets: feed.New(reset.Status{}), driver: feed.New(driverchange.Status{}),
	}
	p.Shared = daemon.NewShared(p.lead, p.owners, p.dividing, p.proofs, p.resets, p.driver, false)
	return p
}

// run runs the process with additional tasks that publish.
func (p *publisher) run(t *testing.T, deciding ...func(context.Context) error) {
	t.Helper()
	tasks := []daemon.Task{{Name: "lead", Run: p.lead.Run}, {Name: "heard", Run: p.Follow}}
	for _, run := range append(deciding, p.Publish) {
		tasks = append(tasks, p.Publisher(daemon.Task{Name: "decides", Run: run}))
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := daemon.RunTasks(ctx, p.lead, nil, tasks); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(running.Wait)
	t.Cleanup(cancel)
}

func yes(is bool) bool { return is }

// TestSharedResets: a standby allocates no GPU during its reset, and all GPUs afterwards.
func TestSharedResets(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	leading, standby := newPublisher(dir, "a"), newPublisher(dir, "b")
	leading.run(t)
	poll.Latest(t, "the first leads", leading.lead.Leads(), yes)
	standby.run(t)
	leading.owners.Publish(dra.Owners{"GPU-1": dra.OwnedByPlugin, "GPU-2": dra.OwnedByPlugin})
	for _, phase := range []reset.Phase{reset.PhaseWaiting, reset.PhaseDone, reset.PhaseResetting, reset.PhaseFailed} {
		leading.resets.Publish(reset.Status{GPUs: []string{"GPU-1"}, Phase: phase})
		held := phase == reset.PhaseWaiting || phase == reset.PhaseResetting
		poll.Latest(t, "it is told of "+string(phase), standby.dividing, func(holds map[string]resource.GPUHold) bool {
			return held && holds["GPU-1"].Reason != "" && len(holds) == 2 && holds["GPU-2"].Reason == "" || !held && holds == nil
		})
	}
}

// TestSharedChangeOfDriver: a standby withholds all GPUs while the driver changes, also after it
// leads until it has found out itself.
func TestSharedChangeOfDriver(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	leading, standby := newPublisher(dir, "a"), newPublisher(dir, "b")
	leading.run(t)
	poll.Latest(t, "the first leads", leading.lead.Leads(), yes)
	standby.driver.Publish(driverchange.Status{Withholds: true}) // it was started during a change
	standby.run(t)
	leading.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByPlugin})
	for _, want := range []driverchange.Status{{}, {Wanted: "580.1", State: driverchange.Changing, Percent: 10, Withholds: true}} {
		leading.driver.Publish(want)
		poll.Latest(t, "the standby has the progress of the leader", standby.driver,
			func(s driverchange.Status) bool { return s.Equal(want) })
	}
	standby.lead.Ask()
	poll.Latest(t, "the standby leads", standby.lead.Leads(), yes)
	if !standby.driver.Value().Withholds {
		t.Error("GPUs are offered before the new leader knows of the change")
	}
}

// TestSharedOwners: a standby uses the owners from the leader, and knows none before.
func TestSharedOwners(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	leading, standby := newPublisher(dir, "a"), newPublisher(dir, "b")
	leading.run(t)
	poll.Latest(t, "the first leads", leading.lead.Leads(), yes)
	standby.run(t)
	poll.Latest(t, "the other is its standby", leading.lead.Statuses(),
		func(s lead.Status) bool { return s.Standbys == 1 })
	if owners := standby.owners.Value(); owners != nil {
		t.Errorf("a standby that has heard nothing goes by %v", owners)
	}
	for _, want := range []dra.Owners{{"GPU-0": dra.OwnedByPlugin, "GPU-1": dra.OwnedByDRA},
		{"GPU-0": dra.LeavesPlugin, "GPU-1": dra.OwnedByDRA}, {}} {
		leading.owners.Publish(want)
		poll.Latest(t, "the standby goes by what it heard", standby.owners,
			func(o dra.Owners) bool { return reflect.DeepEqual(o, want) })
	}
	holds := map[string]resource.GPUHold{"GPU-1": {Reason: "it is being divided"}}
	leading.dividing.Publish(holds) // not before the first process leads and publishes: it begins without holds
	poll.Latest(t, "the standby goes by the holds, although it changes no layouts itself", standby.dividing,
		func(h map[string]resource.GPUHold) bool { return reflect.DeepEqual(h, holds) })
	standby.lead.Ask()
	poll.Latest(t, "the standby leads, and nobody divides GPUs", standby.dividing,
		func(h map[string]resource.GPUHold) bool { return h == nil })
}

// TestLateDecision: a process that lost the lead follows the next leader, even if a task of its
// tenure ends late and publishes an earlier decision.
func TestLateDecision(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	p := newPublisher(dir, "a")
	begun, late := make(chan struct{}, 2), make(chan struct{})
	p.run(t, func(ctx context.Context) error {
		begun <- struct{}{}
		<-ctx.Done()
		<-late
		p.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByPlugin})
		return nil
	})
	<-begun
	// like a stopped process, while another process took the lead
	if err := os.Remove(filepath.Join(dir, "lead.sock")); err != nil {
		t.Fatal(err)
	}
	next := newPublisher(dir, "b")
	next.owners.Publish(dra.Owners{"GPU-0": dra.OwnedByDRA})
	next.run(t)
	poll.Latest(t, "the next one leads", next.lead.Leads(), yes)
	_ = p.lead.Check()
	poll.Latest(t, "the first one hears the next", p.lead.Received(),
		func(text json.RawMessage) bool { return text != nil })
	_, changed := p.owners.Latest()
	select {
	case <-changed:
		t.Error("it goes by what it heard, and its own task has not ended")
	case <-time.After(50 * time.Millisecond):
	}
	close(late)
	poll.Latest(t, "it goes by what it heard", p.owners, func(o dra.Owners) bool { return o["GPU-0"] == dra.OwnedByDRA })
}
