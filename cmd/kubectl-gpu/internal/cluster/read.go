package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
)

// pageSize is the number of objects in one page of a list.
const pageSize = 500

// Read reads the objects of nodes with GPUs from the API server; with names, only of these
// nodes. Facts.Missing has sentences about unreadable objects.
func (c *Client) Read(ctx context.Context, names ...string) view.Facts {
	names = slices.Compact(slices.Sorted(slices.Values(names))) // without duplicates
	return c.read(ctx, names, view.HasGPUs)
}

// read reads these nodes, and the wanted slices.
func (c *Client) read(ctx context.Context, names []string, wanted func(*resourceapi.ResourceSlice) bool) view.Facts {
	var f view.Facts
	var mu sync.Mutex // guards f
	var all sync.WaitGroup
	read := func(what string, list func() error) {
		all.Go(func() {
			if err := list(); err != nil && !isNotServed(err) {
				mu.Lock()
				defer mu.Unlock()
				f.Missing = append(f.Missing, missingText(what, err))
			}
		})
	}
	read("nodes", func() (err error) { f.Nodes, f.UnknownNodes, err = c.nodes(ctx, names); return err })
	read("pods", func() (err error) {
		f.Pods, err = c.pods(ctx, names)
		f.PodsUnknown = err != nil
		return err
	})
	read("ResourceSlices", func() (err error) { f.Slices, err = c.slices(ctx, names, wanted); return err })
	read("ResourceClaims", func() (err error) { f.Claims, err = c.claims(ctx); return err })
	all.Go(func() { c.daemonSets(ctx, &f.Deployment) })
	all.Wait()
	c.warnings(ctx, &f)
	slices.Sort(f.Missing)
	f.Missing = append(f.Missing, f.DisputedNodes(c.IsDaemon)...)
	return f
}

// isNotServed reports whether the API server does not serve a kind of objects. Then there are no
// such objects.
func isNotServed(err error) bool {
	return apierrors.IsNotFound(err) && (apierrors.ReasonForError(err) != metav1.StatusReasonNotFound ||
		strings.Contains(err.Error(), "the server could not find the requested resource"))
}

// missingText says that objects cannot be read.
func missingText(what string, err error) string {
	if apierrors.IsForbidden(err) {
		return what + " are not shown: you may not list them: " + err.Error()
	}
	return what + " are not shown: " + err.Error()
}

// listPages reads a list page by page, and returns the results of take. If the list expires, it is
// read again once, without pages.
func listPages[L interface{ GetContinue() string }, T any](
	ctx context.Context, o metav1.ListOptions, list func(context.Context, metav1.ListOptions) (L, error),
	take func(L) []T,
) (all []T, err error) {
	o.Limit = pageSize
	for {
		answer, err := list(ctx, o)
		if apierrors.IsResourceExpired(err) && o.Continue != "" {
			all, o.Continue, o.Limit = nil, "", 0
			continue
		}
		if err != nil {
			return all, err
		}
		all = append(all, take(answer)...)
		if o.Continue = answer.GetContinue(); o.Continue == "" {
			return all, nil
		}
	}
}

// nodes returns the named nodes, or all nodes, and the names that no node has.
func (c *Client) nodes(ctx context.Context, names []string) (all []corev1.Node, unknown []string, err error) {
	if len(names) == 0 {
		all, err = listPages(ctx, metav1.ListOptions{}, c.core.Nodes().List,
			func(l *corev1.NodeList) (nodes []corev1.Node) {
				for i := range l.Items {
					nodes = append(nodes, trimNode(&l.Items[i]))
				}
				return nodes
			})
		return all, nil, err
	}
	var failed []error
	for _, name := range names {
		node, err := c.core.Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			failed = append(failed, fmt.Errorf("node %s: %w", name, err))
			if apierrors.IsNotFound(err) {
				unknown = append(unknown, name)
			}
			continue
		}
		all = append(all, trimNode(node))
	}
	return all, unknown, errors.Join(failed...)
}

// trimNode returns a node without large unused parts, to save memory.
func trimNode(n *corev1.Node) corev1.Node {
	trimmed := corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Labels: n.Labels, ManagedFields: writersOfLabels(n)},
		Spec:       corev1.NodeSpec{Taints: n.Spec.Taints, Unschedulable: n.Spec.Unschedulable},
		Status: corev1.NodeStatus{
			Capacity: n.Status.Capacity, Allocatable: n.Status.Allocatable, RuntimeHandlers: n.Status.RuntimeHandlers,
		},
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == view.ConditionType || condition.Type == corev1.NodeReady {
			trimmed.Status.Conditions = append(trimmed.Status.Conditions, condition)
		}
	}
	return trimmed
}

// writersOfLabels returns the writers of GPU labels and their times, without the names of the
// fields.
func writersOfLabels(n *corev1.Node) (writers []metav1.ManagedFieldsEntry) {
	for _, m := range n.ManagedFields {
		if m.FieldsV1 != nil && bytes.Contains(m.FieldsV1.GetRawBytes(), []byte(`"f:nvidia.com/`)) &&
			m.Subresource == "" {
			writers = append(writers, metav1.ManagedFieldsEntry{Manager: m.Manager, Time: m.Time})
		}
	}
	return writers
}

// writers returns the writers of an object and their times, without the names of the fields.
func writers(all []metav1.ManagedFieldsEntry) (some []metav1.ManagedFieldsEntry) {
	for _, m := range all {
		some = append(some, metav1.ManagedFieldsEntry{Manager: m.Manager, Time: m.Time})
	}
	return some
}

// pods returns the pods with a possible relation to GPUs: pods that request extended
// resources or claims, and the daemon's pods.
func (c *Client) pods(ctx context.Context, names []string) (all []corev1.Pod, err error) {
	selectors := []string{""}
	if len(names) > 0 {
		selectors = nil
		for _, name := range names {
			selectors = append(selectors, "spec.nodeName="+name)
		}
	}
	for _, selector := range selectors {
		pods, err := listPages(ctx, metav1.ListOptions{FieldSelector: selector}, c.core.Pods(metav1.NamespaceAll).List,
			c.relevantPods)
		all = append(all, pods...)
		if apierrors.IsForbidden(err) && c.options.DaemonNamespace == "" {
			return c.daemonsOnly(ctx, selector, err)
		}
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// relevantPods returns the pods of a page that may be related to GPUs.
func (c *Client) relevantPods(l *corev1.PodList) (pods []corev1.Pod) {
	for i := range l.Items {
		if p := &l.Items[i]; c.IsDaemon(p) || view.MayAskForGPUs(p) {
			p.ManagedFields = nil
			pods = append(pods, *p.DeepCopy())
		}
	}
	return pods
}

// daemonsOnly returns the daemon's pods in the default namespace if the user may not list the pods
// of all namespaces, and the error.
func (c *Client) daemonsOnly(ctx context.Context, fields string, forbidden error) (all []corev1.Pod, err error) {
	l, err := c.core.Pods(defaultNamespace).List(ctx, metav1.ListOptions{FieldSelector: fields,
		LabelSelector: c.options.DaemonSelector})
	if err != nil {
		return nil, forbidden
	}
	for i := range l.Items {
		if c.IsDaemon(&l.Items[i]) {
			all = append(all, l.Items[i])
		}
	}
	return all, forbidden
}

// slices returns the wanted ResourceSlices of some nodes, or of all nodes.
func (c *Client) slices(
	ctx context.Context, names []string, wanted func(*resourceapi.ResourceSlice) bool,
) ([]resourceapi.ResourceSlice, error) {
	list := c.resource.ResourceSlices().List
	return listPages(ctx, metav1.ListOptions{}, list,
		func(l *resourceapi.ResourceSliceList) (some []resourceapi.ResourceSlice) {
			for i := range l.Items {
				s := &l.Items[i]
				if node := s.Spec.NodeName; wanted(s) &&
					(len(names) == 0 || node != nil && slices.Contains(names, *node)) {
					s.ManagedFields = writers(s.ManagedFields)
					some = append(some, *s.DeepCopy())
				}
			}
			return some
		})
}

// claims returns the ResourceClaims that have devices.
func (c *Client) claims(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	list := c.resource.ResourceClaims(metav1.NamespaceAll).List
	return listPages(ctx, metav1.ListOptions{}, list,
		func(l *resourceapi.ResourceClaimList) (some []resourceapi.ResourceClaim) {
			for i := range l.Items {
				if claim := &l.Items[i]; claim.Status.Allocation != nil {
					claim.ManagedFields = nil
					some = append(some, *claim.DeepCopy())
				}
			}
			return some
		})
}

// NodeNames returns the names of all nodes from their metadata.
func (c *Client) NodeNames(ctx context.Context) ([]string, error) {
	nodes, err := metadata.NewForConfig(c.config)
	if err != nil {
		return nil, err
	}
	list := nodes.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List
	return listPages(ctx, metav1.ListOptions{}, list, func(l *metav1.PartialObjectMetadataList) (names []string) {
		for i := range l.Items {
			names = append(names, l.Items[i].Name)
		}
		return names
	})
}
