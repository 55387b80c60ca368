package devicemanager

import (
	"bytes"
	"reflect"
	"testing"

	kubelets "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/checkpoint"
)

// The daemon and the stand-in kubelet have kubelet's checkpoint in a package of their own. What
// kubelet's own code writes is read there, and the other way round; a file with another checksum is
// accepted by neither.
func TestCheckpointFormat(t *testing.T) {
	tests := map[string]struct {
		entries    []kubelets.PodDevicesEntry
		registered map[string][]string
	}{
		"nothing":           {nil, map[string][]string{}},
		"nothing, not nil":  {[]kubelets.PodDevicesEntry{}, map[string][]string{}},
		"nothing, but nil":  {nil, nil},
		"no healthy device": {nil, map[string][]string{"nvidia.com/gpu": {}, "nvidia.com/mig-1g.10gb": nil}},
		"pods": {
			[]kubelets.PodDevicesEntry{
				{
					PodUID: "6f7d0d8a", ContainerName: "c", ResourceName: "nvidia.com/gpu",
					DeviceIDs: kubelets.DevicesPerNUMA{1: {"GPU-b::0", "GPU-b::1"}, 0: {"GPU-a"}, -1: {"MIG-ü"}},
					AllocResp: []byte("\x0a\x00\xff"),
				},
				{PodUID: "6f7d0d8a", ContainerName: "init", ResourceName: "nvidia.com/gpu", DeviceIDs: kubelets.DevicesPerNUMA{}},
				{PodUID: "", ContainerName: "<&>", ResourceName: "other.org/x", AllocResp: []byte{}},
			},
			map[string][]string{"nvidia.com/gpu": {"GPU-b::1", "GPU-a"}, "other.org/x": {"1"}, "a.org/x": {"\"\\"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			theirs := kubelets.New(test.entries, test.registered)
			text, err := theirs.MarshalCheckpoint()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s", text)
			read, err := checkpoint.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			entries := make([]checkpoint.PodDevicesEntry, 0, len(test.entries))
			for _, e := range test.entries {
				entries = append(entries, checkpoint.PodDevicesEntry{
					PodUID: e.PodUID, ContainerName: e.ContainerName, ResourceName: e.ResourceName,
					DeviceIDs: checkpoint.DevicesPerNUMA(e.DeviceIDs), AllocResp: e.AllocResp,
				})
			}
			if len(entries) > 0 && !reflect.DeepEqual(read.Data.PodDeviceEntries, entries) ||
				!reflect.DeepEqual(read.Data.RegisteredDevices, test.registered) {
				t.Errorf("read %+v", read.Data)
			}

			damaged := bytes.Replace(text, []byte(`"Checksum":`), []byte(`"Checksum":1`), 1)
			if _, err := checkpoint.Parse(damaged); err == nil || accept(damaged) == nil {
				t.Errorf("a wrong checksum: Parse() = %v, kubelet says %v", err, accept(damaged))
			}
		})
	}
}

// accept reads a file as kubelet does.
func accept(text []byte) error {
	c := kubelets.New([]kubelets.PodDevicesEntry{}, map[string][]string{})
	if err := c.UnmarshalCheckpoint(text); err != nil {
		return err
	}
	return c.VerifyChecksum()
}
