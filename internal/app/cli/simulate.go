package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

func newSimulateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Inject faults into the simulated GPUs of a running daemon",
		Long: "simulate injects faults into the simulated GPUs of a running daemon, and removes them. The daemon\n" +
			"must run with --simulate. Name GPUs by index or UUID, MIG devices by i:j or UUID.",
		Example: "  gpu-device-plugin simulate xid --gpu 3 --xid 79\n  gpu-device-plugin simulate restore --gpu 3\n" +
			"  gpu-device-plugin simulate list",
	}
	socket := addControlFlag(cmd.PersistentFlags())
	for _, f := range faultCommands {
		cmd.AddCommand(newFaultCommand(f, socket))
	}
	cmd.AddCommand(newSimulateListCommand(socket), newProfilesCommand(), newReplayCommand())
	return cmd
}

// A faultCommand is the command for a kind of fault: its help text and its flags.
type faultCommand struct {
	kind  simulator.Kind
	short string
	flags []string
}

// faultCommands are the commands below simulate that inject faults. The simulator checks required
// flags.
var faultCommands = []faultCommand{
	{simulator.KindXID, "Report an XID on a GPU, a GPU instance or a compute instance",
		[]string{"gpu", "xid", "gi", "ci", "action"}},
	{simulator.KindLoggedXID, "Write an XID to the kernel log, without an event",
		[]string{"gpu", "xid", "gi", "ci", "count"}},
	{simulator.KindLoggedSXID, "Write a fatal error of an NVSwitch (SXid) to the kernel log", []string{"xid"}},
	{simulator.KindEvent, "Report another event on a GPU, a GPU instance or a compute instance",
		[]string{"gpu", "event", "gi", "ci"}},
	{simulator.KindLost, "Take a GPU off the bus, without an event", []string{"gpu"}},
	{simulator.KindRestore, "Remove all faults of a GPU; without --gpu, of the node", []string{"gpu"}},
	{simulator.KindRemove, "Unplug a GPU", []string{"gpu"}},
	{simulator.KindAdd, "Plug a GPU in again", []string{"gpu"}},
	{simulator.KindMIG, "Replace the MIG devices of a GPU; without --profile, remove them", []string{"gpu", "profile"}},
	{simulator.KindHang, "Make NVML calls hang until restore", []string{"gpu", "call", "count"}},
	{simulator.KindSlow, "Make NVML calls slow until restore", []string{"gpu", "call", "count", "delay"}},
	{simulator.KindFail, "Make NVML calls fail until restore", []string{"gpu", "call", "return"}},
	{simulator.KindAnswer, "Make NVML calls return another value until restore", []string{"gpu", "call", "value"}},
	{simulator.KindRecoveryAction, "Set the recovery action that the driver requests", []string{"gpu", "action"}},
	{simulator.KindRemapFailure, "Report a failed row remapping", []string{"gpu"}},
	{simulator.KindRemapPending, "Report a pending row remapping", []string{"gpu"}},
	{simulator.KindUnrepairable, "Report memory that remapping cannot repair", []string{"gpu"}},
	{simulator.KindSRAMThreshold, "Report more SRAM errors than the threshold", []string{"gpu"}},
	{simulator.KindThrottle, "Report clocks that are low because of heat", []string{"gpu"}},
	{simulator.KindPCIeReplays, "Add PCIe replays", []string{"gpu", "count"}},
	{simulator.KindECC, "Add uncorrected ECC errors", []string{"gpu", "count"}},
	{simulator.KindFabric, "Set the state of the registration with the NVSwitch fabric",
		[]string{"gpu", "state", "return"}},
	{simulator.KindNVLink, "Stop one NVLink of a GPU, or all", []string{"gpu", "link"}},
	{simulator.KindPersistence, "Switch persistence mode on or off", []string{"gpu", "state"}},
	{simulator.KindProcesses, "Set the number of compute processes on a GPU", []string{"gpu", "count"}},
	{simulator.KindDriver, "Unload or replace the driver", []string{"driver"}},
	{simulator.KindDriverFiles, "Replace the driver's files on disk, and not the kernel module", []string{"driver"}},
	{simulator.KindReset, "Reset a GPU: it loses its MIG instances and its faults", []string{"gpu"}},
	{simulator.KindSMIReset, "Set what nvidia-smi does when a GPU is to be reset", []string{"gpu", "state"}},
	{simulator.KindReboot, "Restart the node: a new boot ID, and GPUs without faults", nil},
}

func newFaultCommand(f faultCommand, socket *string) *cobra.Command {
	fault := simulator.Fault{Kind: f.kind}
	var gi, ci, link int
	cmd := &cobra.Command{Use: string(f.kind), Short: f.short, Args: cobra.NoArgs}
	declare := map[string]func(*pflag.FlagSet){
		"gpu":  func(fs *pflag.FlagSet) { fs.StringVar(&fault.GPU, "gpu", "", "index or UUID of the GPU") },
		"xid":  func(fs *pflag.FlagSet) { fs.Uint64Var(&fault.XID, "xid", 0, "number of the XID or SXid") },
		"gi":   func(fs *pflag.FlagSet) { fs.IntVar(&gi, "gi", 0, "GPU instance with the error") },
		"ci":   func(fs *pflag.FlagSet) { fs.IntVar(&ci, "ci", 0, "compute instance with the error") },
		"link": func(fs *pflag.FlagSet) { fs.IntVar(&link, "link", 0, "number of the link; default: all links") },
		"event": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Event, "event", "", "type of the event, such as double-bit-ecc")
		},
		"profile": func(fs *pflag.FlagSet) {
			fs.StringSliceVar(&fault.Profiles, "profile", nil, "profile of a MIG device, such as 1g.10gb; may be "+
				"repeated")
		},
		"call": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Call, "call", "", "NVML function without the prefix nvml; default: all functions")
		},
		"return": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Return, "return", "", "return code of the call, such as UNKNOWN")
		},
		"value": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Value, "value", "",
				`what the call returns: text, or a number; "\xff" in quotes as in Go's source`)
		},
		"state": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.State, "state", "",
				"of the fabric: not-started, in-progress or completed; of persistence mode: on or off;\n"+
					"of a reset: works, fails, hangs, another (the next GPU is reset) or peers (all with this state "+
					"go together)")
		},
		"count": func(fs *pflag.FlagSet) {
			fs.Uint64Var(&fault.Count, "count", 0, "number of errors, or of calls to affect (default: all calls)")
		},
		"delay": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Delay, "delay", "", "how much longer a call takes, such as 20ms")
		},
		"driver": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Driver, "driver", "", "missing, no-library, or the new version")
		},
		"action": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Action, "action", "",
				"recovery action: none, reset, reboot, drain-p2p, drain-and-reset or recover-imex")
		},
	}
	for _, name := range f.flags {
		declare[name](cmd.Flags())
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		for name, optional := range map[string]struct {
			value *int
			field **int
		}{"gi": {&gi, &fault.GI}, "ci": {&ci, &fault.CI}, "link": {&link, &fault.Link}} {
			if cmd.Flags().Changed(name) {
				*optional.field = optional.value
			}
		}
		return succeed(cmd, injectionText(fault),
			control.Call(cmd.Context(), *socket, daemon.CallSimulateInject, fault, nil))
	}
	return cmd
}

// injectionText returns the effect of a fault on the simulated node.
func injectionText(f simulator.Fault) string {
	where := "the node"
	if f.GPU != "" {
		where = "GPU " + f.GPU
	}
	if f.Kind == simulator.KindRestore {
		return where + ": faults removed"
	}
	return fmt.Sprintf("%s: %s simulated", where, f.Kind)
}

func newSimulateListCommand(socket *string) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Short: "Print the simulated GPUs and their faults", Args: cobra.NoArgs}
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var gpus []simulator.Status
		if err := control.Call(cmd.Context(), *socket, daemon.CallSimulateList, nil, &gpus); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), &gpus, func(w io.Writer) {
			fmt.Fprintln(w, "GPU\tUUID\tBDF\tMODEL\tSTATE\tFAULTS")
			for _, g := range gpus {
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.UUID, g.BDF, g.Model, g.State,
					strings.Join(g.Faults, "; "))
				for _, m := range g.MIG {
					fmt.Fprintf(w, "%d:%d\t%s\tGI %d, CI %d\tMIG %s\t\t\n", g.Index, m.Index, m.UUID, m.GI, m.CI,
						m.Profile)
				}
			}
		})
	}
	return cmd
}

func newProfilesCommand() *cobra.Command {
	return &cobra.Command{
		Use: "profiles", Short: "Print the names of the profiles for --simulate", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range slices.Sorted(slices.Values(simulator.Names())) {
				if _, err := fmt.Fprintln(cmd.OutOrStdout(), name); err != nil {
					return err
				}
			}
			return nil
		},
	}
}
