package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
)

// newProveCommand returns the command that runs in a separate process.
func newProveCommand() *cobra.Command {
	return &cobra.Command{
		Use:    cuda.Command + " DRIVER_ROOT UUID",
		Short:  "Prove for another process of this program that CUDA works on a device",
		Args:   cobra.MinimumNArgs(2),
		Hidden: true,
		RunE:   func(_ *cobra.Command, args []string) error { return cuda.Prove(args[0], args[1], args[2:]...) },
	}
}

func newValidateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Prove that CUDA works on the GPUs of this node",
		Long: "validate compiles and runs a small kernel on each GPU and each MIG device, and compares the\n" +
			"result. It needs the driver's libcuda, and no CUDA toolkit. Each device is tried in a separate\n" +
			"process, which may take 10 seconds and 300 MB of memory. Devices in use by processes are skipped.\n" +
			"A pod that starts at the same time on a device in the compute mode EXCLUSIVE_PROCESS may fail.\n\n" +
			"The exit status is 0 if CUDA works on all devices, 2 if some devices were not tried, 3 if CUDA\n" +
			"fails on a device, and 1 if the command itself cannot run.",
		Example: "  gpu-device-plugin validate\n" +
			"  gpu-device-plugin validate --gpu 3 -o json",
		Args: cobra.NoArgs,
	}
	config.AddFlags(cmd.Flags(), nodeFlags...)
	var only []string
	cmd.Flags().StringSliceVar(&only, "gpu", nil, "GPUs and MIG devices to try, by index or UUID; default: all")
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		v, err := validate(cmd.Context(), c, only)
		if err != nil {
			return err
		}
		if err := o.print(cmd.OutOrStdout(), &v, func(w io.Writer) { v.table(w) }); err != nil {
			return err
		}
		return v.status()
	}
	return cmd
}

// A validation is the output of validate.
type validation struct {
	Devices []validatedDevice `json:"devices"`
	// LeftOut are sentences about the GPUs that cannot be read, with reasons.
	LeftOut []string `json:"leftOut,omitempty"`
}

// A validatedDevice is a device in a validation.
type validatedDevice struct {
	Index string `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Result is one of the constants below.
	Result string `json:"result"`
	// Reason explains any result but proven, and Failure is CUDA's error.
	Reason  string        `json:"reason,omitempty"`
	Failure *cuda.Failure `json:"failure,omitempty"`
	// Milliseconds is the duration of the check, and MemoryBytes the memory of its process.
	Milliseconds int64 `json:"milliseconds,omitempty"`
	MemoryBytes  int64 `json:"memoryBytes,omitempty"`
}

// The results.
const (
	resultProven   = "proven"
	resultFailed   = "failed"
	resultNotTried = "not tried"
)

// validate checks the devices of the configured node.
func validate(ctx context.Context, c config.Config, only []string) (v validation, err error) {
	prover := daemon.Prover{DriverRoot: c.Driver.ContainerRoot, SearchPath: c.Driver.SearchPath,
		Simulated: c.Simulate != ""}
	v.Devices = []validatedDevice{}
	err = withSession(ctx, c, func(reading context.Context, session *nvidia.Session) error {
		snapshot, err := session.Scan(reading)
		if err != nil {
			return err
		}
		for _, l := range snapshot.LeftOut {
			v.LeftOut = append(v.LeftOut, fmt.Sprintf("GPU %d: %s", l.Index, l.Reason))
		}
		devices, err := cudacheck.Select(cudacheck.Devices(snapshot), only)
		if err != nil {
			return fmt.Errorf("--gpu: %w", err)
		}
		v.Devices = make([]validatedDevice, len(devices))
		var all sync.WaitGroup
		turns := make(chan struct{}, cudacheck.AtOnce)
		for i, d := range devices {
			v.Devices[i] = validatedDevice{Index: d.Index, UUID: d.UUID, Model: d.Model, Result: resultNotTried}
			if v.Devices[i].Reason = inUse(reading, session, d); v.Devices[i].Reason != "" {
				continue
			}
			all.Go(func() {
				turns <- struct{}{}
				defer func() { <-turns }()
				v.Devices[i].take(prover.Prove(ctx, d.UUID))
			})
		}
		all.Wait()
		return ctx.Err()
	})
	return v, err
}

// inUse names the processes that compute on a device; empty if there are none.
func inUse(ctx context.Context, session *nvidia.Session, d cudacheck.Device) string {
	processes, err := session.Processes(ctx, d.GPU)
	if err != nil && !errors.Is(err, inventory.ErrNotSupported) {
		return "its processes cannot be read: " + err.Error()
	}
	var pids []string
	for _, p := range d.Computes(processes) {
		pids = append(pids, fmt.Sprint(p.PID))
	}
	if len(pids) == 0 {
		return ""
	}
	return "in use by process " + strings.Join(pids, ", ")
}

// take stores the result of a check.
func (v *validatedDevice) take(p cuda.Proof) {
	v.Failure, v.Milliseconds, v.MemoryBytes = p.Failure, p.Took.Milliseconds(), p.Memory
	switch {
	case p.Failure == nil:
		v.Result = resultProven
	case p.Failure.WasTried():
		v.Result, v.Reason = resultFailed, p.Failure.Error()
	default:
		v.Reason = p.Failure.Error()
	}
}

func (v validation) table(w io.Writer) {
	fmt.Fprintln(w, "GPU\tUUID\tMODEL\tRESULT\tTOOK\tREASON")
	for _, d := range v.Devices {
		took := ""
		if d.Milliseconds > 0 {
			took = fmt.Sprintf("%.1f s", float64(d.Milliseconds)/1000)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", d.Index, d.UUID, d.Model, d.Result, took, d.Reason)
	}
	for _, l := range v.LeftOut {
		fmt.Fprintln(w, l)
	}
	if slices.ContainsFunc(v.Devices,
		func(d validatedDevice) bool { return strings.Contains(d.Reason, inventory.LacksDeviceNodes) }) {
		fmt.Fprintln(w, "To give this container the device nodes, "+inventory.GiveDeviceNodes+".")
	}
}

// status returns the exit status; nil for 0.
func (v validation) status() error {
	tried := len(v.LeftOut) == 0
	for _, d := range v.Devices {
		switch d.Result {
		case resultFailed:
			return ExitStatus(exitError)
		case resultNotTried:
			tried = false
		}
	}
	if !tried {
		return ExitStatus(exitWarning)
	}
	return nil
}
