package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
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
	node := c.keeper.newest(time.Now())
	if node.UID == "" {
		return errors.New("the API server has not sent the Node")
	}
	pods, err := c.client.Pods(ctx)
	if err != nil {
		return err
	}
	clients, problem := clientsOf(pods, uids)
	var keys []string
	_, err = c.keeper.change(ctx, node, func(node kubeapi.Node) kubeapi.NodePatch {
		keys = slices.DeleteFunc(slices.Clone(clients), func(key string) bool { return node.Labels[key] != deployedValue })
		if len(keys) == 0 {
			return nil
		}
		return kubeapi.LabelSwap{Keys: keys, From: deployedValue, To: pausedValue}
	})
	if err == nil && len(keys) > 0 {
		c.pauses.Add(1)
		klog.FromContext(ctx).Info("Paused DaemonSets whose pods prevent a MIG layout", "labels", keys)
	}
	return errors.Join(problem, err)
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

// A resumePart resumes paused DaemonSets as soon as no change of a MIG layout needs them paused. The
// labels record the pause, so any process can resume it.
type resumePart struct {
	cluster  *Cluster
	configs  *feed.Feed[config.Config]
	progress *feed.Feed[mig.Status]

	// wasOn says that the option was enabled at some time: DaemonSets may be paused.
	wasOn  bool
	resume bool
	last   []string // labels of the last write of the process
}

func (p *resumePart) inputs() []<-chan struct{} {
	c, configured := p.configs.Latest()
	_, progress := p.progress.Latest()
	return inputsIf(p.wasOn || c.MIG.PauseClients, configured, progress)
}

func (p *resumePart) look(context.Context, kubeapi.Node) {
	p.wasOn = p.wasOn || p.configs.Value().MIG.PauseClients
	p.resume = p.wasOn && p.progress.Value().Resume
}

func (p *resumePart) want(node kubeapi.Node, _ time.Time) decision {
	keys, pauses := pausedOn(node), p.cluster.pauses.Load()
	if !p.resume || node.UID == "" || len(keys) == 0 {
		return decision{}
	}
	return decision{
		patch: kubeapi.LabelSwap{Keys: keys, From: pausedValue, To: deployedValue}, lock: &p.cluster.pauseMutex,
		done: func(ctx context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			if err == nil {
				p.cluster.resumed = pauses
				klog.FromContext(ctx).Info("Resumed paused DaemonSets", "labels", keys)
			}
			return false
		},
	}
}

func (p *resumePart) owes() bool { return p.cluster.resumed != p.cluster.pauses.Load() }

func (p *resumePart) leave(node kubeapi.Node, _ time.Time) kubeapi.NodePatch {
	if p.last = pausedOn(node); len(p.last) > 0 {
		return kubeapi.LabelSwap{Keys: p.last, From: pausedValue, To: deployedValue}
	}
	return nil
}

func (p *resumePart) left(ctx context.Context, err error) {
	if err != nil {
		klog.FromContext(ctx).Info("DaemonSets stay paused until this program runs again", "reason", err.Error())
	} else if len(p.last) > 0 {
		p.cluster.resumed = p.cluster.pauses.Load()
		klog.FromContext(ctx).Info("Resumed paused DaemonSets", "labels", p.last)
	}
}
