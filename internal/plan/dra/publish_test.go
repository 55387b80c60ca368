package dra_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// poolOf is a pool with one device a slice, of which the content is told by a letter each.
func poolOf(contents string) dra.Pool {
	p := dra.Pool{Name: "n"}
	for i, content := range contents {
		p.Slices = append(p.Slices, dra.Slice{Devices: []dra.Device{{
			Name: fmt.Sprintf("gpu-%d", i), Attributes: map[string]dra.Attribute{"uuid": {Type: dra.String,
				Value: string(content)}},
		}}})
	}
	return p
}

func same(_ string, want, is dra.Slice) bool { return want.Equal(is) }

// scheduled is what a scheduler uses of the pool: the contents of its slices, or "-" while it is
// not complete.
func scheduled(there map[string]dra.PublishedSlice) string {
	newest, contents, count := int64(0), map[string]string{}, 0
	for _, is := range there {
		newest = max(newest, is.Generation)
	}
	for name, is := range there {
		if is.Generation == newest {
			contents[name], count = is.Slice.Devices[0].Attributes["uuid"].Value, is.Count
		}
	}
	var text strings.Builder
	for i := range len(contents) {
		text.WriteString(contents[poolOf("").SliceName(i)])
	}
	if len(contents) != count || text.Len() != count {
		return "-"
	}
	return text.String()
}

// TestNext has pools change at random, also while they are being written, and slices be removed and
// left by others. In the end the API server has the pool; until then a scheduler sees a whole pool
// of before, the wanted one, or none, and never a mixture.
func TestNext(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 1))
		contents := func() string {
			var text strings.Builder
			for range random.IntN(4) {
				text.WriteByte("abc"[random.IntN(3)])
			}
			return text.String()
		}
		there, last := map[string]dra.PublishedSlice{}, int64(0)
		wanted := map[string]bool{"": true, "-": true} // that may be seen
		for range 6 {
			want := contents()
			wanted[want] = true
			settled := false
			for range 30 {
				if random.IntN(20) == 0 { // a kubelet starts, or somebody removes one
					for name := range there {
						if delete(there, name); random.IntN(2) == 0 {
							break
						}
					}
				}
				if random.IntN(10) == 0 && want != "" {
					break // it changes before it is written
				}
				write, more := dra.Next(poolOf(want), there, last, same)
				if !more {
					settled = true
					break
				}
				if write.Remove {
					delete(there, write.Name)
				} else {
					if _, has := there[write.Name]; has == write.New {
						t.Fatalf("seed %d: %s is new: %v", seed, write.Name, write.New)
					}
					there[write.Name], last = write.Published, write.Published.Generation
				}
				if now := scheduled(there); !wanted[now] {
					t.Fatalf("seed %d: a scheduler sees %q, and wanted were %v", seed, now, wanted)
				}
			}
			if now := scheduled(there); settled && now != want {
				t.Fatalf("seed %d: a scheduler sees %q, want %q", seed, now, want)
			}
		}
	}
}

// TestWrites holds which writes follow.
func TestWrites(t *testing.T) {
	t.Parallel()
	published := func(generation int64, count int, contents string) map[string]dra.PublishedSlice {
		there := map[string]dra.PublishedSlice{}
		for i, slice := range poolOf(contents).Slices {
			there[poolOf("").SliceName(i)] = dra.PublishedSlice{Pool: "n", Generation: generation, Count: count,
				Slice: slice}
		}
		return there
	}
	with := func(there map[string]dra.PublishedSlice, name string,
		is dra.PublishedSlice) map[string]dra.PublishedSlice {
		there = maps.Clone(there)
		there[name] = is
		return there
	}
	for name, tt := range map[string]struct {
		there map[string]dra.PublishedSlice
		last  int64
		pool  string
		want  []string
	}{
		"first":               {nil, 0, "ab", []string{"new 0 gen 1", "new 1 gen 1"}},
		"as it is":            {published(3, 2, "ab"), 3, "ab", nil},
		"one changes":         {published(3, 2, "ab"), 3, "cb", []string{"put 0 gen 3"}},
		"two change":          {published(3, 2, "ab"), 3, "cc", []string{"put 0 gen 4", "put 1 gen 4"}},
		"one more":            {published(3, 1, "a"), 3, "ab", []string{"put 0 gen 4", "new 1 gen 4"}},
		"one less":            {published(3, 2, "ab"), 3, "a", []string{"put 0 gen 4", "remove 1"}},
		"none":                {published(3, 2, "ab"), 3, "", []string{"remove 0", "remove 1"}},
		"all were removed":    {nil, 5, "ab", []string{"new 0 gen 5", "new 1 gen 5"}},
		"one was removed":     {published(3, 2, "a"), 3, "ab", []string{"new 1 gen 3"}},
		"removed and changed": {published(3, 2, "a"), 3, "cb", []string{"put 0 gen 3", "new 1 gen 3"}},
		"removed and two changed": {published(3, 3, "ab"), 3, "cca", []string{"put 0 gen 3", "put 1 gen 3",
			"new 2 gen 3"}},
		"two change while a generation is written": {
			with(published(4, 3, "ab"), poolOf("").SliceName(2), dra.PublishedSlice{Pool: "n", Generation: 3, Count: 3,
				Slice: poolOf("a").Slices[0]}),
			4, "cca", []string{"put 0 gen 4", "put 1 gen 4", "put 2 gen 4"},
		},
		"left by another driver": {
			map[string]dra.PublishedSlice{"n-x": {Pool: "n", Generation: 9, Count: 1}}, 0, "a", []string{"new 0 gen 10",
				"remove n-x"},
		},
		"another pool": {
			with(published(3, 1, "a"), "n-x", dra.PublishedSlice{Pool: "other", Generation: 3,
				Count: 1}), 3, "a", []string{"remove n-x"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			there, last := maps.Clone(tt.there), tt.last
			if there == nil {
				there = map[string]dra.PublishedSlice{}
			}
			var got []string
			for range 10 {
				write, more := dra.Next(poolOf(tt.pool), there, last, same)
				if !more {
					break
				}
				short := strings.TrimPrefix(write.Name, "n-gpu.nvidia.com-")
				switch {
				case write.Remove:
					got = append(got, "remove "+short)
					delete(there, write.Name)
					continue
				case write.New:
					got = append(got, fmt.Sprintf("new %s gen %d", short, write.Published.Generation))
				default:
					got = append(got, fmt.Sprintf("put %s gen %d", short, write.Published.Generation))
				}
				there[write.Name], last = write.Published, write.Published.Generation
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("writes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestReadBack holds that a slice that was written is read as it was, in any form in which
// Kubernetes writes quantities.
func TestReadBack(t *testing.T) {
	t.Parallel()
	for _, profile := range []string{"dgx-h100", "h100-mig-1g"} {
		s := scan(t, profile)
		for _, want := range pool(s).Slices {
			text, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			var got dra.Slice
			if err := json.Unmarshal(text, &got); err != nil || !got.Equal(want) {
				t.Errorf("%s: error %v, (-want +got):\n%s", profile, err, cmp.Diff(want, got))
			}
			gpus := map[string]bool{}
			for _, g := range s.GPUs {
				gpus[g.UUID] = true
			}
			for uuid := range got.GPUs() {
				if !gpus[uuid] {
					t.Errorf("%s: %s is no GPU", profile, uuid)
				}
			}
		}
	}
	var d dra.Device
	text := `{"name":"gpu-0","attributes":{"a":{"bool":true},"b":{"strings":["x"]}},` +
		`"capacity":{"m":{"value":"12345k"}}}`
	if err := json.Unmarshal([]byte(text), &d); err != nil || d.Capacity["m"] != 12_345_000 ||
		d.Attributes["a"].Value != "true" {
		t.Errorf("a device of another driver is read as %+v, error %v", d, err)
	}
	for _, text := range []string{`{"capacity":{"m":{"value":"much"}}}`, `{"capacity":[]}`, `{"attributes":{"a":5}}`,
		`{"allowMultipleAllocations":5}`} {
		if err := json.Unmarshal([]byte(text), &d); err == nil {
			t.Errorf("%s was read", text)
		}
	}
	if taint := []dra.Taint{{Key: "k"}}; (dra.Slice{Devices: []dra.Device{{}}}).Tainted() ||
		!(dra.Slice{Devices: []dra.Device{{}, {Taints: taint}}}).Tainted() {
		t.Error("a slice without a taint has one, or one with a taint has none")
	}
}

// TestTaintTimes: the API server gives a taint without a time one; that is no difference, and stays
// when the slice is written again.
func TestTaintTimes(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_700_000_000, 0)
	slice := func(added *time.Time, keys ...string) dra.Slice {
		d := dra.Device{Name: "gpu-0"}
		for _, key := range keys {
			d.Taints = append(d.Taints, dra.Taint{Key: key, Effect: "NoSchedule", TimeAdded: added})
		}
		return dra.Slice{Devices: []dra.Device{d}}
	}
	if got := slice(nil, "a").Timed(slice(&at, "a")); !got.Equal(slice(&at, "a")) {
		t.Errorf("got %+v", got)
	}
	if got := slice(nil, "b").Timed(slice(&at, "a")); got.Devices[0].Taints[0].TimeAdded != nil {
		t.Errorf("another taint got the time: %+v", got)
	}
	for name, tt := range map[string]struct {
		is, want dra.Slice
		worse    bool
	}{
		"as it is":       {slice(nil, "a"), slice(&at, "a"), false},
		"a taint":        {slice(nil), slice(nil, "a"), true},
		"another taint":  {slice(nil, "a"), slice(nil, "a", "b"), true},
		"a taint less":   {slice(nil, "a", "b"), slice(nil, "b"), false},
		"a device less":  {slice(nil), dra.Slice{}, true},
		"one without is": {dra.Slice{}, slice(nil), false},
	} {
		if got := tt.is.Worse(tt.want); got != tt.worse {
			t.Errorf("%s: worse %v", name, got)
		}
	}
	all := dra.Pool{Slices: []dra.Slice{slice(nil, "a"), slice(nil)}}
	p := all.Untainted()
	if len(p.Slices[0].Devices) != 0 || len(p.Slices[1].Devices) != 1 || len(all.Slices[0].Devices) != 1 {
		t.Errorf("untainted: %+v of %+v", p, all)
	}
}

// TestLongNodeName: the name of a slice is a name for the API server, and another one for each
// node.
func TestLongNodeName(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", 252)
	a, b := dra.Pool{Name: long + "a"}.SliceName(0), dra.Pool{Name: long + "b"}.SliceName(0)
	if len(a) > 253 || len(b) > 253 || a == b {
		t.Errorf("names %q and %q", a, b)
	}
}

// TestSliceNamesSortAsNumbers: the scheduler tries the slices of a pool by their names, which sort
// as their numbers do. Those of the first ten are as they always were, so that an upgrade writes no
// slice.
func TestSliceNamesSortAsNumbers(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range 1100 {
		names = append(names, dra.Pool{Name: "n"}.SliceName(i))
	}
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("names are not in order: %v", names[:12])
	}
	if names[0] != "n-gpu.nvidia.com-0" || names[9] != "n-gpu.nvidia.com-9" {
		t.Errorf("the first names are %v", names[:10])
	}
	for _, name := range names {
		if problems := validation.IsDNS1123Subdomain(name); problems != nil {
			t.Errorf("%s: %v", name, problems)
		}
	}
}
