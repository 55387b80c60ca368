package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// ResetArguments are the arguments of CallReset.
type ResetArguments struct {
	// GPUs are indexes and UUIDs of GPUs to reset together.
	GPUs []string `json:"gpus"`
	// Wait is how long to wait for users of the GPUs to end; 0 for no wait.
	Wait time.Duration `json:"wait,omitempty"`
}

// A ResetProgress is a progress message to the caller of CallReset.
type ResetProgress struct {
	Text string `json:"text,omitempty"`
	// Done is true if the GPUs were reset and are Healthy.
	Done bool `json:"done,omitempty"`
}

// reset resets GPUs.
func (w *maintenanceWing) reset(ctx context.Context, encoded json.RawMessage, send func(any) error) error {
	var a ResetArguments
	if err := json.Unmarshal(encoded, &a); err != nil {
		return fmt.Errorf("read the call's arguments: %w", err)
	}
	err := w.resets.Reset(ctx, reset.Order{GPUs: a.GPUs, Wait: a.Wait}, func(text string) {
		_ = send(ResetProgress{Text: text}) // the end of ctx says the same
	})
	if err != nil {
		return err
	}
	return send(ResetProgress{Done: true})
}

// newResets returns the owner of resets.
func (w *maintenanceWing) newResets() *reset.Resets {
	var instead []string
	if w.gpus.node != nil { // a simulated node never runs the program of a real driver
		program, _ := os.Executable() // running an empty name fails
		instead = []string{program, SimulatedSMICommand, w.startup.ControlSocket}
	}
	program := nvidia.NewResets(nvidia.ResetTimeout, nvidia.SMIReset(w.startup.Driver.ContainerRoot,
		w.startup.Driver.SearchPath, instead...))
	return reset.New(reset.Options{
		Snapshots: w.gpus.monitor.Snapshots(), Withhold: w.gpus.monitor.Withhold, Reserve: w.reserveForReset,
		May: w.mayReset, Clients: w.gpus.clientsOf,
		Run: func(ctx context.Context, gpus []inventory.GPU, ended func()) error {
			var uuids, addresses []string
			for _, g := range gpus {
				uuids, addresses = append(uuids, g.UUID), append(addresses, g.BDF)
			}
			err := w.gpus.monitor.Reset(ctx, uuids, func(ctx context.Context) error {
				if err := w.mayReset(); err != nil { // another process may have started since
					return err
				}
				return program.Reset(ctx, addresses, ended)
			})
			if errors.Is(err, nvidia.ErrResetHangs) {
				return fmt.Errorf("%w: %w", reset.ErrHangs, err)
			}
			return err
		},
		PreviousLeader: func() (string, <-chan struct{}) {
			s, changed := w.lead.Statuses().Latest()
			return s.PreviousLeader, changed
		},
		StateDir: w.startup.StateDir, BootID: BootID(w.gpus.node),
	})
}

// mayReset returns why this process may not reset GPUs now; nil if it may.
func (w *maintenanceWing) mayReset() error {
	if err := w.lead.Check(); err != nil {
		return fmt.Errorf("%w: ask %s", err, cmp.Or(w.lead.Statuses().Value().Name, "that one"))
	}
	if err := w.mayChangeHardware(); err != nil {
		return err
	}
	if beside, _ := w.beside(); beside {
		return errors.New("another process of this program runs on this node, and has the driver open: retry " +
			"when it has ended")
	}
	return nil
}

// reserveForReset keeps claims from a GPU until release is called, and returns the users
// of the GPU and of its MIG devices.
func (w *maintenanceWing) reserveForReset(
	ctx context.Context, g inventory.GPU,
) (users []string, release func(), err error) {
	devices := []string{g.UUID}
	for _, m := range g.MIGDevices {
		devices = append(devices, m.UUID)
	}
	return w.usersOf(ctx, g.UUID, devices, func(ctx context.Context) ([]inventory.Process, error) {
		found, err := w.gpus.monitor.Processes(ctx, []string{g.UUID})
		if errors.Is(err, inventory.ErrUnusable) { // nvidia-smi finds the clients of such a GPU
			err = nil
		}
		return found[g.UUID], err
	})
}

// lastReset returns the status of the last reset; nil if there was none.
func (w *maintenanceWing) lastReset() *status.Reset {
	s := w.resets.Status().Value()
	if s.Phase == "" {
		return nil
	}
	return &status.Reset{GPUs: s.GPUs, Phase: string(s.Phase), Since: status.Moment(s.Since), Reason: s.Reason}
}

// SimulatedSMICommand is the command in which a process of this program stands in for
// nvidia-smi on a simulated node. Its arguments are the control socket of the daemon and
// the arguments of nvidia-smi --gpu-reset.
const SimulatedSMICommand = "simulated-nvidia-smi"

// SMIArguments are the arguments of CallSimulateReset.
type SMIArguments struct {
	// Addresses are the PCI addresses of the GPUs.
	Addresses []string `json:"addresses"`
}

// An SMIAnswer is the output of nvidia-smi, and whether it succeeds.
type SMIAnswer struct {
	Said string `json:"said"`
	OK   bool   `json:"ok"`
}

func (w *gpuWing) simulateReset(ctx context.Context, encoded json.RawMessage, send func(any) error) error {
	if w.node == nil {
		return errNotSimulated
	}
	var a SMIArguments
	if err := json.Unmarshal(encoded, &a); err != nil {
		return fmt.Errorf("read the call's arguments: %w", err)
	}
	output, ok := w.node.Reset(ctx, a.Addresses)
	return send(SMIAnswer{output, ok})
}
