package keeper

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	deployLabels = "nvidia.com/gpu.deploy."
	// DeployDriver is the label with which NVIDIA's GPU operator chooses the nodes of its driver.
	DeployDriver  = deployLabels + "driver"
	deployedValue = "true"
	pausedValue   = "paused-for-mig-change"
	pauseTimeout  = 10 * time.Second // limits the requests of one pause
)

// providers are the DaemonSets that are never paused: they provide what clients need, or change
// layouts themselves.
var providers = []string{
	"driver", "container-toolkit", "operands", "mig-manager", "vgpu-manager", "vfio-manager", "kata-manager",
	"cc-manager",
	"sandbox-validator", "operator-validator",
}

// isClient reports whether the label belongs to a client of the driver, which may be paused.
func isClient(key string) bool {
	name, ok := strings.CutPrefix(key, deployLabels)
	return ok && !slices.Contains(providers, name)
}

// clientsOf returns the labels for the DaemonSets of pods on the node. The error names the pods
// without such a label.
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
			problems = append(problems, fmt.Errorf("pod %s/%s is of no DaemonSet that a label %sNAME can pause",
				p.Namespace,
				p.Name, deployLabels))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), errors.Join(problems...)
}

// Pauses pauses DaemonSets for this process. Create it with NewPauses.
type Pauses struct {
	keeper *Keeper
	client *kubeapi.Client

	mu      sync.Mutex    // serializes changes of pauses
	count   atomic.Uint64 // number of pauses by this process
	resumed uint64        // number of these pauses that were resumed; used by the ResumePart
}

// NewPauses returns Pauses for the Node of a Keeper.
func NewPauses(k *Keeper) *Pauses { return &Pauses{keeper: k, client: k.client} }

// Pause pauses the DaemonSets whose pods have these UIDs, by labels of the Node.
func (p *Pauses) Pause(ctx context.Context, uids []string) error {
	ctx, cancel := context.WithTimeout(ctx, pauseTimeout)
	defer cancel()
	p.mu.Lock() // serialized, because most GPUs have the same clients
	defer p.mu.Unlock()
	node := p.keeper.Newest()
	if node.UID == "" {
		return errors.New("the API server has not sent the Node")
	}
	pods, err := p.client.Pods(ctx)
	if err != nil {
		return err
	}
	clients, problem := clientsOf(pods, uids)
	var keys []string
	_, err = p.keeper.Change(ctx, node, func(node kubeapi.Node) kubeapi.NodePatch {
		keys = slices.DeleteFunc(slices.Clone(clients),
			func(key string) bool { return node.Labels[key] != deployedValue })
		if len(keys) == 0 {
			return nil
		}
		return kubeapi.LabelSwap{Keys: keys, From: deployedValue, To: pausedValue}
	})
	if err == nil && len(keys) > 0 {
		p.count.Add(1)
		klog.FromContext(ctx).Info("Paused DaemonSets whose pods prevent a MIG layout", "labels", keys)
	}
	return errors.Join(problem, err)
}

// PausedOn returns the sorted labels of the paused DaemonSets of a Node.
func PausedOn(node kubeapi.Node) []string {
	var keys []string
	for key, value := range node.Labels {
		if value == pausedValue && isClient(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// Resume returns the patch that resumes DaemonSets by these labels.
func Resume(keys []string) kubeapi.LabelSwap {
	return kubeapi.LabelSwap{Keys: keys, From: pausedValue, To: deployedValue}
}

// A ResumePart resumes paused DaemonSets as soon as no change of a MIG layout needs them paused. The
// labels record the pause for the next process.
type ResumePart struct {
	Pauses   *Pauses
	Configs  *feed.Feed[config.Config]
	Progress *feed.Feed[mig.Status]

	// wasOn says that the option was enabled at some time: DaemonSets may be paused.
	wasOn  bool
	resume bool
	last   []string // labels of the last write of the process
}

// Inputs implements Part.
func (p *ResumePart) Inputs() []<-chan struct{} {
	c, configChanged := p.Configs.Latest()
	_, progressChanged := p.Progress.Latest()
	return inputsIf(p.wasOn || c.MIG.PauseClients, configChanged, progressChanged)
}

// Look implements Part.
func (p *ResumePart) Look(context.Context, kubeapi.Node) {
	p.wasOn = p.wasOn || p.Configs.Value().MIG.PauseClients
	p.resume = p.wasOn && p.Progress.Value().Resume
}

// Want implements Part.
func (p *ResumePart) Want(node kubeapi.Node, _ time.Time) Decision {
	keys, pauses := PausedOn(node), p.Pauses.count.Load()
	if !p.resume || node.UID == "" || len(keys) == 0 {
		return Decision{}
	}
	return Decision{
		Patch: Resume(keys), Lock: &p.Pauses.mu,
		Done: func(ctx context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			if err == nil {
				p.Pauses.resumed = pauses
				klog.FromContext(ctx).Info("Resumed paused DaemonSets", "labels", keys)
			}
			return false
		},
	}
}

func (p *ResumePart) needsFinalWrite() bool { return p.Pauses.resumed != p.Pauses.count.Load() }

func (p *ResumePart) finalPatch(node kubeapi.Node, _ time.Time) kubeapi.NodePatch {
	if p.last = PausedOn(node); len(p.last) > 0 {
		return Resume(p.last)
	}
	return nil
}

func (p *ResumePart) recordFinalWrite(ctx context.Context, err error) {
	if err != nil {
		klog.FromContext(ctx).Info("DaemonSets stay paused until this program runs again", "reason", err.Error())
	} else if len(p.last) > 0 {
		p.Pauses.resumed = p.Pauses.count.Load()
		klog.FromContext(ctx).Info("Resumed paused DaemonSets", "labels", p.last)
	}
}
