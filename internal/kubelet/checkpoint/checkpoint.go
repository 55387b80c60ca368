// Package checkpoint has the format of the file in which the kubelet's device manager saves
// the devices of containers. The daemon only reads the file.
//
// The package and its types have the same names as in the kubelet, because the checksum
// includes the names.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"

	"k8s.io/utils/dump"
)

// FileName is the name of the file, which is beside kubelet.sock.
const FileName = "kubelet_internal_checkpoint"

// DevicesPerNUMA are device IDs by NUMA node, or by -1 if a device has none. A device with several
// nodes is at each of them.
type DevicesPerNUMA map[int64][]string

// PodDevicesEntry has the devices of a container, of one resource.
type PodDevicesEntry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	DeviceIDs     DevicesPerNUMA
	AllocResp     []byte // the plugin's answer to Allocate
}

type checkpointData struct {
	PodDeviceEntries  []PodDevicesEntry
	RegisteredDevices map[string][]string // healthy devices by resource
}

// Data is the file's content.
type Data struct {
	Data     checkpointData
	Checksum uint64
}

// Parse returns the content of a file. It fails if the kubelet would not accept the file, or if the
// file does not have the format of kubelet 1.20 and later.
func Parse(text []byte) (Data, error) {
	// Like the kubelet, start with values that are empty and not nil: the checksums of the two differ.
	d := Data{Data: checkpointData{PodDeviceEntries: []PodDevicesEntry{}, RegisteredDevices: map[string][]string{}}}
	if err := json.Unmarshal(text, &d); err != nil {
		return Data{}, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	if d.Checksum != d.Data.checksum() {
		return Data{}, errors.New("read the kubelet's checkpoint: the checksum is wrong, or this version of the " +
			"kubelet has another format")
	}
	return d, nil
}

// checksum returns the kubelet's checksum: of the data as Go prints it, with the names of types.
func (d checkpointData) checksum() uint64 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(dump.ForHash(d))) // a hash's Write does not fail
	return uint64(hash.Sum32())
}
