package order_test

import (
	"math/rand/v2"
	"slices"
	"testing"

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
