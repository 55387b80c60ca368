package dra

import (
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// maxMessage limits a message about the health of a device, in bytes, as the kubelet does.
const maxMessage = 1024

// A Verdict is a health of a device in the kubelet's API.
type Verdict string

// The verdicts.
const (
	VerdictHealthy   Verdict = "Healthy"
	VerdictUnhealthy Verdict = "Unhealthy"
	VerdictUnknown   Verdict = "Unknown"
)

// A DeviceHealth is the health of a device for the kubelet, which shows the health in the status of
// pods with the device.
type DeviceHealth struct {
	// Device is the name in the pool.
	Device  string
	Verdict Verdict
	// Message is the reason and the remedy: at most 1024 bytes; empty for a device without
	// problems.
	Message string
}

// HealthOf returns the health of all devices of a pool, in order. Problems are why containers
// cannot use a healthy device, by its name.
func HealthOf(p Pool, s inventory.Snapshot, problems map[string]string) []DeviceHealth {
	known := map[string]inventory.Health{} // by UUID
	gpus := map[string]inventory.GPU{}
	for _, g := range s.GPUs {
		gpus[g.UUID] = g
		known[g.UUID] = g.Fitness()
		for _, m := range g.MIGDevices {
			known[m.UUID] = inventory.Worst(g.Fitness(), m.Health)
		}
	}
	var reports []DeviceHealth
	for _, slice := range p.Slices {
		for _, d := range slice.Devices {
			health, found := known[d.Attributes["uuid"].Value]
			if d.Partition != nil {
				var g inventory.GPU
				g, found = gpus[d.GPU()]
				health = inventory.Worst(g.Fitness(), instanceAt(g, d.Partition.Placement).Health)
			}
			if !found {
				health = inventory.Health{State: inventory.Lost, Reason: "it is not there any more",
					Remedy: inventory.RemedyReconnect}
			}
			if problem := problems[d.Name]; problem != "" && health.Allocatable() {
				health = inventory.Health{State: inventory.Unhealthy, Reason: problem}
			}
			reports = append(reports, DeviceHealth{d.Name, verdict(health), healthMessage(health)})
		}
	}
	return reports
}

// verdict returns Healthy for a device that can be given new work.
func verdict(h inventory.Health) Verdict {
	switch {
	case h.Allocatable():
		return VerdictHealthy
	case h.State == inventory.Unknown:
		return VerdictUnknown
	}
	return VerdictUnhealthy
}

// healthMessage returns the reason and the remedy. gRPC sends only UTF-8.
func healthMessage(h inventory.Health) string {
	message := strings.ToValidUTF8(h.Why(), "\uFFFD")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	return message
}
