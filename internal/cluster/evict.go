package cluster

import (
	"context"
	"errors"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
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

// RankPods sets the priorities and creation times of pods of the node.
func (c *Cluster) RankPods(ctx context.Context, pods []repair.Pod) error {
	all, err := c.client.Pods(ctx)
	if err != nil {
		return err
	}
	for i := range pods {
		for _, p := range all {
			if p.Namespace == pods[i].Namespace && p.Name == pods[i].Name {
				pods[i].Priority, pods[i].Created = p.Priority, p.Created
			}
		}
	}
	return nil
}

// Pause pauses the DaemonSets whose pods have these UIDs, by labels of the Node.
func (c *Cluster) Pause(ctx context.Context, uids []string) error { return c.pauses.Pause(ctx, uids) }

// DriverRefusal returns why the driver of the node must not be changed; empty if it may.
func (c *Cluster) DriverRefusal() string {
	if c.client.Nodes().Value().Labels[keeper.DeployDriver] == "true" {
		return "NVIDIA's GPU operator changes the driver of this node: the label " + keeper.DeployDriver + " is true"
	}
	return ""
}
