package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
)

// Each write within quietTime of the last one waits twice as long as the last one, up to maxPace:
// another program may revert each write.
const (
	quietTime = time.Minute
	minPace   = time.Second
	maxPace   = time.Minute
	// foreignPace delays the write of a label that another program changed: if this program is the
	// next version of the daemon, the two have found each other by then.
	foreignPace = 5 * time.Second
)

// A pace is the time between writes that follow one another.
type pace struct {
	last  time.Time     // last write; zero before the first
	delay time.Duration // delay of the last write
	next  time.Time     // time of the pending write; zero if none is pending
	// nextDelay is the delay of the pending write.
	nextDelay time.Duration
}

// due returns the time of a write that is pending from now on. foreign says that the write reacts to
// a change by another program.
func (p *pace) due(now time.Time, foreign bool) time.Time {
	if !p.next.IsZero() {
		return p.next
	}
	p.next, p.nextDelay = now, 0
	if !p.last.IsZero() && now.Sub(p.last) < quietTime {
		p.nextDelay = min(max(2*p.delay, minPace), maxPace)
		p.next = p.last.Add(p.nextDelay)
	}
	if foreign && p.next.Before(now.Add(foreignPace)) {
		p.next = now.Add(foreignPace)
	}
	return p.next
}

// record records the pending write.
func (p *pace) record(now time.Time) { p.last, p.delay, p.next = now, p.nextDelay, time.Time{} }

// cancel says that no write is pending.
func (p *pace) cancel() { p.next = time.Time{} }

// A problemReporter publishes why labels are not as wanted; nil if they are.
type problemReporter struct {
	problems *feed.Feed[error]
	last     error // last published problem
}

// report publishes err if the problem has changed. It returns err.
func (r *problemReporter) report(err error) error {
	if fmt.Sprint(err) != fmt.Sprint(r.last) {
		r.last = err
		r.problems.Publish(err)
	}
	return err
}

// A labelsPart writes the labels of the GPUs to the Node. It writes when the Node's labels differ
// from the wanted labels, unless they differ exactly as after its last write: these differences
// belong to other programs.
type labelsPart struct {
	configs *feed.Feed[config.Config]
	labels  *feed.Feed[map[string]string]

	enabled bool
	wanted  map[string]string // nil if not known

	uid       string                  // of the Node to which the following fields refer
	foreign   map[string]foreignLabel // labels that other programs own
	remaining map[string]string       // differences after the last write
	completed map[string]string       // the wanted labels when nothing was left to write
	pace      pace
}

// A foreignLabel is a label that belongs to another program.
type foreignLabel struct{ value, owner string }

func (p *labelsPart) inputs() []<-chan struct{} {
	c, configured := p.configs.Latest()
	_, labeled := p.labels.Latest()
	return inputsIf(c.Features.Labels == config.LabelsNode, configured, labeled)
}

func (p *labelsPart) look(context.Context, kubeapi.Node) {
	p.enabled, p.wanted = p.configs.Value().Features.Labels == config.LabelsNode, p.labels.Value()
}

func (p *labelsPart) want(node kubeapi.Node, now time.Time) decision {
	if !p.enabled || node.UID == "" || p.wanted == nil {
		p.pace.cancel()
		return decision{}
	}
	if node.UID != p.uid {
		p.uid, p.foreign, p.remaining, p.completed = node.UID, map[string]foreignLabel{}, nil, nil
	}
	own := p.ownLabels(node)
	differs := differences(own, node.Labels)
	if len(differs) == 0 || maps.Equal(differs, p.remaining) {
		p.pace.cancel()
		p.completed = p.wanted
		return decision{problem: p.foreignProblem(node)}
	}
	if due := p.pace.due(now, maps.Equal(p.completed, p.wanted)); due.After(now) {
		return decision{at: due}
	}
	return decision{
		patch: kubeapi.LabelsPatch(own), crowd: p.pace.last.IsZero(),
		done: func(ctx context.Context, after kubeapi.Node, err error, now time.Time) bool {
			var conflict *kubeapi.Conflict
			if errors.As(err, &conflict) {
				return p.leaveToOwners(ctx, after, conflict)
			}
			if err == nil {
				p.pace.record(now)
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
func (p *labelsPart) foreignProblem(node kubeapi.Node) error {
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
func (p *labelsPart) ownLabels(node kubeapi.Node) map[string]string {
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
func (p *labelsPart) leaveToOwners(ctx context.Context, node kubeapi.Node, conflict *kubeapi.Conflict) (left bool) {
	if node.UID != p.uid {
		return false
	}
	for key, owner := range conflict.Labels {
		value, exists := node.Labels[key]
		if !exists {
			continue
		}
		p.foreign[key], left = foreignLabel{value, ownerIn(owner)}, true
		klog.FromContext(ctx).Info("A label of the Node belongs to another program and stays unchanged", "label", key, "value",
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

// Times for the NodeFeature object of node-feature-discovery.
const (
	// featureReread is how often the object is read without a known change: another client may have
	// deleted it.
	featureReread = time.Hour
	// foreignRecheck is how often the object of another program is checked again.
	foreignRecheck = 10 * time.Minute
)

// A featureLabeler writes labels to an object for node-feature-discovery.
type featureLabeler struct {
	client *kubeapi.Client
	daemon daemon.View
	spread *spread
	pace   pace
	problemReporter

	alarm       *feed.Alarm
	nextRead    time.Time         // time of the next read of the object
	written     map[string]string // labels of the object at the last read or write
	namespace   string            // namespace of the object
	owners      []kubeapi.OwnerReference
	ownersKnown bool // owners is valid
}

// labelFeature maintains the object until ctx ends, while the configuration enables it.
func (c *Cluster) labelFeature(ctx context.Context, d daemon.View) {
	l := &featureLabeler{
		client: c.client, daemon: d, spread: &c.spread, problemReporter: problemReporter{problems: d.LabelsProblem},
		alarm: new(feed.Alarm),
	}
	defer func() { _ = l.report(nil) }() // from now on another process leads and reports
	wake := func() []<-chan struct{} {
		c, configured := d.Configs.Latest()
		_, labeled := d.Labels.Latest()
		return inputsIf(c.Features.Labels == config.LabelsNodeFeature, configured, labeled, l.alarm.Rings())
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "NodeFeature", wake, func(ctx context.Context) error {
		if d.Configs.Value().Features.Labels != config.LabelsNodeFeature {
			return l.report(nil)
		}
		if len(l.daemon.Configs.Value().NodeName) > maxLabelValue {
			if l.last == nil {
				klog.FromContext(ctx).Error(errLongName, "Labels are not written")
			}
			_ = l.report(errLongName) // reported in the status; a retry does not help
			return nil
		}
		return l.step(ctx)
	})
}

// LabelOnce writes labels as gpu-feature-discovery does.
func (c *Cluster) LabelOnce(ctx context.Context, configured config.Config, set map[string]string) error {
	l := &featureLabeler{client: c.client, daemon: daemon.View{Config: configured}}
	if err := l.findOwners(ctx, configured.Namespace); err != nil {
		return err
	}
	return c.client.ApplyNodeFeature(ctx, configured.Namespace, kubeapi.DiscoveryPrefix, set, l.owners)
}

// errForeignFeature is the problem of a node that another program labels.
var errForeignFeature = errors.New("a NodeFeature of gpu-feature-discovery already has labels of this node: " +
	"remove that program and the object")

// maxLabelValue is the size limit of a label's value, in bytes. NFD finds the node of an object by
// a label with the node's name.
const maxLabelValue = 63

// errLongName is the problem of a node whose name is too long for the value of a label.
var errLongName = fmt.Errorf("the name of the node has more than %d bytes, and NFD finds nodes by a label with their name: "+
	"set features.labels to node or file", maxLabelValue)

// step reads the object if this is due, and writes it if it is not as wanted.
func (l *featureLabeler) step(ctx context.Context) error {
	wanted, configured, now := l.daemon.Labels.Value(), l.daemon.Configs.Value(), time.Now()
	namespace, prefix := configured.Namespace, kubeapi.NodeFeaturePrefix
	if wanted == nil {
		return nil
	}
	if wait := l.nextRead.Sub(now); wait > 0 && maps.Equal(wanted, l.written) && namespace == l.namespace {
		l.alarm.After(ctx, wait)
		return nil
	}
	if l.spread.awaitStart(ctx, l.client); ctx.Err() != nil {
		return ctx.Err()
	}
	if configured.Discovery.On {
		prefix = kubeapi.DiscoveryPrefix
	} else if found, err := l.hasForeignFeature(ctx, namespace); err != nil {
		return l.report(err)
	} else if found {
		l.remember(ctx, wanted, namespace, foreignRecheck)
		return nil
	}
	if err := l.findOwners(ctx, namespace); err != nil {
		return l.report(err)
	}
	object, found, err := l.client.NodeFeature(ctx, namespace, prefix)
	if err != nil {
		return l.report(err)
	}
	desired := kubeapi.NodeFeature{Namespace: namespace, Name: object.Name, Labels: wanted, Owners: l.owners}
	if !found || !object.Equal(desired) {
		if err := l.waitForPace(ctx); err != nil {
			return l.report(err)
		}
		if err := l.client.ApplyNodeFeature(ctx, namespace, prefix, wanted, l.owners); err != nil {
			return l.report(err)
		}
	}
	l.remember(ctx, wanted, namespace, featureReread)
	return l.report(nil)
}

// waitForPace waits until a write may be made. It returns an error if ctx ends, or if the nodes of
// the cluster cannot be counted now.
func (l *featureLabeler) waitForPace(ctx context.Context) error {
	if l.pace.last.IsZero() {
		if err := l.spread.awaitWrite(ctx, l.client); err != nil {
			return err
		}
	}
	if err := wait(ctx, time.Until(l.pace.due(time.Now(), false))); err != nil {
		return err
	}
	l.pace.record(time.Now())
	return nil
}

// remember stores the content of the object, and sets the time of the next read.
func (l *featureLabeler) remember(ctx context.Context, labels map[string]string, namespace string, after time.Duration) {
	l.nextRead, l.written, l.namespace = time.Now().Add(after), labels, namespace
	l.alarm.After(ctx, after)
}

// hasForeignFeature reports whether another program has an object with labels for the node, and
// publishes this as a problem.
func (l *featureLabeler) hasForeignFeature(ctx context.Context, namespace string) (bool, error) {
	object, _, err := l.client.NodeFeature(ctx, namespace, kubeapi.DiscoveryPrefix)
	if err != nil || len(object.Labels) == 0 {
		return false, err
	}
	if l.last == nil {
		klog.FromContext(ctx).Error(errForeignFeature, "Labels are not written", "namespace", namespace, "name", object.Name)
	}
	_ = l.report(errForeignFeature) // checked again soon, without an error
	return true, nil
}

// findOwners finds the owners of this program's pod once. Without the right to read the pod, the
// object has no owner, and stays after the program is uninstalled.
func (l *featureLabeler) findOwners(ctx context.Context, namespace string) error {
	pod := l.daemon.Config.PodName
	if l.ownersKnown || pod == "" {
		return nil
	}
	owners, err := l.client.PodOwners(ctx, namespace, pod)
	switch {
	case kubeapi.IsInaccessible(err):
		klog.FromContext(ctx).Info("Cannot read the daemon's own pod: the NodeFeature stays after an uninstallation", "reason",
			err.Error())
	case err != nil:
		return err
	}
	l.owners, l.ownersKnown = owners, true
	return nil
}
