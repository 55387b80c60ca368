package edits

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// The classes of limits. A container with a device of them is a client of an MPS server of one GPU.
const (
	CDIMemory  CDIClass = "memory-limit"
	CDIThreads CDIClass = "thread-limit"
)

// A Limit is a limit that a container gets by one variable of its environment. As a CDI device it wins over a variable of the pod.
type Limit struct {
	Class CDIClass
	// CDIName is the device part of the limit's CDI name.
	CDIName         string
	Variable, Value string
}

// MemoryLimit returns the limit of the memory of a GPU that a process of a container may have, in MiB.
func MemoryLimit(mib int) Limit {
	return Limit{CDIMemory, fmt.Sprintf("%dMi", mib), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", fmt.Sprintf("0=%dM", mib)}
}

// ThreadLimit returns the limit of the threads of a GPU that a process of a container may use, in percent.
func ThreadLimit(percentage int) Limit {
	return Limit{CDIThreads, fmt.Sprint(percentage), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", fmt.Sprint(percentage)}
}

// limitOf returns the limit that the devices of a request bring; false if they bring none.
func limitOf(devices []resource.Device) (limit Limit, limited bool) {
	mib, percentage := 0, 0
	for _, d := range devices {
		switch d.Sharing {
		case resource.InMPSUnits:
			mib += resource.UnitMiB(d.Resource)
		case resource.Percentage:
			percentage++
		case resource.Unshared, resource.TimeSliced, resource.MPS, resource.InUnits:
		}
	}
	switch {
	case mib > 0:
		return MemoryLimit(mib), true
	case percentage > 0:
		return ThreadLimit(percentage), true
	}
	return Limit{}, false
}

// limit gives the container the limit that its devices bring: also by a variable where one of the strategies is not CDI.
func (c *container) limit() {
	if c.limited && !c.options.OnlyCDI() {
		c.edits.Env[c.bound.Variable] = c.bound.Value
	}
}

// onlyLimit returns what a container is given that gets its limit by this request and its GPU by another one.
func (c *container) onlyLimit() Edits {
	names := []string{qualified(c.bound.Class, c.bound.CDIName)}
	for _, s := range c.options.Strategies {
		switch s {
		case CDIAnnotations:
			c.edits.Annotations = map[string]string{c.annotationKey(names): names[0]}
		case CDICRI:
			c.edits.CDIDevices = names
		case EnvVar, VolumeMounts:
		}
	}
	c.limit()
	return c.edits
}

// AllocatedKey is the annotation with the time at which a container was given units of memory. Kubelet keeps it with the answer.
const AllocatedKey = "gpu-device-plugin.github.io/allocated"

// Limits returns the limits that the edits bring a container: of memory in MiB, and of threads in percent; 0 for none. A CDI device counts
// before a variable, as it does for a container runtime.
func (e Edits) Limits() (mib, percentage int) {
	read := func(text, form string) (n int) {
		if _, err := fmt.Sscanf(text, form, &n); err != nil {
			return 0
		}
		return n
	}
	mib = read(e.Env[MemoryLimit(0).Variable], "0=%dM")
	percentage = read(e.Env[ThreadLimit(0).Variable], "%d")
	names := slices.Clone(e.CDIDevices)
	for _, listed := range e.Annotations {
		names = append(names, strings.Split(listed, ",")...)
	}
	for _, name := range names {
		if size, is := strings.CutPrefix(name, qualified(CDIMemory, "")); is {
			mib = read(size, "%dMi")
		}
		if size, is := strings.CutPrefix(name, qualified(CDIThreads, "")); is {
			percentage = read(size, "%d")
		}
	}
	return mib, percentage
}

// IsMPSClient reports whether the container is a client of an MPS control daemon.
func (e Edits) IsMPSClient() bool { return e.Env[pipeVariable] != "" }
