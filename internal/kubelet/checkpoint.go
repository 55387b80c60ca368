package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/checkpoint"
)

// maxCheckpoint bounds the kubelet's checkpoint, in bytes. The checkpoint contains every
// device: 3 MB on a node with tens of thousands of shared devices. The devices of pods take
// another MB.
const maxCheckpoint = 16 << 20

// A HeldDevice is a device held by a container.
type HeldDevice struct {
	Resource, ID string
	// Pod names the container's pod: "NAMESPACE/NAME", or "with UID ..." if the name is
	// unknown.
	Pod string
	// Container is the name of the container: the first, if several of the pod hold the device one
	// after the other.
	Container string
	// NUMANodes are the device's NUMA nodes at the kubelet, in no order; nil if it has none.
	NUMANodes []int64
}

// Holders knows which pods hold devices of the device plugin.
type Holders interface {
	// Holders returns the pods that hold the given GPUs or MIG devices, by UUID, with the
	// devices of each pod. Without an error, no other pod holds these devices, and no pod
	// gets them while no list advertises them as Healthy. The error says why the holders are
	// unknown.
	Holders(ctx context.Context, uuids []string) ([]HeldDevice, error)
}

// uidPrefix begins the name of a pod known only by UID.
const uidPrefix = "with UID "

// SplitPod returns the namespace and the name of the container's pod, or its UID alone if they are
// not known.
func (d HeldDevice) SplitPod() (namespace, name, uid string) {
	if uid, unnamed := strings.CutPrefix(d.Pod, uidPrefix); unnamed {
		return "", "", uid
	}
	namespace, name, _ = strings.Cut(d.Pod, "/")
	return namespace, name, ""
}

// A Checkpoint is the content of the state file of the kubelet's device manager. It is
// immutable.
type Checkpoint struct {
	// Healthy are the IDs of the Healthy devices, by resource, when the kubelet wrote the
	// file. Devices of an ended plugin may remain until the kubelet writes the file again.
	Healthy map[string][]string
	// Held are the devices held by containers, including init containers. Devices of an
	// ended pod remain until the kubelet writes the file again.
	Held []HeldDevice
}

// WithPodUIDs returns devices with the UIDs of their pods. The UID stays empty for devices
// of claims, for devices without a pod in the checkpoint, and for devices with several pods
// there, because only one of the pods still runs.
func (c Checkpoint) WithPodUIDs(devices []ContainerDevice) []ContainerDevice {
	type key struct{ resource, id string }
	uids := make(map[key]string, len(c.Held))
	for _, h := range c.Held {
		k := key{h.Resource, h.ID}
		if _, several := uids[k]; several {
			uids[k] = ""
			continue
		}
		_, _, uids[k] = h.SplitPod()
	}
	devices = slices.Clone(devices)
	for i, d := range devices {
		if d.Resource != "" {
			devices[i].PodUID = uids[key{d.Resource, d.ID}]
		}
	}
	return devices
}

// CheckpointVersion returns a text that changes whenever the kubelet writes its checkpoint.
// The kubelet writes the checkpoint after processing a list. The text is empty without a
// checkpoint.
func (d *Directory) CheckpointVersion() string {
	info, err := os.Stat(filepath.Join(d.Path(), checkpoint.FileName))
	if err != nil {
		return ""
	}
	inode := uint64(0)
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		inode = stat.Ino // the kubelet writes another file each time
	}
	return fmt.Sprint(inode, info.ModTime().UnixNano())
}

// Checkpoint reads the kubelet's checkpoint. It fails if the file does not exist, or if the
// kubelet would not accept the file.
func (d *Directory) Checkpoint() (Checkpoint, error) {
	text, err := statefile.Read(filepath.Join(d.Path(), checkpoint.FileName), maxCheckpoint)
	if err != nil {
		return Checkpoint{}, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hasParsed && bytes.Equal(text, d.text) {
		return d.saved, d.damage
	}
	data, err := checkpoint.Parse(text)
	if err != nil {
		d.hasParsed, d.text, d.saved, d.damage, d.answers = true, text, Checkpoint{}, err, nil
		return Checkpoint{}, err
	}
	held := holdings{}
	for _, e := range data.Data.PodDeviceEntries {
		for node, ids := range e.DeviceIDs {
			for _, id := range ids {
				held.add(HeldDevice{Resource: e.ResourceName, ID: id, Pod: uidPrefix + e.PodUID,
					Container: e.ContainerName}, node)
			}
		}
	}
	d.hasParsed, d.text, d.damage, d.answers = true, text, nil, nil
	d.saved = Checkpoint{Healthy: data.Data.RegisteredDevices, Held: held.devices}
	return d.saved, nil
}

// holdings collects devices held by containers, each device once for each pod.
type holdings struct {
	devices []HeldDevice
	at      map[[3]string]int // position in devices, by resource, ID and pod
}

// add adds a device. A negative NUMA node means that the device has none.
func (h *holdings) add(device HeldDevice, node int64) {
	key := [3]string{device.Resource, device.ID, device.Pod}
	i, known := h.at[key]
	if !known {
		if h.at == nil {
			h.at = map[[3]string]int{}
		}
		i = len(h.devices)
		h.at[key] = i
		h.devices = append(h.devices, device)
	}
	if d := &h.devices[i]; node >= 0 && !slices.Contains(d.NUMANodes, node) {
		d.NUMANodes = append(d.NUMANodes, node)
	}
}
