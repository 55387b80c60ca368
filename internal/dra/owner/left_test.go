package owner_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A whole is a process with Devices and an Arbiter, in a folder that outlives it.
type whole struct {
	*pool.Devices
	t      *testing.T
	owners *feed.Feed[dra.Owners]
	stop   func()
}

func begin(t *testing.T, dir string, mode config.DRAMode, s inventory.Snapshot,
	list func() (map[string][]string, error)) *whole {
	t.Helper()
	p := &whole{t: t, owners: feed.New(dra.Owners(nil))}
	p.Devices = pool.New(pool.Options{
		StateDir: dir, Node: "node-1", Snapshots: feed.New(s), Owners: p.owners,
		Configs: feed.New(config.Config{Live: config.Live{DRA: config.DRA{Mode: mode}}}),
	})
	arbiter := owner.New(owner.Options{
		Devices: p.Devices, Offered: feed.New(dra.Owners(nil)), Records: feed.New(map[string][]claims.Holder{}),
		List: func(context.Context, []string) (map[string][]string, error) { return list() },
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{p.Run, arbiter.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	p.stop = func() { cancel(); running.Wait() }
	return p
}

// is waits, and wants this owner of the GPU then.
func (p *whole) is(when string, after time.Duration, want dra.Ownership) {
	p.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	if got := p.owners.Value()["GPU-a"]; got != want {
		p.t.Fatalf("%s: the owner is %q, want %q", when, got, want)
	}
}

// TestKilledWhileNobodyHasIt: a GPU has left its slice, and the process ends before a list of
// claims was made. The next one makes that list before the device plugin gets the GPU, and puts it
// back into the slice for a claim that got it meanwhile. When the device plugin has got it, the
// next process gives it to that at once.
func TestKilledWhileNobodyHasIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir, node := t.TempDir(), inventory.Snapshot{Generation: 1, Driver: inventory.Driver{Version: "580"},
			GPUs: []inventory.GPU{{UUID: "GPU-a", Health: inventory.Health{State: inventory.Healthy}}}}
		type answer struct {
			claims map[string][]string
			err    error
		}
		answers := feed.New(answer{err: errors.New("away")})
		list := func() (map[string][]string, error) { return answers.Value().claims, answers.Value().err }
		none, some := map[string]bool{}, map[string]bool{"GPU-a": true}
		set := func(p *whole, gpus map[string]bool) {
			t.Helper()
			if err := p.SetPublished(t.Context(), gpus); err != nil {
				t.Fatal(err)
			}
		}
		first := begin(t, dir, config.DRAAll, node, list)
		synctest.Wait()
		set(first, some)
		set(first, none)
		first.stop()

		p := begin(t, dir, config.DRAOff, node, list)
		p.is("no list was made", time.Hour, dra.OwnedByNobody)
		p.stop()
		p = begin(t, dir, config.DRAAll, node, list) // an earlier version may have given it to pods meanwhile
		p.is("wanted in slices again", time.Minute, dra.LeavesPlugin)
		p.stop()

		p = begin(t, dir, config.DRAOff, node, list)
		answers.Publish(answer{claims: map[string][]string{"GPU-a": {"ns/late"}}})
		p.is("a claim has it", time.Minute, dra.LeavesDRA)
		set(p, some)
		answers.Publish(answer{})
		p.is("the claim has ended", time.Minute, dra.OwnedByNobody)
		set(p, none)
		p.is("no claim has it", time.Minute, dra.OwnedByPlugin)
		p.stop()

		answers.Publish(answer{err: errors.New("away")})
		p = begin(t, dir, config.DRAOff, node, list)
		p.is("after a restart", 0, dra.OwnedByPlugin)
		p.stop()
		if text, err := os.ReadFile(filepath.Join(dir, "dra-published.json")); err != nil ||
			strings.Contains(string(text), "GPU-a") {
			t.Errorf("the file is %s, %v", text, err)
		}
	})
}
