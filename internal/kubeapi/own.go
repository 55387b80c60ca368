package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// nodeManagers are the field managers of what this program applies to a Node.
var nodeManagers = []string{labelsManager, migManager, string(ForRelease), string(ForReboot)}

// managed is what an object says of the fields that its managers applied.
type managed struct {
	Metadata struct {
		ManagedFields []struct {
			Manager  string `json:"manager"`
			FieldsV1 struct {
				Metadata map[string]map[string]json.RawMessage `json:"f:metadata"`
			} `json:"fieldsV1"`
		} `json:"managedFields"`
	} `json:"metadata"`
}

// OwnFields returns the keys of the labels and annotations that this program applied to the own
// node, sorted.
func (c *Client) OwnFields(ctx context.Context) ([]string, error) {
	answer, err := c.send(ctx, request{verb: http.MethodGet, path: nodesPath + "/" + c.node})
	if err != nil {
		return nil, err
	}
	var node managed
	if err := json.Unmarshal(answer, &node); err != nil {
		return nil, fmt.Errorf("read the fields of the node: %w", err)
	}
	var keys []string
	for _, m := range node.Metadata.ManagedFields {
		if !slices.Contains(nodeManagers, m.Manager) {
			continue
		}
		for _, kind := range []string{"f:labels", "f:annotations"} {
			for field := range m.FieldsV1.Metadata[kind] {
				if key, named := strings.CutPrefix(field, "f:"); named {
					keys = append(keys, key)
				}
			}
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil
}

// RemoveOwnFields removes the labels and annotations that this program applied to the own node,
// which has to have the UID still.
func (c *Client) RemoveOwnFields(ctx context.Context, uid string) error {
	var problems []error
	for _, manager := range nodeManagers {
		if _, err := c.applyNode(ctx, manager, metadata{UID: uid}, true); err != nil {
			problems = append(problems, fmt.Errorf("remove what %s has written: %w", manager, err))
		}
	}
	return errors.Join(problems...)
}

// RemoveCondition removes the condition of a type from the status of the own node, if it is there.
func (c *Client) RemoveCondition(ctx context.Context, kind string) error {
	type deletion struct {
		Patch string `json:"$patch"`
		Type  string `json:"type"`
	}
	var patch struct {
		Status struct {
			Conditions []deletion `json:"conditions"`
		} `json:"status"`
	}
	patch.Status.Conditions = []deletion{{"delete", kind}}
	_, err := c.patchNode(ctx, "/status", strategicMergePatch, patch)
	return err
}
