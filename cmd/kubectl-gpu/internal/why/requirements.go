package why

import (
	"context"
	"fmt"
	"iter"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// enoughWithout returns the first requirement without which a node has enough for the claims: a
// constraint, a selector, a capacity, a missing toleration, or a request; empty if there is no
// single such requirement.
func (a *allocation) enoughWithout(ctx context.Context, n *corev1.Node, claims []*resourceapi.ResourceClaim) string {
	for at, c := range claims {
		for what, less := range a.requirements(c) {
			some := slices.Clone(claims)
			if some[at] = less; len(less.Spec.Devices.Requests) == 0 {
				some = slices.Delete(some, at, at+1)
			}
			if len(some) == 0 {
				continue
			}
			if possible, err := a.possible(ctx, n, some); err == nil && possible {
				return what
			}
		}
	}
	return ""
}

// requirements yields a description of each requirement of a claim, and the claim without it.
func (a *allocation) requirements(c *resourceapi.ResourceClaim) iter.Seq2[string, *resourceapi.ResourceClaim] {
	return func(yield func(string, *resourceapi.ResourceClaim) bool) {
		less := func(what string, drop func(*resourceapi.DeviceClaim)) bool {
			without := c.DeepCopy()
			drop(&without.Spec.Devices)
			return yield(what, without)
		}
		for i, constraint := range c.Spec.Devices.Constraints {
			what := "a constraint"
			if constraint.MatchAttribute != nil {
				what = "the constraint matchAttribute " + string(*constraint.MatchAttribute)
			} else if constraint.DistinctAttribute != nil {
				what = "the constraint distinctAttribute " + string(*constraint.DistinctAttribute)
			}
			if !less(what+" of claim "+c.Name,
				func(d *resourceapi.DeviceClaim) { d.Constraints = slices.Delete(d.Constraints, i, i+1) }) {
				return
			}
		}
		for i, r := range c.Spec.Devices.Requests {
			if r.Exactly == nil {
				continue
			}
			request := a.requestText(c, r.Name)
			for j, selector := range r.Exactly.Selectors {
				what := fmt.Sprintf("selector %d", j+1)
				if selector.CEL != nil {
					what = fmt.Sprintf("the selector %q", selector.CEL.Expression)
				}
				if !less(what+" of "+request, func(d *resourceapi.DeviceClaim) {
					d.Requests[i].Exactly.Selectors = slices.Delete(d.Requests[i].Exactly.Selectors, j, j+1)
				}) {
					return
				}
			}
			whole := func(d *resourceapi.DeviceClaim) { d.Requests[i].Exactly.Capacity = nil }
			if r.Exactly.Capacity != nil && !less("the capacity of "+request, whole) {
				return
			}
			every := resourceapi.DeviceToleration{Operator: resourceapi.DeviceTolerationOpExists}
			if !less("the taints that "+request+" does not tolerate", func(d *resourceapi.DeviceClaim) {
				d.Requests[i].Exactly.Tolerations = append(d.Requests[i].Exactly.Tolerations, every)
			}) {
				return
			}
		}
		for i, r := range c.Spec.Devices.Requests {
			if !less(a.requestText(c, r.Name), func(d *resourceapi.DeviceClaim) {
				d.Constraints, d.Requests = nil, slices.Delete(d.Requests, i, i+1)
			}) {
				return
			}
		}
	}
}
