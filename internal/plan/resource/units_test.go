package resource_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

const unitsName = "volcano.sh/gpu-mem.1Gi"

// memory returns a GPU with so many GiB of memory.
func memory(index, gib int) inventory.GPU {
	g := gpu(index)
	g.MemoryBytes = uint64(gib) << 30
	g.ComputeCapability = inventory.ComputeCapability{Major: 9}
	return g
}

// keeping returns a GPU whose driver keeps so many bytes.
func keeping(index, gib int, bytes uint64) inventory.GPU {
	g := memory(index, gib)
	g.ReservedBytes = bytes
	return g
}

// inUnits are options by which GPUs, by index, are in units of 1 GiB.
func inUnits(units resource.Units, indices ...resource.Ref) resource.Options {
	if units.Name == "" {
		units.Name = unitsName
	}
	return resource.Options{Units: units, Selectors: []resource.Selector{{Where: "selectors[0]", Devices: indices,
		Units: true}}}
}

func TestUnitsOfAPlan(t *testing.T) {
	t.Parallel()
	old := memory(0, 16)
	old.ComputeCapability.Major = 6
	mig := gpu(0, "1g.10gb")
	mig.MemoryBytes = 80 << 30
	for _, tt := range []struct {
		name    string
		gpus    []inventory.GPU
		cuda    string
		driver  string
		units   resource.Units
		want    []string
		warning string
	}{
		{name: "the others stay whole", gpus: []inventory.GPU{memory(0, 8), memory(1, 8), memory(2, 8)},
			units: resource.Units{ReserveMiB: 1024},
			want:  []string{"nvidia.com/gpu 1 2", unitsName + " 0×7"}},
		{name: "a part of a unit is no unit", gpus: []inventory.GPU{memory(0, 8)}, units: resource.Units{ReserveMiB: 1},
			want: []string{unitsName + " 0×7"}},
		{name: "smaller units", gpus: []inventory.GPU{memory(0, 8)},
			units: resource.Units{Name: "volcano.sh/gpu-mem.128Mi", ReserveMiB: 1024},
			want:  []string{"volcano.sh/gpu-mem.128Mi 0×56"}},
		{name: "the reserve is measured, and the server of MPS needs some", gpus: []inventory.GPU{keeping(0, 8, 513<<20)},
			cuda:  "12.4",
			units: resource.Units{ReserveMiB: 2048, Measured: true, MPS: true}, want: []string{unitsName + " 0×6"}},
		{name: "no server", gpus: []inventory.GPU{keeping(0, 8, 1<<30)},
			units: resource.Units{ReserveMiB: 2048, Measured: true},
			want:  []string{unitsName + " 0×7"}},
		{name: "a part of a MiB is kept", gpus: []inventory.GPU{keeping(0, 8, 1<<30+1)},
			units: resource.Units{ReserveMiB: 2048, Measured: true},
			want:  []string{unitsName + " 0×6"}},
		{name: "the driver does not tell what it keeps", gpus: []inventory.GPU{memory(0, 8)},
			units: resource.Units{ReserveMiB: 2048, Measured: true},
			want:  []string{unitsName + " 0×6"}},
		{name: "the driver keeps all", gpus: []inventory.GPU{keeping(0, 8, math.MaxUint64)},
			units: resource.Units{Measured: true, MPS: true},
			want:  []string{"nvidia.com/gpu 0"}, warning: "leaves nothing of its"},
		{name: "a reserve of the configuration", gpus: []inventory.GPU{keeping(0, 8, 3<<30)},
			units: resource.Units{ReserveMiB: 2048},
			want:  []string{unitsName + " 0×6"}},
		{name: "unified memory", gpus: []inventory.GPU{memory(0, 0)}, want: []string{"nvidia.com/gpu 0"},
			warning: "is not offered in units: the driver does not say how much memory it has"},
		{name: "all of it is reserved", gpus: []inventory.GPU{memory(0, 1)}, units: resource.Units{ReserveMiB: 1024},
			want:    []string{"nvidia.com/gpu 0"},
			warning: "the reserve of 1024 MiB leaves nothing of its 1024 MiB"},
		{name: "MPS before Volta", gpus: []inventory.GPU{old}, units: resource.Units{MPS: true},
			want:    []string{"nvidia.com/gpu 0"},
			warning: "limits by MPS need compute capability 7.0"},
		{name: "an old driver", gpus: []inventory.GPU{memory(0, 8)}, cuda: "11.4", units: resource.Units{MPS: true},
			want:    []string{"nvidia.com/gpu 0"},
			warning: "limits by MPS need a driver for CUDA 11.5, and this one is for 11.4"},
		{name: "the driver", gpus: []inventory.GPU{old}, driver: "615.71.05", units: resource.Units{Driver: true},
			want: []string{unitsName + " 0×16"}},
		{name: "a driver that cannot limit", gpus: []inventory.GPU{memory(0, 8)}, driver: "610.3",
			units: resource.Units{Driver: true},
			want:  []string{"nvidia.com/gpu 0"}, warning: `limits by the driver need driver 615, and this one is "610.3"`},
		{name: "without MPS", gpus: []inventory.GPU{old}, cuda: "11.4", want: []string{unitsName + " 0×16"}},
		{name: "a MIG device", gpus: []inventory.GPU{mig}, want: []string{"nvidia.com/mig-1g.10gb 0:0"},
			warning: "it is a MIG device"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := inUnits(tt.units, "0")
			o.MIG = resource.MIGMixed
			plan := resource.New(inventory.Snapshot{GPUs: tt.gpus, Driver: inventory.Driver{CUDA: tt.cuda, Version: tt.driver}},
				o)
			if diff := cmp.Diff(tt.want, counts(plan)); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			if text := strings.Join(plan.Warnings, "\n"); !strings.Contains(text, tt.warning) || tt.warning == "" && text != "" {
				t.Errorf("warnings %q, want %q", text, tt.warning)
			}
		})
	}
}

// A list stays below 3 MB, and the warning names the size of units that needs no cut.
func TestUnitsOfALongList(t *testing.T) {
	t.Parallel()
	var gpus []inventory.GPU
	var all []resource.Ref
	for i := range 32 {
		g := memory(i, 288)
		g.UUID = fmt.Sprintf("GPU-cc69d863-0c84-8605-a0c8-%012d", i)
		gpus = append(gpus, g)
		all = append(all, resource.Ref(fmt.Sprint(i)))
	}
	plan := resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(resource.Units{Name: "volcano.sh/gpu-mem.128Mi"}, all...))
	bytes, devices, of := 0, 0, map[string]int{}
	for d := range plan.Resources[0].All() {
		bytes += len(d.ID) + 20
		devices++
		of[d.Index]++
	}
	if bytes > 3<<20 || bytes < 2<<20 || len(of) != 32 || of["0"] != of["31"] {
		t.Errorf("%d devices in about %d bytes, of %d GPUs, %d of the first and %d of the last", devices, bytes, len(of),
			of["0"], of["31"])
	}
	if len(plan.Warnings) != 2 || !strings.Contains(plan.Warnings[0], "units of 256Mi fit") ||
		plan.Warnings[1] != fmt.Sprintf("the node offers %d devices, and the daemon needs up to %d MB of memory for them; "+
			"set no lower memory limit (resources.limits.memory) on its container, or offer fewer replicas or larger units",
			devices,
			60+devices*2/1000) {
		t.Errorf("warnings: %q", plan.Warnings)
	}
}

func TestUnitsNames(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ prefix, size, want string }{
		{"volcano.sh/gpu-mem", "128Mi", "volcano.sh/gpu-mem.128Mi"},
		{"volcano.sh/gpu-mem", "64Mi", ""},
		{"nvidia.com/memory", "1Gi", "nvidia.com/memory.1Gi"},
		{"gpu-mem", "1Gi", ""}, {"x.io/", "1Gi", ""}, {"X.io/a", "1Gi", ""}, {"kubernetes.io/a", "1Gi",
			""}, {"a.kubernetes.io/a", "1Gi", ""},
		{"x.io/" + strings.Repeat("a", 59), "1Gi", "x.io/" + strings.Repeat("a", 59) + ".1Gi"}, {"x.io/" + strings.Repeat("a",
			60), "1Gi", ""},
	} {
		got, err := resource.UnitsName(tt.prefix, tt.size)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("UnitsName(%q, %q) = %q, %v", tt.prefix, tt.size, got, err)
		}
		if mib := resource.UnitMiB(got); (mib > 0) != (tt.want != "") {
			t.Errorf("UnitMiB(%q) = %d", got, mib)
		}
	}
	for _, name := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared", "1Gi", "x.io/gpu-mem.2Gi"} {
		if mib := resource.UnitMiB(name); mib != 0 {
			t.Errorf("UnitMiB(%q) = %d", name, mib)
		}
	}
}

// ids returns the first n units of a GPU from the unit first on.
func ids(r resource.Resource, index string, first, n int) []string {
	var all []string
	for d := range r.All() {
		if d.Index == index {
			all = append(all, d.ID)
		}
	}
	return all[first : first+n]
}

// A container gets units of one GPU: of the fullest that has enough, or of the emptiest.
func TestPreferredUnits(t *testing.T) {
	t.Parallel()
	node := inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8), memory(2, 8)}}
	fullest := resource.New(node, inUnits(resource.Units{}, "0", "1", "2")).Resources[0]
	emptiest := resource.New(node, inUnits(resource.Units{Fill: resource.FillEmptiest}, "0", "1", "2")).Resources[0]
	available := slices.Concat(ids(fullest, "0", 2, 6), ids(fullest, "1", 5, 3), ids(fullest, "2", 4, 4),
		[]string{"GPU-x::1", "GPU-a", "GPU-a::99", "GPU-a::01", "GPU-a::-0"})
	for _, tt := range []struct {
		name     string
		of       resource.Resource
		required []string
		size     int
		want     []string
		err      string
	}{
		{"the fullest", fullest, nil, 2, ids(fullest, "1", 5, 2), ""},
		{"all of the fullest", fullest, nil, 3, ids(fullest, "1", 5, 3), ""},
		{"the fullest that has enough", fullest, nil, 4, ids(fullest, "2", 4, 4), ""},
		{"the emptiest", emptiest, nil, 2, ids(fullest, "0", 2, 2), ""},
		{"that of an init container", fullest, ids(fullest, "0", 7, 1), 3,
			slices.Concat(ids(fullest, "0", 7, 1), ids(fullest, "0", 2, 2)), ""},
		{"one that left is the last", fullest, nil, 7, append(ids(fullest, "0", 2, 6), "GPU-a::99"), ""},
		{"that of an init container has left", fullest, []string{"GPU-a::99"}, 2,
			append([]string{"GPU-a::99"}, ids(fullest, "0", 2, 1)...), ""},
		{"none has enough", fullest, nil, 8, nil, "no GPU has more than 7"},
		{"that of an init container has not enough", fullest, ids(fullest, "1", 7, 1), 4, nil, "no GPU has more than"},
		{"too few", fullest, nil, 15, nil, "only 14"},
	} {
		shuffled := slices.Clone(available)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		got, err := tt.of.Prefer(shuffled, tt.required, tt.size)
		if tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) || tt.err == "" && err != nil {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	_, err := fullest.Prefer(available, nil, 15)
	if few := (*topology.TooFewError)(nil); !errors.As(err, &few) || len(few.Available) != 14 {
		t.Errorf("too few: %v", err)
	}
}

func TestUnitsOfTwoGPUsAreRefused(t *testing.T) {
	t.Parallel()
	r := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8)}},
		inUnits(resource.Units{}, "0", "1")).Resources[0]
	devices := slices.Collect(r.All())
	if err := r.Admit(devices[:8]); err != nil {
		t.Errorf("of one GPU: %v", err)
	}
	if err := r.Admit(devices[6:9]); err == nil || !strings.Contains(err.Error(), "2 of GPU 0 and 1 of GPU 1") {
		t.Errorf("of two GPUs: %v", err)
	}
}

// Whatever containers hold: with FitOne, the units offered that nobody holds are of one GPU, which
// has the most, and what a container holds is offered.
func TestUnitsOnOffer(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var gpus []inventory.GPU
		var all []resource.Ref
		for i := range 1 + random.IntN(4) {
			gpus = append(gpus, memory(i, 1+random.IntN(16)))
			all = append(all, resource.Ref(fmt.Sprint(i)))
		}
		one := resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(resource.Units{}, all...)).Resources[0]
		sum := resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(resource.Units{Fit: resource.FitSum},
			all...)).Resources[0]
		held, free, departing := map[string]bool{}, map[string]int{}, map[string]int{}
		devices := slices.Collect(one.All())
		for _, d := range devices {
			if random.IntN(3) > 0 {
				held[d.ID] = true
			} else {
				free[d.UUID]++
			}
		}
		full := devices[random.IntN(len(devices))].UUID
		departing[full] = random.IntN(3)
		kept := map[string]int{full: random.IntN(3)}
		free[full] = max(0, free[full]+kept[full]-departing[full])
		if random.IntN(2) == 0 {
			free[full] = 0
		}
		use := resource.UnitUse{Used: slices.Collect(maps.Keys(held)), Departing: departing, Kept: kept,
			Containers: map[string]int{}}
		if free[full] == 0 {
			use.Containers[full] = resource.MPSClients
		}
		most, total := 0, 0
		for _, n := range free {
			most, total = max(most, n), total+n
		}
		offered, keptOnes, gpu := one.OfferUnits(use, "", false)
		offeredOfAll, keptSums, _ := sum.OfferUnits(use, "", false)
		ones, sums := keptOnes[full], keptSums[full]
		if max(ones, sums) > kept[full] || ones > 0 && gpu != full {
			t.Fatalf("%d and %d kept units of %d are offered beside those of %s", ones, sums, kept[full], gpu)
		}
		for i, d := range devices {
			if held[d.ID] && (!offered[i] || !offeredOfAll[i]) {
				t.Fatalf("unit %s is held and not offered", d.ID)
			}
			if !held[d.ID] && offered[i] {
				if ones++; d.UUID != gpu {
					t.Fatalf("unit %s is offered beside those of %s", d.ID, gpu)
				}
			}
			if !held[d.ID] && offeredOfAll[i] {
				sums++
			}
		}
		if ones != most || sums != total {
			t.Fatalf("%d free units offered with one, want %d; %d with sum, want %d", ones, most, sums, total)
		}
	}
}

// The GPU whose free units are offered changes only when another one has more, and not for a while
// after a container was given some.
func TestOfferedGPUStays(t *testing.T) {
	t.Parallel()
	r := resource.New(inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8)}},
		inUnits(resource.Units{}, "0", "1")).Resources[0]
	var use resource.UnitUse
	on := func(keep string, stay bool) string { _, _, gpu := r.OfferUnits(use, keep, stay); return gpu }
	first, second := r.Devices[0].UUID, r.Devices[1].UUID
	if got := []string{on("", false), on(second, false), on("GPU-x", true)}; !slices.Equal(got,
		[]string{first, second, first}) {
		t.Errorf("of equals: %q", got)
	}
	use.Used = ids(r, "1", 0, 1)
	if got := []string{on(second, true), on(second, false)}; !slices.Equal(got, []string{second, first}) {
		t.Errorf("one is given: %q", got)
	}
	use.Used = ids(r, "1", 0, 8)
	if got := on(second, true); got != first {
		t.Errorf("all are given: %q", got)
	}
}

// The units that a later plan does not have: those of a GPU that is gone or hidden, and the last
// ones of a GPU that has fewer.
func TestUnitsThatAreLost(t *testing.T) {
	t.Parallel()
	of := func(reserve int) resource.Plan {
		return resource.New(inventory.Snapshot{GPUs: []inventory.GPU{memory(0, 8), memory(1, 8)}},
			inUnits(resource.Units{ReserveMiB: reserve << 10}, "0", "1"))
	}
	before, fewer := of(5).Resources[0], of(6)
	hidden := fewer.Under([]resource.Hold{{UUID: "GPU-b", Hidden: true}})
	for name, tt := range map[string]struct {
		after resource.Resource
		want  []string
	}{
		"the same": {of(5).Resources[0], nil},
		"more":     {of(4).Resources[0], nil},
		"fewer":    {fewer.Resources[0], []string{"GPU-a::2", "GPU-b::2"}},
		"hidden":   {hidden.Resources[0], []string{"GPU-a::2", "GPU-b::0", "GPU-b::1", "GPU-b::2"}},
	} {
		var lost []string
		for d := range before.Without(tt.after) {
			if lost = append(lost, d.ID); before.Lacks(d.ID) || !tt.after.Lacks(d.ID) {
				t.Errorf("%s: %s is lost", name, d.ID)
			}
		}
		if diff := cmp.Diff(tt.want, lost); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got, all := before.Count(), len(slices.Collect(before.All())); got != 6 || all != 6 {
		t.Errorf("the resource counts %d units and has %d, want 6", got, all)
	}
	if before.Equal(fewer.Resources[0]) || !before.Equal(of(5).Resources[0]) {
		t.Error("a resource with fewer units counts as equal, or one with as many as another")
	}
}

// bigNode returns the resource of 8 GPUs with 141 GB.
func bigNode() (r resource.Resource, available []string) {
	var gpus []inventory.GPU
	for i := range 8 {
		g := memory(i, 141)
		g.UUID = fmt.Sprintf("GPU-cc69d863-0c84-8605-a0c8-%012d", i)
		gpus = append(gpus, g)
	}
	r = resource.New(inventory.Snapshot{GPUs: gpus}, inUnits(resource.Units{Name: "volcano.sh/gpu-mem.128Mi",
		ReserveMiB: 1024},
		"0", "1", "2", "3", "4", "5", "6", "7")).Resources[0]
	for d := range r.All() {
		available = append(available, d.ID)
	}
	return r, available
}

// A choice among all units of a node with 8 GPUs of 141 GB takes less than a millisecond of an idle
// machine.
func TestChoiceAmongManyUnits(t *testing.T) {
	t.Parallel()
	r, available := bigNode()
	best := time.Hour
	for range 50 {
		began := time.Now()
		if _, err := r.Prefer(available, nil, 160); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(began))
	}
	if t.Logf("%d units, the shortest of 50 choices: %s", len(available), best); best > 10*time.Millisecond {
		t.Errorf("a choice takes %s", best)
	}
}

func BenchmarkChoiceAmongManyUnits(b *testing.B) {
	r, available := bigNode()
	for b.Loop() {
		if _, err := r.Prefer(available, nil, 160); err != nil {
			b.Fatal(err)
		}
	}
}
