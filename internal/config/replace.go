package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Replaces returns an *Invalid if the configuration must not replace the running
// configuration on a node, and nil otherwise. A replacement is refused if
//
//   - no GPU of the node would be offered, and the running configuration offers some, or
//   - no GPU of a resource would be offered, although the running configuration offers the
//     resource, because the new configuration asks for too much, such as more replicas than the
//     kubelet accepts.
//
// A GPU offered to claims counts as offered. The health of GPUs and holds on devices do not
// count.
func (c Config) Replaces(running Config, s inventory.Snapshot) error {
	before, gpusBefore := running.offers(s)
	after, gpus := c.offers(s)
	if len(gpus) == 0 && len(gpusBefore) > 0 && !c.divides(s) {
		return c.withdrawal(fmt.Sprintf("the GPUs offered would fall from %d to 0", len(gpusBefore)), after.LeftOut)
	}
	for _, r := range before.Resources {
		members := r.Members()
		if slices.ContainsFunc(members, func(d resource.Device) bool {
			return gpus[d.GPU] || d.Sharing == resource.Percentage
		}) {
			continue
		}
		refused := slices.DeleteFunc(slices.Clone(after.LeftOut), func(l resource.LeftOut) bool {
			out, _ := after.NodeDevice(l.UUID)
			return !l.Refused || !slices.ContainsFunc(members, func(d resource.Device) bool { return d.GPU == out.GPU })
		})
		if len(refused) > 0 {
			return c.withdrawal("no GPU of resource "+r.Name+" would be offered", refused)
		}
	}
	return nil
}

// offers returns the plan of the device plugin for a node, and the GPUs that pods can get by the
// plan or by claims, by UUID.
func (c Config) offers(s inventory.Snapshot) (plan resource.Plan, gpus map[string]bool) {
	gpus = map[string]bool{}
	options := c.Resource
	options.NotOffered = map[string]string{}
	for _, g := range s.GPUs {
		if c.GivenByDRA(g) {
			gpus[g.UUID], options.NotOffered[g.UUID] = true, "pods get it by claims"
		}
	}
	plan = resource.New(s, options)
	for _, r := range plan.Resources {
		for _, d := range r.Members() {
			if d.Sharing != resource.Percentage {
				gpus[d.GPU] = true
			}
		}
	}
	return plan, gpus
}

// divides reports whether the node's MIG layout creates the MIG devices that the node lacks.
func (c Config) divides(s inventory.Snapshot) bool {
	return c.MIG.Enabled && slices.ContainsFunc(s.GPUs, func(g inventory.GPU) bool {
		return g.MIG == inventory.MIGEnabled && len(g.MIGDevices) == 0
	})
}

// withdrawal returns the error of a configuration that takes GPUs away, with the reasons of omitted
// devices.
func (c Config) withdrawal(what string, leftOut []resource.LeftOut) error {
	var reasons []string
	excluded := true
	for _, l := range leftOut {
		if !slices.Contains(reasons, l.Reason) {
			reasons = append(reasons, l.Reason)
		}
		excluded = excluded && l.Excluded
	}
	if excluded {
		reasons = append(reasons, "if that is intended, restart the daemon with this configuration")
	}
	return &Invalid{File: c.File, Problems: []Remark{{Where: "this node",
		Text: cut(what + ": " + strings.Join(reasons, "; "))}}}
}
