package daemon

import (
	"context"
	"io/fs"
	"os"
	"strings"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
)

// OpenNode returns the driver of the configured node. On a simulated node it also returns the node.
func OpenNode(ctx context.Context, c config.Startup, m nvidia.Metrics) (*nvidia.Driver, *simulator.Node, error) {
	if c.Simulate == "" {
		return nvidia.New(nvidia.Options{DriverRoot: c.Driver.ContainerRoot, SearchPath: c.Driver.SearchPath,
			Metrics: m}), nil, nil
	}
	profile, err := simulator.Load(c.Simulate)
	if err != nil {
		return nil, nil, err
	}
	node := simulator.New(profile)
	klog.FromContext(ctx).Info("THE GPUS OF THIS NODE ARE SIMULATED: pods cannot use them", "profile", c.Simulate)
	return nvidia.New(nvidia.Options{Library: node.NVML(), Root: node.Root(), Metrics: m}), node, nil
}

// BootID returns the boot ID of the simulated node, or of this node if that is nil; empty
// if unknown.
func BootID(simulated *simulator.Node) string {
	text, err := fs.ReadFile(nodeRoot(simulated), "proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // faults then stay until a reading or an operator clears them
	}
	return strings.TrimSpace(string(text))
}

// nodeRoot returns the root folder of the simulated node, or of this node if that is nil.
func nodeRoot(simulated *simulator.Node) fs.FS {
	if simulated != nil {
		return simulated.Root()
	}
	return os.DirFS("/")
}

// driverOf adapts the type of the driver's sessions to the monitor.
type driverOf struct{ *nvidia.Driver }

func (d driverOf) Open(ctx context.Context) (monitor.Session, error) {
	session, err := d.Driver.Open(ctx)
	if err != nil {
		return nil, err // a nil *Session would be a non-nil monitor.Session
	}
	return session, nil
}
