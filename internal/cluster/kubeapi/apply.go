package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
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
		verb: http.MethodPatch, path: path, contentType: applyPatch, body: body,
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
