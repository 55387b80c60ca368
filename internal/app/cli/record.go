package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/recording"
)

func newRecordCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "record",
		Short: "Record what the driver answers a running daemon, for a bug report",
		Long: "record makes a running daemon write the driver's answers to files, at most 4 files of 16 MiB.\n" +
			"simulate replay shows the daemon's conclusions from the files.",
	}
	socket := addControlFlag(cmd.PersistentFlags())
	start := &cobra.Command{
		Use: "start", Short: "Begin a recording, and print its directory", Args: cobra.NoArgs,
		Example: "  gpu-device-plugin record start --redact\n  gpu-device-plugin record stop",
	}
	redact := start.Flags().Bool("redact", false, "replace UUIDs and PCI addresses")
	start.RunE = func(cmd *cobra.Command, _ []string) error {
		var begun daemon.RecordAnswer
		if err := control.Call(cmd.Context(), *socket, daemon.CallRecordStart, daemon.RecordArguments{Redact: *redact},
			&begun); err != nil {
			return notStarted(err)
		}
		_, err := fmt.Fprintln(cmd.OutOrStdout(), terminal.Line(begun.Dir))
		return err
	}
	stop := &cobra.Command{
		Use: "stop", Short: "End the recording", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return succeed(cmd, "recording stopped",
				control.Call(cmd.Context(), *socket, daemon.CallRecordStop, nil, nil))
		},
	}
	cmd.AddCommand(start, stop)
	return cmd
}

func newReplayCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replay PATH",
		Short: "Play a recording: print verdicts, lists and Events as they change",
		Long: "replay plays a file of a recording, or the latest recording in a directory, at the speed of the\n" +
			"recording. It prints each change of the health of a device and of the lists for the kubelet, and\n" +
			"each Event of the node, with the seconds since the start. No daemon is needed. The lists are the\n" +
			"lists of a node without pods, by the flags and the configuration file of this command.",
		Example: "  gpu-device-plugin simulate replay recording-20261123T200000.000000000Z.jsonl",
		Args:    needs("a recording", 1),
	}
	config.AddFlags(cmd.Flags(), replayFlags...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, _, err := config.Load(asTheDaemon(cmd.Context(), cmd.Flags()))
		if err != nil {
			return err
		}
		return replay(cmd, args[0], c.Resource)
	}
	return cmd
}

// lastLook is the time for the monitor's conclusions after the last line of a recording. A killed
// daemon writes no more.
const lastLook = time.Second

// replay plays a recording to a monitor.
func replay(cmd *cobra.Command, path string, o resource.Options) (err error) {
	r, err := recording.Load(path)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "%s of version %s\n", r.Length().Round(time.Second), terminal.Line(r.Program))
	if r.CutOff {
		fmt.Fprintln(out, "an incomplete line is ignored")
	}
	if r.Dropped > 0 {
		fmt.Fprintf(out, "%d lines are missing: the disk was slow or full; verdicts may differ\n", r.Dropped)
	}
	dir, err := os.MkdirTemp("", "replay-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := r.Prepare(dir); err != nil {
		return err
	}
	start, player := time.Now(), r.Play()
	m := monitor.New(monitor.Options{Driver: player, Policy: r.Policy, BootID: r.BootID, StateDir: dir})
	ctx, cancel := context.WithCancel(klog.NewContext(cmd.Context(), klog.Logger{}))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	go func() {
		player.Follow(ctx, m)
		select {
		case <-ctx.Done():
		case <-time.After(lastLook):
			cancel()
		}
	}()
	story := recording.Story{Options: o}
	for {
		s, changed := m.Snapshots().Latest()
		for _, change := range story.Next(s, time.Now()) {
			fmt.Fprintf(out, "%7.1f s  %s\n", time.Since(start).Seconds(), terminal.Line(change))
		}
		select {
		case <-changed:
		case err := <-ended:
			return err
		}
	}
}
