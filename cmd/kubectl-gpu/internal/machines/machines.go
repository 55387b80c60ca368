// Package machines has the ResourceSlices that simulated machines publish: a file a machine, which
// a test of the daemon's package cli writes.
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

// Names returns the names of the machines, in order.
func Names() (names []string) {
	entries, _ := files.ReadDir(".") // it is in the program
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}

// Slices returns the slices of a machine. The error says which machines there are.
func Slices(name string) ([]resourceapi.ResourceSlice, error) {
	text, err := files.ReadFile(name + ".json")
	if err != nil {
		return nil, fmt.Errorf("no machine is called %q; there are %s", name, strings.Join(Names(), ", "))
	}
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	return list.Items, nil
}

// own are attributes that differ from one machine of a type to the next.
var own = []resourceapi.QualifiedName{
	"uuid", "parentUUID", "pcieBusID", "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot",
}

// Template returns slices without what only one machine has: names of the node and its pool, and
// attributes such as UUIDs.
func Template(slices []resourceapi.ResourceSlice) (templates []map[string]any) {
	for _, s := range slices {
		for i := range s.Spec.Devices {
			for _, name := range own {
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
