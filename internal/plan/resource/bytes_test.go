package resource

import "testing"

// TestVarint: a length takes a byte for each seven bits.
func TestVarint(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]int{0: 1, 1: 1, 127: 1, 128: 2, 16383: 2, 16384: 3} {
		if got := varint(n); got != want {
			t.Errorf("%d takes %d bytes, want %d", n, got, want)
		}
	}
}
