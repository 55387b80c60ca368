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

// A Node is a row for a node with GPUs. Its JSON is a stable interface: fields are added, but never
// renamed or removed.
type Node struct {
	Name string `json:"name"`
	// Model is the model of most GPUs; empty if unknown.
	Model string `json:"model,omitempty"`
	// GPUs is the number of physical GPUs; 0 if unknown.
	GPUs int `json:"gpus,omitempty"`
	// All is the number of devices for pods, as resources or from ResourceSlices: GPUs,
	// MIG devices, shares and units. Healthy is the number of allocatable devices,
	// Allocated the number of devices of pods. Resources has the numbers of each resource.
	All       int64          `json:"all"`
	Healthy   int64          `json:"healthy"`
	Allocated int64          `json:"allocated"`
	Resources []NodeResource `json:"resources,omitempty"`
	// Layout is the MIG layout named by the node's label, or the MIG strategy, and LayoutState its
	// state.
	Layout      string `json:"migLayout,omitempty"`
	LayoutState string `json:"migLayoutState,omitempty"`
	// DriverVersion is the version of the NVIDIA driver.
	DriverVersion string `json:"driverVersion,omitempty"`
	// Version is the version of the daemon or the tag of its image, and Since the time
	// when its pod became ready; zero for a pod that is not ready.
	Version string    `json:"version,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	// Condition is the status of the condition GPUHealthy, with its reason and message;
	// empty if the Node has no such condition.
	Condition string `json:"condition,omitempty"`
	Reason    string `json:"reason,omitempty"`
	Message   string `json:"message,omitempty"`
	// ConditionSince is the time of the last change of the condition's status, and ConditionUpdated
	// the time of the last write.
	ConditionSince   time.Time `json:"conditionSince,omitzero"`
	ConditionUpdated time.Time `json:"conditionHeard,omitzero"`
	// Daemon is the daemon's pod, NAMESPACE/NAME; empty if none runs. DaemonAbsent then says why, if
	// known.
	Daemon       string `json:"daemon,omitempty"`
	DaemonAbsent string `json:"daemonAbsent,omitempty"`
	// Sources has the sources of the facts model, gpus, driverVersion and migLayout.
	Sources map[string]Source `json:"sources,omitempty"`
	// Stale are sentences about labels that differ from the daemon's status.
	Stale []string `json:"stale,omitempty"`
	// NotReadySince is since when the kubelet has not responded: the Node's status is out
	// of date. It is zero if the kubelet responds.
	NotReadySince time.Time `json:"notReadySince,omitzero"`
}

// A Source is the source of a fact, and its time.
type Source struct {
	// From is daemon, label or ResourceSlice.
	From string `json:"from"`
	// At is the time of the daemon's last scan, or of the last write of the label or the slice; zero
	// if unknown.
	At time.Time `json:"at,omitzero"`
}

// The sources of facts.
const (
	fromDaemon = "daemon"
	fromLabel  = "label"
	fromSlice  = "ResourceSlice"
)

// The names of facts with a source.
const (
	modelFact  = "model"
	gpusFact   = "gpus"
	driverFact = "driverVersion"
	layoutFact = "migLayout"
)

// set sets a fact that has a source. An empty value is ignored.
func (n *Node) set(fact string, to *string, value string, from Source) {
	if value == "" {
		return
	}
	*to = value
	n.setSource(fact, from)
}

// setSource sets the source of a fact.
func (n *Node) setSource(fact string, from Source) {
	if n.Sources == nil {
		n.Sources = map[string]Source{}
	}
	n.Sources[fact] = from
}

// FactSources returns the sources of all facts without repetition.
func (n Node) FactSources() (sources []Source) {
	for _, fact := range []string{modelFact, driverFact, gpusFact, layoutFact} {
		s, is := n.Sources[fact]
		if is && !slices.ContainsFunc(sources, func(other Source) bool { return other.From == s.From }) {
			sources = append(sources, s)
		}
	}
	return sources
}

// IsIncomplete reports whether the daemon must be asked, because the API server lacks a value of
// the row or the reason why devices are not allocatable.
func (n Node) IsIncomplete() bool {
	unexplained := n.Healthy < n.All && n.Condition != string(corev1.ConditionFalse)
	return n.Daemon != "" && (n.Model == "" || n.DriverVersion == "" || unexplained)
}

// Rows returns a row for each node that has GPUs, had GPUs or has a daemon, sorted by name; with
// all, for each node. answers are the answers of daemons by node.
func (f Facts) Rows(daemons map[string]*corev1.Pod, answers map[string]Answer, all bool) []Node {
	nodes := f.nodesByName()
	devices := f.devices()
	taken, claimed := f.allocated(nodes)
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
		if all || row.All > 0 || row.Daemon != "" || row.GPUs > 0 || row.Resources != nil ||
			looksLikeGPUs(nodes[name]) {
			rows = append(rows, row)
		}
	}
	return rows
}

// gpuLabels are labels of other programs for nodes with NVIDIA GPUs, with the prefix of their
// values. Sources are node-feature-discovery, NVIDIA, this program and cloud providers; the chart
// selects nodes by the same labels.
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

// GPUNode returns the first node that has GPUs, had GPUs, or has a label for GPUs; empty if there
// is none.
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
	for _, written := range node.ManagedFields { // writers of GPU labels
		if written.Time != nil && label.At.Before(written.Time.Time) {
			label.At = written.Time.UTC()
		}
	}
	n.set(modelFact, &n.Model, strings.ReplaceAll(node.Labels[productLabel], "-", " "), label)
	if n.GPUs, _ = strconv.Atoi(node.Labels[countLabel]); n.GPUs > 0 {
		n.setSource(gpusFact, label)
	}
	n.set(driverFact, &n.DriverVersion, node.Labels[driverLabel], label)
	n.set(layoutFact, &n.Layout, cmp.Or(node.Labels[layoutLabel], node.Labels[strategyLabel]), label)
	n.LayoutState = node.Labels[stateLabel]
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type == ConditionType:
			n.Condition, n.Reason, n.Message = string(c.Status), c.Reason, c.Message
			n.ConditionSince, n.ConditionUpdated = c.LastTransitionTime.UTC(), c.LastHeartbeatTime.UTC()
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

// addAnswer adds the daemon's answer. The answer takes precedence over labels and slices,
// because they may be outdated.
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
	if gpus > 0 || !s.Looked.IsZero() { // otherwise the daemon has not scanned the node yet
		n.GPUs = gpus
		n.setSource(gpusFact, from)
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

// models returns the model of most GPUs, the first of several, and the number of GPUs.
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

// maxLabel is the size limit of a label's value; names of models are cut to it.
const maxLabel = 63

// sameModel reports whether a label and a daemon may refer to the same model: the label may have a
// suffix for sharing or MIG.
func sameModel(label, model string) bool {
	label, model = strings.ReplaceAll(label, "-", " "), strings.ReplaceAll(model, "-", " ")
	return label == model || len(label) >= maxLabel-8 ||
		strings.HasPrefix(label, model+" SHARED") || strings.HasPrefix(label, model+" MIG")
}

// A Device is a device of a ResourceSlice.
type Device struct {
	name                                deviceName
	UUID, Model, Profile, DriverVersion string
	// Tainted says that no new claim gets the device, and Counted that the device uses
	// counters shared with other devices.
	Tainted, Counted bool
	written          time.Time // last write of the slice; zero if unknown
}

// devices returns the devices in slices, by node. While a pool is being rewritten, the newest
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
		name: name, UUID: text("uuid"), Model: text("productName"), Profile: text("profile"),
		DriverVersion: text("driverVersion"),
		Counted:       len(d.ConsumesCounters) > 0 && text("type") == "mig",
		Tainted: slices.ContainsFunc(d.Taints,
			func(t resourceapi.DeviceTaint) bool { return t.Effect != "None" }),
	}
}

// allocated returns the number of devices that pods have, by node: of each resource of the node,
// and by claims.
func (f Facts) allocated(nodes map[string]*corev1.Node) (byResource map[string]map[corev1.ResourceName]int64,
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
		for name, n := range FromPlugins(p) {
			byResource[p.Spec.NodeName][name] += n
			if nodes[p.Spec.NodeName] == nil && f.IsGPU(name) { // the Node could not be read
				byClaims[p.Spec.NodeName] += n
			}
		}
	}
	for name, claims := range f.usesByDevice() { // several claims may have shares of a device
		if slices.ContainsFunc(claims, func(g claimUse) bool { return !g.admin }) {
			byClaims[name.pool]++ // the pool of a node has the node's name
		}
	}
	return byResource, byClaims
}
