package daemon_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
)

// TestLabelsFollowTheNode: labels follow GPUs and configuration, and stay unchanged while the
// driver is missing.
func TestLabelsFollowTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		named := func(file string, timestamp bool) config.Config {
			return config.Config{Live: config.Live{Features: config.Features{MachineTypeFile: file, LabelsTimestamp: timestamp}}}
		}
		l := daemon.Labels{
			Configs: feed.New(named("A", false)), Snapshots: feed.New(inventory.Snapshot{}),
			Wanted:  feed.New[map[string]string](nil),
			Machine: func(file string) string { return "machine-" + file }, Now: time.Now,
			Make: func(s inventory.Snapshot, o labels.Options) map[string]string {
				all := labels.Discovered(s, o)
				return map[string]string{"m": all["nvidia.com/gpu.machine"], "t": all["nvidia.com/gfd.timestamp"],
					"n": all["nvidia.com/gpu.count"]}
			},
		}
		ended := make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		go func() { ended <- l.Run(ctx) }()
		check := func(when string, want map[string]string) <-chan struct{} {
			t.Helper()
			synctest.Wait()
			got, changed := l.Wanted.Latest()
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
			return changed
		}
		one := inventory.Snapshot{Generation: 2, GPUs: []inventory.GPU{{Model: "a"}}}
		check("before the first look", nil)
		l.Snapshots.Publish(inventory.Snapshot{Generation: 1, Stale: "no driver"})
		check("without a driver", nil)
		due := one
		due.LinksDue = true
		l.Snapshots.Publish(due)
		check("while the first links are due", nil)
		l.Snapshots.Publish(one)
		changed := check("with a driver", map[string]string{"m": "machine-A", "t": "", "n": "1"})
		l.Snapshots.Publish(one)
		l.Snapshots.Publish(inventory.Snapshot{Generation: 3, Stale: "gone"})
		check("the driver went away", map[string]string{"m": "machine-A", "t": "", "n": "1"})
		select {
		case <-changed:
			t.Error("labels that are the same were published again")
		default:
		}
		l.Configs.Publish(named("B", true))
		check("another configuration while the driver is away", map[string]string{"m": "machine-A", "t": "", "n": "1"})
		time.Sleep(time.Minute)
		l.Snapshots.Publish(inventory.Snapshot{Generation: 4, GPUs: []inventory.GPU{{Model: "a"}, {Model: "a"}}})
		check("the driver is back", map[string]string{"m": "machine-B", "t": "946684800", "n": "2"})
		due.Generation = 5
		l.Snapshots.Publish(due)
		check("while links are due again", map[string]string{"m": "machine-B", "t": "946684800", "n": "1"})
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestMPSCapableWhileClaimsArePrepared: the label for the control daemons of MPS stays after a
// change of the mode to plugin, until no claim is prepared. Until the claims are known, no label
// changes.
func TestMPSCapableWhileClaimsArePrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mode := func(m config.DRAMode) config.Config {
			c := config.Config{Live: config.Live{DRA: config.DRA{Mode: m}}}
			c.Edits.MPSRoot = "/run/nvidia/mps"
			return c
		}
		l := daemon.Labels{
			Configs: feed.New(mode(config.DRAOff)), Wanted: feed.New[map[string]string](nil),
			InUse:     feed.New[map[string][]claims.Holder](nil),
			Snapshots: feed.New(inventory.Snapshot{Generation: 1, GPUs: []inventory.GPU{{UUID: "a"}}}),
			Machine:   func(string) string { return "" }, Now: time.Now, Make: labels.All,
		}
		ended := make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		go func() { ended <- l.Run(ctx) }()
		check := func(when, want string) {
			t.Helper()
			synctest.Wait()
			if got := l.Wanted.Value()["nvidia.com/mps.capable"]; got != want {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		}
		one := map[string][]claims.Holder{"a": {{UID: "one"}}}
		check("before the records are read", "")
		l.InUse.Publish(one)
		check("a claim of before a restart", "true")
		l.InUse.Publish(map[string][]claims.Holder{})
		check("without claims", "false")
		l.Configs.Publish(mode(config.DRAAll))
		check("in the mode dra", "true")
		l.InUse.Publish(one)
		l.Configs.Publish(mode(config.DRAOff))
		check("a claim that is prepared after a change to plugin", "true")
		l.InUse.Publish(map[string][]claims.Holder{})
		check("it was given back", "false")
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestMachineName(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "product_name")
	if err := os.WriteFile(file, []byte(" DGX \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{file: "DGX", "/nowhere": "unknown"} {
		if got := daemon.MachineName(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
