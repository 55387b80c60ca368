package telemetry

import (
	"context"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// podsTimeout is how long kubelet may take to say which containers hold devices.
const podsTimeout = 3 * time.Second

// maxPodsFailures is how many questions in a row may fail until what kubelet said before counts no
// more.
const maxPodsFailures = 3

// PodDevices say which containers hold which devices.
type PodDevices struct {
	// Asked is when kubelet said so; zero if it did not.
	Asked   time.Time
	Devices []kubelet.ContainerDevice
	// Units are the containers that have units of GPUs; nil while kubelet's disk does not answer, too.
	Units []status.Holder
}

// A PodLister knows which containers hold which devices.
type PodLister interface {
	ContainerDevices(ctx context.Context) ([]kubelet.ContainerDevice, error)
	// UnitHolders returns which of them have units of GPUs, each once for a GPU, with a receipt. It
	// may wait for kubelet's disk, also after the end of ctx.
	UnitHolders(ctx context.Context, devices []kubelet.ContainerDevice) []status.Holder
}

// FollowPods asks which containers hold devices, as often as the settings say, and publishes it
// until ctx ends. While there are no metrics of GPUs nobody is asked.
func FollowPods(ctx context.Context, lister PodLister, settings *feed.Feed[GPUSettings], pods *feed.Feed[PodDevices]) {
	log := klog.FromContext(ctx)
	disk, failures := statefile.NewDisk(), 0
	for {
		s, changed := settings.Latest()
		var due <-chan time.Time
		if s.Every > 0 {
			due = time.After(s.Every)
			asking, end := context.WithTimeout(ctx, podsTimeout)
			devices, err := lister.ContainerDevices(asking)
			end()
			switch {
			case err == nil:
				failures = 0
				now := PodDevices{Asked: time.Now(), Devices: devices}
				reading, end := context.WithTimeout(ctx, podsTimeout)
				// Without an answer of the disk there are none, as nothing old may be taken for new.
				now.Units, _ = statefile.Within(ctx, disk, podsTimeout, func() ([]status.Holder, error) {
					return lister.UnitHolders(reading, devices), nil
				})
				end()
				pods.Publish(now)
			case ctx.Err() == nil:
				if failures++; failures == maxPodsFailures {
					log.Info("Metrics of GPUs name no pods: kubelet does not say which pods hold devices", "reason", err.Error())
				}
			}
		}
		if s.Every == 0 || failures >= maxPodsFailures {
			pods.Publish(PodDevices{Asked: pods.Value().Asked})
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-due:
		}
	}
}

// A holder is a container that holds a device.
type holder struct {
	namespace, pod, container string
	shared                    bool                  // others can hold the device at the same time
	claim                     kubelet.ClaimResource // by which it holds the device, if it holds it by one
	mig                       inventory.MIGDevice   // the device, if it is one
}

// same reports whether two holders are one container.
func (h holder) same(other holder) bool {
	return h.namespace == other.namespace && h.pod == other.pod && h.container == other.container
}

// byDevice returns the containers that hold devices, by the UUID of the GPU or MIG device. The ID
// of a device that is shared is its UUID followed by "::" and a number. A container that holds
// several replicas of a device is there once.
func (p PodDevices) byDevice() map[string][]holder {
	type key struct{ uuid, namespace, pod, container string }
	seen := make(map[key]bool, len(p.Devices))
	all := make(map[string][]holder, len(p.Devices))
	for _, d := range p.Devices {
		uuid, _, shared := strings.Cut(d.ID, "::")
		shared = shared || d.Claim.ShareID != ""
		if k := (key{uuid, d.Namespace, d.Pod, d.Container}); !seen[k] {
			seen[k] = true
			all[uuid] = append(all[uuid], holder{
				namespace: d.Namespace, pod: d.Pod, container: d.Container, shared: shared, claim: d.Claim,
			})
		}
	}
	return all
}
