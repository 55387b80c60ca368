package cluster

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// A claimReader reads claims for the driver, and remembers the last claim read for each device.
// Claims with admin access do not count, because another claim may have the device.
type claimReader struct {
	client *kubeapi.Client
	driver string // name of the driver; empty for dra.Driver

	mu           sync.Mutex        // guards lastByDevice
	lastByDevice map[string]string // claims, "NAMESPACE/NAME", by the name of the device
}

func (r *claimReader) name() string { return cmp.Or(r.driver, dra.Driver) }

// Claim returns the part of a claim that belongs to the driver.
func (r *claimReader) Claim(ctx context.Context, namespace, name string) (dra.Claim, error) {
	found, err := r.client.ResourceClaim(ctx, namespace, name)
	if err != nil {
		return dra.Claim{}, err
	}
	claim := driverClaim(found, r.name())
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, result := range claim.Results {
		if r.lastByDevice == nil {
			r.lastByDevice = map[string]string{}
		}
		if !result.AdminAccess {
			r.lastByDevice[result.Device] = namespace + "/" + name
		}
	}
	return claim, nil
}

// lastRead returns the claims last read for the devices of some GPUs, without deleted claims.
func (r *claimReader) lastRead(
	ctx context.Context, gpus []string, gpu func(device string) (uuid string, known bool),
) ([]kubeapi.ResourceClaim, error) {
	names := map[string]bool{}
	r.mu.Lock()
	for device, name := range r.lastByDevice {
		if uuid, known := gpu(device); known && slices.Contains(gpus, uuid) {
			names[name] = true
		}
	}
	r.mu.Unlock()
	var all []kubeapi.ResourceClaim
	for name := range names {
		namespace, short, _ := strings.Cut(name, "/")
		claim, err := r.client.ResourceClaim(ctx, namespace, short)
		switch {
		case err == nil:
			all = append(all, claim)
		case !kubeapi.IsNotFound(err):
			return nil, err
		}
	}
	return all, nil
}

// driverClaim returns the part of a claim that belongs to the driver with this name.
func driverClaim(c kubeapi.ResourceClaim, driver string) dra.Claim {
	claim := dra.Claim{UID: c.UID, Namespace: c.Namespace, Name: c.Name, PodClaim: c.PodClaim, OwnerPod: c.OwnerPod}
	for _, pod := range c.Pods {
		claim.Pods = append(claim.Pods, pod.UID)
	}
	if c.Allocation == nil {
		return claim
	}
	for _, result := range c.Allocation.Results {
		if result.Driver != driver {
			continue
		}
		mine := dra.Result{
			Request: result.Request, Pool: result.Pool, Device: result.Device, ShareID: result.ShareID,
			ConsumedCapacity: result.ConsumedCapacity, AdminAccess: result.AdminAccess,
		}
		for _, t := range result.Tolerations {
			mine.Tolerations = append(mine.Tolerations, dra.Toleration(t))
		}
		claim.Results = append(claim.Results, mine)
	}
	for _, config := range c.Allocation.Config {
		if config.Opaque.Driver == driver {
			claim.Configs = append(claim.Configs, dra.OpaqueConfig{
				Source: config.Source, Requests: config.Requests, Parameters: config.Opaque.Parameters,
			})
		}
	}
	return claim
}
