// Package checkpoint knows the format of the file in which kubelet's device manager keeps which container holds which
// devices. The daemon only reads it; the stand-in kubelet of the tests writes it.
//
// The names of the package and of its types are kubelet's own: they go into the checksum.
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

// WithoutNode is where DevicesPerNUMA has devices of which no NUMA node is known.
const WithoutNode = -1

// DevicesPerNUMA are device IDs by NUMA node. A device of several nodes is at each of them.
type DevicesPerNUMA map[int64][]string

// PodDevicesEntry is what a container holds of one resource.
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

// New returns the content of a file with these entries, and with these healthy devices by resource.
func New(entries []PodDevicesEntry, registered map[string][]string) Data {
	data := checkpointData{PodDeviceEntries: entries, RegisteredDevices: registered}
	return Data{Data: data, Checksum: data.checksum()}
}

// Marshal returns the text of a file.
func (d Data) Marshal() ([]byte, error) { return json.Marshal(d) }

// Parse returns the content of a file. It fails if kubelet would not accept the file, and if the file has another format
// than that of kubelet 1.20 and later.
func Parse(text []byte) (Data, error) {
	// Kubelet reads into values that are empty and not nil, and the checksum tells one from the other.
	d := Data{Data: checkpointData{PodDeviceEntries: []PodDevicesEntry{}, RegisteredDevices: map[string][]string{}}}
	if err := json.Unmarshal(text, &d); err != nil {
		return Data{}, fmt.Errorf("read kubelet's checkpoint: %w", err)
	}
	if d.Checksum != d.Data.checksum() {
		return Data{}, errors.New("read kubelet's checkpoint: the checksum is wrong, or this version of kubelet has another format")
	}
	return d, nil
}

// checksum returns kubelet's checksum, which is of the data in Go's syntax, with the names of types.
func (d checkpointData) checksum() uint64 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(dump.ForHash(d))) // a hash's Write does not fail
	return uint64(hash.Sum32())
}
