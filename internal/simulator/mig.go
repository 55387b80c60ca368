package simulator

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A layout is how a GPU is divided. It is never changed: a GPU gets another one.
type layout struct {
	instances []*gpuInstance     // by ID
	devices   []*computeInstance // by the index of the MIG device
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
	gi     *gpuInstance
	id     int
	slices int
	index  int // of the MIG device on its GPU
	uuid   string
}

// name returns the name of the MIG device's size, such as "1c.3g.40gb".
func (c *computeInstance) name() string {
	if c.slices == c.gi.profile.slices {
		return c.gi.profile.Name
	}
	return fmt.Sprintf("%dc.%s", c.slices, c.gi.profile.Name)
}

// firstInstanceID is the ID of the first GPU instance by the number of its memory slices. Like the driver's, there is one
// ID for the instance that takes all, two for the halves, four for the quarters, and the rest are for the eighths.
var firstInstanceID = map[int]int{8: 0, 4: 1, 2: 3, 1: 7}

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
		free[gi] -= compute
		gi.computes = append(gi.computes, &computeInstance{gi: gi, id: len(gi.computes), slices: compute})
	}
	return number(instances, m, gpu)
}

// device returns the compute slices and the profile of the MIG device with a name.
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

// number gives instances their IDs, places and identities, largest first as they are best created, and refuses what does
// not fit on a GPU.
func number(instances []*gpuInstance, m Model, gpu string) (layout, error) {
	slices.SortStableFunc(instances, func(a, b *gpuInstance) int { return b.profile.memory - a.profile.memory })
	next := map[int]int{}
	counts := map[string]int{}
	compute, computeSlices, memory := 0, 0, 0
	for _, p := range m.MIG {
		computeSlices = max(computeSlices, p.slices)
	}
	for _, gi := range instances {
		size := gi.profile.memory
		gi.id = firstInstanceID[size] + next[size]
		next[size]++
		gi.start = memory
		compute, memory = compute+gi.profile.slices, memory+size
		counts[gi.profile.Name]++
		if counts[gi.profile.Name] > gi.profile.Count {
			return layout{}, fmt.Errorf("%s fits %d times on %s", gi.profile.Name, gi.profile.Count, m.Name)
		}
	}
	if compute > computeSlices || memory > memorySlices {
		return layout{}, fmt.Errorf("the MIG devices need %d of %d compute slices and %d of %d memory slices of %s",
			compute, computeSlices, memory, memorySlices, m.Name)
	}
	slices.SortFunc(instances, func(a, b *gpuInstance) int { return a.id - b.id })
	l := layout{instances: instances}
	for _, gi := range instances {
		for _, c := range gi.computes {
			c.index = len(l.devices)
			c.uuid = "MIG-" + deriveUUID(gpu, strconv.Itoa(gi.id), strconv.Itoa(c.id))
			l.devices = append(l.devices, c)
		}
	}
	return l, nil
}
