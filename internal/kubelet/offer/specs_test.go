package offer

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// disk is a directory of specs that can be made to wait and to fail.
type disk struct {
	writing sync.Mutex // held while a file is written; a test that holds it makes writes wait

	mu     sync.Mutex // guards all following fields
	has    map[string]bool
	writes int
	err    error
}

func (d *disk) Apply(_ inventory.Snapshot, p resource.Plan, _ config.Config) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writes++
	if d.err != nil {
		return d.err
	}
	d.has = map[string]bool{}
	for _, r := range p.Resources {
		for _, device := range r.Devices {
			d.has[device.UUID] = true
		}
	}
	return nil
}

func (d *disk) Lacks(_ inventory.Snapshot, p resource.Plan, _ config.Config) (lacks []resource.Hold) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range p.Resources {
		for _, device := range r.Devices {
			if !d.has[device.UUID] {
				lacks = append(lacks, resource.Hold{UUID: device.UUID, Reason: "it is not on the disk", Hidden: true})
			}
		}
	}
	return lacks
}

// node is a node with GPUs of the given UUIDs.
func node(uuids ...string) (inventory.Snapshot, resource.Plan) {
	var s inventory.Snapshot
	for i, uuid := range uuids {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: uuid, Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	return s, resource.New(s, resource.Options{})
}

func by(s containeredits.Strategy) config.Config {
	return config.Config{Live: config.Live{Edits: containeredits.Options{Strategies: []containeredits.Strategy{s}}}}
}

// offered is what is offered, and by which strategy.
func offered(k *specTask, c config.Config, uuids ...string) (ids []string, s containeredits.Strategy) {
	snapshot, plan := node(uuids...)
	holds, c, _ := k.prepare(snapshot, plan, c)
	for _, r := range plan.Under(holds).Resources {
		for _, d := range r.Devices {
			ids = append(ids, d.ID)
		}
	}
	return ids, c.Edits.Strategies[0]
}

// keep writes files until the test ends, and returns what waits until all that was requested was
// tried.
func keep(t *testing.T, k *specTask) (settle func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return func() {
		t.Helper()
		poll.Latest(t, "the files are written", k.tried, func(tried uint64) bool { return tried == k.requested.Value().number })
	}
}

func TestOnlyNewNamesWaitForTheDisk(t *testing.T) {
	t.Parallel()
	d := &disk{}
	k := newSpecTask(d)
	if ids, _ := offered(k, by(containeredits.CDICRI), "a", "b"); len(ids) != 0 {
		t.Errorf("offered %q before anything was written", ids)
	}
	settle := keep(t, k)
	settle()
	if ids, _ := offered(k, by(containeredits.CDICRI), "a", "b"); len(ids) != 2 {
		t.Errorf("offered %q after the write", ids)
	}
	d.mu.Lock()
	d.err = errors.New("disk full")
	d.mu.Unlock()
	for range 2 { // before and after the write
		if ids, _ := offered(k, by(containeredits.CDICRI), "a", "c"); !cmp.Equal(ids, []string{"a"}) {
			t.Errorf("offered %q, want the one that is written", ids)
		}
		settle()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.writes != 2 {
		t.Errorf("%d writes, want one for each of two requests", d.writes)
	}
}

func TestAnotherWayOfGivingWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	d := &disk{}
	k := newSpecTask(d)
	if ids, way := offered(k, by(containeredits.EnvVar), "a"); len(ids) != 1 || way != containeredits.EnvVar {
		t.Errorf("offered %q by %s", ids, way)
	}
	if ids, way := offered(k, by(containeredits.CDICRI), "a"); len(ids) != 1 || way != containeredits.EnvVar {
		t.Errorf("before the write: offered %q by %s", ids, way)
	}
	settle := keep(t, k)
	settle()
	if ids, way := offered(k, by(containeredits.CDICRI), "a"); len(ids) != 1 || way != containeredits.CDICRI {
		t.Errorf("after the write: offered %q by %s", ids, way)
	}
	d.mu.Lock()
	d.err, d.has = errors.New("disk full"), nil
	d.mu.Unlock()
	d.writing.Lock()
	if ids, way := offered(k, by(containeredits.CDIAnnotations), "a"); len(ids) != 0 || way != containeredits.CDICRI {
		t.Errorf("files removed: offered %q by %s", ids, way)
	}
	d.writing.Unlock()
	settle()
	if ids, way := offered(k, by(containeredits.CDIAnnotations), "a"); len(ids) != 0 ||
		way != containeredits.CDIAnnotations {
		t.Errorf("a write that fails: offered %q by %s", ids, way)
	}
	if ids, way := offered(k, by(containeredits.EnvVar), "a"); len(ids) != 1 || way != containeredits.EnvVar {
		t.Errorf("without CDI: offered %q by %s", ids, way)
	}
}

// TestWhatDoesNotNeedFilesDoesNotWait: only how containers are given devices waits for the disk.
func TestWhatDoesNotNeedFilesDoesNotWait(t *testing.T) {
	t.Parallel()
	d := &disk{}
	k := newSpecTask(d)
	snapshot, plan := node("a")
	k.prepare(snapshot, plan, by(containeredits.CDICRI))
	keep(t, k)()
	d.writing.Lock()
	defer d.writing.Unlock()
	wanted := by(containeredits.CDICRI)
	wanted.PreStart.Checks = config.PreStartHealth
	if _, c, _ := k.prepare(snapshot, plan, wanted); c.PreStart.Checks != config.PreStartHealth {
		t.Error("the checks before a container starts wait for files")
	}
}

// TestFilesAreWrittenForWhatTheyDependOn: a snapshot, a plan or a configuration that differs, and
// nothing else.
func TestFilesAreWrittenForWhatTheyDependOn(t *testing.T) {
	t.Parallel()
	d := &disk{}
	k := newSpecTask(d)
	settle := keep(t, k)
	snapshot, plan := node("a", "b")
	newer := snapshot
	newer.Driver.Version = "580.95.05"
	held := plan.Under([]resource.Hold{{UUID: "a", Hidden: true}})
	c, other := by(containeredits.CDICRI), by(containeredits.CDICRI)
	other.Edits.GDRCopy = containeredits.Always
	for i, r := range []specRequest{
		{snapshot: snapshot, plan: plan, config: c}, {snapshot: newer, plan: plan, config: c}, {snapshot: newer, plan: held,
			config: c},
		{snapshot: newer, plan: held, config: other},
	} {
		for range 2 {
			k.prepare(r.snapshot, r.plan, r.config)
			settle()
		}
		d.mu.Lock()
		if d.writes != i+1 {
			t.Errorf("%d writes after %d requests that differ", d.writes, i+1)
		}
		d.mu.Unlock()
	}
}
