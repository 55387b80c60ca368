package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

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
	pace   keeper.Pace
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
		_, configChanged := d.Configs.Latest()
		_, labelsChanged := d.Labels.Latest()
		return []<-chan struct{}{configChanged, labelsChanged, l.alarm.Rings()}
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
func (c *Cluster) LabelOnce(ctx context.Context, configured config.Startup, set map[string]string) error {
	l := &featureLabeler{client: c.client, daemon: daemon.View{ConfigView: daemon.ConfigView{Startup: configured}}}
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
var errLongName = fmt.Errorf("the name of the node has more than %d bytes, and NFD finds nodes by a label with their "+
	"name: set features.labels to node or file", maxLabelValue)

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
	if l.pace.IsFirst() {
		if err := l.spread.awaitWrite(ctx, l.client); err != nil {
			return err
		}
	}
	if err := wait(ctx, time.Until(l.pace.Due(time.Now(), false))); err != nil {
		return err
	}
	l.pace.Record(time.Now())
	return nil
}

// remember stores the content of the object, and sets the time of the next read.
func (l *featureLabeler) remember(ctx context.Context, labels map[string]string, namespace string,
	after time.Duration) {
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
		klog.FromContext(ctx).Error(errForeignFeature, "Labels are not written", "namespace", namespace, "name",
			object.Name)
	}
	_ = l.report(errForeignFeature) // checked again soon, without an error
	return true, nil
}

// findOwners finds the owners of this program's pod once. Without the right to read the pod, the
// object has no owner, and stays after the program is uninstalled.
func (l *featureLabeler) findOwners(ctx context.Context, namespace string) error {
	pod := l.daemon.Startup.PodName
	if l.ownersKnown || pod == "" {
		return nil
	}
	owners, err := l.client.PodOwners(ctx, namespace, pod)
	switch {
	case kubeapi.IsInaccessible(err):
		klog.FromContext(ctx).Info("Cannot read the daemon's own pod: the NodeFeature stays after an uninstallation",
			"reason",
			err.Error())
	case err != nil:
		return err
	}
	l.owners, l.ownersKnown = owners, true
	return nil
}
