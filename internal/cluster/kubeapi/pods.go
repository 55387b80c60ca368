package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// A NodePod has the fields of a pod on this node that this program uses.
type NodePod struct {
	Namespace, Name, UID string
	// NodeSelector are the labels that the pod requires of its node. DaemonSet is the name of the
	// pod's controller; empty if another kind of object controls the pod.
	NodeSelector map[string]string
	DaemonSet    string
	Priority     int
	Created      time.Time
}

const podsPath = "/api/v1/pods"

// maxPods is the size limit of a list of the node's pods, in bytes. A pod has about 10 kB.
const maxPods = 32 << 20

// Pods returns the pods of the node from a cache of the API server.
func (c *Client) Pods(ctx context.Context) ([]NodePod, error) {
	text, err := c.send(ctx, request{verb: http.MethodGet, path: podsPath, maxBytes: maxPods, query: url.Values{
		"fieldSelector": {"spec.nodeName=" + c.node}, "resourceVersion": {"0"},
	}})
	if err != nil {
		return nil, fmt.Errorf("list the pods of the node: %w", err)
	}
	var list struct {
		Items []struct {
			Metadata struct {
				metadata
				Created time.Time `json:"creationTimestamp"`
			} `json:"metadata"`
			Spec struct {
				NodeSelector map[string]string `json:"nodeSelector"`
				Priority     int               `json:"priority"`
			} `json:"spec"`
		} `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	}
	pods := make([]NodePod, len(list.Items))
	for i, item := range list.Items {
		m := item.Metadata
		pods[i] = NodePod{Namespace: m.Namespace, Name: m.Name, UID: m.UID, NodeSelector: item.Spec.NodeSelector,
			Priority: item.Spec.Priority, Created: m.Created}
		for _, o := range m.OwnerReferences {
			if o.Controller && o.Kind == "DaemonSet" {
				pods[i].DaemonSet = o.Name
			}
		}
	}
	return pods, nil
}

// PodsNotAdmitted returns the pods of the node that the kubelet has not admitted yet, as
// NAMESPACE/NAME. The list is not older than a version of the Node.
func (c *Client) PodsNotAdmitted(ctx context.Context, version string) ([]string, error) {
	text, err := c.send(ctx, request{verb: http.MethodGet, path: podsPath, maxBytes: maxPods, query: url.Values{
		"fieldSelector": {"spec.nodeName=" + c.node + ",status.phase=Pending"}, "resourceVersion": {version},
		"resourceVersionMatch": {"NotOlderThan"},
	}})
	if err != nil {
		return nil, fmt.Errorf("list the pending pods of the node: %w", err)
	}
	var list struct {
		Items []struct {
			Metadata metadata `json:"metadata"`
			Status   struct {
				StartTime string `json:"startTime"` // set by the kubelet when it admits the pod
			} `json:"status"`
		} `json:"items"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("read the answer of the API server: %w", err)
	}
	var names []string
	for _, item := range list.Items {
		if item.Status.StartTime == "" {
			names = append(names, item.Metadata.Namespace+"/"+item.Metadata.Name)
		}
	}
	return names, nil
}
