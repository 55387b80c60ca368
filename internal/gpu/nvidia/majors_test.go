package nvidia_test

import (
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// TestMajorsChangeWithTheDriver: a driver that was loaded again has other majors, and the first scan
// of a session tells those that it has then.
func TestMajorsChangeWithTheDriver(t *testing.T) {
	t.Parallel()
	profile, err := simulator.Load("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	node := simulator.New(profile)
	for _, want := range []inventory.Majors{{GPU: 195, UVM: 510, Caps: 234}, {GPU: 195, UVM: 509, Caps: 233}} {
		session, err := nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root()}).Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		seen, err := session.Scan(t.Context())
		if err != nil || seen.Majors != want {
			t.Errorf("majors %+v, %v; want %+v", seen.Majors, err, want)
		}
		if err := session.Close(t.Context()); err != nil {
			t.Error(err)
		}
		for _, f := range []simulator.Fault{{Kind: simulator.KindDriver, Driver: "missing"},
			{Kind: simulator.KindRestore}} {
			if err := node.Inject(f); err != nil {
				t.Fatal(err)
			}
		}
	}
}
