// Package cluster reads the objects of nodes and GPUs from the API server, and runs
// commands in the daemon's pods. Only this package and the flags in package command use
// client-go. Package view makes all decisions.
package cluster

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	appsclient "k8s.io/client-go/kubernetes/typed/apps/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
)

// defaultNamespace is the namespace in the manifests and in the documented commands.
const defaultNamespace = "kube-system"

// Options select the daemon's pods.
type Options struct {
	// DaemonSelector is the label selector of the daemon's pods.
	DaemonSelector string
	// DaemonNamespace is the namespace of the daemon's pods; empty for any.
	DaemonNamespace string
}

// A Client talks to one API server.
type Client struct {
	options  Options
	selector labels.Selector
	config   *rest.Config
	core     coreclient.CoreV1Interface
	apps     appsclient.AppsV1Interface
	resource resourceclient.ResourceV1Interface

	coordination coordinationclient.CoordinationV1Interface
}

// New returns a Client. The caller must not change config afterwards.
func New(config *rest.Config, o Options) (*Client, error) {
	selector, err := labels.Parse(o.DaemonSelector)
	if err != nil {
		return nil, fmt.Errorf("--daemon-selector: %w", err)
	}
	// A cluster with 5,000 nodes has 10 pages of nodes, and as many pages of pods as necessary.
	// client-go's limit of 5 requests per second is for controllers.
	config.QPS, config.Burst = 50, 100
	binary := rest.CopyConfig(config)
	binary.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	binary.ContentType = "application/vnd.kubernetes.protobuf"
	core, err := coreclient.NewForConfig(binary)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	resource, err := resourceclient.NewForConfig(binary)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	apps, err := appsclient.NewForConfig(binary)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	coordination, err := coordinationclient.NewForConfig(binary)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	return &Client{options: o, selector: selector, config: config, core: core, apps: apps, resource: resource,
		coordination: coordination}, nil
}

// IsDaemon reports whether a pod belongs to the daemon. Any pod can have the labels, so the pod
// must also belong to a DaemonSet.
func (c *Client) IsDaemon(p *corev1.Pod) bool {
	return c.selector.Matches(labels.Set(p.Labels)) && (c.options.DaemonNamespace == "" ||
		p.Namespace == c.options.DaemonNamespace) &&
		slices.ContainsFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool {
			return o.Kind == "DaemonSet" && o.Controller != nil && *o.Controller
		})
}
