package health_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
)

// The catalog has every code from 1 to 176 once and in order, and 185 after them.
func TestCatalogHasEveryCodeOnceInOrder(t *testing.T) {
	rows := health.Catalog()
	var want []uint64
	for code := uint64(1); code <= 176; code++ {
		want = append(want, code)
	}
	want = append(want, 185)
	if len(rows) != len(want) {
		t.Fatalf("%d rows, want %d", len(rows), len(want))
	}
	for i, x := range rows {
		if x.Code != want[i] {
			t.Fatalf("row %d is XID %d, want %d", i, x.Code, want[i])
		}
		if x.Name == "" {
			t.Errorf("XID %d has no name", x.Code)
		}
		if got := health.Lookup(x.Code); got != x {
			t.Errorf("Lookup(%d) = %v, want %v", x.Code, got, x)
		}
	}
}

// The sets are written out here a second time so that no edit of a row moves a code from one to
// another unseen.
func TestCatalogClasses(t *testing.T) {
	want := map[health.Class][]uint64{
		health.Application: spans(8, 8, 11, 11, 13, 13, 25, 25, 31, 32, 39, 41, 43, 43, 45, 45, 60, 60, 68, 72, 75, 77,
			80, 80,
			82, 86, 88, 89, 94, 94, 96, 105, 126, 135, 137, 137, 139, 139, 142, 142),
		health.Informational: spans(14, 14, 37, 38, 44, 44, 63, 63, 66, 67, 78, 78, 92, 93, 106, 108, 121, 121, 141,
			141, 152, 153,
			157, 157, 162, 165),
		health.Transient: spans(46, 46, 48, 48, 62, 62, 74, 74, 95, 95, 109, 110, 119, 120, 136, 136, 140, 140, 143,
			143, 151, 151,
			155, 156, 158, 158),
		health.Hardware: spans(54, 54, 64, 64, 79, 79),
	}
	got := map[health.Class][]uint64{}
	for _, x := range health.Catalog() {
		if x.Class != health.Decode {
			got[x.Class] = append(got[x.Class], x.Code)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("classes (-want +got):\n%s", diff)
	}
}

func TestCatalogSpokenFrom(t *testing.T) {
	want := map[int][]uint64{
		565: spans(48, 48, 62, 64, 74, 74, 79, 79, 94, 95, 110, 110, 120, 120, 136, 136, 144, 150, 155, 156),
		570: {109},
		575: spans(143, 143, 158, 161),
	}
	got := map[int][]uint64{}
	for _, x := range health.Catalog() {
		if x.CoveredFrom != 0 {
			got[x.CoveredFrom] = append(got[x.CoveredFrom], x.Code)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("codes by the branch from which the recovery action speaks for them (-want +got):\n%s", diff)
	}
}

func TestUnknownCodeIsDecode(t *testing.T) {
	x := health.Lookup(999)
	if x.Class != health.Decode || x.CoveredFrom != 0 || x.String() != "XID 999" {
		t.Errorf("Lookup(999) = %+v (%v)", x, x)
	}
}

// spans returns the numbers of the closed intervals given by their ends.
func spans(ends ...uint64) []uint64 {
	var all []uint64
	for i := 0; i < len(ends); i += 2 {
		for n := ends[i]; n <= ends[i+1]; n++ {
			all = append(all, n)
		}
	}
	return all
}

func TestClassesHaveNames(t *testing.T) {
	got := []string{health.Decode.String(), health.Application.String(), health.Informational.String(),
		health.Transient.String(),
		health.Hardware.String(), health.Class(5).String(), health.Class(-1).String()}
	if diff := cmp.Diff([]string{"decode", "application", "informational", "transient", "hardware", "Class(5)",
		"Class(-1)"}, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}
