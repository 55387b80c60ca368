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
