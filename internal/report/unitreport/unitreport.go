// Package unitreport creates receipts for containers with units of GPUs. A receipt
// compares the request of a container with its allocation, and with the present limit in
// the layer that enforces it.
//
// The package is policy: the kubelet's accounts are inputs, and nothing is read from the
// node. The kubelet names no pod when it allocates, and allocates a container's memory and
// percentage in two calls. This package joins them afterwards.
package unitreport

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// The layers.
const (
	byMPS    = "mps"
	byDriver = "driver"
	byNone   = "none"
)

// A GPU is the state of a GPU in units.
type GPU struct {
	// MPS is true if MPS is to enforce the limits of the GPU's units.
	MPS bool
	// Driver is true if the driver is to enforce the limits of the GPU's units.
	Driver bool
	// Away is why the control daemon of the GPU does not serve; empty if it does, or there
	// is none.
	Away string
	// OwnLimits are limits of the control daemon for all clients; empty if there are none.
	OwnLimits string
	// Read are the driver's limits for the cgroups of pods with units of the GPU, by the
	// UID of the pod. Pods outside of the map are not visible.
	Read map[string][]Cgroup
}

// A Cgroup is the cgroup of a container in a known pod. The name of the container is
// unknown.
type Cgroup struct {
	// LimitMiB is the limit of its processes on the GPU's memory; 0 if the driver sets
	// none.
	LimitMiB int
	// HasGPU is true if the container has the device node of the GPU. If false, the device
	// node is absent or not visible.
	HasGPU bool
}

// Answers are the answers to Allocate in the kubelet's checkpoint. Err is why they are
// unknown.
type Answers struct {
	All []kubelet.Answer
	Err error
}

// A part is a container's share of one resource.
type part struct {
	resource string
	ids      []string
}

// A container is a container with units. A container with units of two sizes counts twice.
type container struct {
	namespace, pod, name string
	memory, percentage   part
	gpus                 map[string]bool // UUIDs of the GPUs with units of any size
}

// Of returns the containers that have units of GPUs, once for each GPU and with a receipt,
// in the order of devices. The GPUs in units are by UUID. A GPU outside of the map is not
// offered in units.
func Of(devices []kubelet.ContainerDevice, answers Answers, gpus map[string]GPU) []status.Holder {
	var holders []status.Holder
	for _, c := range containers(devices) {
		mib := map[string]int{} // MiB by UUID of the GPU
		var order []string
		for _, id := range c.memory.ids {
			uuid, _ := resource.SplitID(id)
			if mib[uuid] == 0 {
				order = append(order, uuid)
			}
			mib[uuid] += resource.UnitMiB(c.memory.resource)
		}
		for _, uuid := range order {
			r := c.receipt(mib[uuid], answers)
			if uid := answers.pod(c); r.Layer == byDriver && uid != "" {
				readBack(&r, gpus[uuid].Read[uid], answers.requested(uid, uuid))
			}
			if len(c.gpus) > 1 {
				r.Differences = append(r.Differences, fmt.Sprintf("the container has units of %d GPUs, but can use "+
					"only one", len(c.gpus)))
			}
			r.Differences = append(r.Differences, now(r.Layer, gpus, uuid)...)
			holders = append(holders, status.Holder{Device: uuid, Namespace: c.namespace, Pod: c.pod, Container: c.name,
				Receipt: &r})
		}
	}
	return holders
}

// containers groups the devices by containers with units.
func containers(devices []kubelet.ContainerDevice) []*container {
	var all []*container
	at, percentages, gpus := map[[4]string]*container{}, map[[3]string]part{}, map[[3]string]map[string]bool{}
	for _, d := range devices {
		key := [3]string{d.Namespace, d.Pod, d.Container}
		switch {
		case resource.IsPercentage(d.Resource):
			percentages[key] = part{d.Resource, append(percentages[key].ids, d.ID)}
		case resource.UnitMiB(d.Resource) > 0:
			sized := [4]string{d.Namespace, d.Pod, d.Container, d.Resource}
			if gpus[key] == nil {
				gpus[key] = map[string]bool{}
			}
			if at[sized] == nil {
				at[sized] = &container{
					namespace: d.Namespace, pod: d.Pod, name: d.Container,
					memory: part{resource: d.Resource}, gpus: gpus[key],
				}
				all = append(all, at[sized])
			}
			uuid, _ := resource.SplitID(d.ID)
			gpus[key][uuid] = true
			at[sized].memory.ids = append(at[sized].memory.ids, d.ID)
		}
	}
	for _, c := range all {
		c.percentage = percentages[[3]string{c.namespace, c.pod, c.name}]
	}
	return all
}

// receipt compares the request of the container with its allocation.
func (c *container) receipt(mib int, answers Answers) status.Receipt {
	r := status.Receipt{MemoryMiB: mib, Percentage: len(c.percentage.ids)}
	if answers.Err != nil {
		r.Differences = []string{"the allocation is unknown: " + answers.Err.Error()}
		return r
	}
	memory, known := answers.of(c.name, c.memory)
	if !known {
		r.Differences = []string{"the kubelet's checkpoint does not have the allocation"}
		return r
	}
	r.Since, _ = time.Parse(time.RFC3339, memory.Annotations[containeredits.AllocatedKey]) // zero if absent
	r.Layer = byNone
	edits := editsOf(memory)
	limit, _ := edits.Limits()
	switch {
	case edits.IsMPSClient():
		r.Layer = byMPS
	case edits.IsLimitedByDriver():
		r.Layer = byDriver
	}
	if r.Layer != byNone && limit != mib {
		r.Differences = append(r.Differences, fmt.Sprintf("the allocated limit is %d MiB", limit))
	}
	if r.Percentage == 0 {
		return r
	}
	threads, known := answers.of(c.name, c.percentage)
	if _, percentage := editsOf(threads).Limits(); !known || percentage != r.Percentage {
		r.Differences = append(r.Differences, fmt.Sprintf("the allocated limit is %d percent", percentage))
	}
	return r
}

// of returns the answer that allocated all devices of a part to a container of that name.
func (a Answers) of(name string, p part) (kubelet.Answer, bool) {
	for _, answer := range a.All {
		if answer.Resource == p.resource && answer.Container == name && len(answer.IDs) == len(p.ids) &&
			slices.Contains(answer.IDs, p.ids[0]) {
			return answer, true
		}
	}
	return kubelet.Answer{}, false
}

// pod returns the UID of a container's pod; empty if unknown.
func (a Answers) pod(c *container) string {
	answer, _ := a.of(c.name, c.memory)
	return answer.PodUID
}

// requested returns the MiB of a GPU that were allocated to each container of a pod,
// including init containers.
func (a Answers) requested(pod, gpu string) (all []int) {
	for _, answer := range a.All {
		mib := 0
		for _, id := range answer.IDs {
			if uuid, _ := resource.SplitID(id); answer.PodUID == pod && uuid == gpu {
				mib += resource.UnitMiB(answer.Resource)
			}
		}
		all = append(all, mib)
	}
	return all
}

// readBack adds the driver's limit to a receipt. The containers of the pod's cgroups are
// unknown, and some may not have started. So only two facts count: a cgroup has the limit
// of this container, or a cgroup with the GPU has a limit that no container of the pod
// requested.
func readBack(r *status.Receipt, cgroups []Cgroup, requested []int) {
	if slices.ContainsFunc(cgroups, func(c Cgroup) bool { return c.LimitMiB == r.MemoryMiB }) {
		r.ReadMiB = r.MemoryMiB
		return
	}
	for _, c := range cgroups {
		switch {
		case !c.HasGPU || c.LimitMiB > 0 && slices.Contains(requested, c.LimitMiB):
		case c.LimitMiB == 0:
			r.Differences = append(r.Differences, "the driver has no limit for the container")
			return
		default:
			r.ReadMiB = c.LimitMiB
			r.Differences = append(r.Differences, fmt.Sprintf("the driver's limit is %d MiB", c.LimitMiB))
			return
		}
	}
}

func editsOf(a kubelet.Answer) containeredits.Edits {
	return containeredits.Edits{Env: a.Env, Annotations: a.Annotations, CDIDevices: a.CDIDevices}
}

// now returns how the present layer of a GPU differs from the layer at the start of the
// container.
func now(layer string, gpus map[string]GPU, uuid string) []string {
	gpu, inUnits := gpus[uuid]
	switch {
	case !inUnits:
		return []string{"the GPU is no longer offered in units"}
	case layer == byNone && gpu.MPS:
		return []string{"the container started without limits, but is configured for limits by MPS"}
	case layer == byNone && gpu.Driver:
		return []string{"the container started without limits, but is configured for limits by the driver"}
	case layer == byDriver && !gpu.Driver:
		return []string{"the container started with a limit by the driver, but is configured for none"}
	case layer == byMPS && !gpu.MPS:
		return []string{"the container started as a client of MPS, but is configured for no limits"}
	case layer == byMPS && gpu.Away != "":
		return []string{gpu.Away}
	case layer == byMPS && gpu.OwnLimits != "":
		return []string{"the MPS control daemon allows each client " + gpu.OwnLimits}
	}
	return nil
}
