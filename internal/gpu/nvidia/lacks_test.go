package nvidia_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// A lackingLibrary has no function of one name, in whatever version.
type lackingLibrary struct {
	nvml.Interface
	lacks    string
	lookedUp func(name string)
}

func (l *lackingLibrary) Extensions() nvml.ExtendedInterface { return l }

func (l *lackingLibrary) LookupSymbol(name string) error {
	if l.lookedUp != nil {
		l.lookedUp(name)
	}
	if name == l.lacks || strings.HasPrefix(name, l.lacks+"_v") && l.lacks != "" {
		return fmt.Errorf("undefined symbol: %s", name)
	}
	return l.Interface.Extensions().LookupSymbol(name)
}

// functionsOf returns the functions that a session looks for in the library of a node.
func functionsOf(t *testing.T, profile string) []string {
	t.Helper()
	node := newNode(t, profile)
	var names []string
	lib := &lackingLibrary{Interface: node.NVML(), lookedUp: func(name string) { names = append(names, name) }}
	s, err := nvidia.New(nvidia.Options{Library: lib, Root: node.Root()}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return names
}

// TestFunctionsOfNewerDrivers takes each function in turn from the library of a new driver, and has
// a call of it hang: who calls it all the same is seen. All GPUs are served, and all else that the
// daemon does is done or refused.
func TestFunctionsOfNewerDrivers(t *testing.T) {
	t.Parallel()
	tried := 0
	for _, function := range functionsOf(t, "dgx-h100") {
		if slices.Contains(requiredFunctions, function) {
			continue // TestMissingFunctions
		}
		t.Run(function, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				node := newNode(t, "dgx-h100")
				lib := node.NVML()
				if lib.Extensions().LookupSymbol(function) != nil {
					return // it cannot be simulated
				}
				if err := node.Inject(hang("", strings.TrimPrefix(function, "nvml"))); err != nil {
					return // it asks the driver for nothing
				}
				tried++
				r := &rig{t: t, ctx: t.Context(), node: node}
				r.driver = nvidia.New(nvidia.Options{Library: &lackingLibrary{Interface: lib, lacks: function},
					Root: node.Root()})
				s, err := r.driver.Open(r.ctx)
				if err != nil {
					t.Fatalf("%s: %v", function, err)
				}
				r.Session = s
				answered := func(what string, err error) {
					if errors.Is(err, inventory.ErrNoAnswer) {
						t.Errorf("%s is called, though the library lacks it: %s: %v", function, what, err)
					}
				}
				snapshot := r.scan()
				compare(t, "GPUs without "+function, 8, len(snapshot.GPUs))
				for _, g := range snapshot.GPUs {
					reading, err := r.Read(r.ctx, g.UUID)
					if answered("read", err); err != nil || reading.Contact != inventory.ContactGood {
						t.Errorf("%s: GPU %d: %+v, %v", function, g.Index, reading, err)
					}
				}
				uuid := snapshot.GPUs[0].UUID
				for range 2 { // some of what is measured is a difference
					_, err = r.Sample(r.ctx, uuid, true, noPause)
					answered("measure", err)
				}
				_, err = r.Processes(r.ctx, uuid)
				answered("processes", err)
				_, err = r.MemoryLimit(r.ctx, uuid, "/")
				answered("memory limit", err)
				_, err = r.SetComputeMode(r.ctx, uuid, inventory.ComputeExclusiveProcess)
				answered("compute mode", err)
				answered("clocks", r.Clean(r.ctx, uuid, inventory.RemnantClocks))
				answered("errors", r.Clean(r.ctx, uuid, inventory.RemnantECC))
				_, err = r.Partitions(r.ctx, uuid)
				answered("partitions", err)
				_, err = r.step(0, inventory.MIGStep{Action: inventory.MIGEnable})
				answered("MIG mode", err)
				gi, err := r.step(0, inventory.MIGStep{Action: inventory.MIGCreateInstance, Profile: 9, Start: 4,
					Size: 4})
				answered("instance", err)
				ci, err := r.step(0, inventory.MIGStep{Action: inventory.MIGCreateCompute, GI: gi, Start: 2, Size: 1})
				answered("compute instance", err)
				_, err = r.Partitions(r.ctx, uuid)
				answered("partitions", err)
				compare(t, "GPUs with an instance without "+function, 8, len(r.scan().GPUs))
				_, err = r.Sample(r.ctx, uuid, true, noPause)
				answered("measure with MIG", err)
				_, err = r.step(0, inventory.MIGStep{Action: inventory.MIGDestroyCompute, GI: gi, CI: ci})
				answered("destroy the compute instance", err)
				_, err = r.step(0, inventory.MIGStep{Action: inventory.MIGDestroyInstance, GI: gi})
				answered("destroy the instance", err)
				if calls := r.driver.Calls(); len(calls) > 0 {
					t.Errorf("calls that hang without %s: %v", function, calls)
				}
				for end := r.within(time.Minute); end.Err() == nil; {
					_, err = r.Next(end)
					answered("event", err)
				}
				r.inject(simulator.Fault{Kind: simulator.KindRestore})
				answered("close", r.Close(r.ctx))
			})
		})
	}
	if tried < 60 {
		t.Errorf("%d functions were tried", tried)
	}
}
