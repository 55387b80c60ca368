package claims

import (
	"fmt"
	"maps"
	"strconv"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// RequestedDevices are what a request of a claim asks for, before it has devices.
type RequestedDevices struct {
	// Name is that of the request, or "<request>/<subrequest>".
	Name string
	// Kind is the kind of configuration that its devices take, dra.GPUConfig or dra.MIGConfig; empty
	// if that is not known.
	Kind string
	// Count is how many devices it asks for.
	Count int
	// Admin says that it has adminAccess, and Part that its devices may be shares of GPUs.
	Admin, Part bool
}

// CheckConfig returns why Prepare will refuse a claim with these requests for its configuration, on
// any node; nil if it will not. What depends on UUIDs is not judged.
func CheckConfig(requests []RequestedDevices, of []dra.OpaqueConfig) error {
	configs, err := parseConfigs(of)
	if err != nil {
		return err
	}
	anything := node{slices: true, mps: true, imex: true}
	var devices []recordDevice
	var chosen []*claimConfig
	counted := true // how many devices a configuration is for
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
			if !r.Part { // by which rules shares use MPS, their node says
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
