package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
)

// SlotNamespace returns the namespace of the slots: the given one, or else that of the daemon's
// DaemonSets.
func (c *Client) SlotNamespace(ctx context.Context, given string) (string, error) {
	if given != "" {
		return given, nil
	}
	if c.options.DaemonNamespace != "" {
		return c.options.DaemonNamespace, nil
	}
	var d view.Deployment
	c.daemonSets(ctx, &d)
	var namespaces []string
	for _, set := range d.Sets {
		if !slices.Contains(namespaces, set.Namespace) {
			namespaces = append(namespaces, set.Namespace)
		}
	}
	switch {
	case len(namespaces) == 1:
		return namespaces[0], nil
	case d.Problem != "":
		return "", fmt.Errorf("the namespace of the slots is not known, because %s: give it with --namespace",
			d.Problem)
	case len(namespaces) == 0:
		return "", fmt.Errorf("no DaemonSet has pods with the labels %s: give the namespace of the slots with "+
			"--namespace", c.options.DaemonSelector)
	}
	return "", fmt.Errorf("the daemon runs in the namespaces %s: give that of the slots with --namespace",
		strings.Join(namespaces, ", "))
}

// Rollout returns the state of the changes of the cluster.
func (c *Client) Rollout(ctx context.Context, namespace string, now metav1.Time) (view.Rollout, error) {
	leases, err := c.leases(ctx, namespace)
	if err != nil {
		return view.Rollout{}, err
	}
	nodes := map[string]types.UID{}
	for _, l := range leases {
		if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
			continue
		}
		node, err := c.core.Nodes().Get(ctx, *l.Spec.HolderIdentity, metav1.GetOptions{})
		switch {
		case err == nil:
			nodes[node.Name] = node.UID
		case !apierrors.IsNotFound(err):
			return view.Rollout{}, fmt.Errorf("read node %s: %w", *l.Spec.HolderIdentity, err)
		}
	}
	unfinished, err := listPages(ctx, metav1.ListOptions{LabelSelector: view.UnfinishedNodes}, c.core.Nodes().List,
		func(l *corev1.NodeList) (names []string) {
			for i := range l.Items {
				names = append(names, l.Items[i].Name)
			}
			return names
		})
	if err != nil {
		return view.Rollout{}, fmt.Errorf("read the nodes: %w", err)
	}
	return view.NewRollout(leases, nodes, unfinished, now.Time), nil
}

func (c *Client) leases(ctx context.Context, namespace string) ([]coordinationv1.Lease, error) {
	list, err := c.coordination.Leases(namespace).List(ctx, metav1.ListOptions{LabelSelector: view.SlotLabel})
	if err != nil {
		return nil, fmt.Errorf("read the slots in namespace %s: %w", namespace, err)
	}
	return list.Items, nil
}

// PauseRollout keeps all nodes from taking slots. It returns false if they were kept already.
func (c *Client) PauseRollout(ctx context.Context, namespace, reason string) (bool, error) {
	_, err := c.coordination.Leases(namespace).Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: slots.Paused, Labels: map[string]string{view.SlotLabel: "true"},
		Annotations: map[string]string{view.ReasonAnnotation: reason},
	}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("pause: %w", err)
	}
	return true, nil
}

// ResumeRollout lets nodes take slots again. It returns false if they might.
func (c *Client) ResumeRollout(ctx context.Context, namespace string) (bool, error) {
	err := c.coordination.Leases(namespace).Delete(ctx, slots.Paused, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("resume: %w", err)
	}
	return true, nil
}

// FreeSlot deletes the slot, so that another node gets it and the node tries again. It does so only
// if the slot still belongs to the node.
func (c *Client) FreeSlot(ctx context.Context, namespace string, s view.Slot) error {
	lease, err := c.coordination.Leases(namespace).Get(ctx, s.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil &&
		(lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != s.Node) {
		return nil // the node gave it back
	}
	if err == nil {
		err = c.coordination.Leases(namespace).Delete(ctx, s.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &lease.UID},
		})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("free slot %s: %w", s.Name, err)
	}
	return nil
}
