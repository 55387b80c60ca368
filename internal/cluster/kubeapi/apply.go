package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// The field managers of this program. An apply removes the fields that the same manager applied
// before, so each kind of write has its own manager.
const (
	labelsManager = "gpu-node-agent-labels"
	migManager    = "gpu-node-agent-mig"
	answerManager = "gpu-node-agent-quiesce"
)

// apply merges fields into an object by server-side apply, and returns the object. Without force,
// it returns an error and changes nothing if another program owns one of the fields with another
// value.
func (c *Client) apply(ctx context.Context, path, manager string, object any, force bool) ([]byte, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return nil, fmt.Errorf("write the fields to apply: %w", err)
	}
	return c.send(ctx, request{
		// JSON is a subset of YAML
		verb: http.MethodPatch, path: path, contentType: "application/apply-patch+yaml", body: body,
		query: url.Values{"fieldManager": {manager}, "force": {strconv.FormatBool(force)}},
	})
}

// metadata is the metadata of an object to apply.
type metadata struct {
	Name            string            `json:"name"`
	Namespace       string            `json:"namespace,omitempty"`
	UID             string            `json:"uid,omitempty"`
	ResourceVersion string            `json:"resourceVersion,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	Annotations     map[string]string `json:"annotations,omitempty"`
	OwnerReferences []OwnerReference  `json:"ownerReferences,omitempty"`
}

// ApplyLabels sets labels on the daemon's own Node, and removes labels of an earlier call that are
// not in the map. The Node must still have the UID and the version. ApplyLabels returns the updated
// Node.
//
// If another program owns a label with another value, ApplyLabels returns a *Conflict and changes
// nothing.
func (c *Client) ApplyLabels(ctx context.Context, uid, version string, labels map[string]string) (Node, error) {
	restores := c.latestNode().restores
	text, err := c.applyNode(ctx, labelsManager, metadata{UID: uid, ResourceVersion: version, Labels: labels}, false)
	var status *StatusError
	if errors.As(err, &status) && len(status.Conflicts) > 0 {
		conflict := &Conflict{Labels: map[string]string{}}
		for _, f := range status.Conflicts {
			if key, ok := strings.CutPrefix(f.Field, ".metadata.labels."); ok {
				conflict.Labels[key] = f.Message
			}
		}
		if len(conflict.Labels) > 0 {
			return Node{}, conflict
		}
	}
	if err != nil {
		return Node{}, fmt.Errorf("write the labels of the node: %w", err)
	}
	return c.readNode(text, restores)
}

// ApplyMIGState sets labels and annotations about the MIG layout on the daemon's own Node, and
// removes those of an earlier call that are not in the maps. The Node must still have the UID and
// the version. Values of other programs are replaced. ApplyMIGState returns the updated Node.
func (c *Client) ApplyMIGState(
	ctx context.Context, uid, version string, labels, annotations map[string]string,
) (Node, error) {
	restores := c.latestNode().restores
	text, err := c.applyNode(ctx, migManager, metadata{UID: uid, ResourceVersion: version, Labels: labels,
		Annotations: annotations}, true)
	if err != nil {
		return Node{}, fmt.Errorf("write the state of the MIG layout: %w", err)
	}
	return c.readNode(text, restores)
}

// ApplyReleaseAnswer writes the answer to a request for the release of the driver to the daemon's
// own Node, as annotations. The Node must still have the UID and the version. Annotations of an
// earlier answer are removed, and values of other programs are replaced. ApplyReleaseAnswer returns
// the updated Node.
func (c *Client) ApplyReleaseAnswer(
	ctx context.Context, uid, version string, annotations map[string]string,
) (Node, error) {
	restores := c.latestNode().restores
	text, err := c.applyNode(ctx, answerManager, metadata{UID: uid, ResourceVersion: version, Annotations: annotations},
		true)
	if err != nil {
		return Node{}, fmt.Errorf("write the answer to a release of the driver: %w", err)
	}
	return c.readNode(text, restores)
}

// applyNode applies metadata to the daemon's own Node.
func (c *Client) applyNode(ctx context.Context, manager string, fields metadata, force bool) ([]byte, error) {
	fields.Name = c.node
	return c.apply(ctx, nodesPath+"/"+c.node, manager, map[string]any{"apiVersion": "v1", "kind": "Node",
		"metadata": fields}, force)
}

// readNode records and returns the Node in a response. restores is the number of restores known
// when the request was sent.
func (c *Client) readNode(text []byte, restores int) (Node, error) {
	var n nodeObject
	if err := json.Unmarshal(text, &n); err != nil {
		return Node{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	written := n.node()
	written.restores = restores
	return c.recordNode(written), nil
}

// Conflict is the error for labels that other programs own.
type Conflict struct {
	// Labels has the API server's message about the owner, by the key of the label.
	Labels map[string]string
}

func (c *Conflict) Error() string {
	return fmt.Sprintf("labels of the node belong to other programs: %d", len(c.Labels))
}

// NodeCount returns the number of nodes in the cluster. The API server counts them, and sends only
// one.
func (c *Client) NodeCount(ctx context.Context) (int, error) {
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath, query: url.Values{"limit": {"1"}}})
	if err != nil {
		return 0, fmt.Errorf("count the nodes of the cluster: %w", err)
	}
	var list struct {
		Metadata struct {
			RemainingItemCount int `json:"remainingItemCount"`
		} `json:"metadata"`
		Items []struct{} `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return 0, fmt.Errorf("read the answer of the API server: %w", err)
	}
	return len(list.Items) + list.Metadata.RemainingItemCount, nil
}
