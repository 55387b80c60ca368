package why

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// explainUnscheduled explains a pod that is not scheduled.
func explainUnscheduled(ctx context.Context, o Objects) string {
	if gates := o.Pod.Spec.SchedulingGates; len(gates) > 0 {
		var names []string
		for _, g := range gates {
			names = append(names, g.Name)
		}
		if len(names) == 1 {
			return fmt.Sprintf("It is not scheduled before its gate %s is removed%s.", names[0], gatekeeper(names[0]))
		}
		return fmt.Sprintf("It is not scheduled before its gates %s are removed%s.",
			strings.Join(names, ", "), gatekeeper(names[0]))
	}
	for _, name := range slices.Sorted(maps.Keys(o.Own)) {
		if o.Own[name] == nil {
			return fmt.Sprintf("Its claim %s does not exist: create the ResourceClaim, or the ResourceClaimTemplate "+
				"of that name.",
				name)
		}
	}
	s := newSearch(o)
	if text := s.explain(ctx); text != "" {
		return text
	}
	for _, c := range o.Pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			text := "There are GPUs for it, and the scheduler says" +
				view.Ago(", ", c.LastTransitionTime.Time, o.Now) + ": " +
				strings.TrimSuffix(c.Message, ".") + "."
			if o.Pod.Status.NominatedNodeName != "" {
				text += fmt.Sprintf(" It waits for pods on node %s that are ended for it.",
					o.Pod.Status.NominatedNodeName)
			}
			return text
		}
	}
	if group := o.Pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		return fmt.Sprintf("There are GPUs for it, and it is scheduled together with the other pods of its PodGroup "+
			"%s: see kubectl describe podgroup -n %s %s.", *group.PodGroupName, o.Pod.Namespace, *group.PodGroupName)
	}
	if name := o.Pod.Spec.SchedulerName; name != "" && name != corev1.DefaultSchedulerName {
		return fmt.Sprintf("There are GPUs for it, and its scheduler %s has not processed it yet: check whether that "+
			"scheduler runs.",
			name)
	}
	return "There are GPUs for it, and the scheduler has not processed it yet."
}

// gatekeeper says who removes a scheduling gate, if its name is known.
func gatekeeper(gate string) string {
	if strings.HasPrefix(gate, "kueue.x-k8s.io/") {
		return ": Kueue does so when its Workload is admitted (kubectl get workloads)"
	}
	return ""
}

// A search looks for a node with everything requested by a pod.
type search struct {
	o         Objects
	names     []corev1.ResourceName // sorted names of the explained resources
	want      map[corev1.ResourceName]int64
	allocated map[string]map[corev1.ResourceName]int64 // by node
	claims    []*resourceapi.ResourceClaim             // without an allocation
	extended  map[string]*resourceapi.ResourceClaim    // claims created by the scheduler, by the resources
	maximum   map[corev1.ResourceName]int64            // maximum on one node
	a         *allocation
}

func newSearch(o Objects) *search {
	s := &search{o: o, want: o.wantedDevices(), allocated: map[string]map[corev1.ResourceName]int64{},
		extended: map[string]*resourceapi.ResourceClaim{},
		maximum:  map[corev1.ResourceName]int64{}}
	s.names = slices.Sorted(maps.Keys(s.want))
	for _, name := range slices.Sorted(maps.Keys(o.Own)) {
		if c := o.Own[name]; c.Status.Allocation == nil {
			s.claims = append(s.claims, c)
		}
	}
	for i := range o.Pods {
		p := &o.Pods[i]
		if p.Spec.NodeName == "" || view.IsOver(p) {
			continue
		}
		if s.allocated[p.Spec.NodeName] == nil {
			s.allocated[p.Spec.NodeName] = map[corev1.ResourceName]int64{}
		}
		for name, n := range view.FromPlugins(p) {
			s.allocated[p.Spec.NodeName][name] += n
		}
	}
	s.a = newAllocation(o)
	return s
}

// explain says why no node has what the pod requests; empty if a node has.
func (s *search) explain(ctx context.Context) string {
	if len(s.names)+len(s.claims) == 0 {
		return ""
	}
	var best *verdict
	for i := range s.o.Nodes {
		v, err := s.verdictOf(ctx, &s.o.Nodes[i])
		switch {
		case err != nil:
			return fmt.Sprintf("The scheduler cannot use its claims: %s.", strings.TrimSuffix(err.Error(), "."))
		case v == nil:
			continue
		case v.enough() && v.excluded == "":
			return ""
		}
		if best == nil || v.isNearer(best) {
			best = v
		}
	}
	if best == nil {
		return s.noNode(ctx)
	}
	return s.sentence(ctx, best)
}

// A verdict is a node's offer for the pod, and why the offer is not enough.
type verdict struct {
	node     *corev1.Node
	excluded string // why the pod cannot run there, whatever is free
	counts   []count
	claims   []*resourceapi.ResourceClaim
	offer    *offer // for the claims; nil without claims
}

// A count is what a node has of a resource.
type count struct {
	resource                    corev1.ResourceName
	wanted, capacity, ill, free int64
}

func (v *verdict) enough() bool {
	return len(v.shortages()) == 0 && (v.offer == nil || v.offer.possible)
}

// shortages returns the resources of which the node has too little free.
func (v *verdict) shortages() (some []count) {
	for _, c := range v.counts {
		if c.free < c.wanted {
			some = append(some, c)
		}
	}
	return some
}

// isNearer reports whether a node is closer to the request than another: nodes that can be repaired
// or tolerated first, then the node with the most free devices.
func (v *verdict) isNearer(than *verdict) bool {
	if v.enough() != than.enough() {
		return v.enough()
	}
	if a, b := v.shortageCount(), than.shortageCount(); a != b {
		return a < b
	}
	if (v.excluded == "") != (than.excluded == "") {
		return v.excluded == ""
	}
	return v.free() > than.free()
}

// shortageCount returns the number of resources and requests for which the node has too little.
func (v *verdict) shortageCount() int {
	n := len(v.shortages())
	if v.offer != nil {
		n += v.offer.requests
	}
	return n
}

func (v *verdict) free() (n int64) {
	for _, c := range v.counts {
		n += c.free
	}
	if v.offer != nil {
		n += int64(v.offer.devices)
	}
	return n
}

// verdictOf examines a node; nil if the node has nothing of the request. Like the
// scheduler, verdictOf takes a resource from claims if the node's device plugin does not
// have the resource and a DeviceClass names the resource.
func (s *search) verdictOf(ctx context.Context, n *corev1.Node) (*verdict, error) {
	v := &verdict{node: n, excluded: view.ExcludedBy(n, s.o.Pod)}
	var byClaims []corev1.ResourceName
	for _, name := range s.names {
		all, good := n.Status.Capacity[name], n.Status.Allocatable[name]
		switch {
		case good.IsZero() && view.ClassOf(name, s.o.Classes) != nil && (all.IsZero() || len(s.a.onNode[n.Name]) > 0):
			byClaims = append(byClaims, name)
		case all.IsZero():
			return nil, nil
		default:
			s.maximum[name] = max(s.maximum[name], all.Value())
			v.counts = append(v.counts, count{
				resource: name, wanted: s.want[name], capacity: all.Value(), ill: all.Value() - good.Value(),
				free: max(0, good.Value()-s.allocated[n.Name][name]),
			})
		}
	}
	v.claims = s.claims
	if made := s.claimFor(byClaims); made != nil {
		v.claims = append(slices.Clone(s.claims), made)
	}
	if len(v.claims) == 0 {
		return v, nil
	}
	if len(s.a.onNode[n.Name]) == 0 {
		return nil, nil
	}
	of, err := s.a.offerOf(ctx, n, v.claims)
	v.offer = &of
	return v, err
}

// sentence explains the nearest node.
func (s *search) sentence(ctx context.Context, v *verdict) string {
	name := v.node.Name
	if v.enough() {
		if v.offer == nil {
			c := v.counts[0]
			return fmt.Sprintf("Node %s has %d %s free, and %s.", name, c.free, c.resource, v.excluded)
		}
		return fmt.Sprintf("Node %s has devices for its claims, and %s.", name, v.excluded)
	}
	var parts []string
	for _, c := range v.shortages() {
		parts = append(parts, s.tooFew(ctx, v, c))
	}
	if v.offer != nil && !v.offer.possible {
		text := s.a.reason(ctx, *v.offer, v.claims)
		if v.excluded != "" && len(parts) == 0 {
			text = strings.TrimSuffix(text, ".") + "; and " + v.excluded + "."
		}
		parts = append(parts, s.byClaims(v)+text+s.unpublished(ctx, name))
	}
	return strings.Join(parts, " ")
}

// unpublished names the GPUs of a node that claims own and that are in no ResourceSlice, because the
// API server drops a part of them. It is empty if the node's daemon does not say.
func (s *search) unpublished(ctx context.Context, node string) (text string) {
	d := s.o.ask(ctx, node)
	if d.Status == nil || d.Status.DRA == nil {
		return ""
	}
	for _, g := range d.Status.DRA.GPUs {
		if g.Unpublished != "" {
			text += fmt.Sprintf(" GPU %d of node %s is in no ResourceSlice: %s.", g.Index, node, g.Unpublished)
		}
	}
	return text
}

// byClaims lists the resources of the pod provided by claims on a node, with their
// classes.
func (s *search) byClaims(v *verdict) string {
	var texts []string
	for _, name := range s.names {
		plugged := slices.ContainsFunc(v.counts, func(c count) bool { return c.resource == name })
		if class := view.ClassOf(name, s.o.Classes); class != nil && !plugged {
			texts = append(texts, fmt.Sprintf("%s is provided by claims of the class %s", name, class.Name))
		}
	}
	if texts == nil {
		return ""
	}
	return strings.Join(texts, ", and ") + ". "
}

// tooFew explains a resource of which the nearest node has too few free.
func (s *search) tooFew(ctx context.Context, v *verdict, c count) string {
	ill, reason := c.ill, ""
	if c.ill > 0 {
		var departed int64
		if reason, departed = s.notAllocatable(ctx, v.node, c.resource); departed > 0 {
			departed = min(departed, c.ill)
			c.capacity, ill = c.capacity-departed, c.ill-departed
		}
	}
	text := fmt.Sprintf("No node has %d %s free; nearest is node %s with %d of %d",
		c.wanted, c.resource, v.node.Name, c.free, c.capacity)
	if c.ill > 0 {
		if ill > 0 {
			text += fmt.Sprintf(", %d of them not allocatable", ill)
		}
		text += " (" + reason + ")"
	}
	if v.excluded != "" {
		text += ", and " + v.excluded
	}
	switch {
	case c.ill > 0 && c.free+c.ill >= c.wanted:
		return text + "."
	case c.wanted > s.maximum[c.resource]:
		return text + fmt.Sprintf(": no node has so many at all; request %d at most, or add nodes with more.",
			s.maximum[c.resource])
	}
	return text + ": wait until pods end, request fewer, or add nodes."
}

// notAllocatable says why a node does not offer devices of a resource, with the source and its age,
// and how many devices are departing.
func (s *search) notAllocatable(ctx context.Context, n *corev1.Node, resource corev1.ResourceName) (reason string,
	departed int64) {
	d := s.o.ask(ctx, n.Name)
	if d.Status != nil {
		for _, r := range d.Status.Resources {
			if r.Name == string(resource) {
				departed = int64(len(r.Departing))
			}
		}
		if text := notAllocatable(*d.Status, resource); text != "" {
			return "its daemon says: " + text, departed
		}
		return "its daemon says that all its GPUs are Healthy: the kubelet's count is older", departed
	}
	for _, c := range n.Status.Conditions {
		if c.Type == view.ConditionType && c.Status != corev1.ConditionTrue && c.Message != "" {
			return fmt.Sprintf("its condition %s, written%s, says: %s; %s", c.Type,
				cmp.Or(view.Ago(" ", c.LastHeartbeatTime.Time, s.o.Now),
					" at a time that is not known"), strings.TrimSuffix(view.Condensed(c.Message), "."),
				strings.TrimSuffix(d.Problem, ".")), 0
		}
	}
	return "why is not known: " + strings.TrimSuffix(d.Problem, "."), 0
}

// noNode explains a pod for which no node has anything.
func (s *search) noNode(ctx context.Context) string {
	for _, name := range s.names {
		if text := s.noNodeHas(ctx, name); text != "" {
			return text
		}
	}
	if len(s.names) > 1 {
		return fmt.Sprintf("No node has all of %s: nodes have %s.", joined(s.names), s.o.servedNames())
	}
	if len(s.names) == 1 && len(s.claims) > 0 {
		return fmt.Sprintf("No node has %s and devices for its claims.", s.names[0])
	}
	return "No node has devices in ResourceSlices. " + s.o.daemonsAre(ctx, "")
}

// noNodeHas says that no node has a resource, and lists the resources of the nodes; empty
// if a node has the resource.
func (s *search) noNodeHas(ctx context.Context, name corev1.ResourceName) string {
	zero := ""
	for i := range s.o.Nodes {
		n := &s.o.Nodes[i]
		all, has := n.Status.Capacity[name]
		if !all.IsZero() || view.ClassOf(name, s.o.Classes) != nil && len(s.a.onNode[n.Name]) > 0 {
			return ""
		}
		if has && zero == "" {
			zero = n.Name
		}
	}
	if class := view.ClassOf(name, s.o.Classes); class != nil {
		return fmt.Sprintf("No node has %s, neither by a device plugin nor, for its class %s, in ResourceSlices. ",
			name, class.Name) +
			s.o.daemonsAre(ctx, zero)
	}
	text := fmt.Sprintf("No node has %s, and no DeviceClass has it as its extendedResourceName", name)
	if own, is := strings.CutPrefix(string(name), resourceapi.ResourceDeviceClassPrefix); is {
		text = fmt.Sprintf("%s is provided by claims of a class, and no DeviceClass is called %s", name, own)
	}
	if names := s.o.servedNames(); names != "" {
		text += "; nodes have " + names + ": request one of these, or configure the daemon to serve it"
	}
	return text + ". " + s.o.daemonsAre(ctx, zero)
}

// daemonsAre returns the state of the daemon on a node that had GPUs, or why no daemon runs; an
// empty node selects any node.
func (o Objects) daemonsAre(ctx context.Context, node string) string {
	if node == "" && len(o.Running) > 0 {
		node = o.Running[0]
	}
	if node = cmp.Or(node, o.GPUNode()); node == "" {
		return cmp.Or(o.NoneRuns, "No node is known to have GPUs.")
	}
	d := o.ask(ctx, node)
	if d.Status == nil {
		return fmt.Sprintf("Of node %s nothing is known: %s.", node, strings.TrimSuffix(d.Problem, "."))
	}
	says := cmp.Or(d.Status.Summary.Text, status.Summarize(*d.Status).Text)
	return fmt.Sprintf("The daemon of node %s says: %s; see kubectl gpu doctor %s.",
		node, strings.TrimSuffix(says, "."), node)
}

// servedNames names the GPU resources of nodes, and the resources provided by claims.
func (o Objects) servedNames() string {
	names := map[string]bool{}
	for i := range o.Nodes {
		for name, quantity := range o.Nodes[i].Status.Capacity {
			if o.IsGPU(name) && !quantity.IsZero() {
				names[string(name)] = true
			}
		}
	}
	if len(o.Slices) > 0 {
		for _, c := range o.Classes {
			if c.Spec.ExtendedResourceName != nil {
				names[*c.Spec.ExtendedResourceName] = true
			}
		}
	}
	return inventory.Few(slices.Sorted(maps.Keys(names)))
}

func joined(names []corev1.ResourceName) string {
	var texts []string
	for _, name := range names {
		texts = append(texts, string(name))
	}
	return strings.Join(texts, ", ")
}

// claimFor returns the claim that the scheduler creates for extended resources; nil for none.
func (s *search) claimFor(names []corev1.ResourceName) *resourceapi.ResourceClaim {
	if len(names) == 0 {
		return nil
	}
	key := joined(names)
	if s.extended[key] == nil {
		c, words := extendedClaim(s.o.Pod, names, s.o.Classes)
		s.extended[key] = c
		maps.Copy(s.a.words, words)
	}
	return s.extended[key]
}

// extendedClaim returns the scheduler's claim for a pod's extended resources, and
// descriptions of its requests by name. Containers reuse the devices of containers that
// ran before.
func extendedClaim(
	p *corev1.Pod, names []corev1.ResourceName, classes []*resourceapi.DeviceClass,
) (*resourceapi.ResourceClaim, map[string]string) {
	claim := &resourceapi.ResourceClaim{}
	claim.Namespace, claim.Name = p.Namespace, p.Name+"-extended-resources"
	words := map[string]string{}
	containers := slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
	for _, name := range names {
		class := view.ClassOf(name, classes).Name
		add := func(i int, wanted int64) {
			request := fmt.Sprintf("container-%d-request-%d", i, len(claim.Spec.Devices.Requests))
			words[request] = fmt.Sprintf("%d %s of container %s", wanted, name, containers[i].Name)
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
				Name: request, Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: wanted,
				},
			})
		}
		var long, most int64
		first := 0
		for i := range containers {
			wanted := amount(&containers[i], name)
			if i < len(p.Spec.InitContainers) && !isSidecar(p, containers[i].Name) {
				if wanted > most {
					first, most = i, wanted
				}
				continue
			}
			if long += wanted; wanted > 0 {
				add(i, wanted)
			}
		}
		if most > long {
			add(first, most-long)
		}
	}
	return claim, words
}

// amount returns the number of devices that a container requests of a resource. A limit without a
// request counts as a request.
func amount(c *corev1.Container, name corev1.ResourceName) int64 {
	quantity, is := c.Resources.Requests[name]
	if !is {
		quantity = c.Resources.Limits[name]
	}
	return quantity.Value()
}
