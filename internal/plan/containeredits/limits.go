package containeredits

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// The classes of limits. A container with a device of these classes is a client of the MPS server
// of one GPU.
const (
	CDIMemory  CDIClass = "memory-limit"
	CDIThreads CDIClass = "thread-limit"
)

// CDIDriverMemory is the class of limits enforced by the driver on the cgroup of a container.
// NVIDIA's hook sets them.
const CDIDriverMemory CDIClass = "driver-memory-limit"

// A Limit is a limit of a container, set by environment variables. As a CDI device it overrides
// variables of the pod.
type Limit struct {
	Class CDIClass
	// CDIName is the device part of the limit's CDI name.
	CDIName string
	// Env are the variables, each as NAME=VALUE.
	Env []string
}

// The variables for clients of MPS.
const (
	memoryVariable = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// MemoryLimit returns the limit of GPU memory for each process of a container, in MiB. It includes
// the pipe directory of the MPS daemon, because a process without the daemon has no limit.
func MemoryLimit(mib int) Limit {
	return Limit{CDIMemory, fmt.Sprintf("%dMi", mib), []string{fmt.Sprintf("%s=0=%dM", memoryVariable, mib),
		pipeVariable + "=" + unitsPipe}}
}

// DriverMemoryLimit returns the limit of GPU memory for all processes of a container together, in
// MiB. It requests no memory, because the driver's reservation for a cgroup would outlive the
// cgroup.
func DriverMemoryLimit(mib int) Limit {
	env := []string{"NVIDIA_GPU_MEMORY_REQUEST=0", fmt.Sprintf("NVIDIA_GPU_MEMORY_LIMIT=%d", mib)}
	return Limit{CDIDriverMemory, fmt.Sprintf("%dMi", mib), env}
}

// ThreadLimit returns the limit of GPU threads for each process of a container, in percent.
func ThreadLimit(percentage int) Limit {
	return Limit{CDIThreads, fmt.Sprint(percentage), []string{fmt.Sprintf("%s=%d", threadVariable, percentage)}}
}

// limitOf returns the limit from the devices of a request; false without a limit.
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

// limit sets the limit of the container's devices: also by a variable if a strategy is not CDI.
func (c *container) limit() {
	if c.hasLimit && !c.options.OnlyCDI() {
		for _, variable := range c.limitValue.Env {
			name, value, _ := strings.Cut(variable, "=")
			c.edits.Env[name] = value
		}
	}
}

// onlyLimit returns the Edits for a request that only limits the container. The GPU comes from
// another request.
func (c *container) onlyLimit() Edits {
	names := []string{qualifiedName(c.limitValue.Class, c.limitValue.CDIName)}
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

// AllocatedKey is the annotation with the time at which a container was given units of memory. The
// kubelet stores the annotation with the response.
const AllocatedKey = "gpu-device-plugin.github.io/allocated"

// Limits returns the limits in the edits: memory in MiB, and threads in percent; 0 for none. A CDI
// device takes precedence over a variable, as in a container runtime.
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
			if size, is := strings.CutPrefix(name, qualifiedName(class, "")); is {
				mib = read(size, "%dMi")
			}
		}
		if size, is := strings.CutPrefix(name, qualifiedName(CDIThreads, "")); is {
			percentage = read(size, "%d")
		}
	}
	return mib, percentage
}

// cdiNames returns the CDI devices of the edits, in every form that runtimes read.
func (e Edits) cdiNames() []string {
	names := slices.Clone(e.CDIDevices)
	for _, listed := range e.Annotations {
		names = append(names, strings.Split(listed, ",")...)
	}
	return names
}

// IsLimitedByDriver reports whether the driver enforces the limit of the container.
func (e Edits) IsLimitedByDriver() bool {
	return slices.ContainsFunc(e.cdiNames(),
		func(name string) bool { return strings.HasPrefix(name, qualifiedName(CDIDriverMemory, "")) })
}

// IsMPSClient reports whether the container is a client of an MPS control daemon.
func (e Edits) IsMPSClient() bool { return e.Env[pipeVariable] != "" }
