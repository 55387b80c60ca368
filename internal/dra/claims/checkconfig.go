package claims

import (
	"fmt"
	"maps"
	"strconv"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// RequestedDevices describe a request of a claim before allocation.
type RequestedDevices struct {
	// Name is the name of the request, or "<request>/<subrequest>".
	Name string
	// Kind is the kind of configuration for the devices, dra.GPUConfig or dra.MIGConfig;
	// empty if unknown.
	Kind string
	// Count is the number of requested devices.
	Count int
	// Admin says that the request has adminAccess, and Part that the devices may be shares
	// of GPUs.
	Admin, Part bool
}

// CheckConfig returns why Prepare would refuse the configuration of a claim with these
// requests on any node, and nil otherwise. It does not check settings that depend on
// UUIDs.
func CheckConfig(requests []RequestedDevices, of []dra.OpaqueConfig) error {
	configs, err := parseConfigs(of)
	if err != nil {
		return err
	}
	anything := node{slices: true, mps: true, imex: true}
	var devices []recordDevice
	var chosen []*claimConfig
	counted := true // the number of devices per configuration is known
	for _, r := range requests {
		if r.Kind == "" {
			counted = false
			continue
		}
		counted = counted && !r.Part
		for i := range r.Count {
			d := recordDevice{Request: r.Name, Device: fmt.Sprintf("%s[%d]", r.Name, i), AdminAccess: r.Admin}
			if d.GPU = d.Device; r.Kind == dra.MIGConfig {
				d.MIG = &recordMIG{UUID: d.Device}
			}
			c, err := anything.settings(configs, &d)
			if err != nil {
				return err
			}
			if !r.Part { // the rules of MPS for shares depend on the node
				devices, chosen = append(devices, d), append(chosen, c)
			}
		}
	}
	for _, c := range configs {
		maps.DeleteFunc(c.MPS.MemoryOf, func(key string, _ int64) bool {
			_, err := strconv.Atoi(key)
			return err != nil || !counted
		})
	}
	return shareByMPS("", devices, chosen)
}
