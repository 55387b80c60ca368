// Package cluster reads what the API server has of nodes and GPUs, and runs commands in the
// daemon's pods. It is the only home of client-go in this module, but for the flags of package
// command. It decides nothing: package view does.
package cluster

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	appsclient "k8s.io/client-go/kubernetes/typed/apps/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
)

// defaultNamespace is that of the manifests and of the commands in the documents.
const defaultNamespace = "kube-system"

// Options say which pods are the daemon's.
type Options struct {
	// DaemonSelector selects the daemon's pods by their labels.
	DaemonSelector string
	// DaemonNamespace is their namespace; empty for any.
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
}

// New returns a Client. The caller does not change config any more.
func New(config *rest.Config, o Options) (*Client, error) {
	selector, err := labels.Parse(o.DaemonSelector)
	if err != nil {
		return nil, fmt.Errorf("--daemon-selector: %w", err)
	}
	// Of 5,000 nodes 10 pages are read, and as many of pods as there are; client-go's own limit of 5 a
	// second is for controllers.
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
	return &Client{options: o, selector: selector, config: config, core: core, apps: apps, resource: resource}, nil
}

// IsDaemon reports whether a pod is one of the daemon's. Labels can be given to any pod, so it also
// has to be that of a DaemonSet.
func (c *Client) IsDaemon(p *corev1.Pod) bool {
	return c.selector.Matches(labels.Set(p.Labels)) && (c.options.DaemonNamespace == "" ||
		p.Namespace == c.options.DaemonNamespace) &&
		slices.ContainsFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool {
			return o.Kind == "DaemonSet" && o.Controller != nil && *o.Controller
		})
}
