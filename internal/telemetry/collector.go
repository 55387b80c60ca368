package telemetry

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
)

// statusTimeout is how long a scrape waits for the daemon's status, which is in memory.
const statusTimeout = time.Second

// daemonCollector has the metrics of the daemon. Gauges are made of its status at each scrape.
type daemonCollector struct {
	status   func(context.Context) (status.Status, error)
	counters *Counters
}

// Describe implements prometheus.Collector. What there is depends on the node, so it describes nothing.
func (c daemonCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c daemonCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	s, err := c.status(ctx)
	if err != nil {
		return // the monitor is stuck, as /healthz says
	}
	sendDaemon(out, s)
	sendResources(out, s)
	for _, d := range s.GPUs {
		if d.GPU == "" {
			sendGPU(out, d, s.GPUs)
		}
	}
	c.counters.collect(out, s)
}

func sendDaemon(out chan<- prometheus.Metric, s status.Status) {
	buildInfo.send(out, 1, s.Version)
	if s.Driver != "" {
		driverInfo.send(out, 1, s.Driver, s.CUDA)
	}
	ready.sendBool(out, s.Readiness.Ready)
	quiesced.sendBool(out, s.Quiet)
	reexecutions.send(out, float64(s.Reexecutions))
	kubelets.send(out, float64(s.Kubelets))
	leftOut.send(out, float64(len(s.LeftOut)))
	planWarnings.send(out, float64(len(s.Warnings)))
	labelsWithheld.sendBool(out, s.LabelsError != "")

	snapshotTime.sendTime(out, s.Looked)
	snapshotGeneration.send(out, float64(s.Generation))
	snapshotStale.sendBool(out, s.Stale != "")
	callsHanging.send(out, float64(s.Hanging))
	if len(s.Calls) > 0 {
		callOldest.sendTime(out, s.Calls[0].Since)
	}

	configGeneration.send(out, float64(s.ConfigGeneration))
	configSuccessful.sendBool(out, s.ConfigError == "")
	configSuccess.sendTime(out, s.ConfigLoaded)
}

func sendResources(out chan<- prometheus.Metric, s status.Status) {
	held := map[string]int{}
	for _, h := range s.Holds {
		held[h.Resource]++
	}
	for _, r := range s.Resources {
		devices.send(out, float64(r.Healthy), r.Name, "healthy")
		devices.send(out, float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		devicesHeld.send(out, float64(held[r.Name]), r.Name)
		devicesDeparting.send(out, float64(len(r.Departing)), r.Name)
		resourcePlanned.sendBool(out, r.Planned, r.Name)
		resourceRegistered.sendBool(out, r.Serving(), r.Name)
		resourceAgreed.sendBool(out, r.Agreed, r.Name)
		resourceYielding.sendBool(out, r.Yielding(), r.Name)
	}
}

// states are the states of a GPU.
var states = []inventory.State{inventory.Unknown, inventory.Healthy, inventory.Suspect, inventory.Unhealthy, inventory.Lost}

// sendGPU sends the metrics of a GPU; all has its MIG devices, too.
func sendGPU(out chan<- prometheus.Metric, g status.Device, all []status.Device) {
	minor := ""
	if g.Minor != nil {
		minor = strconv.Itoa(*g.Minor)
	}
	gpuInfo.send(out, 1, g.UUID, g.Index, busID(g.PCI), g.Model, minor)
	for _, state := range states {
		gpuHealth.sendBool(out, g.State == state.String(), g.UUID, g.Index, state.String())
	}
	gpuStateChange.sendTime(out, g.Since, g.UUID, g.Index)
	sendFaults(out, g.UUID, g.Index, g)
	type part struct{ profile, health string }
	parts := map[part]int{}
	for _, m := range all {
		if m.GPU != g.UUID {
			continue
		}
		sendFaults(out, g.UUID, g.Index, m)
		health := "unhealthy"
		if m.State == inventory.Healthy.String() || m.State == inventory.Suspect.String() {
			health = "healthy"
		}
		parts[part{m.Profile, health}]++
	}
	for p, n := range parts {
		migDevices.send(out, float64(n), g.UUID, g.Index, p.profile, p.health)
	}
}

// sendFaults sends the open faults of a GPU, or of a MIG device on it.
func sendFaults(out chan<- prometheus.Metric, uuid, index string, d status.Device) {
	_, mig, _ := strings.Cut(d.Index, ":")
	for _, f := range d.Faults {
		xid := ""
		if f.XID != 0 {
			xid = strconv.FormatUint(f.XID, 10)
		}
		gpuFault.send(out, 1, uuid, index, mig, f.Source, xid, f.Cure)
	}
}

// busID returns a PCI address of sysfs, such as 0000:1b:00.0, as NVML and dcgm-exporter write it: 00000000:1B:00.0.
func busID(pci string) string {
	if domain, _, _ := strings.Cut(pci, ":"); len(domain) == 4 {
		pci = "0000" + pci
	}
	return strings.ToUpper(pci)
}
