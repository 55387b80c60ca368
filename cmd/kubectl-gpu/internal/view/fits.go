package view

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// ExcludedBy says what keeps a pod off a node regardless of free devices, with the remedy; empty if
// nothing does.
func ExcludedBy(n *corev1.Node, p *corev1.Pod) string {
	if n.Spec.Unschedulable {
		return "it is cordoned: kubectl uncordon " + n.Name
	}
	if t := untoleratedTaint(n, p.Spec.Tolerations); t != nil {
		return fmt.Sprintf("the pod does not tolerate its taint %s: add a toleration to the pod, or remove the taint",
			taintText(*t))
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err == nil && !fits {
		return "the pod does not select it: " + selectorMismatch(n, p)
	}
	return ""
}

// taintText returns a taint as kubectl writes it.
func taintText(t corev1.Taint) string {
	if t.Value == "" {
		return fmt.Sprintf("%s:%s", t.Key, t.Effect)
	}
	return fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect)
}

// untoleratedTaint returns the first taint of a node that keeps off pods with these tolerations;
// nil if there is none.
func untoleratedTaint(n *corev1.Node, tolerations []corev1.Toleration) *corev1.Taint {
	keepsAway := func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }
	t, is := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), n.Spec.Taints, tolerations, keepsAway, true)
	if !is {
		return nil
	}
	return &t
}

// maxTerms is the number of affinity terms in a sentence.
const maxTerms = 12

// selectorMismatch returns the labels required by the pod's nodeSelector or affinity, and
// the labels of the node.
func selectorMismatch(n *corev1.Node, p *corev1.Pod) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(p.Spec.NodeSelector)) {
		if value, is := n.Labels[key]; !is || value != p.Spec.NodeSelector[key] {
			parts = append(parts, fmt.Sprintf("its nodeSelector wants %s=%s, and the node has %s",
				key, p.Spec.NodeSelector[key], labelText(n, key)))
		}
	}
	if parts != nil {
		return strings.Join(parts, "; ")
	}
	terms := requiredTerms(p)
	if len(terms) == 0 {
		return "its affinity is empty, and selects no node"
	}
	var wants, instead []string
	for _, term := range terms {
		want, key := unmetRequirement(n, term)
		if want == "" {
			continue
		}
		wants = append(wants, want)
		if _, is := n.Labels[key]; is && !slices.Contains(instead, labelText(n, key)) {
			instead = append(instead, labelText(n, key))
		}
	}
	text := "its affinity wants " + strings.Join(wants[:min(len(wants), maxTerms)], ", or ")
	if more := len(wants) - maxTerms; more > 0 {
		text += fmt.Sprintf(", or one of %d more", more)
	}
	switch {
	case instead != nil:
		return text + ", and the node has " + strings.Join(instead, ", ")
	case len(wants) > 1:
		return text + ", and the node has none of these"
	}
	return text + ", and the node has no such label"
}

func requiredTerms(p *corev1.Pod) []corev1.NodeSelectorTerm {
	a := p.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

// unmetRequirement returns the first requirement of a term not met by a node, and its
// label; empty if the node meets all.
func unmetRequirement(n *corev1.Node, term corev1.NodeSelectorTerm) (want, key string) {
	for _, r := range term.MatchFields {
		if r.Key == "metadata.name" &&
			!matches(corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{r}}, n) {
			return "the node " + strings.Join(r.Values, " or "), ""
		}
	}
	for _, r := range term.MatchExpressions {
		if !matches(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{r}}, n) {
			return requirementText(r), r.Key
		}
	}
	if len(term.MatchFields)+len(term.MatchExpressions) == 0 {
		return "an empty term, which selects no node", ""
	}
	return "", ""
}

func matches(term corev1.NodeSelectorTerm, n *corev1.Node) bool {
	s, err := nodeaffinity.NewNodeSelector(&corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}})
	return err == nil && s.Match(n)
}

func requirementText(r corev1.NodeSelectorRequirement) string {
	switch {
	case r.Operator == corev1.NodeSelectorOpExists:
		return "the label " + r.Key
	case r.Operator == corev1.NodeSelectorOpDoesNotExist:
		return "no label " + r.Key
	case r.Operator == corev1.NodeSelectorOpIn && len(r.Values) == 1:
		return r.Key + "=" + r.Values[0]
	}
	words := map[corev1.NodeSelectorOperator]string{
		corev1.NodeSelectorOpIn: "in", corev1.NodeSelectorOpNotIn: "not in",
		corev1.NodeSelectorOpGt: "greater than", corev1.NodeSelectorOpLt: "less than",
	}
	return fmt.Sprintf("%s %s %s", r.Key, words[r.Operator], strings.Join(r.Values, ", "))
}

// labelText returns a label of a node and its value.
func labelText(n *corev1.Node, key string) string {
	if value, is := n.Labels[key]; is {
		return key + "=" + value
	}
	return "no such label"
}
