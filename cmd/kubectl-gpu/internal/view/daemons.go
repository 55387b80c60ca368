package view

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Deployment has the daemon's DaemonSets.
type Deployment struct {
	// Sets are the DaemonSets whose pods have the daemon's labels. Problem says why they are unknown;
	// empty if they are known.
	Sets    []appsv1.DaemonSet
	Problem string
	// Selector is the selector of these labels.
	Selector string
	// PodsUnknown says that pods could not be listed.
	PodsUnknown bool
	// Warnings are the notes of the newest warning Events, by "KIND NAMESPACE/NAME" of the object.
	Warnings map[string]string
}

// Program is the name of the daemon's container.
const Program = "gpu-device-plugin"

// Runs reports whether a daemon's pod can be asked: the daemon's container runs, regardless of the
// others.
func Runs(p *corev1.Pod) bool {
	program := Program
	if !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Name == Program }) &&
		len(p.Spec.Containers) > 0 {
		program = p.Spec.Containers[0].Name
	}
	return p.Status.Phase == corev1.PodRunning && !slices.ContainsFunc(p.Status.ContainerStatuses,
		func(c corev1.ContainerStatus) bool {
			return c.Name == program && (c.State.Waiting != nil || c.State.Terminated != nil)
		})
}

// Daemons returns the running daemon's pod of each node: the youngest ready pod of several. A node
// has none if pods of two namespaces have the daemon's labels, because anybody can create a
// DaemonSet with these labels.
func (f Facts) Daemons(isDaemon func(*corev1.Pod) bool) map[string]*corev1.Pod {
	daemons, _ := f.daemons(isDaemon)
	return daemons
}

// DisputedNodes returns a sentence for each node on which pods of two namespaces have the daemon's
// labels.
func (f Facts) DisputedNodes(isDaemon func(*corev1.Pod) bool) (sentences []string) {
	_, disputed := f.daemons(isDaemon)
	for _, node := range slices.Sorted(maps.Keys(disputed)) {
		sentences = append(sentences, fmt.Sprintf("the daemon of node %s is not asked: pods of two namespaces have "+
			"its labels: set --daemon-namespace", node))
	}
	return sentences
}

// daemons returns the daemon's pod of each node, and the nodes on which pods of two namespaces have
// its labels.
func (f Facts) daemons(isDaemon func(*corev1.Pod) bool) (daemons map[string]*corev1.Pod, disputed map[string]bool) {
	daemons, disputed = map[string]*corev1.Pod{}, map[string]bool{}
	for i := range f.Pods {
		p := &f.Pods[i]
		if !isDaemon(p) || p.Spec.NodeName == "" || !Runs(p) {
			continue
		}
		other := daemons[p.Spec.NodeName]
		if other != nil && other.Namespace != p.Namespace {
			disputed[p.Spec.NodeName] = true
		}
		if other == nil || better(p, other) {
			daemons[p.Spec.NodeName] = p
		}
	}
	maps.DeleteFunc(daemons, func(node string, _ *corev1.Pod) bool { return disputed[node] })
	return daemons, disputed
}

func better(p, other *corev1.Pod) bool {
	if ready(p).IsZero() != ready(other).IsZero() {
		return !ready(p).IsZero()
	}
	return other.CreationTimestamp.Before(&p.CreationTimestamp)
}

// ready returns the time when a pod became ready; zero if it is not.
func ready(p *corev1.Pod) time.Time {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// Absent says why no daemon runs on each of the nodes, by node. Nodes with a daemon or an unknown
// reason have no entry.
func (f Facts) Absent(
	names []string, daemons map[string]*corev1.Pod, isDaemon func(*corev1.Pod) bool, now time.Time,
) map[string]string {
	reasons := map[string]string{}
	if f.PodsUnknown {
		return reasons
	}
	_, disputed := f.daemons(isDaemon)
	nodes, pods := f.nodesByName(), f.daemonPods(isDaemon)
	for _, name := range names {
		if daemons[name] == nil && !disputed[name] && nodes[name] != nil {
			reasons[name] = f.absence(nodes[name], pods[name], now)
		}
	}
	return reasons
}

// AbsenceSentences returns sentences about nodes without a daemon, one for each reason. With whole,
// the nodes are all nodes of the cluster.
func (f Facts) AbsenceSentences(absent map[string]string, daemons map[string]*corev1.Pod,
	whole bool) (sentences []string) {
	if f.PodsUnknown {
		return nil
	}
	none := whole && len(daemons) == 0
	if none && (len(absent) == 0 || len(f.Sets) == 0) {
		return []string{"No daemon runs in the cluster: " + f.clusterAbsence() + "."}
	}
	byReason := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(absent)) {
		byReason[absent[name]] = append(byReason[absent[name]], name)
	}
	begin := "No daemon runs on node "
	if none {
		begin = "No daemon runs in the cluster, thus none on node "
	}
	reasons := slices.SortedFunc(maps.Keys(byReason), func(a, b string) int {
		return cmp.Or(len(byReason[b])-len(byReason[a]), strings.Compare(a, b))
	})
	more := 0
	for i, reason := range reasons {
		if i >= maxReasons {
			more += len(byReason[reason])
			continue
		}
		sentences = append(sentences, begin+inventory.Few(byReason[reason])+": "+strings.TrimSuffix(reason, ".")+".")
	}
	if more > 0 {
		sentences = append(sentences, fmt.Sprintf("No daemon runs on %d more nodes, for other reasons; run the "+
			"command with their names to see why.",
			more))
	}
	return sentences
}

// maxReasons is the number of reasons in the output, those of most nodes.
const maxReasons = 10

// Absence says why no daemon runs on a node, without a full stop.
func (f Facts) Absence(name string, isDaemon func(*corev1.Pod) bool, now time.Time) string {
	_, disputed := f.daemons(isDaemon)
	node := f.nodesByName()[name]
	switch {
	case disputed[name]:
		return "pods of two namespaces have the daemon's labels: set --daemon-namespace"
	case node == nil:
		return "the node is not known"
	}
	return f.absence(node, f.daemonPods(isDaemon)[name], now)
}

func (f Facts) nodesByName() map[string]*corev1.Node {
	nodes := map[string]*corev1.Node{}
	for i := range f.Nodes {
		nodes[f.Nodes[i].Name] = &f.Nodes[i]
	}
	return nodes
}

// daemonPods returns the daemon's pods by their present or future node.
func (f Facts) daemonPods(isDaemon func(*corev1.Pod) bool) map[string][]*corev1.Pod {
	pods := map[string][]*corev1.Pod{}
	for i := range f.Pods {
		if p := &f.Pods[i]; isDaemon(p) {
			pods[nodeOf(p)] = append(pods[nodeOf(p)], p)
		}
	}
	return pods
}

// nodeOf returns the node of a DaemonSet's pod: before the scheduler binds the pod, its affinity
// has the node.
func nodeOf(p *corev1.Pod) string {
	if p.Spec.NodeName != "" {
		return p.Spec.NodeName
	}
	for _, term := range requiredTerms(p) {
		for _, r := range term.MatchFields {
			if r.Key == metav1.ObjectNameField && len(r.Values) == 1 {
				return r.Values[0]
			}
		}
	}
	return ""
}

// NotRunning returns the daemon's pods that do not run and whose status has no reason, and the
// DaemonSets with missing pods. Events about them may have the reason.
func (f Facts) NotRunning(isDaemon func(*corev1.Pod) bool) (pods []*corev1.Pod, sets []*appsv1.DaemonSet) {
	for i := range f.Pods {
		if p := &f.Pods[i]; isDaemon(p) && !Runs(p) && FirstTrouble(p) == nil && p.Spec.NodeName != "" {
			pods = append(pods, p)
		}
	}
	for i := range f.Sets {
		if s := &f.Sets[i]; s.Status.CurrentNumberScheduled < s.Status.DesiredNumberScheduled {
			sets = append(sets, s)
		}
	}
	return pods, sets
}

func (f Facts) absence(n *corev1.Node, pods []*corev1.Pod, now time.Time) string {
	var pod *corev1.Pod // the youngest pod that may still start
	for _, p := range pods {
		younger := pod != nil && IsOver(pod) == IsOver(p) && pod.CreationTimestamp.Before(&p.CreationTimestamp)
		if !Runs(p) && (pod == nil || IsOver(pod) && !IsOver(p) || younger) {
			pod = p
		}
	}
	if pod != nil {
		return f.podText(pod, now)
	}
	if len(f.Sets) == 0 {
		return f.clusterAbsence()
	}
	reason := ""
	for i := range f.Sets {
		set := &f.Sets[i]
		name := "DaemonSet " + set.Namespace + "/" + set.Name
		template := &corev1.Pod{Spec: set.Spec.Template.Spec}
		alone := *n // without taints and states ignored by DaemonSet pods
		alone.Spec.Unschedulable, alone.Spec.Taints = false, nil
		if text := ExcludedBy(&alone, template); text != "" {
			reason = fmt.Sprintf("%s does not select it: %s%s",
				name, selectorMismatch(&alone, template), labelRemedy(template))
			continue
		}
		tolerations := slices.Concat(template.Spec.Tolerations, daemonSetTolerations)
		if t := untoleratedTaint(n, tolerations); t != nil {
			return fmt.Sprintf("%s does not tolerate its taint %s: add a toleration to the DaemonSet, or remove the "+
				"taint", name, taintText(*t))
		}
		if note := f.Warnings["DaemonSet "+set.Namespace+"/"+set.Name]; note != "" {
			return fmt.Sprintf("%s cannot make its pod: %s", name, strings.TrimSuffix(note, "."))
		}
		return fmt.Sprintf("%s selects it and has no pod there: see kubectl describe daemonset -n %s %s",
			name, set.Namespace, set.Name)
	}
	return reason
}

// daemonSetTolerations are the tolerations that the controller adds to the pods of each DaemonSet.
var daemonSetTolerations = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists},
	{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists},
	{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists},
	{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists},
	{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists},
}

// clusterAbsence says why no daemon runs in the cluster.
func (f Facts) clusterAbsence() string {
	switch {
	case f.Problem != "":
		return "no pod has the labels " + f.Selector + ", and why is not known: " + f.Problem
	case len(f.Sets) == 0:
		return "there is no DaemonSet whose pods have the labels " + f.Selector +
			": install it, or set --daemon-selector and --daemon-namespace if they differ"
	}
	var parts []string
	for i := range f.Sets {
		set := &f.Sets[i]
		text := fmt.Sprintf("DaemonSet %s/%s wants a pod on %d of %d nodes", set.Namespace, set.Name,
			set.Status.DesiredNumberScheduled, len(f.Nodes))
		template := &corev1.Pod{Spec: set.Spec.Template.Spec}
		if wants := wantedLabels(template); wants != "" {
			text += ": it selects nodes with " + wants + labelRemedy(template)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// wantedLabels returns the node labels that a pod requires; empty if none.
func wantedLabels(p *corev1.Pod) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(p.Spec.NodeSelector)) {
		all = append(all, key+"="+p.Spec.NodeSelector[key])
	}
	var terms []string
	for _, term := range requiredTerms(p) {
		var parts []string
		for _, r := range term.MatchExpressions {
			parts = append(parts, requirementText(r))
		}
		if parts != nil {
			terms = append(terms, strings.Join(parts, " and "))
		}
	}
	if terms != nil {
		all = append(all, strings.Join(terms, ", or "))
	}
	return strings.Join(all, " and ")
}

// labelRemedy returns the command that makes a DaemonSet select a node, if one label is enough.
func labelRemedy(p *corev1.Pod) string {
	var labels []string
	for _, key := range slices.Sorted(maps.Keys(p.Spec.NodeSelector)) {
		labels = append(labels, key+"="+p.Spec.NodeSelector[key])
	}
	for _, term := range requiredTerms(p) {
		e := term.MatchExpressions
		// NVIDIA's labels may be set by users; node-feature-discovery and cloud providers set their own
		// labels.
		if len(term.MatchFields) == 0 && len(e) == 1 && e[0].Operator == corev1.NodeSelectorOpIn &&
			len(e[0].Values) > 0 &&
			strings.HasPrefix(e[0].Key, nvidiaPrefix) {
			labels = append(labels, e[0].Key+"="+e[0].Values[0])
			break
		}
	}
	if labels == nil {
		return ""
	}
	return "; if it has NVIDIA GPUs: kubectl label node NODE " + strings.Join(labels, " ")
}

// podText says why a pod of the daemon does not run.
func (f Facts) podText(p *corev1.Pod, now time.Time) string {
	name := "its pod " + p.Namespace + "/" + p.Name
	if t := FirstTrouble(p); t != nil {
		return fmt.Sprintf("container %s of %s %s", t.Container, name, t.Text("", now))
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return fmt.Sprintf("%s is not scheduled: %s", name, strings.TrimSuffix(c.Message, "."))
		}
	}
	if note := f.Warnings["Pod "+p.Namespace+"/"+p.Name]; note != "" {
		return fmt.Sprintf("%s is %s: %s", name, p.Status.Phase, strings.TrimSuffix(note, "."))
	}
	if p.Status.Message != "" {
		return fmt.Sprintf("%s is %s (%s): %s",
			name, p.Status.Phase, p.Status.Reason, strings.TrimSuffix(p.Status.Message, "."))
	}
	return fmt.Sprintf("%s, created%s, is %s, and its containers are being created", name,
		cmp.Or(Ago(" ", p.CreationTimestamp.Time, now), " at a time that is not known"), p.Status.Phase)
}
