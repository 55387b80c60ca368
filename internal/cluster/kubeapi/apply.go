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

// The field managers. An apply removes what the same manager applied before, so that each kind of
// write has a manager of its own.
const (
	labelsManager = "gpu-node-agent-labels"
	migManager    = "gpu-node-agent-mig"
	answerManager = "gpu-node-agent-quiesce"
)

// apply has the API server merge fields into an object by server-side apply, and returns the
// object. Without force, fields that others own with other values make it an error, and nothing is
// changed.
func (c *Client) apply(ctx context.Context, path, manager string, object any, force bool) ([]byte, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return nil, fmt.Errorf("write the fields to apply: %w", err)
	}
	return c.send(ctx, request{
		// which JSON is a part of
		verb: http.MethodPatch, path: path, contentType: "application/apply-patch+yaml", body: body,
		query: url.Values{"fieldManager": {manager}, "force": {strconv.FormatBool(force)}},
	})
}

// metadata names the object of an apply, and has its labels.
type metadata struct {
	Name            string            `json:"name"`
	Namespace       string            `json:"namespace,omitempty"`
	UID             string            `json:"uid,omitempty"`
	ResourceVersion string            `json:"resourceVersion,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	Annotations     map[string]string `json:"annotations,omitempty"`
	OwnerReferences []OwnerReference  `json:"ownerReferences,omitempty"`
}

// ApplyLabels gives labels to the own node, which has to have the UID and the version still, and
// takes those away that an earlier call gave and that are not among them. It returns the node as it
// is then.
//
// A label that another program owns with another value makes it a *Conflict, and nothing is
// changed.
func (c *Client) ApplyLabels(ctx context.Context, uid, version string, labels map[string]string) (Node, error) {
	restores := c.newestNode().restores
	text, err := c.applyNode(ctx, labelsManager, metadata{UID: uid, ResourceVersion: version, Labels: labels}, false)
	var refused *Refused
	if errors.As(err, &refused) && len(refused.Conflicts) > 0 {
		conflict := &Conflict{Labels: map[string]string{}}
		for _, f := range refused.Conflicts {
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

// ApplyMIGState gives labels and annotations about the MIG layout to the own node, which has to
// have the UID and the version still, and takes those away that an earlier call gave and that are
// not among them. What another program has written there before is replaced. It returns the node as
// it is then.
func (c *Client) ApplyMIGState(ctx context.Context, uid, version string, labels, annotations map[string]string) (Node,
	error) {
	restores := c.newestNode().restores
	text, err := c.applyNode(ctx, migManager, metadata{UID: uid, ResourceVersion: version, Labels: labels,
		Annotations: annotations}, true)
	if err != nil {
		return Node{}, fmt.Errorf("write the state of the MIG layout: %w", err)
	}
	return c.readNode(text, restores)
}

// ApplyReleaseAnswer writes the answer to a request for the release of the driver to the daemon's
// own Node, as annotations. The Node must still have the UID and the version. Annotations of an
// earlier answer are removed, and values of other programs are replaced. The updated Node is
// returned.
func (c *Client) ApplyReleaseAnswer(ctx context.Context, uid, version string, annotations map[string]string) (Node,
	error) {
	restores := c.newestNode().restores
	text, err := c.applyNode(ctx, answerManager, metadata{UID: uid, ResourceVersion: version, Annotations: annotations},
		true)
	if err != nil {
		return Node{}, fmt.Errorf("write the answer to a release of the driver: %w", err)
	}
	return c.readNode(text, restores)
}

// applyNode merges metadata into the own node.
func (c *Client) applyNode(ctx context.Context, manager string, fields metadata, force bool) ([]byte, error) {
	fields.Name = c.node
	return c.apply(ctx, nodesPath+"/"+c.node, manager, map[string]any{"apiVersion": "v1", "kind": "Node",
		"metadata": fields}, force)
}

// readNode returns the node of an answer to a request that was sent after so many restores of the
// cluster, and notes it.
func (c *Client) readNode(text []byte, restores int) (Node, error) {
	var n nodeObject
	if err := json.Unmarshal(text, &n); err != nil {
		return Node{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	written := n.node()
	written.restores = restores
	return c.noteNode(written), nil
}

// Conflict is the error of labels that other programs own.
type Conflict struct {
	// Labels are their keys, each with the API server's words about the owner.
	Labels map[string]string
}

func (c *Conflict) Error() string {
	return fmt.Sprintf("labels of the node belong to other programs: %d", len(c.Labels))
}

// NodeCount returns how many nodes the cluster has. The API server counts them; one is read.
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
