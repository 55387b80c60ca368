package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A ResourceClaim has the fields of a claim that a driver needs.
type ResourceClaim struct {
	UID, Namespace, Name string
	// Allocation has the devices that the scheduler chose for the claim; nil before the choice.
	Allocation *DeviceAllocation
	// Pods are the pods that may use the claim.
	Pods []Pod
	// PodClaim is the pod's name for a claim created from a template; empty for other claims.
	PodClaim string
	// OwnerPod is the UID of the pod that the claim was created for; empty if it was not created for
	// one pod. No other pod can use such a claim.
	OwnerPod string
}

// A DeviceAllocation has the devices of a claim, of all drivers.
type DeviceAllocation struct {
	Results []DeviceResult `json:"results"`
	Config  []ClaimConfig  `json:"config"`
}

// A DeviceResult is a device allocated to a request.
type DeviceResult struct {
	Request          string             `json:"request"`
	Driver           string             `json:"driver"`
	Pool             string             `json:"pool"`
	Device           string             `json:"device"`
	ShareID          string             `json:"shareID"`
	ConsumedCapacity map[string]string  `json:"consumedCapacity"`
	AdminAccess      bool               `json:"adminAccess"`
	Tolerations      []DeviceToleration `json:"tolerations"`
}

// A DeviceToleration is a kind of taint that a request tolerates.
type DeviceToleration struct {
	Key      string `json:"key"`
	Operator string `json:"operator"`
	Value    string `json:"value"`
	Effect   string `json:"effect"`
}

// A ClaimConfig is configuration for the driver of a device.
type ClaimConfig struct {
	// Source is FromClass or FromClaim.
	Source string `json:"source"`
	// Requests are the requests to which the configuration applies; empty for all.
	Requests []string `json:"requests"`
	Opaque   struct {
		Driver     string          `json:"driver"`
		Parameters json.RawMessage `json:"parameters"`
	} `json:"opaque"`
}

// ResourceClaim returns a claim. It bypasses the rate limit, because the kubelet determines the
// number of calls.
func (c *Client) ResourceClaim(ctx context.Context, namespace, name string) (ResourceClaim, error) {
	var text []byte
	err := c.resourceAPI(func(path string) (err error) {
		text, err = c.send(ctx, request{
			verb: http.MethodGet, path: path + "/namespaces/" + namespace + "/resourceclaims/" + name, unlimited: true,
		})
		return err
	})
	if err != nil {
		return ResourceClaim{}, fmt.Errorf("read ResourceClaim %s/%s: %w", namespace, name, err)
	}
	var object claimObject
	if err := json.Unmarshal(text, &object); err != nil {
		return ResourceClaim{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	claim := object.claim()
	claim.Namespace, claim.Name = namespace, name
	return claim, nil
}

// A claimObject is a ResourceClaim in the format of the API.
type claimObject struct {
	Metadata metadata `json:"metadata"`
	Status   struct {
		Allocation *struct {
			Devices DeviceAllocation `json:"devices"`
		} `json:"allocation"`
		ReservedFor []struct {
			APIGroup string `json:"apiGroup"`
			Resource string `json:"resource"`
			Name     string `json:"name"`
			UID      string `json:"uid"`
		} `json:"reservedFor"`
	} `json:"status"`
}

// podClaimAnnotation is an annotation of claims created from a template.
const podClaimAnnotation = "resource.kubernetes.io/pod-claim-name"

func (o *claimObject) claim() ResourceClaim {
	claim := ResourceClaim{
		UID: o.Metadata.UID, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name,
		PodClaim: o.Metadata.Annotations[podClaimAnnotation],
	}
	if o.Status.Allocation != nil {
		claim.Allocation = &o.Status.Allocation.Devices
	}
	for _, owner := range o.Metadata.OwnerReferences {
		if owner.Controller && owner.Kind == "Pod" {
			claim.OwnerPod = owner.UID
		}
	}
	for _, user := range o.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			claim.Pods = append(claim.Pods, Pod{Namespace: claim.Namespace, Name: user.Name, UID: user.UID})
		}
	}
	return claim
}

// ClaimPage is the number of claims in one page of a list. A claim has several kB.
const ClaimPage = 250

// ResourceClaims calls visit with the latest version of each claim in the cluster, in pages of
// ClaimPage. No page is kept. Use it only to prove that no claim has a device.
func (c *Client) ResourceClaims(ctx context.Context, visit func(ResourceClaim)) error {
	for next := ""; ; {
		page, err := c.claims(ctx, ClaimPage, next)
		if err != nil {
			return err
		}
		for i := range page.Items {
			visit(page.Items[i].claim())
		}
		if next = page.Metadata.Continue; next == "" {
			return nil
		}
	}
}

// CountResourceClaims returns the number of claims in the cluster, or math.MaxInt32 if the API
// server does not report it.
func (c *Client) CountResourceClaims(ctx context.Context) (int, error) {
	page, err := c.claims(ctx, 1, "")
	switch {
	case err != nil:
		return 0, err
	case page.Metadata.Continue != "" && page.Metadata.RemainingItemCount < 1:
		return math.MaxInt32, nil
	}
	return len(page.Items) + int(min(page.Metadata.RemainingItemCount, math.MaxInt32)), nil
}

// A claimList is a page of claims.
type claimList struct {
	Metadata struct {
		Continue           string `json:"continue"`
		RemainingItemCount int64  `json:"remainingItemCount"`
	} `json:"metadata"`
	Items []claimObject `json:"items"`
}

// claims returns a page of at most limit claims: the first page, or the one after next.
func (c *Client) claims(ctx context.Context, limit int, next string) (page claimList, err error) {
	query := url.Values{"limit": {strconv.Itoa(limit)}}
	if next != "" {
		query.Set("continue", next)
	}
	var text []byte
	err = c.resourceAPI(func(path string) (err error) {
		text, err = c.send(ctx, request{verb: http.MethodGet, path: path + "/resourceclaims", query: query})
		return err
	})
	if err != nil {
		return claimList{}, fmt.Errorf("list ResourceClaims: %w", err)
	}
	if err := json.Unmarshal(text, &page); err != nil {
		return claimList{}, fmt.Errorf("read the answer of the API server: %w", err)
	}
	return page, nil
}

// resourceVersions are the versions of the API of Dynamic Resource Allocation, newest first. The
// fields read by this program are the same in all of them.
var resourceVersions = []string{"v1", "v1beta2", "v1beta1"}

// errNoResourceAPI is the error of an API server without the API of Dynamic Resource Allocation.
var errNoResourceAPI = errors.New("the API server serves resource.k8s.io in none of the versions v1, v1beta2 and " +
	"v1beta1")

// resourceAPI calls send with the path of one version of the API of Dynamic Resource Allocation
// after another until one is served. It starts with the last version that was served.
func (c *Client) resourceAPI(send func(path string) error) error {
	c.mu.Lock()
	first := c.resourceVersion
	c.mu.Unlock()
	for i := range resourceVersions {
		version := (first + i) % len(resourceVersions)
		err := send("/apis/resource.k8s.io/" + resourceVersions[version])
		if isNotServed(err) {
			continue
		}
		c.mu.Lock()
		c.resourceVersion = version
		c.mu.Unlock()
		return err
	}
	return errNoResourceAPI
}

// ResourceVersion returns the last version of resource.k8s.io that was served.
func (c *Client) ResourceVersion() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return resourceVersions[c.resourceVersion]
}

// isNotServed reports whether the API server does not serve the API. For a missing object of a
// served API, the response has a Kubernetes Status.
func isNotServed(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}
