package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// Names in the API of node-feature-discovery (NFD).
const (
	nodeFeatureAPI  = "nfd.k8s-sigs.io/v1alpha1"
	nodeFeaturePath = "/apis/" + nodeFeatureAPI + "/namespaces/"
	// nodeNameLabel has the name of the node to which an object applies.
	nodeNameLabel = "nfd.node.kubernetes.io/node-name"
)

// Prefixes of the names of NodeFeature objects; the name of the node follows.
const (
	NodeFeaturePrefix = "gpu-node-agent-"
	// DiscoveryPrefix is the prefix of NVIDIA's GPU feature discovery.
	DiscoveryPrefix = "nvidia-features-for-"
)

// An OwnerReference makes the API server delete an object together with its owner.
type OwnerReference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
	Controller bool   `json:"controller,omitempty"`
}

// A NodeFeature is NFD's object with the labels of a node.
type NodeFeature struct {
	// Namespace and Name identify the object.
	Namespace, Name string
	// Labels are the labels that NFD sets on the Node.
	Labels map[string]string
	// Owners are the owners of the object.
	Owners []OwnerReference
}

// NodeFeature returns the object in a namespace whose name is the prefix and the name of the node.
// found is false if there is none.
func (c *Client) NodeFeature(
	ctx context.Context, namespace, prefix string,
) (feature NodeFeature, found bool, err error) {
	name := prefix + c.node
	text, err := c.send(ctx, request{verb: http.MethodGet, path: nodeFeaturePath + namespace + "/nodefeatures/" + name})
	if IsCode(err, http.StatusNotFound) {
		return NodeFeature{}, false, nil
	}
	if err != nil {
		return NodeFeature{}, false, fmt.Errorf("read NodeFeature %s/%s: %w", namespace, name, err)
	}
	var object struct {
		Metadata metadata `json:"metadata"`
		Spec     struct {
			Labels map[string]string `json:"labels"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(text, &object); err != nil {
		return NodeFeature{}, false, fmt.Errorf("read the answer of the API server: %w", err)
	}
	feature = NodeFeature{Namespace: namespace, Name: name, Labels: object.Spec.Labels,
		Owners: object.Metadata.OwnerReferences}
	if object.Metadata.Labels[nodeNameLabel] != c.node {
		feature.Labels = nil // NFD sets them on another node, or on none
	}
	return feature, true, nil
}

// Equal reports whether two objects are equal.
func (f NodeFeature) Equal(other NodeFeature) bool {
	return f.Namespace == other.Namespace && f.Name == other.Name && maps.Equal(f.Labels, other.Labels) &&
		slices.Equal(f.Owners, other.Owners)
}

// ApplyNodeFeature creates or changes the object in a namespace whose name is the prefix and the
// name of the node. The object belongs to this program: values of other programs are replaced.
func (c *Client) ApplyNodeFeature(ctx context.Context, namespace, prefix string, labels map[string]string,
	owners []OwnerReference) error {
	name, path := prefix+c.node, nodeFeaturePath+namespace+"/nodefeatures"
	object := nodeFeatureObject{
		APIVersion: nodeFeatureAPI, Kind: "NodeFeature",
		Metadata: metadata{Name: name, Namespace: namespace, Labels: map[string]string{nodeNameLabel: c.node},
			OwnerReferences: owners},
		Spec: map[string]any{
			"labels": labels, "features": map[string]any{
				"flags": map[string]any{}, "attributes": map[string]any{}, "instances": map[string]any{},
			},
		},
	}
	_, err := c.apply(ctx, path+"/"+name, labelsManager, object, true)
	if IsCode(err, http.StatusForbidden) {
		err = c.replace(ctx, path, object)
	}
	if err != nil {
		return fmt.Errorf("write NodeFeature %s/%s: %w", namespace, name, err)
	}
	return nil
}

// nodeFeatureObject is a NodeFeature in the format of the API.
type nodeFeatureObject struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   metadata       `json:"metadata"`
	Spec       map[string]any `json:"spec"`
}

// replace creates an object, or replaces the object of this name. The account that NVIDIA's chart
// and operator create for feature discovery has these rights, but not the right to patch.
func (c *Client) replace(ctx context.Context, path string, object nodeFeatureObject) error {
	verb, at := http.MethodPut, path+"/"+object.Metadata.Name
	text, err := c.send(ctx, request{verb: http.MethodGet, path: at})
	switch {
	case IsCode(err, http.StatusNotFound):
		verb, at = http.MethodPost, path
	case err != nil:
		return err
	default:
		var existing struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
		}
		if err := json.Unmarshal(text, &existing); err != nil {
			return fmt.Errorf("read the answer of the API server: %w", err)
		}
		object.Metadata.ResourceVersion = existing.Metadata.ResourceVersion
	}
	body, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("write the object: %w", err)
	}
	_, err = c.send(ctx, request{verb: verb, path: at, contentType: "application/json", body: body})
	return err
}

// IsInaccessible reports whether the object does not exist, or this program has no right to it.
func IsInaccessible(err error) bool {
	return IsCode(err, http.StatusForbidden) || IsCode(err, http.StatusNotFound)
}

// PodOwners returns the owners of a pod, for example its DaemonSet. An object with these owners is
// deleted with them, and not with the pod.
func (c *Client) PodOwners(ctx context.Context, namespace, pod string) ([]OwnerReference, error) {
	text, err := c.send(ctx, request{verb: http.MethodGet, path: "/api/v1/namespaces/" + namespace + "/pods/" + pod})
	if err != nil {
		return nil, fmt.Errorf("read pod %s/%s: %w", namespace, pod, err)
	}
	var object struct {
		Metadata metadata `json:"metadata"`
	}
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	}
	owners := object.Metadata.OwnerReferences
	for i := range owners {
		owners[i].Controller = false // the owner does not control the object
	}
	return owners, nil
}
