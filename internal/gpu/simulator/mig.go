package simulator

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A layout is the MIG layout of a GPU.
type layout struct {
	instances []*gpuInstance     // by ID
	devices   []*computeInstance // by index of the MIG device, with possible gaps
}

// A gpuInstance is a GPU instance with its compute instances.
type gpuInstance struct {
	id       int
	start    int // first memory slice
	profile  MIGProfile
	computes []*computeInstance
}

// A computeInstance is a compute instance, and so a MIG device.
type computeInstance struct {
	gi        *gpuInstance
	id        int
	start     int // first compute slice
	slices    int
	index     int // of the MIG device on its GPU
	uuid      string
	processes int // that compute on it
}

// name returns the name of the MIG device's size, such as "1c.3g.40gb".
func (c *computeInstance) name() string {
	if c.slices == c.gi.profile.slices {
		return c.gi.profile.Name
	}
	return fmt.Sprintf("%dc.%s", c.slices, c.gi.profile.Name)
}

// layOut returns the layout of a GPU with the given MIG devices.
func layOut(m Model, gpu string, names []string) (layout, error) {
	if len(m.MIG) == 0 {
		return layout{}, fmt.Errorf("%s has no multi-instance mode", m.Name)
	}
	var instances []*gpuInstance
	free := map[*gpuInstance]int{} // compute slices without a compute instance
	for _, name := range names {
		compute, profile, err := m.device(name)
		if err != nil {
			return layout{}, err
		}
		i := slices.IndexFunc(instances, func(gi *gpuInstance) bool {
			return gi.profile.Name == profile.Name && free[gi] >= compute
		})
		if i < 0 {
			gi := &gpuInstance{profile: profile}
			free[gi] = profile.slices
			i, instances = len(instances), append(instances, gi)
		}
		gi := instances[i]
		c := &computeInstance{gi: gi, id: len(gi.computes), start: profile.slices - free[gi], slices: compute}
		free[gi] -= compute
		gi.computes = append(gi.computes, c)
	}
	return number(instances, m, gpu)
}

// device returns the compute slices and the profile of a named MIG device.
func (m Model) device(name string) (int, MIGProfile, error) {
	known := make([]string, 0, len(m.MIG))
	for _, p := range m.MIG {
		known = append(known, p.Name)
		if p.Name == name {
			return p.slices, p, nil
		}
		first, rest, _ := strings.Cut(name, "c.")
		if compute, err := strconv.Atoi(first); err == nil && rest == p.Name && compute > 0 && compute < p.slices {
			return compute, p, nil
		}
	}
	return 0, MIGProfile{}, fmt.Errorf("%s has no MIG device %q: it has %s, and parts of them such as 1c.%s",
		m.Name, name, strings.Join(known, ", "), known[len(known)-1])
}

// number assigns IDs, placements and identities to instances, and refuses instances that do not
// fit.
func number(instances []*gpuInstance, m Model, gpu string) (layout, error) {
	slices.SortStableFunc(instances, func(a, b *gpuInstance) int { return b.profile.memory - a.profile.memory })
	next := map[int]int{}
	counts := map[string]int{}
	compute, memory := 0, 0
	for _, gi := range instances {
		size := gi.profile.memory
		gi.id = firstInstanceID[m.MemorySlices/size] + next[size]
		next[size]++
		compute, memory = compute+gi.profile.slices, memory+size
		counts[gi.profile.Name]++
		if counts[gi.profile.Name] > gi.profile.Count {
			return layout{}, fmt.Errorf("%s fits %d times on %s", gi.profile.Name, gi.profile.Count, m.Name)
		}
	}
	if compute > m.computeSlices || memory > m.MemorySlices {
		return layout{}, fmt.Errorf("the MIG devices need %d of %d compute slices and %d of %d memory slices of %s",
			compute, m.computeSlices, memory, m.MemorySlices, m.Name)
	}
	if !placeAll(instances, 0) {
		return layout{}, fmt.Errorf("the MIG devices have no places on %s at which all of them fit", m.Name)
	}
	slices.SortFunc(instances, func(a, b *gpuInstance) int { return a.id - b.id })
	l := layout{instances: instances}
	for _, gi := range instances {
		for _, c := range gi.computes {
			l.add(c, gpu)
		}
	}
	return l, nil
}

// placeAll assigns placements to the instances, if possible. The first `placed` instances have
// theirs.
func placeAll(instances []*gpuInstance, placed int) bool {
	if placed == len(instances) {
		return true
	}
	gi := instances[placed]
	for _, gi.start = range gi.profile.starts {
		if free(instances[:placed], gi.start, gi.profile.memory) && placeAll(instances, placed+1) {
			return true
		}
	}
	return false
}

// free reports whether no instance uses any of the memory slices.
func free(instances []*gpuInstance, start, size int) bool {
	return !slices.ContainsFunc(instances, func(gi *gpuInstance) bool {
		return gi.start < start+size && start < gi.start+gi.profile.memory
	})
}

// add makes a compute instance a MIG device with the lowest free index.
func (l *layout) add(c *computeInstance, gpu string) {
	for slices.ContainsFunc(l.devices, func(o *computeInstance) bool { return o.index == c.index }) {
		c.index++
	}
	c.uuid = "MIG-" + deriveUUID(gpu, strconv.Itoa(c.gi.id), strconv.Itoa(c.id))
	l.devices = append(l.devices, c)
	slices.SortFunc(l.devices, func(a, b *computeInstance) int { return a.index - b.index })
}
