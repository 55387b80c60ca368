package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
)

// The label with the name of the node's MIG layout, and the label and the annotation with its
// state. The labels are the same as for NVIDIA's mig-manager.
const (
	migLabel            = "nvidia.com/mig.config"
	migStateLabel       = "nvidia.com/mig.config.state"
	migReasonAnnotation = "gpu-device-plugin.github.io/mig.config.reason"
)

const (
	// reasonPace is the shortest time between two writes for a new reason of the same state.
	reasonPace = 2 * time.Second
	// maxReason is the size limit of a reason, in bytes.
	maxReason = 1024
)

// migState returns the state of the layout that the label names, and the reason if it is not
// success. Both are empty without a label.
func migState(label string, selected choice.Choice, progress mig.Status) (state mig.ConfigState, reason string) {
	switch {
	case label == "":
		return mig.StateNone, ""
	case selected.From == choice.FromOrder && (selected.Layout != label || len(selected.Desired.GPUs) > 0):
		return mig.StateFailed, fmt.Sprintf("mig apply requested layout %s after the label was set; "+
			"set the label again, or run mig apply --forget on the node", selected.Layout)
	case selected.Layout != label:
		return mig.StatePending, "the layout has not been read yet"
	case selected.Err != nil:
		return mig.StateFailed, selected.Err.Error()
	case progress.Layout != label || progress.OrderNumber != selected.Desired.OrderNumber ||
		progress.State == mig.StateNone:
		return mig.StatePending, "the layout has not been read yet"
	}
	return progress.State, progress.Reason
}

// A layoutLabeler follows the label with the MIG layout, and writes the label with its state.
type layoutLabeler struct {
	client *kubeapi.Client
	daemon daemon.View
	alarm  *feed.Alarm

	latestNode
	state       string    // as last written
	writtenAt   time.Time // time of the last write
	clearedNode string    // UID of the Node from which the state was removed
}

// followLayout follows the label until ctx ends, while the configuration enables it.
func (c *Cluster) followLayout(ctx context.Context, d daemon.View) {
	if d.MIGChoice == nil {
		return
	}
	l := &layoutLabeler{client: c.client, daemon: d, alarm: new(feed.Alarm)}
	wake := func() []<-chan struct{} {
		_, node := l.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		_, chosen := d.MIGChoice.Choices().Latest()
		_, progress := d.MIG.Latest()
		return []<-chan struct{}{node, configured, chosen, progress, l.alarm.Rings()}
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "MIG layout", wake, l.step)
}

// step passes the value of the label to the chooser, and writes the state of the layout if it has
// changed.
func (l *layoutLabeler) step(ctx context.Context) error {
	m, node, now := l.daemon.Configs.Value().MIG, l.client.Nodes().Value(), time.Now()
	if node.UID == "" {
		return nil
	}
	l.update(node, now)
	label := ""
	if m.Enabled && m.Label {
		label = l.node.Labels[migLabel]
		l.daemon.MIGChoice.SetLabel(ctx, label)
	}
	state, reason := migState(label, l.daemon.MIGChoice.Choices().Value(), l.daemon.MIG.Value())
	return l.write(ctx, string(state), oneLine(reason), now)
}

// write writes the state and the reason to the Node if the Node does not have them.
func (l *layoutLabeler) write(ctx context.Context, state, reason string, now time.Time) error {
	oldState, oldReason := l.node.Labels[migStateLabel], l.node.Annotations[migReasonAnnotation]
	switch {
	case oldState == state && oldReason == reason:
		return nil
	case state == "" && l.clearedNode == l.node.UID: // any other value belongs to another program
		return nil
	case oldState == state && state == l.state && now.Sub(l.writtenAt) < reasonPace:
		l.alarm.After(ctx, reasonPace-now.Sub(l.writtenAt))
		return nil
	}
	var labels, annotations map[string]string
	if state != "" {
		labels = map[string]string{migStateLabel: state}
	}
	if reason != "" {
		annotations = map[string]string{migReasonAnnotation: reason}
	}
	after, err := l.client.ApplyMIGState(ctx, l.node.UID, l.node.ResourceVersion, labels, annotations)
	if err := l.accept(ctx, l.client, after, err, now); err != nil {
		return err
	}
	l.clearedNode = ""
	if state == "" {
		l.clearedNode = after.UID
	}
	if state != l.state {
		klog.FromContext(ctx).Info("Wrote the state of the MIG layout", "state", state, "reason", reason)
	}
	l.state, l.writtenAt = state, now
	return nil
}

// oneLine returns text on one line, as valid UTF-8 of at most maxReason bytes.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxReason)], "")
}

// errNameless is the error of an eviction for which only the pod's UID is known.
var errNameless = errors.New("its name is not known, because the kubelet's PodResources API does not respond")

// Evict evicts a pod, within its disruption budget.
func (c *Cluster) Evict(ctx context.Context, pod mig.Pod) error {
	if pod.Name == "" {
		return errNameless
	}
	return c.client.Evict(ctx, kubeapi.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID})
}
