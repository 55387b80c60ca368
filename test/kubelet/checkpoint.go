package kubelet

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// checkpointName is the file in the device plugin directory that a kubelet lives on from.
const checkpointName = "kubelet_internal_checkpoint"

// checkpoint has kubelet's fields.
type checkpoint struct {
	Data     checkpointData
	Checksum uint64
}

type checkpointData struct {
	PodDeviceEntries  []podDeviceEntry
	RegisteredDevices map[string][]string // resource → healthy device IDs
}

type podDeviceEntry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	DeviceIDs     map[int64][]string // NUMA node → IDs; -1 for those without
	AllocResp     []byte
}

// checksum returns kubelet's sum: of the data as a library prints it, types and all.
func (d checkpointData) checksum() uint64 {
	sum := fnv.New32a()
	text := &strings.Builder{}
	for i, e := range d.PodDeviceEntries {
		if i > 0 {
			text.WriteByte(' ')
		}
		fmt.Fprintf(text, "{PodUID:(string)%s ContainerName:(string)%s ResourceName:(string)%s "+
			"DeviceIDs:(checkpoint.DevicesPerNUMA)%v AllocResp:([]uint8)%v}",
			e.PodUID, e.ContainerName, e.ResourceName, e.DeviceIDs, e.AllocResp)
	}
	entries := "[" + text.String() + "]"
	if d.PodDeviceEntries == nil {
		entries = "<nil>"
	}
	_, _ = fmt.Fprintf(sum, "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)%s "+
		"RegisteredDevices:(map[string][]string)%v}", entries, d.RegisteredDevices) // a hash's Write does not fail
	return uint64(sum.Sum32())
}

// writeCheckpoint saves what containers hold and which resources there are. Kubelet goes on when
// that fails, and only logs it; so does the stand-in, whose next incarnation then starts from an
// older file.
func (m *manager) writeCheckpoint() {
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	data := m.checkpointLocked()
	m.mu.Unlock()
	m.save(data)
}

// checkpointLocked returns what there is to save.
func (m *manager) checkpointLocked() checkpointData {
	data := checkpointData{RegisteredDevices: map[string][]string{}}
	for resource, healthy := range m.healthy {
		data.RegisteredDevices[resource] = slices.AppendSeq([]string{}, maps.Keys(healthy))
	}
	for _, h := range m.held {
		response, err := proto.Marshal(h.response)
		if err != nil {
			continue
		}
		data.PodDeviceEntries = append(data.PodDeviceEntries, podDeviceEntry{
			PodUID: h.pod, ContainerName: h.container, ResourceName: h.resource, DeviceIDs: h.byNode, AllocResp: response,
		})
	}
	return data
}

// save writes the checkpoint's file; m.saving must be held.
func (m *manager) save(data checkpointData) {
	encoded, err := json.Marshal(checkpoint{Data: data, Checksum: data.checksum()})
	if err != nil {
		return
	}
	path := filepath.Join(m.dir, checkpointName)
	if os.WriteFile(path+".tmp", encoded, 0o600) == nil {
		_ = os.Rename(path+".tmp", path)
	}
}

// SavedCheckpoint returns a checkpoint in which container c of the pod with UID uid holds a device
// d of each resource, with the answer to Allocate as given, encoded.
func SavedCheckpoint(answers map[string][]byte) string {
	data := checkpointData{RegisteredDevices: map[string][]string{}}
	for _, resource := range slices.Sorted(maps.Keys(answers)) {
		data.PodDeviceEntries = append(data.PodDeviceEntries, podDeviceEntry{
			PodUID: "uid", ContainerName: "c", ResourceName: resource,
			DeviceIDs: map[int64][]string{-1: {"d"}}, AllocResp: answers[resource],
		})
	}
	encoded, _ := json.Marshal(checkpoint{Data: data, Checksum: data.checksum()}) // plain values can be encoded
	return string(encoded)
}

// readCheckpoint takes up what the last incarnation left: who holds what, and for each resource a
// stopped endpoint and no devices, so that capacity is 0 until its plugin registers. A file that is
// missing or broken is no file.
func (m *manager) readCheckpoint() {
	encoded, err := os.ReadFile(filepath.Join(m.dir, checkpointName))
	if err != nil {
		return
	}
	var saved checkpoint
	if err := json.Unmarshal(encoded, &saved); err != nil {
		return
	}
	if saved.Data.checksum() != saved.Checksum {
		return
	}
	for _, entry := range saved.Data.PodDeviceEntries {
		response := &v1beta1.ContainerAllocateResponse{}
		if proto.Unmarshal(entry.AllocResp, response) != nil {
			continue
		}
		m.held = append(m.held, holding{
			pod: entry.PodUID, container: entry.ContainerName, resource: entry.ResourceName,
			byNode: entry.DeviceIDs, response: response,
		})
	}
	m.recountLocked()
	for resource := range saved.Data.RegisteredDevices {
		m.healthy[resource], m.unhealthy[resource] = set{}, set{}
		m.endpoints[resource] = &endpoint{stopped: m.clock.Now()}
	}
}
