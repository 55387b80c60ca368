package dra_test

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// facts returns every combination of facts.
func facts() []dra.OwnerFacts {
	var all []dra.OwnerFacts
	for _, before := range []dra.Ownership{"", dra.OwnedByPlugin, dra.LeavesPlugin, dra.OwnedByDRA, dra.LeavesDRA,
		dra.OwnedByNobody} {
		for bits := range 1 << 5 {
			is := func(bit int) bool { return bits&(1<<bit) != 0 }
			all = append(all, dra.OwnerFacts{
				Before: before, Wanted: is(0), Free: is(1), Published: is(2), Claimed: is(3), Unclaimed: is(4),
			})
		}
	}
	return all
}

// TestDecideByEvidence: from no facts does a GPU get an owner as long as the other one may have it.
func TestDecideByEvidence(t *testing.T) {
	t.Parallel()
	for _, f := range facts() {
		got := dra.Decide(f)
		switch {
		case got == dra.OwnedByPlugin && (f.Published || f.Claimed || f.Wanted && f.Before != dra.OwnedByPlugin):
			t.Errorf("%+v: %s, although it may be in a slice, or a claim has it", f, got)
		case got == dra.OwnedByPlugin && (f.Before.InSlice() || f.Before == dra.OwnedByNobody && !f.Unclaimed):
			t.Errorf("%+v: %s, although a claim may have it", f, got)
		case got.InSlice() && (f.Before == dra.OwnedByPlugin || f.Before == dra.LeavesPlugin) && !f.Free:
			t.Errorf("%+v: %s, although a pod may hold it", f, got)
		case got.InSlice() && f.Before == "" && !f.Published && !f.Claimed && !f.Free:
			t.Errorf("%+v: %s, although nothing is known of pods", f, got)
		case f.Wanted && (got == dra.LeavesDRA || got == dra.OwnedByNobody), !f.Wanted && got == dra.OwnedByDRA:
			t.Errorf("%+v: %s is not on the way to what is wanted", f, got)
		case got == dra.OwnedByNobody && f.Before == dra.LeavesDRA && (f.Claimed || !f.Unclaimed):
			t.Errorf("%+v: it leaves the slice although a claim may have it", f)
		}
	}
}

// TestDecideTerminates: with all evidence there is, each GPU gets the owner that is wanted.
func TestDecideTerminates(t *testing.T) {
	t.Parallel()
	for _, f := range facts() {
		way := fmt.Sprint(f.Before)
		f.Claimed = false
		for range 6 {
			f.Free, f.Unclaimed = true, true
			f.Before = dra.Decide(f)
			f.Published = f.Before.InSlice()
			way += fmt.Sprint(" ", f.Before)
		}
		if want := map[bool]dra.Ownership{false: dra.OwnedByPlugin, true: dra.OwnedByDRA}[f.Wanted]; f.Before != want {
			t.Errorf("%s, want %s at last", way, want)
		}
	}
}

// TestDecideAtOnce: where no GPU was ever in a slice, nothing is waited for.
func TestDecideAtOnce(t *testing.T) {
	t.Parallel()
	if got := dra.Decide(dra.OwnerFacts{}); got != dra.OwnedByPlugin {
		t.Errorf("got %s", got)
	}
	if got := dra.Decide(dra.OwnerFacts{Wanted: true, Published: true}); got != dra.OwnedByDRA {
		t.Errorf("after a restart: got %s", got)
	}
}

// TestDecideStays: a GPU that is in a slice, or was, stays or comes back without evidence, if it is
// wanted there.
func TestDecideStays(t *testing.T) {
	t.Parallel()
	for _, before := range []dra.Ownership{dra.OwnedByDRA, dra.LeavesDRA, dra.OwnedByNobody} {
		if got := dra.Decide(dra.OwnerFacts{Wanted: true, Before: before}); got != dra.OwnedByDRA {
			t.Errorf("%s becomes %s", before, got)
		}
	}
}

// TestTheTableOfOwners: the documents have the steps that Decide makes.
func TestTheTableOfOwners(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/dev/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## The owner of a GPU")
	section, _, _ = strings.Cut(section, "\n## ")
	columns := []dra.OwnerFacts{
		{Wanted: true}, {Wanted: true, Published: true}, {Wanted: true, Free: true},
		{Claimed: true}, {Published: true}, {Published: true, Unclaimed: true}, {}, {Unclaimed: true},
	}
	for _, before := range []dra.Ownership{"", dra.OwnedByPlugin, dra.LeavesPlugin, dra.OwnedByDRA, dra.LeavesDRA,
		dra.OwnedByNobody} {
		row := fmt.Sprintf("| %s |", cmp.Or(string(before), "not known"))
		for _, f := range columns {
			f.Before = before
			row += fmt.Sprintf(" %s |", dra.Decide(f))
		}
		if !slices.Contains(strings.Split(section, "\n"), row) {
			t.Errorf("docs/dev/architecture.md lacks the row %q", row)
		}
	}
}

// TestNotOffered: of each GPU that the device plugin does not offer the reason is told, also while
// nothing is known of it.
func TestNotOffered(t *testing.T) {
	t.Parallel()
	owners := dra.Owners{
		"a": dra.OwnedByPlugin, "b": dra.LeavesPlugin, "c": dra.OwnedByDRA, "d": dra.LeavesDRA, "e": dra.OwnedByNobody,
	}
	var gpus []inventory.GPU
	for _, uuid := range []string{"a", "b", "c", "d", "e", "f"} {
		gpus = append(gpus, inventory.GPU{UUID: uuid})
	}
	const back = "it comes back from Dynamic Resource Allocation as soon as no ResourceSlice and no claim has it"
	want := map[string]string{
		"b": "it leaves the device plugin for Dynamic Resource Allocation",
		"c": "pods get it by Dynamic Resource Allocation",
		"d": back, "e": back, "f": "it is not known yet whether pods get it by Dynamic Resource Allocation",
	}
	if diff := gocmp.Diff(want, owners.NotOffered(gpus)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for name, tt := range map[string]struct {
		owners dra.Owners
		all    bool
	}{
		"none": {nil, true}, "one": {dra.Owners{"a": dra.OwnedByPlugin}, true}, "several": {owners,
			false}, "another's": {dra.All(gpus), false},
	} {
		if got := tt.owners.AllPlugin(); got != tt.all {
			t.Errorf("%s: all are the device plugin's: %v, want %v", name, got, tt.all)
		}
	}
}

// TestGPUsOfClaimsAreNotDivided: neither whole nor one of their MIG devices.
func TestGPUsOfClaimsAreNotDivided(t *testing.T) {
	t.Parallel()
	gpus := []inventory.GPU{
		{Index: 0, UUID: "GPU-0", MIGDevices: []inventory.MIGDevice{{UUID: "MIG-0"}}},
		{Index: 1, UUID: "GPU-1", MIGDevices: []inventory.MIGDevice{{UUID: "MIG-1"}}},
	}
	owners := dra.Owners{"GPU-0": dra.OwnedByPlugin, "GPU-1": dra.OwnedByDRA}
	const refusal = "GPU 1 is not divided again while Dynamic Resource Allocation owns it"
	for uuids, want := range map[string]string{"GPU-0": "", "MIG-0": "", "GPU-1": refusal, "MIG-1": refusal,
		"GPU-0,GPU-1": refusal, "GPU-2": ""} {
		err := owners.MayDivide(gpus, strings.Split(uuids, ","))
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", uuids, err, want)
		}
	}
}
