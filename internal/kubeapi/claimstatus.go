package kubeapi

import (
	"context"
	"fmt"
	"time"
)

// claimManager is the field manager of the status of claims.
const claimManager = "gpu-node-agent-claims"

// A ClaimDeviceStatus is what the status of a claim says of one of its devices.
type ClaimDeviceStatus struct {
	Driver     string           `json:"driver"`
	Pool       string           `json:"pool"`
	Device     string           `json:"device"`
	ShareID    string           `json:"shareID,omitempty"`
	Conditions []ClaimCondition `json:"conditions"`
	// Data is an object, of 10 KiB at most.
	Data any `json:"data,omitempty"`
}

// A ClaimCondition is a condition of a device.
type ClaimCondition struct {
	Type string `json:"type"`
	// Status is True, False or Unknown.
	Status             string    `json:"status"`
	Reason             string    `json:"reason"`
	Message            string    `json:"message"`
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// ApplyClaimDevices has the status of a claim say of its devices of this driver what is given, and nothing else. The claim has to have the
// UID. It needs the right to patch resourceclaims/status, and associated-node:patch for resourceclaims/driver.
func (c *Client) ApplyClaimDevices(ctx context.Context, namespace, name, uid string, devices []ClaimDeviceStatus) error {
	err := c.resourceAPI(func(path string) error {
		object := map[string]any{
			"apiVersion": path[len("/apis/"):], "kind": "ResourceClaim", "metadata": metadata{Name: name, Namespace: namespace, UID: uid},
			"status": map[string]any{"devices": devices},
		}
		_, err := c.apply(ctx, path+"/namespaces/"+namespace+"/resourceclaims/"+name+"/status", claimManager, object, true)
		return err
	})
	if err != nil {
		return fmt.Errorf("write the status of ResourceClaim %s/%s: %w", namespace, name, err)
	}
	return nil
}
