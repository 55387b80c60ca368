package command_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestNodes: a line a node from what the API server has. Only the daemon of the node without labels
// is asked.
func TestNodes(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 7, func(n *corev1.Node) {
		n.Labels["nvidia.com/mig.config"], n.Labels["nvidia.com/mig.config.state"] = "all-balanced", "success"
		n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUHealthy", Status: "False", Reason: "GPUUnhealthy",
			Message: "GPU-3 Unhealthy: XID 79, remedy: reboot"}}
	})
	s.addNode("b", 8, func(n *corev1.Node) {
		n.Labels = nil
		n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUHealthy", Status: "False",
			Message: "one\n\x1b[31mtwo\tthree"}}
	})
	s.addNode("cpu", 0, func(n *corev1.Node) { n.Labels, n.Status.Capacity, n.Status.Allocatable = nil, nil, nil })
	s.addDaemon("daemon-a", "a", nil)
	s.addDaemon("daemon-b", "b", answering(status.Status{Version: "v0.2.0", Driver: "570.1",
		GPUs: []status.Device{gpu(0, "Healthy"), gpu(1, "Healthy")}}))
	s.addPod("p", "a", 2, corev1.PodRunning)
	s.addPod("over", "a", 4, corev1.PodSucceeded)
	s.addPod("waits", "", 1, corev1.PodPending)
	want := `Nodes: 2, of which 2 not healthy. Devices: 15 healthy of 16, 2 allocated.
NODE MODEL HEALTHY ALLOCATED ALL MIG DRIVER VERSION SINCE SOURCE
a NVIDIA H100 80GB HBM3 7 2 8 all-balanced (success) 580.95.05 v0.1.0 3h label
b NVIDIA H100 80GB HBM3 8 0 8 - 570.1 v0.2.0 3h daemon`
	if diff := cmp.Diff(want, fields(s.must())); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"daemon-b status -o json --holders"}, s.commands()); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	if got := fields(s.must("a", "-o", "wide")); !strings.Contains(got,
		"8 nvidia.com/gpu 2/8 False kube-system/daemon-a GPU-3 Unhealthy: XID 79, remedy: reboot") ||
		strings.Contains(got, "b NVIDIA") {
		t.Errorf("one node, wide:\n%s", got)
	}
	if got := s.must("b", "-o", "wide"); !strings.HasSuffix(got, " one ^[[31mtwo three\n") {
		t.Errorf("a message that changes the terminal:\n%q", got)
	}
	s.commands()
	if got := fields(s.must("a", "a")); !strings.Contains(got, " 7 2 8 ") {
		t.Errorf("a node that was named twice:\n%s", got)
	}
	if got := fields(s.must("cpu")); got != strings.Split(want, "\n")[1]+"\ncpu - 0 0 0 - - no daemon - -" {
		t.Errorf("a node without GPUs that was named:\n%s", got)
	}
	s.commands()
	s.must("--ask", "never")
	if ran := s.commands(); ran != nil {
		t.Errorf("--ask never asked: %v", ran)
	}
	var told struct {
		Nodes []struct {
			Name      string
			Healthy   int
			MIGLayout string
			Daemon    string
		}
	}
	if err := json.Unmarshal([]byte(s.must("-o", "json")), &told); err != nil || len(told.Nodes) != 2 ||
		told.Nodes[0].Healthy != 7 || told.Nodes[0].MIGLayout != "all-balanced" {
		t.Errorf("JSON: %+v, %v", told, err)
	}
	if got := s.must("-o", "yaml"); !strings.Contains(got, "condition: \"False\"\n") {
		t.Errorf("YAML:\n%s", got)
	}
}

// TestMistypedCommand: a first word that is neither a command nor a node is refused with what was
// probably meant, and nothing is printed. A node may have the name of no command.
func TestMistypedCommand(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("statsu", 8, nil)
	for arguments, want := range map[string]string{
		"doctr":        `error: "doctr" is neither a command nor a node, did you mean "doctor"?; kubectl gpu --help lists the commands`,
		"doctr statsu": `error: "doctr" is neither a command nor a node, did you mean "doctor"?; kubectl gpu --help lists the commands`,
		"nowhere":      `error: "nowhere" is neither a command nor a node; kubectl gpu --help lists the commands`,
	} {
		out, problems, code := s.run(strings.Fields(arguments)...)
		if code != 1 || out != "" || !strings.Contains(problems, want) {
			t.Errorf("%s: %d, %q, %s", arguments, code, out, problems)
		}
	}
	if got := fields(s.must("statsu")); !strings.Contains(got, "statsu NVIDIA") {
		t.Errorf("a node that is named like a mistyped command:\n%s", got)
	}
	if got := s.must("--help"); !strings.Contains(got, "\n  kubectl gpu [NODE...] [flags]\n") {
		t.Errorf("help:\n%s", got)
	}
}

// slice returns the slice of a node with these devices.
func slice(node string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-gpu.nvidia.com-0"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1,
				ResourceSliceCount: 1}, Devices: devices,
		}}
}

func device(name string, taints ...resourceapi.DeviceTaint) resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	version := "580.95.5"
	return resourceapi.Device{Name: name, Taints: taints, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"type": text("gpu"), "uuid": text("GPU-" + strings.TrimPrefix(name,
			"gpu-")), "productName": text("NVIDIA H100"), "driverVersion": {VersionValue: &version},
	}}
}

func claim(name, node, pod string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: "1"}}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{
				Request: "r", Driver: "gpu.nvidia.com", Pool: node, Device: d,
			})
	}
	return c
}

// TestClaims: GPUs in ResourceSlices count as those of resources do, and their holders are the pods
// of claims. Nobody has to be asked for that.
func TestClaims(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 0, func(n *corev1.Node) { n.Labels, n.Status.Capacity, n.Status.Allocatable = nil, nil, nil })
	s.add("resourceslices", slice("a", device("gpu-0"), device("gpu-1",
		resourceapi.DeviceTaint{Key: "gpu.nvidia.com/xid", Value: "79", Effect: "NoSchedule"})))
	s.add("resourceclaims", claim("training", "a", "p", "gpu-0"))
	want := "NODE MODEL HEALTHY ALLOCATED ALL MIG DRIVER VERSION SINCE SOURCE\na NVIDIA H100 1 1 2 - 580.95.5 no daemon - ResourceSlice"
	if diff := cmp.Diff(want, fields(s.must())); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	list := func(state string, arguments ...string) {
		t.Helper()
		out, _, _ := s.run(append([]string{"list"}, arguments...)...)
		for _, row := range []string{"a gpu-0 NVIDIA H100 " + state + " team/p (claim training) ",
			"a gpu-1 NVIDIA H100 Unhealthy - "} {
			if got := fields(out); !strings.Contains(got, row) {
				t.Errorf("%q: %q is not in\n%s", arguments, row, got)
			}
		}
	}
	list("Unknown") // no daemon keeps the slice true
	s.addDaemon("daemon-a", "a", nil)
	list("Healthy", "--ask", "never")
	list("Unknown") // it does not respond
}

// TestDriverOfAnotherName: GPUs are those of any driver whose devices compute with CUDA, also of
// two on one node. A device of another driver is none, whatever its name and pool, nor is what of a
// pool is older than its newest slice.
func TestDriverOfAnotherName(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	capability := "9.0.0"
	of := func(driver string, generation int64, o *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
		o.Name, o.Spec.Driver, o.Spec.Pool.Generation = fmt.Sprintf("%s-%s-%d", *o.Spec.NodeName, driver,
			generation), driver, generation
		return o
	}
	computes := func(name string) resourceapi.Device {
		d := device(name)
		d.Attributes["cudaComputeCapability"] = resourceapi.DeviceAttribute{VersionValue: &capability}
		d.Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: ptr.To("GPU-example-" + name)}
		return d
	}
	by := func(driver string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		for i := range c.Status.Allocation.Devices.Results {
			c.Status.Allocation.Devices.Results[i].Driver = driver
		}
		return c
	}
	for _, node := range []string{"a", "b"} {
		s.addNode(node, 0, func(n *corev1.Node) { n.Labels, n.Status.Capacity, n.Status.Allocatable = nil, nil, nil })
	}
	s.add("resourceslices", of("gpu.example.com", 1, slice("a", computes("gpu-5"))))
	s.add("resourceslices", of("gpu.example.com", 2, slice("a", computes("gpu-0"), computes("gpu-1"))))
	s.add("resourceslices", of("gpu.nvidia.com", 1, slice("a", device("gpu-0"))))
	s.add("resourceslices", of("net.example.com", 9, slice("a", device("gpu-0"), device("gpu-7"))))
	s.add("resourceclaims", by("gpu.example.com", claim("training", "a", "p", "gpu-0")))
	s.add("resourceclaims", by("net.example.com", claim("network", "a", "q", "gpu-0", "gpu-1")))
	looks := by("gpu.example.com", claim("looks", "a", "r", "gpu-1"))
	looks.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	s.add("resourceclaims", looks)
	want := "NODE MODEL HEALTHY ALLOCATED ALL MIG DRIVER VERSION SINCE SOURCE\na NVIDIA H100 3 1 3 - 580.95.5 no daemon - ResourceSlice"
	if diff := cmp.Diff(want, fields(s.must())); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	out, _, _ := s.run("list")
	out = regexp.MustCompile(` no daemon runs .*`).ReplaceAllString(out, " REASON")
	want = `NODE GPU MODEL STATE HELD BY UTIL MEMORY SOURCE REMEDY REASON
a gpu-0 NVIDIA H100 Unknown team/p (claim training) - - ResourceSlice - REASON
a gpu-1 NVIDIA H100 Unknown team/r (claim looks) - - ResourceSlice - REASON
a gpu-0 NVIDIA H100 Unknown - - - ResourceSlice - REASON`
	if diff := cmp.Diff(want, fields(out)); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

// TestList: a line a GPU from the daemon, with its containers, MIG devices and measurements.
func TestList(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	ill := gpu(1, "Unhealthy")
	ill.Reason, ill.Remedy = "XID 79", "reboot"
	part := status.Device{Index: "1:0", UUID: "MIG-0", Model: "MIG 1g.10gb", GPU: "GPU-1", State: "Healthy"}
	s.addDaemon("daemon-a", "a", answering(status.Status{Version: "v1",
		GPUs: []status.Device{gpu(0, "Healthy"), ill, part}, Holders: []status.Holder{
			{Device: "GPU-0", Namespace: "team", Pod: "q", Container: "c",
				Receipt: &status.Receipt{MemoryMiB: 1024, Percentage: 25,
					Layer: "mps"}}, {Device: "GPU-0", Namespace: "team", Pod: "p", Container: "c", Claim: "shared"},
		}}))
	want := `NODE GPU MODEL STATE HELD BY UTIL MEMORY SOURCE REMEDY REASON
a 1 NVIDIA H100 80GB HBM3 Unhealthy - - - daemon reboot XID 79
a 0 NVIDIA H100 80GB HBM3 Healthy team/p/c (claim shared), team/q/c (1024 MiB, 25 percent, by mps) 87% 1024/81559 MiB daemon - -
a 1:0 MIG 1g.10gb Healthy - - - daemon - -`
	if diff := cmp.Diff(want, fields(s.must("list"))); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if got := s.must("list", "a", "-o", "wide"); !strings.Contains(got, "XID 79") || !strings.Contains(got, "reboot") {
		t.Errorf("wide:\n%s", got)
	}
}

// TestDaemonOfAnEarlierVersion: it does not know --holders, so kubelet's record in the status of
// pods counts, and no GPU is called free for it.
func TestDaemonOfAnEarlierVersion(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	now := answering(status.Status{Version: "v0.1.0", GPUs: []status.Device{gpu(0, "Healthy"), gpu(2, "Healthy")}})
	s.addDaemon("daemon-a", "a", func(arguments []string) (string, string, int) {
		if strings.Contains(strings.Join(arguments, " "), "--holders") {
			return "", "Error: unknown flag: --holders\n", 1
		}
		return now(arguments)
	})
	s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
		Spec: corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}, Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")},
		}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "c",
			AllocatedResourcesStatus: []corev1.ResourceStatus{
				{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: "GPU-0::3", Health: "Healthy"}}},
			}}}},
	})
	got := fields(s.must("list"))
	for _, line := range []string{"a 0 NVIDIA H100 80GB HBM3 Healthy team/p/c",
		"a 2 NVIDIA H100 80GB HBM3 Healthy unknown"} {
		if !strings.Contains(got, line) {
			t.Errorf("%q is not in\n%s", line, got)
		}
	}
}

// TestFailures: a daemon that does not respond and lists that are forbidden are named, and the rest
// is shown.
func TestFailures(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	s.addNode("b", 8, nil)
	s.addDaemon("daemon-a", "a", nil)
	s.addDaemon("daemon-b", "b", answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy")},
		Holders: []status.Holder{}}))
	out, problems, code := s.run("list")
	if code != 1 || !strings.Contains(problems, "node a: its daemon's pod kube-system/daemon-a does not respond: no daemon answers") ||
		!strings.Contains(fields(out), "b 0 NVIDIA H100 80GB HBM3 Healthy -") {
		t.Errorf("a daemon that does not respond: %d\n%s%s", code, problems, out)
	}
	for forbidden, want := range map[string]string{
		"nodes":          "a - 0 0 0 - - v0.1.0 3h",
		"pods":           "a NVIDIA H100 80GB HBM3 8 0 8 none 580.95.05 - -",
		"resourceslices": "a NVIDIA H100 80GB HBM3 8 0 8 none 580.95.05 v0.1.0 3h",
		"resourceclaims": "a NVIDIA H100 80GB HBM3 8 0 8 none 580.95.05 v0.1.0 3h",
	} {
		s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
			Only: func(r apiserver.Request) bool { return r.Resource == forbidden }})
		out, problems, code := s.run("--ask", "never")
		if code != 1 || !strings.Contains(strings.ToLower(problems), forbidden+" are not shown: you may not list them") ||
			!strings.Contains(fields(out), want) {
			t.Errorf("%s forbidden: %d\n%s%s", forbidden, code, problems, out)
		}
	}
	s.server.SetFault(apiserver.Fault{})
	if _, problems, code := s.run("nowhere"); code != 1 || !strings.Contains(problems, `nodes "nowhere" not found`) {
		t.Errorf("a node that is not there: %d, %s", code, problems)
	}
	for _, wrong := range [][]string{{"-o", "xml"}, {"--ask", "perhaps"}, {"--daemon-selector", "=="}, {"status"},
		{"status", "a", "b"}, {"doctor", "--", "a"}, {"health", "clear", "a"}, {"health", "clear", "--gpu", "3"}} {
		if out, problems, code := s.run(wrong...); code != 1 || !strings.HasPrefix(problems, "error: ") || out != "" {
			t.Errorf("%v: %d, %s%s", wrong, code, problems, out)
		}
	}
}

// TestListThatExpires: a list that expires between two pages is read again, and once.
func TestListThatExpires(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for i := range 600 {
		s.addNode(fmt.Sprintf("n-%03d", i), 8, nil)
	}
	list := apiserver.Request{Verb: "list", Resource: "nodes"}
	expire := func(expires func(request int) bool) {
		requests := 0
		s.server.SetFault(apiserver.Fault{Status: http.StatusGone, Only: func(r apiserver.Request) bool {
			if r == list {
				requests++
			}
			return r == list && expires(requests)
		}})
	}
	expire(func(request int) bool { return request == 2 })
	if got := strings.Count(s.must(), "\nn-"); got != 600 {
		t.Errorf("%d rows of 600 nodes", got)
	}
	expire(func(request int) bool { return request >= 2 })
	if _, problems, code := s.run(); code != 1 || !strings.Contains(problems, "nodes are not shown") {
		t.Errorf("a list that expires always: %d, %s", code, problems)
	}
	if got := s.server.Requests()[list]; got != 6 {
		t.Errorf("%d lists, want 3 and 3", got)
	}
}

// TestTwoNamespaces: where pods of two namespaces could be the daemon's, neither is asked before
// somebody says which one is.
func TestTwoNamespaces(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	s.addNode("b", 8, nil)
	d := answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy")}, Holders: []status.Holder{}})
	s.addDaemon("daemon-a", "a", d)
	s.addDaemon("daemon-b", "b", d)
	yes := true
	s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team", Name: "forged", Labels: map[string]string{"app.kubernetes.io/name": "gpu-device-plugin"}, CreationTimestamp: metav1.Now(),
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "forged", UID: "2",
			Controller: &yes}},
	}, Spec: corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: "gpu-device-plugin"}}}, Status: corev1.PodStatus{
		Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: readySince}},
	}})
	for _, arguments := range [][]string{{"list"}, {"--ask", "always"}, {"doctor", "a"}} {
		if _, problems, code := s.run(arguments...); code != 1 || !strings.Contains(problems, "set --daemon-namespace") {
			t.Errorf("%v: %d, %s", arguments, code, problems)
		}
	}
	if ran := strings.Join(s.commands(), ", "); strings.Contains(ran, "forged") || strings.Contains(ran, "daemon-a") ||
		!strings.Contains(ran, "daemon-b") {
		t.Errorf("asked: %s", ran)
	}
	s.must("list", "--daemon-namespace", "kube-system")
	if ran := strings.Join(s.commands(), ", "); strings.Contains(ran, "forged") || !strings.Contains(ran, "daemon-a") {
		t.Errorf("with a namespace asked: %s", ran)
	}
}

// TestParallelStatuses: of 100 daemons at most 20 are asked at the same time.
func TestParallelStatuses(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for i := range 100 {
		name := fmt.Sprintf("n-%03d", i)
		s.addNode(name, 8, func(n *corev1.Node) { n.Labels = nil })
		s.addDaemon("daemon-"+name, name, answering(status.Status{Version: "v1", Driver: "1.2.3",
			GPUs: []status.Device{gpu(0, "Healthy")}}))
	}
	if got := strings.Count(s.must(), "1.2.3"); got != 100 {
		t.Errorf("%d nodes have a driver", got)
	}
	if ran := s.commands(); len(ran) != 100 || s.most > 20 {
		t.Errorf("%d were asked, %d at once", len(ran), s.most)
	}
}

// TestCommandsOfANode: they run in the daemon's pod of that node alone; of two, the one that leads
// is asked, and both release the driver.
func TestCommandsOfANode(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, node := range []string{"a", "b", "c"} {
		s.addNode(node, 8, nil)
	}
	s.addDaemon("daemon-a", "a", answering(status.Status{}))
	s.addDaemon("old-b", "b", answering(status.Status{Lead: status.Lead{This: true}}))
	s.addDaemon("new-b", "b", answering(status.Status{}))
	// It has the labels, and is not of a DaemonSet: anybody can give a pod labels.
	s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "forged",
		Labels: map[string]string{"app.kubernetes.io/name": "gpu-device-plugin"}},
		Spec: corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: "gpu-device-plugin"}}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}})
	for _, tt := range []struct{ arguments, prints, runs string }{
		{"status a", "ran status\n", "daemon-a status"},
		{"status a -- -o wide", "ran status -o wide\n", "daemon-a status -o wide"},
		{"quiesce a -- --allocate", "ran quiesce --allocate\n", "daemon-a quiesce --allocate"},
		{"doctor b", "ran doctor\n", "old-b doctor"},
		{"validate b", "ran validate\n", "old-b validate"},
		{"validate b --gpu 3,4 -- -o yaml", "ran validate --gpu=3,4 -o yaml\n", "old-b validate --gpu=3,4 -o yaml"},
		{"quiesce b", "ran quiesce\nran quiesce\n", "old-b quiesce, new-b quiesce"},
		{"reset b --gpu 3 --gpu 4 --wait 10m", "ran reset --gpu=3,4 --wait=10m0s\n", "old-b reset --gpu=3,4 --wait=10m0s"},
		{"reset a --gpu GPU-x", "ran reset --gpu=GPU-x\n", "daemon-a reset --gpu=GPU-x"},
		{"health clear b --gpu 3", "ran health clear --gpu=3\nran health clear --gpu=3\n",
			"old-b health clear --gpu=3, new-b health clear --gpu=3"},
		{"resume b", "ran resume\nran resume\n", "old-b resume, new-b resume"},
	} {
		got := s.must(strings.Fields(tt.arguments)...)
		var ran []string
		for _, command := range s.commands() {
			if !strings.Contains(command, "json") {
				ran = append(ran, command)
			}
		}
		if got != tt.prints || strings.Join(ran, ", ") != tt.runs {
			t.Errorf("%s prints %q, runs %v", tt.arguments, got, ran)
		}
	}
	for arguments, want := range map[string]string{
		"status c": "no pod of the daemon runs on node c", "status nowhere": `nodes "nowhere" not found`,
		"resume a --daemon-namespace other": "no pod of the daemon runs on node a",
	} {
		if _, problems, code := s.run(strings.Fields(arguments)...); code != 1 || !strings.Contains(problems, want) {
			t.Errorf("%s: %d, %s", arguments, code, problems)
		}
	}
	s.addDaemon("daemon-a", "a", func([]string) (string, string, int) { return "found\n", "said\n", 3 })
	if out, problems, code := s.run("doctor", "a"); out != "found\n" || problems != "said\n" || code != 3 {
		t.Errorf("a command that fails: %q, %q, %d", out, problems, code)
	}
	s.addDaemon("old-b", "b", answering(status.Status{}))
	if _, problems, code := s.run("quiesce", "b"); code != 1 ||
		!strings.Contains(problems, "none of them says that it leads") {
		t.Errorf("no lead: %d, %s", code, problems)
	}
}

// TestInterrupt: a command ends with its context, also while exec does not respond, before and after
// the connection is open.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]bool{"no answer": false, "open": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			s.addNode("a", 8, nil)
			ctx, interrupt := context.WithCancel(t.Context())
			asked, over := make(chan struct{}), make(chan struct{})
			t.Cleanup(func() { close(over) })
			hang := func() { close(asked); <-over }
			s.addDaemon("daemon-a", "a", func([]string) (string, string, int) { hang(); return "", "", 0 })
			if !open {
				s.server.SetPods(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hang() }))
			}
			code := make(chan int, 1)
			go func() {
				code <- command.Run(ctx, []string{"--kubeconfig", s.server.Kubeconfig(), "doctor", "a"}, nil, io.Discard,
					io.Discard)
			}()
			<-asked
			interrupt()
			select {
			case got := <-code:
				if got != 1 {
					t.Errorf("exit status %d", got)
				}
			case <-time.After(10 * time.Second):
				t.Error("it does not end")
			}
		})
	}
}

// TestCompletion completes names of nodes and values of flags.
func TestCompletion(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("node-1", 8, nil)
	for _, arguments := range [][]string{{"__complete", ""}, {"__complete", "doctor", ""}} {
		if out, _, code := s.run(arguments...); code != 0 || !strings.HasPrefix(out, "node-1\n") &&
			!strings.Contains(out, "\nnode-1\n") {
			t.Errorf("%v: %d\n%s", arguments, code, out)
		}
	}
	if out, _, _ := s.run("__complete", "doctor", "node-1", ""); strings.HasPrefix(out, "node-1") {
		t.Errorf("a second node: %s", out)
	}
	if out, _, _ := s.run("__complete", "-o", ""); !strings.Contains(out, "wide\n") {
		t.Errorf("formats: %s", out)
	}
}
