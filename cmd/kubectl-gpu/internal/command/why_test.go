package command_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// TestWhyOfResources: each sentence about a pod that asks for a resource, by objects as the API
// server has them.
func TestWhyOfResources(t *testing.T) {
	t.Parallel()
	ill := func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: "GPUHealthy", Status: "False",
			Message: "GPU-3 Unhealthy: XID 79, remedy: reboot"}}
	}
	for name, tt := range map[string]struct {
		world func(*stage)
		want  string
	}{
		"no resource": {func(s *stage) { s.addPod("p", "", 4, corev1.PodPending) },
			"No node has nvidia.com/gpu, and no DeviceClass has it as its extendedResourceName. No daemon runs in the cluster: there is no DaemonSet"},
		"all taken": {func(s *stage) {
			s.addNode("a", 8, nil)
			s.addNode("b", 8, nil)
			s.addPod("x", "a", 6, corev1.PodRunning)
			s.addPod("y", "b", 5, corev1.PodRunning)
			s.addPod("p", "", 4, corev1.PodPending)
		}, "No node has 4 nvidia.com/gpu free; nearest is node b with 3 of 8: wait until pods end, request fewer, or add nodes."},
		"a GPU is ill": {func(s *stage) {
			s.addNode("a", 7, ill)
			s.addPod("p", "", 8, corev1.PodPending)
		}, "nearest is node a with 7 of 8, 1 of them not allocatable (its condition GPUHealthy, written at a time that is not known, says: GPU-3 Unhealthy: XID 79, remedy: reboot; no daemon runs on node a: there is no DaemonSet"},
		"a taint": {func(s *stage) {
			s.addNode("a", 8, func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: "NoSchedule"}} })
			s.addPod("p", "", 1, corev1.PodPending)
		}, "Node a has 8 nvidia.com/gpu free, and the pod does not tolerate its taint team=x:NoSchedule: add a toleration to the pod, or remove the taint."},
		"cordoned": {func(s *stage) {
			s.addNode("a", 8, func(n *corev1.Node) { n.Spec.Unschedulable = true })
			s.addPod("p", "", 1, corev1.PodPending)
		}, "it is cordoned: kubectl uncordon a."},
		"something else": {func(s *stage) {
			s.addNode("a", 8, nil)
			s.addPod("p", "", 1, corev1.PodPending)
		}, "There are GPUs for it, and the scheduler has not processed it yet."},
		"kubelet": {func(s *stage) {
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
				Spec: corev1.PodSpec{NodeName: "a"}, Status: corev1.PodStatus{
					Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError",
					Message: "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected",
				}})
		}, "The kubelet of node a did not admit it (UnexpectedAdmissionError): the scheduler's count was older than the kubelet's"},
		"lost": {func(s *stage) {
			s.addNode("a", 7, nil)
			d := gpu(3, "Lost")
			d.Reason, d.Remedy = "XID 79", "reboot"
			s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{d}}))
			s.addPod("p", "a", 1, corev1.PodRunning)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
				Spec: corev1.PodSpec{NodeName: "a", ResourceClaims: []corev1.PodResourceClaim{{Name: "c"}}}}
			pod.Status.Phase = corev1.PodRunning
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
				AllocatedResourcesStatus: []corev1.ResourceStatus{
					{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: "GPU-3",
						Health: corev1.ResourceHealthStatusUnhealthy}}},
				}}}
			s.add("pods", pod)
		}, "Container main has lost GPU-3: Lost: XID 79; remedy: reboot. The pod keeps running; delete it to get another GPU."},
		"crashes with its GPU": {func(s *stage) {
			s.addNode("a", 7, nil)
			s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{fallen(3)}, Holders: []status.Holder{
				{Device: "GPU-3", Namespace: "team", Pod: "p", Container: "c"}}}))
			s.addCrashing(false)
		}, "Container c does not start on node a (CrashLoopBackOff): back-off; it ended (Error, exit status 1). Its GPU GPU-3 is not " +
			"healthy: Lost: XID 79 (GPU fell off the bus): restart the node; remedy: reboot. Delete the pod to get another GPU. See what " +
			"it printed: kubectl logs -n team p -c c --previous.\n"},
		"crashes with a Healthy GPU": {func(s *stage) {
			s.addNode("a", 8, nil)
			s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{gpu(3, "Healthy")}, Holders: []status.Holder{
				{Device: "GPU-3", Namespace: "team", Pod: "p", Container: "c"}}}))
			s.addCrashing(false)
		}, "The daemon calls its GPUs Healthy: GPU-3. Check that CUDA works on them once no pod uses them: kubectl gpu validate a " +
			"--gpu GPU-3; and what a container gets: gpu-device-plugin check-container --devices 1 in a pod"},
		"runs again after a crash": {func(s *stage) {
			s.addNode("a", 8, nil)
			s.addDaemon("daemon-a", "a", answering(status.Status{GPUs: []status.Device{gpu(3, "Healthy")}, Holders: []status.Holder{
				{Device: "GPU-3", Namespace: "team", Pod: "p", Container: "c"}}}))
			s.addCrashing(true)
		}, "It runs on node a and has its GPUs: container c has GPU-3. But container c has crashed before: it ended (Error, exit " +
			"status 1). See what it printed: kubectl logs -n team p -c c --previous. The daemon calls its GPUs Healthy: GPU-3. "},
		"lost by a sidecar": {func(s *stage) {
			lost := []corev1.ResourceStatus{
				{Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: "GPU-3",
					Health: corev1.ResourceHealthStatusUnhealthy}}},
			}
			s.add("pods", &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
				Spec:       corev1.PodSpec{NodeName: "a", ResourceClaims: []corev1.PodResourceClaim{{Name: "c"}}},
				Status: corev1.PodStatus{Phase: corev1.PodRunning, InitContainerStatuses: []corev1.ContainerStatus{
					{Name: "first", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}},
						AllocatedResourcesStatus: lost},
					{Name: "sidecar", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}},
						AllocatedResourcesStatus: lost},
				}},
			})
		}, "Container sidecar has lost GPU-3: "},
		"a check before the start": {func(s *stage) {
			s.addWaiting("CreateContainerConfigError",
				"device plugin PreStartContainer rpc failed with err: rpc error: start a container on nvidia.com/gpu: GPU-3 is in use.")
		},
			"Container c waits for its GPU: device plugin PreStartContainer rpc failed with err: rpc error: start a container on nvidia.com/gpu: " +
				"GPU-3 is in use. It starts by itself when the GPU is good; to get another GPU, delete the pod."},
		"a file that is missing": {func(s *stage) { s.addWaiting("CreateContainerConfigError", `secret "s" not found`) },
			`Container c does not start on node a (CreateContainerConfigError): secret "s" not found.`},
		"an image that is missing": {func(s *stage) { s.addWaiting("ErrImagePull", "") },
			"Container c does not start on node a (ErrImagePull)."},
		"a container that is being made": {func(s *stage) { s.addWaiting("ContainerCreating", "") },
			"It is on node a, and its containers are being created."},
		"no GPU asked for": {func(s *stage) {
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"}})
		}, "It requests no GPU"},
		"a claim that is not there": {func(s *stage) {
			missing := "nowhere"
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"}, Spec: corev1.PodSpec{
				ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &missing}},
			}})
		}, "Its claim gpu does not exist"},
		"a claim that cannot be prepared": {func(s *stage) {
			own := "own"
			s.add("resourceclaims", claim("own", "a", "p", "gpu-0"))
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "2"},
				Spec: corev1.PodSpec{NodeName: "a",
					ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu",
						ResourceClaimName: &own}}}, Status: corev1.PodStatus{Phase: corev1.PodPending}})
			s.add("events", &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "e"},
				Reason: "FailedPrepareDynamicResources",
				Note:   "GPU 0 is in use.", Regarding: corev1.ObjectReference{Kind: "Pod", Namespace: "team", Name: "p", UID: "2"}})
		}, "Node a cannot prepare its claim: GPU 0 is in use. The kubelet retries."},
		"an Event that changes the terminal": {func(s *stage) {
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "2"},
				Spec: corev1.PodSpec{NodeName: "a",
					ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}}}, Status: corev1.PodStatus{Phase: corev1.PodPending}})
			s.add("events", &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "e"},
				Reason: "FailedPrepareDynamicResources",
				Note:   "GPU 0\n\x1b[2Jis gone", Regarding: corev1.ObjectReference{Kind: "Pod", Namespace: "team", Name: "p",
					UID: "2"}})
		}, "Node a cannot prepare its claim: GPU 0 ^[[2Jis gone."},
		"an Event of an earlier pod of that name": {func(s *stage) {
			s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "2"},
				Spec: corev1.PodSpec{NodeName: "a",
					ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}}}, Status: corev1.PodStatus{Phase: corev1.PodPending}})
			s.add("events", &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "e"},
				Reason: "FailedPrepareDynamicResources",
				Note:   "GPU 0 is in use.", Regarding: corev1.ObjectReference{Kind: "Pod", Namespace: "team", Name: "p", UID: "1"}})
		}, "It is on node a, and its containers are being created."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			tt.world(s)
			if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, tt.want) || strings.Count(got, "\n") != 1 {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}

// TestWhyOfClaims: which selector, taint, claim or constraint excludes which device.
func TestWhyOfClaims(t *testing.T) {
	t.Parallel()
	numa := func(d resourceapi.Device, node int64) resourceapi.Device {
		d.Attributes["numa"] = resourceapi.DeviceAttribute{IntValue: &node}
		return d
	}
	match := resourceapi.FullyQualifiedName("gpu.nvidia.com/numa")
	bad := device("gpu-1", resourceapi.DeviceTaint{Key: "gpu.nvidia.com/xid", Value: "79", Effect: "NoSchedule"})
	for name, tt := range map[string]struct {
		devices    []resourceapi.Device
		count      int64
		selector   string
		taken      string
		constraint *resourceapi.FullyQualifiedName
		want       string
	}{
		"a selector": {[]resourceapi.Device{device("gpu-0"), device("gpu-2")}, 1,
			`device.attributes["gpu.nvidia.com"].productName == "Tesla T4"`, "", nil,
			`No node has devices for request r of claim own; on node a, the selector "device.attributes[\"gpu.nvidia.com\"].productName == \"Tesla T4\"" of the request excludes gpu-0, gpu-2 (productName is NVIDIA H100).`},
		"a taint": {[]resourceapi.Device{bad}, 1, "", "", nil,
			"the taint gpu.nvidia.com/xid=79:NoSchedule excludes gpu-1."},
		"another claim": {[]resourceapi.Device{device("gpu-0"), bad}, 1, "", "gpu-0", nil,
			"another claim excludes gpu-0 (team/other of pod q); the taint gpu.nvidia.com/xid=79:NoSchedule excludes gpu-1; it has enough without the taints that request r of claim own does not tolerate."},
		"too few": {[]resourceapi.Device{device("gpu-0")}, 2, "", "", nil, "it has 1 of 2 devices."},
		"a constraint": {[]resourceapi.Device{numa(device("gpu-0"), 0), numa(device("gpu-1"), 1)}, 2, "", "", &match,
			"No node has devices for its claims with the constraint matchAttribute gpu.nvidia.com/numa of claim own; node a has enough without."},
		"nothing": {[]resourceapi.Device{device("gpu-0")}, 1, "", "", nil,
			"There are GPUs for it, and the scheduler has not processed it yet."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			s.addNode("a", 0, func(n *corev1.Node) { n.Status.Capacity, n.Status.Allocatable = nil, nil })
			s.add("resourceslices", slice("a", tt.devices...))
			s.add("deviceclasses", &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"},
				Spec: resourceapi.DeviceClassSpec{
					Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "gpu.nvidia.com"`}}},
				}})
			if tt.taken != "" {
				s.add("resourceclaims", claim("other", "a", "q", tt.taken))
			}
			r := resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com",
				AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: tt.count}
			if tt.selector != "" {
				r.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: tt.selector}}}
			}
			own := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "own"}}
			own.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &r}}
			if tt.constraint != nil {
				own.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: tt.constraint}}
			}
			s.waitsFor(own)
			if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, tt.want) {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}

// TestWhyOfAnUnpublishedGPU: Kubernetes 1.34 drops taints, so that a GPU that is not healthy is in no
// slice. The daemon names it.
func TestWhyOfAnUnpublishedGPU(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, o := range []string{node("a", "", ""), gpuClass, slicesOf("a", 1), claimed("q", "a", "gpu-0"),
		pod(oneGPU, "", "phase: Pending")} {
		s.load(o)
	}
	shown := holding()
	shown.DRA = &status.DRA{Mode: "dra", NoTaints: true, GPUs: []status.DRAGPU{{Index: 0, Owner: "dra"},
		{Index: 1, Owner: "dra", Unpublished: "the API server drops its taint gpu.nvidia.com/xid"}}}
	s.addDaemon("daemon-a", "a", answering(shown))
	const want = "another claim excludes gpu-0 (team/q-extended-resources of pod q). GPU 1 of node a is in no " +
		"ResourceSlice: the API server drops its taint gpu.nvidia.com/xid."
	if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, want) || strings.Contains(got, "GPU 0 of") {
		t.Errorf("it says %q, want %q", got, want)
	}
}

// waitsFor adds a claim, and the pod team/p that is pending for it.
func (s *stage) waitsFor(claim *resourceapi.ResourceClaim) {
	s.t.Helper()
	s.add("resourceclaims", claim)
	s.add("pods", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"}, Spec: corev1.PodSpec{
		ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim.Name}},
	}, Status: corev1.PodStatus{Phase: corev1.PodPending}})
}

// TestWhyOfClaimsOfSeveralNodes: of several nodes that have too little the nearest is named, with
// what excludes its devices: counters and capacities, too. A node that has enough and that the pod
// cannot go to hides no other one.
func TestWhyOfClaimsOfSeveralNodes(t *testing.T) {
	t.Parallel()
	quantity := resource.MustParse
	counted := func(name, counters string) resourceapi.Device {
		d := device(name)
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu-0",
			Counters: map[string]resourceapi.Counter{"slices": {Value: quantity(counters)}}}}
		return d
	}
	sized := func(name, memory string) resourceapi.Device {
		d := device(name)
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: quantity(memory)}}
		return d
	}
	counters := func(node string, devices ...resourceapi.Device) []*resourceapi.ResourceSlice {
		sets := slice(node)
		sets.Name, sets.Spec.SharedCounters = node+"-counters", []resourceapi.CounterSet{{Name: "gpu-0",
			Counters: map[string]resourceapi.Counter{"slices": {Value: quantity("7")}}}}
		all := []*resourceapi.ResourceSlice{slice(node, devices...), sets}
		for _, s := range all {
			s.Spec.Pool.ResourceSliceCount = 2
		}
		return all
	}
	tainted := func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: "NoSchedule"}} }
	of := func(count int64) *resourceapi.ExactDeviceRequest {
		return &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com",
			AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	}
	watches, wants := of(1), of(1)
	yes := true
	watches.AdminAccess = &yes
	wants.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": quantity("40Gi")}}
	for name, tt := range map[string]struct {
		slices   []*resourceapi.ResourceSlice
		first    func(*corev1.Node)
		requests []resourceapi.DeviceRequest
		want     string
	}{
		"a device to look at": {[]*resourceapi.ResourceSlice{slice("b", device("taken"))}, nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: watches},
				{Name: "s", Exactly: of(2)}}, "for request s of claim own; on node b, another claim excludes taken (team/other of pod q)."},
		"a slice is missing": {counters("b", device("gpu-0"))[:1], nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(1)}}, "on node b, its pool, of which 1 of 2 slices is there, excludes gpu-0."},
		"the second has more": {[]*resourceapi.ResourceSlice{slice("a", device("gpu-0")),
			slice("b", device("gpu-0"), device("gpu-1"))}, nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(3)}}, "for request r of claim own; on node b, it has 2 of 3 devices."},
		"the second has enough": {[]*resourceapi.ResourceSlice{slice("a", device("gpu-0")), slice("b", device("gpu-0"))},
			tainted,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(1)}}, "There are GPUs for it, and the scheduler has not processed it yet."},
		"the first has enough": {[]*resourceapi.ResourceSlice{slice("a", device("gpu-0"), device("gpu-1")),
			slice("b", device("gpu-0"))}, tainted,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(2)}}, "Node a has devices for its claims, and the pod does not tolerate its taint team=x:NoSchedule"},
		"neither, and the nearer has a taint": {[]*resourceapi.ResourceSlice{slice("a", device("gpu-0"))}, tainted,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(2)}}, "it has 1 of 2 devices; and the pod does not tolerate its taint team=x:NoSchedule: add a toleration to the pod, or remove the taint."},
		"a counter": {counters("b", counted("taken", "4"), counted("mig-0", "4")), nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(1)}}, "on node b, another claim excludes taken (team/other of pod q); the counter slices of gpu-0, of which 3 is left (team/other of pod q), excludes mig-0."},
		"a capacity": {[]*resourceapi.ResourceSlice{slice("a", sized("gpu-0", "24Gi"), sized("gpu-1", "39Gi"))}, nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: wants}}, "on node a, the capacity memory, of which 24Gi is left, excludes gpu-0; the capacity memory, of which 39Gi is left, excludes gpu-1; " +
				"it has enough without the capacity of request r of claim own."},
		"two requests": {[]*resourceapi.ResourceSlice{slice("a", device("gpu-0"))}, nil,
			[]resourceapi.DeviceRequest{{Name: "r", Exactly: of(1)},
				{Name: "s", Exactly: of(1)}}, "No node has devices for its claims with request r of claim own; node a has enough without."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			for i, node := range []string{"a", "b"} {
				s.addNode(node, 0, func(n *corev1.Node) {
					if n.Status.Capacity, n.Status.Allocatable = nil, nil; i == 0 && tt.first != nil {
						tt.first(n)
					}
				})
			}
			for _, one := range tt.slices {
				s.add("resourceslices", one)
			}
			s.add("deviceclasses", &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"}})
			s.add("resourceclaims", claim("other", "b", "q", "taken"))
			own := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "own"}}
			own.Spec.Devices.Requests = tt.requests
			s.waitsFor(own)
			if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, tt.want) {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}

// TestWhyWithoutAPod: a controller that may make none has the reason in an Event. What may not be
// read makes the sentence one that may be wrong.
func TestWhyWithoutAPod(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.add("events", &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "e"}, Reason: "FailedCreate",
		Note: `pods "job-1" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 8, limited: 8`, Regarding: corev1.ObjectReference{Kind: "Job", Namespace: "team", Name: "job"}})
	if _, problems, code := s.run("why", "job", "-n", "team"); code != 1 ||
		!strings.Contains(problems, "Job job could not make one: pods \"job-1\" is forbidden: exceeded quota") {
		t.Errorf("a quota: %d, %s", code, problems)
	}
	if _, problems, code := s.run("why", "nobody", "-n", "team"); code != 1 ||
		!strings.Contains(problems, `pods "nobody" not found`) {
		t.Errorf("nobody: %d, %s", code, problems)
	}
	s.addNode("a", 8, nil)
	s.addPod("p", "", 1, corev1.PodPending)
	s.server.SetFault(apiserver.Fault{Status: http.StatusForbidden,
		Only: func(r apiserver.Request) bool { return r.Resource == "events" }})
	if out, problems, code := s.run("why", "p", "-n", "team"); code != 1 ||
		!strings.Contains(problems, "Events are not shown: you may not list them") ||
		!strings.HasPrefix(out, "There are GPUs") {
		t.Errorf("Events are forbidden: %d, %s%s", code, problems, out)
	}
}

// TestWhyNamesHolders: the claims that have a device, a counter or a capacity that a pod wants are
// named, with the pods that they are reserved for; of many the first ones. Claims of other counters
// and those of administrators are not.
func TestWhyNamesHolders(t *testing.T) {
	t.Parallel()
	quantity := resource.MustParse
	counted := func(name, set, counters string) resourceapi.Device {
		d := device(name)
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set,
			Counters: map[string]resourceapi.Counter{"slices": {Value: quantity(counters)}}}}
		return d
	}
	shared := device("shared")
	multiple := true
	shared.AllowMultipleAllocations, shared.Capacity = &multiple, map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: quantity("40Gi")}}
	sets := slice("a")
	sets.Name = "a-counters"
	for _, set := range []string{"gpu-0", "gpu-1"} {
		sets.Spec.SharedCounters = append(sets.Spec.SharedCounters,
			resourceapi.CounterSet{Name: set, Counters: map[string]resourceapi.Counter{"slices": {Value: quantity("7")}}})
	}
	devices := slice("a", counted("gpu-0-mig-0", "gpu-0", "1"), counted("gpu-0-mig-1", "gpu-0", "1"),
		counted("gpu-0-mig-2", "gpu-0", "1"), counted("gpu-0-mig-3", "gpu-0", "1"),
		counted("gpu-0", "gpu-0", "7"), counted("gpu-1", "gpu-1", "8"), shared)
	for _, s := range []*resourceapi.ResourceSlice{sets, devices} {
		s.Spec.Pool.ResourceSliceCount = 2
	}
	admin, share := claim("watcher", "a", "w", "gpu-0-mig-0"), claim("half", "a", "h", "shared")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = &multiple
	id := types.UID("6d2d2a6d-7a3f-4c1e-9d0c-0d4b8f3c1a52")
	share.Status.Allocation.Devices.Results[0].ShareID = &id
	share.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": quantity("30Gi")}
	several := claim("several", "a", "q", "gpu-0-mig-0")
	for _, pod := range []string{"r", "s", "t"} {
		several.Status.ReservedFor = append(several.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod})
	}
	unused := claim("unused", "a", "", "gpu-0-mig-1")
	unused.Status.ReservedFor = nil
	another := claim("zz", "a", "q2", "gpu-0-mig-3")
	for name, tt := range map[string]struct {
		device string
		memory string
		claims []*resourceapi.ResourceClaim
		want   string
	}{
		"a counter": {"gpu-0", "", []*resourceapi.ResourceClaim{several, unused, admin},
			"the counter slices of gpu-0, of which 5 is left (team/several of pod q, pod r, pod s and 1 more; team/unused of no pod), excludes gpu-0."},
		"a counter of many": {"gpu-0", "", []*resourceapi.ResourceClaim{several, unused,
			claim("workload", "a", "x", "gpu-0-mig-2"), another},
			"(team/several of pod q, pod r, pod s and 1 more; team/unused of no pod; team/workload of pod x and 1 more), excludes gpu-0."},
		"a counter that nobody has": {"gpu-1", "", []*resourceapi.ResourceClaim{several},
			"the counter slices of gpu-1, of which 7 is left, excludes gpu-1."},
		"a device": {"gpu-0-mig-1", "", []*resourceapi.ResourceClaim{unused},
			"another claim excludes gpu-0-mig-1 (team/unused of no pod)."},
		"a capacity": {"shared", "20Gi", []*resourceapi.ResourceClaim{share},
			"the capacity memory, of which 10Gi is left (team/half of pod h), excludes shared."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			s.addNode("a", 0, func(n *corev1.Node) { n.Status.Capacity, n.Status.Allocatable = nil, nil })
			s.add("resourceslices", sets.DeepCopy())
			s.add("resourceslices", devices.DeepCopy())
			s.add("deviceclasses", &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"},
				Spec: resourceapi.DeviceClassSpec{
					Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["gpu.nvidia.com"].uuid == "GPU-` + strings.TrimPrefix(tt.device, "gpu-") + `"`}}},
				}})
			for _, c := range tt.claims {
				s.add("resourceclaims", c.DeepCopy())
			}
			r := resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com",
				AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
			if tt.memory != "" {
				r.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": quantity(tt.memory)}}
			}
			own := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "own"}}
			own.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &r}}
			s.waitsFor(own)
			if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, tt.want) {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}

// TestWhyWithEndlessSearch: the scheduler tries each combination of devices, and gives up
// after 10 s; kubectl gpu says so soon, and what is known without a search.
func TestWhyWithEndlessSearch(t *testing.T) {
	t.Parallel()
	const perGPU = 6
	for _, tt := range []struct {
		gpus int
		want int64
		says string
	}{
		{8, 9, "Whether node a has devices for its claims together takes too many steps to find out, also for the scheduler, which gives up after 10 s: " +
			"request fewer devices in a claim, or select them more closely."},
		{4, 25, "on node a, it has 24 of 25 devices."},
		{8, 8, "There are GPUs for it, and the scheduler has not processed it yet."},
	} {
		t.Run(fmt.Sprintf("%d devices of %d GPUs", tt.want, tt.gpus), func(t *testing.T) {
			t.Parallel()
			counters := func(amount string) map[string]resourceapi.Counter {
				return map[string]resourceapi.Counter{"slices": {Value: resource.MustParse(amount)}}
			}
			sets, devices := slice("a"), slice("a")
			sets.Name = "a-counters"
			for gpu := range tt.gpus {
				set := fmt.Sprint("gpu-", gpu)
				sets.Spec.SharedCounters = append(sets.Spec.SharedCounters,
					resourceapi.CounterSet{Name: set, Counters: counters("7")})
				for place := range perGPU {
					d := device(fmt.Sprint(set, "-mig-", place))
					d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counters("4")}}
					devices.Spec.Devices = append(devices.Spec.Devices, d)
				}
			}
			s := newStage(t)
			s.addNode("a", 0, func(n *corev1.Node) { n.Status.Capacity, n.Status.Allocatable = nil, nil })
			for _, of := range []*resourceapi.ResourceSlice{sets, devices} {
				of.Spec.Pool.ResourceSliceCount = 2
				s.add("resourceslices", of)
			}
			s.add("deviceclasses", &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"}})
			own := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "own"}}
			own.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: tt.want,
			}}}
			s.waitsFor(own)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var out, problems bytes.Buffer
			command.Run(ctx, []string{"--kubeconfig", s.server.Kubeconfig(), "why", "p", "-n", "team"}, nil, &out, &problems)
			if got := out.String(); !strings.Contains(got, tt.says) || ctx.Err() != nil {
				t.Errorf("it says %q%s, error %v, want %q", got, problems.String(), ctx.Err(), tt.says)
			}
		})
	}
}
