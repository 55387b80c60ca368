package view

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// A Node is a row about a node with GPUs. Its JSON is an interface of the program: fields are
// added, and none is renamed or removed.
type Node struct {
	Name string `json:"name"`
	// Model is that of most GPUs; empty if it is not known.
	Model string `json:"model,omitempty"`
	// GPUs is the number of physical GPUs; 0 if it is not known.
	GPUs int `json:"gpus,omitempty"`
	// All are the devices that pods can ask for: GPUs, MIG devices, shares and units of them, as
	// resources and in ResourceSlices. Healthy are those of them that can be given to pods, and
	// Allocated those that pods have. Resources has the resources one by one.
	All       int64          `json:"all"`
	Healthy   int64          `json:"healthy"`
	Allocated int64          `json:"allocated"`
	Resources []NodeResource `json:"resources,omitempty"`
	// Layout is the MIG layout that the node's label names, or the MIG strategy, and LayoutState how
	// far it is.
	Layout      string `json:"migLayout,omitempty"`
	LayoutState string `json:"migLayoutState,omitempty"`
	// DriverVersion is that of the NVIDIA driver.
	DriverVersion string `json:"driverVersion,omitempty"`
	// Version is that of the daemon, or the tag of its image, and Since is when its pod became ready;
	// zero while it is not.
	Version string    `json:"version,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	// Condition is the status of the condition GPUHealthy, with its reason and message; empty if the
	// Node has none.
	Condition string `json:"condition,omitempty"`
	Reason    string `json:"reason,omitempty"`
	Message   string `json:"message,omitempty"`
	// ConditionSince is when the condition got its status, and ConditionHeard when it was written
	// last.
	ConditionSince time.Time `json:"conditionSince,omitzero"`
	ConditionHeard time.Time `json:"conditionHeard,omitzero"`
	// Daemon is the daemon's pod, as NAMESPACE/NAME; empty if none runs. DaemonAbsent is then why,
	// where that is known.
	Daemon       string `json:"daemon,omitempty"`
	DaemonAbsent string `json:"daemonAbsent,omitempty"`
	// Sources say who tells the facts of these names: model, gpus, driverVersion, migLayout.
	Sources map[string]Source `json:"sources,omitempty"`
	// Stale are sentences: which labels say something else than the daemon does.
	Stale []string `json:"stale,omitempty"`
	// NotReadySince is since when the kubelet does not answer, so that what the Node says is of
	// before; zero while it does.
	NotReadySince time.Time `json:"notReadySince,omitzero"`
}

// A Source is who tells a fact, and when.
type Source struct {
	// From is daemon, label or ResourceSlice.
	From string `json:"from"`
	// At is when the daemon looked, or when the label or the slice was written last; zero if that is
	// not known.
	At time.Time `json:"at,omitzero"`
}

// The sources of facts.
const (
	fromDaemon = "daemon"
	fromLabel  = "label"
	fromSlice  = "ResourceSlice"
)

// The names of facts that have a source.
const (
	modelFact  = "model"
	gpusFact   = "gpus"
	driverFact = "driverVersion"
	layoutFact = "migLayout"
)

// set sets a fact that has a source. What is empty says nothing.
func (n *Node) set(fact string, to *string, value string, from Source) {
	if value == "" {
		return
	}
	*to = value
	n.tell(fact, from)
}

// tell sets who tells a fact.
func (n *Node) tell(fact string, from Source) {
	if n.Sources == nil {
		n.Sources = map[string]Source{}
	}
	n.Sources[fact] = from
}

// Told returns the sources of all facts that have one, without repetition.
func (n Node) Told() (sources []Source) {
	for _, fact := range []string{modelFact, driverFact, gpusFact, layoutFact} {
		s, is := n.Sources[fact]
		if is && !slices.ContainsFunc(sources, func(other Source) bool { return other.From == s.From }) {
			sources = append(sources, s)
		}
	}
	return sources
}

// IsIncomplete reports whether the API server does not tell what a row shows, or why some of its
// devices cannot be given to pods, so that the daemon has to be asked.
func (n Node) IsIncomplete() bool {
	unexplained := n.Healthy < n.All && n.Condition != string(corev1.ConditionFalse)
	return n.Daemon != "" && (n.Model == "" || n.DriverVersion == "" || unexplained)
}

// Rows returns a row for each node that has GPUs, had some or has a daemon, in the order of their
// names; with every, for each node. Answers are those of the daemons that were asked, by node.
func (f Facts) Rows(daemons map[string]*corev1.Pod, answers map[string]Answer, every bool) []Node {
	nodes := f.nodesByName()
	devices := f.devices()
	taken, claimed := f.taken(nodes)
	rows := []Node{}
	for _, name := range f.nodeNames(daemons) {
		row := Node{Name: name}
		row.addNode(nodes[name])
		row.Resources = f.resources(nodes[name], taken[name])
		row.addSlices(devices[name])
		row.addDaemon(daemons[name])
		if a, asked := answers[name]; asked && a.Err == nil {
			row.addAnswer(a)
		}
		row.Allocated = claimed[name]
		for _, r := range row.Resources {
			if !strings.HasSuffix(r.Name, percentageEnd) {
				row.All, row.Healthy, row.Allocated = row.All+r.All, row.Healthy+r.Healthy, row.Allocated+r.Allocated
			}
		}
		if every || row.All > 0 || row.Daemon != "" || row.GPUs > 0 || row.Resources != nil || looksLikeGPUs(nodes[name]) {
			rows = append(rows, row)
		}
	}
	return rows
}

// gpuLabels are labels by which others say that a node has NVIDIA GPUs, with what their values then
// begin with. They are those of node-feature-discovery, NVIDIA, this program and clouds, by which
// the chart selects nodes, too.
var gpuLabels = map[string]string{
	"feature.node.kubernetes.io/pci-10de.present":      "true",
	"feature.node.kubernetes.io/pci-0300_10de.present": "true",
	"feature.node.kubernetes.io/pci-0302_10de.present": "true",
	"feature.node.kubernetes.io/cpu-model.vendor_id":   "NVIDIA",
	"nvidia.com/gpu.present":                           "true",
	Domain + "/gpu.health":                             "",
	productLabel:                                       "",
	"cloud.google.com/gke-accelerator":                 "nvidia",
	"kubernetes.azure.com/accelerator":                 "nvidia",
	"accelerator":                                      "nvidia",
	"k8s.amazonaws.com/accelerator":                    "nvidia",
	"karpenter.k8s.aws/instance-gpu-manufacturer":      "nvidia",
	"eks.amazonaws.com/instance-gpu-manufacturer":      "nvidia",
	"karpenter.azure.com/sku-gpu-manufacturer":         "nvidia",
	"doks.digitalocean.com/gpu-brand":                  "nvidia",
}

// looksLikeGPUs reports whether a label says that a node has NVIDIA GPUs.
func looksLikeGPUs(n *corev1.Node) bool {
	if n == nil {
		return false
	}
	for label, begin := range gpuLabels {
		if value, is := n.Labels[label]; is && strings.HasPrefix(value, begin) {
			return true
		}
	}
	return false
}

// GPUNode returns the first node that has GPUs, had some, or has a label that says so; empty if
// there is none.
func (f Facts) GPUNode() string {
	for i := range f.Nodes {
		if n := &f.Nodes[i]; looksLikeGPUs(n) || len(f.resources(n, nil)) > 0 {
			return n.Name
		}
	}
	return ""
}

func (n *Node) addNode(node *corev1.Node) {
	if node == nil {
		return
	}
	label := Source{From: fromLabel}
	for _, written := range node.ManagedFields { // those that wrote labels of GPUs
		if written.Time != nil && label.At.Before(written.Time.Time) {
			label.At = written.Time.UTC()
		}
	}
	n.set(modelFact, &n.Model, strings.ReplaceAll(node.Labels[productLabel], "-", " "), label)
	if n.GPUs, _ = strconv.Atoi(node.Labels[countLabel]); n.GPUs > 0 {
		n.tell(gpusFact, label)
	}
	n.set(driverFact, &n.DriverVersion, node.Labels[driverLabel], label)
	n.set(layoutFact, &n.Layout, cmp.Or(node.Labels[layoutLabel], node.Labels[strategyLabel]), label)
	n.LayoutState = node.Labels[stateLabel]
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type == ConditionType:
			n.Condition, n.Reason, n.Message = string(c.Status), c.Reason, c.Message
			n.ConditionSince, n.ConditionHeard = c.LastTransitionTime.UTC(), c.LastHeartbeatTime.UTC()
		case c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue:
			n.NotReadySince = c.LastTransitionTime.UTC()
		}
	}
}

func (n *Node) addSlices(devices []Device) {
	for _, d := range devices {
		if d.Counted { // one of several ways to divide a GPU
			continue
		}
		n.All++
		if !d.Tainted {
			n.Healthy++
		}
		if n.Model == "" {
			n.set(modelFact, &n.Model, d.Model, Source{From: fromSlice, At: d.written})
		}
		if n.DriverVersion == "" {
			n.set(driverFact, &n.DriverVersion, d.DriverVersion, Source{From: fromSlice, At: d.written})
		}
	}
}

func (n *Node) addDaemon(p *corev1.Pod) {
	if p == nil {
		return
	}
	n.Daemon, n.Since = p.Namespace+"/"+p.Name, ready(p)
	for _, c := range p.Spec.Containers {
		image, _, _ := strings.Cut(c.Image, "@")
		if at := strings.LastIndex(image, ":"); at > strings.LastIndex(image, "/") && n.Version == "" {
			n.Version = image[at+1:]
		}
	}
}

// addAnswer adds what the daemon says. It knows better than labels and slices, which others may
// have left behind.
func (n *Node) addAnswer(a Answer) {
	s := a.Status
	from := Source{From: fromDaemon, At: s.Looked}
	n.Version = cmp.Or(s.Version, n.Version)
	if s.MIG != nil && s.MIG.Layout != "" {
		n.set(layoutFact, &n.Layout, s.MIG.Layout, from)
		n.LayoutState = s.MIG.State
	}
	for _, r := range s.Resources {
		for i := range n.Resources {
			if own := &n.Resources[i]; own.Name == r.Name {
				own.Departing = min(int64(len(r.Departing)), max(0, own.All-own.Healthy))
				own.All -= own.Departing
			}
		}
	}
	model, gpus := models(s.GPUs)
	if gpus > 0 || !s.Looked.IsZero() { // otherwise it has not seen the node yet
		n.GPUs = gpus
		n.tell(gpusFact, from)
	}
	if n.Sources[modelFact].From == fromLabel && model != "" && !sameModel(n.Model, model) {
		n.Stale = append(n.Stale, fmt.Sprintf("its label %s says %s, and its daemon %s", productLabel, n.Model, model))
	}
	if n.Sources[driverFact].From == fromLabel && s.Driver != "" && n.DriverVersion != s.Driver {
		n.Stale = append(n.Stale, fmt.Sprintf("its label %s says %s, and its daemon %s",
			driverLabel, n.DriverVersion, s.Driver))
	}
	n.set(modelFact, &n.Model, model, from)
	n.set(driverFact, &n.DriverVersion, s.Driver, from)
}

// models returns the model of most GPUs, the first one of several, and how many GPUs there are.
func models(devices []status.Device) (most string, gpus int) {
	counts := map[string]int{}
	for _, d := range devices {
		if d.GPU != "" {
			continue
		}
		gpus++
		if counts[d.Model]++; counts[d.Model] > counts[most] || most == "" {
			most = d.Model
		}
	}
	return most, gpus
}

// longestLabel is how long the value of a label can be; the names of models are cut for it.
const longestLabel = 63

// sameModel reports whether a label and a daemon may mean the same model: the label has what shares
// or divides it at its end.
func sameModel(label, model string) bool {
	label, model = strings.ReplaceAll(label, "-", " "), strings.ReplaceAll(model, "-", " ")
	return label == model || len(label) >= longestLabel-8 ||
		strings.HasPrefix(label, model+" SHARED") || strings.HasPrefix(label, model+" MIG")
}

// A Device is one of a ResourceSlice.
type Device struct {
	name                                deviceName
	UUID, Model, Profile, DriverVersion string
	// Tainted says that no new claim gets it, and Counted that it takes counters that other devices
	// take too.
	Tainted, Counted bool
	written          time.Time // when its slice was written last; zero if that is not known
}

// devices returns the devices in slices, by node. Of a pool that is being written anew the newest
// generation counts.
func (f Facts) devices() map[string][]Device {
	drivers, newest := f.Drivers(), map[deviceName]int64{}
	for _, s := range f.Slices {
		pool := deviceName{driver: s.Spec.Driver, pool: s.Spec.Pool.Name}
		newest[pool] = max(newest[pool], s.Spec.Pool.Generation)
	}
	devices := map[string][]Device{}
	for _, s := range f.Slices {
		pool := deviceName{driver: s.Spec.Driver, pool: s.Spec.Pool.Name}
		if s.Spec.NodeName == nil || !drivers[s.Spec.Driver] || s.Spec.Pool.Generation < newest[pool] {
			continue
		}
		for _, d := range s.Spec.Devices {
			pool.device = d.Name
			one := device(pool, d)
			for _, m := range s.ManagedFields {
				if m.Time != nil && one.written.Before(m.Time.Time) {
					one.written = m.Time.UTC()
				}
			}
			devices[*s.Spec.NodeName] = append(devices[*s.Spec.NodeName], one)
		}
	}
	return devices
}

func device(name deviceName, d resourceapi.Device) Device {
	text := func(name resourceapi.QualifiedName) string {
		a := d.Attributes[name]
		switch {
		case a.StringValue != nil:
			return *a.StringValue
		case a.VersionValue != nil:
			return *a.VersionValue
		}
		return ""
	}
	return Device{
		name: name, UUID: text("uuid"), Model: text("productName"), Profile: text("profile"), DriverVersion: text("driverVersion"),
		Counted: len(d.ConsumesCounters) > 0 && text("type") == "mig",
		Tainted: slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != "None" }),
	}
}

// taken returns how many devices pods have, by node: of each resource that the node has, and by
// claims.
func (f Facts) taken(nodes map[string]*corev1.Node) (byResource map[string]map[corev1.ResourceName]int64,
	byClaims map[string]int64) {
	byResource, byClaims = map[string]map[corev1.ResourceName]int64{}, map[string]int64{}
	for i := range f.Pods {
		p := &f.Pods[i]
		if p.Spec.NodeName == "" || IsOver(p) {
			continue
		}
		if byResource[p.Spec.NodeName] == nil {
			byResource[p.Spec.NodeName] = map[corev1.ResourceName]int64{}
		}
		for name, n := range Plugged(p) {
			byResource[p.Spec.NodeName][name] += n
			if nodes[p.Spec.NodeName] == nil && f.IsGPU(name) { // what it has could not be read
				byClaims[p.Spec.NodeName] += n
			}
		}
	}
	for name, claims := range f.given() { // several claims may have shares of a device
		if slices.ContainsFunc(claims, func(g given) bool { return !g.admin }) {
			byClaims[name.pool]++ // the pool of a node has its name
		}
	}
	return byResource, byClaims
}
