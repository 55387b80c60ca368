package topology_test

import (
	"math/rand/v2"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// scan returns the machine of a simulator's profile, as the daemon would see it after some faults.
func scan(t testing.TB, name string, faults ...simulator.Fault) machine {
	t.Helper()
	var snapshot inventory.Snapshot
	simulated.InVirtualTime(t, func(t testing.TB) {
		node, session := simulated.Open(t, name)
		look := func() {
			var err error
			if snapshot, err = session.Scan(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		look() // It knows the GPUs; a second one sees what became of them.
		for _, fault := range faults {
			if err := node.Inject(fault); err != nil {
				t.Fatal(err)
			}
			if err := session.Retry(t.Context()); err != nil { // links are asked for, too
				t.Fatal(err)
			}
			look()
		}
	})
	return machine{name, snapshot.GPUs}
}

func TestChooseMatchesBruteForceOnEveryProfile(t *testing.T) {
	t.Parallel()
	for _, name := range simulator.Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := topology.New(scan(t, name).gpus)
			draws := 2000
			if g.Len() > 8 {
				draws = 60
			}
			compare(t, g, draws)
		})
	}
}

// A GPU that falls off the bus and a link that goes down leave the connections of all other GPUs as
// they were.
func TestFaultsOfOneGPUDoNotSpoilTheRest(t *testing.T) {
	t.Parallel()
	link := 0
	tests := []struct {
		profile string
		fault   simulator.Fault
		lower   int // pairs that have fewer points than before
	}{
		{"dgx-1", simulator.Fault{Kind: simulator.KindLost, GPU: "3"}, 0},
		{"dgx-h100", simulator.Fault{Kind: simulator.KindLost, GPU: "3"}, 0},
		{"dgx-h100", simulator.Fault{Kind: simulator.KindNVLink, GPU: "3", Link: &link}, 7},
	}
	for _, tt := range tests {
		t.Run(tt.profile+" "+string(tt.fault.Kind), func(t *testing.T) {
			t.Parallel()
			whole, broken := topology.New(scan(t, tt.profile).gpus), topology.New(scan(t, tt.profile, tt.fault).gpus)
			if broken.Len() != whole.Len() {
				t.Fatalf("%d GPUs, want %d", broken.Len(), whole.Len())
			}
			lower := 0
			for a := range whole.Len() {
				for b := range a {
					if before, after := whole.Score(a, b), broken.Score(a, b); after != before {
						if a != 3 && b != 3 {
							t.Errorf("%d-%d: %d points, before %d", a, b, after, before)
						}
						if after < before {
							lower++
						}
					}
				}
			}
			if lower != tt.lower {
				t.Errorf("%d pairs have fewer points than before, want %d", lower, tt.lower)
			}
			r := rand.New(rand.NewPCG(1, 1))
			for range 200 {
				request := draw(broken, r)
				request.Available &^= topology.SetOf(3)
				request.Required &^= topology.SetOf(3)
				request.Size = min(request.Size, (request.Available | request.Required).Len())
				want := bruteForce(broken, request)
				if got, _ := broken.Choose(request); got.Set != want.Set {
					t.Errorf("%+v: got %+v, want %+v", request, got, want)
				}
			}
		})
	}
}
