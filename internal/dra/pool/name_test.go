package pool_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestNameOfPublishedGPUs: the driver keeps its name as long as GPUs may be in slices, and takes
// the new one then.
func TestNameOfPublishedGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, keepsName)
}

func keepsName(t *testing.T) {
	t.Helper()
	const former, next = "gpu.example.com", "gpu.nvidia.com"
	dir, s := t.TempDir(), gpus(map[string]int{"GPU-a": 0})
	name := func(wanted string) (string, string) {
		t.Helper()
		now, kept, err := pool.DriverName(dir, filepath.Join(dir, "cdi"), wanted)
		if err != nil {
			t.Fatal(err)
		}
		return now, kept
	}
	if now, kept := name(former); now != former || kept != "" {
		t.Errorf("on a new node %s, %q", now, kept)
	}
	o := publishesAll(dir, s)
	o.Driver = former
	d := run(t, o)
	for _, published := range []map[string]bool{{"GPU-a": true}, {}} {
		if err := d.SetPublished(t.Context(), published); err != nil {
			t.Fatal(err)
		}
		now, kept := name(next)
		if len(published) == 0 {
			if now != next || kept != "" {
				t.Errorf("when no GPU is in a slice: %s, %q", now, kept)
			}
			continue
		}
		want := "dra.driverName is gpu.nvidia.com, and the driver keeps the name gpu.example.com, under which GPUs are in " +
			"ResourceSlices; " +
			"set dra.driverName to gpu.example.com and dra.mode to plugin until"
		if now != former || !strings.HasPrefix(kept, want) {
			t.Errorf("with a GPU in a slice: %s, %q", now, kept)
		}
		if now, kept := name(former); now != former || kept != "" {
			t.Errorf("under the same name: %s, %q", now, kept)
		}
	}
}

// TestALeadUnderAnotherName: a process whose name is another one than that of the slices does not
// lead. It began when there were none.
func TestALeadUnderAnotherName(t *testing.T) {
	t.Parallel()
	dir, s := t.TempDir(), gpus(map[string]int{"GPU-a": 0})
	if err := os.WriteFile(filepath.Join(dir, "dra-published.json"),
		[]byte(`{"version":1,"gpus":["GPU-a"],"driver":"gpu.example.com"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	d := pool.New(pool.Options{
		StateDir: dir, Node: "node-1", Snapshots: feed.New(s), Owners: feed.New(dra.All(s.GPUs)),
		Configs: feed.New(config.Config{Live: config.Live{DRA: config.DRA{Mode: config.DRAAll}}}),
	})
	if err := d.Run(t.Context()); !errors.Is(err, dra.ErrOtherName) || !strings.Contains(err.Error(), "gpu.example.com") {
		t.Errorf("it ended with %v", err)
	}
	if pool := d.Pools().Value(); pool.Name != "" {
		t.Errorf("it gives %+v", pool)
	}
}
