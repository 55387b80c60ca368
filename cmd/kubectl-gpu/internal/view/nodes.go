package view

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// A Node is a row about a node with GPUs. Its JSON is an interface of the program: fields are added, and none is renamed or removed.
type Node struct {
	Name string `json:"name"`
	// Model is that of most GPUs; empty if it is not known.
	Model string `json:"model,omitempty"`
	// GPUs is the number of physical GPUs; 0 if it is not known.
	GPUs int `json:"gpus,omitempty"`
	// All are the devices that pods can ask for: GPUs, MIG devices and shares of them, as resources and in ResourceSlices. Healthy are those
	// of them that can be given to pods, and Allocated those that pods have.
	All       int64 `json:"all"`
	Healthy   int64 `json:"healthy"`
	Allocated int64 `json:"allocated"`
	// Layout is the MIG layout that the node's label names, or the MIG strategy, and LayoutState how far it is.
	Layout      string `json:"migLayout,omitempty"`
	LayoutState string `json:"migLayoutState,omitempty"`
	// DriverVersion is that of the NVIDIA driver.
	DriverVersion string `json:"driverVersion,omitempty"`
	// Version is that of the daemon, or the tag of its image, and Since is when its pod became ready; zero while it is not.
	Version string    `json:"version,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	// Condition is the status of the condition GPUHealthy, with its reason and message; empty if the Node has none.
	Condition string `json:"condition,omitempty"`
	Reason    string `json:"reason,omitempty"`
	Message   string `json:"message,omitempty"`
	// Daemon is the daemon's pod, as NAMESPACE/NAME; empty if none runs.
	Daemon string `json:"daemon,omitempty"`
}

// IsIncomplete reports whether the API server does not tell what a row shows, so that the daemon has to be asked.
func (n Node) IsIncomplete() bool { return n.Daemon != "" && (n.Model == "" || n.DriverVersion == "") }

// Rows returns a row for each node that has GPUs or a daemon, in the order of their names; with every, for each node. Answers are those of
// the daemons that were asked, by node.
func (f Facts) Rows(daemons map[string]*corev1.Pod, answers map[string]Answer, every bool) []Node {
	nodes := map[string]*corev1.Node{}
	for i := range f.Nodes {
		nodes[f.Nodes[i].Name] = &f.Nodes[i]
	}
	devices := f.devices()
	taken := f.taken(nodes)
	rows := []Node{}
	for _, name := range f.nodeNames(daemons) {
		row := Node{Name: name}
		row.addNode(nodes[name])
		row.addSlices(devices[name])
		row.Allocated = taken[name]
		row.addDaemon(daemons[name])
		if a, asked := answers[name]; asked && a.Err == nil {
			row.addAnswer(a)
		}
		if every || row.All > 0 || row.Daemon != "" || row.GPUs > 0 {
			rows = append(rows, row)
		}
	}
	return rows
}

func (n *Node) addNode(node *corev1.Node) {
	if node == nil {
		return
	}
	n.Model = strings.ReplaceAll(node.Labels[productLabel], "-", " ")
	n.GPUs, _ = strconv.Atoi(node.Labels[countLabel])
	n.DriverVersion = node.Labels[driverLabel]
	n.Layout = cmp.Or(node.Labels[layoutLabel], node.Labels[strategyLabel])
	n.LayoutState = node.Labels[stateLabel]
	for name, quantity := range node.Status.Capacity {
		if strings.HasPrefix(string(name), Resources) {
			n.All += quantity.Value()
			healthy := node.Status.Allocatable[name]
			n.Healthy += healthy.Value()
		}
	}
	for _, c := range node.Status.Conditions {
		if c.Type == ConditionType {
			n.Condition, n.Reason, n.Message = string(c.Status), c.Reason, c.Message
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
		n.Model = cmp.Or(n.Model, d.Model)
		n.DriverVersion = cmp.Or(n.DriverVersion, d.DriverVersion)
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

func (n *Node) addAnswer(a Answer) {
	s := a.Status
	n.Version = cmp.Or(s.Version, n.Version)
	n.DriverVersion = cmp.Or(s.Driver, n.DriverVersion)
	if s.MIG != nil && s.MIG.Layout != "" {
		n.Layout, n.LayoutState = s.MIG.Layout, s.MIG.State
	}
	n.GPUs = 0
	for _, d := range s.GPUs {
		if d.GPU == "" {
			n.GPUs++
			n.Model = cmp.Or(n.Model, d.Model)
		}
	}
}

// A Device is one of a ResourceSlice.
type Device struct {
	name                                deviceName
	UUID, Model, Profile, DriverVersion string
	// Tainted says that no new claim gets it, and Counted that it takes counters that other devices take too.
	Tainted, Counted bool
}

// devices returns the devices in slices, by node. Of a pool that is being written anew the newest generation counts.
func (f Facts) devices() map[string][]Device {
	drivers, newest := f.drivers(), map[deviceName]int64{}
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
			devices[*s.Spec.NodeName] = append(devices[*s.Spec.NodeName], device(pool, d))
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

// taken returns how many devices pods have, by node: by resources that the node has, and by claims.
func (f Facts) taken(nodes map[string]*corev1.Node) map[string]int64 {
	taken := map[string]int64{}
	for i := range f.Pods {
		p := &f.Pods[i]
		if p.Spec.NodeName == "" || IsOver(p) {
			continue
		}
		for name, n := range Requests(p) {
			node := nodes[p.Spec.NodeName]
			if node != nil {
				if _, has := node.Status.Capacity[name]; !has {
					continue // by a claim that the scheduler made for it
				}
			}
			taken[p.Spec.NodeName] += n
		}
	}
	for name, claims := range f.given() { // several claims may have shares of a device
		if slices.ContainsFunc(claims, func(g given) bool { return !g.admin }) {
			taken[name.pool]++ // the pool of a node has its name
		}
	}
	return taken
}
