//go:build !kubelet134

package claims

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// divide returns the pool of the first GPUs of a machine, which are in MIG mode without instances,
// and its slices as objects of the API.
func divide(t *testing.T, name string, gpus int) (dra.Pool, []*resourceapi.ResourceSlice) {
	t.Helper()
	return divideOr(t, name, gpus, false)
}

// divideOr is divide, for GPUs that can also be given as a whole if they are switched.
func divideOr(t *testing.T, name string, gpus int, switched bool) (dra.Pool, []*resourceapi.ResourceSlice) {
	t.Helper()
	s := scan(t, name, inventory.Health{State: inventory.Healthy})
	profile, err := simulator.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	n := simulator.New(profile)
	t.Cleanup(n.Close)
	session, err := nvidia.New(nvidia.Options{Library: n.NVML(), Root: n.Root()}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = session.Close(t.Context()) }()
	if _, err := session.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	divisions := dra.Divisions{}
	for i := range min(gpus, len(s.GPUs)) {
		p, err := session.Partitions(t.Context(), s.GPUs[i].UUID)
		if err != nil {
			t.Fatal(err)
		}
		s.GPUs[i].MIG, s.GPUs[i].MIGDevices = inventory.MIGEnabled, nil
		divisions[s.GPUs[i].UUID] = dra.Divided{Profiles: p.Profiles, Switched: switched}
	}
	pool := dra.New(s, node, dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs[:min(gpus, len(s.GPUs))]), divisions)
	return pool, objects(t, pool)
}

// divisibles are the machines whose GPUs have MIG mode.
var divisibles = []string{"a30-x4", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "h100-nvl-x4", "hgx-h20",
	"gb300-nvl72", "rtx-pro-6000-x8"}

// TestDividedSlicesAreValid has the API server validate the slices of nodes that make MIG devices
// for claims.
func TestDividedSlicesAreValid(t *testing.T) {
	for _, name := range divisibles {
		for _, gpus := range []int{1, 2, 8} {
			for _, switched := range []bool{false, true} {
				_, all := divideOr(t, name, gpus, switched)
				for i, slice := range all {
					if errs := refused(t, slice); len(errs) > 0 {
						t.Errorf("%s, %d GPUs, slice %d is refused: %v", name, gpus, i, errs)
					}
				}
			}
		}
	}
}

// places are the memory slices that are taken, by GPU.
type places map[string][64]bool

// take reports whether all memory slices of a partition were free.
func (p places) take(d dra.Device) bool {
	taken, at := p[d.GPU()], d.Partition.Placement
	defer func() { p[d.GPU()] = taken }()
	for i := range at.Size {
		if taken[at.Start+i] {
			return false
		}
		taken[at.Start+i] = true
	}
	return true
}

func (p places) free(d dra.Device) {
	taken, at := p[d.GPU()], d.Partition.Placement
	for i := range at.Size {
		taken[at.Start+i] = false
	}
	p[d.GPU()] = taken
}

// TestDividedClaims has claims of many kinds come and go on a node that makes MIG devices for them:
// the scheduler never gives the same part of a GPU twice, and fills the node.
func TestDividedClaims(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while: run it without -short")
	}
	for _, name := range []string{"dgx-h100", "a30-x4", "rtx-pro-6000-x8"} {
		t.Run(name, func(t *testing.T) {
			pool, all := divide(t, name, 2)
			devices, profiles := map[string]dra.Device{}, sets.New[string]()
			for _, slice := range pool.Slices {
				for _, d := range slice.Devices {
					if devices[d.Name] = d; d.Partition != nil {
						profiles.Insert(d.Partition.Profile)
					}
				}
			}
			s := &scheduler{t: t, slices: all, taken: sets.New[structured.DeviceID](),
				cache: cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})}
			random, taken, given := rand.New(rand.NewPCG(3, 4)), places{}, []string(nil)
			names, pending, most := sets.List(profiles), 0, 0
			for range 400 {
				if random.IntN(5) < 2 && len(given) > 0 {
					i := random.IntN(len(given))
					taken.free(devices[given[i]])
					s.taken.Delete(id(given[i]))
					given = slices.Delete(given, i, i+1)
					continue
				}
				want := names[random.IntN(len(names))]
				_, got := s.allocate(request(t, "mig.nvidia.com", 1, "",
					fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", want)))
				if len(got) == 0 {
					pending++
					continue
				}
				if d := devices[got[0]]; d.Partition == nil || d.Partition.Profile != want || !taken.take(d) {
					t.Fatalf("%s was given for %s while %v are taken", got[0], want, given)
				}
				given = append(given, got[0])
				most = max(most, len(given))
			}
			if pending == 0 || most < 4 {
				t.Errorf("%d claims stayed Pending, and at most %d MIG devices were given: the node was never full", pending, most)
			}
		})
	}
}

// TestSwitchedClaims has claims with whole GPUs and with MIG devices come and go on a node that
// switches MIG mode for them: the scheduler gives a GPU as a whole or in parts, and never both at a
// time.
func TestSwitchedClaims(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a while: run it without -short")
	}
	pool, all := divideOr(t, "dgx-h100", 4, true)
	devices := map[string]dra.Device{}
	for _, slice := range pool.Slices {
		for _, d := range slice.Devices {
			devices[d.Name] = d
		}
	}
	s := &scheduler{t: t, slices: all, taken: sets.New[structured.DeviceID](),
		cache: cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})}
	random, given, wholes, parts, pending := rand.New(rand.NewPCG(5, 6)), []string(nil), 0, 0, 0
	for range 400 {
		if random.IntN(5) < 2 && len(given) > 0 {
			i := random.IntN(len(given))
			s.taken.Delete(id(given[i]))
			given = slices.Delete(given, i, i+1)
			continue
		}
		class, selector := "gpu.nvidia.com", "true"
		if random.IntN(3) > 0 {
			class, selector = "mig.nvidia.com", fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%dg.%d0gb'",
				1+random.IntN(2), 1+random.IntN(2))
		}
		_, got := s.allocate(request(t, class, 1, "", selector))
		if len(got) == 0 {
			pending++
			continue
		}
		whole := devices[got[0]].Partition == nil
		if whole != (class == "gpu.nvidia.com") {
			t.Fatalf("%s was given for %s", got[0], class)
		}
		for _, other := range given {
			if o := devices[other]; o.GPU() == devices[got[0]].GPU() && (whole || o.Partition == nil) {
				t.Fatalf("%s was given while %s is taken", got[0], other)
			}
		}
		if given = append(given, got[0]); whole {
			wholes++
		} else {
			parts++
		}
	}
	if pending == 0 || wholes < 4 || parts < 4 {
		t.Errorf("%d claims stayed Pending, %d whole GPUs and %d MIG devices were given", pending, wholes, parts)
	}
}

// TestDividedPacking: the order of devices leaves room: after three of the smallest on one GPU, one
// of half a GPU still fits, and the four that fit then, too.
func TestDividedPacking(t *testing.T) {
	_, all := divide(t, "dgx-h100", 1)
	s := &scheduler{t: t, slices: all, taken: sets.New[structured.DeviceID](),
		cache: cel.NewCache(64, cel.Features{EnableConsumableCapacity: true})}
	for _, want := range []string{"1g.10gb", "1g.10gb", "1g.10gb", "4g.40gb"} {
		if _, got := s.allocate(request(t, "mig.nvidia.com", 1, "",
			fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", want))); len(got) != 1 {
			t.Errorf("no %s is left, %v are taken", want, s.taken)
		}
	}
	if _, got := s.allocate(request(t, "mig.nvidia.com", 1, "",
		"device.attributes['gpu.nvidia.com'].profile == '1g.10gb'")); len(got) != 0 {
		t.Errorf("%v on a full GPU", got)
	}
}

// TestQuotaByCounters charges claims as Kueue does by a counter of MIG devices (kueue#10320): the
// most that a device has which the class and the selectors of the claim match. A quota of the whole
// memory of a node refuses no claim that the scheduler can give a device. It may admit more: seven
// of the smallest MIG devices leave memory of their GPU that no other can have. make kueue runs
// Kueue itself.
func TestQuotaByCounters(t *testing.T) {
	pool, all := divideOr(t, "dgx-h100", 2, true)
	const gib = 1 << 30
	var nodeMemory int64
	for _, slice := range pool.Slices {
		for _, set := range slice.SharedCounters {
			nodeMemory += int64(set.Counters["memory"])
		}
	}
	if nodeMemory < 2*78*gib || nodeMemory > 2*80*gib {
		t.Fatalf("two GPUs have %d bytes", nodeMemory)
	}
	for _, test := range []struct {
		class, profile string
		count          int // that fit on two GPUs
		low, high      int64
	}{
		{"mig.nvidia.com", "1g.10gb", 14, 9 * gib, 10 * gib},
		{"mig.nvidia.com", "1g.20gb", 8, 19 * gib, 20 * gib},
		{"mig.nvidia.com", "3g.40gb", 4, 39 * gib, 40 * gib},
		{"mig.nvidia.com", "7g.80gb", 2, 78 * gib, 80 * gib},
		{"gpu.nvidia.com", "", 2, 78 * gib, 80 * gib},
	} {
		var selectors []string
		if test.profile != "" {
			selectors = []string{fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", test.profile)}
		}
		class, err := classes(nil).Get(test.class)
		if err != nil {
			t.Fatal(err)
		}
		expressions := append([]string{class.Spec.Selectors[0].CEL.Expression}, selectors...)
		charge := chargeOf(t, all, "memory", expressions...)
		if charge < test.low || charge > test.high {
			t.Errorf("%s %s is charged %d bytes", test.class, test.profile, charge)
		}
		sched, given := schedulerOf(t, all), 0
		for len(sched.results(request(t, test.class, 1, "", selectors...))) > 0 {
			given++
		}
		if given != test.count || int64(given)*charge > nodeMemory {
			t.Errorf("%s %s: %d devices are given, want %d; together they are charged %d of %d bytes", test.class, test.profile,
				given, test.count,
				int64(given)*charge, nodeMemory)
		}
	}
	for _, counter := range []string{"multiprocessors", "copy-engines", "decoders", "jpeg-engines", "ofa-engines"} {
		if charge := chargeOf(t, all, counter, "device.attributes['gpu.nvidia.com'].type == 'gpu'"); charge <= 0 {
			t.Errorf("a whole GPU has %d of %s", charge, counter)
		}
	}
}

// chargeOf returns the most that a device takes of a counter, of those for which all expressions
// are true.
func chargeOf(t *testing.T, all []*resourceapi.ResourceSlice, counter string, expressions ...string) (most int64) {
	t.Helper()
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			matches := true
			for _, expression := range expressions {
				compiled := cel.GetCompiler(cel.Features{}).CompileCELExpression(expression, cel.Options{})
				if compiled.Error != nil {
					t.Fatal(compiled.Error)
				}
				is, _, err := compiled.DeviceMatches(t.Context(), cel.Device{Driver: dra.Driver, Attributes: d.Attributes,
					Capacity: d.Capacity})
				if err != nil {
					t.Fatalf("%s of %s: %v", expression, d.Name, err)
				}
				if matches = matches && is; !matches {
					break
				}
			}
			for _, use := range d.ConsumesCounters {
				if value := use.Counters[counter].Value; matches && value.Value() > most {
					most = value.Value()
				}
			}
		}
	}
	return most
}
