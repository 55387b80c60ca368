package cluster

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// maxWarnings is the number of objects whose Events are read to explain why a daemon does not run.
const maxWarnings = 5

// daemonSets reads the DaemonSets whose pods have the daemon's labels. They only explain why no
// daemon runs, so a failure adds no sentence to the output.
func (c *Client) daemonSets(ctx context.Context, d *view.Deployment) {
	d.Selector = c.options.DaemonSelector
	take := func(l *appsv1.DaemonSetList) (some []appsv1.DaemonSet) {
		for i := range l.Items {
			if set := &l.Items[i]; c.selector.Matches(labels.Set(set.Spec.Template.Labels)) {
				set.ManagedFields = nil
				some = append(some, *set.DeepCopy())
			}
		}
		return some
	}
	var err error
	d.Sets, err = listPages(ctx, metav1.ListOptions{}, c.apps.DaemonSets(c.options.DaemonNamespace).List, take)
	if apierrors.IsForbidden(err) && c.options.DaemonNamespace == "" {
		d.Sets, err = listPages(ctx, metav1.ListOptions{}, c.apps.DaemonSets(defaultNamespace).List, take)
		if err == nil && len(d.Sets) == 0 {
			err = fmt.Errorf("you may not list DaemonSets of all namespaces, and %s has none of it", defaultNamespace)
		}
	}
	switch {
	case apierrors.IsForbidden(err):
		d.Problem = "you may not list DaemonSets"
	case err != nil:
		d.Problem = "DaemonSets cannot be listed: " + err.Error()
	}
}

// warnings reads Events about the daemon's pods and DaemonSets whose own status does not explain
// why they do not run.
func (c *Client) warnings(ctx context.Context, f *view.Facts) {
	pods, sets := f.NotRunning(c.IsDaemon)
	f.Warnings = map[string]string{}
	note := func(kind, namespace, name string) {
		if len(f.Warnings) >= maxWarnings {
			return
		}
		events, err := c.events(ctx, namespace, name)
		if err != nil {
			return
		}
		f.Warnings[kind+" "+namespace+"/"+name] = ""
		for _, e := range view.Newest(events) {
			if e.Type == corev1.EventTypeWarning && e.Regarding.Kind == kind {
				f.Warnings[kind+" "+namespace+"/"+name] = e.Note
				return
			}
		}
	}
	for _, set := range sets {
		note("DaemonSet", set.Namespace, set.Name)
	}
	for _, p := range pods {
		note("Pod", p.Namespace, p.Name)
	}
}
