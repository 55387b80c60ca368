package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/driverroot"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Prover checks CUDA on devices, each in a separate process.
type Prover struct {
	// DriverRoot is the path of the driver in this process's view.
	DriverRoot string
	// SearchPath are folders below DriverRoot that are searched for libraries first.
	SearchPath []string
	// Simulated is true on a simulated node. Its GPUs cannot compute: without a libcuda
	// below the driver root they pass.
	Simulated bool
}

// Prove checks CUDA on a device, by UUID.
func (p Prover) Prove(ctx context.Context, uuid string) cuda.Proof {
	if p.Simulated && driverroot.Locate(p.DriverRoot, cuda.Library, p.SearchPath...) == "" {
		ended := make(chan struct{})
		close(ended)
		return cuda.Proof{Ended: ended}
	}
	return cuda.Run(ctx, p.DriverRoot, uuid, p.SearchPath...)
}

// newProofs returns the owner of the CUDA checks.
func (w *maintenanceWing) newProofs(ctx context.Context) *cudacheck.Proofs {
	prover := Prover{DriverRoot: w.startup.Driver.ContainerRoot, SearchPath: w.startup.Driver.SearchPath,
		Simulated: w.gpus.node != nil}
	return cudacheck.New(ctx, cudacheck.Options{
		Configs: w.watcher.Configs(), Snapshots: w.gpus.monitor.Snapshots(), Prove: prover.Prove, Reserve: w.reserve,
		Report: func(ctx context.Context, uuid string, f *cuda.Failure) error {
			if f == nil {
				return w.gpus.monitor.Proven(ctx, uuid, "", inventory.NoRemedy)
			}
			return w.gpus.monitor.Proven(ctx, uuid, f.Error(), remedyOf(f))
		},
		Lead: w.lead.Check, StateDir: w.startup.StateDir, BootID: BootID(w.gpus.node),
	})
}

// remedyOf returns the remedy of a device on which CUDA does not work.
func remedyOf(f *cuda.Failure) inventory.Remedy {
	switch {
	case f.Code == cuda.SystemNotReady:
		return inventory.RemedyFabric
	case f.Kind == cuda.Hangs:
		return inventory.RemedyReset
	case f.IsTransient() || f.Code == cuda.DriverMismatch:
		return inventory.RemedyHuman
	}
	return inventory.RemedyReset
}

// reservePatience is the longest wait for answers about the users of a GPU.
const reservePatience = 10 * time.Second

// reserve withholds a device from pods and claims until release is called. The device must
// have a hold, so that it is listed as Unhealthy.
func (w *maintenanceWing) reserve(ctx context.Context, device cudacheck.Device) (release func(), err error) {
	users, release, err := w.usersOf(ctx, device.GPU, []string{device.UUID},
		func(ctx context.Context) ([]inventory.Process, error) {
			found, err := w.gpus.monitor.Processes(ctx, []string{device.GPU})
			return device.Computes(found[device.GPU]), err
		})
	if len(users) > 0 {
		err = errors.New("in use by " + users[0])
	}
	return release, err
}

// usersOf returns the users of devices of a GPU, by UUID: the GPU or its MIG devices. The
// first device is reserved. Function computing returns processes; it is called only if no
// claim or pod uses the devices. Without users and error, neither pods nor claims get the
// device until release is called.
func (w *maintenanceWing) usersOf(
	ctx context.Context, gpu string, devices []string, computing func(context.Context) ([]inventory.Process, error),
) (users []string, release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, reservePatience)
	defer cancel()
	if h, divided := w.mig.dividing.Value()[gpu]; divided && h.Reason != "" {
		return nil, nil, errors.New(h.Reason)
	}
	release = func() {}
	if w.claims.dra != nil {
		if release, err = w.claims.dra.Claims.Reserve(ctx, gpu, devices[0]); err != nil {
			for _, c := range claims.Of(w.claims.dra.Claims.Status().Value(), devices[:1]) {
				users, err = append(users, "the claim "+c.Namespace+"/"+c.Name), nil
			}
			return users, nil, err
		}
	}
	if w.kubelet.directory != nil {
		var held []kubelet.HeldDevice
		held, err = w.kubelet.set.Holders(ctx, devices)
		for _, h := range held {
			users = append(users, "pod "+h.Pod)
		}
	}
	if err == nil && len(users) == 0 {
		var processes []inventory.Process
		processes, err = computing(ctx)
		for _, p := range processes {
			users = append(users, fmt.Sprintf("process %d", p.PID))
		}
	}
	switch {
	case len(users) > 0:
		err = nil
	case err == nil:
		return nil, release, nil
	}
	release()
	return users, nil, err
}

// unready returns why devices must not be allocated to a pod: the driver is not accepted or is
// being changed, a GPU is being reset, or a device has no successful CUDA check; nil if they may
// be.
func (w *maintenanceWing) unready(devices []resource.Device) error {
	s := w.gpus.monitor.Snapshots().Value()
	if why := w.watcher.Configs().Value().Accepted.Refuses(s.Driver); why != "" {
		return errors.New(why)
	}
	if w.swaps.Status().Value().Withholds {
		return errors.New(driverchange.HoldReason)
	}
	held := w.proofs.Unproven(s)
	for _, device := range devices {
		if err := w.resets.Withheld(device.GPU); err != nil {
			return err
		}
		if why := held[device.UUID]; why != "" {
			return fmt.Errorf("%s: %s", device.UUID, why)
		}
	}
	return nil
}

// inspectForClaim returns why a claim cannot have its devices now. The reason may be temporary.
func (w *maintenanceWing) inspectForClaim(ctx context.Context, devices []resource.Device) error {
	if err := w.unready(devices); err != nil {
		return fmt.Errorf("%w yet: %w", inventory.ErrInUse, err)
	}
	return (&Inspector{Configs: w.watcher.Configs(), Monitor: w.gpus.monitor}).Inspect(ctx, devices)
}

// validation returns the status of the CUDA checks; nil if none are configured.
func (w *maintenanceWing) validation(s inventory.Snapshot) *status.Validation {
	if !w.watcher.Configs().Value().Validate {
		return nil
	}
	progress := w.proofs.Status().Value()
	v := &status.Validation{
		Devices: []status.Validated{}, Seconds: progress.Done.Round(10 * time.Millisecond).Seconds(),
		Unsaved: progress.Unsaved,
	}
	for _, device := range cudacheck.Devices(s) {
		shown := status.Validated{Index: device.Index, UUID: device.UUID, Result: status.Waiting,
			Reason: progress.Waiting[device.UUID]}
		shown.InUse = progress.InUse[device.UUID]
		if verdict, valid := w.proofs.Record(s, device); valid {
			shown.Result, shown.Since, shown.Reason, shown.InUse = status.Proven, status.Moment(verdict.At), "", false
			shown.Milliseconds, shown.MemoryBytes = verdict.Milliseconds, verdict.MemoryBytes
			if verdict.Failure != nil {
				shown.Result, shown.Reason, shown.Retry = status.Failed, verdict.Failure.Error(),
					status.Moment(progress.Retry[device.UUID])
			}
		}
		v.Devices = append(v.Devices, shown)
	}
	return v
}
