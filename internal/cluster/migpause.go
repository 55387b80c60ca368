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

// The labels by which DaemonSets of clients of the driver select nodes, with the values of NVIDIA's
// operator and mig-manager. The value itself is the record of what is paused.
const (
	deployLabels  = "nvidia.com/gpu.deploy."
	deployed      = "true"
	pausedForMIG  = "paused-for-mig-change"
	pauseRequests = 10 * time.Second // bounds those of one pause
	lastRequests  = time.Second      // bounds those at the end of the process
)

// providers are the DaemonSets that are never paused: clients need what they provide, or they
// change layouts themselves.
var providers = []string{
	"driver", "container-toolkit", "operands", "mig-manager", "vgpu-manager", "vfio-manager", "kata-manager", "cc-manager",
	"sandbox-validator", "operator-validator",
}

// isClient reports whether a label pauses clients of the driver.
func isClient(key string) bool {
	name, ok := strings.CutPrefix(key, deployLabels)
	return ok && !slices.Contains(providers, name)
}

// clientsOf returns the labels that keep the DaemonSets of these pods on the node. The error says
// which pods no such label ends, and why.
func clientsOf(pods []kubeapi.NodePod, uids []string) (keys []string, err error) {
	var problems []error
	for _, p := range pods {
		if !slices.Contains(uids, p.UID) {
			continue
		}
		found := false
		for key, value := range p.NodeSelector {
			if p.DaemonSet != "" && isClient(key) && value == deployed {
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

// Pause pauses, by labels of the node, the DaemonSets whose pods have these UIDs.
func (c *Cluster) Pause(ctx context.Context, uids []string) error {
	ctx, cancel := context.WithTimeout(ctx, pauseRequests)
	defer cancel()
	c.pausing.Lock() // one after the other: GPUs mostly have the same clients
	defer c.pausing.Unlock()
	c.paused.see(c.client.Nodes().Value(), time.Now())
	node := c.paused.node
	if node.UID == "" {
		return errors.New("the API server has not told of the node")
	}
	pods, err := c.client.Pods(ctx)
	if err != nil {
		return err
	}
	keys, problem := clientsOf(pods, uids)
	keys = slices.DeleteFunc(keys, func(key string) bool { return node.Labels[key] != deployed })
	if len(keys) == 0 {
		return problem
	}
	if node, err = c.client.SwapLabels(ctx, node.UID, keys, deployed, pausedForMIG); err != nil {
		return errors.Join(problem, err)
	}
	c.paused.see(node, time.Now())
	c.ours = true
	klog.FromContext(ctx).Info("Paused DaemonSets whose pods prevent a MIG layout", "labels", keys)
	return problem
}

// pausedOn returns the labels of a node that are paused, sorted.
func pausedOn(node kubeapi.Node) []string {
	var keys []string
	for key, value := range node.Labels {
		if value == pausedForMIG && isClient(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// resumeClients lets paused DaemonSets go on when no change of a MIG layout needs them paused,
// until ctx ends. The labels say what is paused, so it does not matter which process paused it, or
// when. At its end it tries once: there may be no next process.
func (c *Cluster) resumeClients(ctx context.Context, d daemon.View) {
	if d.MIG == nil {
		return
	}
	on := d.Config.MIG.PauseClients
	wake := func() []<-chan struct{} {
		_, node := c.client.Nodes().Latest()
		_, made := d.MIG.Latest()
		_, configured := d.Configs.Latest()
		return []<-chan struct{}{node, made, configured}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "paused clients", wake, func(ctx context.Context) error {
		on = on || d.Configs.Value().MIG.PauseClients // once it was on, something may be paused
		if !on || !d.MIG.Value().Resume {
			return nil
		}
		return c.resume(ctx, c.client.Nodes().Value())
	})
	c.pausing.Lock()
	ours := c.ours
	c.pausing.Unlock()
	if ours {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRequests)
		defer cancel()
		if err := c.resumeLast(last); err != nil {
			klog.FromContext(ctx).Info("DaemonSets stay paused until this program runs again", "reason", err.Error())
		}
	}
}

// resumeLast lets all paused DaemonSets run again when the process ends. It first gets the Node
// from the API server: the watch may be late, and the end of the process may have cut off the
// answer to a write.
func (c *Cluster) resumeLast(ctx context.Context) error {
	node, err := c.client.Get(ctx)
	if err != nil {
		return err
	}
	return c.resume(ctx, node)
}

// resume lets all paused DaemonSets of the node go on.
func (c *Cluster) resume(ctx context.Context, known kubeapi.Node) error {
	c.pausing.Lock()
	defer c.pausing.Unlock()
	c.paused.see(known, time.Now())
	keys := pausedOn(c.paused.node)
	if c.paused.node.UID == "" || len(keys) == 0 {
		return nil
	}
	after, err := c.client.SwapLabels(ctx, c.paused.node.UID, keys, pausedForMIG, deployed)
	if err != nil {
		return err
	}
	c.paused.see(after, time.Now())
	c.ours = false
	klog.FromContext(ctx).Info("DaemonSets that were paused go on", "labels", keys)
	return nil
}
