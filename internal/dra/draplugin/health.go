package draplugin

import (
	"time"

	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// healthInterval is how often unchanged health is sent: the kubelet forgets it after 30 s.
	healthInterval = 10 * time.Second
	// healthIntervalBeside is the interval while another process of this program serves: when one of
	// two streams ends, the kubelet forgets the health of all devices of the driver.
	healthIntervalBeside = time.Second
	// healthTimeout is how long the kubelet may trust the sent health, in seconds.
	healthTimeout = 30
)

// health reports the health of all devices to the kubelet.
type health struct {
	healthv1.UnsafeDRAResourceHealthServer
	*Plugin
	closing <-chan struct{}
}

// NodeWatchResources sends the health of all devices at once, after each change, and periodically.
func (h *health) NodeWatchResources(
	_ *healthv1.NodeWatchResourcesRequest, stream healthv1.DRAResourceHealth_NodeWatchResourcesServer,
) error {
	for {
		pool, poolChanged := h.o.Pools.Latest()
		snapshot, snapshotChanged := h.o.Snapshots.Latest()
		problems, problemsChanged := h.o.Problems.Latest()
		beside, besideChanged := h.beside.Latest()
		now := h.o.Clock.Now().Unix()
		report := &healthv1.NodeWatchResourcesResponse{}
		for _, d := range dra.HealthOf(pool, snapshot, problems) {
			report.Devices = append(report.Devices, &healthv1.DeviceHealth{
				Device:                    &healthv1.DeviceIdentifier{PoolName: pool.Name, DeviceName: d.Device},
				Health:                    healthStatus[d.Verdict],
				LastUpdatedTime:           now,
				HealthCheckTimeoutSeconds: healthTimeout,
				Message:                   d.Message,
			})
		}
		if err := stream.Send(report); err != nil {
			return err
		}
		pause := healthInterval
		if beside {
			pause = healthIntervalBeside
		}
		timer := h.o.Clock.NewTimer(pause)
		select {
		case <-stream.Context().Done():
			timer.Stop()
			return stream.Context().Err()
		case <-h.closing:
			timer.Stop()
			return nil
		case <-poolChanged:
		case <-snapshotChanged:
		case <-problemsChanged:
		case <-besideChanged:
		case <-timer.C():
		}
		timer.Stop()
	}
}

var healthStatus = map[dra.Verdict]healthv1.HealthStatus{
	dra.VerdictHealthy: healthv1.HealthStatus_HEALTHY, dra.VerdictUnhealthy: healthv1.HealthStatus_UNHEALTHY,
	dra.VerdictUnknown: healthv1.HealthStatus_UNKNOWN,
}
