package cluster

import (
	"context"
	"errors"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
)

// errNameless is the error of an eviction for which only the pod's UID is known.
var errNameless = errors.New("its name is not known, because the kubelet's PodResources API does not respond")

// Evict evicts a pod, within its disruption budget.
func (c *Cluster) Evict(ctx context.Context, pod mig.Pod) error {
	if pod.Name == "" {
		return errNameless
	}
	return c.client.Evict(ctx, kubeapi.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID})
}

// Pause pauses the DaemonSets whose pods have these UIDs, by labels of the Node.
func (c *Cluster) Pause(ctx context.Context, uids []string) error { return c.pauses.Pause(ctx, uids) }
