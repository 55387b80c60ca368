package driverhost

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverstore"
)

// calls are the calls of package driverapi.
var calls = map[string]func(*Host, context.Context, driverapi.Arguments) error{
	driverapi.CallStatus:   func(*Host, context.Context, driverapi.Arguments) error { return nil },
	driverapi.CallPlace:    (*Host).callPlace,
	driverapi.CallFetch:    (*Host).callFetch,
	driverapi.CallSwap:     (*Host).callSwap,
	driverapi.CallNextBoot: (*Host).callNextBoot,
	driverapi.CallConfirm:  (*Host).callConfirm,
	driverapi.CallRevert:   (*Host).callRevert,
	driverapi.CallCancel:   (*Host).callCancel,
}

// handlers returns the calls for the control socket.
func (h *Host) handlers() map[string]control.Handler {
	all := map[string]control.Handler{}
	for call := range calls {
		all[call] = func(ctx context.Context, text json.RawMessage) (any, error) {
			var a driverapi.Arguments
			if err := json.Unmarshal(text, &a); err != nil {
				return nil, fmt.Errorf("arguments of %s: %w", call, err)
			}
			return h.Call(ctx, call, a)
		}
	}
	return all
}

// Call makes a call of package driverapi. It waits until the present act ends; CallStatus and CallFetch do
// not.
func (h *Host) Call(ctx context.Context, call string, a driverapi.Arguments) (driverapi.Status, error) {
	if call == driverapi.CallStatus || call == driverapi.CallFetch {
		if err := calls[call](h, ctx, a); err != nil {
			return driverapi.Status{}, err
		}
		return h.status(ctx)
	}
	if a.Digest != "" && !driverfolder.IsDigest(a.Digest) {
		return driverapi.Status{}, fmt.Errorf("%.80q is not a SHA-256 digest in hexadecimal", a.Digest)
	}
	a.Reason = a.Reason[:min(len(a.Reason), maxReason)]
	if call == driverapi.CallCancel {
		h.stopCopy()
	}
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return driverapi.Status{}, errors.New("gpu-driver is busy with a step that takes longer: see `gpu-driver " +
			"status`, and run the command again")
	}
	err := ctx.Err() // a caller who gave up finds no late change
	if err == nil {
		err = calls[call](h, ctx, a)
	}
	<-h.turn
	if err != nil {
		return driverapi.Status{}, err
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
	return h.status(ctx)
}

// maxReason limits the sentence of CallRevert, in bytes.
const maxReason = 1000

// stopCopy ends the copy of the change's folder.
func (h *Host) stopCopy() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stop != nil && h.Change != nil && h.Change.Step == driverapi.StepPlacing {
		h.stop()
	}
}

func (h *Host) callPlace(_ context.Context, a driverapi.Arguments) error {
	if _, err := h.store.Folder(a.Digest); err == nil {
		return nil
	}
	if err := h.checkKnown(a.Digest); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.placing[a.Digest] = 0
	return nil
}

func (h *Host) callFetch(_ context.Context, a driverapi.Arguments) error {
	if h.fetcher == nil {
		return errors.New("gpu-driver may download nothing: start it with --download-from, in the chart with " +
			"driver.downloadFrom")
	}
	for _, archives := range h.store.Archives() {
		if slices.Contains(archives, a.Archive) {
			return nil
		}
	}
	return h.fetcher.Ask(a.Source, a.Archive)
}

// checkKnown returns an error unless a folder is in the directory or among the sources.
func (h *Host) checkKnown(digest string) error {
	if _, err := h.store.Folder(digest); err == nil {
		return nil
	}
	sources, problem := driverstore.Find(h.o.Sources)
	if slices.ContainsFunc(sources, func(f driverstore.Folder) bool { return f.Digest == digest }) {
		return nil
	}
	return errors.Join(fmt.Errorf("no driver folder has the digest %q: none in %s, and none in %s", digest,
		h.o.Directory, h.o.Sources), problem)
}

func (h *Host) callSwap(ctx context.Context, a driverapi.Arguments) error {
	return h.begin(ctx, a, false)
}

func (h *Host) callNextBoot(ctx context.Context, a driverapi.Arguments) error {
	return h.begin(ctx, a, true)
}

// begin begins a change. A change to the same driver that has not unloaded anything goes on as wanted
// now: at once, or at the next boot.
func (h *Host) begin(ctx context.Context, a driverapi.Arguments, atNextBoot bool) error {
	if c := h.Change; c != nil {
		switch {
		case c.Step == driverapi.StepFailed:
			return fmt.Errorf("the change to %.12s has failed: %s; `gpu-driver cancel` forgets it", c.To, c.Reason)
		case c.To != a.Digest:
			return fmt.Errorf("the change to %.12s is under way, in the step %s; end it first", c.To, c.Step)
		case c.AtNextBoot == atNextBoot:
			return nil
		}
		return h.reschedule(atNextBoot)
	}
	current, err := h.store.Current()
	if err != nil {
		return err
	}
	state, err := h.kernel.State()
	if err != nil {
		return err
	}
	from := cmp.Or(h.loaded(), current)
	if from == a.Digest && current == a.Digest && (len(state.Own) > 0 || atNextBoot) {
		return nil // the node has this driver
	}
	if err := h.checkKnown(a.Digest); err != nil {
		return err
	}
	v, err := h.judgeNow(ctx)
	if err != nil {
		return err
	}
	if len(v.refusals) > 0 {
		return errors.New(v.refusals[0])
	}
	problem := v.problems[a.Digest]
	if atNextBoot {
		problem = h.nextBootProblem(a.Digest, v)
	}
	if problem != "" {
		return fmt.Errorf("the driver cannot be loaded on this node: %s", problem)
	}
	h.mu.Lock()
	h.percent, h.reason, h.holders = 0, "", nil
	h.mu.Unlock()
	h.counted = false
	return h.write(func(j *journal) {
		j.Change = &change{From: from, To: a.Digest, Step: driverapi.StepPlacing, AtNextBoot: atNextBoot,
			Since: time.Now().UTC().Truncate(time.Second), BootID: h.boot, Note: a.Note}
	})
}

// reschedule makes a change wait for the next boot, or continue now.
func (h *Host) reschedule(atNextBoot bool) error {
	edit := func(j *journal) { j.Change.AtNextBoot = atNextBoot }
	switch step := h.step(); step {
	case driverapi.StepPlacing:
		return h.write(edit)
	case driverapi.StepUnloading:
		h.isSettled = false // starts the services again
		return h.enter(driverapi.StepNextBoot, edit)
	case driverapi.StepNextBoot:
		return h.enter(driverapi.StepUnloading, edit)
	default:
		return nil // the new driver is being loaded, or is loaded
	}
}

// checkTarget returns an error if a call names another driver than the change.
func (h *Host) checkTarget(a driverapi.Arguments) error {
	if c := h.Change; a.Digest != "" && c != nil && c.To != a.Digest {
		return fmt.Errorf("the change is one to %.12s, not to %.12s", c.To, a.Digest)
	}
	return nil
}

func (h *Host) callConfirm(ctx context.Context, a driverapi.Arguments) error {
	if err := h.checkTarget(a); err != nil {
		return err
	}
	switch step := h.step(); step {
	case driverapi.StepUnproven:
		if err := h.write(func(j *journal) { j.Change = nil }); err != nil {
			return err
		}
		h.clean(ctx, "")
		return nil
	case "":
		if current, err := h.store.Current(); err == nil && current != "" && (a.Digest == "" || a.Digest == current) {
			return nil
		}
		return errors.New("no change of the driver is under way")
	default:
		return fmt.Errorf("the change is in the step %s: only a change in the step %s can be confirmed", step,
			driverapi.StepUnproven)
	}
}

func (h *Host) callRevert(_ context.Context, a driverapi.Arguments) error {
	if err := h.checkTarget(a); err != nil {
		return err
	}
	switch step := h.step(); step {
	case driverapi.StepUnproven:
		return h.enter(driverapi.StepReverting, func(j *journal) {
			j.Change.Reason = cmp.Or(a.Reason, "an operator requested the former driver")
		})
	case driverapi.StepReverting, driverapi.StepFailed:
		return nil
	case "":
		return errors.New("no change of the driver is under way")
	default:
		return fmt.Errorf("the change is in the step %s: only a change in the step %s can be taken back; before it, "+
			"use `gpu-driver cancel`", step, driverapi.StepUnproven)
	}
}

func (h *Host) callCancel(_ context.Context, a driverapi.Arguments) error {
	if err := h.checkTarget(a); err != nil {
		return err
	}
	switch step := h.step(); step {
	case "":
		return nil
	case driverapi.StepPlacing, driverapi.StepUnloading, driverapi.StepNextBoot, driverapi.StepFailed:
		h.setWaiting("", nil)
		h.isSettled = false // starts the services again
		return h.write(func(j *journal) { j.Change = nil })
	default:
		return fmt.Errorf("the change is in the step %s, and the former driver is unloaded: wait for the step %s, and "+
			"use `gpu-driver revert`", step, driverapi.StepUnproven)
	}
}
