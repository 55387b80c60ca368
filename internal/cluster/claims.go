package cluster

import (
	"context"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
)

// A claimReader reads claims for the driver.
type claimReader struct{ client *kubeapi.Client }

// Claim returns the claim of that name: what of its allocation belongs to the driver.
func (r claimReader) Claim(ctx context.Context, namespace, name string) (dra.Claim, error) {
	found, err := r.client.ResourceClaim(ctx, namespace, name)
	if err != nil {
		return dra.Claim{}, err
	}
	return driverClaim(found), nil
}

// driverClaim returns what of a claim belongs to the driver.
func driverClaim(c kubeapi.ResourceClaim) dra.Claim {
	claim := dra.Claim{UID: c.UID, Namespace: c.Namespace, Name: c.Name, PodClaim: c.PodClaim}
	for _, pod := range c.Pods {
		claim.Pods = append(claim.Pods, pod.UID)
	}
	if c.Allocation == nil {
		return claim
	}
	for _, result := range c.Allocation.Results {
		if result.Driver != dra.Driver {
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
		if config.Opaque.Driver == dra.Driver {
			claim.Configs = append(claim.Configs, dra.OpaqueConfig{
				Source: config.Source, Requests: config.Requests, Parameters: config.Opaque.Parameters,
			})
		}
	}
	return claim
}
