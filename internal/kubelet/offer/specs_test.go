package offer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/offer"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// A disk is a directory of specs that can be made to wait and to fail.
type disk struct {
	mu     sync.Mutex    // guards all following fields
	wait   chan struct{} // a file is written when this is closed; nil: at once
	has    map[string]bool
	writes int
	err    error
}

func (d *disk) Apply(_ inventory.Snapshot, p resource.Plan, _ config.Config) error {
	d.mu.Lock()
	wait := d.wait
	d.mu.Unlock()
	if wait != nil {
		<-wait
	}
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

// becomes changes the disk.
func (d *disk) becomes(err error, has map[string]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.has = err, has
}

// blocks makes all writes wait until the returned function is called.
func (d *disk) blocks() (release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wait := make(chan struct{})
	d.wait = wait
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.wait = nil
		close(wait)
	}
}

// A loop is a Loop in a bubble, and the servers that it gives plans.
type loop struct {
	*offer.Loop
	disk
	log     func() []string // what was logged since the last call
	offered *feed.Feed[resource.Plan]
	options serve.Options // of the last plan
}

func (l *loop) Apply(p resource.Plan, o serve.Options, _ uint64) {
	l.options = o
	l.offered.Publish(p)
}

func (l *loop) Offered() *feed.Feed[resource.Plan] { return l.offered }

// inBubble has a test change what a Loop plans by.
func inBubble(t *testing.T, test func(*testing.T, *loop)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &loop{offered: feed.New(resource.Plan{})}
		l.Loop = &offer.Loop{Configs: feed.New(whole()), Snapshots: feed.New(inventory.Snapshot{}), Set: l, Specs: &l.disk,
			MPS: noMPS{}, MIG: feed.New(map[string]resource.GPUHold(nil)), Owners: feed.New(ofPlugin()), Proofs: noProofs{},
			Driver: feed.New(driverchange.Status{}), Pulse: supervise.NewPulse()}
		var lines []string
		log := funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})
		l.log = func() []string {
			synctest.Wait()
			defer func() { lines = nil }()
			return lines
		}
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), log))
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		test(t, l)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// withGPUs is a node with GPUs of the given UUIDs.
func withGPUs(uuids ...string) inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1}
	for i, uuid := range uuids {
		s.GPUs = append(s.GPUs, inventory.GPU{UUID: uuid, Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	return s
}

func by(s containeredits.Strategy) config.Config {
	return config.Config{Live: config.Live{Edits: containeredits.Options{Strategies: []containeredits.Strategy{s}}}}
}

// offers fails unless these devices are offered by a strategy, once nothing happens any more. No
// warning says that a strategy of before is in force: files that are not there yet are no reason.
func (l *loop) offers(t *testing.T, when string, s containeredits.Strategy, want ...string) {
	t.Helper()
	synctest.Wait()
	var ids []string
	plan := l.offered.Value()
	for _, r := range plan.Resources {
		for _, d := range r.Devices {
			ids = append(ids, d.ID)
		}
	}
	if got := l.options.Edits.Strategies[0]; !cmp.Equal(ids, want) || got != s ||
		strings.Contains(strings.Join(plan.Warnings, "\n"), "as before the last change of the configuration") {
		t.Errorf("%s: offered %q by %s, want %q by %s; warnings %q", when, ids, got, want, s, plan.Warnings)
	}
}

func TestOnlyNewNamesWaitForTheDisk(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		const way = containeredits.CDICRI
		release := l.blocks()
		l.Configs.Publish(by(way))
		l.Snapshots.Publish(withGPUs("a", "b"))
		l.offers(t, "before anything was written", way)
		release()
		l.offers(t, "after the write", way, "a", "b")
		release = l.blocks()
		l.becomes(errors.New("disk full"), l.has)
		l.Snapshots.Publish(withGPUs("a", "c"))
		l.offers(t, "before a write that fails", way, "a")
		release()
		l.offers(t, "after a write that fails", way, "a")
		if l.writes != 2 {
			t.Errorf("%d writes, want one for each of two requests", l.writes)
		}
	})
}

// TestAnotherWayOfGivingWaitsForTheDisk, and only that: the checks before a container starts do not.
func TestAnotherWayOfGivingWaitsForTheDisk(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		l.Configs.Publish(by(containeredits.EnvVar))
		l.Snapshots.Publish(withGPUs("a"))
		l.offers(t, "without CDI", containeredits.EnvVar, "a")
		release := l.blocks()
		l.Configs.Publish(by(containeredits.CDICRI))
		l.offers(t, "before the write", containeredits.EnvVar, "a")
		release()
		l.offers(t, "after the write", containeredits.CDICRI, "a")
		release = l.blocks()
		checked := by(containeredits.CDICRI)
		checked.PreStart.Checks = config.PreStartHealth
		l.Configs.Publish(checked)
		l.offers(t, "with checks", containeredits.CDICRI, "a")
		if !l.options.Inspect {
			t.Error("the checks before a container starts wait for files")
		}
		l.becomes(errors.New("disk full"), nil)
		l.Configs.Publish(by(containeredits.CDIAnnotations))
		l.offers(t, "files removed", containeredits.CDICRI)
		release()
		l.offers(t, "a write that fails", containeredits.CDIAnnotations)
		l.Configs.Publish(by(containeredits.EnvVar))
		l.offers(t, "without CDI again", containeredits.EnvVar, "a")
	})
}

// TestFilesAreWrittenForWhatTheyDependOn: a snapshot, a plan or a configuration that differs, and
// nothing else.
func TestFilesAreWrittenForWhatTheyDependOn(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		newer, other := withGPUs("a", "b"), by(containeredits.CDICRI)
		newer.Driver.Version = "580.95.05"
		other.Edits.GDRCopy = containeredits.Always
		l.Configs.Publish(by(containeredits.CDICRI))
		for i, publish := range []func(){
			func() { l.Snapshots.Publish(withGPUs("a", "b")) },
			func() { l.Snapshots.Publish(newer) },
			func() { l.MIG.Publish(map[string]resource.GPUHold{"b": {}}) }, // "a" is not offered
			func() { l.Configs.Publish(other) },
		} {
			for range 2 {
				publish()
				synctest.Wait()
			}
			if l.writes != i+1 {
				t.Errorf("%d writes after %d requests that differ", l.writes, i+1)
			}
		}
	})
}

// TestAWarningIsLoggedWhenItComes: once, and again when it comes back. One that goes at once is not
// logged.
func TestAWarningIsLoggedWhenItComes(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		for i, step := range []struct {
			warnings []string
			want     string
		}{{[]string{"a"}, `"a"`}, {[]string{"a", "b"}, `"b"`}, {[]string{"b"}, ""}, {[]string{"a", "b"}, `"a"`}, {}} {
			l.offered.Publish(resource.Plan{Warnings: append(step.warnings, "not written yet")})
			time.Sleep(time.Second / 2)
			l.offered.Publish(resource.Plan{Warnings: step.warnings})
			time.Sleep(2 * time.Second)
			got := ""
			for _, line := range l.log() {
				_, warning, _ := strings.Cut(line, `"warning"=`)
				got += warning
			}
			if got != step.want {
				t.Errorf("step %d: logged %s, want %s", i, got, step.want)
			}
		}
	})
}

// TestAFailureOfTheDiskIsLoggedOnce: until it is another one, or has ended.
func TestAFailureOfTheDiskIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		l.Configs.Publish(by(containeredits.CDICRI))
		l.Snapshots.Publish(withGPUs("a"))
		full, broken := errors.New("disk full"), errors.New("disk broken")
		for i, err := range []error{nil, full, broken, nil, broken} {
			l.becomes(err, map[string]bool{"a": true})
			time.Sleep(100 * time.Second) // the files are checked some times
			want := []string{""}
			switch {
			case err != nil:
				want = []string{"devices without them are not offered", err.Error()}
			case i > 0:
				want = []string{"complete again"}
			}
			got := strings.Join(l.log(), "\n")
			for _, words := range want {
				if !strings.Contains(got, words) || strings.Contains(got, "\n") || (got == "") != (words == "") {
					t.Errorf("step %d: logged %q, want one line with %q", i, got, words)
				}
			}
		}
	})
}

// TestChangeOfTheDriver: no device is given to pods during a change of the driver.
func TestChangeOfTheDriver(t *testing.T) {
	inBubble(t, func(t *testing.T, l *loop) {
		l.Snapshots.Publish(withGPUs("a", "b"))
		time.Sleep(time.Second)
		held := func() (reasons []string) {
			synctest.Wait()
			for _, h := range l.offered.Value().Holds {
				reasons = append(reasons, h.Reason)
			}
			return reasons
		}
		if got := held(); len(got) > 0 {
			t.Errorf("before: %q", got)
		}
		l.Driver.Publish(driverchange.Status{Withholds: true})
		if got := held(); !slices.Equal(got, []string{driverchange.HoldReason, driverchange.HoldReason}) {
			t.Errorf("during the change: %q", got)
		}
		l.Driver.Publish(driverchange.Status{})
		if got := held(); len(got) > 0 {
			t.Errorf("after: %q", got)
		}
	})
}
