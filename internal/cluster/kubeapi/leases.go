package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const (
	leaseAPI  = "coordination.k8s.io/v1"
	leasePath = "/apis/" + leaseAPI + "/namespaces/"
	// slotLabel is on each Lease that is a slot, so that others in the namespace are not read.
	slotLabel = "gpu-device-plugin.github.io/slot"
	// repairLabel is on each Lease about repairs of GPUs.
	repairLabel = "gpu-device-plugin.github.io/repair"
)

// A Lease is a Lease that belongs to a node.
type Lease struct {
	Name, UID, ResourceVersion string
	// IsRepair is true for a Lease about repairs of GPUs, and false for a slot.
	IsRepair bool
	// Holder is the name of the node, and HolderUID the UID of its Node: the API server deletes the
	// Lease with the Node. HolderUID is empty for a Lease of no node, and for one that stays.
	Holder, HolderUID string
	Annotations       map[string]string
	// Acquired is when the node created the Lease, and Renewed when it last wrote the Lease.
	Acquired, Renewed time.Time
}

// leaseObject is a Lease in the format of the API.
type leaseObject struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   metadata `json:"metadata"`
	Spec       struct {
		HolderIdentity string `json:"holderIdentity,omitempty"`
		AcquireTime    string `json:"acquireTime,omitempty"`
		RenewTime      string `json:"renewTime,omitempty"`
	} `json:"spec"`
}

func (o *leaseObject) lease() Lease {
	l := Lease{
		Name: o.Metadata.Name, UID: o.Metadata.UID, ResourceVersion: o.Metadata.ResourceVersion,
		Holder: o.Spec.HolderIdentity, Annotations: o.Metadata.Annotations,
		IsRepair: o.Metadata.Labels[repairLabel] != "",
	}
	l.Acquired, _ = time.Parse(time.RFC3339, o.Spec.AcquireTime) // zero for a time that cannot be read
	l.Renewed, _ = time.Parse(time.RFC3339, o.Spec.RenewTime)
	for _, owner := range o.Metadata.OwnerReferences {
		if owner.Kind == "Node" {
			l.HolderUID = owner.UID
		}
	}
	return l
}

// Leases returns the Leases in a namespace that are slots. With latest, they are not older than the
// request.
func (c *Client) Leases(ctx context.Context, namespace string, latest bool) ([]Lease, error) {
	return c.leases(ctx, namespace, slotLabel, latest)
}

// RepairLeases returns the Leases in a namespace about repairs of GPUs, not older than the request.
func (c *Client) RepairLeases(ctx context.Context, namespace string) ([]Lease, error) {
	return c.leases(ctx, namespace, repairLabel, true)
}

func (c *Client) leases(ctx context.Context, namespace, label string, latest bool) ([]Lease, error) {
	query := url.Values{"labelSelector": {label}}
	if !latest {
		query.Set("resourceVersion", anyVersion)
	}
	text, err := c.send(ctx, request{verb: http.MethodGet, path: leasePath + namespace + "/leases", query: query})
	if err != nil {
		return nil, fmt.Errorf("read the Leases of the cluster: %w", err)
	}
	var list struct {
		Items []leaseObject `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	}
	leases := make([]Lease, len(list.Items))
	for i := range list.Items {
		leases[i] = list.Items[i].lease()
	}
	return leases, nil
}

// CreateLease creates a Lease of this node, and returns the stored Lease. The error has
// the code 409 if the name is taken.
func (c *Client) CreateLease(ctx context.Context, namespace string, l Lease) (Lease, error) {
	return c.writeLease(ctx, http.MethodPost, leasePath+namespace+"/leases", l)
}

// UpdateLease replaces a Lease of this node that still has this UID and version, and returns the
// stored Lease.
func (c *Client) UpdateLease(ctx context.Context, namespace string, l Lease) (Lease, error) {
	return c.writeLease(ctx, http.MethodPut, leasePath+namespace+"/leases/"+l.Name, l)
}

func (c *Client) writeLease(ctx context.Context, verb, path string, l Lease) (Lease, error) {
	object := leaseObject{
		APIVersion: leaseAPI, Kind: "Lease",
		Metadata: metadata{
			Name: l.Name, UID: l.UID, ResourceVersion: l.ResourceVersion, Annotations: l.Annotations,
			Labels: map[string]string{slotLabel: "true"},
		},
	}
	if l.IsRepair {
		object.Metadata.Labels = map[string]string{repairLabel: "true"}
	}
	if l.HolderUID != "" {
		object.Metadata.OwnerReferences = []OwnerReference{
			{APIVersion: "v1", Kind: "Node", Name: l.Holder, UID: l.HolderUID},
		}
	}
	object.Spec.HolderIdentity = l.Holder
	object.Spec.AcquireTime, object.Spec.RenewTime = l.Acquired.Format(microTime), l.Renewed.Format(microTime)
	body, err := json.Marshal(object)
	if err != nil {
		return Lease{}, fmt.Errorf("write the object: %w", err)
	}
	text, err := c.send(ctx, request{verb: verb, path: path, contentType: "application/json", body: body})
	if err != nil {
		return Lease{}, fmt.Errorf("write Lease %s: %w", l.Name, err)
	}
	var stored leaseObject
	if err := json.Unmarshal(text, &stored); err != nil {
		return Lease{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	return stored.lease(), nil
}

// DeleteLease deletes the Lease with a name and a UID. It returns nil if there is no such Lease.
func (c *Client) DeleteLease(ctx context.Context, namespace string, l Lease) error {
	err := c.remove(ctx, leasePath+namespace+"/leases/"+l.Name, l.UID)
	if err != nil && !IsStale(err) {
		return fmt.Errorf("delete Lease %s: %w", l.Name, err)
	}
	return nil
}

// maxNodeNames is how many names NodesWith returns at most if the answer does not come from the cache.
const maxNodeNames = 10

// NodesWith returns the names of some nodes whose labels match a selector; none if no node matches.
// With cached, the answer comes from the API server's cache and has all matching nodes, which is
// cheap if few match. Otherwise the API server reads nodes from its storage until it has
// maxNodeNames, which is cheap if many match.
func (c *Client) NodesWith(ctx context.Context, selector string, cached bool) ([]string, error) {
	query := url.Values{"labelSelector": {selector}, "limit": {strconv.Itoa(maxNodeNames)}}
	if cached {
		query = url.Values{"labelSelector": {selector}, "resourceVersion": {anyVersion}}
	}
	text, err := c.send(ctx, request{
		verb: http.MethodGet, path: nodesPath, query: query,
		// Without the content of the nodes, the answer has some kilobytes.
		accept: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
	})
	if err != nil {
		return nil, fmt.Errorf("read the nodes with %s: %w", selector, err)
	}
	var list struct {
		Items []struct {
			Metadata metadata `json:"metadata"`
		} `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	}
	var names []string
	for _, item := range list.Items {
		names = append(names, item.Metadata.Name)
	}
	return names, nil
}
