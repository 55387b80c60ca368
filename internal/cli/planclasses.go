package cli

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/nvidia"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// chartValues are values of the chart.
type chartValues struct {
	DRA struct {
		// ShareBy and Shares are how the node's GPUs are to be shared.
		ShareBy dra.ShareBy       `json:"shareBy,omitempty"`
		Shares  int               `json:"shares,omitempty"`
		Classes []dra.DeviceClass `json:"classes"`
	} `json:"dra"`
}

// printClasses prints the DeviceClasses for the resources that a node has with a configuration of the device plugin.
func printClasses(cmd *cobra.Command, c config.Config) error {
	var snapshot inventory.Snapshot
	var pool dra.Pool
	c.DRA.Mode = config.DRAOff // all devices, whoever gives them out now
	err := withSession(cmd.Context(), c, func(ctx context.Context, session *nvidia.Session) (err error) {
		if snapshot, err = scan(ctx, c, session); err == nil {
			pool, err = poolOnce(ctx, c, session)
		}
		return err
	})
	if err != nil {
		return err
	}
	resources, replicas := namedResources(resource.New(snapshot, c.Resource), snapshot, c.Resource.Sharing.Mode == resource.MPS)
	shared := c.DRA.ShareBy == dra.Unlimited || c.DRA.ShareBy == dra.ByCount && c.DRA.Shares > 0
	for i, r := range resources {
		if shared && !r.Shared {
			resources[i].Name, resources[i].Shared = resource.SharedName(r.Name), true
		}
	}
	var values chartValues
	values.DRA.Classes = dra.Classes(pool.Driver, append(resources, madeResources(pool, resources, c.Resource)...))
	if len(replicas) > 0 {
		values.DRA.ShareBy, values.DRA.Shares = dra.ByCount, min(slices.Max(replicas), resource.MPSClients)
		if len(slices.Compact(replicas)) > 1 {
			fmt.Fprintf(cmd.ErrOrStderr(), "the resources have different numbers of replicas: with claims all devices have %d shares\n",
				values.DRA.Shares)
		}
	}
	return (&output{format: outputYAML}).print(cmd.OutOrStdout(), values, nil)
}

// namedResources returns the resources of a plan, and how many replicas the devices have of each that is shared, in order.
func namedResources(plan resource.Plan, s inventory.Snapshot, mps bool) (all []dra.NamedResource, replicas []int) {
	for _, r := range plan.Resources {
		named := dra.NamedResource{Name: r.Name}
		count := map[string]int{}
		for d := range r.All() {
			if _, shared := resource.SplitID(d.ID); shared {
				named.Shared = true
			}
			if count[d.UUID]++; count[d.UUID] > 1 {
				continue
			}
			g, _ := s.GPU(d.GPU)
			device := dra.NamedDevice{UUID: d.UUID, Model: g.Model}
			for _, m := range g.MIGDevices {
				if m.UUID == d.UUID {
					device.Profile = m.Profile
				}
			}
			named.Devices = append(named.Devices, device)
		}
		for _, n := range count {
			if named.Shared {
				replicas = append(replicas, n)
			}
		}
		named.MPS = named.Shared && mps
		all = append(all, named)
	}
	slices.Sort(replicas)
	return all, replicas
}

// madeResources returns the resources of MIG devices that can be made for claims, and that are in no other resource.
func madeResources(pool dra.Pool, others []dra.NamedResource, o resource.Options) (all []dra.NamedResource) {
	for _, slice := range pool.Slices {
		for _, d := range slice.Devices {
			if d.Partition == nil {
				continue
			}
			name := resource.ProfileName(d.Partition.Profile)
			if o.MIG == resource.MIGMixed {
				name = o.MIGName(d.Partition.Profile)
			}
			is := func(r dra.NamedResource) bool { return r.Name == name }
			if slices.ContainsFunc(others, is) || slices.ContainsFunc(all, is) {
				continue
			}
			device := dra.NamedDevice{UUID: d.Name, Model: d.Attributes["productName"].Value, Profile: d.Partition.Profile}
			all = append(all, dra.NamedResource{Name: name, Devices: []dra.NamedDevice{device}})
		}
	}
	return all
}
