package equality

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

type inner struct{ A, B int }

type outer struct {
	Name   string
	Yes    bool
	Count  uint8
	Share  float64
	At     time.Time
	Inner  inner
	Many   []inner
	ByName map[string]int
	There  *inner
	hidden int
	Empty  []int
	None   *int
	Map    map[string]bool
}

// TestChangeReachesEveryField once, and nothing that is hidden.
func TestChangeReachesEveryField(t *testing.T) {
	t.Parallel()
	value := func() outer {
		return outer{Many: []inner{{}, {}}, ByName: map[string]int{"a": 1}, There: &inner{}, hidden: 1}
	}
	var paths []string
	for leaf := 0; ; leaf++ {
		changed, rest := value(), leaf
		path, found := change(reflect.ValueOf(&changed).Elem(), "", &rest)
		if !found {
			break
		}
		if reflect.DeepEqual(changed, value()) {
			t.Errorf("%s is the same", path)
		}
		paths = append(paths, path)
	}
	want := []string{
		".Name", ".Yes", ".Count", ".Share", ".At", ".Inner.A", ".Inner.B", ".Many[0].A", ".Many[0].B", ".Many[1].A", ".Many[1].B",
		".Many (one less)", ".ByName (one less)", ".There.A", ".There.B",
		".Empty (one more)", ".None (not nil)", ".Map (one more)",
	}
	if !slices.Equal(paths, want) {
		t.Errorf("changed %q, want %q", paths, want)
	}
	Check(t, value, func(a, b outer) bool { return reflect.DeepEqual(a, b) })
	Check(t, func() inner { return inner{} }, func(a, b inner) bool { return a.B == b.B }, ".A")
}
