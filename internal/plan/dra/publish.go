package dra

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
)

// maxName is the longest name of an object.
const maxName = 253

// SliceName returns the name of the ResourceSlice with slice i of the pool. The scheduler tries the
// slices of a pool in the order of their names. A number of two digits follows an a, a number of
// three digits follows a b: names sort like their numbers.
func (p Pool) SliceName(i int) string {
	number := strconv.Itoa(i)
	if digits := len(number); digits > 1 {
		number = string(rune('a'+digits-2)) + number
	}
	node, rest := p.Name, "-"+cmp.Or(p.Driver, Driver)+"-"+number
	if len(node)+len(rest) > maxName {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(node)) // never fails
		rest = fmt.Sprintf("-%08x%s", hash.Sum32(), rest)
		node = node[:maxName-len(rest)]
	}
	return node + rest
}

// A PublishedSlice is a ResourceSlice of the node and the driver at the API server.
type PublishedSlice struct {
	// Pool is the pool's name, Generation the pool's generation, and Count the number of slices in
	// that generation.
	Pool       string
	Generation int64
	Count      int
	Slice      Slice
}

// A Write is one write to the API server.
type Write struct {
	// Name is the name of the ResourceSlice.
	Name string
	// Remove deletes the slice. Otherwise the slice gets the content Published; New creates it.
	Remove, New bool
	Published   PublishedSlice
}

// Next returns the next write toward the pool at the API server; false if nothing is to be written.
// The argument there has all slices of the node and the driver, by name. Last is the generation of
// the last written pool, 0 for none; same reports whether a slice needs no write.
//
// The scheduler uses a pool only with all slices of the newest generation. A single changed slice
// is therefore one write in the same generation. With several changed slices, the first write
// begins a new generation, and the scheduler does not use the pool until the last write: it never
// sees a part of the changes.
func Next(
	p Pool, there map[string]PublishedSlice, last int64, same func(name string, want, is Slice) bool,
) (Write, bool) {
	wanted := map[string]Slice{}
	for i, slice := range p.Slices {
		wanted[p.SliceName(i)] = slice
	}
	newest, others := int64(0), []string{}
	for _, name := range slices.Sorted(maps.Keys(there)) {
		is := there[name]
		if _, ok := wanted[name]; !ok {
			others = append(others, name)
		}
		if is.Pool != p.Name { // another pool with these GPUs would offer them twice
			return Write{Name: name, Remove: true}, true
		}
		newest = max(newest, is.Generation)
	}
	generation, differing, incomplete := newest, []string{}, false
	if len(there) == 0 {
		generation = max(last, 1)
	}
	for name, is := range there {
		want, ok := wanted[name]
		switch {
		case is.Generation == newest && (!ok || is.Count != len(wanted)):
			generation = newest + 1 // the number of slices has changed
		case is.Generation < newest:
			incomplete = incomplete || ok
		case !same(name, want, is.Slice):
			differing = append(differing, name)
		}
	}
	slices.Sort(differing)
	for name := range wanted {
		if _, ok := there[name]; !ok {
			incomplete = true
		}
	}
	if len(differing) > 1 && !incomplete {
		generation = newest + 1
	}
	write := func(name string) (Write, bool) {
		_, has := there[name]
		return Write{Name: name, New: !has, Published: PublishedSlice{p.Name, generation, len(wanted), wanted[name]}},
			true
	}
	if generation == newest && len(differing) > 0 {
		return write(differing[0]) // before the slices that complete the pool
	}
	for i := range p.Slices {
		if is, ok := there[p.SliceName(i)]; !ok || is.Generation != generation {
			return write(p.SliceName(i))
		}
	}
	if len(others) > 0 {
		return Write{Name: others[0], Remove: true}, true
	}
	return Write{}, false
}

// GPUs returns the UUIDs of the GPUs with devices in a slice.
func (s Slice) GPUs() map[string]bool {
	gpus := map[string]bool{}
	for _, d := range s.Devices {
		gpus[d.GPU()] = true
	}
	return gpus
}

// GPU returns the UUID of the device's GPU.
func (d Device) GPU() string {
	if parent := d.Attributes["parentUUID"].Value; parent != "" {
		return parent
	}
	return d.Attributes["uuid"].Value
}

// Dropped says which parts of slices an API server does not store, because their feature gates are
// off.
type Dropped struct {
	Taints, Counters, Shares bool
}

// Without returns the pool for an API server that does not store some parts. Devices that are safe
// only with such a part are left out; shared devices are allocated as a whole.
func (p Pool) Without(dropped Dropped) Pool {
	if dropped.Taints {
		p = p.Untainted()
	}
	if dropped.Counters {
		p = p.Unpartitioned()
	}
	if dropped.Shares {
		p = p.Unshared()
	}
	return p
}

// Unpublished returns the UUIDs of the pool's GPUs of which no device is left for an API server that
// does not store some parts, with the reasons, which are sentences without a full stop.
func (p Pool) Unpublished(dropped Dropped) map[string]string {
	offered, reasons := map[string]bool{}, map[string]string{}
	for _, slice := range p.Without(dropped).Slices {
		maps.Copy(offered, slice.GPUs())
	}
	for _, slice := range p.Slices {
		for _, d := range slice.Devices {
			switch gpu := d.GPU(); {
			case offered[gpu]:
			case dropped.Taints && len(d.Taints) > 0:
				reasons[gpu] = "the API server drops its taint " + d.Taints[0].Key
			default:
				reasons[gpu] = "the API server drops the counters of the MIG devices that can be created on it"
			}
		}
	}
	return reasons
}

// Untainted returns the pool without tainted devices.
func (p Pool) Untainted() Pool {
	p.Slices = slices.Clone(p.Slices)
	for i, slice := range p.Slices {
		devices := slices.DeleteFunc(slices.Clone(slice.Devices), func(d Device) bool { return len(d.Taints) > 0 })
		p.Slices[i].Devices = devices // nil stays nil
	}
	return p
}

// Withheld returns the pool without devices: this driver offers none for now.
func (p Pool) Withheld() Pool {
	if len(p.Slices) > 0 {
		p.Slices = []Slice{{Devices: []Device{}}}
	}
	return p
}

// Timed returns a slice whose taints without a time get the time of the same taint in another
// slice.
func (s Slice) Timed(other Slice) Slice {
	before := map[string][]Taint{}
	for _, d := range other.Devices {
		before[d.Name] = d.Taints
	}
	s.Devices = slices.Clone(s.Devices)
	for i, d := range s.Devices {
		s.Devices[i].Taints = slices.Clone(d.Taints)
		for j, t := range d.Taints {
			k := slices.IndexFunc(before[d.Name], func(o Taint) bool {
				return o.Key == t.Key && o.Value == t.Value && o.Effect == t.Effect
			})
			if t.TimeAdded == nil && k >= 0 {
				s.Devices[i].Taints[j].TimeAdded = before[d.Name][k].TimeAdded
			}
		}
	}
	return s
}

// Worse reports whether a device of the slice must not be given to new work any more: a new taint
// in comparison with the other slice, or no such device there.
func (s Slice) Worse(other Slice) bool {
	is := map[string]Device{}
	for _, d := range other.Devices {
		is[d.Name] = d
	}
	return slices.ContainsFunc(s.Devices, func(d Device) bool {
		now, has := is[d.Name]
		return !has || slices.ContainsFunc(now.Taints, func(t Taint) bool {
			return !slices.ContainsFunc(d.Taints, func(o Taint) bool { return o.Key == t.Key })
		})
	})
}

// ShowsTainted reports whether a device with a taint is in the slice, and not in the other one.
func (s Slice) ShowsTainted(other Slice) bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool {
		return len(d.Taints) > 0 && !slices.ContainsFunc(other.Devices, func(o Device) bool { return o.Name == d.Name })
	})
}

// UnmarshalJSON reads the output of MarshalJSON. A value of an unknown type stays text.
func (a *Attribute) UnmarshalJSON(text []byte) error {
	var fields map[AttributeType]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	for kind, value := range fields {
		a.Type, a.Value = kind, string(value)
		if kind == String || kind == Version {
			return json.Unmarshal(value, &a.Value)
		}
	}
	return nil
}

// UnmarshalJSON reads a capacity in any form of Kubernetes.
func (c *Capacity) UnmarshalJSON(text []byte) error {
	var field struct {
		Value amount `json:"value"`
	}
	err := json.Unmarshal(text, &field)
	*c = Capacity(field.Value)
	return err
}

// Tainted reports whether a device of the slice has a taint.
func (s Slice) Tainted() bool {
	return slices.ContainsFunc(s.Devices, func(d Device) bool { return len(d.Taints) > 0 })
}
