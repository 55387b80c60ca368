// Package machines has the ResourceSlices of simulated machines: one file for each machine, written
// by a test of the daemon's package cli.
package machines

import (
	"embed"
	"encoding/json"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

//go:embed *.json
var files embed.FS

// Names returns the sorted names of the machines.
func Names() (names []string) {
	entries, _ := files.ReadDir(".") // embedded files can always be read
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}

// Slices returns the slices of a machine. The error lists the known machines.
func Slices(name string) ([]resourceapi.ResourceSlice, error) {
	text, err := files.ReadFile(name + ".json")
	if err != nil {
		return nil, fmt.Errorf("unknown machine %q; the known machines are %s", name, strings.Join(Names(), ", "))
	}
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	return list.Items, nil
}

// machineAttributes are attributes that differ between machines of the same type.
var machineAttributes = []resourceapi.QualifiedName{
	"uuid", "parentUUID", "pcieBusID", "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot",
}

// Template returns slices without values of a single machine: the names of the node and its pool,
// and attributes such as UUIDs.
func Template(slices []resourceapi.ResourceSlice) (templates []map[string]any) {
	for _, s := range slices {
		for i := range s.Spec.Devices {
			for _, name := range machineAttributes {
				delete(s.Spec.Devices[i].Attributes, name)
			}
		}
		template := map[string]any{"driver": s.Spec.Driver, "devices": s.Spec.Devices}
		if len(s.Spec.SharedCounters) > 0 {
			template["sharedCounters"] = s.Spec.SharedCounters
		}
		templates = append(templates, template)
	}
	return templates
}
