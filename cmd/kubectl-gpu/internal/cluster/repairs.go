package cluster

import (
	"context"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

// Repairs returns the repairs of the GPUs of the cluster.
func (c *Client) Repairs(ctx context.Context, namespace string) (view.Repairs, error) {
	list, err := c.coordination.Leases(namespace).List(ctx, metav1.ListOptions{LabelSelector: view.RepairLabel})
	if err != nil {
		return view.Repairs{}, fmt.Errorf("read the repairs in namespace %s: %w", namespace, err)
	}
	return view.NewRepairs(list.Items), nil
}

// ResumeRepairs lets nodes repair GPUs again. Nodes that asked before now do not count any more. It
// returns false if the repairs were not stopped.
func (c *Client) ResumeRepairs(ctx context.Context, namespace string, now metav1.Time) (bool, error) {
	leases := c.coordination.Leases(namespace)
	if _, err := leases.Get(ctx, repair.Stopped, metav1.GetOptions{}); apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("resume: %w", err)
	}
	// Before the stop ends, or a node could stop the repairs again for the same reason.
	if err := leases.Delete(ctx, repair.Resumed, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("resume: %w", err)
	}
	at := metav1.NewMicroTime(now.Time)
	_, err := leases.Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: repair.Resumed, Labels: map[string]string{view.RepairLabel: "true"}},
		Spec:       coordinationv1.LeaseSpec{RenewTime: &at},
	}, metav1.CreateOptions{})
	if err == nil {
		err = leases.Delete(ctx, repair.Stopped, metav1.DeleteOptions{})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return false, fmt.Errorf("resume: %w", err)
	}
	return true, nil
}
