package daemon

import (
	"errors"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/receipt"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// errNoKubelet is why kubelet's checkpoint is not read.
var errNoKubelet = errors.New("kubelet's directory is not used")

// unitHolders returns which of the containers have units of GPUs, each with its receipt.
func (d *daemon) unitHolders(devices []kubelet.ContainerDevice) []status.Holder {
	if !slices.ContainsFunc(devices, func(c kubelet.ContainerDevice) bool { return resource.UnitMiB(c.Resource) > 0 }) {
		return nil // the checkpoint is not read for it
	}
	answers := receipt.Answers{Err: errNoKubelet}
	if d.directory != nil {
		answers.All, answers.Err = d.directory.Answers()
	}
	return receipt.Of(devices, answers, gpusInUnits(d.set.Offered().Value(), d.mps))
}

// gpusInUnits returns what is known of the GPUs that a plan has in units, by UUID.
func gpusInUnits(plan resource.Plan, prober *mps.Prober) map[string]receipt.GPU {
	gpus, unready := map[string]receipt.GPU{}, prober.Unready().Value()
	for _, r := range plan.Resources {
		if !r.InUnits() {
			continue
		}
		for _, d := range r.Members() {
			g := receipt.GPU{MPS: d.Sharing == resource.InMPSUnits, Driver: d.Sharing == resource.InDriverUnits}
			if g.MPS {
				g.Away, g.OwnLimits = unready[d.MPSDaemon()], prober.OwnLimits(d.MPSDaemon())
			}
			gpus[d.UUID] = g
		}
	}
	return gpus
}

// addUnits says of each GPU how much of its memory a plan has in units.
func addUnits(devices []status.Device, plan resource.Plan) {
	for _, r := range plan.Resources {
		if !r.InUnits() {
			continue
		}
		mib := map[string]int{}
		for _, d := range r.Devices {
			mib[d.UUID] += resource.UnitMiB(r.Name)
		}
		for i := range devices {
			devices[i].UnitsMiB += mib[devices[i].UUID]
		}
	}
}
