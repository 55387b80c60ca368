package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// Names of node-feature-discovery's (NFD's) API.
const (
	nodeFeatureAPI  = "nfd.k8s-sigs.io/v1alpha1"
	nodeFeaturePath = "/apis/" + nodeFeatureAPI + "/namespaces/"
	// nodeNameLabel says which node an object is about.
	nodeNameLabel = "nfd.node.kubernetes.io/node-name"
)

// Prefixes of the names of NodeFeature objects; the name of the node follows.
const (
	NodeFeaturePrefix = "gpu-node-agent-"
	// DiscoveryPrefix is that of NVIDIA's GPU feature discovery.
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
	// Namespace and Name are the object's.
	Namespace, Name string
	// Labels are those that NFD gives to the node.
	Labels map[string]string
	// Owners are deleted before the object is.
	Owners []OwnerReference
}

// NodeFeature returns the object of a namespace with the own node's name after a prefix. There is
// none if found is false.
func (c *Client) NodeFeature(ctx context.Context, namespace, prefix string) (feature NodeFeature, found bool,
	err error) {
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
		feature.Labels = nil // NFD gives them to another node, or to none
	}
	return feature, true, nil
}

// Equal reports whether two objects are the same.
func (f NodeFeature) Equal(other NodeFeature) bool {
	return f.Namespace == other.Namespace && f.Name == other.Name && maps.Equal(f.Labels, other.Labels) &&
		slices.Equal(f.Owners, other.Owners)
}

// ApplyNodeFeature makes the object of a namespace with the own node's name after a prefix, or
// changes it. The object is this program's alone: what others have written to these fields is
// replaced.
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

// nodeFeatureObject is a NodeFeature in the API's own form, as it is written.
type nodeFeatureObject struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   metadata       `json:"metadata"`
	Spec       map[string]any `json:"spec"`
}

// replace makes an object, or replaces the one of that name. The account that NVIDIA's chart and
// operator make for feature discovery may do that, but not patch.
func (c *Client) replace(ctx context.Context, path string, object nodeFeatureObject) error {
	verb, at := http.MethodPut, path+"/"+object.Metadata.Name
	text, err := c.send(ctx, request{verb: http.MethodGet, path: at})
	switch {
	case IsCode(err, http.StatusNotFound):
		verb, at = http.MethodPost, path
	case err != nil:
		return err
	default:
		var there struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
		}
		if err := json.Unmarshal(text, &there); err != nil {
			return fmt.Errorf("read the answer of the API server: %w", err)
		}
		object.Metadata.ResourceVersion = there.Metadata.ResourceVersion
	}
	body, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("write the object: %w", err)
	}
	_, err = c.send(ctx, request{verb: verb, path: at, contentType: "application/json", body: body})
	return err
}

// IsDenied reports whether err is of an object that is not there, or that this program has no right
// for.
func IsDenied(err error) bool {
	return IsCode(err, http.StatusForbidden) || IsCode(err, http.StatusNotFound)
}

// PodOwners returns the owners of a pod, such as its DaemonSet. An object that they own goes with
// them, and not with the pod.
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
		owners[i].Controller = false // nothing of the owner's depends on the object
	}
	return owners, nil
}
