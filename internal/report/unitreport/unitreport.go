// Package unitreport makes receipts for containers with units of GPUs: what each asked for, what it
// was given, and what the layer that holds it to its limit says now.
//
// It is policy: kubelet's accounts go in, and nothing is read on the way. Kubelet names no pod when
// it allocates, and a container's memory and percentage are two calls. So they are joined here,
// afterwards.
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
	byNoOne  = "none"
)

// A GPU is what is known of a GPU in units.
type GPU struct {
	// MPS says that limits of its units are to be held by MPS.
	MPS bool
	// Driver says that limits of its units are to be held by the driver.
	Driver bool
	// Away is why the control daemon of the GPU does not serve; empty if it does, or there is none.
	Away string
	// OwnLimits are limits that the control daemon has for all clients; empty if there are none.
	OwnLimits string
	// Read are what the driver says of the cgroups of pods with units of the GPU, by the UID of the
	// pod. A pod without is not seen.
	Read map[string][]Cgroup
}

// A Cgroup is that of a container. Which container of its pod it is, is not known.
type Cgroup struct {
	// LimitMiB is how much of the GPU's memory its processes may use; 0 where the driver limits
	// nothing.
	LimitMiB int
	// HasGPU says that the container has the device node of the GPU. Where false, it may have none, or
	// that is not seen.
	HasGPU bool
}

// Answers are what kubelet keeps of Allocate. Err is why it is not known.
type Answers struct {
	All []kubelet.Answer
	Err error
}

// A part is what a container has of one resource.
type part struct {
	resource string
	ids      []string
}

// A container is one that has units. One with units of two sizes is two.
type container struct {
	namespace, pod, name string
	memory, percentage   part
	gpus                 map[string]bool // UUIDs of those of which it has units, of any size
}

// Of returns the containers that have units of GPUs, each with a receipt, once for a GPU, in the
// order of devices. The GPUs in units are by UUID; of one that is not there, nothing is on offer in
// units.
func Of(devices []kubelet.ContainerDevice, answers Answers, gpus map[string]GPU) []status.Holder {
	var holders []status.Holder
	for _, c := range containers(devices) {
		given := map[string]int{} // MiB, by UUID of the GPU
		var order []string
		for _, id := range c.memory.ids {
			uuid, _ := resource.SplitID(id)
			if given[uuid] == 0 {
				order = append(order, uuid)
			}
			given[uuid] += resource.UnitMiB(c.memory.resource)
		}
		for _, uuid := range order {
			r := c.receipt(given[uuid], answers)
			if uid := answers.pod(c); r.Layer == byDriver && uid != "" {
				readBack(&r, gpus[uuid].Read[uid], answers.asked(uid, uuid))
			}
			if len(c.gpus) > 1 {
				r.Differences = append(r.Differences, fmt.Sprintf("the container has units of %d GPUs, and can use one",
					len(c.gpus)))
			}
			r.Differences = append(r.Differences, now(r.Layer, gpus, uuid)...)
			holders = append(holders, status.Holder{Device: uuid, Namespace: c.namespace, Pod: c.pod, Container: c.name,
				Receipt: &r})
		}
	}
	return holders
}

// containers joins the devices of containers that have units.
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
				at[sized] = &container{namespace: d.Namespace, pod: d.Pod, name: d.Container, memory: part{resource: d.Resource},
					gpus: gpus[key]}
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

// receipt compares what the container asked for with what it was given.
func (c *container) receipt(mib int, answers Answers) status.Receipt {
	r := status.Receipt{MemoryMiB: mib, Percentage: len(c.percentage.ids)}
	if answers.Err != nil {
		r.Differences = []string{"it is not known what it was given: " + answers.Err.Error()}
		return r
	}
	memory, known := answers.of(c.name, c.memory)
	if !known {
		r.Differences = []string{"kubelet's checkpoint does not have what it was given"}
		return r
	}
	r.Since, _ = time.Parse(time.RFC3339, memory.Annotations[containeredits.AllocatedKey]) // version 0.1 wrote none
	r.Layer = byNoOne
	given := editsOf(memory)
	limit, _ := given.Limits()
	switch {
	case given.IsMPSClient():
		r.Layer = byMPS
	case given.IsLimitedByDriver():
		r.Layer = byDriver
	}
	if r.Layer != byNoOne && limit != mib {
		r.Differences = append(r.Differences, fmt.Sprintf("it was given a limit of %d MiB", limit))
	}
	if r.Percentage == 0 {
		return r
	}
	threads, known := answers.of(c.name, c.percentage)
	if _, percentage := editsOf(threads).Limits(); !known || percentage != r.Percentage {
		r.Differences = append(r.Differences, fmt.Sprintf("it was given a limit of %d percent", percentage))
	}
	return r
}

// of returns the answer by which a container of that name was given all devices of a part.
func (a Answers) of(name string, p part) (kubelet.Answer, bool) {
	for _, answer := range a.All {
		if answer.Resource == p.resource && answer.Container == name && len(answer.IDs) == len(p.ids) &&
			slices.Contains(answer.IDs, p.ids[0]) {
			return answer, true
		}
	}
	return kubelet.Answer{}, false
}

// pod returns the UID of a container's pod; empty if that is not known.
func (a Answers) pod(c *container) string {
	answer, _ := a.of(c.name, c.memory)
	return answer.PodUID
}

// asked returns the MiB of a GPU that containers of a pod were given, init containers among them.
func (a Answers) asked(pod, gpu string) (all []int) {
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

// readBack adds to a receipt what the driver says. Of a pod's containers, which may not have
// started, it is only known which limits they asked for: the limit of this one is there, or a
// container with the GPU has one that none of them asked for.
func readBack(r *status.Receipt, cgroups []Cgroup, asked []int) {
	if slices.ContainsFunc(cgroups, func(c Cgroup) bool { return c.LimitMiB == r.MemoryMiB }) {
		r.ReadMiB = r.MemoryMiB
		return
	}
	for _, c := range cgroups {
		switch {
		case !c.HasGPU || c.LimitMiB > 0 && slices.Contains(asked, c.LimitMiB):
		case c.LimitMiB == 0:
			r.Differences = append(r.Differences, "the driver says that it has no limit")
			return
		default:
			r.ReadMiB = c.LimitMiB
			r.Differences = append(r.Differences, fmt.Sprintf("the driver says that its limit is %d MiB", c.LimitMiB))
			return
		}
	}
}

func editsOf(a kubelet.Answer) containeredits.Edits {
	return containeredits.Edits{Env: a.Env, Annotations: a.Annotations, CDIDevices: a.CDIDevices}
}

// now returns how the layer of a GPU differs now from the one that a container was given.
func now(layer string, gpus map[string]GPU, uuid string) []string {
	gpu, inUnits := gpus[uuid]
	switch {
	case !inUnits:
		return []string{"the GPU is no longer offered in units"}
	case layer == byNoOne && gpu.MPS:
		return []string{"it started without limits, and the configuration wants them by MPS"}
	case layer == byNoOne && gpu.Driver:
		return []string{"it started without limits, and the configuration wants them by the driver"}
	case layer == byDriver && !gpu.Driver:
		return []string{"it started with a limit by the driver, and the configuration wants none"}
	case layer == byMPS && !gpu.MPS:
		return []string{"it started as a client of MPS, and the configuration wants none"}
	case layer == byMPS && gpu.Away != "":
		return []string{gpu.Away}
	case layer == byMPS && gpu.OwnLimits != "":
		return []string{"the MPS control daemon lets each client have " + gpu.OwnLimits}
	}
	return nil
}
