package daemon

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/unitreport"
)

// errNoKubelet is why the kubelet's checkpoint is not read.
var errNoKubelet = errors.New("the kubelet's directory is not used")

// unitHolders returns the containers with units of GPUs, each with its receipt. Facts that
// are unknown at the end of ctx are omitted.
func (w *kubeletWing) unitHolders(ctx context.Context, devices []kubelet.ContainerDevice) []status.Holder {
	if !slices.ContainsFunc(devices, func(c kubelet.ContainerDevice) bool { return resource.UnitMiB(c.Resource) > 0 }) {
		return nil // without reading the checkpoint
	}
	answers := unitreport.Answers{Err: errNoKubelet}
	if w.directory != nil {
		answers.All, answers.Err = w.directory.Answers()
	}
	plan := w.set.Offered().Value()
	gpus := gpusInUnits(plan, w.mps)
	read := LimitReader{w.gpus.monitor, func(wanted func(string) bool) (map[string][]kubelet.SeenContainer, error) {
		return kubelet.SeenContainers(kubelet.PodCgroups, "/proc", wanted)
	}}
	read.Into(ctx, gpus, plan, answers.All)
	return unitreport.Of(devices, answers, gpus)
}

// A LimitReader asks the driver for the limits of cgroups.
type LimitReader struct {
	// Driver is a Monitor.
	Driver interface {
		MemoryLimits(ctx context.Context, cgroups map[string][]string) (map[string]map[string]int, error)
	}
	// Containers returns the containers of the wanted pods, by the UID of the pod.
	Containers func(wanted func(uid string) bool) (map[string][]kubelet.SeenContainer, error)
}

// Into adds the driver's limits to GPUs whose limits the driver enforces, for pods with
// units of them. It reads nothing if this process sees no cgroups of pods.
func (r LimitReader) Into(ctx context.Context, gpus map[string]unitreport.GPU, plan resource.Plan,
	answers []kubelet.Answer) {
	pods := map[string]map[string]bool{} // UIDs of pods, by UUID of the GPU
	for _, a := range answers {
		for _, id := range a.IDs {
			if uuid, _ := resource.SplitID(id); resource.UnitMiB(a.Resource) > 0 && gpus[uuid].Driver {
				if pods[uuid] == nil {
					pods[uuid] = map[string]bool{}
				}
				pods[uuid][a.PodUID] = true
			}
		}
	}
	if len(pods) == 0 {
		return
	}
	containers, err := r.Containers(func(uid string) bool {
		for _, of := range pods {
			if of[uid] {
				return true
			}
		}
		return false
	})
	cgroups := map[string][]string{}
	for uuid, of := range pods {
		for uid := range of {
			for _, c := range containers[uid] {
				cgroups[uuid] = append(cgroups[uuid], c.Cgroup)
			}
		}
	}
	if err != nil || len(cgroups) == 0 {
		return
	}
	limits, err := r.Driver.MemoryLimits(ctx, cgroups)
	if err != nil {
		return
	}
	for uuid, of := range pods {
		gpu := gpus[uuid]
		gpu.Read = map[string][]unitreport.Cgroup{}
		node := "nvidia" + strconv.Itoa(minorOf(plan, uuid))
		for uid := range of {
			for _, c := range containers[uid] {
				if mib, known := limits[uuid][c.Cgroup]; known {
					gpu.Read[uid] = append(gpu.Read[uid],
						unitreport.Cgroup{LimitMiB: mib, HasGPU: slices.Contains(c.Nodes, node)})
				}
			}
		}
		gpus[uuid] = gpu
	}
}

// minorOf returns the number of the device node of a GPU in a plan.
func minorOf(plan resource.Plan, uuid string) int {
	for _, r := range plan.Resources {
		for _, d := range r.Members() {
			if d.UUID == uuid {
				return d.Minor
			}
		}
	}
	return -1
}

// gpusInUnits returns the state of the plan's GPUs in units, by UUID.
func gpusInUnits(plan resource.Plan, prober *mps.Prober) map[string]unitreport.GPU {
	gpus, unready := map[string]unitreport.GPU{}, prober.Unready().Value()
	for _, r := range plan.Resources {
		if !r.InUnits() {
			continue
		}
		for _, d := range r.Members() {
			g := unitreport.GPU{MPS: d.Sharing == resource.InMPSUnits, Driver: d.Sharing == resource.InDriverUnits}
			if g.MPS {
				g.Away, g.OwnLimits = unready[d.MPSDaemon()], prober.OwnLimits(d.MPSDaemon())
			}
			gpus[d.UUID] = g
		}
	}
	return gpus
}

// addUnits adds the memory in units to each GPU.
func addUnits(devices []status.Device, plan resource.Plan) {
	for _, r := range plan.Resources {
		if !r.InUnits() {
			continue
		}
		for i := range devices {
			devices[i].UnitsMiB += r.UnitCount(devices[i].UUID) * resource.UnitMiB(r.Name)
		}
	}
}
