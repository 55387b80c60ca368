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
	// Prefix is the prefix of labels written also by NVIDIA's programs.
	Prefix = "nvidia.com/"
	// OwnPrefix is the prefix of labels written only by this program.
	OwnPrefix = "gpu-device-plugin.github.io/"
)

// Keys of labels outside NVIDIA's feature discovery.
const (
	// Present says that the node has GPUs. NVIDIA's operator also writes this label.
	Present = Prefix + "gpu.present"
	// PCIPresent says that the node has PCI devices of NVIDIA. node-feature-discovery writes this
	// label if configured.
	PCIPresent = "feature.node.kubernetes.io/pci-10de.present"
	// Health is the worst health on the node in one word: HealthHealthy, HealthDegraded or
	// HealthUnhealthy.
	Health = OwnPrefix + "gpu.health"
	// Link is how the GPUs of the node are connected: LinkSwitch, LinkDirect or LinkPCIe.
	Link = OwnPrefix + "gpu.link"
)

// Values of Health.
const (
	HealthHealthy   = "healthy"   // every device can be given new work
	HealthDegraded  = "degraded"  // some devices cannot
	HealthUnhealthy = "unhealthy" // no device can
)

// Values of Link.
const (
	LinkSwitch = "nvswitch" // all GPUs reach each other by NVLink through switches
	LinkDirect = "nvlink"   // some GPUs are connected by NVLink
	LinkPCIe   = "pcie"     // no GPUs are connected by NVLink
)

// UnknownMachine is the value of gpu.machine if the name of the machine cannot be read.
const UnknownMachine = "unknown"

// Options are the inputs of labels beside a Snapshot.
type Options struct {
	// Resources decide the MIG strategy, sharing and names.
	Resources resource.Options
	// ClaimsByMPS says that claims can be shared by MPS on the node.
	ClaimsByMPS bool
	// Machine is the firmware's name of the machine, or UnknownMachine.
	Machine string
	// Timestamp is the Unix time in seconds for nvidia.com/gfd.timestamp; 0 for none.
	Timestamp int64
}

// Discovered returns the labels of NVIDIA's GPU feature discovery for a node. Lost GPUs do not
// count. A stale Snapshot counts like any other: a caller that wants to keep the previous labels
// must do so itself. A node without GPUs has few labels.
func Discovered(s inventory.Snapshot, o Options) map[string]string {
	b := builder{set: map[string]string{}, options: o, gpus: slices.DeleteFunc(slices.Clone(s.GPUs), isLost)}
	if o.Timestamp != 0 {
		b.number("gfd.timestamp", int(o.Timestamp))
	}
	b.put("gpu.machine", o.Machine)
	b.addVGPU()
	if len(b.gpus) == 0 {
		return b.set
	}
	b.addDriver(s.Driver)
	b.addNode()
	b.addWholeGPUs()
	switch o.Resources.MIG {
	case resource.MIGSingle:
		b.put("mig.strategy", "single")
		b.addSingle()
	case resource.MIGMixed:
		b.put("mig.strategy", "mixed")
		b.addMixed()
	case resource.MIGNone:
	}
	return b.set
}

// All returns all labels for a node: Discovered, and the labels of this program or NVIDIA's
// operator alone.
func All(s inventory.Snapshot, o Options) map[string]string {
	set := Discovered(s, o)
	gpus := slices.DeleteFunc(slices.Clone(s.GPUs), isLost)
	if len(s.GPUs) > 0 {
		set[Health] = health(s.GPUs)
	}
	// Lost and unreadable GPUs are still there. DaemonSets choose nodes by these labels: without
	// the labels, the daemon would be removed from the node and could not see the GPUs return.
	if len(s.GPUs) > 0 || len(s.LeftOut) > 0 {
		set[Present], set[PCIPresent] = "true", "true"
	}
	if len(gpus) > 1 {
		set[Link] = link(gpus)
	}
	return set
}

// ours are the keys outside OwnPrefix that do not belong to a MIG profile.
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

// Owns reports whether All writes this key on some node. Other labels are never changed.
func Owns(key string) bool {
	return ours[key] || key == Health || key == Link || migKey().MatchString(key)
}

func isLost(g inventory.GPU) bool { return g.Health.State == inventory.Lost }

// maxValue is the longest value of a label.
const maxValue = 63

var (
	unwanted = regexp.MustCompile(`[^A-Za-z0-9-_. ]`)
	edges    = "-_."
)

// plain returns text as a part of a value, in the form of NVIDIA's feature discovery: blanks become
// hyphens, and other characters are removed.
func plain(text string) string {
	return strings.Join(strings.Fields(unwanted.ReplaceAllString(text, "")), "-")
}

// legal returns text and end as the value of a label: at most 63 characters, with a letter or digit
// first and last; empty without such characters. For a long value, text is shortened and gets a
// hash of its full length. Two long texts thus stay distinct, and end is kept.
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

// health returns the value of Health for GPUs and their MIG devices.
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

// link returns the value of Link for GPUs.
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

// A builder builds the labels of a node.
type builder struct {
	set     map[string]string
	options Options
	gpus    []inventory.GPU // GPUs that are not lost
}

// put adds one of NVIDIA's labels.
func (b *builder) put(suffix, value string) { b.set[Prefix+suffix] = legal(value, "") }

// addProduct adds the name of a model, with an end that distinguishes its devices.
func (b *builder) addProduct(suffix, model, end string) {
	b.set[Prefix+suffix+".product"] = legal(model, end)
}

func (b *builder) number(suffix string, value int) { b.put(suffix, strconv.Itoa(value)) }
