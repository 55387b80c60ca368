package containeredits

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The classes of limits. A container with a device of them is a client of an MPS server of one GPU.
const (
	CDIMemory  CDIClass = "memory-limit"
	CDIThreads CDIClass = "thread-limit"
)

// CDIDriverMemory is the class of limits that the driver holds the cgroup of a container to.
// NVIDIA's hook sets them.
const CDIDriverMemory CDIClass = "driver-memory-limit"

// A Limit is a limit that a container gets by variables of its environment. As a CDI device it wins
// over variables of the pod.
type Limit struct {
	Class CDIClass
	// CDIName is the device part of the limit's CDI name.
	CDIName string
	// Env has the variables, each as NAME=VALUE.
	Env []string
}

// The variables of clients of MPS.
const (
	memoryVariable = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// MemoryLimit returns the limit of the memory of a GPU that a process of a container may have, in
// MiB. It also says where the MPS daemon is: a process that does not find it has no limit.
func MemoryLimit(mib int) Limit {
	return Limit{CDIMemory, fmt.Sprintf("%dMi", mib), []string{fmt.Sprintf("%s=0=%dM", memoryVariable, mib),
		pipeVariable + "=" + unitsPipe}}
}

// DriverMemoryLimit returns the limit of the memory of a GPU that all processes of a container may
// have together, in MiB. Nothing is requested: what the driver keeps for a cgroup stays behind when
// the cgroup goes.
func DriverMemoryLimit(mib int) Limit {
	env := []string{"NVIDIA_GPU_MEMORY_REQUEST=0", fmt.Sprintf("NVIDIA_GPU_MEMORY_LIMIT=%d", mib)}
	return Limit{CDIDriverMemory, fmt.Sprintf("%dMi", mib), env}
}

// ThreadLimit returns the limit of the threads of a GPU that a process of a container may use, in
// percent.
func ThreadLimit(percentage int) Limit {
	return Limit{CDIThreads, fmt.Sprint(percentage), []string{fmt.Sprintf("%s=%d", threadVariable, percentage)}}
}

// limitOf returns the limit that the devices of a request bring; false if they bring none.
func limitOf(devices []resource.Device) (limit Limit, limited bool) {
	mib, driver, percentage := 0, 0, 0
	for _, d := range devices {
		switch d.Sharing {
		case resource.InMPSUnits:
			mib += resource.UnitMiB(d.Resource)
		case resource.InDriverUnits:
			driver += resource.UnitMiB(d.Resource)
		case resource.Percentage:
			percentage++
		case resource.Unshared, resource.TimeSliced, resource.MPS, resource.InUnits:
		}
	}
	switch {
	case mib > 0:
		return MemoryLimit(mib), true
	case driver > 0:
		return DriverMemoryLimit(driver), true
	case percentage > 0:
		return ThreadLimit(percentage), true
	}
	return Limit{}, false
}

// limit gives the container the limit that its devices bring: also by a variable where one of the
// strategies is not CDI.
func (c *container) limit() {
	if c.limited && !c.options.OnlyCDI() {
		for _, variable := range c.bound.Env {
			name, value, _ := strings.Cut(variable, "=")
			c.edits.Env[name] = value
		}
	}
}

// onlyLimit returns what a container is given that gets its limit by this request and its GPU by
// another one.
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

// AllocatedKey is the annotation with the time at which a container was given units of memory.
// Kubelet keeps it with the answer.
const AllocatedKey = "gpu-device-plugin.github.io/allocated"

// Limits returns the limits that the edits bring a container: of memory in MiB, and of threads in
// percent; 0 for none. A CDI device counts before a variable, as it does for a container runtime.
func (e Edits) Limits() (mib, percentage int) {
	read := func(text, form string) (n int) {
		if _, err := fmt.Sscanf(text, form, &n); err != nil {
			return 0
		}
		return n
	}
	mib = read(e.Env[memoryVariable], "0=%dM")
	percentage = read(e.Env[threadVariable], "%d")
	for _, name := range e.cdiNames() {
		for _, class := range []CDIClass{CDIMemory, CDIDriverMemory} {
			if size, is := strings.CutPrefix(name, qualified(class, "")); is {
				mib = read(size, "%dMi")
			}
		}
		if size, is := strings.CutPrefix(name, qualified(CDIThreads, "")); is {
			percentage = read(size, "%d")
		}
	}
	return mib, percentage
}

// cdiNames returns the CDI devices of the edits, in each form in which runtimes are told.
func (e Edits) cdiNames() []string {
	names := slices.Clone(e.CDIDevices)
	for _, listed := range e.Annotations {
		names = append(names, strings.Split(listed, ",")...)
	}
	return names
}

// IsLimitedByDriver reports whether the driver holds the container to its limit.
func (e Edits) IsLimitedByDriver() bool {
	return slices.ContainsFunc(e.cdiNames(), func(name string) bool { return strings.HasPrefix(name, qualified(CDIDriverMemory, "")) })
}

// IsMPSClient reports whether the container is a client of an MPS control daemon.
func (e Edits) IsMPSClient() bool { return e.Env[pipeVariable] != "" }
