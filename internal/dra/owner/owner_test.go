package owner_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A rig is an Arbiter with all that it reads. Its clock is that of the synctest bubble.
type rig struct {
	t         *testing.T
	arbiter   *owner.Arbiter
	devices   *pool.Devices
	configs   *feed.Feed[config.Config]
	snapshots *feed.Feed[inventory.Snapshot]
	owners    *feed.Feed[dra.Owners]
	offered   *feed.Feed[dra.Owners]
	published *feed.Feed[map[string]bool]
	records   *feed.Feed[map[string][]claims.Holder]
	beside    *feed.Feed[bool]
	stop      func()

	lists      func(context.Context, []string) (map[string][]string, error)
	driverless bool

	mu      sync.Mutex
	hangs   chan struct{} // kubelet and the API server answer when it is closed; nil for at once
	held    []kubelet.HeldDevice
	unknown error
	asked   int
	claimed map[string][]string
	failed  error
	listed  int
}

func (r *rig) hang() {
	r.mu.Lock()
	hangs := r.hangs
	r.mu.Unlock()
	if hangs != nil {
		<-hangs
	}
}

func (r *rig) Holders(_ context.Context, uuids []string) (held []kubelet.HeldDevice, err error) {
	r.hang()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	for _, d := range r.held {
		uuid, _ := resource.SplitID(d.ID)
		for _, asked := range uuids {
			if uuid == asked {
				held = append(held, d)
			}
		}
	}
	return held, r.unknown
}

func (r *rig) list(context.Context, []string) (map[string][]string, error) {
	r.hang()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listed++
	return maps.Clone(r.claimed), r.failed
}

// set changes what kubelet and the API server tell.
func (r *rig) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// newRig returns a running Arbiter of a node with the GPUs a and b, of which b has the MIG device
// b1, in a mode.
func newRig(t *testing.T, mode config.DRAMode) *rig {
	r := &rig{
		t: t, configs: feed.New(config.Config{Live: config.Live{DRA: config.DRA{Mode: mode}}}), offered: feed.New(dra.Owners(nil)),
		snapshots: feed.New(inventory.Snapshot{Generation: 1, GPUs: []inventory.GPU{
			{UUID: "a"}, {UUID: "b", Index: 1, MIG: inventory.MIGEnabled, MIGDevices: []inventory.MIGDevice{{UUID: "b1"}}},
		}}),
		published: feed.New(map[string]bool{}), records: feed.New(map[string][]claims.Holder{}), beside: feed.New(false),
	}
	r.lists = r.list
	r.start()
	return r
}

// start has another Arbiter in the place of the one before, as after a restart.
func (r *rig) start() {
	if r.stop != nil {
		r.stop()
	}
	r.owners = feed.New(dra.Owners(nil))
	driverless := func() bool { return r.driverless && r.configs.Value().DRA.Mode == config.DRAOff }
	devices := pool.New(pool.Options{
		Configs: r.configs, Snapshots: r.snapshots, Owners: r.owners, Driverless: driverless,
	})
	devices.Published().Publish(r.published.Value())
	r.devices, r.published = devices, devices.Published()
	r.arbiter = owner.New(owner.Options{
		Devices: devices, Holders: r, Offered: r.offered, Records: r.records, OtherProcess: r.beside.Latest, List: r.lists,
		Driverless: driverless, Prepared: r.list,
	})
	r.run()
}

// run begins a time in which this process leads.
func (r *rig) run() {
	ctx, cancel := context.WithCancel(r.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.arbiter.Run(ctx) }()
	settled := make(chan error, 1)
	if r.driverless { // Devices note what the kubelet has removed
		go func() { settled <- r.devices.Run(ctx) }()
	} else {
		settled <- nil
	}
	r.stop = func() {
		cancel()
		if err := <-settled; err != nil {
			r.t.Error(err)
		}
		if err := <-ended; err != nil {
			r.t.Error(err)
		}
	}
}

func (r *rig) mode(m config.DRAMode) {
	r.configs.Publish(config.Config{Live: config.Live{DRA: config.DRA{Mode: m}}})
}

// follow has the lists of the device plugin follow the owners, as offer does.
func (r *rig) follow() { r.offered.Publish(r.owners.Value()) }

// after waits, and wants these owners of a and b then, and that the node waits for something with
// this text.
func (r *rig) after(d time.Duration, a, b dra.Ownership, wait string) {
	r.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	owners, waits := r.owners.Value(), fmt.Sprint(r.arbiter.Waits().Value())
	if owners["a"] != a || owners["b"] != b || !strings.Contains(waits, wait) {
		r.t.Fatalf("after %s: owners %v, waits %s; want a %s, b %s, %q", d, owners, waits, a, b, wait)
	}
	for uuid, why := range r.arbiter.Waits().Value() {
		if why == "" {
			r.t.Errorf("after %s: %s waits for nothing that is said", d, uuid)
		}
	}
}

// TestDefault: without Dynamic Resource Allocation nobody is asked anything, and the device plugin
// has all GPUs at once.
func TestDefault(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.after(0, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
		r.follow()
		r.after(time.Hour, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
		if r.asked+r.listed > 0 {
			t.Errorf("kubelet was asked %d times, the API server %d times", r.asked, r.listed)
		}
	})
}

// TestNoGPUs: where there is no GPU, that is known, and who waits for the owners goes on.
func TestNoGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.snapshots.Publish(inventory.Snapshot{Generation: 1})
		r.start()
		synctest.Wait()
		if r.owners.Value() == nil {
			t.Error("no decision")
		}
	})
}

// TestGPUThatComesBack is decided about like one that was never there.
func TestGPUThatComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAAll)
		synctest.Wait()
		r.follow()
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
		all := r.snapshots.Value()
		r.snapshots.Publish(inventory.Snapshot{Generation: 2, GPUs: all.GPUs[1:]})
		r.after(time.Minute, "", dra.OwnedByDRA, "")
		r.set(func() { r.unknown = errors.New("kubelet does not run") })
		r.snapshots.Publish(all)
		r.after(time.Minute, dra.LeavesPlugin, dra.OwnedByDRA, "a:kubelet does not run")
		r.set(func() { r.unknown = nil })
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
	})
}

// TestClaimOfAnotherProcess: a GPU that leaves the device plugin stays with it as long as a claim
// has it, and the claim is named.
func TestClaimOfAnotherProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.after(0, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
		r.records.Publish(map[string][]claims.Holder{"a": {{Admin: true}, {Namespace: "ns", Name: "c"}}})
		r.after(time.Minute, dra.LeavesPlugin, dra.OwnedByPlugin, "a:claim ns/c has it")
		r.records.Publish(map[string][]claims.Holder{})
		r.after(0, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
	})
}

// TestUnknown: nothing is given out as long as it is not known what is published, or which claims
// are prepared, as on a disk that hangs. Of each GPU it is said what it waits for.
func TestUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.published.Publish(nil)
		r.start()
		const slices = "the state directory is not read yet: the GPUs in slices are unknown"
		const claims = "the state directory is not read yet: the prepared claims are unknown"
		r.after(time.Hour, "", "", "a:"+slices+" b:"+slices)
		r.published.Publish(map[string]bool{})
		r.after(0, dra.OwnedByPlugin, dra.OwnedByPlugin, "map[]")
		r.records.Publish(nil)
		r.start()
		r.after(time.Hour, "", "", "a:"+claims+" b:"+claims)
	})
}

// TestToDRA: a GPU goes into a slice once the lists are made without it and no pod holds it or a
// part of it, each GPU for itself.
func TestToDRA(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		synctest.Wait()
		r.follow()
		r.set(func() { r.held = []kubelet.HeldDevice{{ID: "b1::3", Pod: "ns/pod"}, {ID: "a", Pod: "ns/whole"}} })
		r.mode(config.DRAAll)
		r.after(time.Minute, dra.LeavesPlugin, dra.LeavesPlugin, "")
		if r.asked > 0 {
			t.Error("kubelet was asked although the lists have the GPUs still")
		}
		r.set(func() { r.unknown = errors.New("kubelet does not run") })
		r.follow()
		r.after(time.Minute, dra.LeavesPlugin, dra.LeavesPlugin, "a:pod ns/whole holds it b:pod ns/pod holds it")
		r.set(func() { r.held = r.held[:1] })
		r.after(2*time.Second, dra.LeavesPlugin, dra.LeavesPlugin, "a:kubelet does not run b:pod ns/pod holds it")
		r.set(func() { r.unknown = nil })
		r.after(2*time.Second, dra.OwnedByDRA, dra.LeavesPlugin, "b:pod ns/pod holds it")
		r.set(func() { r.held = nil })
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
		if r.listed > 0 {
			t.Errorf("claims were listed %d times", r.listed)
		}
		before := r.asked
		if r.after(time.Hour, dra.OwnedByDRA, dra.OwnedByDRA, ""); r.asked != before {
			t.Error("kubelet is asked although all is decided")
		}
		// After a restart a GPU that is published is in a slice at once; one that is not has to be seen
		// free again.
		r.published.Publish(map[string]bool{"a": true})
		r.set(func() { r.unknown = errors.New("kubelet does not run") })
		r.start()
		r.after(time.Minute, dra.OwnedByDRA, dra.LeavesPlugin, "kubelet does not run")
	})
}

// TestStopsAfterQuestions: Run returns when kubelet and the API server have answered, so that
// nothing is used after its end.
func TestStopsAfterQuestions(t *testing.T) {
	t.Parallel()
	for before, then := range map[config.DRAMode]config.DRAMode{
		config.DRAOff: config.DRAAll, // asks kubelet
		config.DRAAll: config.DRAOff, // asks the API server
	} {
		t.Run(then.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, before)
				r.published.Publish(map[string]bool{"a": before == config.DRAAll})
				r.start()
				synctest.Wait()
				r.set(func() { r.hangs = make(chan struct{}) })
				r.mode(then)
				synctest.Wait()
				r.follow()
				synctest.Wait()
				stopped := make(chan struct{})
				go func() { r.stop(); close(stopped) }()
				synctest.Wait()
				select {
				case <-stopped:
					t.Error("it ended before the answer, or asked nothing")
				default:
				}
				close(r.hangs)
				<-stopped
			})
		})
	}
}

// TestBackAtOnce: a wish that is taken back before the GPU was given up costs nothing.
func TestBackAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAAll)
		r.after(time.Minute, dra.LeavesPlugin, dra.LeavesPlugin, "")
		r.mode(config.DRAOff)
		r.after(0, dra.OwnedByPlugin, dra.OwnedByPlugin, "")
		r.mode(config.DRAAll)
		r.follow() // the owners of before: a list may have the GPUs still
		r.after(time.Minute, dra.LeavesPlugin, dra.LeavesPlugin, "")
		r.follow()
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
		r.published.Publish(map[string]bool{"a": true, "b": true})
		r.mode(config.DRAOff)
		r.set(func() { r.failed = errors.New("the API server is away") })
		r.after(time.Hour, dra.LeavesDRA, dra.LeavesDRA, "the API server is away")
		if r.listed < 200 || r.listed > 300 { // each 15 s
			t.Errorf("claims were listed %d times within an hour", r.listed)
		}
		r.mode(config.DRAAll)
		r.after(0, dra.OwnedByDRA, dra.OwnedByDRA, "")
	})
}

// TestBesideAnotherProcess: as long as another process also serves the kubelet, it may have a GPU
// in its list that has left the one of this process. So the GPU goes into no slice; those that are
// there stay.
func TestBesideAnotherProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRASplit)
		r.beside.Publish(true)
		r.published.Publish(map[string]bool{"b": true})
		r.mode(config.DRAAll)
		r.start()
		r.after(time.Minute, dra.LeavesPlugin, dra.OwnedByDRA, "")
		r.follow()
		r.after(time.Hour, dra.LeavesPlugin, dra.OwnedByDRA, "a:another process of this program also serves the kubelet")
		r.beside.Publish(false)
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
	})
}

// TestTheLeadComesBack: what was decided in an earlier time does not count. Another process may
// have decided since.
func TestTheLeadComesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAAll)
		r.published.Publish(map[string]bool{"a": true, "b": true})
		r.start()
		r.after(0, dra.OwnedByDRA, dra.OwnedByDRA, "")
		r.follow()
		r.stop()
		r.published.Publish(map[string]bool{"b": true}) // the other one gave a to the device plugin
		r.offered.Publish(dra.Owners{"a": dra.OwnedByPlugin, "b": dra.OwnedByDRA})
		r.run()
		r.after(0, dra.LeavesPlugin, dra.OwnedByDRA, "")
		r.set(func() { r.held = []kubelet.HeldDevice{{ID: "a", Pod: "ns/pod"}} })
		r.follow()
		r.after(time.Hour, dra.LeavesPlugin, dra.OwnedByDRA, "a:pod ns/pod holds it")
		r.set(func() { r.held = nil })
		r.after(2*time.Second, dra.OwnedByDRA, dra.OwnedByDRA, "")
	})
}

// TestAnswerThatCameTooLate is about a GPU of which more is known meanwhile.
func TestAnswerThatCameTooLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.published.Publish(map[string]bool{"a": true})
		release := make(chan struct{})
		calls := 0
		r.lists = func(context.Context, []string) (map[string][]string, error) {
			calls++
			<-release
			return nil, nil
		}
		r.start()
		r.after(time.Minute, dra.LeavesDRA, dra.OwnedByPlugin, "")
		for _, records := range []map[string][]claims.Holder{{}, {"a": {{Namespace: "ns", Name: "c"}}}} {
			r.records.Publish(map[string][]claims.Holder{"a": {{Namespace: "ns", Name: "b"}}})
			synctest.Wait()
			r.records.Publish(records)
			synctest.Wait()
		}
		if calls != 1 {
			t.Errorf("%d questions at a time", calls)
		}
		close(release)
		r.after(time.Minute, dra.LeavesDRA, dra.OwnedByPlugin, "claim ns/c has it")
	})
}

// TestEvidenceIsOfNow: each step waits for an answer to a question that was asked after the last
// change.
func TestEvidenceIsOfNow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, config.DRAOff)
		r.published.Publish(map[string]bool{"a": true})
		release, calls := make(chan struct{}), 0
		r.lists = func(ctx context.Context, _ []string) (map[string][]string, error) {
			calls++
			select {
			case <-release:
			case <-ctx.Done():
			}
			return nil, ctx.Err()
		}
		r.start()
		r.after(time.Minute, dra.LeavesDRA, dra.OwnedByPlugin, "")
		for _, records := range []map[string][]claims.Holder{{"a": {{Namespace: "ns", Name: "b"}}}, {}} {
			r.records.Publish(records)
			synctest.Wait()
		}
		for i, step := range []struct {
			published map[string]bool
			owner     dra.Ownership
		}{
			{map[string]bool{"a": true}, dra.LeavesDRA}, // the claim came and went after the question
			{map[string]bool{}, dra.LeavesDRA},          // the slice went after the question
			{map[string]bool{}, dra.OwnedByNobody},
			{map[string]bool{}, dra.OwnedByPlugin},
		} {
			r.published.Publish(step.published)
			synctest.Wait()
			release <- struct{}{}
			if r.after(time.Minute, step.owner, dra.OwnedByPlugin, ""); calls != min(i+2, 4) {
				t.Errorf("%d questions after %d answers", calls, i+1)
			}
		}
	})
}
