package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// allocation returns the tasks for Dynamic Resource Allocation.
func (c *Cluster) allocation(d daemon.View) []daemon.Task {
	if d.DRA == nil || d.Config.NodeName == "" {
		return nil
	}
	c.claims.driver = d.DRA.Devices.Driver()
	driver := draplugin.New(draplugin.Options{
		Driver:      c.claims.driver,
		RegistryDir: filepath.Join(d.Config.KubeletRoot, "plugins_registry"), Claims: d.DRA.Claims, Reader: &c.claims,
		Pools: d.DRA.Devices.Pools(), Snapshots: d.Snapshots, Problems: d.DRA.Claims.Problems(),
		Rival: d.DRA.Claims.CompetingDriver,
		Leads: d.Lead.Leads(),
	})
	ready := func(ctx context.Context) (bool, string) {
		if d.Configs.Value().DRA.Mode == config.DRAOff || !d.Lead.Leads().Value() { // another process answers calls
			return true, ""
		}
		return driver.Ready(ctx)
	}
	return []daemon.Task{
		{Name: "DRA driver", Run: func(ctx context.Context) error { return runDriver(ctx, d, driver) }, Ready: ready},
		{Name: "status of the DRA driver", Run: func(ctx context.Context) error {
			for ctx.Err() == nil {
				s, changed := driver.Status().Latest()
				d.DRA.Driver.Publish(status.DRADriver{Registered: s.Registered, Problem: s.Problem, Foreign: s.Foreign,
					Rival: s.Rival})
				feed.WaitAny(ctx, changed)
			}
			return nil
		}},
		later(daemon.Task{Name: "resource slices", Lead: true, Run: func(ctx context.Context) error {
			c.PublishSlices(ctx, d.DRA.Devices, driver.Status())
			return nil
		}}),
		later(daemon.Task{Name: "status of claims", Lead: true,
			Run: func(ctx context.Context) error { return c.claimStatus(ctx, d) }}),
	}
}

// PublishSlices publishes the devices of the node until ctx ends. Driver is the state of the
// driver's registration at kubelet.
func (c *Cluster) PublishSlices(ctx context.Context, devices *handover.Devices, driver *feed.Feed[draplugin.Status]) {
	newPublisher(c.client, devices, driver, &c.spread).run(ctx)
}

// runDriver offers the driver to kubelet while GPUs are to be given by Dynamic Resource Allocation,
// or were: what is prepared can then be given back.
func runDriver(ctx context.Context, d daemon.View, driver *draplugin.Plugin) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) { return driverNeeded(d) },
		func(ctx context.Context, needed bool) error {
			if !needed {
				return nil
			}
			return driver.Run(ctx)
		})
}

// driverNeeded reports whether kubelet needs the driver, and what is closed when that may have
// changed. It needs it as long as a GPU is not the device plugin's: a claim may have that GPU which
// was never prepared, and kubelet can end its pod only with the driver.
func driverNeeded(d daemon.View) (needed bool, changed []<-chan struct{}) {
	c, configured := d.Configs.Latest()
	published, written := d.DRA.Devices.Published().Latest()
	records, prepared := d.DRA.Claims.InUse().Latest()
	owners, decided := d.DRA.Owners.Latest()
	needed = c.DRA.Mode != config.DRAOff || len(published)+len(records) > 0 || !owners.AllPlugin()
	return needed, []<-chan struct{}{configured, written, prepared, decided}
}

// Claim returns what of a claim belongs to the driver, and whether there is one of that name.
func (c *Cluster) Claim(ctx context.Context, namespace, name string) (claim dra.Claim, found bool, err error) {
	read, err := c.client.ResourceClaim(ctx, namespace, name)
	switch {
	case kubeapi.IsNotFound(err):
		return dra.Claim{}, false, nil
	case err != nil:
		return dra.Claim{}, false, err
	}
	return driverClaim(read, c.claims.name()), true, nil
}

// ClaimsOf returns which claims were given devices of some GPUs of a node, by the UUID of the GPU,
// which gpu returns for the name of a device. Claims that only look at devices are none. One call
// is made at a time.
//
// The claims of the whole cluster are listed only if that may show that a GPU is free: as long as
// claims that were seen before have each of the GPUs, these alone are read. Lists of the nodes of a
// cluster are spread by their number and by that of claims.
//
// Where the claims may not be listed, or are too many for a list by each node, the error is
// handover.ErrNotListed. What is returned then is for the claims that kubelet asked for last.
func (c *Cluster) ClaimsOf(
	ctx context.Context, node string, gpus []string, gpu func(device string) (uuid string, known bool),
) (map[string][]string, error) {
	if held := c.stillClaimed(ctx, node, gpus, gpu); held != nil {
		return held, nil
	}
	claimed := map[string][]string{}
	take := func(claim kubeapi.ResourceClaim) {
		for uuid := range c.claimedGPUs(claim, node, gpu) {
			claimed[uuid] = append(claimed[uuid], claim.Namespace+"/"+claim.Name)
		}
	}
	missing := c.listClaims(ctx, take)
	switch {
	case errors.Is(missing, handover.ErrNotListed):
		asked, err := c.claims.last(ctx, gpus, gpu)
		if err != nil {
			return nil, err
		}
		for _, claim := range asked {
			take(claim)
		}
	case missing != nil:
		return nil, missing
	}
	c.claimed = claimed
	return claimed, missing
}

// recountClaims is how long claims that are too many are not counted again.
const recountClaims = time.Hour

// listClaims calls take with each claim of the cluster, at a time that is not that of all nodes.
// The error is handover.ErrNotListed if the list is not made.
func (c *Cluster) listClaims(ctx context.Context, take func(kubeapi.ResourceClaim)) error {
	if time.Now().Before(c.recount) {
		return errors.Join(handover.ErrNotListed, errTooManyPages)
	}
	if err := c.spread.pause(ctx, c.client); err != nil {
		return err
	}
	count, err := c.client.CountResourceClaims(ctx)
	if err == nil {
		err = c.spread.pauseForPages(ctx, c.client, (count+kubeapi.ClaimPage-1)/kubeapi.ClaimPage)
	}
	if err == nil {
		err = c.client.ResourceClaims(ctx, take)
	}
	if errors.Is(err, errTooManyPages) {
		c.recount = time.Now().Add(recountClaims)
	}
	if kubeapi.IsForbidden(err) || errors.Is(err, errTooManyPages) {
		return errors.Join(handover.ErrNotListed, err)
	}
	return err
}

// stillClaimed returns a claim for each of the GPUs that the last list has shown and that has the
// GPU still; nil if one has none.
func (c *Cluster) stillClaimed(
	ctx context.Context, node string, gpus []string, gpu func(device string) (uuid string, known bool),
) map[string][]string {
	has := map[string]map[string]bool{} // GPUs, by the name of the claim
	still := map[string][]string{}
	for _, uuid := range gpus {
		for _, name := range c.claimed[uuid] {
			if has[name] == nil {
				namespace, short, _ := strings.Cut(name, "/")
				claim, err := c.client.ResourceClaim(ctx, namespace, short)
				if err != nil && !kubeapi.IsNotFound(err) {
					return nil
				}
				has[name] = c.claimedGPUs(claim, node, gpu)
			}
			if has[name][uuid] {
				still[uuid] = []string{name}
				break
			}
		}
		if still[uuid] == nil {
			return nil
		}
	}
	return still
}

// claimedGPUs returns the GPUs of a node of which a claim was given devices, by UUID.
func (c *Cluster) claimedGPUs(claim kubeapi.ResourceClaim, node string,
	gpu func(device string) (uuid string, known bool)) map[string]bool {
	found := map[string]bool{}
	if claim.Allocation == nil {
		return found
	}
	for _, r := range claim.Allocation.Results {
		if r.Driver != c.claims.name() || r.Pool != node || r.AdminAccess {
			continue
		}
		if uuid, known := gpu(r.Device); known {
			found[uuid] = true
		}
	}
	return found
}
