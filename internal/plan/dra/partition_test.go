package dra_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/simulated"
)

// A divisible is a simulated machine whose first GPU is in MIG mode and has no instance.
type divisible struct {
	t        *testing.T
	session  *nvidia.Session
	uuid     string
	profiles []inventory.MIGProfile
}

// newDivisible returns the divisible of a machine; nil if its first GPU has no MIG mode.
func newDivisible(t *testing.T, name string) *divisible {
	t.Helper()
	node := simulated.Node(t, name)
	options := nvidia.Options{Library: node.NVML(), Root: node.Root()}
	d := &divisible{t: t}
	open := func() inventory.Snapshot {
		var err error
		if d.session, err = nvidia.New(options).Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		s, err := d.session.Scan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	t.Cleanup(func() { _ = d.session.Close(context.WithoutCancel(t.Context())) })
	d.uuid = s.GPUs[0].UUID
	if s.GPUs[0].MIG == inventory.MIGUnsupported {
		return nil
	}
	d.clear()
	err := d.step(inventory.MIGStep{Action: inventory.MIGEnable})
	if errors.Is(err, inventory.ErrSessionInUse) {
		err = errors.Join(d.session.Close(t.Context()), nvidia.SetMIGMode(options, d.uuid, inventory.MIGEnabled))
		open()
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.session.Partitions(t.Context(), d.uuid)
	if err != nil {
		t.Fatal(err)
	}
	d.profiles = p.Profiles
	return d
}

func (d *divisible) step(step inventory.MIGStep) error {
	end, err := d.session.Repartition(d.t.Context(), d.uuid, step)
	if err == nil {
		_, err = end(d.t.Context())
	}
	return err
}

// clear ends all instances.
func (d *divisible) clear() {
	p, err := d.session.Partitions(d.t.Context(), d.uuid)
	for _, i := range p.Instances {
		for _, c := range i.Computes {
			err = errors.Join(err, d.step(inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: i.ID, CI: c.ID}))
		}
		err = errors.Join(err, d.step(inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: i.ID}))
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

// divided returns the pool of a machine of which all GPUs that can be are in MIG mode, without
// instances.
func divided(t *testing.T, name string, profiles []inventory.MIGProfile) (inventory.Snapshot, dra.Divisions) {
	t.Helper()
	s, divisions := scan(t, name), dra.Divisions{}
	for i := range s.GPUs {
		s.GPUs[i].MIG, s.GPUs[i].MIGDevices = inventory.MIGEnabled, nil
		divisions[s.GPUs[i].UUID] = dra.Divided{Profiles: profiles}
	}
	return s, divisions
}

func dividedPool(s inventory.Snapshot, divisions dra.Divisions) dra.Pool {
	return dra.New(s, "node-1", dra.Numbers{}.With(s.GPUs), dra.All(s.GPUs), divisions)
}

// counters returns what there is of each counter of a pool.
func counters(p dra.Pool) map[string]dra.Capacity {
	left := map[string]dra.Capacity{}
	for _, s := range p.Slices {
		for _, set := range s.SharedCounters {
			for name, n := range set.Counters {
				left[set.Name+"/"+name] = n
			}
		}
	}
	return left
}

// take takes what a device needs, and reports false if there is not enough of it.
func take(left map[string]dra.Capacity, d dra.Device) bool {
	for _, use := range d.ConsumesCounters {
		for name, n := range use.Counters {
			if left[use.CounterSet+"/"+name] < n {
				return false
			}
		}
	}
	for _, use := range d.ConsumesCounters {
		for name, n := range use.Counters {
			left[use.CounterSet+"/"+name] -= n
		}
	}
	return true
}

// TestCounters takes the devices of every model in many orders: the counters allow one exactly when
// the driver can make it.
func TestCounters(t *testing.T) {
	t.Parallel()
	for _, name := range simulator.Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDivisible(t, name)
			if d == nil {
				return
			}
			s, divisions := divided(t, name, d.profiles)
			p := dividedPool(s, divisions)
			if problems := refusedBy(p); len(problems) > 0 || len(p.LeftOut) > 0 {
				t.Fatalf("left out %q; the API server would refuse:\n%s", p.LeftOut, strings.Join(problems, "\n"))
			}
			var devices []dra.Device
			want := 0
			for _, slice := range p.Slices {
				for _, device := range slice.Devices {
					if device.GPU() == d.uuid {
						devices = append(devices, device)
					}
				}
			}
			for _, profile := range d.profiles {
				want += len(profile.Starts)
			}
			if len(devices) != want {
				t.Fatalf("%d devices, want %d: one for each profile and place", len(devices), want)
			}
			random := rand.New(rand.NewPCG(1, 2))
			for range 30 {
				left := counters(p)
				for _, i := range random.Perm(len(devices)) {
					at := devices[i].Partition.Placement
					err := d.step(inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: at.Profile,
						Start: at.Start, Size: at.Size})
					if allowed := take(left, devices[i]); allowed != (err == nil) {
						t.Fatalf("%s: the counters allow it: %v; the driver: %v", devices[i].Name, allowed, err)
					}
				}
				d.clear()
			}
		})
	}
}

// TestAmounts: counters say how much memory and how many engines an instance has, under the names
// of NVIDIA's driver (kueue#10320). All instances of a profile that have room together have no more
// than the GPU.
func TestAmounts(t *testing.T) {
	t.Parallel()
	for _, name := range simulator.Names() {
		d := newDivisible(t, name)
		if d == nil {
			continue
		}
		s, divisions := divided(t, name, d.profiles)
		p := dividedPool(s, divisions)
		there := counters(p)
		for _, profile := range d.profiles {
			left, given := counters(p), 0
			var used dra.Capacity
			for _, slice := range p.Slices {
				for _, device := range slice.Devices {
					if device.GPU() != d.uuid || device.Partition.Profile != profile.Name {
						continue
					}
					use := device.ConsumesCounters[0].Counters
					for counter, capacity := range map[string]string{
						"memory": "memory", "multiprocessors": "multiprocessors", "copy-engines": "copyEngines",
						"decoders": "decoders",
						"encoders": "encoders", "jpeg-engines": "jpegEngines", "ofa-engines": "ofaEngines",
					} {
						if use[counter] != device.Capacity[capacity] {
							t.Errorf("%s, %s: counter %s is %d, and capacity %s is %d", name, device.Name, counter,
								use[counter], capacity, device.Capacity[capacity])
						}
					}
					if take(left, device) {
						given, used = given+1, used+use["memory"]
					}
				}
			}
			if given == 0 || used == 0 || used > there["gpu-0/memory"] ||
				int64(there["gpu-0/memory"]) > int64(s.GPUs[0].MemoryBytes) {
				t.Errorf("%s: %d of %s have %d bytes, the counter is %d, the GPU has %d", name, given, profile.Name,
					used, there["gpu-0/memory"], s.GPUs[0].MemoryBytes)
			}
		}
	}
}

// TestDividedPool: what is published of eight GPUs in MIG mode, and that nothing that a claim does
// changes it.
func TestDividedPool(t *testing.T) {
	t.Parallel()
	d := newDivisible(t, "dgx-h100")
	s, divisions := divided(t, "dgx-h100", d.profiles)
	p := dividedPool(s, divisions)
	if len(p.Slices) != 5 || len(p.Slices[0].SharedCounters) != 8 || p.Slices[0].Devices != nil {
		t.Fatalf("%d slices, the first with %d counter sets", len(p.Slices), len(p.Slices[0].SharedCounters))
	}
	var got []string
	for _, device := range p.Slices[1].Devices[:len(p.Slices[1].Devices)/2] {
		got = append(got, strings.TrimPrefix(device.Name, "gpu-0-mig-"))
	}
	want := "1g10gb-19-6 1g10gb-19-4 1g10gb-19-5 1g10gb-19-0 1g10gb-19-1 1g10gb-19-2 1g10gb-19-3 " +
		"1g10gb-me-20-6 1g10gb-me-20-4 1g10gb-me-20-5 1g10gb-me-20-0 1g10gb-me-20-1 1g10gb-me-20-2 1g10gb-me-20-3 " +
		"1g20gb-15-6 1g20gb-15-4 1g20gb-15-0 1g20gb-15-2 2g20gb-14-4 2g20gb-14-0 2g20gb-14-2 3g40gb-9-4 3g40gb-9-0 " +
		"4g40gb-5-0 7g80gb-0-0"
	if diff := cmp.Diff(strings.Fields(want), got); diff != "" {
		t.Errorf("devices of GPU 0 in their order (-want +got):\n%s", diff)
	}
	first := p.Slices[1].Devices[slices.IndexFunc(p.Slices[1].Devices,
		func(d dra.Device) bool { return strings.Contains(d.Name, "3g40gb") })]
	use, err := json.Marshal(first.ConsumesCounters)
	if err != nil {
		t.Fatal(err)
	}
	wantUse := `[{"counterSet":"gpu-0","counters":{"copy-engines":{"value":"3"},"decoders":{"value":"3"},` +
		`"jpeg-engines":{"value":"3"},"memory":{"value":"40448Mi"},` +
		`"memory-slice-4":{"value":"1"},"memory-slice-5":{"value":"1"},` +
		`"memory-slice-6":{"value":"1"},"memory-slice-7":{"value":"1"},"multiprocessors":{"value":"60"}}}]`
	if string(use) != wantUse {
		t.Errorf("counters of %s: %s", first.Name, use)
	}
	if a := first.Attributes; a["parentUUID"].Value != s.GPUs[0].UUID || a["profile"].Value != "3g.40gb" ||
		a["type"].Value != "mig" || a["uuid"].Value != "" {
		t.Errorf("attributes: %v", a)
	}
	if c := first.Capacity; c["multiprocessors"] != 60 || c["memorySlice7"] != 1 || c["memory"] < 39<<30 {
		t.Errorf("capacities: %v", c)
	}

	// An instance that was made for a claim changes nothing; one that is ill is tainted, and no other.
	at := inventory.MIGPlacement{Profile: 9, Start: 4, Size: 4}
	made := inventory.MIGDevice{UUID: "MIG-made", Profile: "3g.40gb", Placement: at,
		Attributes: attributesOf(d.profiles, 9), Health: s.GPUs[0].Health}
	s.GPUs[0].MIGDevices = []inventory.MIGDevice{made}
	divisions[s.GPUs[0].UUID] = dra.Divided{Profiles: d.profiles, Own: []inventory.MIGPlacement{at}}
	if n := changed(p, dividedPool(s, divisions)); n != 0 {
		t.Errorf("%d slices changed by an instance that was made for a claim", n)
	}
	s.GPUs[0].MIGDevices[0].Health = inventory.Health{State: inventory.Unhealthy, XID: 94, Reason: "XID 94"}
	ill := dividedPool(s, divisions)
	for _, device := range ill.Slices[1].Devices {
		if bad := device.Name == "gpu-0-mig-3g40gb-9-4"; bad != (len(device.Taints) > 0) {
			t.Errorf("%s has the taints %v", device.Name, device.Taints)
		}
	}
	for _, h := range dra.HealthOf(ill, s, nil) {
		if bad := h.Device == "gpu-0-mig-3g40gb-9-4"; bad != (h.Verdict != dra.VerdictHealthy) {
			t.Errorf("%s is %s: %s", h.Device, h.Verdict, h.Message)
		}
	}

	// An instance of another program: nothing is made, and it is published as it is. That of the claim
	// is not.
	other := made
	other.UUID, other.Placement.Start = "MIG-other", 0
	s.GPUs[0].MIGDevices = []inventory.MIGDevice{made, other}
	divisions[s.GPUs[0].UUID] = dra.Divided{Profiles: d.profiles, Own: []inventory.MIGPlacement{at},
		Fixed: "another program made one"}
	fixed := dividedPool(s, divisions)
	var names []string
	for _, slice := range fixed.Slices {
		for _, device := range slice.Devices {
			if device.GPU() == s.GPUs[0].UUID {
				names = append(names, fmt.Sprintf("%s %s %d", device.Name, device.Attributes["uuid"].Value,
					len(device.ConsumesCounters)))
			}
		}
	}
	if len(names) != 1 || names[0] != "gpu-0-mig-3g40gb-9-0 MIG-other 0" || len(counters(fixed)) != 7*16 {
		t.Errorf("devices of a GPU that another program divided: %q, %d counters", names, len(counters(fixed)))
	}
	if left := strings.Join(fixed.LeftOut, "\n"); !strings.Contains(left, "another program made one") ||
		!strings.Contains(left, "created for a claim") {
		t.Errorf("left out: %s", left)
	}

	// Without counters nothing is published that needs them.
	safe := fixed.Unpartitioned()
	if len(safe.Slices) != 1 || len(safe.Slices[0].Devices) != 1 ||
		safe.Slices[0].Devices[0].Name != "gpu-0-mig-3g40gb-9-0" {
		t.Errorf("without counters: %+v", safe.Slices)
	}
	if safe := p.Unpartitioned(); len(safe.Slices) != 1 || safe.Slices[0].Devices == nil ||
		len(safe.Slices[0].Devices) != 0 {
		t.Errorf("without counters: %+v", safe.Slices)
	}
}

// attributesOf returns the attributes of a profile.
func attributesOf(profiles []inventory.MIGProfile, id int) inventory.MIGAttributes {
	return profiles[slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.ID == id })].Attributes
}

// TestImpossibleProfiles: what a driver tells that cannot be is left out, and a GPU without any
// profile has a reason.
func TestImpossibleProfiles(t *testing.T) {
	t.Parallel()
	one := inventory.MIGAttributes{GISlices: 1, CISlices: 1}
	g := inventory.GPU{UUID: "GPU-a", MIG: inventory.MIGEnabled}
	s := inventory.Snapshot{GPUs: []inventory.GPU{g}}
	for name, test := range map[string]struct {
		profiles []inventory.MIGProfile
		want     int
	}{
		"none":    {nil, 0},
		"no size": {[]inventory.MIGProfile{{Name: "1g.5gb", Count: 7, Starts: []int{0}, Attributes: one}}, 0},
		"too far": {[]inventory.MIGProfile{{Name: "1g.5gb", Count: 7, Size: 1, Starts: []int{16}, Attributes: one}},
			0},
		"negative": {[]inventory.MIGProfile{{Name: "1g.5gb", Count: 7, Size: 1, Starts: []int{-1}, Attributes: one}},
			0},
		"twice": {[]inventory.MIGProfile{{Name: "1g.5gb", Count: 7, Size: 1, Starts: []int{0, 0}, Attributes: one}},
			1},
		"far too many": {[]inventory.MIGProfile{{Name: "1g.5gb", Count: 7, Size: 1, Starts: make([]int, 100),
			Attributes: one}}, 1},
	} {
		p := dividedPool(s, dra.Divisions{"GPU-a": {Profiles: test.profiles}})
		devices := 0
		for _, slice := range p.Slices {
			devices += len(slice.Devices)
		}
		if problems := refusedBy(p); len(problems) > 0 || devices != test.want || test.want == 0 &&
			len(p.LeftOut) == 0 {
			t.Errorf("%s: %d devices, left out %q, problems %q", name, devices, p.LeftOut, problems)
		}
	}
}
