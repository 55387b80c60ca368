package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// An Inspector decides whether a container may start on its devices now. It requests a
// scan from the monitor, and then makes the configured checks.
//
// An unresponsive driver is a reason to refuse: the state of the GPUs is unknown, and the
// container would hang on the GPUs as well. A driver released for maintenance is no
// reason. Then the last verdicts count, set to Unknown by quiesce unless allocation
// continues, and checks that need the driver are skipped.
type Inspector struct {
	Configs *feed.Feed[config.Config]
	Monitor *monitor.Monitor
}

// Inspect returns why the devices must not be used, with the remedy, in a sentence for the
// pod's events; nil if they may. It waits for the driver until ctx ends.
func (i *Inspector) Inspect(ctx context.Context, devices []resource.Device) error {
	wanted := i.Configs.Value().PreStart
	if wanted.Checks == config.PreStartNone {
		return nil
	}
	snapshot, err := i.Monitor.Look(ctx)
	released := errors.Is(err, monitor.ErrQuiesced)
	switch {
	case released:
		snapshot = i.Monitor.Snapshots().Value()
	case err != nil:
		return unseen(devices, err)
	}
	devices = completeDevices(snapshot, devices)
	if err := unfit(snapshot, devices); err != nil || wanted.Checks != config.PreStartClean {
		return err
	}
	if !released {
		err = i.clean(ctx, exclusive(snapshot, devices), wanted.Reset)
		released = errors.Is(err, monitor.ErrQuiesced)
	}
	if released {
		klog.FromContext(ctx).V(2).Info("Container starts on GPUs that were not checked", "reason",
			monitor.ErrQuiesced.Error())
		return nil
	}
	return err
}

// clean returns why devices, each a whole GPU, are not clean. It resets the configured
// remnants of earlier work on unused devices. The error wraps monitor.ErrQuiesced if the
// driver was released meanwhile.
func (i *Inspector) clean(ctx context.Context, devices []resource.Device, reset []inventory.Remnant) error {
	if len(devices) == 0 {
		return nil
	}
	gpus := make([]string, len(devices))
	for j, d := range devices {
		gpus[j] = d.GPU
	}
	processes, err := i.Monitor.Processes(ctx, gpus)
	if err != nil {
		return unseen(devices, err)
	}
	if err := inUse(devices, processes); err != nil || len(reset) == 0 {
		return err
	}
	if err := i.Monitor.Clean(ctx, gpus, reset); err != nil {
		return unseen(devices, err)
	}
	return unfit(i.Monitor.Snapshots().Value(), devices) // after a new scan
}

// completeDevices returns the devices, and completes devices of which only the UUID is known from a
// Snapshot.
func completeDevices(s inventory.Snapshot, devices []resource.Device) []resource.Device {
	devices = slices.Clone(devices)
	for i := range devices {
		d := &devices[i]
		for _, g := range s.GPUs {
			if d.GPU == "" && d.UUID == g.UUID {
				d.GPU, d.Index = g.UUID, fmt.Sprint(g.Index)
			}
			for _, m := range g.MIGDevices {
				if d.GPU == "" && d.UUID == m.UUID {
					d.GPU, d.Index = g.UUID, fmt.Sprintf("%d:%d", g.Index, m.Index)
				}
			}
		}
	}
	return devices
}

// exclusive returns the devices that are whole, unshared GPUs. On other devices, processes
// of other containers are normal.
func exclusive(s inventory.Snapshot, devices []resource.Device) []resource.Device {
	var all []resource.Device
	for _, d := range devices {
		g, _ := s.GPU(d.GPU)
		if d.UUID == d.GPU && d.Sharing == resource.Unshared && g.MIG != inventory.MIGEnabled {
			all = append(all, d)
		}
	}
	return all
}

// unfit returns why a device is not Healthy; nil if all are.
func unfit(s inventory.Snapshot, devices []resource.Device) error {
	for _, d := range devices {
		h, found := healthOf(s, d)
		switch {
		case !found:
			return fmt.Errorf("%s has disappeared: bring it back", name(d))
		case h.State != inventory.Healthy:
			return fmt.Errorf("%s is %s: %s", name(d), h.State, h.Why())
		}
	}
	return nil
}

// healthOf returns the verdict on a device: on its GPU or on the MIG device, whichever is worse.
func healthOf(s inventory.Snapshot, d resource.Device) (h inventory.Health, found bool) {
	g, found := s.GPU(d.GPU)
	if d.UUID == d.GPU {
		return g.Fitness(), found
	}
	for _, m := range g.MIGDevices {
		if m.UUID == d.UUID {
			return inventory.Worst(g.Fitness(), m.Health), true
		}
	}
	return inventory.Health{}, false
}

// inUse returns an error about the processes on the first device with processes; nil if
// there are none. The error wraps inventory.ErrInUse.
func inUse(devices []resource.Device, processes map[string][]inventory.Process) error {
	for _, d := range devices {
		found := processes[d.GPU]
		if len(found) == 0 {
			continue
		}
		var list []string
		for _, p := range found {
			list = append(list, process(p))
		}
		return fmt.Errorf("%s is still %w; compute processes of earlier work: %d (%s); stop them on the node, or "+
			"wait until they have ended", name(d), inventory.ErrInUse, len(found), inventory.Few(list))
	}
	return nil
}

func process(p inventory.Process) string {
	if !p.MemoryBytes.Known {
		return fmt.Sprintf("PID %d", p.PID)
	}
	return fmt.Sprintf("PID %d with %d MiB", p.PID, p.MemoryBytes.Value>>20)
}

// unseen returns an error about devices that could not be scanned.
func unseen(devices []resource.Device, err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, inventory.ErrNoAnswer) {
		err = fmt.Errorf("%w: see the kernel log; if this lasts, restart the node",
			inventory.ErrNoAnswer)
	}
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = name(d)
	}
	return fmt.Errorf("%s cannot be checked: %w", strings.Join(names, ", "), err)
}

// name names a device by its index, for people, and by its UUID, unchanged when indices change.
func name(d resource.Device) string {
	if d.Index == "" {
		return d.UUID
	}
	if d.UUID == d.GPU {
		return fmt.Sprintf("GPU %s (%s)", d.Index, d.UUID)
	}
	return fmt.Sprintf("MIG device %s (%s)", d.Index, d.UUID)
}
