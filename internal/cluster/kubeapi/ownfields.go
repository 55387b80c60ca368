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

// nodeManagers are the field managers with which this program applies fields to a Node.
var nodeManagers = []string{labelsManager, migManager, answerManager}

// managed has the managed fields of an object.
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

// OwnFields returns the sorted keys of the labels and annotations that this program applied to the
// daemon's own Node.
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

// RemoveOwnFields removes the labels and annotations that this program applied to the daemon's own
// Node. The Node must still have the UID.
func (c *Client) RemoveOwnFields(ctx context.Context, uid string) error {
	var problems []error
	for _, patch := range []NodePatch{LabelsPatch{}, MIGStatePatch{}, ReleaseAnswerPatch{}} {
		_, err := c.PatchNode(ctx, Node{UID: uid}, patch)
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// RemoveCondition removes the condition of a type from the status of the daemon's own Node, if the
// Node has it.
func (c *Client) RemoveCondition(ctx context.Context, kind string) error {
	_, err := c.PatchNode(ctx, Node{}, conditionRemoval(kind))
	return err
}

// DaemonSetPods returns the number of Ready pods of a DaemonSet, and the number that it wants. The
// wanted number is -1 until the controller has observed the DaemonSet.
func (c *Client) DaemonSetPods(ctx context.Context, namespace, name string) (ready, wanted int, err error) {
	answer, err := c.send(ctx, request{verb: http.MethodGet,
		path: "/apis/apps/v1/namespaces/" + namespace + "/daemonsets/" + name})
	if err != nil {
		return 0, 0, fmt.Errorf("read the DaemonSet %s/%s: %w", namespace, name, err)
	}
	var set struct {
		Metadata struct {
			Generation int64 `json:"generation"`
		} `json:"metadata"`
		Status struct {
			ObservedGeneration     int64 `json:"observedGeneration"`
			DesiredNumberScheduled int   `json:"desiredNumberScheduled"`
			NumberReady            int   `json:"numberReady"`
		} `json:"status"`
	}
	if err := json.Unmarshal(answer, &set); err != nil {
		return 0, 0, fmt.Errorf("read the DaemonSet %s/%s: %w", namespace, name, err)
	}
	if set.Status.ObservedGeneration < set.Metadata.Generation || set.Status.ObservedGeneration == 0 {
		return 0, -1, nil
	}
	return set.Status.NumberReady, set.Status.DesiredNumberScheduled, nil
}
