package mig

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

var third = inventory.GPUInstance{ID: 1, Profile: "3g.40gb", Start: 0, Size: 4,
	Computes: []inventory.ComputeInstance{{ID: 0, Start: 0, Slices: 3}}}

// An instance is recognized by its place, and only if all its compute instances were recorded.
// After a restart of the node none is.
func TestInstancesOfThisProgram(t *testing.T) {
	t.Parallel()
	noted := []instance{instanceOf(third)}
	for name, test := range map[string]struct {
		record journalRecord
		change func(*inventory.GPUInstance)
		want   bool
	}{
		"made":                  {journalRecord{Created: noted}, func(*inventory.GPUInstance) {}, true},
		"being created":         {journalRecord{Change: &change{Creates: noted}}, func(*inventory.GPUInstance) {}, true},
		"there before a change": {journalRecord{Change: &change{Before: noted}}, func(*inventory.GPUInstance) {}, false},
		"made before a restart": {journalRecord{Created: noted, restarted: true}, func(*inventory.GPUInstance) {}, false},
		"nothing noted":         {journalRecord{}, func(*inventory.GPUInstance) {}, false},
		"no compute instance":   {journalRecord{Created: noted}, func(i *inventory.GPUInstance) { i.Computes = nil }, true},
		"another ID":            {journalRecord{Created: noted}, func(i *inventory.GPUInstance) { i.ID = 9 }, true},
		"another profile": {journalRecord{Created: noted}, func(i *inventory.GPUInstance) { i.Profile = "4g.40gb" },
			false},
		"another place": {journalRecord{Created: noted}, func(i *inventory.GPUInstance) { i.Start = 4 }, false},
		"another size":  {journalRecord{Created: noted}, func(i *inventory.GPUInstance) { i.Size = 3 }, false},
		"a compute instance more": {journalRecord{Created: noted}, func(i *inventory.GPUInstance) {
			i.Computes = []inventory.ComputeInstance{{Slices: 3}, {ID: 1, Slices: 1}}
		}, false},
	} {
		found := third
		test.change(&found)
		if got := test.record.created(found); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	want := []inventory.GPUInstance{{Profile: "3g.40gb", Size: 4, Computes: []inventory.ComputeInstance{{Slices: 3}}}}
	if diff := cmp.Diff(want, inventoried(noted)); diff != "" {
		t.Errorf("noted instances as the inventory has them (-want +got):\n%s", diff)
	}
}

// opened returns a journal that this process may write.
func opened(t *testing.T, dir, boot string) *journal {
	t.Helper()
	j := newJournal(dir, boot)
	j.load(t.Context(), New(Options{}).options)
	if err := j.writable(); err != nil {
		t.Fatal(err)
	}
	return j
}

// The division before the first change stays recorded until the change has ended, and created
// instances accumulate.
func TestJournalOfAChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := opened(t, dir, "one")
	step := func(action inventory.MIGAction, i inventory.GPUInstance) layout.Step {
		return layout.Step{Action: action, Part: layout.Part{GPUInstance: i}}
	}
	noted := func(what string, want journalRecord) {
		t.Helper()
		if diff := cmp.Diff(want, j.record("GPU-0"), cmp.AllowUnexported(journalRecord{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	ended := func(p inventory.Partitions) {
		t.Helper()
		if err := j.endChange(t.Context(), layout.GPU{UUID: "GPU-0", Partitions: p}); err != nil {
			t.Fatal(err)
		}
	}
	other := inventory.GPUInstance{ID: 2, Profile: "1g.10gb", Start: 4, Size: 1}
	last := inventory.GPUInstance{ID: 3, Profile: "1g.10gb", Start: 6, Size: 1}
	first := layout.GPUChange{
		GPU:    layout.GPU{UUID: "GPU-0"},
		Before: layout.Division{Mode: inventory.MIGEnabled, Instances: []layout.Part{{GPUInstance: third}}},
		Steps: []layout.Step{
			step(inventory.MIGDestroyInstance, third), step(inventory.MIGCreateInstance, other), step(inventory.MIGCreateCompute,
				other),
		},
	}
	second := layout.GPUChange{
		GPU: layout.GPU{UUID: "GPU-0"}, Before: layout.Division{Mode: inventory.MIGDisabled},
		Steps: []layout.Step{step(inventory.MIGCreateInstance, last)},
	}
	if err := errors.Join(j.beginChange(t.Context(), first, "first"),
		j.beginChange(t.Context(), second, "second")); err != nil {
		t.Fatal(err)
	}
	want := journalRecord{Boot: "one", Change: &change{
		Layout: "second", Enabled: true, Before: []instance{instanceOf(third)}, Creates: []instance{instanceOf(other),
			instanceOf(last)},
	}}
	noted("during the second change", want)
	j = opened(t, dir, "one")
	noted("in the next process", want)
	ended(inventory.Partitions{Unread: "no permission"})
	noted("after a look that could not read it", want)
	ended(inventory.Partitions{Mode: inventory.MIGEnabled, Instances: []inventory.GPUInstance{third, other}})
	want = journalRecord{Boot: "one", Enabled: true, Created: []instance{instanceOf(other)}}
	noted("after the change", want)
	if r := j.record("GPU-1"); r.Boot != "" {
		t.Errorf("of another GPU: %+v", r)
	}
	j = opened(t, dir, "two")
	want.restarted = true
	noted("after a restart of the node", want)
	if err := j.beginChange(t.Context(), second, "again"); err != nil {
		t.Fatal(err)
	}
	noted("during a change after that", journalRecord{Boot: "two",
		Change: &change{Layout: "again", Creates: []instance{instanceOf(last)}}})
	ended(inventory.Partitions{Mode: inventory.MIGDisabled})
	if text, err := os.ReadFile(filepath.Join(dir, journalFile)); err != nil || strings.Contains(string(text), "GPU-0") {
		t.Errorf("nothing is divided any more: %s, %v", text, err)
	}
}

// The MIG mode belongs to this program if the record says so, if this change enabled it, or if this
// program created instances.
func TestModeOfTheJournal(t *testing.T) {
	t.Parallel()
	made := []instance{instanceOf(third)}
	on, off := inventory.Partitions{Mode: inventory.MIGEnabled}, inventory.Partitions{Mode: inventory.MIGDisabled}
	divided := inventory.Partitions{Mode: inventory.MIGEnabled, Instances: []inventory.GPUInstance{third}}
	for name, test := range map[string]struct {
		noted journalRecord
		found inventory.Partitions
		want  bool
	}{
		"noted":                  {journalRecord{Enabled: true}, on, true},
		"noted, and off now":     {journalRecord{Enabled: true}, off, false},
		"switched on":            {journalRecord{Change: &change{}}, on, true},
		"it was on":              {journalRecord{Change: &change{Enabled: true}}, on, false},
		"instances were made":    {journalRecord{Change: &change{Enabled: true, Creates: made}}, divided, true},
		"instances of another":   {journalRecord{}, divided, false},
		"made, and the mode off": {journalRecord{Created: made}, off, false},
	} {
		j := opened(t, t.TempDir(), "one")
		j.gpus["GPU-0"] = test.noted
		if err := j.endChange(t.Context(), layout.GPU{UUID: "GPU-0", Partitions: test.found}); err != nil ||
			j.record("GPU-0").Enabled != test.want {
			t.Errorf("%s: %+v, %v", name, j.record("GPU-0"), err)
		}
	}
}

// A restart of the node is detected only by two known and different boot IDs.
func TestBootOfTheJournal(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		noted, now string
		lost       bool
	}{"the same": {"one", "one", false}, "another": {"one", "two", true}, "not known before": {"", "two",
		false}, "not known now": {"one", "", false}} {
		dir := t.TempDir()
		p := journalForm{journalVersion, map[string]journalRecord{"GPU-0": {Boot: test.noted, Enabled: true,
			Change: &change{}}}}
		if err := statefile.WriteState(filepath.Join(dir, journalFile), p); err != nil {
			t.Fatal(err)
		}
		if r := newJournal(dir, test.now).read(t.Context())["GPU-0"]; r.restarted != test.lost ||
			(r.Change == nil) != test.lost ||
			!r.Enabled {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// The journal of the previous leader is read every second until that process no longer writes. Each
// change is reported once.
func TestJournalOfThePreviousLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		first, second := opened(t, dir, "one"), newJournal(dir, "one")
		if err := second.write(t.Context(), "GPU-0", journalRecord{}); !errors.Is(err, errNotRead) {
			t.Errorf("a journal that was not read is written: %v", err)
		}
		var begun, ended atomic.Bool
		previous := func() error {
			if ended.Load() {
				return nil
			}
			return errors.New("it hangs")
		}
		go second.load(t.Context(), New(Options{PreviousLeader: previous,
			TakeOver: func(context.Context) { begun.Store(true) }}).options)
		passes := func(d time.Duration, news int, waits bool) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if n, err := second.changes.Value(), second.writable(); n != news || errors.Is(err, errPreviousLeader) != waits ||
				begun.Load() == waits {
				t.Errorf("%d news, %v, begun %v", n, err, begun.Load())
			}
		}
		passes(10*time.Second, 1, true)
		if err := first.write(t.Context(), "GPU-0", journalRecord{Enabled: true}); err != nil {
			t.Fatal(err)
		}
		passes(1100*time.Millisecond, 2, true)
		if !second.record("GPU-0").Enabled {
			t.Errorf("what the other process noted is not known: %+v", second.record("GPU-0"))
		}
		ended.Store(true)
		passes(1100*time.Millisecond, 3, false)
	})
}

// A failing read of the journal is retried every five seconds.
func TestJournalRetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		j := newJournal(filepath.Join(file, "state"), "one")
		began := time.Now()
		begins := make(chan time.Duration, 1)
		go j.load(t.Context(), New(Options{TakeOver: func(context.Context) { begins <- time.Since(began) }}).options)
		time.Sleep(12 * time.Second)
		if err := errors.Join(os.Remove(file), os.MkdirAll(j.dir, 0o700)); err != nil {
			t.Fatal(err)
		}
		if took := <-begins; took != 3*retryFirst {
			t.Errorf("tried again after %v", took)
		}
		synctest.Wait()
	})
}

// Adjacent holders with the same name are named once.
func TestHolderNames(t *testing.T) {
	t.Parallel()
	a, b := Pod{Namespace: "ns", Name: "a"}, Pod{UID: "4711"}
	all := []Holder{{Pod: a, Device: "GPU-0"}, {Pod: a, Device: "GPU-1"}, {Pod: b}, {PID: 7, Name: "dcgm"}, {PID: 8},
		{Pod: a}}
	if got, want := holders(all), "pod ns/a, pod with UID 4711, process 7 (dcgm), process 8, pod ns/a"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A layout is for all GPUs, or for those with an index or UUID.
func TestConcerns(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		desired DesiredLayout
		want    bool
	}{
		"nothing":        {DesiredLayout{}, false},
		"all":            {DesiredLayout{Layout: "a"}, true},
		"index":          {DesiredLayout{Layout: "a", GPUs: []string{"0", "1"}}, true},
		"UUID":           {DesiredLayout{Layout: "a", GPUs: []string{"GPU-1"}}, true},
		"others":         {DesiredLayout{Layout: "a", GPUs: []string{"0", "GPU-0"}}, false},
		"no layout":      {DesiredLayout{GPUs: []string{"1"}}, false},
		"a longer index": {DesiredLayout{Layout: "a", GPUs: []string{"11"}}, false},
	} {
		if got := test.desired.concerns(GPU{Index: 1, UUID: "GPU-1"}); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// The text changes with the division and the index of a GPU, and not with its health.
func TestDivisionText(t *testing.T) {
	t.Parallel()
	base := inventory.GPU{Index: 1, MIG: inventory.MIGEnabled, MIGDevices: []inventory.MIGDevice{{UUID: "MIG-0", GI: 1}}}
	for name, change := range map[string]func(*inventory.GPU){
		"index":  func(g *inventory.GPU) { g.Index = 2 },
		"mode":   func(g *inventory.GPU) { g.MIG = inventory.MIGDisabled },
		"device": func(g *inventory.GPU) { g.MIGDevices = nil },
		"UUID":   func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}} },
		"GI":     func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", GI: 2}} },
		"CI":     func(g *inventory.GPU) { g.MIGDevices = []inventory.MIGDevice{{UUID: "MIG-0", GI: 1, CI: 1}} },
	} {
		other := base
		if change(&other); divisionText(other) == divisionText(base) {
			t.Errorf("another %s is not seen", name)
		}
	}
	sick := base
	if sick.Health.State = inventory.Unhealthy; divisionText(sick) != divisionText(base) {
		t.Error("a GPU that is Unhealthy looks otherwise")
	}
}
