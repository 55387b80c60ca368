package layout

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A GPU has the facts for planning a change of its layout.
type GPU struct {
	Index       int
	UUID, Model string
	inventory.Partitions
	// InUse are the IDs of the GPU instances in use.
	InUse map[int]bool
}

// Changes are the effects of a layout on the GPUs of a node.
type Changes struct {
	Layout string
	GPUs   []GPUChange
	// Warnings name items of the layout without a GPU on the node.
	Warnings []string
}

// Possible reports whether the layout is possible on all its GPUs.
func (c Changes) Possible() bool {
	return !slices.ContainsFunc(c.GPUs, func(g GPUChange) bool { return g.Reason != "" })
}

// A GPUChange is the effect of a layout on one GPU.
type GPUChange struct {
	GPU GPU
	// Before and After are the divisions of the GPU. They are the same if the layout is impossible
	// or does not concern the GPU.
	Before, After Division
	// Steps lead from Before to After, in this order; none if there is nothing to do.
	Steps []Step
	// Reason says why the layout is impossible on this GPU, with the remedy; empty if possible.
	Reason string
	// Note says why the layout does not concern this GPU; empty otherwise.
	Note string
}

// A Division is the division of a GPU into instances.
type Division struct {
	Mode inventory.MIGMode
	// Slices is the number of memory slices of the GPU, 0 if unknown.
	Slices int
	// Instances are by ascending Start.
	Instances []Part
}

// A Part is a GPU instance of a Division. It has no ID before its creation.
type Part struct {
	inventory.GPUInstance
	// ComputeSlices is the number of slices for the compute instances together.
	ComputeSlices int
	// Exists reports whether the instance exists before the change, and InUse whether it is then in
	// use.
	Exists, InUse bool

	profile int // the driver's ID of the profile of a new instance
}

// Devices returns the names of the MIG devices of the instance.
func (i Part) Devices() []string {
	names := make([]string, len(i.Computes))
	for n, c := range i.Computes {
		names[n] = deviceName(c.Slices, i.ComputeSlices, i.Profile)
	}
	return names
}

// A Step is one call of the driver.
type Step struct {
	Action inventory.MIGAction
	// Part is the GPU instance of the step, unless the step changes the mode. An instance from an
	// earlier step has no ID; Start identifies it.
	Part Part
	// Compute is the created or destroyed compute instance.
	Compute inventory.ComputeInstance
}

// Call returns the step for the driver. The GPU instance of a new compute instance has the given
// ID.
func (s Step) Call(gi int) inventory.MIGStep {
	call := inventory.MIGStep{Action: s.Action}
	switch s.Action {
	case inventory.MIGDestroyCompute:
		call.GI, call.CI = s.Part.ID, s.Compute.ID
	case inventory.MIGDestroyInstance:
		call.GI = s.Part.ID
	case inventory.MIGCreateInstance:
		call.Profile, call.Start, call.Size = s.Part.profile, s.Part.Start, s.Part.Size
	case inventory.MIGCreateCompute:
		call.GI, call.Start, call.Size = gi, s.Compute.Start, s.Compute.Slices
	default: // changes the mode
	}
	return call
}

// Plan returns the effects of a layout on GPUs, by ascending index.
func Plan(l Layout, gpus []GPU) Changes {
	c := Changes{Layout: l.Name}
	gpus = slices.Clone(gpus)
	order.Sort(gpus, func(a, b GPU) int { return a.Index - b.Index })
	for _, g := range gpus {
		c.GPUs = append(c.GPUs, change(l, g))
	}
	for _, item := range l.Items {
		for _, index := range item.Indexes {
			if !slices.ContainsFunc(gpus, func(g GPU) bool { return g.Index == index }) {
				c.Warnings = append(c.Warnings, fmt.Sprintf("the layout names GPU %d, and there is no such GPU", index))
			}
		}
		for _, uuid := range item.UUIDs {
			if !slices.ContainsFunc(gpus, func(g GPU) bool { return g.UUID == uuid }) {
				c.Warnings = append(c.Warnings, fmt.Sprintf("the layout names %s, and there is no such GPU", uuid))
			}
		}
	}
	return c
}

// noItem is the Note of a GPU without an item in the layout.
const noItem = "the layout has no item for this GPU"

// Unmatched returns the reason if the layout has no item for any of the GPUs, otherwise an empty
// text. The reason names the layouts of the file with items for these GPUs, or the possible
// layouts.
func Unmatched(name string, file *File, changes []GPUChange) string {
	if len(changes) == 0 || slices.ContainsFunc(changes, func(c GPUChange) bool { return c.Note != noItem }) {
		return ""
	}
	var devices, fit, could []string
	for _, c := range changes {
		devices = append(devices, fmt.Sprintf("0x%08X", c.GPU.PCIDevice))
		could = append(could, names(profilesOf(c.GPU))...)
	}
	if file != nil {
		for _, other := range file.Names() {
			l := Layout{Name: other, Items: file.layouts[other]}
			if slices.ContainsFunc(changes, func(c GPUChange) bool {
				c = change(l, c.GPU)
				return c.Reason == "" && c.Note == ""
			}) {
				fit = append(fit, other)
			}
		}
	}
	text := fmt.Sprintf("the layout %s has no item for any GPU of this node (PCI device %s); ",
		name, strings.Join(distinct(devices), ", "))
	switch {
	case len(fit) > 0:
		return text + "layouts that have one: " + inventory.Few(fit)
	case len(could) > 0:
		return text + "add an item for them; the GPUs have the profiles " + strings.Join(distinct(could), ", ")
	}
	return text + "add an item for them"
}

// RefuseUnmatched makes the layout impossible on all GPUs if it has no item for any of them.
func (c *Changes) RefuseUnmatched(file *File) {
	if reason := Unmatched(c.Layout, file, c.GPUs); reason != "" {
		for i := range c.GPUs {
			c.GPUs[i].Reason, c.GPUs[i].Note = reason, ""
		}
	}
}

// distinct returns each word once, in the order of first occurrence.
func distinct(words []string) (once []string) {
	for _, w := range words {
		if !slices.Contains(once, w) {
			once = append(once, w)
		}
	}
	return once
}

// Restore returns the steps back to an earlier division of a GPU: the mode, and the instances at
// their places. Instances get new IDs.
func Restore(g GPU, mode inventory.MIGMode, instances []inventory.GPUInstance) GPUChange {
	now := division(g)
	c := GPUChange{GPU: g, Before: now, After: now}
	if g.Unread != "" && mode == inventory.MIGEnabled {
		c.Reason = g.Unread
		return c
	}
	after := Division{Mode: mode, Slices: now.Slices}
	profiles := profilesOf(g)
	for _, had := range instances {
		same := func(i Part) bool {
			return i.Profile == had.Profile && i.Start == had.Start && i.Size == had.Size &&
				(len(i.Computes) == 0 || len(had.Computes) == 0 || sameComputes(i.Computes, had.Computes))
		}
		if at := slices.IndexFunc(now.Instances, same); at >= 0 {
			kept := now.Instances[at]
			if len(kept.Computes) == 0 {
				kept.Computes = had.Computes
			}
			after.Instances = append(after.Instances, kept)
			continue
		}
		at := slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.Name == had.Profile })
		if at < 0 {
			c.Reason = "the GPU has no profile " + had.Profile + " any more"
			return c
		}
		s, _ := parseSize(had.Profile)
		had.ID = 0
		after.Instances = append(after.Instances, Part{GPUInstance: had, ComputeSlices: s.slices,
			profile: profiles[at].ID})
	}
	order.Sort(after.Instances, func(a, b Part) int { return a.Start - b.Start })
	c.After, c.Steps = after, steps(g, now, after)
	return c
}

// change returns the effect of a layout on a GPU.
func change(l Layout, g GPU) GPUChange {
	now := division(g)
	c := GPUChange{GPU: g, Before: now, After: now}
	var item *Item
	for i := range l.Items {
		if l.Items[i].matches(g) {
			item = &l.Items[i]
		}
	}
	switch {
	case item == nil:
		c.Note = noItem
		return c
	case g.Mode == inventory.MIGUnsupported && (item.All || !item.Enabled):
		c.Note = "the GPU has no multi-instance mode"
		return c
	case g.Mode == inventory.MIGUnsupported:
		c.Reason = "the GPU has no multi-instance mode: leave it out of the layout"
		return c
	case g.Unread != "":
		c.Reason = g.Unread
		return c
	}
	after, err := item.apply(g)
	if err != nil {
		c.Reason = err.Error()
		return c
	}
	c.After, c.Steps = after, steps(g, now, after)
	return c
}

// division returns the present division of a GPU.
func division(g GPU) Division {
	if g.Unread != "" {
		return Division{Mode: g.Mode}
	}
	d := Division{Mode: g.Mode, Slices: memorySlices(profilesOf(g))}
	for _, i := range g.Instances {
		s, _ := parseSize(i.Profile) // an unknown name has no slices
		d.Instances = append(d.Instances, Part{GPUInstance: i, ComputeSlices: s.slices, Exists: true,
			InUse: g.InUse[i.ID]})
		d.Slices = max(d.Slices, i.Start+i.Size)
	}
	return d
}

// profilesOf returns the profiles of a GPU, from the driver or from the tables. Impossible profiles
// are omitted.
func profilesOf(g GPU) []inventory.MIGProfile {
	if len(g.Profiles) == 0 {
		return models[g.PCIDevice>>16]
	}
	var profiles []inventory.MIGProfile
	for _, p := range g.Profiles {
		impossible := func(start int) bool { return start < 0 || start+p.Size > maxSlices }
		again := func(o inventory.MIGProfile) bool { return o.Name == p.Name }
		if s, err := parseSize(p.Name); err == nil && s.compute == s.slices && p.Size > 0 && p.Count > 0 &&
			!slices.ContainsFunc(p.Starts, impossible) && !slices.ContainsFunc(profiles, again) {
			profiles = append(profiles, p)
		}
	}
	return profiles
}

// maxSlices is more memory slices than any GPU has.
const maxSlices = 64

// memorySlices returns the number of memory slices of a GPU with these profiles.
func memorySlices(profiles []inventory.MIGProfile) int {
	n := 0
	for _, p := range profiles {
		n = max(n, p.Size)
	}
	return n
}

// apply returns the division of a GPU under the item.
func (item Item) apply(g GPU) (Division, error) {
	now := division(g)
	after := Division{Mode: inventory.MIGDisabled, Slices: now.Slices}
	if !item.Enabled {
		return after, nil
	}
	after.Mode = inventory.MIGEnabled
	if item.Devices == nil {
		after.Instances = now.Instances
		return after, nil
	}
	kinds, err := item.kinds(profilesOf(g))
	if err != nil {
		return Division{}, err
	}
	have := make([]existingInstance, len(now.Instances))
	for i, e := range now.Instances {
		have[i] = existingInstance{e.GPUInstance, costInstance}
		if e.InUse {
			have[i].cost = costInUse
		}
	}
	found, ok := solve(kinds, now.Slices, have, false)
	if !ok {
		return Division{}, errors.New(unplaceable(kinds, now.Slices))
	}
	for _, s := range found {
		k := kinds[s.kind]
		instance := Part{ComputeSlices: k.slices, profile: k.profile.ID, GPUInstance: inventory.GPUInstance{
			Profile: k.profile.Name, Start: s.start, Size: k.profile.Size, Computes: k.computes,
		}}
		if s.existingIndex >= 0 {
			instance = now.Instances[s.existingIndex]
			if len(instance.Computes) == 0 {
				instance.Computes = k.computes
			}
		}
		after.Instances = append(after.Instances, instance)
	}
	return after, nil
}

// kinds returns the item's instances on a GPU with these profiles, largest first, or why the GPU
// has no room for them in any placement.
func (item Item) kinds(profiles []inventory.MIGProfile) ([]instanceKind, error) {
	if len(profiles) == 0 {
		return nil, errors.New(
			"the profiles of this GPU are not known: run this as root to read them from the driver")
	}
	byInstance := map[string][]int{} // the wanted compute instances in instances of a profile
	for _, name := range slices.Sorted(maps.Keys(item.Devices)) {
		s, err := parseSize(name)
		if err != nil {
			return nil, err
		}
		byInstance[s.instance()] = append(byInstance[s.instance()],
			slices.Repeat([]int{s.compute}, item.Devices[name])...)
	}
	var kinds []instanceKind
	for _, name := range slices.Sorted(maps.Keys(byInstance)) {
		at := slices.IndexFunc(profiles, func(p inventory.MIGProfile) bool { return p.Name == name })
		if at < 0 {
			return nil, fmt.Errorf("the GPU has no profile %s: give some of %s", name,
				strings.Join(names(profiles), ", "))
		}
		s, _ := parseSize(name)
		packed := pack(byInstance[name], s.slices, profiles[at].Count)
		if packed == nil {
			return nil, fmt.Errorf("the GPU has room for %d of %s, and %s: want fewer", profiles[at].Count, name,
				wanted(item.Devices, name))
		}
		for _, computes := range packed {
			same := func(k instanceKind) bool { return k.profile.Name == name && sameComputes(k.computes, computes) }
			if i := slices.IndexFunc(kinds, same); i >= 0 {
				kinds[i].count++
				continue
			}
			kinds = append(kinds, instanceKind{profile: profiles[at], slices: s.slices, computes: computes, count: 1})
		}
	}
	order.Sort(kinds, func(a, b instanceKind) int {
		return cmp.Or(cmp.Compare(b.profile.Size, a.profile.Size), cmp.Compare(b.slices, a.slices))
	})
	for i, a := range kinds {
		for _, b := range kinds[:i] {
			if clash(a.profile.Name, b.profile.Name) {
				return nil, fmt.Errorf("%s and %s cannot be on one GPU, because there are not enough media engines: %s",
					b.profile.Name, a.profile.Name, fits(kinds, memorySlices(profiles)))
			}
		}
	}
	return kinds, nil
}

// wanted returns the wanted devices in instances of a profile.
func wanted(devices map[string]int, instance string) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		if s, _ := parseSize(name); s.instance() == instance { // parsed before
			parts = append(parts, fmt.Sprintf("%d of %s", devices[name], name))
		}
	}
	return strings.Join(parts, ", ") + " are wanted"
}

// names returns the names of profiles.
func names(profiles []inventory.MIGProfile) []string {
	names := make([]string, len(profiles))
	for i, p := range profiles {
		names[i] = p.Name
	}
	return names
}

// unplaceable returns why kinds do not fit together, and the kinds that fit.
func unplaceable(kinds []instanceKind, slices int) string {
	sizes := 0
	for _, k := range kinds {
		sizes += k.count * k.profile.Size
	}
	if sizes > slices {
		return fmt.Sprintf("the instances need %d memory slices, and the GPU has %d: %s", sizes, slices,
			fits(kinds, slices))
	}
	return "there is no placement for all of these instances at once: " + fits(kinds, slices)
}

// fits describes the wanted instances that fit.
func fits(kinds []instanceKind, memorySlices int) string {
	found, _ := solve(kinds, memorySlices, nil, true)
	counts := make([]int, len(kinds))
	for _, s := range found {
		counts[s.kind]++
	}
	var parts []string
	for i, k := range kinds {
		if counts[i] > 0 {
			instance := Part{GPUInstance: inventory.GPUInstance{Profile: k.profile.Name, Computes: k.computes},
				ComputeSlices: k.slices}
			parts = append(parts, fmt.Sprintf("%d of %s", counts[i], strings.Join(instance.Devices(), " with ")))
		}
	}
	return "of them, " + strings.Join(parts, ", ") + " would fit"
}

// steps returns the steps from one division of a GPU to another.
func steps(g GPU, before, after Division) []Step {
	var list []Step
	kept := func(i Part) bool {
		return slices.ContainsFunc(after.Instances, func(o Part) bool { return o.Exists && o.ID == i.ID })
	}
	for _, i := range before.Instances {
		if kept(i) {
			continue
		}
		for _, c := range i.Computes {
			list = append(list, Step{Action: inventory.MIGDestroyCompute, Part: i, Compute: c})
		}
		list = append(list, Step{Action: inventory.MIGDestroyInstance, Part: i})
	}
	if g.Mode != after.Mode || g.Pending != after.Mode {
		action := inventory.MIGDisable
		if after.Mode == inventory.MIGEnabled {
			action = inventory.MIGEnable
		}
		list = append(list, Step{Action: action})
	}
	largest := slices.Clone(after.Instances)
	order.Sort(largest, func(a, b Part) int { return b.Size - a.Size })
	for _, i := range largest {
		had := 0
		if i.Exists {
			at := slices.IndexFunc(before.Instances, func(o Part) bool { return o.ID == i.ID })
			had = len(before.Instances[at].Computes)
		} else {
			list = append(list, Step{Action: inventory.MIGCreateInstance, Part: i})
		}
		if had == 0 {
			for _, c := range i.Computes {
				list = append(list, Step{Action: inventory.MIGCreateCompute, Part: i, Compute: c})
			}
		}
	}
	return list
}
