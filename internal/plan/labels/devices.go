package labels

import (
	"strconv"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The keys of labels about devices, without prefix. The prefix is nvidia.com/gpu for whole GPUs,
// and for example nvidia.com/mig-1g.10gb for a MIG profile under the strategy mixed. gpuSuffixes
// are the keys of whole GPUs, migSuffixes of MIG devices. Under the strategy single, whole GPUs
// have both.
var (
	migSuffixes = []string{
		"product", "count", "replicas", "sharing-strategy", "memory", "multiprocessors", "slices.gi", "slices.ci",
		"engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg", "engines.ofa",
	}
	gpuSuffixes = append([]string{"family", "compute.major", "compute.minor"}, migSuffixes...)
)

// addBase adds product, count, replicas and sharing of a resource. The model, followed by end, is the
// product. The key is the usual name of the resource; the configuration may give the resource
// another name.
func (b *builder) addBase(key, name, model, end string, count int) {
	suffix := strings.TrimPrefix(key, Prefix)
	replicas, strategy := 1, resource.Unshared
	sharing := b.options.Resources.Sharing
	if rule, shared := sharing.RuleOf(name); shared {
		replicas, strategy = rule.Replicas, max(sharing.Mode, resource.TimeSliced)
		if rule.Rename == "" && !sharing.RenameByDefault {
			end += "-SHARED"
		}
	}
	b.addProduct(suffix, model, end)
	b.number(suffix+".count", count)
	b.number(suffix+".replicas", replicas)
	b.put(suffix+".sharing-strategy", strategy.String())
}

// addWholeGPUs adds the labels of the GPUs. A label has one value, so one model counts: the model
// of most GPUs, with equal numbers of the lowest index. Models with a GPU outside MIG mode come
// first. The count includes the model's GPUs in MIG mode.
func (b *builder) addWholeGPUs() {
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
		b.addBase(resource.WholeGPU, b.options.Resources.GPUName(g.Model), g.Model, "", best.count)
	} else {
		b.addProduct("gpu", g.Model, "")
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
	parent  inventory.GPU // of the first device
	first   inventory.MIGDevice
	count   int
}

// profiles returns the MIG devices by profile, in the order of their first devices.
func (b *builder) profiles() []*profileDevices {
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

// addMIGDevices adds the labels of MIG devices of one profile.
func (b *builder) addMIGDevices(key string, k *profileDevices) {
	b.addBase(key, b.options.Resources.MIGName(k.profile), k.parent.Model, "-MIG-"+strings.ReplaceAll(k.profile,
		"+", "."), k.count)
	suffix := strings.TrimPrefix(key, Prefix)
	b.put(suffix+".memory", mib(k.first.MemoryBytes))
	a := k.first.Attributes
	for name, value := range map[string]int{
		"multiprocessors": a.Multiprocessors, "slices.gi": a.GISlices, "slices.ci": a.CISlices,
		"engines.copy": a.CopyEngines, "engines.decoder": a.Decoders, "engines.encoder": a.Encoders,
		"engines.jpeg": a.JPEGs,
		"engines.ofa":  a.OFAs,
	} {
		b.put(suffix+"."+name, strconv.Itoa(value))
	}
}

// addMixed adds the labels of the MIG devices under the strategy mixed.
func (b *builder) addMixed() {
	for _, k := range b.profiles() {
		b.addMIGDevices(resource.ProfileName(k.profile), k)
	}
}

// addSingle adds the labels of the MIG devices under the strategy single, in place of the labels of
// whole GPUs. On a node with several kinds of devices the labels say "invalid", as NVIDIA's do,
// although the daemon serves the most common kind there.
func (b *builder) addSingle() {
	var enabled []inventory.GPU
	empty := false
	for _, g := range b.gpus {
		if g.MIG == inventory.MIGEnabled {
			enabled = append(enabled, g)
			empty = empty || len(g.MIGDevices) == 0
		}
	}
	kinds := b.profiles()
	switch {
	case len(enabled) == 0:
		return
	case !empty && len(enabled) == len(b.gpus) && len(kinds) == 1:
		b.addMIGDevices(resource.WholeGPU, kinds[0])
		return
	}
	b.addProduct("gpu", enabled[0].Model, "-MIG-INVALID")
	b.number("gpu.count", 0)
	b.number("gpu.replicas", 0)
	b.number("gpu.memory", 0)
	b.put("gpu.sharing-strategy", "")
}
