package layout_test

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// The oracle knows nothing of slices in order, kinds or costs. It puts the wanted instances down
// one after the other, at each place that its profile has, and looks which ways leave most of what
// exists alone.

// An oracle tries all ways for one GPU.
type oracle struct {
	gpu    layout.GPU
	wanted []target
	put    []target
	tried  bool // at least one way was found
	inUse  int  // instances in use that are lost, in the best way
	lost   int  // others that are lost
}

// A target is an instance at a place.
type target struct {
	profile  inventory.MIGProfile
	computes string // the sizes of its compute instances, sorted
	start    int
}

// sizes returns the sizes of compute instances.
func sizes(computes []inventory.ComputeInstance) string {
	var n []int
	for _, c := range computes {
		n = append(n, c.Slices)
	}
	slices.Sort(n)
	return fmt.Sprint(n)
}

// run tries all places for the wanted instances from the given one on.
func (o *oracle) run(from int) {
	if from == len(o.wanted) {
		inUse, lost := o.losses()
		if !o.tried || inUse < o.inUse || inUse == o.inUse && lost < o.lost {
			o.tried, o.inUse, o.lost = true, inUse, lost
		}
		return
	}
	next := o.wanted[from]
	for _, next.start = range next.profile.Starts {
		if from > 0 && o.wanted[from-1].profile.Name == next.profile.Name &&
			o.wanted[from-1].computes == next.computes && o.put[from-1].start > next.start {
			continue // two that are alike, the other way round
		}
		if o.collides(next) {
			continue
		}
		o.put = append(o.put, next)
		o.run(from + 1)
		o.put = o.put[:from]
	}
}

func (o *oracle) collides(next target) bool {
	for _, p := range o.put {
		if p.start < next.start+next.profile.Size && next.start < p.start+p.profile.Size {
			return true
		}
	}
	return false
}

// losses counts the instances that are not among those that were put down.
func (o *oracle) losses() (inUse, lost int) {
	for _, i := range o.gpu.Instances {
		kept := slices.ContainsFunc(o.put, func(p target) bool {
			return p.start == i.Start && p.profile.Name == i.Profile && (len(i.Computes) == 0 ||
				p.computes == sizes(i.Computes))
		})
		switch {
		case kept:
		case o.gpu.InUse[i.ID]:
			inUse++
		default:
			lost++
		}
	}
	return inUse, lost
}

// media says whether the media engines suffice, by counting those of a GPU with so many ordinary
// slices of them.
func media(names []string) bool {
	all, some, one := 0, 0, 0
	for _, name := range names {
		switch {
		case strings.HasSuffix(name, "-me"):
		case strings.HasSuffix(name, "+me.all"):
			all++
		case strings.HasSuffix(name, "+me"):
			one++
		default:
			some++
		}
	}
	return one <= 1 && (all == 0 || all == 1 && some+one == 0)
}

// judge says what is wrong with a change; nothing if it is right.
func judge(g layout.GPU, devices map[string]int, c layout.GPUChange) string {
	// The wanted devices as instances: compute instances of one slice fill instances one after the other.
	o := oracle{gpu: g}
	var names []string
	fits := true
	for _, p := range told(g) {
		ones, wholes := devices["1c."+p.Name], devices[p.Name]
		_, all, _ := parse(p.Name)
		if all == 1 {
			ones = 0
		}
		for range wholes {
			o.wanted = append(o.wanted, target{profile: p, computes: fmt.Sprint([]int{all})})
		}
		for ; ones > 0; ones -= all {
			n := slices.Repeat([]int{1}, min(ones, all))
			o.wanted = append(o.wanted, target{profile: p, computes: fmt.Sprint(n)})
		}
		fits = fits && countOf(o.wanted, p.Name) <= p.Count
	}
	for _, w := range o.wanted {
		names = append(names, w.profile.Name)
	}
	slices.SortStableFunc(o.wanted, func(a, b target) int { return b.profile.Size - a.profile.Size })
	if fits = fits && media(names); fits {
		o.run(0)
	}
	switch {
	case o.tried && c.Reason != "":
		return "the oracle finds a way, and the change says " + c.Reason
	case !o.tried && c.Reason == "":
		return "the oracle finds no way"
	case !o.tried:
		return ""
	}
	return judgeSteps(g, o, c)
}

// told returns the profiles of the GPU's model.
func told(g layout.GPU) []inventory.MIGProfile { return profilesOf(g.PCIDevice) }

func countOf(list []target, profile string) int {
	n := 0
	for _, w := range list {
		if w.profile.Name == profile {
			n++
		}
	}
	return n
}

// judgeSteps takes the steps, one after the other, on a GPU that refuses what a driver refuses.
func judgeSteps(g layout.GPU, o oracle, c layout.GPUChange) string {
	type instance struct {
		inventory.GPUInstance
		old bool
	}
	now := map[int]*instance{} // by start
	for _, i := range g.Instances {
		i.Computes = slices.Clone(i.Computes)
		now[i.Start] = &instance{i, true}
	}
	created := false
	for _, s := range c.Steps {
		at := now[s.Part.Start]
		switch s.Action {
		case inventory.MIGDestroyCompute:
			if at == nil || at.ID != s.Part.ID {
				return "a compute instance is destroyed in an instance that is not there"
			}
			i := slices.IndexFunc(at.Computes, func(c inventory.ComputeInstance) bool { return c.ID == s.Compute.ID })
			if i < 0 {
				return "a compute instance is destroyed that is not there"
			}
			at.Computes = slices.Delete(at.Computes, i, i+1)
		case inventory.MIGDestroyInstance:
			if at == nil || at.ID != s.Part.ID || len(at.Computes) > 0 {
				return "a GPU instance is destroyed that is not there, or not empty"
			}
			if created {
				return "something is destroyed after something was created"
			}
			delete(now, at.Start)
		case inventory.MIGCreateInstance:
			created = true
			for _, other := range now {
				if other.Start < s.Part.Start+s.Part.Size && s.Part.Start < other.Start+other.Size {
					return "two instances on one slice"
				}
			}
			p := told(g)[slices.Index(names(told(g)), s.Part.Profile)]
			if p.Size != s.Part.Size || !slices.Contains(p.Starts, s.Part.Start) {
				return "an instance at a place that its profile does not have"
			}
			now[s.Part.Start] = &instance{inventory.GPUInstance{Profile: p.Name, Start: s.Part.Start, Size: p.Size},
				false}
		case inventory.MIGCreateCompute:
			if at == nil {
				return "a compute instance is created in an instance that is not there"
			}
			for _, other := range at.Computes {
				if other.Start < s.Compute.Start+s.Compute.Slices && s.Compute.Start < other.Start+other.Slices {
					return "two compute instances on one slice"
				}
			}
			at.Computes = append(at.Computes, s.Compute)
		default:
			return "a step that is not about an instance"
		}
	}
	left := slices.Clone(o.wanted)
	inUse, lost := 0, 0
	for _, i := range g.Instances {
		switch kept := now[i.Start]; {
		case kept != nil && kept.old:
		case g.InUse[i.ID]:
			inUse++
		default:
			lost++
		}
	}
	for _, i := range now {
		at := slices.IndexFunc(left, func(w target) bool {
			return w.profile.Name == i.Profile && w.computes == sizes(i.Computes)
		})
		if at < 0 {
			return fmt.Sprintf("%s with %s is there in the end, and not wanted", i.Profile, sizes(i.Computes))
		}
		left = slices.Delete(left, at, at+1)
	}
	switch {
	case len(left) > 0:
		return fmt.Sprintf("%v is wanted, and not there in the end", left)
	case inUse != o.inUse || lost != o.lost:
		return fmt.Sprintf("%d in use and %d others are lost, and %d and %d need to be", inUse, lost, o.inUse, o.lost)
	case len(now) != len(c.After.Instances):
		return "the steps lead to something else than After says"
	}
	return ""
}
