package dra

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
)

// Driver is the default name of the driver, as in NVIDIA's driver. In options and values, an empty
// name means this name.
const Driver = "gpu.nvidia.com"

// A Pool has the devices of a node.
type Pool struct {
	// Name is the name of the pool and of the node.
	Name string
	// Driver is the name of the publishing driver.
	Driver string
	// Slices are the devices in the scheduler's order. There is always at least one slice: a node
	// without devices has an empty slice.
	Slices []Slice
	// LeftOut are the GPUs and MIG devices outside the slices, with reasons: sentences without a
	// full stop.
	LeftOut []string
	// LinksDue reports whether attributes about links may be missing that will be known soon.
	LinksDue bool
}

// Equal reports whether two pools are the same.
func (p Pool) Equal(other Pool) bool {
	return p.Name == other.Name && p.Driver == other.Driver && p.LinksDue == other.LinksDue &&
		slices.Equal(p.LeftOut, other.LeftOut) &&
		slices.EqualFunc(p.Slices, other.Slices, Slice.Equal)
}

// A List has ResourceSlices in the form of kubectl.
type List struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Items      []ResourceSlice `json:"items"`
}

// A ResourceSlice is an object of resource.k8s.io/v1.
type ResourceSlice struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   Metadata          `json:"metadata"`
	Spec       ResourceSliceSpec `json:"spec"`
}

// Metadata is the name of an object.
type Metadata struct {
	Name string `json:"name"`
}

// ResourceSliceSpec adds the place of the devices to a Slice.
type ResourceSliceSpec struct {
	Driver   string       `json:"driver"`
	NodeName string       `json:"nodeName"`
	Pool     ResourcePool `json:"pool"`
	Slice
}

// ResourcePool is the pool of a Slice. The scheduler uses a pool only when it has all slices of one
// generation.
type ResourcePool struct {
	Name               string `json:"name"`
	Generation         int64  `json:"generation"`
	ResourceSliceCount int    `json:"resourceSliceCount"`
}

// List returns the ResourceSlices for the first publication of a pool.
func (p Pool) List() List {
	l := List{APIVersion: "v1", Kind: "List"}
	for i, slice := range p.Slices {
		l.Items = append(l.Items, ResourceSlice{
			APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice", Metadata: Metadata{p.SliceName(i)},
			Spec: ResourceSliceSpec{Driver: cmp.Or(p.Driver, Driver), NodeName: p.Name,
				Pool: ResourcePool{p.Name, 1, len(p.Slices)}, Slice: slice},
		})
	}
	return l
}

// A Slice is the content of a ResourceSlice: at most MaxSlice devices, or the counters of GPUs.
type Slice struct {
	SharedCounters []CounterSet `json:"sharedCounters,omitempty"`
	// Devices are nil only in a slice with counters.
	Devices []Device `json:"devices,omitzero"`
}

// Equal reports whether two slices have the same content, so that no write is needed.
func (s Slice) Equal(other Slice) bool {
	return slices.EqualFunc(s.Devices, other.Devices, Device.Equal) &&
		slices.EqualFunc(s.SharedCounters, other.SharedCounters, func(a, b CounterSet) bool {
			return a.Name == b.Name && maps.Equal(a.Counters, b.Counters)
		})
}

// A Device is a GPU or a MIG device in the scheduler's view.
type Device struct {
	// Name is "gpu-<number>" or "gpu-<number>-mig-<profile>-<profile ID>-<first memory slice>",
	// unique in the pool.
	Name string `json:"name"`
	// Attributes are by name; a name without a domain belongs to the domain of the driver's name.
	Attributes map[string]Attribute `json:"attributes"`
	Capacity   map[string]Capacity  `json:"capacity,omitempty"`
	// ConsumesCounters is the part of its GPU's counters taken by a device for claims.
	ConsumesCounters []CounterUse `json:"consumesCounters,omitempty"`
	// Taints keep away new claims without a matching toleration; none for a device that can be
	// given new work.
	Taints []Taint `json:"taints,omitempty"`
	// Partition is created when a claim gets the device; nil for an existing device.
	Partition *Partition `json:"-"`
	// Switched reports whether the MIG mode of a whole GPU is switched off when a claim gets it.
	Switched bool `json:"-"`
	// SmallestShare is the smallest part of the memory of a shared device for a claim, in bytes; 0
	// for a device for one claim.
	SmallestShare Capacity `json:"-"`
	// SharedBy is ByCount or Unlimited for a device with shares for claims without a request; empty
	// for any other.
	SharedBy ShareBy `json:"-"`
}

// Equal reports whether two devices are the same for the API. The API has neither Partition nor
// Switched, but the name and the counters reveal them.
func (d Device) Equal(other Device) bool {
	return d.Name == other.Name && maps.Equal(d.Attributes, other.Attributes) &&
		maps.Equal(d.Capacity, other.Capacity) && d.SmallestShare == other.SmallestShare &&
		d.SharedBy == other.SharedBy && slices.EqualFunc(d.Taints, other.Taints, Taint.Equal) &&
		slices.EqualFunc(d.ConsumesCounters, other.ConsumesCounters, func(a, b CounterUse) bool {
			return a.CounterSet == b.CounterSet && maps.Equal(a.Counters, b.Counters)
		})
}

// An AttributeType is the type of an attribute's value in selectors.
type AttributeType string

// The types.
const (
	String  AttributeType = "string"
	Version AttributeType = "version" // a semantic version
	Int     AttributeType = "int"
	Bool    AttributeType = "bool" // in no slice
)

// An Attribute is the value of an attribute.
type Attribute struct {
	Type AttributeType
	// Value is the value as text.
	Value string
}

// MarshalJSON returns {"<type>": <value>}.
func (a Attribute) MarshalJSON() ([]byte, error) {
	if a.Type == Int || a.Type == Bool {
		return fmt.Appendf(nil, `{"%s":%s}`, a.Type, a.Value), nil
	}
	return json.Marshal(map[AttributeType]string{a.Type: a.Value})
}

// A Capacity is an amount of a resource of a device.
type Capacity int64

// MarshalJSON returns {"value": "<quantity>"}, with a Kubernetes quantity.
func (c Capacity) MarshalJSON() ([]byte, error) {
	text, err := amount(c).MarshalText()
	return fmt.Appendf(nil, `{"value":%q}`, text), err
}

// String returns the Kubernetes quantity.
func (c Capacity) String() string {
	text, _ := amount(c).MarshalText() // never fails for a number
	return string(text)
}

// An amount is a number in the form of a Kubernetes quantity.
type amount int64

// MarshalText returns the Kubernetes quantity.
func (a amount) MarshalText() ([]byte, error) {
	suffixes, value := []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"}, int64(a)
	for value >= 1024 && value%1024 == 0 {
		value, suffixes = value/1024, suffixes[1:]
	}
	return append(strconv.AppendInt(nil, value, 10), suffixes[0]...), nil
}

// UnmarshalText reads any form of a Kubernetes quantity.
func (a *amount) UnmarshalText(text []byte) error {
	value, ok := quantity(string(text))
	if !ok {
		return fmt.Errorf("%q is not a quantity", text)
	}
	*a = amount(value)
	return nil
}

// A Taint says why a device must not be given to new work.
type Taint struct {
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	// Effect is NoSchedule: running pods with the device continue.
	Effect string `json:"effect"`
	// TimeAdded is the time of the taint in whole seconds; nil if unknown.
	TimeAdded *time.Time `json:"timeAdded,omitempty"`
}

// Equal reports whether two taints are the same.
func (t Taint) Equal(other Taint) bool {
	if t.TimeAdded == nil || other.TimeAdded == nil {
		return t == other
	}
	same := t.TimeAdded.Equal(*other.TimeAdded)
	t.TimeAdded, other.TimeAdded = nil, nil
	return same && t == other
}
