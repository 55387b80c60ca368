package keeper

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
)

// Each write within QuietTime of the last write waits twice as long as the last write, up to MaxPace:
// another program may revert each write.
const (
	QuietTime = time.Minute
	MinPace   = time.Second
	MaxPace   = time.Minute
	// foreignPace delays the write of a label that another program changed: if this program is the
	// next version of the daemon, the two have found each other by then.
	foreignPace = 5 * time.Second
)

// A Pace is the time between consecutive writes.
type Pace struct {
	last  time.Time     // last write; zero before the first
	delay time.Duration // delay of the last write
	next  time.Time     // time of the pending write; zero if none is pending
	// nextDelay is the delay of the pending write.
	nextDelay time.Duration
}

// Due returns the time of a write that is pending from now on. foreign is true for a write after a
// change by another program.
func (p *Pace) Due(now time.Time, foreign bool) time.Time {
	if !p.next.IsZero() {
		return p.next
	}
	p.next, p.nextDelay = now, 0
	if !p.last.IsZero() && now.Sub(p.last) < QuietTime {
		p.nextDelay = min(max(2*p.delay, MinPace), MaxPace)
		p.next = p.last.Add(p.nextDelay)
	}
	if foreign && p.next.Before(now.Add(foreignPace)) {
		p.next = now.Add(foreignPace)
	}
	return p.next
}

// Record records the pending write.
func (p *Pace) Record(now time.Time) { p.last, p.delay, p.next = now, p.nextDelay, time.Time{} }

// IsFirst reports whether no write was recorded.
func (p *Pace) IsFirst() bool { return p.last.IsZero() }

// cancel says that no write is pending.
func (p *Pace) cancel() { p.next = time.Time{} }

// A LabelsPart writes the labels of the GPUs to the Node. It writes when the Node's labels differ
// from the wanted labels, unless they differ exactly as after its last write: these differences
// belong to other programs.
type LabelsPart struct {
	Configs *feed.Feed[config.Config]
	Labels  *feed.Feed[map[string]string]

	enabled bool
	wanted  map[string]string // nil if not known

	uid       string                  // of the Node to which the following fields refer
	foreign   map[string]foreignLabel // labels that other programs own
	remaining map[string]string       // differences after the last write
	completed map[string]string       // the wanted labels when nothing was left to write
	pace      Pace
}

// A foreignLabel is a label that belongs to another program.
type foreignLabel struct{ value, owner string }

// Inputs implements Part.
func (p *LabelsPart) Inputs() []<-chan struct{} {
	c, configChanged := p.Configs.Latest()
	_, labelsChanged := p.Labels.Latest()
	return inputsIf(c.Features.Labels == config.LabelsNode, configChanged, labelsChanged)
}

// Look implements Part.
func (p *LabelsPart) Look(context.Context, kubeapi.Node) {
	p.enabled, p.wanted = p.Configs.Value().Features.Labels == config.LabelsNode, p.Labels.Value()
}

// Want implements Part.
func (p *LabelsPart) Want(node kubeapi.Node, now time.Time) Decision {
	if !p.enabled || node.UID == "" || p.wanted == nil {
		p.pace.cancel()
		return Decision{}
	}
	if node.UID != p.uid {
		p.uid, p.foreign, p.remaining, p.completed = node.UID, map[string]foreignLabel{}, nil, nil
	}
	own := p.ownLabels(node)
	differs := differences(own, node.Labels)
	if len(differs) == 0 || maps.Equal(differs, p.remaining) {
		p.pace.cancel()
		p.completed = p.wanted
		return Decision{Problem: p.foreignProblem(node)}
	}
	if due := p.pace.Due(now, p.completed != nil && maps.Equal(p.completed, p.wanted)); due.After(now) {
		return Decision{At: due}
	}
	return Decision{
		Patch: kubeapi.LabelsPatch(own), Crowd: p.pace.IsFirst(),
		Done: func(ctx context.Context, after kubeapi.Node, err error, now time.Time) bool {
			var conflict *kubeapi.Conflict
			if errors.As(err, &conflict) {
				return p.leaveToOwners(ctx, after, conflict)
			}
			if err == nil {
				p.pace.Record(now)
				p.remaining, p.completed = differences(own, after.Labels), p.wanted
				klog.FromContext(ctx).V(2).Info("Wrote the labels of the node", "labels", len(own), "left",
					slices.Sorted(maps.Keys(p.foreign)))
			}
			return false
		},
	}
}

// foreignProblem returns an error naming the labels that are not as wanted but belong to other
// programs; nil if there are none. An owner may be uninstalled: the API server knows only its name.
func (p *LabelsPart) foreignProblem(node kubeapi.Node) error {
	owners, keys := map[string]bool{}, []string(nil)
	for key := range differences(p.wanted, node.Labels) {
		if owner := p.foreign[key].owner; owner != "" {
			owners[owner] = true
		}
		keys = append(keys, key+"-")
	}
	if len(keys) == 0 {
		return nil
	}
	slices.Sort(keys)
	by := "another program"
	if len(owners) > 0 {
		by = strings.Join(slices.Sorted(maps.Keys(owners)), " and ")
	}
	return fmt.Errorf("labels written by %s have other values than wanted; if that program no longer runs, "+
		"run: kubectl label node %s %s",
		by, node.Name, strings.Join(keys, " "))
}

// ownLabels returns the wanted labels without labels of other programs. A label belongs to another
// program while it has the value that this program set.
func (p *LabelsPart) ownLabels(node kubeapi.Node) map[string]string {
	own := maps.Clone(p.wanted)
	for key, foreign := range p.foreign {
		if value, exists := node.Labels[key]; exists && value == foreign.value {
			delete(own, key)
		} else {
			delete(p.foreign, key)
		}
	}
	return own
}

// leaveToOwners leaves labels to their owners, and logs each label once. It returns false if the
// Node has none of these labels.
func (p *LabelsPart) leaveToOwners(ctx context.Context, node kubeapi.Node, conflict *kubeapi.Conflict) (left bool) {
	if node.UID != p.uid {
		return false
	}
	for key, owner := range conflict.Labels {
		value, exists := node.Labels[key]
		if !exists {
			continue
		}
		p.foreign[key], left = foreignLabel{value, ownerIn(owner)}, true
		klog.FromContext(ctx).Info("A label of the Node belongs to another program and stays unchanged", "label", key,
			"value",
			value,
			"reason", owner)
	}
	return left
}

// ownerIn returns the field manager that the API server names as the owner of a label in a message:
// conflict with "NAME" using v1.
func ownerIn(text string) string {
	_, text, _ = strings.Cut(text, `"`)
	name, _, _ := strings.Cut(text, `"`)
	return name
}

// differences returns the labels that are not as wanted, with a description: missing labels, labels
// with another value, and labels of this program that the Node should not have.
func differences(wanted, now map[string]string) map[string]string {
	all := map[string]string{}
	for key, value := range wanted {
		if actual, exists := now[key]; !exists || actual != value {
			all[key] = fmt.Sprintf("%q, want %q, there %v", actual, value, exists)
		}
	}
	for key, value := range now {
		if _, exists := wanted[key]; !exists && labels.Owns(key) {
			all[key] = fmt.Sprintf("%q, want none", value)
		}
	}
	return all
}
