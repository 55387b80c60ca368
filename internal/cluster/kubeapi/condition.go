package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// The media types of patches.
const (
	mergePatch          = "application/merge-patch+json"
	strategicMergePatch = "application/strategic-merge-patch+json"
)

// PatchCondition writes one condition of the daemon's own Node, and returns the updated Node. The
// Node must still have the version; the rest of its status stays unchanged. Times have a resolution
// of one second.
func (c *Client) PatchCondition(ctx context.Context, version string, condition Condition) (Node, error) {
	condition.LastHeartbeatTime = condition.LastHeartbeatTime.UTC().Truncate(time.Second)
	condition.LastTransitionTime = condition.LastTransitionTime.UTC().Truncate(time.Second)
	var patch struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion,omitempty"`
		} `json:"metadata"`
		Status struct {
			Conditions []Condition `json:"conditions"` // merged by type
		} `json:"status"`
	}
	patch.Metadata.ResourceVersion = version
	patch.Status.Conditions = []Condition{condition}
	return c.patchNode(ctx, "/status", strategicMergePatch, patch)
}

// patchNode patches the daemon's own Node or one of its subresources, and returns the updated Node.
func (c *Client) patchNode(ctx context.Context, subresource, contentType string, patch any) (Node, error) {
	body, err := json.Marshal(patch)
	if err != nil {
		return Node{}, fmt.Errorf("encode a patch of the node: %w", err)
	}
	restores := c.latestNode().restores
	answer, err := c.send(ctx, request{
		verb: http.MethodPatch, path: nodesPath + "/" + c.node + subresource, contentType: contentType, body: body,
	})
	if err != nil {
		return Node{}, err
	}
	return c.readNode(answer, restores)
}

// After reports whether n is a later version of the same Node than other. It reports false if the
// cluster was restored from a backup between the two.
func (n Node) After(other Node) bool {
	return n.UID == other.UID && n.restores == other.restores && isBefore(other.ResourceVersion, n.ResourceVersion)
}

// isBefore reports whether version is earlier than other. It reports false if one of them is not a
// number.
func isBefore(version, other string) bool {
	earlier, err := strconv.ParseUint(version, 10, 64)
	later, otherErr := strconv.ParseUint(other, 10, 64)
	return err == nil && otherErr == nil && earlier < later
}
