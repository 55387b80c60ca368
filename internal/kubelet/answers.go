package kubelet

import (
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/checkpoint"
)

// An Answer is the answer of a device plugin to an Allocate call: the kubelet allocated
// devices of one resource to a container.
type Answer struct {
	Resource, PodUID, Container string
	// IDs are the devices, in no order.
	IDs []string
	// Env, Annotations and CDIDevices are the container's settings in the answer.
	Env, Annotations map[string]string
	CDIDevices       []string
}

// Answers returns the answers of device plugins from the kubelet's checkpoint. The result is
// shared: callers must not change it. Errors are those of Checkpoint.
func (d *Directory) Answers() ([]Answer, error) {
	if _, err := d.Checkpoint(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.answers != nil || d.damage != nil {
		return d.answers, d.damage
	}
	// Parsed again: only nodes with units need answers, and all other nodes save the memory.
	data, err := checkpoint.Parse(d.text)
	if err != nil {
		return nil, err
	}
	d.answers = []Answer{}
	for _, e := range data.Data.PodDeviceEntries {
		a := Answer{Resource: e.ResourceName, PodUID: e.PodUID, Container: e.ContainerName}
		response := &pluginapi.ContainerAllocateResponse{}
		if proto.Unmarshal(e.AllocResp, response) != nil {
			// Perhaps the answer of another plugin. An unreadable answer must not hide the
			// others.
			continue
		}
		a.Env, a.Annotations = response.GetEnvs(), response.GetAnnotations()
		for _, c := range response.GetCdiDevices() {
			a.CDIDevices = append(a.CDIDevices, c.GetName())
		}
		for _, ids := range e.DeviceIDs {
			a.IDs = append(a.IDs, ids...)
		}
		d.answers = append(d.answers, a)
	}
	return d.answers, nil
}
