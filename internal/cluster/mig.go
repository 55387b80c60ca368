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

// The label that names the MIG layout of a node, and the labels with its state. The labels are
// those of NVIDIA's mig-manager.
const (
	migLabel            = "nvidia.com/mig.config"
	migStateLabel       = "nvidia.com/mig.config.state"
	migReasonAnnotation = "gpu-device-plugin.github.io/mig.config.reason"
)

const (
	// reasonPace is the shortest time after a write before another reason of the same state is
	// written.
	reasonPace = 2 * time.Second
	// maxReason is how many bytes a reason may have.
	maxReason = 1024
)

// migState returns the state of the layout that the label names, and why it is not success; both
// are empty without a label.
func migState(label string, chosen choice.Choice, made mig.Status) (state mig.ConfigState, reason string) {
	switch {
	case label == "":
		return mig.StateNone, ""
	case chosen.From == choice.FromOrder && (chosen.Layout != label || len(chosen.Desired.GPUs) > 0):
		return mig.StateFailed, fmt.Sprintf("mig apply asked this node for layout %s after the label was set; set the label anew, or run "+
			"mig apply --forget on the node", chosen.Layout)
	case chosen.Layout != label:
		return mig.StatePending, "the layout is not looked at yet"
	case chosen.Err != nil:
		return mig.StateFailed, chosen.Err.Error()
	case made.Layout != label || made.OrderNumber != chosen.Desired.OrderNumber || made.State == mig.StateNone:
		return mig.StatePending, "the layout is not looked at yet"
	}
	return made.State, made.Reason
}

// A layoutLabeler follows the label that names the MIG layout, and keeps the node's label with the
// state.
type layoutLabeler struct {
	client *kubeapi.Client
	daemon daemon.View
	again  *feed.Alarm

	sighting
	state   string    // as it was written last
	wrote   time.Time // when that was
	cleared string    // the UID of the node from which it was taken away
}

// followLayout follows the label until ctx ends, while the configuration wants that.
func (c *Cluster) followLayout(ctx context.Context, d daemon.View) {
	if d.MIGWish == nil {
		return
	}
	l := &layoutLabeler{client: c.client, daemon: d, again: new(feed.Alarm)}
	wake := func() []<-chan struct{} {
		_, node := l.client.Nodes().Latest()
		_, configured := d.Configs.Latest()
		_, chosen := d.MIGWish.Choices().Latest()
		_, made := d.MIG.Latest()
		return []<-chan struct{}{node, configured, chosen, made, l.again.Rings()}
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "MIG layout", wake, l.step)
}

// step tells the daemon what the label says, and writes the state of the layout once, if that is to
// be written.
func (l *layoutLabeler) step(ctx context.Context) error {
	m, node, now := l.daemon.Configs.Value().MIG, l.client.Nodes().Value(), time.Now()
	if node.UID == "" {
		return nil
	}
	l.see(node, now)
	label := ""
	if m.Enabled && m.Label {
		label = l.node.Labels[migLabel]
		l.daemon.MIGWish.SetLabel(ctx, label)
	}
	state, reason := migState(label, l.daemon.MIGWish.Choices().Value(), l.daemon.MIG.Value())
	return l.write(ctx, string(state), oneLine(reason), now)
}

// write gives the state and the reason to the node, if it does not have them.
func (l *layoutLabeler) write(ctx context.Context, state, reason string, now time.Time) error {
	is, because := l.node.Labels[migStateLabel], l.node.Annotations[migReasonAnnotation]
	switch {
	case is == state && because == reason:
		return nil
	case state == "" && l.cleared == l.node.UID: // the rest is that of another program
		return nil
	case is == state && state == l.state && now.Sub(l.wrote) < reasonPace:
		l.again.After(ctx, reasonPace-now.Sub(l.wrote))
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
	if err := l.takeIn(ctx, l.client, after, err, now); err != nil {
		return err
	}
	l.cleared = ""
	if state == "" {
		l.cleared = after.UID
	}
	if state != l.state {
		klog.FromContext(ctx).Info("Wrote the state of the MIG layout", "state", state, "reason", reason)
	}
	l.state, l.wrote = state, now
	return nil
}

// oneLine returns text in one line, in valid UTF-8 and with at most maxReason bytes.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxReason)], "")
}

// errNameless is the error of the eviction of a pod of which only the UID is known.
var errNameless = errors.New("its name is not known, because kubelet's PodResources does not answer")

// Evict evicts a pod, within its disruption budget.
func (c *Cluster) Evict(ctx context.Context, pod mig.Pod) error {
	if pod.Name == "" {
		return errNameless
	}
	return c.client.Evict(ctx, kubeapi.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID})
}
