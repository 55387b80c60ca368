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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/owner"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// allocation returns the tasks for Dynamic Resource Allocation.
func (c *Cluster) allocation(d daemon.View) []daemon.Task {
	if d.DRA == nil || d.Startup.NodeName == "" {
		return nil
	}
	c.claims.driver = d.DRA.Devices.Driver()
	driver := draplugin.New(draplugin.Options{
		Driver:      c.claims.driver,
		RegistryDir: filepath.Join(d.Startup.KubeletRoot, "plugins_registry"), Claims: d.DRA.Claims, Reader: &c.claims,
		Pools: d.DRA.Devices.Pools(), Snapshots: d.Snapshots, Problems: d.DRA.Claims.Problems(),
		CompetingDriver: d.DRA.Claims.CompetingDriver,
		Leads:           d.Lead.Leads(),
	})
	ready := func(ctx context.Context) (bool, string) {
		if d.Configs.Value().DRA.Mode == config.DRAOff || !d.Lead.Leads().Value() { // another process serves the calls
			return true, ""
		}
		return driver.Ready(ctx)
	}
	return []daemon.Task{
		{Name: "DRA driver", Run: func(ctx context.Context) error { return runDriver(ctx, d, driver) }, Ready: ready},
		{Name: "status of the DRA driver", Run: func(ctx context.Context) error {
			for ctx.Err() == nil {
				s, changed := driver.Status().Latest()
				d.DRA.Driver.Publish(status.DRADriver{Registered: s.Registered, Problem: s.Problem,
					NameConflict:    s.NameConflict,
					CompetingDriver: s.CompetingDriver})
				feed.WaitAny(ctx, changed)
			}
			return nil
		}},
		afterHeadStart(daemon.Task{Name: "resource slices", Lead: true, Run: func(ctx context.Context) error {
			c.PublishSlices(ctx, d.DRA.Devices, driver.Status())
			return nil
		}}),
		afterHeadStart(daemon.Task{Name: "status of claims", Lead: true,
			Run: func(ctx context.Context) error { return c.claimStatus(ctx, d) }}),
	}
}

// PublishSlices publishes the devices of the node until ctx ends. driver is the state of the
// driver's registration with the kubelet.
func (c *Cluster) PublishSlices(ctx context.Context, devices *pool.Devices, driver *feed.Feed[draplugin.Status]) {
	newPublisher(c.client, devices, driver, &c.spread).run(ctx)
}

// runDriver registers the driver with the kubelet while GPUs are allocated by Dynamic Resource
// Allocation, and afterwards until all claims are released.
func runDriver(ctx context.Context, d daemon.View, driver *draplugin.Plugin) error {
	return runWhileUnchanged(ctx, func() (bool, []<-chan struct{}) { return driverNeeded(d) },
		func(ctx context.Context, needed bool) error {
			if !needed {
				return nil
			}
			return driver.Run(ctx)
		})
}

// driverNeeded reports whether the kubelet needs the driver, and returns channels that are closed
// when this may change. The driver is needed until all GPUs belong to the device plugin: a claim
// that was never prepared may have a GPU, and the kubelet needs the driver to end its pod.
func driverNeeded(d daemon.View) (needed bool, changed []<-chan struct{}) {
	c, configChanged := d.Configs.Latest()
	published, publishedChanged := d.DRA.Devices.Published().Latest()
	records, recordsChanged := d.DRA.Claims.InUse().Latest()
	owners, ownersChanged := d.DRA.Owners.Latest()
	needed = c.DRA.Mode != config.DRAOff || len(published)+len(records) > 0 || !owners.AllPlugin()
	return needed, []<-chan struct{}{configChanged, publishedChanged, recordsChanged, ownersChanged}
}

// Claim returns the part of a claim that belongs to the driver, and whether the claim exists.
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

// ClaimsOf returns the claims that have devices of the given GPUs of a node, by the UUID of the
// GPU; gpu returns this UUID for the name of a device. Claims with admin access do not count.
// ClaimsOf must not be called concurrently.
//
// ClaimsOf lists the claims of the whole cluster only if this can show that a GPU is free: while
// known claims have all of the GPUs, it reads only these claims. The lists of the nodes are spread
// over time by the number of nodes and claims.
//
// If the claims may not be listed, or are too many for a list by each node, the error is
// owner.ErrNotListed. The result then covers only the claims that the kubelet requested last.
func (c *Cluster) ClaimsOf(
	ctx context.Context, node string, gpus []string, gpu func(device string) (uuid string, known bool),
) (map[string][]string, error) {
	if held := c.stillClaimed(ctx, node, gpus, gpu); held != nil {
		return held, nil
	}
	claimed := map[string][]string{}
	visit := func(claim kubeapi.ResourceClaim) {
		for uuid := range c.claimedGPUs(claim, node, gpu) {
			claimed[uuid] = append(claimed[uuid], claim.Namespace+"/"+claim.Name)
		}
	}
	missing := c.listClaims(ctx, visit)
	switch {
	case errors.Is(missing, owner.ErrNotListed):
		recent, err := c.claims.lastRead(ctx, gpus, gpu)
		if err != nil {
			return nil, err
		}
		for _, claim := range recent {
			visit(claim)
		}
	case missing != nil:
		return nil, missing
	}
	c.lastClaims = claimed
	return claimed, missing
}

// recountInterval is how long too many claims are not counted again.
const recountInterval = time.Hour

// listClaims calls visit with each claim of the cluster, after a random delay that differs between
// nodes. The error is owner.ErrNotListed if the list is not made.
func (c *Cluster) listClaims(ctx context.Context, visit func(kubeapi.ResourceClaim)) error {
	if time.Now().Before(c.recountAt) {
		return errors.Join(owner.ErrNotListed, errTooManyPages)
	}
	if err := c.spread.pauseRandomly(ctx, c.client); err != nil {
		return err
	}
	count, err := c.client.CountResourceClaims(ctx)
	if err == nil {
		err = c.spread.pauseForPages(ctx, c.client, (count+kubeapi.ClaimPage-1)/kubeapi.ClaimPage)
	}
	if err == nil {
		err = c.client.ResourceClaims(ctx, visit)
	}
	if errors.Is(err, errTooManyPages) {
		c.recountAt = time.Now().Add(recountInterval)
	}
	if kubeapi.IsForbidden(err) || errors.Is(err, errTooManyPages) {
		return errors.Join(owner.ErrNotListed, err)
	}
	return err
}

// stillClaimed returns a claim from the last list for each GPU; nil if one of the GPUs has no such
// claim any more.
func (c *Cluster) stillClaimed(
	ctx context.Context, node string, gpus []string, gpu func(device string) (uuid string, known bool),
) map[string][]string {
	has := map[string]map[string]bool{} // GPUs, by the name of the claim
	still := map[string][]string{}
	for _, uuid := range gpus {
		for _, name := range c.lastClaims[uuid] {
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

// claimedGPUs returns the UUIDs of the node's GPUs that a claim has devices of.
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
