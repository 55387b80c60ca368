package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// chartValues are values of the chart.
type chartValues struct {
	DRA struct {
		// ShareBy and Shares are the wanted sharing of the node's GPUs.
		ShareBy dra.ShareBy       `json:"shareBy,omitempty"`
		Shares  int               `json:"shares,omitempty"`
		Classes []dra.DeviceClass `json:"classes"`
	} `json:"dra"`
}

// printClasses prints the DeviceClasses for the resources of a node with a configuration of the
// device plugin. Resources without devices for claims are printed to standard error, and are an
// error.
func printClasses(cmd *cobra.Command, c config.Config) error {
	if c.DRA.Mode == config.DRAOff {
		c.DRA.Mode = config.DRAAll
	}
	var snapshot inventory.Snapshot
	var pool dra.Pool
	err := withSession(cmd.Context(), c, func(ctx context.Context, session *nvidia.Session) (err error) {
		if snapshot, err = scan(ctx, c, session); err == nil {
			pool, err = poolOnce(ctx, c, session)
		}
		return err
	})
	if err != nil {
		return err
	}
	n := newClassResources(resource.New(snapshot, c.Resource), snapshot, c)
	values, pool := n.share(c, pool)
	n.addMade(pool, c.Resource)
	var stranded []dra.Stranded
	values.DRA.Classes, stranded = dra.Classes(pool, n.resources)
	stranded = append(stranded, n.units...)
	for _, note := range n.notes {
		fmt.Fprintln(cmd.ErrOrStderr(), note)
	}
	if err := (&output{format: outputYAML}).print(cmd.OutOrStdout(), values, nil); err != nil || len(stranded) == 0 {
		return err
	}
	var names []string
	for _, s := range stranded {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: no claim can have %d of its %s: %s\n", s.Resource, s.Missing,
			wording.Count(s.All, "device"), s.Reason)
		names = append(names, s.Resource)
	}
	for _, l := range pool.LeftOut {
		fmt.Fprintf(cmd.ErrOrStderr(), "left out: %s\n", l)
	}
	return fmt.Errorf("claims cannot replace %s on this node: change the configuration, or let the device plugin "+
		"keep these GPUs with dra.mode: split", strings.Join(names, ", "))
}

// classResources are the resources of a node in the terms of classes.
type classResources struct {
	resources []dra.NamedResource
	// replicas are the numbers of containers that share a device, for all shared devices, in
	// ascending order.
	replicas []int
	// units are the resources without a possible class.
	units []dra.Stranded
	// notes are differences from the device plugin for pods.
	notes []string
}

// newClassResources returns the resources of a plan with the devices of the GPUs for claims.
func newClassResources(plan resource.Plan, s inventory.Snapshot, c config.Config) *classResources {
	n := &classResources{}
	for _, r := range plan.Resources {
		one, replicas, units := dra.NamedResource{Name: r.Name}, map[string]int{}, 0
		for d := range r.All() {
			g, _ := s.GPU(d.GPU)
			switch byDRA := c.GivenByDRA(g); {
			case d.Sharing == resource.Percentage && c.DRA.Mode == config.DRAAll:
				units++ // of all GPUs together
			case !byDRA:
			case d.Sharing != resource.Unshared && d.Sharing != resource.TimeSliced && d.Sharing != resource.MPS:
				units++
			default:
				one.Shared, one.MPS = one.Shared || d.Sharing != resource.Unshared, one.MPS || d.Sharing == resource.MPS
				if replicas[d.UUID]++; replicas[d.UUID] == 1 {
					one.Devices = append(one.Devices, namedDevice(g, d))
				}
			}
		}
		if units > 0 {
			n.units = append(n.units, dra.Stranded{Resource: r.Name, Missing: units, All: units,
				Reason: "a class gives whole devices, not units; with dra.shareBy: memory, claims ask for parts of " +
					"the memory"})
		}
		if one.Shared {
			n.replicas = slices.AppendSeq(n.replicas, maps.Values(replicas))
		}
		if len(one.Devices) > 0 {
			n.resources = append(n.resources, one)
		}
	}
	slices.Sort(n.replicas)
	return n
}

// namedDevice returns a device of a GPU in the terms of classes.
func namedDevice(g inventory.GPU, d resource.Device) dra.NamedDevice {
	named := dra.NamedDevice{UUID: d.UUID, GPU: d.GPU}
	for _, m := range g.MIGDevices {
		if m.UUID == d.UUID {
			named.Profile = m.Profile
		}
	}
	return named
}

// share returns the values for claims to share devices in the same way as resources, and
// the pool with these values.
func (n *classResources) share(c config.Config, pool dra.Pool) (values chartValues, with dra.Pool) {
	switch {
	case len(n.replicas) > 0 && c.DRA.SwitchMIG:
		n.notes = append(n.notes, "with dra.switchMIG, claims share no devices: remove it, or the replicas")
	case len(n.replicas) > 0:
		most := n.replicas[len(n.replicas)-1]
		var numbers []string
		for _, count := range n.replicas {
			numbers = append(numbers, fmt.Sprint(count))
		}
		values.DRA.ShareBy, values.DRA.Shares = dra.ByCount, min(most, resource.MPSClients)
		if most > n.replicas[0] || most > resource.MPSClients {
			n.notes = append(n.notes, fmt.Sprintf("each device has %d shares for claims: the device plugin has %s "+
				"replicas of a device",
				values.DRA.Shares, strings.Join(slices.Compact(numbers), ", ")))
		}
		pool = pool.SharedBy(dra.ByCount, values.DRA.Shares)
	case c.DRA.ShareBy == dra.Unlimited, c.DRA.ShareBy == dra.ByCount && c.DRA.Shares > 0:
		values.DRA.ShareBy, values.DRA.Shares = c.DRA.ShareBy, c.DRA.Shares
		for i, r := range n.resources {
			n.resources[i].Name, n.resources[i].Shared = resource.SharedName(r.Name), true
			n.notes = append(n.notes, fmt.Sprintf("pods ask for %[2]s in place of %[1]s, because claims share its "+
				"devices (dra.shareBy: %[3]s)",
				r.Name, n.resources[i].Name, c.DRA.ShareBy))
		}
	}
	return values, pool
}

// addMade adds the MIG devices that can be created for claims.
func (n *classResources) addMade(pool dra.Pool, o resource.Options) {
	for _, slice := range pool.Slices {
		for _, d := range slice.Devices {
			if d.Partition == nil {
				continue
			}
			profile := d.Partition.Profile
			name := resource.ProfileName(profile)
			if o.MIG == resource.MIGMixed {
				name = o.MIGName(profile)
			}
			i := slices.IndexFunc(n.resources, func(r dra.NamedResource) bool { return r.Name == name })
			if i < 0 {
				i, n.resources = len(n.resources), append(n.resources, dra.NamedResource{Name: name})
			}
			if r := &n.resources[i]; !slices.Contains(r.Profiles, profile) {
				r.Profiles = append(r.Profiles, profile)
			}
		}
	}
}
