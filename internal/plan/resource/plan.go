package resource

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/topology"
)

// A Plan is everything that the node offers at one time. It is immutable.
type Plan struct {
	// Resources are the resources to serve, by ascending Name. A resource with only unhealthy
	// devices is included; a resource without devices is not.
	Resources []Resource
	// LeftOut are the devices of the node without a resource, by ascending index, except for
	// NotOffered ones.
	LeftOut []LeftOut
	// Warnings are sentences for the operator about unexpected parts of the plan. They include the
	// devices in LeftOut, except for excluded ones.
	Warnings []string
	// Holds are the holds on devices of the plan, by row, and then in the order of the devices. Each
	// has the name of its resource, except for devices of another owner: these have no resource.
	Holds []Hold

	node map[string]Device // by UUID: the devices of the node, offered or not
}

// LeftOut is a device without a resource, and why.
type LeftOut struct {
	// UUID is the UUID of the GPU or MIG device.
	UUID string
	// Index is the GPU's index "i" or the MIG device's "i:j".
	Index string
	// Reason is a sentence without a full stop.
	Reason string
	// Excluded devices match an excluding selector. Refused devices have options that cannot be
	// served, such as more replicas than the kubelet accepts. With neither, the device does not
	// suit the options in its present state.
	Excluded, Refused bool
}

// A planner makes one Plan.
type planner struct {
	options   Options
	control   inventory.ControlNodes
	cuda      string            // inventory.Driver.CUDA
	driver    string            // inventory.Driver.Version
	unread    map[int]string    // why MIG devices of a GPU could not be read, by the index of the GPU
	resources map[string]*draft // by name
	units     []unitGPU
	unitGPUs  map[string]unitsOf // by UUID; nil without units
	plan      Plan
}

// New returns the Plan of a node with this Snapshot and these Options. A stale Snapshot counts like
// any other: its devices were there in the last successful scan. Equal arguments give equal Plans.
func New(snapshot inventory.Snapshot, o Options) Plan {
	p := planner{
		options: o, control: snapshot.Control, cuda: snapshot.Driver.CUDA, driver: snapshot.Driver.Version,
		resources: map[string]*draft{}, unread: map[int]string{},
	}
	for _, l := range snapshot.LeftOut {
		p.unread[l.Index] = l.Reason
	}
	all := candidates(snapshot.GPUs, o.MIG)
	p.plan.node = make(map[string]Device, len(all))
	for _, c := range all {
		if p.unfit(c) == "" {
			d := p.device(c)
			if why := o.NotOffered[d.GPU]; why != "" {
				d.Healthy, d.Reason = false, why
			}
			p.plan.node[c.uuid()] = d
		}
	}
	kept := p.keep(all)
	if o.MIG == MIGSingle {
		kept = p.mostCommonKind(kept)
	}
	p.share(kept)
	p.gatherUnits()
	graph := topology.New(snapshot.GPUs)
	for _, name := range slices.Sorted(maps.Keys(p.resources)) {
		if p.fits(name) {
			p.warnOfMixed(name)
			p.plan.Resources = append(p.plan.Resources, p.resource(name, graph))
		}
	}
	p.warnOfMemory()
	order.Sort(p.plan.LeftOut, func(a, b LeftOut) int { return compareIndex(a.Index, b.Index) })
	return p.plan
}

const (
	// manyDevices is the number of devices from which on a warning mentions the daemon's memory.
	manyDevices = 8_000
	// baseMemory is the daemon's memory on a real GPU, and deviceMemory the memory for a device
	// while its list is made and sent, in kB. Both are measurements with some reserve.
	baseMemory, deviceMemory = 60_000, 2
)

// warnOfMemory warns of the daemon's memory if the plan has many devices.
func (p *planner) warnOfMemory() {
	devices := 0
	for _, r := range p.plan.Resources {
		devices += r.Count()
	}
	if devices >= manyDevices {
		p.warn("the node offers %d devices, and the daemon needs up to %d MB of memory for them; set no lower "+
			"memory limit (resources.limits.memory) on its container, or offer fewer replicas or larger units", devices,
			(baseMemory+devices*deviceMemory)/1000)
	}
}

// resource returns the resource of a draft.
func (p *planner) resource(name string, graph *topology.Graph) Resource {
	devices := p.resources[name].devices
	if name != p.options.Units.Name || p.unitGPUs == nil {
		return NewResource(name, p.options, graph, devices)
	}
	order.Sort(devices, compareDevices)
	r := Resource{Name: name, units: &unitRules{fit: p.options.Units.Fit, fill: p.options.Units.Fill, gpus: p.unitGPUs}}
	return r.with(devices)
}

// Resource returns the resource with the given name.
func (p Plan) Resource(name string) (Resource, bool) {
	i, found := slices.BinarySearchFunc(p.Resources, name,
		func(r Resource, name string) int { return cmp.Compare(r.Name, name) })
	if !found {
		return Resource{}, false
	}
	return p.Resources[i], true
}

// NodeDevice returns the GPU or MIG device with that UUID, if the node has it, unshared and without
// a resource. A NotOffered device is not Healthy. The plan need not offer the device, and holds do
// not change it.
func (p Plan) NodeDevice(uuid string) (Device, bool) {
	d, found := p.node[uuid]
	return d, found
}

// NodeDevices returns all devices that NodeDevice finds, by ascending UUID.
func (p Plan) NodeDevices() []Device {
	devices := make([]Device, 0, len(p.node))
	for _, uuid := range slices.Sorted(maps.Keys(p.node)) {
		devices = append(devices, p.node[uuid])
	}
	return devices
}

// MPSDaemons returns the names of the MPS control daemons of the plan's devices, in the order of
// the devices.
func (p Plan) MPSDaemons() []string {
	var names []string
	for _, r := range p.Resources {
		for _, d := range r.Members() {
			if name := d.MPSDaemon(); name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// OtherWarnings returns the warnings about other subjects than LeftOut.
func (p Plan) OtherWarnings() []string {
	about := map[string]bool{}
	for _, l := range p.LeftOut {
		about[notOffered(l.Index, l.UUID, l.Reason)] = true
	}
	return slices.DeleteFunc(slices.Clone(p.Warnings), func(w string) bool { return about[w] })
}

// WarningsSince returns the warnings that an earlier plan did not have. Devices that are not
// offered for the same reason make one warning.
func (p Plan) WarningsSince(earlier Plan) []string {
	isNews := func(w string) bool { return !slices.Contains(earlier.Warnings, w) }
	var news []string
	for _, w := range p.OtherWarnings() {
		if isNews(w) {
			news = append(news, w)
		}
	}
	var reasons []string // in the order of the devices
	devices := map[string][]LeftOut{}
	for _, l := range p.LeftOut {
		if w := notOffered(l.Index, l.UUID, l.Reason); !slices.Contains(p.Warnings, w) || !isNews(w) {
			continue
		}
		if devices[l.Reason] == nil {
			reasons = append(reasons, l.Reason)
		}
		devices[l.Reason] = append(devices[l.Reason], l)
	}
	for _, why := range reasons {
		of := devices[why]
		if len(of) == 1 {
			news = append(news, notOffered(of[0].Index, of[0].UUID, why))
			continue
		}
		indexes := make([]string, 0, len(of))
		for _, l := range of {
			indexes = append(indexes, l.Index)
		}
		news = append(news, fmt.Sprintf("%d devices are not offered: %s (devices %s)", len(of), why,
			strings.Join(indexes, ", ")))
	}
	return news
}

// notOffered returns the warning about a device in LeftOut.
func notOffered(index, uuid, why string) string {
	return fmt.Sprintf("device %s (%s) is not offered: %s", index, uuid, why)
}

// Equal reports whether two Plans are the same.
func (p Plan) Equal(other Plan) bool {
	return slices.EqualFunc(p.Resources, other.Resources, Resource.Equal) &&
		slices.Equal(p.LeftOut, other.LeftOut) && slices.Equal(p.Warnings, other.Warnings) &&
		slices.Equal(p.Holds, other.Holds)
}

func (p *planner) warn(format string, args ...any) {
	p.plan.Warnings = append(p.plan.Warnings, fmt.Sprintf(format, args...))
}

// leaveOut puts a device into LeftOut, with a warning.
func (p *planner) leaveOut(c candidate, l LeftOut) {
	l.UUID, l.Index = c.uuid(), c.index()
	p.plan.LeftOut = append(p.plan.LeftOut, l)
	p.plan.Warnings = append(p.plan.Warnings, notOffered(l.Index, l.UUID, l.Reason))
}

// keep leaves out the excluded devices and those that cannot be offered.
func (p *planner) keep(all []candidate) []candidate {
	for i := range p.options.Selectors {
		s := &p.options.Selectors[i]
		if !slices.ContainsFunc(all, func(c candidate) bool { return c.selectedBy(s) }) {
			p.warn("%s selects no device of this node", s.Where)
		}
	}
	return slices.DeleteFunc(all, func(c candidate) bool {
		if why := p.options.NotOffered[c.gpu.UUID]; why != "" {
			p.plan.Holds = append(p.plan.Holds, Hold{UUID: c.uuid(), Reason: why, Row: RowOwner, Hidden: true})
			return true
		}
		if s := p.selector(c); s != nil && s.Exclude {
			p.plan.LeftOut = append(p.plan.LeftOut,
				LeftOut{UUID: c.uuid(), Index: c.index(), Reason: "it is excluded by " + s.Where +
					" of the configuration",
					Excluded: true})
			return true
		}
		why := p.unfit(c)
		if why != "" {
			p.leaveOut(c, LeftOut{Reason: why})
		}
		return why != ""
	})
}

// selector returns the first selector that selects the candidate, or nil.
func (p *planner) selector(c candidate) *Selector {
	i := slices.IndexFunc(p.options.Selectors, func(s Selector) bool { return c.selectedBy(&s) })
	if i < 0 {
		return nil
	}
	return &p.options.Selectors[i]
}

// name returns the resource of the candidate without sharing.
func (p *planner) name(c candidate, s *Selector) string {
	if s != nil && s.Rename != "" {
		return s.Rename
	}
	if c.mig != nil {
		return p.options.MIGName(c.mig.Profile)
	}
	return p.options.GPUName(c.gpu.Model)
}
