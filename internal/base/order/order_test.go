package order_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
)

// Sort does what slices.SortStableFunc does.
func TestSort(t *testing.T) {
	type element struct{ key, number int }
	random := rand.New(rand.NewPCG(1, 2))
	for length := range 100 {
		all := make([]element, length)
		for i := range all {
			all[i] = element{random.IntN(10), i}
		}
		want := slices.Clone(all)
		byKey := func(a, b element) int { return a.key - b.key }
		slices.SortStableFunc(want, byKey)
		order.Sort(all, byKey)
		if !slices.Equal(all, want) {
			t.Fatalf("%v, want %v", all, want)
		}
	}
	order.Sort(nil, func(_, _ element) int { return 0 })
}

func TestEarliest(t *testing.T) {
	at := time.Unix(1, 0)
	for name, tt := range map[string]struct {
		times []time.Time
		want  time.Time
	}{
		"none":          {nil, time.Time{}},
		"zero is never": {[]time.Time{{}, at, {}}, at},
		"the first":     {[]time.Time{at, at.Add(1)}, at},
		"the last":      {[]time.Time{at.Add(1), {}, at}, at},
		"all are never": {[]time.Time{{}, {}}, time.Time{}},
	} {
		if got := order.Earliest(tt.times...); !got.Equal(tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
