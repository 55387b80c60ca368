package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
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

// A labeler is the common part of the label writers.
type labeler struct {
	client *kubeapi.Client
	daemon daemon.View
	spread *spread

	hasWritten bool          // the first write was made
	lastWrite  time.Time     // time of the last write
	delay      time.Duration // delay of the last write
	problem    error         // last reported problem
}

// waitForPace waits until a write may be made. It returns an error if ctx ends, or if the nodes of
// the cluster cannot be counted now. foreign says that the write reacts to a change by another
// program.
func (l *labeler) waitForPace(ctx context.Context, foreign bool) error {
	wait := time.Duration(0)
	switch now := time.Now(); {
	case !l.hasWritten:
		limit, err := l.spread.writeLimit(ctx, l.client)
		if err != nil {
			return err
		}
		wait = rand.N(limit + 1)
	case now.Sub(l.lastWrite) < quietTime:
		l.delay = min(max(2*l.delay, minPace), maxPace)
		wait = l.lastWrite.Add(l.delay).Sub(now)
	default:
		l.delay = 0
	}
	if foreign {
		wait = max(wait, foreignPace)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
	}
	l.hasWritten, l.lastWrite = true, time.Now()
	return nil
}

// reportProblem publishes why labels are not as wanted, or nil, if this has changed. It returns
// err.
func (l *labeler) reportProblem(err error) error {
	if fmt.Sprint(err) != fmt.Sprint(l.problem) {
		l.problem = err
		l.daemon.LabelsProblem.Publish(err)
	}
	return err
}

// isEnabled reports whether the configuration in force selects a way to write labels.
func (l *labeler) isEnabled(output config.LabelsOutput) bool {
	return l.daemon.Configs.Value().Features.Labels == output
}

// changes returns channels that are closed when the wanted labels may change.
func (l *labeler) changes() []<-chan struct{} {
	_, configured := l.daemon.Configs.Latest()
	_, labeled := l.daemon.Labels.Latest()
	return []<-chan struct{}{configured, labeled}
}

// A nodeLabeler writes labels to the daemon's own Node. It writes when the Node's labels differ
// from the wanted labels, unless they differ exactly as after its last write: these differences
// belong to other programs.
type nodeLabeler struct {
	labeler
	uid string // of the Node to which the following fields refer
	latestNode
	foreign   map[string]foreignLabel // labels that other programs own
	remaining map[string]string       // differences after the last write
	// completed has the wanted labels when nothing was left to write.
	completed map[string]string
}

// A foreignLabel is a label that belongs to another program.
type foreignLabel struct{ value, owner string }

// labelNode writes labels to the daemon's own Node until ctx ends, while the configuration enables
// it.
func (c *Cluster) labelNode(ctx context.Context, d daemon.View) {
	l := &nodeLabeler{labeler: labeler{client: c.client, daemon: d, spread: &c.spread}}
	defer func() { _ = l.reportProblem(nil) }() // from now on another process leads and reports
	wake := func() []<-chan struct{} {
		_, node := l.client.Nodes().Latest()
		return append(l.changes(), node)
	}
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "labels of the node", wake, func(ctx context.Context) error {
		if !l.isEnabled(config.LabelsNode) {
			return l.reportProblem(nil)
		}
		err := l.step(ctx)
		if err == nil {
			_ = l.reportProblem(l.foreignProblem()) // another write does not help
			return nil
		}
		return l.reportProblem(err)
	})
}

// foreignProblem returns an error naming the labels that are not as wanted but belong to other
// programs; nil if there are none. An owner may be uninstalled: the API server knows only its name.
func (l *nodeLabeler) foreignProblem() error {
	wanted, owners, keys := l.daemon.Labels.Value(), map[string]bool{}, []string(nil)
	if wanted == nil || l.node.UID == "" {
		return nil
	}
	for key := range differences(wanted, l.node.Labels) {
		if owner := l.foreign[key].owner; owner != "" {
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
		by, l.node.Name, strings.Join(keys, " "))
}

// step writes the labels once if they are not as wanted.
func (l *nodeLabeler) step(ctx context.Context) error {
	if len(l.pending()) == 0 {
		return nil
	}
	if err := l.waitForPace(ctx, maps.Equal(l.completed, l.daemon.Labels.Value())); err != nil {
		return err
	}
	// evaluated again after the wait, and after labels were left to their owners
	for attempts := 0; len(l.pending()) > 0; {
		wanted := l.daemon.Labels.Value()
		own := l.ownLabels(wanted)
		after, err := l.client.ApplyLabels(ctx, l.uid, l.node.ResourceVersion, own)
		var conflict *kubeapi.Conflict
		switch {
		case errors.As(err, &conflict):
			if err := l.leaveToOwners(ctx, conflict); err != nil {
				return err
			}
			continue
		case kubeapi.IsStale(err) && attempts < maxStaleWrites:
			attempts++
			if err := l.refresh(ctx); err != nil {
				return err
			}
			continue
		case err != nil:
			return err
		}
		l.node, l.updatedAt, l.remaining, l.completed = after, time.Now(), differences(own, after.Labels), wanted
		klog.FromContext(ctx).V(2).Info("Wrote the labels of the node", "labels", len(own), "left",
			slices.Sorted(maps.Keys(l.foreign)))
		return nil
	}
	return nil
}

// pending returns the differences that must be written.
func (l *nodeLabeler) pending() map[string]string {
	node, wanted := l.client.Nodes().Value(), l.daemon.Labels.Value()
	if node.UID == "" || wanted == nil {
		return nil
	}
	if node.UID != l.uid {
		l.uid, l.foreign, l.remaining, l.completed = node.UID, map[string]foreignLabel{}, nil, nil
	}
	l.update(node, time.Now())
	differs := differences(l.ownLabels(wanted), l.node.Labels)
	if len(differs) == 0 || maps.Equal(differs, l.remaining) {
		l.completed = wanted
		return nil
	}
	return differs
}

// accept stores the response to a write of the Node, and returns the error of the write. If another
// program had changed the Node first, accept reads the Node for the next attempt.
func (s *latestNode) accept(ctx context.Context, client *kubeapi.Client, after kubeapi.Node, err error,
	now time.Time) error {
	if kubeapi.IsStale(err) {
		if node, unknown := client.Get(ctx); unknown == nil {
			s.update(node, now)
		}
	}
	if err == nil {
		s.node, s.updatedAt = after, now
	}
	return err
}

// ownLabels returns the wanted labels without labels of other programs. A label belongs to another
// program while it has the value that this program set.
func (l *nodeLabeler) ownLabels(wanted map[string]string) map[string]string {
	own := maps.Clone(wanted)
	for key, foreign := range l.foreign {
		if value, exists := l.node.Labels[key]; exists && value == foreign.value {
			delete(own, key)
		} else {
			delete(l.foreign, key)
		}
	}
	return own
}

// refresh reads the latest Node.
func (l *nodeLabeler) refresh(ctx context.Context) error {
	node, err := l.client.Get(ctx)
	switch {
	case err != nil:
		return err
	case node.UID != l.uid:
		return errors.New("the node was deleted, and another one has its name")
	}
	l.update(node, time.Now())
	return nil
}

// leaveToOwners leaves labels to their owners, and logs each label once.
func (l *nodeLabeler) leaveToOwners(ctx context.Context, conflict *kubeapi.Conflict) error {
	if err := l.refresh(ctx); err != nil {
		return err
	}
	recorded := false
	for key, owner := range conflict.Labels {
		value, exists := l.node.Labels[key]
		if !exists {
			continue
		}
		l.foreign[key], recorded = foreignLabel{value, ownerIn(owner)}, true
		klog.FromContext(ctx).Info("A label of the Node belongs to another program and stays unchanged", "label", key, "value",
			value,
			"reason", owner)
	}
	if !recorded {
		return conflict // the API server's answers contradict each other
	}
	return nil
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
	labeler
	alarm       *feed.Alarm
	nextRead    time.Time         // time of the next read of the object
	written     map[string]string // labels of the object at the last read or write
	namespace   string            // namespace of the object
	owners      []kubeapi.OwnerReference
	ownersKnown bool // owners is valid
}

// labelFeature maintains the object until ctx ends, while the configuration enables it.
func (c *Cluster) labelFeature(ctx context.Context, d daemon.View) {
	l := &featureLabeler{labeler: labeler{client: c.client, daemon: d, spread: &c.spread}, alarm: new(feed.Alarm)}
	defer func() { _ = l.reportProblem(nil) }()
	wake := func() []<-chan struct{} { return append(l.changes(), l.alarm.Rings()) }
	kubeapi.RunWithRetry(ctx, clock.RealClock{}, "NodeFeature", wake, func(ctx context.Context) error {
		if !l.isEnabled(config.LabelsNodeFeature) {
			return l.reportProblem(nil)
		}
		if len(l.daemon.Configs.Value().NodeName) > maxLabelValue {
			if l.problem == nil {
				klog.FromContext(ctx).Error(errLongName, "Labels are not written")
			}
			_ = l.reportProblem(errLongName) // reported in the status; a retry does not help
			return nil
		}
		return l.step(ctx)
	})
}

// LabelOnce writes labels as gpu-feature-discovery does.
func (c *Cluster) LabelOnce(ctx context.Context, configured config.Config, set map[string]string) error {
	l := &featureLabeler{labeler: labeler{client: c.client, daemon: daemon.View{Config: configured}}}
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
		return l.reportProblem(err)
	} else if found {
		l.record(ctx, wanted, namespace, foreignRecheck)
		return nil
	}
	if err := l.findOwners(ctx, namespace); err != nil {
		return l.reportProblem(err)
	}
	object, found, err := l.client.NodeFeature(ctx, namespace, prefix)
	if err != nil {
		return l.reportProblem(err)
	}
	desired := kubeapi.NodeFeature{Namespace: namespace, Name: object.Name, Labels: wanted, Owners: l.owners}
	if !found || !object.Equal(desired) {
		if err := l.waitForPace(ctx, false); err != nil {
			return l.reportProblem(err)
		}
		if err := l.client.ApplyNodeFeature(ctx, namespace, prefix, wanted, l.owners); err != nil {
			return l.reportProblem(err)
		}
	}
	l.record(ctx, wanted, namespace, featureReread)
	return l.reportProblem(nil)
}

// record stores the content of the object, and sets the time of the next read.
func (l *featureLabeler) record(ctx context.Context, labels map[string]string, namespace string, after time.Duration) {
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
	if l.problem == nil {
		klog.FromContext(ctx).Error(errForeignFeature, "Labels are not written", "namespace", namespace, "name", object.Name)
	}
	_ = l.reportProblem(errForeignFeature) // checked again soon, without an error
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
