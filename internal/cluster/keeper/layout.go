package keeper

import (
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
)

// The label with the name of the node's MIG layout, and the label and the annotation with its
// state. The labels are the same as for NVIDIA's mig-manager.
const (
	migLabel            = "nvidia.com/mig.config"
	MIGStateLabel       = "nvidia.com/mig.config.state"
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

// A chooser chooses the MIG layout, as choice.Chooser does.
type chooser interface {
	SetLabel(ctx context.Context, value string)
	Choices() *feed.Feed[choice.Choice]
}

// A LayoutPart passes the label with the MIG layout to the chooser, and writes the state of the
// layout.
type LayoutPart struct {
	Configs  *feed.Feed[config.Config]
	Chooser  chooser
	Progress *feed.Feed[mig.Status]

	label    string // the layout that the label names; empty without a label
	selected choice.Choice
	status   mig.Status

	state       string    // as last written
	writtenAt   time.Time // time of the last write
	clearedNode string    // UID of the Node from which the state was removed
}

// Inputs implements Part.
func (p *LayoutPart) Inputs() []<-chan struct{} {
	c, configChanged := p.Configs.Latest()
	_, choiceChanged := p.Chooser.Choices().Latest()
	_, progressChanged := p.Progress.Latest()
	return inputsIf(c.MIG.Enabled && c.MIG.Label, configChanged, choiceChanged, progressChanged)
}

// Look implements Part.
func (p *LayoutPart) Look(ctx context.Context, node kubeapi.Node) {
	p.label = ""
	if m := p.Configs.Value().MIG; node.UID != "" && m.Enabled && m.Label {
		p.label = node.Labels[migLabel]
		p.Chooser.SetLabel(ctx, p.label)
	}
	p.selected, p.status = p.Chooser.Choices().Value(), p.Progress.Value()
}

// Want implements Part.
func (p *LayoutPart) Want(node kubeapi.Node, now time.Time) Decision {
	next, reason := migState(p.label, p.selected, p.status)
	state, reason := string(next), OneLine(reason)
	oldState, oldReason := node.Labels[MIGStateLabel], node.Annotations[migReasonAnnotation]
	switch {
	case node.UID == "" || oldState == state && oldReason == reason:
		return Decision{}
	case state == "" && p.clearedNode == node.UID: // any other value belongs to another program
		return Decision{}
	case oldState == state && state == p.state && now.Sub(p.writtenAt) < reasonPace:
		return Decision{At: p.writtenAt.Add(reasonPace)}
	}
	var patch kubeapi.MIGStatePatch
	if state != "" {
		patch.Labels = map[string]string{MIGStateLabel: state}
	}
	if reason != "" {
		patch.Annotations = map[string]string{migReasonAnnotation: reason}
	}
	return Decision{Patch: patch, Done: func(ctx context.Context, after kubeapi.Node, err error, now time.Time) bool {
		if err != nil {
			return false
		}
		if p.clearedNode = ""; state == "" {
			p.clearedNode = after.UID
		}
		if state != p.state {
			klog.FromContext(ctx).Info("Wrote the state of the MIG layout", "state", state, "reason", reason)
		}
		p.state, p.writtenAt = state, now
		return false
	}}
}

// OneLine returns text on one line, as valid UTF-8 of at most maxReason bytes.
func OneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxReason)], "")
}
