package labels

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Prefixes of the keys.
const (
	// Prefix is that of the labels that NVIDIA's programs write, too.
	Prefix = "nvidia.com/"
	// OwnPrefix is that of the labels that only this program writes.
	OwnPrefix = "gpu-device-plugin.github.io/"
)

// Keys of labels that are not NVIDIA's feature discovery's.
const (
	// Present says that the node has GPUs. NVIDIA's operator writes it, too.
	Present = Prefix + "gpu.present"
	// PCIPresent says that the node has PCI devices of NVIDIA's. node-feature-discovery writes it
	// where it is configured to.
	PCIPresent = "feature.node.kubernetes.io/pci-10de.present"
	// Health is the sum of the health of all GPUs: HealthHealthy, HealthDegraded or HealthUnhealthy.
	Health = OwnPrefix + "gpu.health"
	// Link is how the GPUs of the node are connected: LinkSwitch, LinkDirect or LinkPCIe.
	Link = OwnPrefix + "gpu.link"
)

// Values of Health.
const (
	HealthHealthy   = "healthy"   // every device can be given new work
	HealthDegraded  = "degraded"  // some cannot
	HealthUnhealthy = "unhealthy" // none can
)

// Values of Link.
const (
	LinkSwitch = "nvswitch" // every GPU reaches every other by NVLink through switches
	LinkDirect = "nvlink"   // some GPUs are connected by NVLink
	LinkPCIe   = "pcie"     // none are
)

// UnknownMachine is the value of gpu.machine where the name of the machine cannot be read.
const UnknownMachine = "unknown"

// Options is what labels are made of, beside a Snapshot.
type Options struct {
	// Resources decide about the MIG strategy, sharing and names.
	Resources resource.Options
	// ClaimsByMPS says that claims can be shared by MPS on the node.
	ClaimsByMPS bool
	// Machine is the name of the machine as its firmware has it, or UnknownMachine.
	Machine string
	// Timestamp is the Unix time in seconds for nvidia.com/gfd.timestamp; 0 for none.
	Timestamp int64
}

// Discovered returns the labels of NVIDIA's GPU feature discovery for a node. A GPU that is Lost
// does not count. A stale Snapshot counts like any other: the caller keeps the labels of before if
// they are to stay. Without GPUs there are few.
func Discovered(s inventory.Snapshot, o Options) map[string]string {
	b := builder{set: map[string]string{}, options: o, gpus: slices.DeleteFunc(slices.Clone(s.GPUs), isLost)}
	if o.Timestamp != 0 {
		b.number("gfd.timestamp", int(o.Timestamp))
	}
	b.put("gpu.machine", o.Machine)
	b.vgpu()
	if len(b.gpus) == 0 {
		return b.set
	}
	b.driver(s.Driver)
	b.node()
	b.wholeGPUs()
	switch o.Resources.MIG {
	case resource.MIGSingle:
		b.put("mig.strategy", "single")
		b.single()
	case resource.MIGMixed:
		b.put("mig.strategy", "mixed")
		b.mixed()
	case resource.MIGNone:
	}
	return b.set
}

// All returns the labels that the daemon gives to a node: Discovered, and those that only this
// program or NVIDIA's operator writes.
func All(s inventory.Snapshot, o Options) map[string]string {
	set := Discovered(s, o)
	gpus := slices.DeleteFunc(slices.Clone(s.GPUs), isLost)
	if len(s.GPUs) > 0 {
		set[Health] = health(s.GPUs)
	}
	// GPUs that are Lost or cannot be read are still there. DaemonSets choose nodes by these labels:
	// without them, the daemon that is to see the GPUs come back would be removed from the node.
	if len(s.GPUs) > 0 || len(s.LeftOut) > 0 {
		set[Present], set[PCIPresent] = "true", "true"
	}
	if len(gpus) > 1 {
		set[Link] = link(gpus)
	}
	return set
}

// ours are keys outside of OwnPrefix that are not a MIG profile's.
var ours = map[string]bool{Present: true, PCIPresent: true}

func init() {
	for _, suffix := range nodeSuffixes {
		ours[Prefix+suffix] = true
	}
	for _, suffix := range gpuSuffixes {
		ours[Prefix+"gpu."+suffix] = true
	}
}

var migKey = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^nvidia\.com/mig-[0-9][A-Za-z0-9._-]*\.(` +
		strings.ReplaceAll(strings.Join(migSuffixes, "|"), ".", `\.`) + `)$`)
})

// Owns reports whether a key is one that All has on some node. Other labels are never changed.
func Owns(key string) bool {
	return ours[key] || key == Health || key == Link || migKey().MatchString(key)
}

func isLost(g inventory.GPU) bool { return g.Health.State == inventory.Lost }

// maxValue is how long the value of a label may be.
const maxValue = 63

var (
	unwanted = regexp.MustCompile(`[^A-Za-z0-9-_. ]`)
	edges    = "-_."
)

// plain returns text as a part of a value, as NVIDIA's feature discovery writes it: other
// characters are left out, and blanks are hyphens.
func plain(text string) string {
	return strings.Join(strings.Fields(unwanted.ReplaceAllString(text, "")), "-")
}

// legal returns text and what follows it as the value of a label: of 63 characters at most, with a
// letter or digit first and last. Nothing is left of text that has none. Where both are too long
// together, text is shortened and ends with a mark that stands for all of it: so two long texts
// stay apart, and what follows is kept.
func legal(text, end string) string {
	text, end = strings.TrimLeft(plain(text), edges), plain(end)
	whole := strings.Trim(text+end, edges)
	if len(whole) <= maxValue {
		return whole
	}
	full := fnv.New32a()
	_, _ = full.Write([]byte(text)) // never fails
	mark := fmt.Sprintf("-%04x", full.Sum32()&0xffff)
	room := maxValue - len(mark) - len(end)
	if room < 1 {
		return strings.TrimRight(whole[:maxValue], edges)
	}
	return strings.TrimRight(strings.TrimRight(text[:min(room, len(text))], edges)+mark+end, edges)
}

// health sums up the health of GPUs and of the MIG devices on them.
func health(gpus []inventory.GPU) string {
	devices, healthy := 0, 0
	count := func(h inventory.Health) {
		devices++
		if h.Allocatable() {
			healthy++
		}
	}
	for _, g := range gpus {
		if len(g.MIGDevices) == 0 {
			count(g.Fitness())
		}
		for _, m := range g.MIGDevices {
			count(inventory.Worst(g.Fitness(), m.Health))
		}
	}
	switch healthy {
	case devices:
		return HealthHealthy
	case 0:
		return HealthUnhealthy
	}
	return HealthDegraded
}

// link is the class of the connections of GPUs.
func link(gpus []inventory.GPU) string {
	links, switched := 0, 0
	for _, g := range gpus {
		for _, l := range g.Links {
			if l.NVLinks > 0 {
				links++
			}
			if l.NVLinks > 0 && l.Switched {
				switched++
			}
		}
	}
	switch {
	case links == 0:
		return LinkPCIe
	case switched >= len(gpus)*(len(gpus)-1):
		return LinkSwitch
	}
	return LinkDirect
}

// A builder makes the labels of a node.
type builder struct {
	set     map[string]string
	options Options
	gpus    []inventory.GPU // those that are there
}

// put adds a label of NVIDIA's.
func (b *builder) put(suffix, value string) { b.set[Prefix+suffix] = legal(value, "") }

// product adds the name of a model, with what tells its devices apart.
func (b *builder) product(suffix, model, end string) {
	b.set[Prefix+suffix+".product"] = legal(model, end)
}

func (b *builder) number(suffix string, value int) { b.put(suffix, strconv.Itoa(value)) }
