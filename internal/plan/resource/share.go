package resource

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// share gives every candidate its resource, and shared candidates their replicas.
func (p *planner) share(all []candidate) {
	placed := map[string]int{}   // number of devices so far, by the name without sharing
	names := map[string]string{} // name without sharing, by the UUID of the device
	for _, c := range all {
		s := p.selector(c)
		p.warnOfSecond(c, s)
		if s != nil && s.Units && p.placeUnits(c) {
			names[c.uuid()] = p.options.Units.Name
			continue
		}
		name := p.name(c, s)
		place := p.placementOf(c, s, name, placed[name])
		placed[name]++
		names[c.uuid()] = name
		if why := place.refusal(c, p.cuda); why != "" {
			p.leaveOut(c, LeftOut{Reason: why, Refused: true})
			continue
		}
		p.place(c, place)
	}
	p.warnOfIdleRules(all, names)
}

// placement is the resource of a device, and how the device is offered.
type placement struct {
	name     string
	mode     SharingMode
	replicas int
}

// placementOf decides on the n-th device, from 0, of the resource that it has without sharing.
func (p *planner) placementOf(c candidate, s *Selector, name string, nth int) placement {
	sharing := p.options.Sharing
	replicas, rename := 1, ""
	if rule := sharing.rule(c, name, nth); rule != nil {
		replicas, rename = rule.Replicas, rule.Rename
	}
	if s != nil && s.Replicas > 0 {
		replicas, rename = s.Replicas, s.Rename
	}
	switch {
	case replicas < 2:
		return placement{name: name, mode: Unshared, replicas: 1}
	case rename != "":
		name = rename
	case sharing.RenameByDefault:
		name = SharedName(name)
	}
	return placement{name: name, mode: max(sharing.Mode, TimeSliced), replicas: replicas}
}

// rule returns the rule for a device, or nil. Of several rules, the first with the most replicas
// counts.
func (s Sharing) rule(c candidate, name string, nth int) *SharingRule {
	return s.largest(func(r *SharingRule) bool {
		return r.Name == name && (r.First == 0 || nth < r.First) && (r.Devices == nil || c.isAny(r.Devices))
	})
}

// largest returns the first of the matching rules with the most replicas, or nil.
func (s Sharing) largest(match func(*SharingRule) bool) *SharingRule {
	var best *SharingRule
	for i := range s.Rules {
		if r := &s.Rules[i]; match(r) && (best == nil || r.Replicas > best.Replicas) {
			best = r
		}
	}
	return best
}

// MPSClients is the least number of clients that one MPS server can have, by CUDA's limit from
// Volta on.
const MPSClients = 48

const (
	oldMPSClients = 16 // limit before Volta
	newMPSClients = 60 // limit since CUDA 13.1
)

// mpsClients returns the number of clients that one MPS server can have on a GPU, by the driver's
// newest CUDA version.
func mpsClients(g inventory.GPU, cuda string) int {
	switch {
	case g.ComputeCapability.Major < 7:
		return oldMPSClients
	case cudaAtLeast(cuda, 13, 1, false):
		return newMPSClients
	}
	return MPSClients
}

// cudaAtLeast reports whether a CUDA version is at least major.minor. It returns unknown if the
// version cannot be read.
func cudaAtLeast(cuda string, major, minor int, unknown bool) bool {
	var x, y int
	if _, err := fmt.Sscanf(cuda, "%d.%d", &x, &y); err != nil {
		return unknown
	}
	return x > major || x == major && y >= minor
}

// refusal returns why a device cannot be shared in this way; empty if it can. cuda is the driver's
// newest CUDA version.
func (p placement) refusal(c candidate, cuda string) string {
	if p.mode != MPS {
		return ""
	}
	if c.mig != nil {
		return "it is a MIG device, and sharing by MPS is not supported for those; share it by time-slicing, or " +
			"not at all"
	}
	if most := mpsClients(*c.gpu, cuda); p.replicas > most {
		return fmt.Sprintf("%d replicas are configured, and MPS serves at most %d clients on it", p.replicas, most)
	}
	return ""
}

// place adds a device's IDs to its resource.
func (p *planner) place(c candidate, at placement) {
	d := p.device(c)
	d.Resource, d.Sharing = at.name, at.mode
	mode := c.gpu.ComputeMode
	isExclusive := mode == inventory.ComputeExclusiveProcess || mode == inventory.ComputeExclusiveThread
	if at.mode == TimeSliced && isExclusive {
		p.warn("device %s (%s) is shared, but its compute mode %s allows one container at a time; run nvidia-smi "+
			"-i %d -c DEFAULT",
			c.index(), c.uuid(), mode, c.gpu.Index)
	}
	if c.gpu.Unlicensed {
		p.warn("device %s (%s) is on a virtual GPU without a licence, and the driver slows it down 20 minutes after "+
			"its start; configure NVIDIA's licence service on this machine; nvidia-smi -q shows the state of the "+
			"licence",
			c.index(),
			c.uuid())
	}
	g := p.resources[at.name]
	if g == nil {
		g = &draft{}
		p.resources[at.name] = g
	}
	g.add(d, at.replicas)
}

// warnOfSecond warns of further selectors that select a device after selector s. The configuration
// refuses selectors that must always overlap; these overlap on this node.
func (p *planner) warnOfSecond(c candidate, s *Selector) {
	for i := range p.options.Selectors {
		if o := &p.options.Selectors[i]; o != s && c.selectedBy(o) {
			p.warn("device %s (%s) is selected by %s and by %s; the first counts", c.index(), c.uuid(), s.Where,
				o.Where)
		}
	}
}

// warnOfIdleRules warns of devices in sharing rules that the node lacks or has under other resource
// names. names has the resource names without sharing.
func (p *planner) warnOfIdleRules(all []candidate, names map[string]string) {
	for _, r := range p.options.Sharing.Rules {
		for _, ref := range r.Devices {
			var of []string
			for _, c := range all {
				if c.is(ref) {
					of = append(of, names[c.uuid()])
				}
			}
			slices.Sort(of)
			switch {
			case of == nil:
				p.warn("%s names device %s, which this node does not offer", r.Where, ref)
			case !slices.Contains(of, r.Name):
				p.warn("%s names device %s, which belongs not to resource %s but to %s", r.Where, ref, r.Name,
					strings.Join(slices.Compact(of), ", "))
			}
		}
	}
}

// warnOfMixed warns of a resource with shared and unshared devices: a container cannot know its
// kind of device.
func (p *planner) warnOfMixed(name string) {
	var shared, alone []string
	for _, d := range p.resources[name].members {
		if d.Sharing == Unshared {
			alone = append(alone, d.Index)
		} else {
			shared = append(shared, d.Index)
		}
	}
	if shared != nil && alone != nil {
		p.warn("resource %s has shared devices (%s) and unshared devices (%s): a container cannot know its kind "+
			"of device; give the shared devices a resource name of their own with rename", name, strings.Join(shared,
			", "), strings.Join(alone, ", "))
	}
}
