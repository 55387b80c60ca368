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

// Writes that follow one another within calm wait twice as long each time, up to maxPace: another
// program may undo each of them.
const (
	calm    = time.Minute
	minPace = time.Second
	maxPace = time.Minute
	// A label that another program changed is written after this time: that program may be the next
	// version of this one, which has been found by then.
	foreignPace = 5 * time.Second
)

// A labeler is what writes of labels have in common.
type labeler struct {
	client *kubeapi.Client
	daemon daemon.View
	spread *spread

	waited  bool          // the first write has
	last    time.Time     // when the last write was
	pace    time.Duration // that it waited
	problem error         // that was told last
}

// admit waits until a write may be made; it returns an error if ctx ends, or the cluster cannot be
// counted for now. A write is foreign that has its reason in what another program did.
func (l *labeler) admit(ctx context.Context, foreign bool) error {
	wait := time.Duration(0)
	switch now := time.Now(); {
	case !l.waited:
		limit, err := l.spread.of(ctx, l.client)
		if err != nil {
			return err
		}
		wait = rand.N(limit + 1)
	case now.Sub(l.last) < calm:
		l.pace = min(max(2*l.pace, minPace), maxPace)
		wait = l.last.Add(l.pace).Sub(now)
	default:
		l.pace = 0
	}
	if foreign {
		wait = max(wait, foreignPace)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
	}
	l.waited, l.last = true, time.Now()
	return nil
}

// tell tells the daemon why labels are not as they are wanted, or nil, when that is another reason
// than before. It returns err.
func (l *labeler) tell(err error) error {
	if fmt.Sprint(err) != fmt.Sprint(l.problem) {
		l.problem = err
		l.daemon.LabelsProblem.Publish(err)
	}
	return err
}

// on reports whether the configuration in force has labels written in a way.
func (l *labeler) on(way config.LabelsOutput) bool {
	return l.daemon.Configs.Value().Features.Labels == way
}

// changes returns the channels of what labels depend on.
func (l *labeler) changes() []<-chan struct{} {
	_, configured := l.daemon.Configs.Latest()
	_, labeled := l.daemon.Labels.Latest()
	return []<-chan struct{}{configured, labeled}
}

// A nodeLabeler keeps labels on the own node. It writes when the node's labels differ from the
// wanted ones, but not again if they differ as its last write has left them: the rest belongs to
// others.
type nodeLabeler struct {
	labeler
	uid string // of the node that the rest is about
	sighting
	left map[string]left   // labels that others own
	rest map[string]string // what differed after the last write
	// settled are the labels that were wanted when there was nothing to write last.
	settled map[string]string
}

// A left label belongs to another program.
type left struct{ value, owner string }

// labelNode keeps labels on the own node until ctx ends, while the configuration wants that.
func (c *Cluster) labelNode(ctx context.Context, d daemon.View) {
	l := &nodeLabeler{labeler: labeler{client: c.client, daemon: d, spread: &c.spread}}
	defer func() { _ = l.tell(nil) }() // another process leads then, and tells it
	wake := func() []<-chan struct{} {
		_, node := l.client.Nodes().Latest()
		return append(l.changes(), node)
	}
	kubeapi.Keep(ctx, clock.RealClock{}, "labels of the node", wake, func(ctx context.Context) error {
		if !l.on(config.LabelsNode) {
			return l.tell(nil)
		}
		err := l.step(ctx)
		if err == nil {
			_ = l.tell(l.withheld()) // writing again does not help
			return nil
		}
		return l.tell(err)
	})
}

// withheld returns which labels are not as they are wanted although nothing is to be written: they
// belong to others, who may be gone. The API server has the name of an owner and does not know
// whether it still runs. It returns nil if there are none.
func (l *nodeLabeler) withheld() error {
	wanted, owners, keys := l.daemon.Labels.Value(), map[string]bool{}, []string(nil)
	if wanted == nil || l.node.UID == "" {
		return nil
	}
	for key := range differences(wanted, l.node.Labels) {
		if owner := l.left[key].owner; owner != "" {
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
	return fmt.Errorf("labels that %s wrote are not as they should be; if it no longer runs, run: kubectl label node %s %s",
		by, l.node.Name, strings.Join(keys, " "))
}

// step writes once, if there is something to write.
func (l *nodeLabeler) step(ctx context.Context) error {
	if len(l.due()) == 0 {
		return nil
	}
	if err := l.admit(ctx, maps.Equal(l.settled, l.daemon.Labels.Value())); err != nil {
		return err
	}
	for tries := 0; len(l.due()) > 0; { // as it is after the wait, and after labels were left to others
		wanted := l.daemon.Labels.Value()
		set := l.ours(wanted)
		after, err := l.client.ApplyLabels(ctx, l.uid, l.node.ResourceVersion, set)
		var conflict *kubeapi.Conflict
		switch {
		case errors.As(err, &conflict):
			if err := l.leave(ctx, conflict); err != nil {
				return err
			}
			continue
		case kubeapi.IsOvertaken(err) && tries < overtaken:
			tries++
			if err := l.lookAtNode(ctx); err != nil {
				return err
			}
			continue
		case err != nil:
			return err
		}
		l.node, l.seen, l.rest, l.settled = after, time.Now(), differences(set, after.Labels), wanted
		klog.FromContext(ctx).V(2).Info("Wrote the labels of the node", "labels", len(set), "left",
			slices.Sorted(maps.Keys(l.left)))
		return nil
	}
	return nil
}

// due returns what of the node's labels is to be written.
func (l *nodeLabeler) due() map[string]string {
	node, wanted := l.client.Nodes().Value(), l.daemon.Labels.Value()
	if node.UID == "" || wanted == nil {
		return nil
	}
	if node.UID != l.uid {
		l.uid, l.left, l.rest, l.settled = node.UID, map[string]left{}, nil, nil
	}
	l.see(node, time.Now())
	differs := differences(l.ours(wanted), l.node.Labels)
	if len(differs) == 0 || maps.Equal(differs, l.rest) {
		l.settled = wanted
		return nil
	}
	return differs
}

// A sighting is the newest node that is known, by the watch or as the answer to a write, and when
// it was that last.
type sighting struct {
	node kubeapi.Node
	seen time.Time
}

// see takes a node for the newest, unless a newer one was seen a short time ago. After that the
// cluster was restored from a backup.
func (s *sighting) see(node kubeapi.Node, now time.Time) {
	if !s.node.After(node) || now.Sub(s.seen) >= ownWrite {
		s.node, s.seen = node, now
	}
}

// takeIn takes in the answer to a write of the node, and returns its error. Where another program
// has changed the node before, the node is looked at for the next try.
func (s *sighting) takeIn(ctx context.Context, client *kubeapi.Client, after kubeapi.Node, err error,
	now time.Time) error {
	if kubeapi.IsOvertaken(err) {
		if node, unknown := client.Get(ctx); unknown == nil {
			s.see(node, now)
		}
	}
	if err == nil {
		s.node, s.seen = after, now
	}
	return err
}

// ours returns the wanted labels without those that others own. A label is theirs as long as it has
// the value that they gave it.
func (l *nodeLabeler) ours(wanted map[string]string) map[string]string {
	set := maps.Clone(wanted)
	for key, theirs := range l.left {
		if value, has := l.node.Labels[key]; has && value == theirs.value {
			delete(set, key)
		} else {
			delete(l.left, key)
		}
	}
	return set
}

// overtaken is how often a write is made anew because another program changed the node before.
const overtaken = 3

// lookAtNode looks at the node as it is now.
func (l *nodeLabeler) lookAtNode(ctx context.Context) error {
	node, err := l.client.Get(ctx)
	switch {
	case err != nil:
		return err
	case node.UID != l.uid:
		return errors.New("the node was deleted, and another one has its name")
	}
	l.see(node, time.Now())
	return nil
}

// leave leaves labels to their owners, and says so once.
func (l *nodeLabeler) leave(ctx context.Context, conflict *kubeapi.Conflict) error {
	if err := l.lookAtNode(ctx); err != nil {
		return err
	}
	found := false
	for key, owner := range conflict.Labels {
		value, has := l.node.Labels[key]
		if !has {
			continue
		}
		l.left[key], found = left{value, ownerIn(owner)}, true
		klog.FromContext(ctx).Info("A label of the node belongs to another program and stays as it is", "label", key, "value",
			value,
			"reason", owner)
	}
	if !found {
		return conflict // what the API server told is not what it tells now
	}
	return nil
}

// ownerIn returns the field manager that the API server names as the owner of a label: conflict
// with "NAME" using v1.
func ownerIn(text string) string {
	_, text, _ = strings.Cut(text, `"`)
	name, _, _ := strings.Cut(text, `"`)
	return name
}

// differences returns which labels are not as they are wanted, each with its value: those that are
// missing or have another value, and those that this program gives to nodes but not to this one.
func differences(wanted, now map[string]string) map[string]string {
	differ := map[string]string{}
	for key, value := range wanted {
		if is, has := now[key]; !has || is != value {
			differ[key] = fmt.Sprintf("%q, want %q, there %v", is, value, has)
		}
	}
	for key, value := range now {
		if _, has := wanted[key]; !has && labels.Owns(key) {
			differ[key] = fmt.Sprintf("%q, want none", value)
		}
	}
	return differ
}

// Times of the object for node-feature-discovery.
const (
	// reread is how often the object is read although nothing is known to have changed: another client
	// may have deleted it.
	reread = time.Hour
	// foreign is how often it is looked for the object of another program.
	foreign = 10 * time.Minute
)

// A featureLabeler keeps labels in an object for node-feature-discovery.
type featureLabeler struct {
	labeler
	again   *feed.Alarm
	due     time.Time         // when the object is to be read again
	written map[string]string // what it had then
	place   string            // its namespace
	owners  []kubeapi.OwnerReference
	owned   bool // owners are known
}

// labelFeature keeps the object until ctx ends, while the configuration wants that.
func (c *Cluster) labelFeature(ctx context.Context, d daemon.View) {
	l := &featureLabeler{labeler: labeler{client: c.client, daemon: d, spread: &c.spread}, again: new(feed.Alarm)}
	defer func() { _ = l.tell(nil) }()
	wake := func() []<-chan struct{} { return append(l.changes(), l.again.Rings()) }
	kubeapi.Keep(ctx, clock.RealClock{}, "NodeFeature", wake, func(ctx context.Context) error {
		if !l.on(config.LabelsNodeFeature) {
			return l.tell(nil)
		}
		if len(l.daemon.Configs.Value().NodeName) > maxLabelValue {
			if l.problem == nil {
				klog.FromContext(ctx).Error(errLongName, "Labels are not written")
			}
			_ = l.tell(errLongName) // told in status; trying again does not help
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

// errForeign is the problem of a node that another program labels.
var errForeign = errors.New("a NodeFeature of gpu-feature-discovery has labels of this node already: remove that program and the object")

// maxLabelValue is how long the value of a label may be, in bytes. NFD finds the node of an object
// by a label with its name.
const maxLabelValue = 63

// errLongName is the problem of a node whose name cannot be the value of a label.
var errLongName = fmt.Errorf("the name of the node has more than %d bytes, and NFD finds nodes by a label with their name: "+
	"have the labels written with features.labels: node, or file", maxLabelValue)

// step reads the object if that is due, and writes it if it is not as it is to be.
func (l *featureLabeler) step(ctx context.Context) error {
	wanted, configured, now := l.daemon.Labels.Value(), l.daemon.Configs.Value(), time.Now()
	place, prefix := configured.Namespace, kubeapi.NodeFeaturePrefix
	if wanted == nil {
		return nil
	}
	if wait := l.due.Sub(now); wait > 0 && maps.Equal(wanted, l.written) && place == l.place {
		l.again.After(ctx, wait)
		return nil
	}
	if l.spread.begin(ctx, l.client); ctx.Err() != nil {
		return ctx.Err()
	}
	if configured.Discovery.On {
		prefix = kubeapi.DiscoveryPrefix
	} else if found, err := l.isForeign(ctx, place); err != nil {
		return l.tell(err)
	} else if found {
		l.note(ctx, wanted, place, foreign)
		return nil
	}
	if err := l.findOwners(ctx, place); err != nil {
		return l.tell(err)
	}
	object, found, err := l.client.NodeFeature(ctx, place, prefix)
	if err != nil {
		return l.tell(err)
	}
	is := kubeapi.NodeFeature{Namespace: place, Name: object.Name, Labels: wanted, Owners: l.owners}
	if !found || !object.Equal(is) {
		if err := l.admit(ctx, false); err != nil {
			return l.tell(err)
		}
		if err := l.client.ApplyNodeFeature(ctx, place, prefix, wanted, l.owners); err != nil {
			return l.tell(err)
		}
	}
	l.note(ctx, wanted, place, reread)
	return l.tell(nil)
}

// note notes what the object has, until it is read again after a time.
func (l *featureLabeler) note(ctx context.Context, labels map[string]string, namespace string, again time.Duration) {
	l.due, l.written, l.place = time.Now().Add(again), labels, namespace
	l.again.After(ctx, again)
}

// isForeign reports whether another program has an object with labels for the node. It tells the
// daemon.
func (l *featureLabeler) isForeign(ctx context.Context, namespace string) (bool, error) {
	object, _, err := l.client.NodeFeature(ctx, namespace, kubeapi.DiscoveryPrefix)
	if err != nil || len(object.Labels) == 0 {
		return false, err
	}
	if l.problem == nil {
		klog.FromContext(ctx).Error(errForeign, "Labels are not written", "namespace", namespace, "name", object.Name)
	}
	_ = l.tell(errForeign) // looked at again soon, without an error
	return true, nil
}

// findOwners finds out once who owns this program's pod. Without a right to read the pod the object
// has no owner, and stays when the program is removed.
func (l *featureLabeler) findOwners(ctx context.Context, namespace string) error {
	pod := l.daemon.Config.PodName
	if l.owned || pod == "" {
		return nil
	}
	owners, err := l.client.PodOwners(ctx, namespace, pod)
	switch {
	case kubeapi.IsDenied(err):
		klog.FromContext(ctx).Info("Cannot read the own pod: the NodeFeature stays when this program is removed", "reason",
			err.Error())
	case err != nil:
		return err
	}
	l.owners, l.owned = owners, true
	return nil
}
