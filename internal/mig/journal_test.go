package mig_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// makesOn0 applies a layout to GPU 0 alone.
func (r *rig) makesOn0(layout string) {
	r.t.Helper()
	r.desired.Publish(mig.DesiredLayout{Layout: layout, GPUs: []string{"0"}})
	r.reaches(mig.StateSuccess)
}

// wantOwn checks whether the next process counts the instances of GPU 0 as made by this program: it
// replaces only those.
func (r *rig) wantOwn(own bool) {
	r.t.Helper()
	r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}, OrderNumber: 1})
	r.start()
	want := map[bool]mig.ConfigState{true: mig.StateSuccess, false: mig.StateFailed}[own]
	if s := r.reaches(want); !own && !strings.Contains(s.Reason, "this program did not create it") {
		r.t.Error(s.Reason)
	}
}

// A restart of the node is detected only by two known and different boot IDs. After it, no instance
// counts as made by this program.
func TestBootOfTheJournal(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before, now string
		own         bool
	}{"the same": {"one", "one", true}, "another": {"one", "two", false}, "not known before": {"", "two", true},
		"not known now": {"one", "", true}} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(_ *testing.T, r *rig) {
				r.boot = tt.before
				r.start()
				r.makesOn0("all-balanced")
				r.stop()
				r.boot = tt.now
				r.wantOwn(tt.own)
			})
		})
	}
}

// An instance is recognized by its place, and only if all its compute instances were recorded.
func TestInstancesOfThisProgram(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(instance map[string]any)
		own    bool
	}{
		"unchanged":       {func(map[string]any) {}, true},
		"another profile": {func(i map[string]any) { i["profile"] = "4g.40gb" }, false},
		"another place":   {func(i map[string]any) { i["start"] = 5 }, false},
		"another size":    {func(i map[string]any) { i["size"] = 5 }, false},
		"a compute instance that was not recorded": {func(i map[string]any) { delete(i, "computes") }, false},
		"a compute instance of another size": {func(i map[string]any) {
			i["computes"] = []any{map[string]any{"start": 0, "slices": 9}}
		}, false},
		"a compute instance that ended": {func(i map[string]any) {
			i["computes"] = append(i["computes"].([]any), map[string]any{"start": 9, "slices": 1})
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(t *testing.T, r *rig) {
				r.start()
				r.makesOn0("all-balanced")
				r.stop()
				var file map[string]any
				if err := json.Unmarshal([]byte(r.journal()), &file); err != nil {
					t.Fatal(err)
				}
				for _, record := range file["gpus"].(map[string]any) {
					tt.change(record.(map[string]any)["made"].([]any)[0].(map[string]any))
				}
				text, err := json.Marshal(file)
				if err == nil {
					err = os.WriteFile(filepath.Join(r.dir, "mig.json"), text, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
				r.wantOwn(tt.own)
			})
		})
	}
}

// A recordedChange is the change of a GPU in the journal.
type recordedChange struct {
	Layout          string
	Enabled         bool
	Before, Creates []struct{ Profile string }
}

// recorded returns the record of the only GPU in the journal: the change in progress, nil if there
// is none, and the number of instances that this program made.
func (r *rig) recorded() (change *recordedChange, made int) {
	r.t.Helper()
	var file struct {
		GPUs map[string]struct {
			Change *recordedChange
			Made   []any
		}
	}
	if err := json.Unmarshal([]byte(r.journal()), &file); err != nil {
		r.t.Fatal(err)
	}
	for _, record := range file.GPUs {
		change, made = record.Change, len(record.Made)
	}
	return change, made
}

// profiles returns the profiles of instances in the journal.
func profiles(instances []struct{ Profile string }) string {
	var all []string
	for _, i := range instances {
		all = append(all, i.Profile)
	}
	return strings.Join(all, " ")
}

// The division before the first change stays recorded until a change has ended, also for the next
// process with another layout, and created instances accumulate.
func TestJournalOfAChange(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makesOn0("all-balanced")
		if change, made := r.recorded(); change != nil || made != 4 {
			t.Errorf("after the change: %+v, %d instances", change, made)
		}
		r.mu.Lock()
		r.before = func(string, inventory.MIGStep) error { return inventory.ErrNoAnswer }
		r.mu.Unlock()
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
		r.until("has begun", func(s mig.Status) bool { return strings.Contains(s.Reason, inventory.ErrNoAnswer.Error()) })
		first, _ := r.recorded()
		if first == nil || len(first.Before) != 4 || profiles(first.Creates) != "7g.80gb" || !first.Enabled {
			t.Fatalf("during the change: %+v", first)
		}
		r.stop()
		var second *recordedChange
		r.before = func(string, inventory.MIGStep) error {
			if second == nil {
				second, _ = r.recorded()
			}
			return nil
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-3g.40gb", GPUs: []string{"0"}})
		r.start()
		r.reaches(mig.StateSuccess)
		if second == nil || second.Layout != "all-3g.40gb" || profiles(second.Before) != profiles(first.Before) ||
			!strings.HasPrefix(profiles(second.Creates), "7g.80gb 3g.40gb") {
			t.Errorf("during the next change: %+v, want the division before of %+v", second, first)
		}
	})
}

// After a restart of the node, a change forgets the instances of before. It is recorded before its
// first step.
func TestJournalAfterRestartOfTheNode(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makesOn0("all-balanced")
		r.reboots()
		var first *recordedChange
		made := 0
		r.before = func(string, inventory.MIGStep) error {
			if first == nil {
				first, made = r.recorded()
			}
			return nil
		}
		r.desired.Publish(mig.DesiredLayout{Layout: "all-7g.80gb", GPUs: []string{"0"}})
		r.start()
		r.reaches(mig.StateSuccess)
		if first == nil || made != 0 {
			t.Errorf("before the first step: %+v, %d instances", first, made)
		}
		r.makesOn0("all-disabled")
		if text := r.journal(); strings.Contains(text, "GPU-") {
			t.Errorf("nothing is divided any more: %s", text)
		}
	})
}

// While the division of a GPU cannot be read, its record stays.
func TestUnreadDivision(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		r.makesOn0("all-balanced")
		before := r.journal()
		r.inject(simulator.Fault{Kind: simulator.KindFail, GPU: "0", Call: "DeviceGetGpuInstances", Return: "NO_PERMISSION"})
		r.desired.Publish(mig.DesiredLayout{Layout: "all-balanced", GPUs: []string{"0"}, OrderNumber: 1})
		r.passes(time.Minute)
		if text := r.journal(); text != before {
			t.Errorf("the journal is\n%s, and was\n%s", text, before)
		}
		r.inject(simulator.Fault{Kind: simulator.KindRestore, GPU: "0"})
		r.stop()
		r.wantOwn(true)
	})
}

// A failing read of the journal is retried every five seconds.
func TestJournalRetry(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		file, began := filepath.Join(t.TempDir(), "file"), time.Now()
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		begins := make(chan time.Duration, 1)
		r.start(func(o *mig.Options) {
			o.StateDir = filepath.Join(file, "state")
			o.TakeOver = func(context.Context) { begins <- time.Since(began) }
		})
		r.passes(12 * time.Second)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if took := <-begins; took != 15*time.Second {
			t.Errorf("tried again after %v", took)
		}
	})
}

// A layout is for all GPUs, or for those with an index or UUID.
func TestGPUsOfALayout(t *testing.T) {
	onNode(t, func(t *testing.T, r *rig) {
		r.start()
		s := r.until("has read the GPUs", func(s mig.Status) bool { return len(s.GPUs) == 3 })
		for i, tt := range []struct {
			gpus []string
			want bool // for the GPU with index 1
		}{
			{nil, true}, {[]string{"0", "1"}, true}, {[]string{s.GPUs[1].UUID}, true},
			{[]string{"0", s.GPUs[0].UUID}, false}, {[]string{"11"}, false},
		} {
			d := mig.DesiredLayout{Layout: "all-disabled", GPUs: tt.gpus, OrderNumber: uint64(i + 1)}
			r.desired.Publish(d)
			now := r.until("has decided", func(s mig.Status) bool {
				return s.OrderNumber == d.OrderNumber && s.State != mig.StatePending
			})
			if got := now.GPUs[1].Phase == mig.PhaseDone; got != tt.want {
				t.Errorf("%v concerns GPU 1: %v", tt.gpus, got)
			}
		}
		if text := r.journal(); text != "" {
			t.Errorf("nothing was changed, and the journal was written: %s", text)
		}
	})
}
