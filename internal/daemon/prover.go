package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// A Prover proves that CUDA works on devices, each in a process of its own.
type Prover struct {
	// DriverRoot is where the driver is, as this process sees it.
	DriverRoot string
	// Simulated says that the node is. Its GPUs cannot compute: without a libcuda below the driver root they count as proven.
	Simulated bool
}

// Prove proves that CUDA works on a device, by UUID.
func (p Prover) Prove(ctx context.Context, uuid string) cuda.Proof {
	if p.Simulated && driverroot.Locate(p.DriverRoot, cuda.Library) == "" {
		ended := make(chan struct{})
		close(ended)
		return cuda.Proof{Ended: ended}
	}
	return cuda.Run(ctx, p.DriverRoot, uuid)
}

// A Provable is a device on which CUDA can be proven to work: a GPU without multi-instance mode, or a MIG device.
type Provable struct {
	// Index is the GPU's index "i" or the MIG device's "i:j".
	Index string
	UUID  string
	// GPU is the UUID of the physical GPU, and GI the GPU instance of a MIG device; 0 for a GPU.
	GPU string
	GI  int
	// Model is the GPU's, and the profile of a MIG device.
	Model string
}

// Provables returns those of a Snapshot.
func Provables(s inventory.Snapshot) []Provable {
	var all []Provable
	for _, g := range s.GPUs {
		if g.MIG != inventory.MIGEnabled {
			all = append(all, Provable{Index: fmt.Sprint(g.Index), UUID: g.UUID, GPU: g.UUID, Model: g.Model})
		}
		for _, m := range g.MIGDevices {
			all = append(all, Provable{
				Index: fmt.Sprintf("%d:%d", g.Index, m.Index), UUID: m.UUID, GPU: g.UUID, GI: m.GI, Model: g.Model + " " + m.Profile,
			})
		}
	}
	return all
}

// ErrNoSuchDevice says that a device is not there, or cannot be proven.
var ErrNoSuchDevice = errors.New("no such device")

// SelectProvables returns the devices with the given indexes or UUIDs, and those of the GPUs with them; all if none is given.
func SelectProvables(all []Provable, names []string) ([]Provable, error) {
	is := func(p Provable, name string) bool {
		index, _, _ := strings.Cut(p.Index, ":")
		return name == p.Index || name == p.UUID || name == p.GPU || name == index
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(p Provable) bool { return is(p, name) }) {
			return nil, fmt.Errorf("%w: %q is the index or UUID of no GPU without MIG mode and of no MIG device", ErrNoSuchDevice, name)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(p Provable) bool {
		return len(names) > 0 && !slices.ContainsFunc(names, func(name string) bool { return is(p, name) })
	}), nil
}

// Computes returns the processes that compute on the device, of those on its GPU. One of which the driver does not say where it is may be
// on each.
func (p Provable) Computes(processes []inventory.Process) []inventory.Process {
	return slices.DeleteFunc(slices.Clone(processes), func(c inventory.Process) bool {
		return p.UUID != p.GPU && c.GI.Known && c.GI.Value != p.GI
	})
}
