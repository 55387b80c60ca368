package labels

import (
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The keys of labels about devices, without their prefix: that of whole GPUs is nvidia.com/gpu,
// that of a MIG profile under the strategy mixed such as nvidia.com/mig-1g.10gb. gpuSuffixes are
// those of whole GPUs, migSuffixes those of MIG devices. Under the strategy single, whole GPUs have
// both.
var (
	migSuffixes = []string{
		"product", "count", "replicas", "sharing-strategy", "memory", "multiprocessors", "slices.gi", "slices.ci",
		"engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg", "engines.ofa",
	}
	gpuSuffixes = append([]string{"family", "compute.major", "compute.minor"}, migSuffixes...)
)

// base adds product, count, replicas and sharing of a resource. The end of the product follows the
// model. Its key and its name are the same unless the configuration gives it another name: then the
// key is the usual name.
func (b *builder) base(key, name, model, end string, count int) {
	suffix := strings.TrimPrefix(key, Prefix)
	replicas, strategy := 1, resource.Unshared
	sharing := b.options.Resources.Sharing
	if rule, shared := sharing.RuleOf(name); shared {
		replicas, strategy = rule.Replicas, max(sharing.Mode, resource.TimeSliced)
		if rule.Rename == "" && !sharing.RenameByDefault {
			end += "-SHARED"
		}
	}
	b.product(suffix, model, end)
	b.number(suffix+".count", count)
	b.number(suffix+".replicas", replicas)
	b.put(suffix+".sharing-strategy", strategy.String())
}

// wholeGPUs adds the labels of the GPUs. A label has one value, so that one model counts: that of
// most GPUs, and of the lowest index among those; models with a GPU that is not in MIG mode come
// before others. The count includes the model's GPUs in MIG mode.
func (b *builder) wholeGPUs() {
	type model struct {
		first, whole *inventory.GPU
		count        int
	}
	models, names := map[string]*model{}, []string(nil)
	for i := range b.gpus {
		g := &b.gpus[i]
		m := models[g.Model]
		if m == nil {
			m = &model{first: g}
			models[g.Model] = m
			names = append(names, g.Model)
		}
		m.count++
		if m.whole == nil && g.MIG != inventory.MIGEnabled {
			m.whole = g
		}
	}
	best := models[names[0]]
	for _, name := range names[1:] {
		if m := models[name]; (m.whole != nil) != (best.whole != nil) && m.whole != nil ||
			(m.whole != nil) == (best.whole != nil) && m.count > best.count {
			best = m
		}
	}
	g := best.first
	if best.whole != nil {
		g = best.whole
		b.base(resource.WholeGPU, b.options.Resources.GPUName(g.Model), g.Model, "", best.count)
	} else {
		b.product("gpu", g.Model, "")
		b.number("gpu.count", best.count)
		b.number("gpu.replicas", 0)
		b.put("gpu.sharing-strategy", resource.Unshared.String())
	}
	if g.MemoryBytes >= 1<<20 {
		b.put("gpu.memory", mib(g.MemoryBytes))
	}
	if c := g.ComputeCapability; c.Major != 0 {
		b.put("gpu.family", family(c))
		b.number("gpu.compute.major", c.Major)
		b.number("gpu.compute.minor", c.Minor)
	}
}

// profileDevices are all MIG devices of one profile.
type profileDevices struct {
	profile string
	parent  inventory.GPU // of the first
	first   inventory.MIGDevice
	count   int
}

// kinds returns the MIG devices by profile, in the order of their first devices.
func (b *builder) kinds() []*profileDevices {
	var all []*profileDevices
	known := map[string]*profileDevices{}
	for _, g := range b.gpus {
		for _, m := range g.MIGDevices {
			k := known[m.Profile]
			if k == nil {
				k = &profileDevices{profile: m.Profile, parent: g, first: m}
				known[m.Profile] = k
				all = append(all, k)
			}
			k.count++
		}
	}
	return all
}

// migDevices adds the labels of MIG devices of one profile.
func (b *builder) migDevices(key string, k *profileDevices) {
	b.base(key, b.options.Resources.MIGName(k.profile), k.parent.Model, "-MIG-"+strings.ReplaceAll(k.profile, "+", "."),
		k.count)
	suffix := strings.TrimPrefix(key, Prefix)
	b.put(suffix+".memory", mib(k.first.MemoryBytes))
	a := k.first.Attributes
	for name, value := range map[string]int{
		"multiprocessors": a.Multiprocessors, "slices.gi": a.GISlices, "slices.ci": a.CISlices,
		"engines.copy": a.CopyEngines, "engines.decoder": a.Decoders, "engines.encoder": a.Encoders, "engines.jpeg": a.JPEGs,
		"engines.ofa": a.OFAs,
	} {
		b.put(suffix+"."+name, strconv.Itoa(value))
	}
}

// mixed adds the labels of the MIG devices under the strategy mixed.
func (b *builder) mixed() {
	for _, k := range b.kinds() {
		b.migDevices(resource.ProfileName(k.profile), k)
	}
}

// single has the labels of whole GPUs tell of the MIG devices, under the strategy single. On a node
// whose devices are not of one kind they say that this is invalid, as NVIDIA's do, although the
// daemon serves the commonest kind there.
func (b *builder) single() {
	var enabled []inventory.GPU
	empty := false
	for _, g := range b.gpus {
		if g.MIG == inventory.MIGEnabled {
			enabled = append(enabled, g)
			empty = empty || len(g.MIGDevices) == 0
		}
	}
	kinds := b.kinds()
	switch {
	case len(enabled) == 0:
		return
	case !empty && len(enabled) == len(b.gpus) && len(kinds) == 1:
		b.migDevices(resource.WholeGPU, kinds[0])
		return
	}
	b.product("gpu", enabled[0].Model, "-MIG-INVALID")
	b.number("gpu.count", 0)
	b.number("gpu.replicas", 0)
	b.number("gpu.memory", 0)
	b.put("gpu.sharing-strategy", "")
}
