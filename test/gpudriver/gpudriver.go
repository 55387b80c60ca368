// Package gpudriver is a stand-in for the program gpu-driver: it answers the calls of package
// driverapi at a real socket, as package driverhost does, and has no files and no kernel.
package gpudriver

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/preflight"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// The drivers of the node: the old one is loaded at first.
const (
	OldDigest  = "aa"
	OldVersion = "570.1"
	NewDigest  = "bb"
	NewVersion = "580.1"
)

// Options are what a Driver uses of its test.
type Options struct {
	// Socket is the path of the control socket, in a folder that exists.
	Socket string
	// Now is the time of the steps; nil means the real one.
	Now func() time.Time
	// Note is called with each call but CallStatus, such as "swap bb", and with "load bb" when a driver
	// is loaded; nil for nothing. It must not call the Driver.
	Note func(act string)
}

// A Driver is a stand-in for gpu-driver. Each status that it gives is a step of its work, so that its
// callers see all steps.
type Driver struct {
	o Options

	mu      sync.Mutex // guards all following fields
	status  driverapi.Status
	free    bool               // the caller has released the driver
	holders []preflight.Holder // other users of the driver
	loads   int                // of the new driver
}

// New returns a Driver of a node with the old driver, which knows both. It does not answer before
// Serve.
func New(o Options) *Driver {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Note == nil {
		o.Note = func(string) {}
	}
	return &Driver{o: o, status: driverapi.Status{
		LoadedVersion: OldVersion, LoadedDigest: OldDigest, Current: OldDigest,
		Folders: []driverapi.Folder{
			{Digest: OldDigest, Version: OldVersion, IsHere: true}, {Digest: NewDigest, Version: NewVersion},
		},
	}}
}

// Serve answers calls until the returned function is called, or the test ends.
func (d *Driver) Serve(t testing.TB) (stop func()) {
	t.Helper()
	handlers := map[string]control.Handler{}
	for _, call := range []string{driverapi.CallStatus, driverapi.CallSwap, driverapi.CallNextBoot, driverapi.CallConfirm,
		driverapi.CallRevert, driverapi.CallCancel} {
		handlers[call] = func(_ context.Context, arguments json.RawMessage) (any, error) {
			var a driverapi.Arguments
			if err := json.Unmarshal(arguments, &a); err != nil {
				return nil, err
			}
			return d.answer(call, a)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- control.NewServer(d.o.Socket, handlers, nil).Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	poll.Until(t, "gpu-driver", func() bool {
		_, err := driverapi.Call(t.Context(), d.o.Socket, driverapi.CallStatus, driverapi.Arguments{})
		return err == nil
	})
	return stop
}

// Edit changes the status.
func (d *Driver) Edit(do func(*driverapi.Status)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	do(&d.status)
}

// Status returns the present status. It is no step.
func (d *Driver) Status() driverapi.Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.copied()
}

// copied returns a copy that later steps leave alone.
func (d *Driver) copied() driverapi.Status {
	s := d.status
	if s.Change != nil {
		c := *s.Change
		s.Change = &c
	}
	return s
}

// SetReleased says whether the caller has released the driver. At first it has not.
func (d *Driver) SetReleased(is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = is
}

// SetHolders says which others use the driver.
func (d *Driver) SetHolders(holders ...preflight.Holder) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.holders = holders
}

// Loads returns how often the new driver was loaded.
func (d *Driver) Loads() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.loads
}

// answer answers a call.
func (d *Driver) answer(call string, a driverapi.Arguments) (driverapi.Status, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if call == driverapi.CallStatus {
		d.step()
		return d.copied(), nil
	}
	d.o.Note(strings.TrimPrefix(call, "driver-") + " " + a.Digest)
	c := d.status.Change
	switch call {
	case driverapi.CallSwap:
		if c != nil && c.To != a.Digest {
			return d.copied(), errors.New("another change is under way")
		}
		d.status.Change = &driverapi.Change{From: OldDigest, To: a.Digest, Step: driverapi.StepPlacing, Since: d.o.Now(),
			Note: a.Note}
	case driverapi.CallNextBoot:
		d.enter(driverapi.StepNextBoot)
	case driverapi.CallConfirm:
		d.status.Current, d.status.Change = d.status.LoadedDigest, nil
	case driverapi.CallRevert:
		d.enter(driverapi.StepReverting)
		c.Reason = a.Reason
	case driverapi.CallCancel:
		d.status.Change = nil
	}
	return d.copied(), nil
}

// step does a step of the change.
func (d *Driver) step() {
	c := d.status.Change
	if c == nil {
		return
	}
	switch c.Step {
	case driverapi.StepPlacing:
		d.enter(driverapi.StepUnloading)
	case driverapi.StepUnloading:
		switch c.Holders = d.holders; {
		case !d.free:
			c.Holders = []preflight.Holder{{Kind: preflight.KindProcess, Name: "gpu-node-agent (7)"}}
		case len(c.Holders) == 0:
			d.enter(driverapi.StepLoading)
			d.o.Note("load " + c.To)
			d.status.LoadedDigest, d.status.LoadedVersion = NewDigest, NewVersion
			d.loads++
		}
	case driverapi.StepLoading:
		d.enter(driverapi.StepUnproven)
	case driverapi.StepReverting:
		if d.free {
			reason := c.Reason
			d.enter(driverapi.StepFailed)
			c.Reason = reason
			d.status.LoadedDigest, d.status.LoadedVersion = OldDigest, OldVersion
		}
	case driverapi.StepUnproven, driverapi.StepNextBoot, driverapi.StepFailed: // they wait for a call
	}
}

// enter begins a step of the change.
func (d *Driver) enter(s driverapi.Step) {
	c := d.status.Change
	c.Step, c.Since, c.Reason, c.Holders = s, d.o.Now(), "", nil
}
