package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// partitions is a driver with one GPU of each kind, by UUID.
type partitions map[string]func() (inventory.Partitions, []inventory.Process, error)

func (p partitions) Partitions(_ context.Context, uuid string) (inventory.Partitions, error) {
	found, _, err := p[uuid]()
	if found.Mode == inventory.MIGEnabled {
		err = nil
	}
	return found, err
}

func (p partitions) Processes(_ context.Context, uuid string) ([]inventory.Process, error) {
	_, processes, err := p[uuid]()
	return processes, err
}

// TestReadPartitions: read failures are reported, and an instance is in use by a process that is on
// it or may be.
func TestReadPartitions(t *testing.T) {
	t.Parallel()
	enabled := inventory.Partitions{Mode: inventory.MIGEnabled, Instances: []inventory.GPUInstance{{ID: 1}, {ID: 2}}}
	here := inventory.Process{GI: inventory.Signal[int]{Known: true, Value: 2}}
	driver := partitions{
		"off": func() (inventory.Partitions, []inventory.Process, error) {
			return inventory.Partitions{Mode: inventory.MIGDisabled}, nil, nil
		},
		"unread": func() (inventory.Partitions, []inventory.Process, error) {
			return inventory.Partitions{}, nil, errors.New("no")
		},
		"free": func() (inventory.Partitions, []inventory.Process, error) { return enabled, nil, nil },
		"one": func() (inventory.Partitions, []inventory.Process, error) {
			return enabled, []inventory.Process{here}, nil
		},
		"each": func() (inventory.Partitions, []inventory.Process, error) {
			return enabled, []inventory.Process{{}}, nil
		},
		"refuses": func() (inventory.Partitions, []inventory.Process, error) {
			return enabled, nil, errors.New("no processes")
		},
		"cannot": func() (inventory.Partitions, []inventory.Process, error) {
			return enabled, nil, inventory.ErrNotSupported
		},
	}
	snapshot := inventory.Snapshot{LeftOut: []inventory.LeftOut{{Index: 7, Reason: "lost"}}}
	want := map[string]string{
		"off": " map[]", "unread": "no map[]", "free": " map[1:false 2:false]", "one": " map[1:false 2:true]",
		"each":    " map[1:true 2:true]",
		"refuses": "no processes map[1:false 2:false]", "cannot": " map[1:false 2:false]",
	}
	for name := range driver {
		snapshot.GPUs = append(snapshot.GPUs, inventory.GPU{UUID: name, MIG: inventory.MIGDisabled, Architecture: "ampere"})
	}
	n := daemon.Partitioned{Architectures: map[string]string{}}
	n.Read(t.Context(), snapshot, driver)
	for _, g := range n.GPUs {
		if got := fmt.Sprint(g.Unread, " ", g.InUse); got != want[g.UUID] || n.Architectures[g.UUID] != "ampere" {
			t.Errorf("%s: %q, want %q", g.UUID, got, want[g.UUID])
		}
	}
	if diff := cmp.Diff([]string{"GPU 7: lost"}, n.Warnings); diff != "" || len(n.GPUs) != len(driver) {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	changes := []layout.GPUChange{{GPU: layout.GPU{Index: 1, UUID: "a"}}, {GPU: layout.GPU{Index: 2, UUID: "b"}},
		{GPU: layout.GPU{Index: 12, UUID: "c"}}}
	got, err := daemon.SelectGPUs(changes, []string{"2", "a"})
	if err != nil || len(got) != 2 || got[0].GPU.UUID != "a" || got[1].GPU.UUID != "b" {
		t.Errorf("%+v, %v", got, err)
	}
}
