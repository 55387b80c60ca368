package resource

import (
	"math"
	"testing"
)

// TestNumbersThatDoNotFit: the highest int stands for them, and for no number that fits.
func TestNumbersThatDoNotFit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ got, want int }{
		{sum(2, 3), 5}, {sum(math.MaxInt-3, 2), math.MaxInt - 1}, {sum(math.MaxInt-1, 2),
			math.MaxInt}, {sum(math.MaxInt, math.MaxInt), math.MaxInt},
		{multiply(2, 3), 6}, {multiply(math.MaxInt/2, 2), math.MaxInt - 1}, {multiply(math.MaxInt/2+1, 2), math.MaxInt},
	} {
		if tt.got != tt.want {
			t.Errorf("got %d, want %d", tt.got, tt.want)
		}
	}
}

// TestOrderOfIndices: by number, a GPU before its MIG devices.
func TestOrderOfIndices(t *testing.T) {
	t.Parallel()
	order := []string{"0", "0:0", "0:2", "0:10", "1", "1:0", "2", "10"}
	for i, a := range order {
		for j, b := range order {
			if got := compareIndex(a, b); (got < 0) != (i < j) || (got == 0) != (i == j) {
				t.Errorf("%s beside %s: %d", a, b, got)
			}
		}
	}
}

// TestClaimsConflict: with another form of the same GPU.
func TestClaimsConflict(t *testing.T) {
	t.Parallel()
	whole, part := Device{Resource: "r", UUID: "G", GPU: "G"}, Device{Resource: "r", UUID: "M", GPU: "G"}
	shared := Device{Resource: "r", UUID: "G", GPU: "G", Sharing: TimeSliced}
	for _, tt := range []struct {
		claim HeldShape
		with  Device
		want  bool
	}{
		{HeldShape{Resource: "r", ID: "G", GPU: "G"}, whole, false},
		{HeldShape{Resource: "s", ID: "G", GPU: "G"}, whole, true},
		{HeldShape{Resource: "r", ID: "G::0", GPU: "G"}, whole, true},
		{HeldShape{Resource: "r", ID: "G::0", GPU: "G"}, shared, false},
		{HeldShape{Resource: "r", ID: "G", GPU: "G"}, shared, true},
		{HeldShape{Resource: "s", ID: "G", GPU: "H"}, whole, false},
		{HeldShape{Resource: "s", ID: "G"}, whole, false},
		{HeldShape{Resource: "r", ID: "G", GPU: "G"}, part, true},
		{HeldShape{Resource: "s", ID: "M", GPU: "G"}, whole, true},
		{HeldShape{Resource: "s", ID: "N", GPU: "G"}, part, false},
		{HeldShape{Resource: "s", ID: "M", GPU: "G"}, part, true},
	} {
		if got := tt.claim.Conflicts(tt.with); got != tt.want {
			t.Errorf("%+v with %+v: %v, want %v", tt.claim, tt.with, got, tt.want)
		}
	}
}
