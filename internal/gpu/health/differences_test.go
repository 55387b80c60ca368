package health_test

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// ignoredByNVIDIA are the XIDs that NVIDIA's plugin ignores by default; every other one makes a GPU
// Unhealthy there.
var ignoredByNVIDIA = []uint64{13, 31, 43, 45, 68, 109}

// TestDifferencesFromNVIDIA: docs/dev/compatibility.md lists each XID that is treated otherwise
// than by NVIDIA's plugin, and no other.
func TestDifferencesFromNVIDIA(t *testing.T) {
	t.Parallel()
	want := map[string][]uint64{}
	for _, x := range health.Catalog() {
		theirs, ours := "Unhealthy", "Unhealthy"
		if slices.Contains(ignoredByNVIDIA, x.Code) {
			theirs = "ignored"
		}
		switch x.Class {
		case health.Application, health.Informational:
			ours = "Healthy"
		case health.Decode:
			ours = "the driver decides"
		case health.Transient, health.Hardware:
		}
		if theirs != ours && (theirs != "ignored" || ours != "Healthy") {
			want[theirs+", here "+ours] = append(want[theirs+", here "+ours], x.Code)
		}
	}
	got := map[string][]uint64{}
	for _, row := range differences(t) {
		key := row[1] + ", here " + firstOf(row[2], "Unhealthy", "Healthy", "the driver decides")
		got[key] = append(got[key], codes(t, row[0])...)
		slices.Sort(got[key])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("XIDs that docs/dev/compatibility.md lists (-catalog +docs):\n%s", diff)
	}
}

// differences returns the cells of the table in docs/dev/compatibility.md.
func differences(t *testing.T) (rows [][]string) {
	t.Helper()
	text, err := os.ReadFile("../../../docs/dev/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "| XIDs | NVIDIA's plugin | here | why | as there |\n"+
		"|---|---|---|---|---|\n")
	if !found {
		t.Fatal("docs/dev/compatibility.md has no table of differences from NVIDIA's plugin")
	}
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") {
			return rows
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) != 5 || slices.Contains(cells, "") {
			t.Fatalf("a row without reason or override: %s", line)
		}
		rows = append(rows, cells)
	}
	return rows
}

// firstOf returns the word that a cell begins with.
func firstOf(cell string, words ...string) string {
	for _, word := range words {
		if strings.HasPrefix(cell, word) {
			return word
		}
	}
	return cell
}

// codes returns the numbers of a list such as "8, 39-41".
func codes(t *testing.T, list string) (all []uint64) {
	t.Helper()
	for span := range strings.SplitSeq(list, ", ") {
		first, last, isSpan := strings.Cut(span, "-")
		if !isSpan {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 64)
		to, toErr := strconv.ParseUint(last, 10, 64)
		if err != nil || toErr != nil {
			t.Fatalf("%q is no list of XIDs", list)
		}
		for code := from; code <= to; code++ {
			all = append(all, code)
		}
	}
	return all
}

// TestResetsInDocs: docs/health.md names the XIDs that the recovery action covers, by branch, and
// those that it does not.
func TestResetsInDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/health.md")
	if err != nil {
		t.Fatal(err)
	}
	byBranch := map[int][]string{}
	var marked []string // those of the GSP, which a branch covers from a release on
	for _, x := range health.Catalog() {
		if x.Class != health.Transient || x.Bucket == "RESTART_VM" {
			continue
		}
		s := begin(t, 580)
		s.facts.GSPUnmarked = true
		s.xid(x.Code)
		s.reads(3, s.good)
		code := strconv.FormatUint(x.Code, 10)
		if x.CoveredFrom != 0 && s.gpu.Health.State != inventory.Healthy {
			marked = append(marked, code)
			continue
		}
		byBranch[x.CoveredFrom] = append(byBranch[x.CoveredFrom], code)
	}
	list := func(branch int) string { return strings.Join(byBranch[branch], ", ") }
	for _, want := range []string{
		"| " + list(565) + "; from R570 " + list(570) + "; from R575 " + list(575) + "; from " + inventory.MarksGSP +
			" " + strings.Join(marked, ", ") + "; every XID",
		"| " + list(0) + "; before R570 " + list(570) + "; before R575 " + list(575) + "; before " +
			inventory.MarksGSP + " " + strings.Join(marked, ", ") + "; each XID",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("docs/health.md has no %q", want)
		}
	}
	if len(byBranch) != 4 {
		t.Errorf("XIDs are covered from the branches %v", byBranch)
	}
}
