package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/serve"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// watch runs a monitor of a driver until the test ends.
func watch(t *testing.T, d monitor.Driver) *monitor.Monitor {
	t.Helper()
	m := monitor.New(monitor.Options{Driver: d, Policy: health.Default(), Poll: time.Hour, SuspectPoll: time.Hour})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return m
}

// TestFirstScanEndsTheDaemon: if configured, a failed first scan ends the daemon with a sentence,
// without a new process, which would find the same.
func TestFirstScanEndsTheDaemon(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	wanted, waits := feed.New(config.Config{Startup: config.Startup{FailOnInitError: true}}), feed.New(config.Config{})
	bad, good := watch(t, &driver{err: inventory.ErrOldLibrary}), watch(t, &driver{})
	err := daemon.CheckFirstLook(ctx, bad, wanted)
	if err == nil || errors.Is(err, inventory.ErrDriverReplaced) {
		t.Fatalf("got %v, want an error that asks for no new process", err)
	}
	for _, word := range []string{inventory.ErrDriverMismatch.Error(), "gpu-device-plugin doctor",
		"--fail-on-init-error=false"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("got %v, want %q in it", err, word)
		}
	}
	for what, err := range map[string]error{
		"a driver that may come later": daemon.CheckFirstLook(ctx, bad, waits),
		"a driver that works":          daemon.CheckFirstLook(ctx, good, wanted),
		"a driver that needs a restart of the node": daemon.CheckFirstLook(ctx,
			watch(t, &driver{err: inventory.ErrDriverMismatch}), wanted),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := daemon.CheckFirstLook(ended, monitor.New(monitor.Options{Driver: &driver{}}), wanted); err != nil {
		t.Errorf("the end of the daemon before the first look: %v", err)
	}
}

// TestHealthPolicyOfTheConfig: the policies of the first and of each following Config are applied.
func TestHealthPolicyOfTheConfig(t *testing.T) {
	t.Parallel()
	i := inspect(t, "dgx-h100", resource.Options{}, none)
	enabled := func(xids string) config.Config {
		policy := health.Default()
		policy.Overrides, _ = health.ParseOverrides("", xids)
		return config.Config{Live: config.Live{Health: policy}}
	}
	configs := feed.New(enabled("13"))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- daemon.FollowHealth(ctx, i.Monitor, configs) }()
	for gpu, xid := range []uint64{13, 43} { // XIDs that count only if configured
		configs.Publish(enabled(fmt.Sprint(xid)))
		for deadline := time.Now().Add(patience); ; {
			i.inject(simulator.Fault{Kind: simulator.KindXID, GPU: fmt.Sprint(gpu), XID: xid})
			s, err := i.Monitor.Look(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if s.GPUs[gpu].Health.State == inventory.Unhealthy {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("XID %d does not count: %+v", xid, s.GPUs[gpu].Health)
			}
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A slow driver has a first scan that ends when end is closed.
type slow struct {
	driver
	end chan struct{}
}

func (s *slow) Open(ctx context.Context) (monitor.Session, error) {
	<-s.end
	return s.driver.Open(ctx)
}

// A plugins is a record of the node's device plugins.
type plugins struct {
	allocatable map[string][]string
	err         error
}

func (p plugins) Allocatable(context.Context) (map[string][]string, error) {
	return p.allocatable, p.err
}
func (p plugins) Remembered() (map[string][]string, error) { return nil, nil }
func (p plugins) Listening(context.Context) []string       { return nil }

// TestReady: a daemon is ready when it serves everything, and no less than another plugin serves.
func TestReady(t *testing.T) {
	t.Parallel()
	var owners *feed.Feed[dra.Owners] // nil: the device plugin owns all GPUs
	leads := true
	ready := func(m *monitor.Monitor, others plugins, servers ...serve.Status) (bool, string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		configs := feed.New(config.Config{})
		s := &daemon.Serving{
			Leads:   func() bool { return leads },
			Configs: configs, Monitor: m, Others: others, Servers: func() []serve.Status { return servers },
			Offered: feed.New(resource.New(m.Snapshots().Value(), resource.Options{})), Owners: owners,
		}
		return s.Ready(ctx)
	}
	wants := func(what string, want bool, reason string) func(bool, string) {
		return func(got bool, said string) {
			t.Helper()
			if got != want || !strings.Contains(said, reason) || reason == "" && said != "" {
				t.Errorf("%s: %v, %q, want %v, %q", what, got, said, want, reason)
			}
		}
	}
	theirs := plugins{allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-a"}}}

	late := &slow{end: make(chan struct{})}
	m := watch(t, late)
	wants("before the first look", false, "the first scan of the node has not ended")(ready(m, plugins{}))
	close(late.end)
	if err := m.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	wants("no GPU", true, "nothing to serve: this node has no GPU")(ready(m, plugins{}))
	wants("no GPU, and a resource that no pod holds", true,
		"this node has no GPU")(ready(m, plugins{}, serve.Status{Resource: "nvidia.com/gpu"}))
	wants("no GPU, and pods hold two", false,
		"nvidia.com/gpu cannot be offered, and pods hold or may hold 2 devices of it; this daemon has nothing")(
		ready(m, plugins{}, serve.Status{Resource: "a/b"}, serve.Status{Resource: "nvidia.com/gpu",
			Retiring: make([]listing.RetiringDevice, 2)}))
	wants("no GPU, and another plugin has some", false,
		"is served by another device plugin, with 1 device; this one has nothing to serve: this node has no GPU")(ready(m,
		theirs))
	if err := m.Quiesce(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	wants("quiesce", true, "nothing to serve: the driver is released")(ready(m, plugins{}))

	bad := watch(t, &driver{err: inventory.ErrDriverMismatch})
	if err := bad.First(t.Context()); err == nil {
		t.Fatal("the driver works")
	}
	wants("files that do not fit the module", false, inventory.ErrDriverMismatch.Error())(ready(bad, plugins{}))

	i := inspect(t, "dgx-h100", resource.Options{}, none)
	serving := serve.Status{Resource: resource.WholeGPU, Phase: serve.PhaseServing}
	wants("no server yet", false, "nvidia.com/gpu is not offered: its server is starting")(ready(i.Monitor, plugins{}))
	wants("not compared", false, "has not been compared")(ready(i.Monitor, plugins{}, serving))
	wants("no account", true, "")(ready(i.Monitor, plugins{err: errors.New("no such file")}, serving))
	serving.Agreed = true
	wants("served", true, "")(ready(i.Monitor, theirs, serving))
	owners = feed.New(dra.Owners(nil))
	wants("no owners yet", false, "not known yet which GPUs")(ready(i.Monitor, plugins{}))
	leads = false
	wants("a lead that knows no owners", true, "the leading process does not say which GPUs")(ready(i.Monitor,
		plugins{}))
	leads = true
	gpus := i.Monitor.Snapshots().Value().GPUs
	owners.Publish(dra.All(gpus[1:]))
	wants("an owner is not known yet", false, "not known yet which GPUs")(ready(i.Monitor, plugins{}))
	owners.Publish(dra.All(gpus))
	wants("all in slices", true, "Dynamic Resource Allocation gives out 8 GPUs")(ready(i.Monitor, plugins{}))

	ended, end := context.WithCancel(t.Context())
	end()
	got, said := (&daemon.Serving{Monitor: monitor.New(monitor.Options{Driver: &driver{}})}).Ready(ended)
	wants("the monitor cannot be reached", false, "canceled")(got, said)
}
