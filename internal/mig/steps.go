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

// make makes the steps of a change, and returns how the GPU is divided then. The error says which
// step failed, or how the GPU differs. Steps for the Wish end when there is another one.
func (t *turn) make(ctx context.Context, c layout.GPUChange, forWish bool) (layout.GPU, error) {
	err := Make(ctx, t.options.Driver, t.UUID, c, func() error {
		if forWish && !reflect.DeepEqual(t.options.Wishes.Value(), t.wish) {
			return errOvertaken
		}
		return nil
	})
	if err != nil {
		return layout.GPU{}, err
	}
	now, err := t.read(ctx, t.journal.record(t.UUID))
	switch {
	case err != nil:
		return now, err
	case now.Unread != "":
		return now, errors.New(now.Unread)
	}
	if text, want := row(now.Mode, now.Instances), rowOf(c.After); text != want {
		return now, fmt.Errorf("after all steps the GPU has %s, not %s", text, want)
	}
	return now, nil
}

// Make makes the steps of a change of a GPU, by UUID, until one fails. An error of goOn, which is
// called before each step, ends it, too.
func Make(ctx context.Context, d Driver, uuid string, c layout.GPUChange, goOn func() error) error {
	created := map[int]int{} // the IDs of GPU instances by their first slice
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

// rowOf is row of a Division.
func rowOf(d layout.Division) string {
	var instances []inventory.GPUInstance
	for _, p := range d.Instances {
		instances = append(instances, p.GPUInstance)
	}
	return row(d.Mode, instances)
}

// row says how a GPU is divided: the same for the same mode, the same GPU instances at the same
// places, and the same sizes of compute instances in each.
func row(mode inventory.MIGMode, instances []inventory.GPUInstance) string {
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
