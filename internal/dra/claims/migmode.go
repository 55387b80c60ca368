package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

// MIG mode can be switched for claims. The rules, in addition to the rules for MIG devices
// created for claims:
//
//   - The records say which mode a GPU needs: on for a claim with created MIG devices, off
//     for a claim with the whole GPU. Two claims with different modes never have a GPU at
//     the same time.
//   - The record of a claim with created MIG devices exists before the mode is switched on
//     and until the mode is off again, unless another such claim has the GPU by then.
//     Unprepare can succeed before: the record then says that the MIG devices are
//     destroyed. Such a record delays no claim, but keeps the GPU from the device plugin.
//   - The mode is never switched while a process uses the GPU or the GPU has an instance
//     of another program.

// needsSurvey reports whether the division of a GPU for claims must be queried.
func needsSurvey(g inventory.GPU, c config.DRA) bool {
	return c.DynamicMIG && (g.MIG == inventory.MIGEnabled || c.SwitchMIG && g.MIG == inventory.MIGDisabled)
}

// switchesMIG reports whether the MIG mode of a GPU, by UUID, is switched on for the
// claim.
func (r record) switchesMIG(uuid string) bool {
	return slices.ContainsFunc(r.Devices, func(d recordDevice) bool {
		return d.GPU == uuid && d.MIG != nil && d.MIG.Switched
	})
}

// checkMode returns why a GPU cannot have the MIG mode that a claim needs.
func (c *Claims) checkMode(ctx context.Context, g layout.GPU, mode inventory.MIGMode, switched bool) error {
	switch {
	case g.Mode == mode && g.Pending == mode:
		return nil
	case !switched && g.Mode != g.Pending:
		return fmt.Errorf("the MIG mode of GPU %s is being changed", g.UUID)
	case !switched:
		return fmt.Errorf("GPU %s is not in MIG mode", g.UUID)
	}
	return c.checkUnused(ctx, g.UUID)
}

// checkUnused returns an error with the name of a process on a GPU, by UUID: then the MIG
// mode of the GPU must not be switched.
func (c *Claims) checkUnused(ctx context.Context, uuid string) error {
	processes, err := c.options.Driver.Processes(ctx, []string{uuid})
	if err != nil {
		return fmt.Errorf("cannot check whether a process uses the GPU: %w", err)
	}
	for _, p := range processes[uuid] {
		return fmt.Errorf("the MIG mode of GPU %s cannot change while process %d uses the GPU: %w", uuid, p.PID,
			inventory.ErrInUse)
	}
	return nil
}

// applySteps applies the steps of a change. If a step fails, a pending mode is reverted:
// it would take effect at the next reset of the GPU.
func (c *Claims) applySteps(ctx context.Context, driver mig.Driver, change layout.GPUChange) error {
	step := func() error { c.store.step(); return nil }
	err := mig.ApplySteps(ctx, driver, change.GPU.UUID, change, step)
	c.store.step()
	if err == nil || change.Before.Mode == change.After.Mode {
		return err
	}
	if now, unknown := c.layoutOf(ctx, change.GPU.UUID); unknown == nil && now.Mode != now.Pending {
		err = errors.Join(err,
			mig.ApplySteps(ctx, driver, now.UUID, layout.Restore(now, now.Mode, now.Instances), step))
	}
	return err
}

// errForeignInstance is why the mode of a GPU is not switched off: the GPU has an instance
// that does not belong to the claim.
var errForeignInstance = errors.New("it does not belong to a claim")

// disableMIG switches the MIG mode of a GPU, by UUID, off. The caller has the lock of the
// GPU.
func (c *Claims) disableMIG(ctx context.Context, uuid string) error {
	if err := c.mayChange(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	g, err := c.layoutOf(ctx, uuid)
	switch {
	case err != nil:
		return err
	case g.Mode != inventory.MIGEnabled && g.Pending != inventory.MIGEnabled:
		return nil
	}
	for _, i := range g.Instances {
		return fmt.Errorf("GPU instance %d (%s at memory slice %d) of GPU %s blocks the change: %w",
			i.ID, i.Profile, i.Start,
			uuid, errForeignInstance)
	}
	if err := c.checkMode(ctx, g, inventory.MIGDisabled, true); err != nil {
		return err
	}
	return c.applySteps(ctx, c.options.Driver, layout.Restore(g, inventory.MIGDisabled, nil))
}

// checkDisableMIG updates for the whole GPUs of a claim whether MIG mode must be switched
// off, or returns why this is impossible. The caller has the locks of the GPUs.
func (c *Claims) checkDisableMIG(ctx context.Context, r record) (record, error) {
	r.Devices = slices.Clone(r.Devices)
	for i, d := range r.Devices {
		if !d.DisableMIG {
			continue
		}
		g, err := c.layoutOf(ctx, d.GPU)
		switch {
		case err != nil:
			return r, fail(CauseDriver, "cannot read the MIG layout of GPU %s: %w", d.GPU, err)
		case g.Mode != inventory.MIGEnabled && g.Pending != inventory.MIGEnabled:
			scanned, _ := c.options.Snapshots.Value().GPU(d.GPU)
			r.Devices[i].DisableMIG = scanned.MIG == inventory.MIGEnabled // true until a scan confirms the mode
			continue
		case len(g.Instances) > 0:
			return r, d.blockedBy(g.Instances[0])
		}
		if err := c.checkMode(ctx, g, inventory.MIGDisabled, true); err != nil {
			return r, causedError{refusal(err), err}
		}
	}
	return r, nil
}

// refusal returns the Cause of an error of the driver.
func refusal(err error) Cause {
	switch {
	case errors.Is(err, inventory.ErrInUse), errors.Is(err, errForeignInstance):
		return CauseInUse
	case causeOf(err) == CauseNotReady: // another process may still change the GPU
		return CauseNotReady
	}
	return CauseDriver
}

// disableUnusedMIG switches off the MIG mode of GPUs that was switched on for a claim,
// unless the GPU has an instance of another claim or program. The caller has the locks of
// the GPUs.
func (c *Claims) disableUnusedMIG(ctx context.Context, r record) (err error) {
	if r.beforeRestart(c.options.BootID) {
		// The restart of the node switched MIG mode off.
		return nil
	}
	for _, uuid := range r.gpus() {
		if !r.switchesMIG(uuid) {
			continue
		}
		if problem := c.disableMIG(ctx, uuid); !errors.Is(problem, errForeignInstance) {
			err = errors.Join(err, problem)
		}
	}
	return err
}
