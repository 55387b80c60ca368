package listing_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// FuzzAllocate holds that no request ends the program, and that a container gets only healthy
// devices of the plan, each of them once, or a reason.
func FuzzAllocate(f *testing.F) {
	for _, ids := range []string{"", ",", "G0", "G0,G0", "G1::0,G1::2", "G2", "G3", "G1::00"} {
		f.Add(ids, "G1::1")
	}
	s, h := fuzzed()
	f.Fuzz(func(t *testing.T, first, second string) {
		containers := [][]string{strings.Split(first, ","), strings.Split(second, ",")}
		_, answer := s.Allocate(gpuName, containers, nil, h, time.Unix(2, 0))
		for _, ids := range containers {
			devices, err := answer.Devices(ids)
			var refused *listing.RefusalError
			if err != nil && !errors.As(err, &refused) || err == nil && len(devices) != len(ids) {
				t.Errorf("%q: given %d devices, %v", ids, len(devices), err)
			}
			for i, d := range devices {
				if d.ID != ids[i] || slices.Contains(ids[:i], d.ID) ||
					!slices.Contains([]string{"G0", "G1::0", "G1::1", "G1::2"}, d.ID) {
					t.Errorf("%q: %q was given out", ids, d.ID)
				}
			}
		}
	})
}

// FuzzGetPreferredAllocation holds that no request ends the program, and that the preferred devices
// are available ones, each of them once, with all that are required.
func FuzzGetPreferredAllocation(f *testing.F) {
	for _, size := range []int{0, 1, 3, -1, 1 << 30} {
		f.Add("G0,G1::0,G1::1,G9,G2", "G1::2", size)
	}
	s, _ := fuzzed()
	list := s.Latest().Lists[gpuName]
	f.Fuzz(func(t *testing.T, available, required string, size int) {
		all, must := strings.Split(available, ","), strings.Split(required, ",")
		got, err := list.Prefer(all, must, size)
		if err != nil {
			return
		}
		if len(got) < size {
			t.Errorf("%d devices for a request for %d", len(got), size)
		}
		for i, id := range got {
			if !slices.Contains(all, id) && !slices.Contains(must, id) || slices.Contains(got[:i], id) {
				t.Errorf("%q was preferred of %q and %q", id, all, must)
			}
		}
		for _, id := range must {
			if !slices.Contains(got, id) {
				t.Errorf("%q is required and not in %q", id, got)
			}
		}
	})
}

// fuzzed returns the State of four GPUs: G1 is shared, G2 is unhealthy, G3 is departing.
func fuzzed() (listing.State, *holders.Holders) {
	o := resource.Options{Sharing: resource.Sharing{Mode: resource.TimeSliced, OnePerRequest: true,
		Rules: []resource.SharingRule{{Name: gpuName, Devices: []resource.Ref{"1"}, Replicas: 3}}}}
	var gpus []inventory.GPU
	for i, uuid := range []string{"G0", "G1", "G2", "G3"} {
		gpus = append(gpus, inventory.GPU{UUID: uuid, Index: i, Health: inventory.Health{State: inventory.Healthy}})
	}
	gpus[2].Health.State = inventory.Unhealthy
	h, now := holders.New(), time.Unix(1, 0)
	s := listing.State{}.Add(gpuName, false, h, now)
	for _, n := range []int{4, 3} {
		s = listing.Next(s, resource.New(inventory.Snapshot{GPUs: gpus[:n]}, o), listing.Options{}, h, now)
	}
	return s, h
}
