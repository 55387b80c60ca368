package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	agent "github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

func (p Program) newMPSCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mps-control-daemon",
		Short: "Run the control daemons of CUDA MPS (Multi-Process Service)",
		Long: "mps-control-daemon runs one nvidia-cuda-mps-control for each resource that is shared by MPS. It limits the threads and\n" +
			"the memory of each replica, and restarts a control daemon that ends. It takes the same flags, environment and file as\n" +
			"the device plugin. It needs nvidia-cuda-mps-control in the PATH, the right to set compute modes, and the directory of\n" +
			"MPS state on the host (--mps-root), mounted at --mps-root-ctr-path.",
		Args: noArguments,
	}
	config.AddFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return untilItEnds(cmd.Context(), func(ctx context.Context, own *process) error {
			return p.runMPS(ctx, config.Sources{Env: mpsEnv, Flags: cmd.Flags(), NVIDIA: p.nvidia}, own)
		}, syscall.SIGHUP)
	}
	cmd.AddCommand(newMountSHMCommand())
	return cmd
}

// mpsEnv is the environment of the control daemons, which do not need to know where the host has the directory of MPS
// state: NVIDIA's are not told. A configuration that shares by MPS is not valid without it.
func mpsEnv(name string) (string, bool) {
	value, given := os.LookupEnv(name)
	if name == "MPS_ROOT" && value == "" {
		return "/run/nvidia/mps", true
	}
	return value, given
}

func newMountSHMCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mount-shm",
		Short: "Mount the shared memory of MPS servers and clients",
		Long:  "mount-shm mounts a tmpfs on the folder shm of --mps-root-ctr-path, unless one is mounted. Its size is half of the memory.",
		Args:  noArguments,
	}
	config.AddFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			klog.FromContext(cmd.Context()).Info("Ignoring arguments", "arguments", args)
		}
		// The file has no say, and may not be there yet.
		c, _, err := config.Sources{Env: os.LookupEnv, Flags: cmd.Flags()}.Resolve("", nil)
		if err != nil {
			return err
		}
		err = mps.MountSHM(c.MPSRoot)
		if errors.Is(err, mps.ErrNotMounted) {
			_, err = fmt.Fprintln(cmd.OutOrStdout(), err)
		}
		return err
	}
	return cmd
}

// runMPS runs the control daemons that configuration and node ask for until ctx ends. Whenever it is asked to, it reads the
// configuration again.
func (p Program) runMPS(ctx context.Context, sources config.Sources, own *process) error {
	c, err := p.begin(ctx, &sources, own)
	if err != nil {
		return err
	}
	driver, node, err := openNode(ctx, c, nil)
	if err != nil {
		return err
	}
	if node != nil {
		defer node.Close()
	}
	m := &mpsNode{
		watcher: config.NewWatcher(sources, c, clock.RealClock{}),
		monitor: monitor.New(monitor.Options{Driver: driverOf{driver}, Policy: c.Health}),
		wanted:  feed.New[[]mps.Group](nil),
		asked:   own.signals,
	}
	observation := []agent.Task{
		{Name: "configuration", Run: m.watcher.Run},
		{Name: "signals", Run: m.followSignals},
		{Name: "monitor", Run: m.monitor.Run},
		{Name: "driver", Run: func(ctx context.Context) error { return agent.FollowDriver(ctx, m.monitor) }},
		{Name: "plan", Run: m.followPlan},
	}
	if sources.Chosen != nil {
		observation = append(observation, p.Cluster.Observation(m.watcher.Configs(), bootID(node))...)
	}
	return replaceable(ctx, agent.Run(ctx, observation, []agent.Task{
		{Name: "MPS control daemons", Run: mps.NewSupervisor(c.MPSRoot, m.wanted, m.monitor).Run},
	}), driver.Calls)
}

// mpsNode is the node of the control daemons: what it has, and what is to be shared of it.
type mpsNode struct {
	watcher *config.Watcher
	monitor *monitor.Monitor
	wanted  *feed.Feed[[]mps.Group]
	asked   <-chan os.Signal
}

// followPlan makes groups of every Snapshot and Config, by the plan that the device plugin makes of them.
func (m *mpsNode) followPlan(ctx context.Context) error {
	for {
		c, configured := m.watcher.Configs().Latest()
		snapshot, looked := m.monitor.Snapshots().Latest()
		if snapshot.Generation > 0 { // a look has succeeded
			m.wanted.Publish(mps.Groups(snapshot, resource.New(snapshot, c.Resource)))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-configured:
		case <-looked:
		}
	}
}

// followSignals reads the configuration again at SIGHUP.
func (m *mpsNode) followSignals(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.asked:
			m.watcher.Reload()
		}
	}
}
