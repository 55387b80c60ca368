package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/simulator"
)

func newSimulateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Make something happen to the GPUs of a daemon that runs with --simulate",
		Long: "simulate makes faults, and their cure, happen to the simulated GPUs of a running daemon. GPUs are named by index or\n" +
			"UUID, MIG devices by i:j or UUID.",
		Example: "  gpu-device-plugin simulate xid --gpu 3 --xid 79\n  gpu-device-plugin simulate restore --gpu 3\n" +
			"  gpu-device-plugin simulate list",
	}
	socket := addControlFlag(cmd.PersistentFlags())
	for _, f := range faultCommands {
		cmd.AddCommand(newFaultCommand(f, socket))
	}
	cmd.AddCommand(newSimulateListCommand(socket), newProfilesCommand())
	return cmd
}

// A faultCommand is a kind of fault as a command: what it says it does, and the flags that it takes.
type faultCommand struct {
	kind  simulator.Kind
	short string
	flags []string
}

// faultCommands are the commands below simulate that inject faults. Which flags a kind must have, the simulator says.
var faultCommands = []faultCommand{
	{simulator.KindXID, "The driver reports an XID on a GPU, or on a GI or CI", []string{"gpu", "xid", "gi", "ci", "action"}},
	{simulator.KindLoggedXID, "The driver logs an XID, and reports nothing", []string{"gpu", "xid", "gi", "ci", "count"}},
	{simulator.KindEvent, "The driver reports another event on a GPU, or on a GI or CI", []string{"gpu", "event", "gi", "ci"}},
	{simulator.KindLost, "A GPU falls off the bus, without an event", []string{"gpu"}},
	{simulator.KindRestore, "A GPU is healthy again and back on the bus; without --gpu, everything is", []string{"gpu"}},
	{simulator.KindRemove, "A GPU is unplugged", []string{"gpu"}},
	{simulator.KindAdd, "An unplugged GPU is plugged in again", []string{"gpu"}},
	{simulator.KindMIG, "A GPU gets another layout of MIG devices; without --profile, none", []string{"gpu", "profile"}},
	{simulator.KindHang, "NVML calls do not return until restored", []string{"gpu", "call", "count"}},
	{simulator.KindSlow, "NVML calls take longer until restored", []string{"gpu", "call", "count", "delay"}},
	{simulator.KindFail, "NVML calls fail until restored", []string{"gpu", "call", "return"}},
	{simulator.KindAnswer, "NVML calls return another value until restored", []string{"gpu", "call", "value"}},
	{simulator.KindRecoveryAction, "The driver asks for a recovery action", []string{"gpu", "action"}},
	{simulator.KindRemapFailure, "A memory row cannot be remapped", []string{"gpu"}},
	{simulator.KindRemapPending, "A memory row will be remapped at the next reset", []string{"gpu"}},
	{simulator.KindUnrepairable, "The memory has a fault that no remapping repairs", []string{"gpu"}},
	{simulator.KindSRAMThreshold, "The chip's own memories had more errors than a part may have", []string{"gpu"}},
	{simulator.KindThrottle, "The clocks are low because the GPU is hot", []string{"gpu"}},
	{simulator.KindPCIeReplays, "So many PCIe packets more had to be sent again", []string{"gpu", "count"}},
	{simulator.KindECC, "Uncorrected memory errors", []string{"gpu", "count"}},
	{simulator.KindFabric, "The registration with the NVSwitch fabric is in another state", []string{"gpu", "state", "return"}},
	{simulator.KindNVLink, "An NVLink, or all of a GPU, stops working", []string{"gpu", "link"}},
	{simulator.KindPersistence, "Persistence mode is switched on or off", []string{"gpu", "state"}},
	{simulator.KindProcesses, "So many processes compute on the GPU", []string{"gpu", "count"}},
	{simulator.KindDriver, "The driver is unloaded or replaced", []string{"driver"}},
	{simulator.KindReboot, "The node restarts: another boot ID, and all GPUs as new", nil},
}

func newFaultCommand(f faultCommand, socket *string) *cobra.Command {
	fault := simulator.Fault{Kind: f.kind}
	var gi, ci, link int
	cmd := &cobra.Command{Use: string(f.kind), Short: f.short, Args: cobra.NoArgs}
	declare := map[string]func(*pflag.FlagSet){
		"gpu":  func(fs *pflag.FlagSet) { fs.StringVar(&fault.GPU, "gpu", "", "index or UUID of the GPU") },
		"xid":  func(fs *pflag.FlagSet) { fs.Uint64Var(&fault.XID, "xid", 0, "the error's number") },
		"gi":   func(fs *pflag.FlagSet) { fs.IntVar(&gi, "gi", 0, "the GPU instance it is attributed to") },
		"ci":   func(fs *pflag.FlagSet) { fs.IntVar(&ci, "ci", 0, "the compute instance it is attributed to") },
		"link": func(fs *pflag.FlagSet) { fs.IntVar(&link, "link", 0, "the link's number; all if not given") },
		"event": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Event, "event", "", "the event's type, such as double-bit-ecc")
		},
		"profile": func(fs *pflag.FlagSet) {
			fs.StringSliceVar(&fault.Profiles, "profile", nil, "a MIG device's profile, such as 1g.10gb; may be repeated")
		},
		"call": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Call, "call", "", "an NVML function without the prefix nvml; all if not given")
		},
		"return": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Return, "return", "", "what the call answers, such as UNKNOWN")
		},
		"value": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Value, "value", "", `what the call returns: text, or a number; "\xff" in quotes as in Go's source`)
		},
		"state": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.State, "state", "", "of the fabric: not-started, in-progress or completed; of persistence mode: on or off")
		},
		"count": func(fs *pflag.FlagSet) {
			fs.Uint64Var(&fault.Count, "count", 0, "how many; of calls that hang or are slow, all if not given")
		},
		"delay": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Delay, "delay", "", "how much longer a call takes, such as 20ms")
		},
		"driver": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Driver, "driver", "", "missing, no-library, or the version installed from now on")
		},
		"action": func(fs *pflag.FlagSet) {
			fs.StringVar(&fault.Action, "action", "", "what the driver asks for: none, reset, reboot, drain-p2p, drain-and-reset or recover-imex")
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
		return control.Call(cmd.Context(), *socket, callSimulateInject, fault, nil)
	}
	return cmd
}

func newSimulateListCommand(socket *string) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Short: "Print the simulated GPUs and what was done to them", Args: cobra.NoArgs}
	o := addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var gpus []simulator.Status
		if err := control.Call(cmd.Context(), *socket, callSimulateList, nil, &gpus); err != nil {
			return err
		}
		return o.print(cmd.OutOrStdout(), gpus, func(w io.Writer) {
			fmt.Fprintln(w, "GPU\tUUID\tBDF\tMODEL\tSTATE\tFAULTS")
			for _, g := range gpus {
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.UUID, g.BDF, g.Model, g.State, strings.Join(g.Faults, "; "))
				for _, m := range g.MIG {
					fmt.Fprintf(w, "%d:%d\t%s\tGI %d, CI %d\tMIG %s\t\t\n", g.Index, m.Index, m.UUID, m.GI, m.CI, m.Profile)
				}
			}
		})
	}
	return cmd
}

func newProfilesCommand() *cobra.Command {
	return &cobra.Command{
		Use: "profiles", Short: "Print the names of the machines that --simulate knows", Args: cobra.NoArgs,
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
