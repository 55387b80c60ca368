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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Prover proves that CUDA works on devices, each in a process of its own.
type Prover struct {
	// DriverRoot is where the driver is, as this process sees it.
	DriverRoot string
	// SearchPath are folders below it in which libraries are looked for before others.
	SearchPath []string
	// Simulated says that the node is simulated. Its GPUs cannot compute: without a libcuda below the
	// driver root they count as proven.
	Simulated bool
}

// Prove proves that CUDA works on a device, by UUID.
func (p Prover) Prove(ctx context.Context, uuid string) cuda.Proof {
	if p.Simulated && driverroot.Locate(p.DriverRoot, cuda.Library, p.SearchPath...) == "" {
		ended := make(chan struct{})
		close(ended)
		return cuda.Proof{Ended: ended}
	}
	return cuda.Run(ctx, p.DriverRoot, uuid, p.SearchPath...)
}

// newProofs returns the owner of what is proven of CUDA.
func (d *daemon) newProofs(ctx context.Context) *cudacheck.Proofs {
	prover := Prover{DriverRoot: d.config.Driver.ContainerRoot, SearchPath: d.config.Driver.SearchPath,
		Simulated: d.node != nil}
	return cudacheck.New(ctx, cudacheck.Options{
		Configs: d.watcher.Configs(), Snapshots: d.monitor.Snapshots(), Prove: prover.Prove, Reserve: d.reserve,
		Tell: func(ctx context.Context, uuid string, f *cuda.Failure) error {
			if f == nil {
				return d.monitor.Proven(ctx, uuid, "", inventory.NoRemedy)
			}
			return d.monitor.Proven(ctx, uuid, f.Error(), remedyOf(f))
		},
		Lead: d.lead.Check, StateDir: d.config.StateDir, BootID: BootID(d.node),
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

// reserve keeps a device from pods and claims until release is called. A hold is on it: it is
// listed as Unhealthy.
func (d *daemon) reserve(ctx context.Context, device cudacheck.Device) (release func(), err error) {
	users, release, err := d.usersOf(ctx, device.GPU, []string{device.UUID},
		func(ctx context.Context) ([]inventory.Process, error) {
			found, err := d.monitor.Processes(ctx, []string{device.GPU})
			return device.Computes(found[device.GPU]), err
		})
	if len(users) > 0 {
		err = errors.New("in use by " + users[0])
	}
	return release, err
}

// usersOf returns who uses one of some devices of a GPU, by UUID: the GPU or MIG devices of it, the
// first of which is to be reserved. Processes, which computing returns, are looked for where no
// claim or pod does. Without users and error, neither pods nor claims get the device until release
// is called.
func (d *daemon) usersOf(
	ctx context.Context, gpu string, devices []string, computing func(context.Context) ([]inventory.Process, error),
) (users []string, release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, reservePatience)
	defer cancel()
	if h, divided := d.dividing.Value()[gpu]; divided && h.Reason != "" {
		return nil, nil, errors.New(h.Reason)
	}
	release = func() {}
	if d.dra != nil {
		if release, err = d.dra.Claims.Reserve(ctx, gpu, devices[0]); err != nil {
			for _, c := range claims.Of(d.dra.Claims.Status().Value(), devices[:1]) {
				users, err = append(users, "the claim "+c.Namespace+"/"+c.Name), nil
			}
			return users, nil, err
		}
	}
	if d.directory != nil {
		var held []kubelet.HeldDevice
		held, err = d.set.Holders(ctx, devices)
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

// unready returns why devices are not given to a pod: the driver is not accepted, the GPU of one of
// them is being reset, or CUDA is not proven on one. It is nil where they may be.
func (d *daemon) unready(devices []resource.Device) error {
	s := d.monitor.Snapshots().Value()
	if why := d.watcher.Configs().Value().Accepted.Refuses(s.Driver); why != "" {
		return errors.New(why)
	}
	held := d.proofs.Unproven(s)
	for _, device := range devices {
		if err := d.resets.Withheld(device.GPU); err != nil {
			return err
		}
		if why := held[device.UUID]; why != "" {
			return fmt.Errorf("%s: %s", device.UUID, why)
		}
	}
	return nil
}

// inspectForClaim returns why a claim does not get its devices now. What they lack may come.
func (d *daemon) inspectForClaim(ctx context.Context, devices []resource.Device) error {
	if err := d.unready(devices); err != nil {
		return fmt.Errorf("%w yet: %w", inventory.ErrInUse, err)
	}
	return (&Inspector{Configs: d.watcher.Configs(), Monitor: d.monitor}).Inspect(ctx, devices)
}

// validation is what the status says of proofs; nil where they are not asked for.
func (d *daemon) validation(s inventory.Snapshot) *status.Validation {
	if !d.watcher.Configs().Value().Validate {
		return nil
	}
	progress := d.proofs.Status().Value()
	v := &status.Validation{
		Devices: []status.Validated{}, Seconds: progress.Done.Round(10 * time.Millisecond).Seconds(), Unsaved: progress.Unsaved,
	}
	for _, device := range cudacheck.Devices(s) {
		shown := status.Validated{Index: device.Index, UUID: device.UUID, Result: status.Waiting,
			Reason: progress.Waiting[device.UUID]}
		shown.InUse = progress.InUse[device.UUID]
		if verdict, valid := d.proofs.Record(s, device); valid {
			shown.Result, shown.Since, shown.Reason, shown.InUse = status.Proven, status.Moment(verdict.At), "", false
			shown.Milliseconds, shown.MemoryBytes = verdict.Milliseconds, verdict.MemoryBytes
			if verdict.Failure != nil {
				shown.Result, shown.Reason, shown.Retry = status.Failed, verdict.Failure.Error(), status.Moment(progress.Retry[device.UUID])
			}
		}
		v.Devices = append(v.Devices, shown)
	}
	return v
}
