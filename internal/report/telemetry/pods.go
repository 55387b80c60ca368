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

// podsTimeout is how long the kubelet may take to name the containers that hold devices.
const podsTimeout = 3 * time.Second

// maxPodsFailures is the number of failed questions in a row after which the last answer of the
// kubelet is dropped.
const maxPodsFailures = 3

// PodDevices are the containers that hold devices.
type PodDevices struct {
	// Asked is the time of the kubelet's answer; zero if there was none.
	Asked   time.Time
	Devices []kubelet.ContainerDevice
	// Units are the containers with units of GPUs; also nil while the kubelet's disk does not
	// answer.
	Units []status.Holder
}

// A PodLister knows the containers that hold devices.
type PodLister interface {
	ContainerDevices(ctx context.Context) ([]kubelet.ContainerDevice, error)
	// WithPodUIDs returns devices with the known UIDs of their pods. It may wait for the
	// kubelet's disk.
	WithPodUIDs(devices []kubelet.ContainerDevice) []kubelet.ContainerDevice
	// UnitHolders returns the containers with units of GPUs, each container once for a GPU, with a
	// receipt. It may wait for the kubelet's disk even after the end of ctx.
	UnitHolders(ctx context.Context, devices []kubelet.ContainerDevice) []status.Holder
}

// FollowPods publishes the containers that hold devices at the interval in the settings,
// until ctx ends. Without metrics of GPUs the kubelet is not asked.
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
				reading, end := context.WithTimeout(ctx, podsTimeout)
				asked := time.Now()
				now, err := statefile.Within(ctx, disk, podsTimeout, func() (PodDevices, error) {
					p := PodDevices{Devices: devices, Units: lister.UnitHolders(reading, devices)}
					if s.PodUIDs {
						p.Devices = lister.WithPodUIDs(devices)
					}
					return p, nil
				})
				end()
				if err != nil { // the disk does not answer: old values must not look current
					now = PodDevices{Devices: devices}
				}
				now.Asked = asked
				pods.Publish(now)
			case ctx.Err() == nil:
				if failures++; failures == maxPodsFailures {
					log.Info("Metrics of GPUs name no pods: the kubelet does not say which pods hold devices",
						"reason", err.Error())
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
	uid                       string                // of the pod; empty if unknown
	shared                    bool                  // others can hold the device at the same time
	claim                     kubelet.ClaimResource // claim for the device, if any
	mig                       inventory.MIGDevice   // set for a MIG device
}

// same reports whether two holders are the same container.
func (h holder) same(other holder) bool {
	return h.namespace == other.namespace && h.pod == other.pod && h.container == other.container
}

// byDevice returns the containers that hold devices, by the UUID of the GPU or MIG device.
// The ID of a shared device is the UUID followed by "::" and a number. A container with
// several replicas of a device is listed once.
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
				namespace: d.Namespace, pod: d.Pod, container: d.Container, uid: d.PodUID, shared: shared,
				claim: d.Claim,
			})
		}
	}
	return all
}

// uids returns the UIDs of the pods, by namespace and name.
func (p PodDevices) uids() map[[2]string]string {
	all := map[[2]string]string{}
	for _, d := range p.Devices {
		if d.PodUID != "" {
			all[[2]string{d.Namespace, d.Pod}] = d.PodUID
		}
	}
	return all
}
