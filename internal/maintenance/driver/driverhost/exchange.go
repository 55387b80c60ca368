package driverhost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/nodefiles"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
)

// clients are the services that are stopped for a change and started again: they use the driver, and
// run no workload of users.
var clients = []string{"nvidia-persistenced.service", "nvidia-fabricmanager.service", "nvidia-imex.service",
	"nvidia-dcgm.service", "dcgm.service", "nvidia-dcgm-exporter.service", "dcgm-exporter.service",
	"nvidia-powerd.service", "nvidia-topologyd.service"}

// unload unloads the present driver, and enters the step of loading the new one.
func (h *Host) unload(ctx context.Context) (time.Duration, error) {
	if pause, err := h.unloadModules(ctx); pause > 0 || err != nil {
		return pause, err
	}
	err := h.enter(driverapi.StepLoading, func(j *journal) {
		j.Loaded = loaded{j.Change.To, h.boot}
		j.Change.Loads++
	})
	if err != nil { // such as a full disk: the node must not stay without a driver
		return 0, errors.Join(err, h.restore(ctx))
	}
	h.counted = true
	return 0, nil
}

// unloadModules unloads the loaded driver. While the driver is in use it stays loaded, and
// unloadModules returns a pause.
func (h *Host) unloadModules(ctx context.Context) (time.Duration, error) {
	state, err := h.kernel.State()
	if err != nil {
		return 0, err
	}
	switch {
	case len(state.Own) == 0:
		return 0, nil
	case h.loaded() == "":
		return 0, fmt.Errorf("driver %s was loaded by another program", state.Version)
	}
	facts := h.places().ReadAll(ctx)
	if nodefiles.HidesProcesses(h.kernel.Files()) {
		facts.Processes.Missing = hiddenProcesses
	}
	// The kernel does not count a process that only maps libcuda among the users of the driver, and the next
	// call of the process would fail with another driver.
	isMapped := func(p preflight.Process) bool { return p.Library }
	all := facts.Processes.Value
	isUsed := state.IsUsed() || slices.ContainsFunc(all.Users, isMapped)
	isUnknown := !facts.Processes.Known() || len(all.Unread) > 0 || all.Closed > 0
	if isUsed || isUnknown {
		if !h.isWhole { // a process was killed while it unloaded modules
			if err := h.restore(ctx); err != nil {
				return 0, err
			}
		}
		if !isUsed {
			h.awaitUnread(facts)
			return h.o.Pause, nil
		}
		return h.stopServices(ctx, facts)
	}
	h.isWhole = false
	switch err := h.kernel.Unload(h.progress); {
	case errors.Is(err, driverkernel.ErrInUse): // since a moment ago
		return h.o.Pause, h.restore(ctx)
	case err != nil:
		return 0, errors.Join(err, h.restore(ctx))
	}
	return 0, nil
}

// hiddenProcesses says that not all processes of the node are visible.
const hiddenProcesses = "gpu-driver does not see the processes of the node: run it with hostPID: true, or name the " +
	"node's root with --host-root"

// maxUnread limits the processes that awaitUnread names.
const maxUnread = 10

// awaitUnread records the processes that may use the driver, because their files could not be read.
func (h *Host) awaitUnread(facts preflight.Facts) {
	all := facts.Processes.Value
	switch {
	case !facts.Processes.Known():
		h.setWaiting("the users of the driver are not known: "+facts.Processes.Missing, nil)
		return
	case len(all.Unread) == 0:
		h.setWaiting(fmt.Sprintf("the open files of %d of %s could not be read: run gpu-driver as root, with all "+
			"capabilities", all.Closed, wording.Count(all.Number, "process")), nil)
		return
	}
	unread := all.Unread
	var holders []preflight.Holder
	for _, pid := range unread[:min(len(unread), maxUnread)] {
		name := nodefiles.Root{FS: h.kernel.Files()}.Line(fmt.Sprintf("proc/%d/comm", pid))
		holders = append(holders, preflight.Holder{Kind: preflight.KindProcess, PIDs: []int{pid},
			Name:    fmt.Sprintf("%s (%d)", cmp.Or(name, "unnamed"), pid),
			Release: fmt.Sprintf("end the process: kill %d, or restart the node", pid)})
	}
	h.setWaiting(fmt.Sprintf("%d of %s could not be read in time, and may use the driver", len(unread),
		wording.Count(all.Number, "process")), holders)
}

// restore loads the unloaded modules of the present driver again.
func (h *Host) restore(ctx context.Context) error {
	if digest := h.loaded(); digest != "" {
		return h.loadFolder(ctx, digest)
	}
	return nil
}

// stopServices stops the services that use the driver, and records its other users, by the facts.
func (h *Host) stopServices(ctx context.Context, facts preflight.Facts) (time.Duration, error) {
	facts.Devices.Missing, facts.Claims.Missing = "", ""
	holders := preflight.Examine(facts).Holders
	h.setWaiting(inUse(holders), holders)
	var services []string
	others := slices.DeleteFunc(slices.Clone(holders), func(one preflight.Holder) bool {
		if one.Kind != preflight.KindService || !slices.Contains(clients, one.Name) {
			return false
		}
		services = append(services, one.Name)
		return true
	})
	for _, name := range services {
		if !slices.Contains(h.Services, name) {
			if err := h.write(func(j *journal) { j.Services = append(j.Services, name) }); err != nil {
				return 0, err
			}
		}
		klog.FromContext(ctx).Info("Stopping a service that uses the driver", "service", name)
		if err := h.kernel.Calls.Run(ctx, "systemctl", "stop", name); err != nil {
			return 0, fmt.Errorf("stop the service %s, which uses the driver: %w", name, err)
		}
	}
	if state, err := h.kernel.State(); len(services) > 0 && err == nil && !state.IsUsed() && len(others) == 0 {
		return time.Millisecond, nil
	}
	h.setWaiting(inUse(others), others)
	return h.o.Pause, nil
}

// inUse returns the sentence about the users of the driver.
func inUse(holders []preflight.Holder) string {
	var names []string
	for _, one := range holders {
		names = append(names, one.Kind+" "+one.Name)
	}
	return "the driver is in use by " + cmp.Or(strings.Join(names, ", "), "something that was not found")
}

// startServices starts the services that were stopped. A service that does not start is named in the
// log: it may not fit the new driver.
func (h *Host) startServices(ctx context.Context) error {
	if len(h.Services) == 0 {
		return nil
	}
	for _, name := range h.Services {
		if err := h.kernel.Calls.Run(ctx, "systemctl", "start", name); err != nil {
			klog.FromContext(ctx).Error(err, "A service of the driver does not start again", "service", name)
		}
	}
	return h.write(func(j *journal) { j.Services = nil })
}

// load loads the new driver. No module of another one is loaded.
func (h *Host) load(ctx context.Context) error {
	if reason := h.otherDriver(); reason != "" {
		return h.enter(driverapi.StepReverting, func(j *journal) { j.Change.Reason = reason })
	}
	if !h.counted {
		if h.Change.Loads >= maxLoads {
			return h.enter(driverapi.StepReverting, func(j *journal) {
				j.Change.Reason = fmt.Sprintf("the node has loaded the driver %d times, and gpu-driver or the node "+
					"restarted each time before the driver was confirmed", j.Change.Loads)
			})
		}
		err := h.write(func(j *journal) {
			j.Loaded = loaded{j.Change.To, h.boot}
			j.Change.Loads++
			j.Change.BootID = h.boot
		})
		if err != nil {
			return err
		}
		h.counted = true
	}
	if err := h.store.SetCurrent(h.Change.To); err != nil {
		return err
	}
	switch err := h.loadFolder(ctx, h.Change.To); {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return h.enter(driverapi.StepReverting, func(j *journal) { j.Change.Reason = err.Error() })
	}
	if err := h.startServices(ctx); err != nil {
		return err
	}
	return h.enter(driverapi.StepUnproven, nil)
}

// otherDriver says that a driver is loaded that gpu-driver did not load; empty if none is.
func (h *Host) otherDriver() string {
	state, err := h.kernel.State()
	switch {
	case err != nil:
		return ""
	case state.Nouveau:
		return "the kernel has loaded nouveau, which has the GPUs"
	case len(state.Own) > 0 && h.loaded() == "":
		return "another program has loaded driver " + state.Version
	}
	return ""
}

// revert loads the former driver again.
func (h *Host) revert(ctx context.Context) (time.Duration, error) {
	from, to := h.Change.From, h.Change.To
	if from == to { // there is no other driver to go back to
		return 0, h.fail(h.Change.Reason)
	}
	other := h.otherDriver()
	if other == "" && h.loaded() == to {
		if pause, err := h.unloadModules(ctx); pause > 0 || err != nil {
			return pause, err
		}
	}
	if other == "" && h.loaded() != from {
		h.loadsAgain(ctx, loaded{from, h.boot})
	}
	if err := h.store.SetCurrent(from); err != nil {
		return 0, err
	}
	reason := h.Change.Reason
	if other == "" && from != "" {
		if err := h.loadModules(ctx, from); err != nil {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			reason += "; the former driver cannot be loaded either: " + err.Error()
		}
	}
	if err := h.startServices(ctx); err != nil {
		return 0, err
	}
	return 0, h.fail(reason)
}

// loadsAgain records that the modules of the former driver may be loaded. If the disk is full, the
// record stays in memory and the former driver is loaded nevertheless: at worst the next process
// unloads and loads it once more.
func (h *Host) loadsAgain(ctx context.Context, now loaded) {
	if err := h.write(func(j *journal) { j.Loaded = now }); err != nil {
		klog.FromContext(ctx).Error(err, "The journal of driver changes was not written")
		h.mu.Lock()
		defer h.mu.Unlock()
		h.Loaded = now
	}
}
