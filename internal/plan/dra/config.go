package dra

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// ConfigVersion is the apiVersion of the configuration in claims and classes for this driver.
const ConfigVersion = "resource.nvidia.com/v1beta1"

// The kinds of configuration. NVIDIA's driver has further kinds, for devices unknown to this
// driver.
const (
	GPUConfig = "GpuConfig"       // for GPUs
	MIGConfig = "MigDeviceConfig" // for MIG devices
)

// A SharingStrategy is the way in which the containers of a claim share devices.
type SharingStrategy string

// The strategies.
const (
	TimeSlicing SharingStrategy = "TimeSlicing"
	MPS         SharingStrategy = "MPS"
)

// intervals are the lengths of a time slice, by the numbers of nvidia-smi compute-policy.
var intervals = []string{"Default", "Short", "Medium", "Long"}

// A DeviceConfig is the configuration of devices of a claim, with all defaults.
type DeviceConfig struct {
	// Kind is GPUConfig or MIGConfig.
	Kind string
	// Strategy is TimeSlicing by default.
	Strategy SharingStrategy
	// Interval is the length of a time slice, from 0 (the driver's default) to 3 (long). It applies
	// only to GPUs with TimeSlicing.
	Interval int
	// MPS applies only to the strategy MPS.
	MPS MPSLimits
	// IMEX gives the containers IMEX channel 0.
	IMEX bool
}

// MPSLimits are the limits of a client of an MPS control daemon.
type MPSLimits struct {
	// Percentage is the active thread percentage, from 1 to 100; 0 for no limit.
	Percentage int
	// Memory is the limit of pinned memory in bytes, for each device of the claim; 0 for none.
	Memory int64
	// MemoryOf are the limits of single devices, by UUID or by the index among the devices of the
	// claim. They override Memory.
	MemoryOf map[string]int64
	// MultiUser lets processes of several users share a device.
	MultiUser bool
}

// String describes the configuration in one line.
func (c DeviceConfig) String() string {
	if c.IMEX {
		c.IMEX = false
		return c.String() + ", IMEX channel 0"
	}
	if c.Strategy == TimeSlicing {
		if c.Kind == MIGConfig {
			return c.Kind + ": time-slicing"
		}
		return fmt.Sprintf("%s: time-slicing, interval %s", c.Kind, intervals[c.Interval])
	}
	parts := []string{c.Kind + ": MPS"}
	if c.MPS.Percentage > 0 {
		parts = append(parts, fmt.Sprintf("%d %% of the threads", c.MPS.Percentage))
	}
	if c.MPS.Memory > 0 {
		parts = append(parts, fmt.Sprintf("%d MiB of pinned memory", c.MPS.Memory>>20))
	}
	for _, device := range slices.Sorted(maps.Keys(c.MPS.MemoryOf)) {
		parts = append(parts, fmt.Sprintf("%d MiB on device %s", c.MPS.MemoryOf[device]>>20, device))
	}
	if c.MPS.MultiUser {
		parts = append(parts, "several users")
	}
	return strings.Join(parts, ", ")
}

// ParseConfig parses the opaque parameters of a claim or a class: JSON with the types of NVIDIA's
// driver. Like NVIDIA's driver, it refuses unknown and repeated fields, and names are
// case-sensitive. The problems are all mistakes, up to a limit, each with the path of the field.
// The configuration is usable only without problems.
func ParseConfig(parameters []byte) (DeviceConfig, []string) {
	p := &configParser{}
	c := p.config(parameters)
	slices.Sort(p.problems)
	if more := len(p.problems) - maxProblems; more > 0 {
		p.problems = append(p.problems[:maxProblems], fmt.Sprintf("%d more problems", more))
	}
	return c, p.problems
}

const (
	// maxParameters limits the parameters, in bytes. The API server accepts 10 KiB.
	maxParameters = 64 << 10
	// maxProblems limits the reported problems.
	maxProblems = 10
)

// config reads all parameters.
func (p *configParser) config(parameters []byte) DeviceConfig {
	if len(parameters) > maxParameters {
		p.problem("parameters", "are larger than %d KiB", maxParameters>>10)
		return DeviceConfig{}
	}
	root, ok := p.parse(parameters)
	if !ok {
		return DeviceConfig{}
	}
	c := DeviceConfig{Strategy: TimeSlicing}
	version, _ := root.text("apiVersion")
	c.Kind, _ = root.text("kind")
	switch {
	case version != ConfigVersion:
		p.problem("apiVersion", "%q is not known; use %s", version, ConfigVersion)
	case c.Kind != GPUConfig && c.Kind != MIGConfig:
		p.problem("kind", "%q is not supported; use %s or %s", c.Kind, GPUConfig, MIGConfig)
	default:
		if sharing, given := root.object("sharing"); given {
			p.sharing(sharing, &c)
		}
		if imex, given := root.object("imex"); given {
			c.IMEX = imex.zero("channelIDs")
			imex.close()
		}
		root.close()
	}
	return c
}

// sharing reads the field sharing.
func (p *configParser) sharing(o object, c *DeviceConfig) {
	defer o.close()
	strategy, _ := o.text("strategy")
	c.Strategy = SharingStrategy(strategy)
	var slicing, mps object
	var sliced, limited bool
	if c.Kind == GPUConfig {
		slicing, sliced = o.object("timeSlicingConfig")
	}
	mps, limited = o.object("mpsConfig")
	switch {
	case c.Strategy != TimeSlicing && c.Strategy != MPS:
		p.problem("sharing.strategy", "%q is not known; use %s or %s", strategy, TimeSlicing, MPS)
	case c.Strategy == TimeSlicing && limited:
		p.problem("sharing.mpsConfig", "is not for the strategy %s", TimeSlicing)
	case c.Strategy == MPS && sliced:
		p.problem("sharing.timeSlicingConfig", "is not for the strategy %s", MPS)
	case sliced:
		p.slicing(slicing, c)
	case limited:
		p.limits(mps, &c.MPS)
	}
}

func (p *configParser) slicing(o object, c *DeviceConfig) {
	defer o.close()
	interval, _ := o.text("interval")
	if c.Interval = slices.Index(intervals, cmp.Or(interval, intervals[0])); c.Interval < 0 {
		p.problem("sharing.timeSlicingConfig.interval", "%q is not known; use %s", interval,
			strings.Join(intervals, ", "))
	}
}

var device = regexp.MustCompile(`^(0|[1-9]\d{0,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,100})$`)

func (p *configParser) limits(o object, l *MPSLimits) {
	defer o.close()
	if text, given := o.number("defaultActiveThreadPercentage"); given {
		percentage, err := strconv.Atoi(text)
		if err != nil || percentage < 1 || percentage > 100 {
			p.problem(o.path+"defaultActiveThreadPercentage", "%s is not a whole number from 1 to 100", text)
		}
		l.Percentage = percentage
	}
	l.Memory = o.memory("defaultPinnedDeviceMemoryLimit")
	l.MultiUser = o.truth("multiUser")
	each, _ := o.object("defaultPerDevicePinnedMemoryLimit")
	for _, key := range slices.Sorted(maps.Keys(each.fields)) {
		if !device.MatchString(key) {
			p.problem(each.path+key, "is neither the UUID nor the index of a device")
		}
		if l.MemoryOf == nil {
			l.MemoryOf = map[string]int64{}
		}
		l.MemoryOf[key] = each.memory(key)
	}
}
