package resource

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// A candidate is a device of the node that could be offered.
type candidate struct {
	gpu *inventory.GPU
	mig *inventory.MIGDevice // nil for a whole GPU
}

// kind returns the MIG profile of the candidate; empty for a whole GPU.
func (c candidate) kind() string {
	if c.mig == nil {
		return ""
	}
	return c.mig.Profile
}

func (c candidate) uuid() string {
	if c.mig == nil {
		return c.gpu.UUID
	}
	return c.mig.UUID
}

func (c candidate) index() string {
	if c.mig == nil {
		return strconv.Itoa(c.gpu.Index)
	}
	return strconv.Itoa(c.gpu.Index) + ":" + strconv.Itoa(c.mig.Index)
}

// is reports whether a Ref names the candidate or its GPU.
func (c candidate) is(r Ref) bool {
	s := string(r)
	return s == c.uuid() || s == c.gpu.UUID || s == c.index() || s == strconv.Itoa(c.gpu.Index)
}

// isAny reports whether one of the Refs names the candidate.
func (c candidate) isAny(refs []Ref) bool { return slices.ContainsFunc(refs, c.is) }

// selectedBy reports whether the selector selects the candidate.
func (c candidate) selectedBy(s *Selector) bool {
	return c.isAny(s.Devices) || slices.Contains(s.PCI, c.gpu.BDF) ||
		slices.ContainsFunc(s.Models, func(p Pattern) bool { return p.Match(c.gpu.Model) })
}

// device returns the candidate as an unshared device without a resource.
func (p *planner) device(c candidate) Device {
	d := Device{
		ID: c.uuid(), UUID: c.uuid(), GPU: c.gpu.UUID, Index: c.index(), Minor: c.gpu.Minor,
		GI: inventory.Unattributed, CI: inventory.Unattributed, NUMANode: c.gpu.NUMANode,
		Control: p.control,
	}
	health, sick := c.gpu.Fitness(), c.gpu.UUID
	if c.mig != nil {
		d.GI, d.CI, d.GICap, d.CICap = c.mig.GI, c.mig.CI, c.mig.GICap, c.mig.CICap
		if worst := inventory.Worst(health, c.mig.Health); worst != health {
			health, sick = worst, c.mig.UUID
		}
	}
	switch missing := p.options.Required &^ p.control; {
	case !health.Allocatable():
		d.Reason = reason(sick, health)
	case missing != 0:
		d.Reason = fmt.Sprintf("this node lacks /dev/%s, which the configuration requires", missing)
	}
	d.Healthy = d.Reason == ""
	return d
}

// reason returns why a device cannot be given new work, and the remedy.
func reason(uuid string, h inventory.Health) string {
	return strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", uuid, h.State, h.Why()), ": ")
}

// candidates returns the devices of the node under a MIG strategy, by index. A GPU in MIG mode
// without MIG devices is a candidate.
func candidates(gpus []inventory.GPU, strategy MIGStrategy) []candidate {
	var all []candidate
	for i := range gpus {
		g := &gpus[i]
		if strategy == MIGNone || g.MIG != inventory.MIGEnabled || len(g.MIGDevices) == 0 {
			all = append(all, candidate{gpu: g})
			continue
		}
		for j := range g.MIGDevices {
			all = append(all, candidate{gpu: g, mig: &g.MIGDevices[j]})
		}
	}
	order.Sort(all, func(a, b candidate) int { return compareIndex(a.index(), b.index()) })
	return all
}

// unfit returns why a device cannot be offered, regardless of other devices; empty if it can.
func (p *planner) unfit(c candidate) string {
	switch {
	case displayOnly(c.gpu.Model):
		return fmt.Sprintf("%q drives a display and does not compute", c.gpu.Model)
	case c.mig == nil && c.gpu.MIG == inventory.MIGEnabled && p.options.MIG != MIGNone && p.unread[c.gpu.Index] != "":
		return p.unread[c.gpu.Index]
	case c.mig == nil && c.gpu.MIG == inventory.MIGEnabled && p.options.MIG != MIGNone:
		return fmt.Sprintf("MIG is enabled on it, but it has no MIG devices, and the MIG strategy is %s; create "+
			"MIG devices, or disable MIG on it", p.options.MIG)
	}
	return ""
}

// displayOnly reports whether a product is a display card without compute. NVML counts the display
// card of a DGX Station as a GPU.
func displayOnly(model string) bool { return model == "DGX Display" || model == "NVIDIA DGX Display" }

// mostCommonKind keeps the candidates of the kind (whole GPU, or one MIG profile) that most GPUs
// have. With equal numbers, the kind of the lowest index wins. All devices of one resource must
// have one size.
func (p *planner) mostCommonKind(all []candidate) []candidate {
	carriers := map[string]int{}
	seen := map[[2]string]bool{}
	best := ""
	for _, c := range all {
		if key := [2]string{c.gpu.UUID, c.kind()}; !seen[key] {
			seen[key] = true
			carriers[c.kind()]++
		}
	}
	for i, c := range all {
		if i == 0 || carriers[c.kind()] > carriers[best] {
			best = c.kind()
		}
	}
	return slices.DeleteFunc(all, func(c candidate) bool {
		if c.kind() == best {
			return false
		}
		p.leaveOut(c, LeftOut{Reason: fmt.Sprintf("it is %s, most GPUs of the node offer %s, and the MIG strategy "+
			"single allows one kind of device; give all GPUs the same layout, or use the MIG strategy mixed",
			kindName(c.kind()), kindName(best))})
		return true
	})
}

func kindName(kind string) string {
	if kind == "" {
		return "a whole GPU"
	}
	return "MIG profile " + kind
}
