package resource

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// share gives every candidate its resource, and shared candidates their replicas.
func (p *planner) share(all []candidate) {
	placed := map[string]int{}   // devices so far, by the name without sharing
	names := map[string]string{} // that name, by the device's UUID
	for _, c := range all {
		s := p.selector(c)
		p.warnOfSecond(c, s)
		if s != nil && s.Units && p.placeUnits(c) {
			names[c.uuid()] = p.options.Units.Name
			continue
		}
		name := p.name(c, s)
		place := p.placing(c, s, name, placed[name])
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

// placing is the resource that a device is offered under, and how.
type placing struct {
	name     string
	mode     SharingMode
	replicas int
}

// placing decides on a device that is the nth, from 0, of the resource it would be of without
// sharing.
func (p *planner) placing(c candidate, s *Selector, name string, nth int) placing {
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
		return placing{name: name, mode: Unshared, replicas: 1}
	case rename != "":
		name = rename
	case sharing.RenameByDefault:
		name = SharedName(name)
	}
	return placing{name: name, mode: max(sharing.Mode, TimeSliced), replicas: replicas}
}

// rule returns the rule for a device, or nil. Of several, the one with the most replicas counts,
// and of those the first.
func (s Sharing) rule(c candidate, name string, nth int) *SharingRule {
	return s.largest(func(r *SharingRule) bool {
		return r.Name == name && (r.First == 0 || nth < r.First) && (r.Devices == nil || c.isAny(r.Devices))
	})
}

// largest returns the first of those rules that match which have the most replicas, or nil.
func (s Sharing) largest(match func(*SharingRule) bool) *SharingRule {
	var best *SharingRule
	for i := range s.Rules {
		if r := &s.Rules[i]; match(r) && (best == nil || r.Replicas > best.Replicas) {
			best = r
		}
	}
	return best
}

// MPSClients is how many clients one MPS server can have at least, by CUDA's limit from Volta on.
const MPSClients = 48

const (
	oldMPSClients = 16 // that limit before Volta
	newMPSClients = 60 // and since CUDA 13.1
)

// mpsClients returns how many clients one MPS server can have on a GPU, by the newest CUDA version
// of the driver.
func mpsClients(g inventory.GPU, cuda string) int {
	switch {
	case g.ComputeCapability.Major < 7:
		return oldMPSClients
	case cudaAtLeast(cuda, 13, 1, false):
		return newMPSClients
	}
	return MPSClients
}

// cudaAtLeast reports whether a CUDA version is that one or a newer one, and unknown if the version
// cannot be read.
func cudaAtLeast(cuda string, major, minor int, unknown bool) bool {
	var x, y int
	if _, err := fmt.Sscanf(cuda, "%d.%d", &x, &y); err != nil {
		return unknown
	}
	return x > major || x == major && y >= minor
}

// refusal returns why a device cannot be shared in this way; empty if it can. cuda is the newest
// CUDA version of the driver.
func (p placing) refusal(c candidate, cuda string) string {
	if p.mode != MPS {
		return ""
	}
	if c.mig != nil {
		return "it is a MIG device, and sharing by MPS is not supported for those; share it by time-slicing, or not at all"
	}
	if most := mpsClients(*c.gpu, cuda); p.replicas > most {
		return fmt.Sprintf("%d replicas are asked for, and MPS serves at most %d clients on it", p.replicas, most)
	}
	return ""
}

// place adds a device's IDs to its resource.
func (p *planner) place(c candidate, at placing) {
	d := p.device(c)
	d.Resource, d.Sharing = at.name, at.mode
	mode := c.gpu.ComputeMode
	isExclusive := mode == inventory.ComputeExclusiveProcess || mode == inventory.ComputeExclusiveThread
	if at.mode == TimeSliced && isExclusive {
		p.warn("device %s (%s) is shared, and its compute mode %s lets one container at a time compute: nvidia-smi -i %d -c DEFAULT",
			c.index(), c.uuid(), mode, c.gpu.Index)
	}
	if c.gpu.Unlicensed {
		p.warn("device %s (%s) is on a virtual GPU without a licence, and the driver slows it down 20 minutes after its start: "+
			"configure NVIDIA's licence service on this machine; nvidia-smi -q shows the state of the licence", c.index(), c.uuid())
	}
	g := p.resources[at.name]
	if g == nil {
		g = &gathered{}
		p.resources[at.name] = g
	}
	g.add(d, at.replicas)
}

// warnOfSecond warns of selectors that select a device which an earlier selector, s, has selected.
// Selectors that must overlap are problems of the configuration; these do on this node.
func (p *planner) warnOfSecond(c candidate, s *Selector) {
	for i := range p.options.Selectors {
		if o := &p.options.Selectors[i]; o != s && c.selectedBy(o) {
			p.warn("device %s (%s) is selected by %s and by %s; the first counts", c.index(), c.uuid(), s.Where, o.Where)
		}
	}
}

// warnOfIdleRules warns of devices that sharing rules name and that the node does not have, or has
// under other resource names; names has the resource names without sharing.
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
				p.warn("%s names device %s, which is not of resource %s but of %s", r.Where, ref, r.Name,
					strings.Join(slices.Compact(of), ", "))
			}
		}
	}
}

// warnOfMixed warns of a resource with shared and unshared devices: a container cannot know which
// it gets.
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
		p.warn("resource %s has devices that containers share (%s) and devices that they have alone (%s): a container cannot tell which "+
			"it gets; give the shared ones a name of their own with rename", name, strings.Join(shared,
			", "), strings.Join(alone, ", "))
	}
}
