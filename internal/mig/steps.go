package mig

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// apply executes the steps of a change, and returns the resulting division of the GPU. The error
// says which step failed, or how the division differs from the plan. With forDesired, the steps
// stop when another layout is wanted.
func (r *reconciler) apply(ctx context.Context, c layout.GPUChange, forDesired bool) (layout.GPU, error) {
	err := ApplySteps(ctx, r.options.Driver, r.UUID, c, func() error {
		if forDesired && !reflect.DeepEqual(r.options.Desired.Value(), r.desired) {
			return errSuperseded
		}
		return nil
	})
	if err != nil {
		return layout.GPU{}, err
	}
	now, err := r.read(ctx, r.journal.record(r.UUID))
	switch {
	case err != nil:
		return now, err
	case now.Unread != "":
		return now, errors.New(now.Unread)
	}
	if text, want := describe(now.Mode, now.Instances), describeDivision(c.After); text != want {
		return now, fmt.Errorf("after all steps the GPU has %s, not %s", text, want)
	}
	return now, nil
}

// ApplySteps executes the steps of a change on a GPU until a step fails. It calls goOn
// before each step, and stops if goOn returns an error.
func ApplySteps(ctx context.Context, d Driver, uuid string, c layout.GPUChange, goOn func() error) error {
	created := map[int]int{} // IDs of GPU instances by their first slice
	for _, p := range c.After.Instances {
		created[p.Start] = p.ID
	}
	for _, s := range c.Steps {
		if err := goOn(); err != nil {
			return err
		}
		timeout := stepTimeout
		if s.Action == inventory.MIGEnable || s.Action == inventory.MIGDisable {
			timeout = modeTimeout
		}
		limited, cancel := context.WithTimeout(ctx, timeout)
		id, err := d.Repartition(limited, uuid, s.Call(created[s.Part.Start]))
		cancel()
		if err != nil {
			return err
		}
		if s.Action == inventory.MIGCreateInstance {
			created[s.Part.Start] = id
		}
	}
	return nil
}

// describeDivision is describe for a layout.Division.
func describeDivision(d layout.Division) string {
	var instances []inventory.GPUInstance
	for _, p := range d.Instances {
		instances = append(instances, p.GPUInstance)
	}
	return describe(d.Mode, instances)
}

// describe returns the division of a GPU as text. Two texts are equal if the mode, the GPU
// instances with their places, and the sizes of the compute instances in each are equal.
func describe(mode inventory.MIGMode, instances []inventory.GPUInstance) string {
	parts := []string{"MIG " + mode.String()}
	for _, i := range instances {
		text := fmt.Sprintf("%s at slice %d", i.Profile, i.Start)
		var sizes []string
		for _, c := range i.Computes {
			sizes = append(sizes, fmt.Sprintf("%dc", c.Slices))
		}
		slices.Sort(sizes)
		parts = append(parts, strings.TrimSpace(text+" "+strings.Join(sizes, " ")))
	}
	return strings.Join(parts, ", ")
}
