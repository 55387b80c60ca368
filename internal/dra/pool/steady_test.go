package pool_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// TestModeChangesNoSlice: a GPU whose MIG mode claims switch loses its NVLinks and some memory in
// MIG mode. Nothing is published for that.
func TestModeChangesNoSlice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		node := gpus(map[string]int{"a": 0, "b": 1, "c": 2})
		profiles := []inventory.MIGProfile{{Name: "7g.80gb", Count: 1, Size: 8, Starts: []int{0},
			Attributes: inventory.MIGAttributes{GISlices: 7, CISlices: 7}}}
		divisions := dra.Divisions{}
		lanes := func(s inventory.Snapshot, mode inventory.MIGMode, toB int) inventory.Snapshot {
			s.GPUs = slices.Clone(s.GPUs)
			for i := range s.GPUs {
				divisions[s.GPUs[i].UUID] = dra.Divided{Profiles: profiles, Switched: true}
				s.GPUs[i].MIG, s.GPUs[i].MemoryBytes, s.GPUs[i].Links = inventory.MIGDisabled, 80<<30, nil
				for j := range s.GPUs {
					if n := 4; j != i {
						if i == 1 || j == 1 {
							n = toB
						}
						s.GPUs[i].Links = append(s.GPUs[i].Links, inventory.Link{Peer: s.GPUs[j].UUID, PeerIndex: j, NVLinks: n})
					}
				}
			}
			if s.GPUs[1].MIG = mode; mode == inventory.MIGEnabled {
				s.GPUs[1].MemoryBytes = 79 << 30
			}
			s.Generation++
			return s
		}
		off := lanes(node, inventory.MIGDisabled, 4)
		o := publishesAll("", off)
		o.Divisions = feed.New(divisions)
		d := run(t, o)
		pool, changed := d.Pools().Latest()
		if len(pool.Slices) == 0 || len(pool.Slices[len(pool.Slices)-1].Devices) == 0 {
			t.Fatalf("the pool is %+v", pool)
		}
		for _, s := range []inventory.Snapshot{lanes(off, inventory.MIGEnabled, 0), lanes(off, inventory.MIGEnabled, 0),
			off} {
			o.Snapshots.Publish(s)
			synctest.Wait()
			select {
			case <-changed:
				t.Fatalf("published again with MIG mode %s of GPU 1", s.GPUs[1].MIG)
			default:
			}
		}
		o.Snapshots.Publish(lanes(off, inventory.MIGDisabled, 0)) // not by the mode
		synctest.Wait()
		select {
		case <-changed:
		default:
			t.Error("the links of a GPU that is not in MIG mode changed, and nothing was published")
		}
	})
}
