package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// The node labels by which DaemonSets of driver clients select nodes, with the values of NVIDIA's
// operator and mig-manager. The value of a label records the pause.
const (
	deployLabels  = "nvidia.com/gpu.deploy."
	deployedValue = "true"
	pausedValue   = "paused-for-mig-change"
	pauseTimeout  = 10 * time.Second // limits the requests of one pause
)

// providers are the DaemonSets that are never paused: they provide what clients need, or change
// layouts themselves.
var providers = []string{
	"driver", "container-toolkit", "operands", "mig-manager", "vgpu-manager", "vfio-manager", "kata-manager", "cc-manager",
	"sandbox-validator", "operator-validator",
}

// isClient reports whether the label belongs to a client of the driver, which may be paused.
func isClient(key string) bool {
	name, ok := strings.CutPrefix(key, deployLabels)
	return ok && !slices.Contains(providers, name)
}

// clientsOf returns the labels that keep the DaemonSets of these pods on the node. The error names
// the pods that no such label ends.
func clientsOf(pods []kubeapi.NodePod, uids []string) (keys []string, err error) {
	var problems []error
	for _, p := range pods {
		if !slices.Contains(uids, p.UID) {
			continue
		}
		found := false
		for key, value := range p.NodeSelector {
			if p.DaemonSet != "" && isClient(key) && value == deployedValue {
				keys, found = append(keys, key), true
			}
		}
		if !found {
			problems = append(problems, fmt.Errorf("pod %s/%s is of no DaemonSet that a label %sNAME can pause", p.Namespace,
				p.Name, deployLabels))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), errors.Join(problems...)
}

// Pause pauses the DaemonSets whose pods have these UIDs, by labels of the Node.
func (c *Cluster) Pause(ctx context.Context, uids []string) error {
	ctx, cancel := context.WithTimeout(ctx, pauseTimeout)
	defer cancel()
	c.pauseMutex.Lock() // serialized, because most GPUs have the same clients
	defer c.pauseMutex.Unlock()
	c.pauseNode.update(c.client.Nodes().Value(), time.Now())
	node := c.pauseNode.node
	if node.UID == "" {
		return errors.New("the API server has not sent the Node")
	}
	pods, err := c.client.Pods(ctx)
	if err != nil {
		return err
	}
	keys, problem := clientsOf(pods, uids)
	keys = slices.DeleteFunc(keys, func(key string) bool { return node.Labels[key] != deployedValue })
	if len(keys) == 0 {
		return problem
	}
	if node, err = c.client.SwapLabels(ctx, node.UID, keys, deployedValue, pausedValue); err != nil {
		return errors.Join(problem, err)
	}
	c.pauseNode.update(node, time.Now())
	c.pausedHere = true
	klog.FromContext(ctx).Info("Paused DaemonSets whose pods prevent a MIG layout", "labels", keys)
	return problem
}

// pausedOn returns the sorted labels of a Node that are paused.
func pausedOn(node kubeapi.Node) []string {
	var keys []string
	for key, value := range node.Labels {
		if value == pausedValue && isClient(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// resumeClients resumes paused DaemonSets as soon as no change of a MIG layout needs them paused,
// until ctx ends. The labels record the pause, so any process can resume it. At the end of ctx it
// tries once more, because there may be no next process.
func (c *Cluster) resumeClients(ctx context.Context, d daemon.View) {
	if d.MIG == nil {
		return
	}
	on := d.Config.MIG.PauseClients
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, progress := d.MIG.Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, progress, configured}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "paused clients", wake, func(ctx context.Context) error {
		on = on || d.Configs.Value().MIG.PauseClients // DaemonSets may be paused if the option was ever enabled
		if !on || !d.MIG.Value().Resume {
			return nil
		}
		return c.resume(ctx, c.client.Nodes().Value())
	})
	c.pauseMutex.Lock()
	pausedHere := c.pausedHere
	c.pauseMutex.Unlock()
	if pausedHere {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if err := c.resumeLast(last); err != nil {
			klog.FromContext(ctx).Info("DaemonSets stay paused until this program runs again", "reason", err.Error())
		}
	}
}

// resumeLast resumes all paused DaemonSets at the end of the process. It first reads the Node from
// the API server: the watch may be late, and the end of the process may have interrupted the
// response to a write.
func (c *Cluster) resumeLast(ctx context.Context) error {
	node, err := c.client.Get(ctx)
	if err != nil {
		return err
	}
	return c.resume(ctx, node)
}

// resume resumes all paused DaemonSets of the node.
func (c *Cluster) resume(ctx context.Context, known kubeapi.Node) error {
	c.pauseMutex.Lock()
	defer c.pauseMutex.Unlock()
	c.pauseNode.update(known, time.Now())
	keys := pausedOn(c.pauseNode.node)
	if c.pauseNode.node.UID == "" || len(keys) == 0 {
		return nil
	}
	after, err := c.client.SwapLabels(ctx, c.pauseNode.node.UID, keys, pausedValue, deployedValue)
	if err != nil {
		return err
	}
	c.pauseNode.update(after, time.Now())
	c.pausedHere = false
	klog.FromContext(ctx).Info("Resumed paused DaemonSets", "labels", keys)
	return nil
}
