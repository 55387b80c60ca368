package topology_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// whole returns one device for each GPU, healthy unless the GPU is Lost.
func whole(gpus []inventory.GPU) []topology.Device {
	devices := make([]topology.Device, len(gpus))
	for i, gpu := range gpus {
		devices[i] = topology.Device{ID: gpu.UUID, UUID: gpu.UUID, GPU: gpu.UUID,
			Healthy: gpu.Health.State != inventory.Lost}
	}
	return devices
}

// replicas returns n devices for each GPU: GPU-00::0, GPU-00::1 and so on.
func replicas(gpus []inventory.GPU, n int) []topology.Device {
	var devices []topology.Device
	for _, gpu := range gpus {
		for i := range n {
			id := fmt.Sprintf("%s::%d", gpu.UUID, i)
			devices = append(devices, topology.Device{ID: id, UUID: gpu.UUID, GPU: gpu.UUID, Healthy: true})
		}
	}
	return devices
}

// partitions returns n MIG devices for each GPU, MIG-00-0 and so on, each with some replicas:
// MIG-00-0::0.
func partitions(gpus []inventory.GPU, n, replicas int) []topology.Device {
	var devices []topology.Device
	for _, gpu := range gpus {
		for i := range n {
			uuid := fmt.Sprintf("MIG-%02d-%d", gpu.Index, i)
			for k := range replicas {
				id := uuid
				if replicas > 1 {
					id = fmt.Sprintf("%s::%d", uuid, k)
				}
				devices = append(devices, topology.Device{ID: id, UUID: uuid, GPU: gpu.UUID, Healthy: true})
			}
		}
	}
	return devices
}

func ids(devices []topology.Device) []string {
	var all []string
	for _, d := range devices {
		all = append(all, d.ID)
	}
	return all
}

// without returns the IDs that are not among others.
func without(ids []string, others ...string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(others, id) })
}

func shuffled(r *rand.Rand, ids []string) []string {
	ids = slices.Clone(ids)
	r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

func TestPreferWholeGPUs(t *testing.T) {
	t.Parallel()
	for _, policy := range []topology.Policy{topology.Distributed, topology.Packed, topology.Distinct} {
		for _, m := range append(machines16(), machine{"dgx-1, one GPU lost", dgx1Lost()},
			machine{"bridges", bridges(8)}) {
			g := topology.New(m.gpus)
			devices := whole(m.gpus)
			p := topology.NewPreference(g, devices, policy)
			r := rand.New(rand.NewPCG(1, 1))
			for range 50 {
				request := draw(g, r)
				request.Busy = g.Everything() &^ request.Available
				var available, required []string
				for i, d := range devices {
					if !d.Healthy {
						request.Available &^= topology.SetOf(i)
						request.Required &^= topology.SetOf(i)
						request.Busy &^= topology.SetOf(i)
					}
					if request.Available.Has(i) {
						available = append(available, d.ID)
					}
					if request.Required.Has(i) {
						required = append(required, d.ID)
					}
				}
				request.Size = min(request.Size, request.Available.Len())
				choice, _ := g.Choose(request)
				var want []string
				for i := range choice.Set.All() {
					want = append(want, devices[i].ID)
				}
				got, err := p.Prefer(shuffled(r, available), shuffled(r, required), request.Size)
				if err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s, %v: %+v: got %v, %v, want %v", m.name, policy, request, got, err, want)
				}
			}
		}
	}
}

func TestPreferSharedDevices(t *testing.T) {
	t.Parallel()
	pairs, mesh := bridges(4), dgx1()
	shared, mig, migShared := replicas(pairs, 3), partitions(pairs, 3, 1), partitions(pairs[:2], 2, 3)
	tests := []struct {
		name     string
		gpus     []inventory.GPU
		devices  []topology.Device
		policy   topology.Policy
		used     []string // not available
		required []string
		size     int
		want     []string
	}{
		{
			"distributed: the GPU with the fewest in use", pairs, shared, topology.Distributed,
			[]string{"GPU-00::0", "GPU-01::0", "GPU-02::2"}, nil, 1, []string{"GPU-03::0"},
		},
		{
			"distributed: first the emptier ones, then a round over all", pairs, shared, topology.Distributed,
			[]string{"GPU-00::0", "GPU-01::0"}, nil, 4, []string{"GPU-00::1", "GPU-01::1", "GPU-02::0", "GPU-03::0"},
		},
		{
			"distributed: a GPU in use by two is left alone", pairs, shared, topology.Distributed,
			[]string{"GPU-00::0", "GPU-00::1"}, nil, 4, []string{"GPU-01::0", "GPU-01::1", "GPU-02::0", "GPU-03::0"},
		},
		{
			"distributed: equals by connection", pairs, shared, topology.Distributed,
			[]string{"GPU-00::0"}, nil, 2, []string{"GPU-02::0", "GPU-03::0"},
		},
		{
			"distributed: equals by connection with what is required", pairs, shared, topology.Distributed,
			nil, []string{"GPU-02::1"}, 2, []string{"GPU-02::1", "GPU-03::0"},
		},
		{
			"packed: the GPU with the most in use", pairs, shared, topology.Packed,
			[]string{"GPU-01::0", "GPU-02::0", "GPU-02::1"}, nil, 2, []string{"GPU-01::1", "GPU-02::2"},
		},
		{
			"packed: no more GPUs than needed, and those connected", pairs, shared, topology.Packed,
			[]string{"GPU-00::0", "GPU-00::1", "GPU-00::2"}, nil, 4,
			[]string{"GPU-02::0", "GPU-02::1", "GPU-02::2", "GPU-03::0"},
		},
		{
			"packed: beside what is required", pairs, shared, topology.Packed,
			[]string{"GPU-00::0"}, []string{"GPU-03::1"}, 3, []string{"GPU-03::0", "GPU-03::1", "GPU-03::2"},
		},
		{
			"distinct: other GPUs, though they are fuller", pairs, shared, topology.Distinct,
			[]string{"GPU-01::0", "GPU-01::1", "GPU-02::0", "GPU-03::0"}, nil, 4,
			[]string{"GPU-00::0", "GPU-01::2", "GPU-02::1", "GPU-03::1"},
		},
		{
			"distinct: the emptiest of them", pairs, shared, topology.Distinct,
			[]string{"GPU-00::0", "GPU-01::0", "GPU-03::0", "GPU-03::1"}, nil, 3,
			[]string{"GPU-00::1", "GPU-01::1", "GPU-02::0"},
		},
		{
			"distinct: not the GPU that is required", pairs, shared, topology.Distinct,
			nil, []string{"GPU-01::2"}, 2, []string{"GPU-00::0", "GPU-01::2"},
		},
		{
			"distinct: more than GPUs are spread evenly", pairs, shared, topology.Distinct,
			nil, nil, 6, []string{"GPU-00::0", "GPU-00::1", "GPU-01::0", "GPU-01::1", "GPU-02::0", "GPU-03::0"},
		},
		{
			"distinct: a GPU that is used up gives none", pairs, shared, topology.Distinct,
			[]string{"GPU-00::0", "GPU-00::1", "GPU-00::2"}, nil, 4, []string{"GPU-01::0", "GPU-01::1", "GPU-02::0",
				"GPU-03::0"},
		},
		{
			"MIG, distributed: connected GPUs", mesh, partitions(mesh, 7, 1), topology.Distributed,
			nil, nil, 4, []string{"MIG-00-0", "MIG-01-0", "MIG-02-0", "MIG-03-0"},
		},
		{
			"MIG, packed: on one GPU", pairs, mig, topology.Packed,
			[]string{"MIG-01-0"}, nil, 2, []string{"MIG-01-1", "MIG-01-2"},
		},
		{
			"MIG, distinct", pairs, mig, topology.Distinct,
			[]string{"MIG-00-0"}, nil, 2, []string{"MIG-02-0", "MIG-03-0"},
		},
		{
			"MIG with replicas, distributed: the emptier MIG device", pairs, migShared, topology.Distributed,
			[]string{"MIG-00-0::0"}, nil, 3, []string{"MIG-00-1::0", "MIG-01-0::0", "MIG-01-1::0"},
		},
		{
			"MIG with replicas, packed: the fuller MIG device", pairs, migShared, topology.Packed,
			[]string{"MIG-00-1::0"}, nil, 3, []string{"MIG-00-0::0", "MIG-00-1::1", "MIG-00-1::2"},
		},
		{"everything", pairs, mig, topology.Packed, nil, nil, 12, ids(mig)},
		{"GPUs without a graph, by order", nil, mig, topology.Distinct, nil, nil, 2, []string{"MIG-00-0", "MIG-01-0"}},
		{"GPUs of the graph before others", pairs[2:], mig, topology.Distinct, nil, nil, 3,
			[]string{"MIG-00-0", "MIG-02-0", "MIG-03-0"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := topology.NewPreference(topology.New(tt.gpus), tt.devices, tt.policy)
			got, err := p.Prefer(without(ids(tt.devices), tt.used...), tt.required, tt.size)
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestPreferRequestsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	gpus := dgx1()
	devices := whole(gpus)
	devices[7].Healthy = false
	p := topology.NewPreference(topology.New(gpus), append(devices, devices[0]), topology.Distributed)
	tests := []struct {
		name                string
		available, required []string
		size                int
		want                []string
	}{
		{"size 0", ids(devices), nil, 0, []string{}},
		{"negative size", ids(devices), nil, -1, []string{}},
		{"nothing at all", nil, nil, 0, []string{}},
		{"size 0 with required", ids(devices), []string{"GPU-02"}, 0, []string{"GPU-02"}},
		{"duplicates", []string{"GPU-01", "GPU-01", "GPU-02"}, []string{"GPU-02", "GPU-02"}, 2,
			[]string{"GPU-01", "GPU-02"}},
		{"unknown available", []string{"GPU-99", "GPU-01", "", "GPU-02"}, nil, 2, []string{"GPU-01", "GPU-02"}},
		{"required not available", []string{"GPU-01"}, []string{"GPU-05"}, 2, []string{"GPU-01", "GPU-05"}},
		{"only required", nil, []string{"GPU-05"}, 1, []string{"GPU-05"}},
		{"more required than wanted", ids(devices), []string{"GPU-05", "GPU-01"}, 1, []string{"GPU-01", "GPU-05"}},
		{"unhealthy if nothing else is left", []string{"GPU-06", "GPU-07"}, nil, 2, []string{"GPU-06", "GPU-07"}},
		{"not unhealthy otherwise", []string{"GPU-06", "GPU-07", "GPU-00"}, nil, 2, []string{"GPU-00", "GPU-06"}},
		{"unhealthy and required", []string{"GPU-06", "GPU-07", "GPU-00"}, []string{"GPU-07"}, 2,
			[]string{"GPU-06", "GPU-07"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := p.Prefer(tt.available, tt.required, tt.size)
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestPreferErrors(t *testing.T) {
	t.Parallel()
	gpus := uniform(8)
	p := topology.NewPreference(topology.New(gpus), replicas(gpus, 4), topology.Distributed)
	all := ids(replicas(gpus, 4))
	tests := []struct {
		name                string
		available, required []string
		size                int
		want                string
	}{
		{
			"required unknown", all, []string{"GPU-x", "GPU-00::1", "GPU-a", "GPU-x"}, 2,
			"the request requires GPU-a, GPU-x, which this resource does not have: " +
				"the list of devices has changed while the pod was admitted; create the pod again",
		},
		{
			"too few", []string{"GPU-00::1", "GPU-00::0", "GPU-x"}, []string{"GPU-00::2"}, 4,
			"the request wants 4, and of those it offers only 3 are on this node: " +
				"GPU-00::0, GPU-00::1, GPU-00::2",
		},
		{
			"none", []string{"GPU-x"}, nil, 1,
			"the request wants 1, and none of those it offers is on this node",
		},
		{
			"too few of many", all, nil, 33,
			"the request wants 33, and of those it offers only 32 are on this node: " +
				"GPU-00::0, GPU-00::1, GPU-00::2, GPU-00::3, GPU-01::0, GPU-01::1, GPU-01::2, GPU-01::3, " +
				"GPU-02::0, GPU-02::1, GPU-02::2, GPU-02::3, GPU-03::0, GPU-03::1, GPU-03::2, GPU-03::3, " +
				"GPU-04::0, GPU-04::1, GPU-04::2, GPU-04::3, GPU-05::0, GPU-05::1, GPU-05::2, GPU-05::3, " +
				"GPU-06::0, GPU-06::1, GPU-06::2, GPU-06::3, GPU-07::0, GPU-07::1, GPU-07::2, GPU-07::3",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := p.Prefer(tt.available, tt.required, tt.size)
			if got != nil || err == nil || err.Error() != tt.want {
				t.Errorf("got %v and error\n%v, want\n%s", got, err, tt.want)
			}
		})
	}
	var unknown *topology.UnknownDeviceError
	if _, err := p.Prefer(nil, []string{"x"}, 1); !errors.As(err, &unknown) ||
		!slices.Equal(unknown.IDs, []string{"x"}) {
		t.Errorf("got %v, want an UnknownDeviceError", err)
	}
	var few *topology.TooFewError
	if _, err := p.Prefer(all[:2], nil, 3); !errors.As(err, &few) || few.Wanted != 3 ||
		!slices.Equal(few.Available, all[:2]) {
		t.Errorf("got %v, want a TooFewError", err)
	}
}

// Every answer can be read as taking one device after the other by the policy's rule.
func TestPreferFollowsItsPolicy(t *testing.T) {
	t.Parallel()
	gpus := cubes(16)
	g := topology.New(gpus)
	r := rand.New(rand.NewPCG(11, 11))
	for _, devices := range [][]topology.Device{replicas(gpus, 4), partitions(gpus[:5], 7, 1),
		partitions(gpus[:4], 3, 2)} {
		for _, policy := range []topology.Policy{topology.Distributed, topology.Packed, topology.Distinct} {
			p := topology.NewPreference(g, devices, policy)
			for range 300 {
				var available, required []string
				for _, d := range devices {
					switch x := r.IntN(10); {
					case x == 0 && len(required) < 3:
						required = append(required, d.ID)
					case x < 6:
						available = append(available, d.ID)
					}
				}
				size := len(required) + r.IntN(len(available)+1)
				got, err := p.Prefer(available, required, size)
				if err != nil || len(got) != size {
					t.Fatalf("%v: %d wanted, got %v, %v", policy, size, got, err)
				}
				if gpu := replay(devices, policy, available, required, got); gpu != "" {
					t.Fatalf("%v: of %v, required %v, size %d: chose %v although it was the turn of %s",
						policy, available, required, size, got, gpu)
				}
				again, _ := p.Prefer(shuffled(r, available), shuffled(r, required), size)
				if !slices.Equal(got, again) {
					t.Fatalf("%v: the order of the request changes the answer from %v to %v", policy, got, again)
				}
			}
		}
	}
}

// replay takes the devices of an answer one after the other by the policy's rule, as the sharing
// documentation states it. It returns a GPU whose turn it was although the answer has none (or no
// more) of its devices; "" if there is none.
func replay(devices []topology.Device, policy topology.Policy, available, required, answer []string) string {
	type gpu struct{ load, picked, candidates, answered int }
	gpus := map[string]*gpu{}
	for _, d := range devices {
		if gpus[d.GPU] == nil {
			gpus[d.GPU] = &gpu{}
		}
		g := gpus[d.GPU]
		switch {
		case slices.Contains(required, d.ID):
			g.load++
			g.picked++
		case !slices.Contains(available, d.ID):
			g.load++
		case slices.Contains(answer, d.ID):
			g.answered++
			fallthrough
		default:
			g.candidates++
		}
	}
	key := func(g *gpu) [2]int {
		switch policy {
		case topology.Packed:
			return [2]int{-g.load, 0}
		case topology.Distinct:
			return [2]int{g.picked, g.load}
		default:
			return [2]int{g.load, g.picked}
		}
	}
	for range len(answer) - len(required) {
		var turn *gpu
		var name string
		for _, id := range slices.Sorted(maps.Keys(gpus)) {
			g := gpus[id]
			if g.candidates == 0 {
				continue
			}
			order := -1
			if turn != nil {
				a, b := key(g), key(turn)
				order = slices.Compare(a[:], b[:])
			}
			// Among equals one goes first that the answer uses up: packed could not leave another for it.
			if order < 0 || order == 0 && g.answered*turn.candidates > turn.answered*g.candidates {
				turn, name = g, id
			}
		}
		if turn.answered == 0 {
			return name
		}
		turn.answered--
		turn.candidates--
		turn.load++
		turn.picked++
	}
	return ""
}

func TestPolicyString(t *testing.T) {
	t.Parallel()
	for policy, want := range map[topology.Policy]string{
		topology.Distributed: "distributed", topology.Packed: "packed", topology.Distinct: "distinct", 7: "Policy(7)",
		-1: "Policy(-1)",
	} {
		if got := policy.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// FuzzPrefer holds that every answer has the size that was asked for, all that is required and
// nothing twice or unknown.
func FuzzPrefer(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3}, []byte{1}, 2, 0)
	f.Add([]byte{9, 9, 200}, []byte{200}, -1, 1)
	f.Add([]byte{}, []byte{}, 0, 2)
	f.Add([]byte{0, 3, 6, 9, 12, 15, 18, 21}, []byte{0, 0}, 8, 2)
	gpus := dgx1()
	devices := replicas(gpus, 3)
	devices[4].Healthy = false
	g := topology.New(gpus)
	f.Fuzz(func(t *testing.T, available, required []byte, size, policy int) {
		p := topology.NewPreference(g, devices, topology.Policy(policy))
		name := func(numbers []byte) []string {
			var ids []string
			for _, n := range numbers {
				if int(n) < len(devices) {
					ids = append(ids, devices[n].ID)
				} else {
					ids = append(ids, string(n))
				}
			}
			return ids
		}
		got, err := p.Prefer(name(available), name(required), size)
		var unknown *topology.UnknownDeviceError
		var few *topology.TooFewError
		known := map[string]bool{}
		for _, id := range append(name(available), name(required)...) {
			if slices.Contains(ids(devices), id) {
				known[id] = true
			}
		}
		strangers := slices.ContainsFunc(required, func(n byte) bool { return int(n) >= len(devices) })
		must := map[string]bool{}
		for _, id := range name(required) {
			must[id] = true
		}
		switch {
		case strangers:
			if !errors.As(err, &unknown) {
				t.Fatalf("a required device is unknown: got %v, %v", got, err)
			}
		case size > len(known):
			if !errors.As(err, &few) {
				t.Fatalf("%d are wanted of %d: got %v, %v", size, len(known), got, err)
			}
		case err != nil:
			t.Fatal(err)
		default:
			if len(got) != max(size, len(must)) {
				t.Fatalf("%d are wanted, %d required: got %v", size, len(must), got)
			}
			seen := map[string]bool{}
			for _, id := range got {
				if seen[id] || !known[id] {
					t.Fatalf("%s comes twice or was not offered: %v", id, got)
				}
				seen[id] = true
				delete(must, id)
			}
			if len(must) > 0 {
				t.Fatalf("required %v are missing in %v", must, got)
			}
		}
	})
}
