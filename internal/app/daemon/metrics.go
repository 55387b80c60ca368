package daemon

import (
	"context"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/monitor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/telemetry"
)

// serveMetrics serves metrics and probes over HTTP at the configured address.
func (d *daemon) serveMetrics(ctx context.Context) error {
	address := feed.New(d.watcher.Configs().Value().MetricsAddress)
	gpus := feed.New(telemetry.GPUSettings{})
	pods := feed.New(telemetry.PodDevices{})
	var followers sync.WaitGroup // they end with ctx, like the server
	defer followers.Wait()
	followers.Go(func() { followMetrics(ctx, d.watcher.Configs(), address, gpus, d.gpus.monitor.SetSampling) })
	followers.Go(func() { telemetry.FollowPods(ctx, d.podDevices(), gpus, pods) })
	return telemetry.New(telemetry.Options{
		Address: address, Status: d.status, Stuck: d.report.liveness.Stuck, Ready: d.awaitReady,
		GPUs: d.gpuMetrics(gpus, pods), Counters: d.report.counters, Problem: d.report.metricsProblem,
		PCIGPUs: d.gpus.pci.count,
	}).Run(ctx)
}

// pciEvery is how long a count of the PCI bus is used. GPUs are bound to another driver
// when a virtual machine needs them.
const pciEvery = time.Minute

// A pciBus counts the GPUs on the PCI bus of a node.
type pciBus struct {
	root fs.FS

	mu        sync.Mutex // guards the following fields
	counted   time.Time
	own, away int
}

// count returns the number of the node's GPUs, and the number of GPUs assigned to virtual machines.
func (b *pciBus) count() (own, away int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.counted) >= pciEvery {
		b.own, b.away = nodefacts.PCIGPUs(b.root)
		b.counted = time.Now()
	}
	return b.own, b.away
}

// podDevices knows the containers that hold devices, by resources and by claims.
type podDevices struct {
	account   *kubelet.PodResources
	directory *kubelet.Directory // nil if the kubelet's directory is not used
	dra       *DRA               // nil without claims
	units     func(context.Context, []kubelet.ContainerDevice) []status.Holder
}

func (d *daemon) podDevices() podDevices {
	return podDevices{d.kubelet.account, d.kubelet.directory, d.claims.dra, d.kubelet.unitHolders}
}

// WithPodUIDs implements telemetry.PodLister.
func (p podDevices) WithPodUIDs(devices []kubelet.ContainerDevice) []kubelet.ContainerDevice {
	if p.directory != nil {
		if checkpoint, err := p.directory.Checkpoint(); err == nil { // otherwise doctor and the log have the reason
			devices = checkpoint.WithPodUIDs(devices)
		}
	}
	return claims.WithPodUIDs(devices, p.preparedClaims())
}

// preparedClaims returns the claims that are prepared on the node.
func (p podDevices) preparedClaims() []claims.ClaimStatus {
	if p.dra == nil {
		return nil
	}
	return p.dra.Claims.Status().Value()
}

// UnitHolders implements telemetry.PodLister.
func (p podDevices) UnitHolders(ctx context.Context, devices []kubelet.ContainerDevice) []status.Holder {
	return p.units(ctx, devices)
}

// ContainerDevices implements telemetry.PodLister.
func (p podDevices) ContainerDevices(ctx context.Context) ([]kubelet.ContainerDevice, error) {
	devices, err := p.account.ContainerDevices(ctx)
	if err != nil {
		return nil, err
	}
	return claims.Identify(devices, p.preparedClaims()), nil
}

// gpuMetrics returns the sources of the metrics of GPUs.
func (d *daemon) gpuMetrics(settings *feed.Feed[telemetry.GPUSettings],
	pods *feed.Feed[telemetry.PodDevices]) *telemetry.GPUs {
	name := d.startup.NodeName
	if name == "" {
		name, _ = os.Hostname() // an empty name means no such label
	}
	return &telemetry.GPUs{
		Settings: settings, Snapshots: d.gpus.monitor.Snapshots(), Samples: d.gpus.monitor.Samples(), Pods: pods,
		Hostname: name, XIDName: func(xid uint64) string { return health.Lookup(xid).Name }, Now: time.Now,
	}
}

// headStart is the time after the start of the process without measurements and releases
// of memory, because the registration of GPUs comes first.
const headStart = time.Second

// followMetrics publishes the address for metrics when a Config changes it, and calls
// sample with the sampling of each Config.
func followMetrics(
	ctx context.Context, configs *feed.Feed[config.Config], address *feed.Feed[string],
	gpus *feed.Feed[telemetry.GPUSettings],
	sample func(context.Context, monitor.Sampling) error,
) {
	over, registering := time.After(headStart), true
	for {
		c, changed := configs.Latest()
		if c.MetricsAddress != address.Value() {
			address.Publish(c.MetricsAddress)
		}
		if registering {
			select {
			case <-ctx.Done():
				return
			case <-over:
				registering = false
			case <-changed:
			}
			continue
		}
		var settings telemetry.GPUSettings
		var sampling monitor.Sampling
		if c.MetricsAddress != "" && c.GPUMetrics.Enabled {
			settings = telemetry.GPUSettings{
				Every: c.GPUMetrics.Interval, HostnameLabel: c.GPUMetrics.HostnameLabel, PodUIDs: c.GPUMetrics.PodUIDs,
			}
			sampling = monitor.Sampling{Every: c.GPUMetrics.Interval, Blocking: c.GPUMetrics.PCIeThroughput}
		}
		if settings != gpus.Value() {
			gpus.Publish(settings)
		}
		_ = sample(ctx, sampling) // the monitor cannot be reached when the daemon ends
		if !feed.WaitAny(ctx, changed) {
			return
		}
	}
}
