package claims

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// publishShared returns the slices of a machine whose GPUs are given in shares, to at most so many
// claims each.
func publishShared(t *testing.T, name string, most int) []*resourceapi.ResourceSlice {
	t.Helper()
	s := scan(t, name, inventory.Health{State: inventory.Healthy})
	return objects(t, dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil).Shared(most))
}

// TestSharedSlicesAreValid has the API server validate the slices of all simulated machines whose
// GPUs are given in shares.
func TestSharedSlicesAreValid(t *testing.T) {
	for _, name := range simulator.Names() {
		for _, most := range []int{2, 7, 48} {
			s := scan(t, name, inventory.Health{State: inventory.Healthy})
			whole := dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)
			all := slices.Concat(publishShared(t, name, most), objects(t, whole.SharedBy(dra.ByCount, most)),
				objects(t, whole.SharedBy(dra.Unlimited, 0)))
			for i, slice := range all {
				if errs := refused(t, slice); len(errs) > 0 {
					t.Errorf("%s, at most %d claims, slice %d is refused: %v", name, most, i, errs)
				}
			}
		}
	}
	wrong := publishShared(t, "t4", 4)[0]
	memory := wrong.Spec.Devices[0].Capacity["memory"]
	memory.RequestPolicy.ValidRange.Min = resource.NewQuantity(1<<60, resource.BinarySI)
	wrong.Spec.Devices[0].Capacity["memory"] = memory
	if len(refused(t, wrong)) == 0 {
		t.Error("a least share that is more than there is is not refused: nothing is validated")
	}
}

// TestSharesByCount: so many claims as there are shares get a GPU or a MIG device, one that asks
// for two shares has two, and where nothing is counted there is no end. What this driver makes of
// each result is a share.
func TestSharesByCount(t *testing.T) {
	for _, machine := range []string{"t4", "a100-mig-mixed"} {
		s := scan(t, machine, inventory.Health{State: inventory.Healthy})
		whole := dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), nil)
		shared := classes{{Name: "any", Selector: "device.driver == 'gpu.nvidia.com'"}}
		counted := schedulerOf(t, objects(t, whole.SharedBy(dra.ByCount, 3)))
		counted.classes = shared
		per := map[string]int{}
		for {
			got := counted.results(request(t, "any", 1, ""))
			if len(got) == 0 {
				break
			}
			count := got[0].ConsumedCapacity[dra.SharesCapacity]
			if got[0].ShareID == nil || count.Value() != 1 {
				t.Fatalf("%s: %+v is no share", machine, got[0])
			}
			per[got[0].Device]++
		}
		for device, n := range per {
			if n != 3 {
				t.Errorf("%s: %d claims have %s", machine, n, device)
			}
		}
		counted = schedulerOf(t, objects(t, whole.SharedBy(dra.ByCount, 3)))
		counted.classes = shared
		two := counted.results(request(t, "any", 1, "        capacity: {requests: {shares: \"2\"}}\n"))
		if len(two) != 1 || len(per) == 0 {
			t.Fatalf("%s: %d devices, two shares: %+v", machine, len(per), two)
		}
		unlimited := schedulerOf(t, objects(t, whole.SharedBy(dra.Unlimited, 0)))
		unlimited.classes = shared
		for i := range 100 {
			if len(unlimited.results(request(t, "any", 1, ""))) != 1 {
				t.Fatalf("%s: claim %d gets nothing", machine, i)
			}
		}
	}
}

func schedulerOf(t *testing.T, all []*resourceapi.ResourceSlice) *scheduler {
	return &scheduler{t: t, slices: all, taken: sets.New[structured.DeviceID](),
		cache: cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})}
}

// wanting returns a claim for so much of the memory of a GPU; for a whole GPU if that is empty.
func wanting(t *testing.T, memory string) *resourceapi.ResourceClaim {
	if memory == "" {
		return request(t, "gpu.nvidia.com", 1, "")
	}
	return request(t, "gpu.nvidia.com", 1, fmt.Sprintf("        capacity: {requests: {memory: %s}}\n", memory))
}

// TestSharedClaims has claims for parts of GPUs and for whole ones come and go: the scheduler never
// gives more memory than there is, nor a whole GPU of which somebody has a part, nor more shares
// than are configured. What this driver makes of each result is what the scheduler counts.
func TestSharedClaims(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while: run it without -short")
	}
	const most = 5
	pool := map[string]dra.Device{}
	all := publishShared(t, "l40s-x8", most)
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			memory := d.Capacity["memory"].Value
			kind := *d.Attributes["type"].StringValue
			pool[d.Name] = dra.Device{
				Attributes: map[string]dra.Attribute{"type": {Type: dra.String, Value: kind}},
				Capacity:   map[string]dra.Capacity{"memory": dra.Capacity(memory.Value())},
			}
		}
	}
	s := schedulerOf(t, all)
	random, pending, mostShares := rand.New(rand.NewPCG(5, 6)), 0, 0
	var given []resourceapi.DeviceRequestAllocationResult
	for range 400 {
		if random.IntN(5) < 2 && len(given) > 0 {
			i := random.IntN(len(given))
			s.free(given[i])
			given = slices.Delete(given, i, i+1)
			continue
		}
		want := []string{"", "1Mi", "10Gi", "10000Mi", "24Gi", "1000Gi"}[random.IntN(6)]
		got := s.results(wanting(t, want))
		if want == "1000Gi" && len(got) > 0 {
			t.Fatalf("%s was given for %s", got[0].Device, want)
		}
		if len(got) == 0 {
			pending++
			continue
		}
		given = append(given, got[0])
		memory, shares := map[string]int64{}, map[string]int{}
		for _, r := range given {
			result := dra.Result{ShareID: string(*r.ShareID), ConsumedCapacity: map[string]string{}}
			for name, value := range r.ConsumedCapacity {
				result.ConsumedCapacity[string(name)] = value.String()
			}
			part := result.Share(pool[r.Device])
			if want == "" && r.ShareID == got[0].ShareID && part != 0 {
				t.Fatalf("a claim for a whole GPU has %d bytes of %s", part, r.Device)
			}
			if part == 0 {
				part = int64(pool[r.Device].Capacity["memory"])
			}
			memory[r.Device], shares[r.Device] = memory[r.Device]+part, shares[r.Device]+1
		}
		for device, n := range shares {
			mostShares = max(mostShares, n)
			if memory[device] > int64(pool[device].Capacity["memory"]) || n > most {
				t.Fatalf("%d claims have %d bytes of %s", n, memory[device], device)
			}
		}
	}
	if pending == 0 || mostShares < 3 {
		t.Errorf("%d claims stayed Pending, and at most %d had one GPU: the node was never full", pending, mostShares)
	}
}

// TestSharesThatChange: GPUs are given in shares, and whole again, while claims have them. The
// scheduler gives nothing of them twice.
func TestSharesThatChange(t *testing.T) {
	shared, whole := publishShared(t, "t4", 4), publishShared(t, "t4", 0)
	s := schedulerOf(t, whole)
	first := s.results(wanting(t, ""))
	s.slices = shared
	if len(first) != 1 || first[0].ShareID != nil || len(s.results(wanting(t, "1Gi"))) != 0 ||
		len(s.results(wanting(t, ""))) != 0 {
		t.Errorf("a GPU that is taken is given in shares, too: %v", first)
	}
	s.free(first[0])
	if first = s.results(wanting(t, "4Gi")); len(first) != 1 || first[0].ShareID == nil {
		t.Fatalf("a share of a free GPU: %v", first)
	}
	s.slices = whole
	if got := s.results(wanting(t, "")); len(got) != 0 {
		t.Errorf("a GPU of which a claim has a share is given whole: %v", got)
	}
	s.free(first[0])
	if got := s.results(wanting(t, "")); len(got) != 1 {
		t.Error("a free GPU is not given")
	}
}

// TestDocumentedShares: the claim of the documentation has what it says.
func TestDocumentedShares(t *testing.T) {
	s := schedulerOf(t, publishShared(t, "dgx-h100", 8))
	got := s.results(documented(t, "a part of a GPU"))
	if len(got) != 1 || got[0].Device != "gpu-0" {
		t.Fatalf("got %v", got)
	}
	if memory := got[0].ConsumedCapacity["memory"]; memory.Cmp(resource.MustParse("20Gi")) != 0 {
		t.Errorf("got %v of the memory", memory)
	}
}
