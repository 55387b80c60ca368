package kubelet

import (
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/checkpoint"
)

// An Answer is what a device plugin answered when the kubelet allocated devices of one resource to
// a container.
type Answer struct {
	Resource, PodUID, Container string
	// IDs are the devices, in no order.
	IDs []string
	// Env, Annotations and CDIDevices are what the container got by them.
	Env, Annotations map[string]string
	CDIDevices       []string
}

// Answers returns what containers were given with their devices, as the kubelet's checkpoint has
// it. It is shared: callers must not change it. For the rest it is as Checkpoint.
func (d *Directory) Answers() ([]Answer, error) {
	if _, err := d.Checkpoint(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.answers != nil || d.damage != nil {
		return d.answers, d.damage
	}
	data, err := checkpoint.Parse(d.text) // anew: only nodes with units ask, and the answers of all others need no memory
	if err != nil {
		return nil, err
	}
	d.answers = []Answer{}
	for _, e := range data.Data.PodDeviceEntries {
		a := Answer{Resource: e.ResourceName, PodUID: e.PodUID, Container: e.ContainerName}
		response := &pluginapi.ContainerAllocateResponse{}
		if proto.Unmarshal(e.AllocResp, response) != nil {
			continue // of another plugin, perhaps: one that cannot be read hides none of the others
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
