package command_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// load adds objects in YAML, as users post them.
func (s *stage) load(documents string) {
	s.t.Helper()
	for document := range strings.SplitSeq(documents, "\n---\n") {
		object, kind, err := scheme.Codecs.UniversalDeserializer().Decode([]byte(document), nil, nil)
		if err != nil {
			s.t.Fatalf("%v in:\n%s", err, document)
		}
		plural, _ := meta.UnsafeGuessKindToResource(*kind)
		s.add(plural.Resource, object)
	}
}

// pod returns the pod team/p, whose container c asks for something; more is the rest of its spec,
// and status its status.
func pod(asks, more, status string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {namespace: team, name: p, uid: '7'}\nspec:\n" +
		"  containers:\n  - {name: c, image: i, resources: {requests: {" + asks + "}, limits: {" + asks + "}}}\n" + more +
		"\nstatus: {" + status + "}"
}

// node returns a node without labels that has resources.
func node(name, capacity, allocatable string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Node\nmetadata: {name: %s}\nstatus: {capacity: {%s}, allocatable: {%s}}",
		name, capacity, allocatable)
}

// gpuClass is the class of whole GPUs, as the chart and NVIDIA's driver have it.
const gpuClass = `apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu.nvidia.com}
spec:
  selectors: [{cel: {expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"}}]
  extendedResourceName: nvidia.com/gpu`

// slicesOf returns the slice of a node with so many GPUs.
func slicesOf(node string, gpus int) string {
	text := fmt.Sprintf("apiVersion: resource.k8s.io/v1\nkind: ResourceSlice\nmetadata: {name: %s-0}\nspec:\n  driver: gpu.nvidia.com\n  nodeName: %s\n"+
		"  pool: {name: %s, generation: 1, resourceSliceCount: 1}\n  devices:\n", node, node, node)
	for i := range gpus {
		text += fmt.Sprintf("  - {name: gpu-%d, attributes: {type: {string: gpu}, uuid: {string: GPU-%d}, productName: {string: NVIDIA H100 80GB HBM3}, "+
			"architecture: {string: Hopper}, driverVersion: {version: 580.95.5}}, capacity: {memory: {value: 81559Mi}}}\n", i, i)
	}
	return text
}

// claimed returns the claim that the scheduler made for the extended resource of another pod.
func claimed(name, node, device string) string {
	return fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {namespace: team, name: %s-extended-resources, annotations: {resource.kubernetes.io/extended-resource-claim: "true"}}
status:
  allocation: {devices: {results: [{request: container-0-request-0, driver: gpu.nvidia.com, pool: %s, device: %s}]}}
  reservedFor: [{resource: pods, name: %s, uid: "1"}]
---
apiVersion: v1
kind: Pod
metadata: {namespace: team, name: %s}
spec:
  nodeName: %s
  containers: [{name: c, image: i, resources: {requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 1}}}]
status:
  phase: Running
  extendedResourceClaimStatus: {resourceClaimName: %s-extended-resources, requestMappings: [{containerName: c, resourceName: nvidia.com/gpu, requestName: container-0-request-0}]}`,
		name, node, device, name, name, node, name)
}

const (
	oneGPU = "nvidia.com/gpu: 1"
	onA    = "  nodeName: a"
)

// waitingIn returns the status of a pod whose container c waits.
func waitingIn(phase, reason, message string) string {
	return fmt.Sprintf("phase: %s, containerStatuses: [{name: c, image: i, imageID: x, state: {waiting: {reason: %s, message: %q}}}]", phase, reason, message)
}

// event returns an Event about the pod team/p.
func event(name, reason, note string) string {
	return fmt.Sprintf("apiVersion: events.k8s.io/v1\nkind: Event\nmetadata: {namespace: team, name: %s}\ntype: Warning\nreason: %s\nnote: %q\n"+
		"regarding: {kind: Pod, namespace: team, name: p, uid: '7'}", name, reason, note)
}

// daemonSet returns the daemon's DaemonSet, whose pods want something of their node.
func daemonSet(wants string) string {
	return "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {namespace: kube-system, name: gpu-device-plugin}\nspec:\n" +
		"  selector: {matchLabels: {app.kubernetes.io/name: gpu-device-plugin}}\n  template:\n    metadata: {labels: {app.kubernetes.io/name: gpu-device-plugin}}\n" +
		"    spec: {containers: [{name: gpu-device-plugin, image: i}], " + wants + "}"
}

// nfdAffinity is the affinity of the chart, short.
const nfdAffinity = "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" +
	"{matchExpressions: [{key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ['true']}]}, " +
	"{matchExpressions: [{key: nvidia.com/gpu.present, operator: In, values: ['true']}]}]}}}"

// running is the status of a pod whose container c runs.
const running = "phase: Running, containerStatuses: [{name: c, image: i, imageID: x, state: {running: {}}}]"

// holding returns a daemon whose kubelet says that container c of team/p holds a GPU.
func holding(devices ...string) status.Status {
	s := status.Status{Version: "v0.1.0", GPUs: []status.Device{gpu(0, "Healthy"), gpu(1, "Healthy")},
		Holders: []status.Holder{}}
	for _, d := range devices {
		s.Holders = append(s.Holders, status.Holder{Device: d, Namespace: "team", Pod: "p", Container: "c"})
	}
	return s
}

// doctored returns a daemon that answers with a status, and whose doctor finds NVIDIA's runtime
// beside another default one, or none.
func doctored(told status.Status, handlers ...doctor.RuntimeHandler) daemon {
	answer := answering(told)
	return func(arguments []string) (string, string, int) {
		if arguments[0] != "doctor" {
			return answer(arguments)
		}
		facts := doctor.NodeFacts{Settings: doctor.Settings{Envvar: true}}
		facts.Toolkit.Value.EnvvarUnprivileged = true
		facts.Runtime.Value = doctor.Runtime{Name: doctor.Containerd, Readings: []doctor.Reading{
			{Default: "runc", Handlers: append(handlers, doctor.RuntimeHandler{Name: "runc", Program: "/usr/bin/runc"})},
		}}
		text, _ := json.Marshal(map[string]any{"findings": doctor.Examine(facts)})
		return string(text), "", 1
	}
}

// asClass is NVIDIA's runtime as a runtime class.
var asClass = doctor.RuntimeHandler{Name: "nvidia", Program: "/usr/bin/nvidia-container-runtime"}

// TestFieldWhy: what users reported, by the number of the report, and what `kubectl gpu why` has to
// say of it.
func TestFieldWhy(t *testing.T) {
	t.Parallel()
	const sandbox = `Failed to create pod sandbox: rpc error: code = Unknown desc = failed to get sandbox runtime: no runtime for "nvidia" is configured`
	ill := holding()
	for i := range ill.GPUs {
		ill.GPUs[i].State, ill.GPUs[i].Reason, ill.GPUs[i].Remedy = "Unhealthy", "the fabric manager does not run", "human"
	}
	departs := holding()
	departs.Resources = []status.Resource{{Name: "nvidia.com/gpu", Devices: 16, Healthy: 8}}
	for i := range 8 {
		departs.Resources[0].Departing = append(departs.Resources[0].Departing,
			status.Departing{ID: fmt.Sprint("GPU-0::", i), Reason: "the number of shares changed"})
	}
	units := holding()
	units.Resources = []status.Resource{{Name: "example.com/memory.1Gi", Devices: 160, Healthy: 40, Unoffered: 120}}
	byMPS := holding("GPU-0")
	byMPS.Resources = []status.Resource{{Name: "nvidia.com/gpu", Planned: true, MPS: true}}
	ownSHM := func(status string) string {
		return strings.Replace(pod(oneGPU, onA, status), "image: i,",
			"image: i, volumeMounts: [{name: shm, mountPath: /dev/shm/}],", 1)
	}
	for name, tt := range map[string]struct {
		objects []string
		daemon  daemon // of node a; nil for none
		want    string
		never   string
	}{
		// By claims.
		"nv#738 all taken": {[]string{node("a", "", ""), gpuClass, slicesOf("a", 1), claimed("q", "a", "gpu-0"),
			pod(oneGPU, "", "phase: Pending")}, nil,
			"nvidia.com/gpu is provided by claims of the class gpu.nvidia.com. No node has devices for 1 nvidia.com/gpu of container c; " +
				"on node a, another claim excludes gpu-0 (team/q-extended-resources of pod q).", "serves it on none"},
		"kueue#9868 one is free": {[]string{node("a", "", ""), gpuClass, slicesOf("a", 2), claimed("q", "a", "gpu-0"),
			pod(oneGPU, "", "phase: Pending")}, nil,
			"There are GPUs for it, and the scheduler has not processed it yet.", "No node"},
		"KEP-5004 the resource is left with 0": {[]string{node("a", "nvidia.com/gpu: 0", "nvidia.com/gpu: 0"), gpuClass,
			slicesOf("a", 1), pod("nvidia.com/gpu: 2", "", "phase: Pending")}, nil,
			"No node has devices for 2 nvidia.com/gpu of container c; on node a, it has 1 of 2 devices.", ""},
		"KEP-5004 the name of the class": {[]string{node("a", "", ""), gpuClass, slicesOf("a", 1), claimed("q", "a", "gpu-0"),
			pod("deviceclass.resource.kubernetes.io/gpu.nvidia.com: 1", "", "phase: Pending")}, nil,
			"deviceclass.resource.kubernetes.io/gpu.nvidia.com is provided by claims of the class gpu.nvidia.com. No node has devices for 1", "requests no GPU"},
		"KEP-5004 a class that is not there": {[]string{node("a", "nvidia.com/gpu: 8", "nvidia.com/gpu: 8"),
			pod("deviceclass.resource.kubernetes.io/mig: 1", "", "phase: Pending")}, answering(holding()),
			"deviceclass.resource.kubernetes.io/mig is provided by claims of a class, and no DeviceClass is called mig; nodes have nvidia.com/gpu", "requests no GPU"},
		"KEP-5004 a cordoned node": {[]string{strings.Replace(node("a", "", ""), "status:",
			"spec: {unschedulable: true}\nstatus:", 1), gpuClass, slicesOf("a", 1), pod(oneGPU, "", "phase: Pending")}, nil,
			"Node a has devices for its claims, and it is cordoned: kubectl uncordon a.", ""},
		"KEP-5004 a class with a name of another prefix": {[]string{node("a", "", ""),
			strings.ReplaceAll(gpuClass, "nvidia.com/gpu", "example.com/accelerator"),
			slicesOf("a", 1), pod("example.com/accelerator: 2", "",
				"phase: Pending")}, nil, "example.com/accelerator is provided by claims of the class gpu.nvidia.com. " +
			"No node has devices for 2 example.com/accelerator of container c", "requests no GPU"},
		"KEP-5004 a MIG name by a class": {[]string{node("a", "", ""),
			strings.NewReplacer("nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "== 'gpu'", "== 'mig'").Replace(gpuClass),
			slicesOf("a", 1), pod("nvidia.com/mig-1g.10gb: 1", "",
				"phase: Pending")}, nil, "nvidia.com/mig-1g.10gb is provided by claims of the class gpu.nvidia.com. ", "serves it on none"},
		"KEP-5004 one node plugs, another one claims": {[]string{node("a", oneGPU, oneGPU), node("b", "", ""), gpuClass,
			slicesOf("b", 1), pod("nvidia.com/gpu: 1", "", "phase: Pending"),
			strings.Replace(pod(oneGPU, onA, "phase: Running"), "name: p,", "name: other,",
				1)}, nil, "There are GPUs for it", "No node"},
		"KEP-5004 a class without slices": {[]string{node("a", "", ""), gpuClass, pod(oneGPU, "", "phase: Pending")}, nil,
			"No node has nvidia.com/gpu, neither by a device plugin nor, for its class gpu.nvidia.com, in ResourceSlices.", ""},
		"KEP-5004 an init container needs more": {[]string{node("a", "", ""), gpuClass, slicesOf("a", 2),
			pod(oneGPU, "  initContainers: [{name: first, image: i, resources: {requests: {nvidia.com/gpu: 3}, limits: {nvidia.com/gpu: 3}}}]", "phase: Pending")}, nil,
			"No node has devices for its claims", "There are GPUs"},

		// Units, under their own names and under others.
		"units that are taken": {[]string{node("a", "volcano.sh/gpu-mem.128Mi: 160", "volcano.sh/gpu-mem.128Mi: 160"),
			pod("volcano.sh/gpu-mem.128Mi: 200", "", "phase: Pending")}, nil,
			"No node has 200 volcano.sh/gpu-mem.128Mi free; nearest is node a with 160 of 160", "requests no GPU"},
		"units of another name": {[]string{node("a", "example.com/memory.1Gi: 160", "example.com/memory.1Gi: 40"),
			pod("example.com/memory.1Gi: 80", "", "phase: Pending")}, answering(units),
			"nearest is node a with 40 of 160, 120 of them not allocatable (its daemon says: 120 units are on other GPUs than the one that is offered, because units.fit is one)", "requests no GPU"},
		"another kind of device": {[]string{node("a", "example.com/nic: 1, nvidia.com/gpu: 8",
			"example.com/nic: 1, nvidia.com/gpu: 8"), pod("example.com/nic: 1", "", "phase: Pending")}, answering(holding()),
			"It requests no GPU: its containers have no limit of a GPU resource such as nvidia.com/gpu, and it has no claim; nodes have nvidia.com/gpu.", ""},
		"a resource that nobody serves": {[]string{node("a", "nvidia.com/gpu: 8", "nvidia.com/gpu: 8"),
			pod("nvida.com/gpu: 1", "", "phase: Pending")}, answering(holding()),
			"No node has nvida.com/gpu, and no DeviceClass has it as its extendedResourceName; nodes have nvidia.com/gpu: request one of these", "requests no GPU"},
		"HAMi's words": {[]string{node("a", "nvidia.com/gpu: 8", "nvidia.com/gpu: 8"),
			pod("nvidia.com/gpu: 1, nvidia.com/gpumem: 3000", "", "phase: Pending")}, answering(holding()),
			"No node has nvidia.com/gpumem", ""},

		// Where the pod can go.
		"a nodeSelector": {[]string{strings.Replace(node("a", oneGPU, oneGPU), "{name: a}",
			"{name: a, labels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}", 1),
			pod(oneGPU, "  nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB, pool: train}", "phase: Pending")}, nil,
			"its nodeSelector wants nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB, and the node has nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3; its nodeSelector wants pool=train, and the node has no such label.", ""},
		"an affinity": {[]string{strings.Replace(node("a", oneGPU, oneGPU), "{name: a}", "{name: a, labels: {arch: hopper}}",
			1),
			pod(oneGPU, "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: arch, operator: In, values: [Hopper, Ampere]}]}]}}}", "phase: Pending")}, nil,
			"its affinity wants arch in Hopper, Ampere, and the node has arch=hopper.", ""},
		"all GPUs for one cause": {[]string{node("a", "nvidia.com/gpu: 2", "nvidia.com/gpu: 0"),
			pod(oneGPU, "", "phase: Pending")}, answering(ill),
			"nearest is node a with 0 of 2, 2 of them not allocatable (its daemon says: all 2: Unhealthy: the fabric manager does not run; remedy: manual (needs an operator)).", "kubectl gpu list"},
		"MPS does not respond": {[]string{node("a", "nvidia.com/gpu: 4", "nvidia.com/gpu: 0"),
			pod(oneGPU, "", "phase: Pending")},
			answering(status.Status{GPUs: []status.Device{gpu(0, "Healthy")},
				MPS: []string{"nvidia.com/gpu: the MPS control daemon does not respond"}}),
			"(its daemon says: nvidia.com/gpu: the MPS control daemon does not respond)", "count is older"},
		"8 of 16 are departing": {[]string{node("a", "nvidia.com/gpu: 16", "nvidia.com/gpu: 8"),
			pod("nvidia.com/gpu: 9", "", "phase: Pending")}, answering(departs),
			"nearest is node a with 8 of 8 (its daemon says: 8 are departing: all 8: the number of shares changed).", "of 16"},
		"all GPUs for one cause, by the condition": {[]string{node("a", "nvidia.com/gpu: 2",
			"nvidia.com/gpu: 0}, conditions: [{type: GPUHealthy, status: 'False', "+
				"message: 'GPU-0 Unhealthy: XID 79, remedy: reboot; GPU-1 Unhealthy: XID 79, remedy: reboot'}], nodeInfo: {architecture: x"), pod(oneGPU, "", "phase: Pending")}, nil,
			"says: GPU-0, GPU-1 Unhealthy: XID 79, remedy: reboot; no daemon runs on node a", "kubectl gpu list"},
		"more than any node has": {[]string{node("a", "nvidia.com/gpu: 8", "nvidia.com/gpu: 8"),
			pod("nvidia.com/gpu: 16", "", "phase: Pending")}, nil,
			"nearest is node a with 8 of 8: no node has so many at all; request 8 at most, or add nodes with more.", "wait until"},
		"a pod group": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, "  schedulingGroup: {podGroupName: train}",
			"phase: Pending")}, nil,
			"scheduled together with the other pods of its PodGroup train", ""},
		"nvkind#4 no daemon anywhere": {[]string{node("a", "", ""), daemonSet(nfdAffinity),
			pod(oneGPU, "", "phase: Pending")}, nil,
			"No daemon runs in the cluster: DaemonSet kube-system/gpu-device-plugin wants a pod on 0 of 1 nodes: it selects nodes with feature.node", ""},
		"a daemon without a driver": {[]string{node("a", "nvidia.com/gpu: 0", "nvidia.com/gpu: 0"),
			pod(oneGPU, "", "phase: Pending")}, answering(status.Status{Stale: "no NVIDIA driver"}),
			"The daemon of node a says: no NVIDIA driver; to find the cause, run: gpu-device-plugin doctor; see kubectl gpu doctor a.", ""},
		"gates": {[]string{pod(oneGPU, "  schedulingGates: [{name: kueue.x-k8s.io/admission}, {name: other}]",
			"phase: Pending")}, nil,
			"It is not scheduled before its gates kueue.x-k8s.io/admission, other are removed: Kueue does so when its Workload is admitted", ""},
		"another scheduler": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, "  schedulerName: volcano", "phase: Pending")},
			nil,
			"its scheduler volcano has not processed it yet: check whether that scheduler runs.", ""},
		"preemption": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, "",
			"phase: Pending, nominatedNodeName: a, conditions: [{type: PodScheduled, status: 'False', message: 1 Insufficient cpu.}]")}, nil,
			"the scheduler says: 1 Insufficient cpu. It waits for pods on node a that are ended for it.", ""},

		// Containers that do not start.
		"it runs": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)}, answering(holding("GPU-0")),
			"It runs on node a and has its GPUs: container c has GPU-0.", ""},
		"it runs, and nobody tells": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)}, nil,
			"It runs on node a. Whether its GPUs are in it is not known: no daemon runs on node a: there is no DaemonSet", "has its GPUs"},
		"it passed by the scheduler": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)}, answering(holding()),
			"It runs on node a, and the kubelet has given container c no GPU", "has its GPUs"},
		"gop#413 no runtime handler": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA+"\n  runtimeClassName: nvidia", waitingIn("Pending", "ContainerCreating", "")), event("e",
				"FailedCreatePodSandBox", sandbox)},
			answering(holding()), `its containers cannot be created (FailedCreatePodSandBox): ` + sandbox +
				". The container runtime of the node does not know the runtime class of the pod", "has its GPUs"},
		"kdp#805 /dev/shm of the pod's own beside MPS": {[]string{node("a", oneGPU, oneGPU), ownSHM(running)},
			answering(byMPS),
			"Container c mounts the volume shm at /dev/shm. It hides the shared memory of MPS, which shares nvidia.com/gpu: remove that mount", "and has its GPUs"},
		"kdp#805 and it crashes": {[]string{node("a", oneGPU, oneGPU),
			ownSHM(waitingIn("Running", "CrashLoopBackOff", "back-off 40s"))}, answering(byMPS),
			"-c c --previous. Container c mounts the volume shm at /dev/shm.", ""},
		"/dev/shm of the pod's own without MPS": {[]string{node("a", oneGPU, oneGPU), ownSHM(running)},
			answering(holding("GPU-0")),
			"It runs on node a and has its GPUs: container c has GPU-0.", "/dev/shm"},
		"MPS without /dev/shm of the pod's own": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)},
			answering(byMPS),
			"It runs on node a and has its GPUs: container c has GPU-0.", "/dev/shm"},
		"no runtime class": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)},
			doctored(holding("GPU-0"), asClass),
			"the kubelet has given it GPUs that its containers may not see: container c has GPU-0. The pod has no runtimeClassName, and doctor says of node a", "and has its GPUs"},
		"no runtime class, and it crashes": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Running, containerStatuses: [{name: c, image: i, imageID: x, restartCount: 4, "+
				"state: {waiting: {reason: CrashLoopBackOff, message: back-off 40s}}, lastState: {terminated: {exitCode: 1, reason: Error}}}]")},
			doctored(holding("GPU-0"), asClass),
			"Container c does not start on node a (CrashLoopBackOff): back-off 40s; it ended (Error, exit status 1). See what it printed: kubectl logs -n team p -c c --previous. The pod has no runtimeClassName", "has its GPUs"},
		"no runtime of NVIDIA's": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA+"\n  runtimeClassName: x", running)},
			doctored(holding("GPU-0")),
			"GPUs that its containers may not see: container c has GPU-0. Doctor says of node a: containerd does not have NVIDIA's runtime, and the device list strategy needs it: containers get no GPUs.", "and has its GPUs"},
		"a runtime class": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA+"\n  runtimeClassName: nvidia", running)},
			doctored(holding("GPU-0"), asClass),
			"It runs on node a and has its GPUs", "runtimeClassName"},
		"RunContainerError": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, waitingIn("Running", "RunContainerError",
				"failed to create containerd task: nvidia-container-cli: initialization error: nvml error: driver not loaded"))},
			answering(holding()), "Container c does not start on node a (RunContainerError): failed to create containerd task: nvidia-container-cli: initialization error: nvml error: driver not loaded. " +
				"The container runtime cannot use the NVIDIA driver of the node; the cause, with the remedy: kubectl gpu doctor a.", "has its GPUs"},
		"CDI": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA,
			waitingIn("Pending", "CreateContainerError", "CDI device injection failed: unresolvable CDI devices runtime.nvidia.com/gpu=GPU-0"))},
			nil, "The container runtime does not find the CDI spec of the device: CDI is off there, or it looks in another folder. Nothing more is known of the node: no daemon runs on node a", "kubectl gpu doctor"},
		"an image in a phase Running": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, waitingIn("Running", "ImagePullBackOff", "Back-off pulling image"))}, nil,
			"Container c does not start on node a (ImagePullBackOff): Back-off pulling image. This is not a GPU problem", "has its GPUs"},
		"a failed init container": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Pending, initContainerStatuses: [{name: first, image: i, imageID: x, state: {waiting: {reason: CrashLoopBackOff, "+
				"message: back-off}}, lastState: {terminated: {exitCode: 137, reason: OOMKilled}}}], containerStatuses: [{name: c, image: i, imageID: x, state: {waiting: {reason: PodInitializing}}}]")}, nil,
			"Container first does not start on node a (CrashLoopBackOff): back-off; it ended (OOMKilled, exit status 137). It needed more memory of the node than its limit", ""},
		"an init container that runs": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Pending, initContainerStatuses: [{name: first, image: i, imageID: x, state: {running: {}}}], "+
				"containerStatuses: [{name: c, image: i, imageID: x, state: {waiting: {reason: PodInitializing}}}]")}, nil,
			"It is on node a, and waits for its init container first, which runs.", "has its GPUs"},
		"a sidecar that ended": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Running, initContainerStatuses: [{name: side, image: i, imageID: x, state: {terminated: {exitCode: 2, reason: Error}}}], "+
				"containerStatuses: [{name: c, image: i, imageID: x, state: {running: {}}}]")}, answering(holding("GPU-0")), "Container side ended on node a (Error, exit status 2). See what it printed: kubectl logs -n team p -c side.", ""},
		"StartError of a Job": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Failed, containerStatuses: [{name: c, image: i, imageID: x, state: {terminated: {exitCode: 128, reason: StartError, "+
				"message: 'nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0'}}}]")}, nil,
			"Container c ended on node a (StartError, exit status 128): nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0. The image needs a newer driver than the node has", "It has ended."},
		"a volume": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, waitingIn("Pending", "ContainerCreating", "")),
			event("e", "FailedMount", `configmap "x" not found`)}, nil,
			`its containers cannot be created (FailedMount): configmap "x" not found. This is not a GPU problem: check its volumes.`, ""},
		"what kept it from a node is over": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, waitingIn("Pending", "ContainerCreating", "")), event("e", "FailedScheduling",
				"0/3 nodes are available")}, nil,
			"It is on node a, and its containers are being created.", "0/3"},
		"OutOfnvidia.com/gpu": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Failed, reason: OutOfnvidia.com/gpu, message: 'Pod was rejected: Node didn''t have enough resource: nvidia.com/gpu, requested: 1, used: 1, capacity: 1'")}, nil,
			"The kubelet of node a did not admit it (OutOfnvidia.com/gpu): Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1, used: 1, capacity: 1. Its count was newer than the scheduler's", ""},
		"UnexpectedAdmissionError, all ill": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Failed, reason: UnexpectedAdmissionError, message: 'Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected'")},
			answering(ill), "a controller does that by itself. Now, the daemon of node a says: all 2: Unhealthy: the fabric manager does not run; remedy: manual (needs an operator).", ""},
		"a label that is gone": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA+"\n  nodeSelector: {pool: train}", "phase: Failed, reason: NodeAffinity, message: Predicate NodeAffinity failed")}, nil,
			"did not admit it (NodeAffinity): Predicate NodeAffinity failed: the pod does not select it: its nodeSelector wants pool=train, and the node has no such label.", ""},
		"the runtimes of the node": {[]string{node("a", oneGPU,
			oneGPU+"}, runtimeHandlers: [{name: ''}, {name: runc}, {name: kata}], nodeInfo: {architecture: x"), pod(oneGPU, onA+
			"\n  runtimeClassName: nvidia", waitingIn("Pending", "ContainerCreating", "")),
			event("e", "FailedCreatePodSandBox", "failed to find runtime handler nvidia from runtime list map[]")}, nil, "The node has the runtimes kata, runc. Nothing more is known of the node", ""},
		"the kubelet's record alone": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, "phase: Running, containerStatuses: [{name: c, image: i, imageID: x, state: {running: {}}, "+
				"allocatedResourcesStatus: [{name: nvidia.com/gpu, resources: [{resourceID: 'GPU-0::1', health: Healthy}]}]}]")}, nil,
			"It runs on node a, and by the kubelet's record in the pod's status container c has GPU-0. Nothing newer is known: no daemon runs on node a", "has its GPUs"},
		"an eviction": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA,
			"phase: Failed, reason: Evicted, message: The node was low on resource memory.")}, nil,
			"It has failed (Evicted): The node was low on resource memory:", "did not admit"},
		"a kubelet that does not respond": {[]string{node("a", oneGPU,
			oneGPU+"}, conditions: [{type: Ready, status: Unknown}], nodeInfo: {architecture: x"), pod(oneGPU, onA, running)}, nil,
			"The kubelet of node a does not respond, so the pod's status is out of date. It runs on node a. Whether", ""},
		"a GPU that is ill without a word of the kubelet": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA, running)},
			answering(func() status.Status { s := ill; s.Holders = holding("GPU-1").Holders; return s }()),
			"container c has GPU-1, which is not healthy: Unhealthy: the fabric manager does not run; remedy: manual (needs an operator).", "and has its GPUs"},
		"units that differ from what was asked for": {[]string{node("a", "volcano.sh/gpu-mem.128Mi: 160",
			"volcano.sh/gpu-mem.128Mi: 160"), pod("volcano.sh/gpu-mem.128Mi: 8", onA, running)},
			answering(func() status.Status {
				s := holding("GPU-0")
				s.Holders[0].Receipt = &status.Receipt{MemoryMiB: 1024, Layer: "mps",
					Differences: []string{"the control daemon has no limit for it"}}
				return s
			}()), "container c has GPU-0 (1024 MiB, by mps, not as requested; the control daemon has no limit for it).", ""},
		"an image does not need the runtime class": {[]string{node("a", oneGPU, oneGPU),
			pod(oneGPU, onA, waitingIn("Pending", "ErrImagePull", "not found"))},
			doctored(holding("GPU-0"), asClass), "This is not a GPU problem", "runtimeClassName"},
		"a refusal": {[]string{node("a", oneGPU, oneGPU), pod(oneGPU, onA,
			"phase: Failed, reason: UnexpectedAdmissionError, message: 'Allocate failed due to rpc error: device GPU-0 is not healthy: XID 79'")}, nil,
			"did not admit it (UnexpectedAdmissionError): Allocate failed due to rpc error: device GPU-0 is not healthy: XID 79: the daemon refused the GPU. Create the pod again", "kubectl gpu list"},
		"a claim for the resource runs": {[]string{node("a", "", ""), gpuClass, slicesOf("a", 1),
			strings.ReplaceAll(claimed("p", "a", "gpu-0"), "phase: Running",
				strings.ReplaceAll(running, ", containerStatuses", "\n  containerStatuses"))}, answering(holding("GPU-0")),
			"It runs on node a and has its GPUs: container c has GPU-0.", ""},
		"a pod that ends": {[]string{node("a", oneGPU, oneGPU),
			strings.Replace(pod(oneGPU, onA, running), "uid: '7'",
				"uid: '7', finalizers: [example.com/x], deletionTimestamp: '2026-11-01T00:00:00Z'", 1)}, nil,
			"it waits for its finalizer example.com/x. It keeps its GPUs until it has ended.", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			for _, o := range tt.objects {
				s.load(o)
			}
			if tt.daemon != nil {
				s.addDaemon("daemon-a", "a", tt.daemon)
			}
			got := s.must("why", "p", "-n", "team")
			if !strings.Contains(got, tt.want) || strings.Count(got, "\n") != 1 ||
				tt.never != "" && strings.Contains(got, tt.never) {
				t.Errorf("it says\n%swant\n%s\nnever\n%s", got, tt.want, tt.never)
			}
		})
	}
}

// TestFieldNodes: what `kubectl gpu` and `kubectl gpu list` show of nodes as users have them, and
// what they say on standard error.
func TestFieldNodes(t *testing.T) {
	t.Parallel()
	labelled := func(labels string) string {
		return strings.Replace(node("a", "", ""), "{name: a}", "{name: a, labels: {"+labels+"}}", 1)
	}
	const nfd = "feature.node.kubernetes.io/pci-0302_10de.present: 'true'"
	daemonPod := func(status string) string {
		return "apiVersion: v1\nkind: Pod\nmetadata: {namespace: kube-system, name: daemon-x, labels: {app.kubernetes.io/name: gpu-device-plugin}, ownerReferences: [{apiVersion: apps/v1, " +
			"kind: DaemonSet, name: gpu-device-plugin, uid: '1', controller: true}]}\nspec: {nodeName: a, containers: [{name: gpu-device-plugin, image: i}]}\nstatus: {" + status + "}"
	}
	stale := status.Status{Version: "v0.1.0", Driver: "595.91.07", GPUs: []status.Device{gpu(0, "Healthy")}}
	stale.GPUs[0].Model = "NVIDIA B200"
	shares := status.Status{GPUs: []status.Device{gpu(0, "Healthy")}, Driver: "580.95.05",
		Resources: []status.Resource{{Name: "nvidia.com/gpu", Devices: 16, Healthy: 8,
			Departing: make([]status.Departing, 8)}, {Name: "example.com/memory.1Gi", Devices: 80, Healthy: 80}}}
	for name, tt := range map[string]struct {
		objects   []string
		daemon    daemon
		arguments string
		rows      string // on standard output
		says      string // on standard error
	}{
		"units": {[]string{node("a", "volcano.sh/gpu-mem.128Mi: 160, volcano.sh/gpu-core.percentage: 200",
			"volcano.sh/gpu-mem.128Mi: 160, volcano.sh/gpu-core.percentage: 200")},
			answering(holding()), "", "a NVIDIA H100 80GB HBM3 160 0 160 -", ""},
		"units of another name, and shares that depart": {[]string{node("a", "nvidia.com/gpu: 16, example.com/memory.1Gi: 80",
			"nvidia.com/gpu: 8, example.com/memory.1Gi: 80"),
			strings.Replace(pod("example.com/memory.1Gi: 20", onA, running), "name: p", "name: q", 1)}, answering(shares),
			"-o wide", "a NVIDIA H100 80GB HBM3 88 20 88 - 580.95.05 v0.1.0 3h daemon 1 example.com/memory.1Gi 20/80, nvidia.com/gpu 0/8 (8 departing)", ""},
		"another kind of device": {[]string{node("a", "example.com/nic: 4", "example.com/nic: 4")}, answering(holding()), "",
			"a NVIDIA H100 80GB HBM3 0 0 0 -", ""},
		"a resource with 0": {[]string{node("a", "nvidia.com/gpu: 0", "nvidia.com/gpu: 0")}, nil, "",
			"a - 0 0 0 - - no daemon", "No daemon runs in the cluster: there is no DaemonSet"},
		"KEP-5004 counts once": {[]string{node("a", "nvidia.com/gpu: 0", "nvidia.com/gpu: 0"), slicesOf("a", 2),
			claimed("q", "a", "gpu-0")}, nil, "", "a NVIDIA H100 80GB HBM3 2 1 2 -", ""},
		"stale labels": {[]string{labelled("nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3, nvidia.com/cuda.driver-version.full: 580.95.05")}, answering(stale), "--ask=always",
			"a NVIDIA B200 0 0 0 - 595.91.07 v0.1.0 3h daemon", "Node a: its label nvidia.com/gpu.product says NVIDIA H100 80GB HBM3, and its daemon NVIDIA B200: the label is stale."},
		"labels without a daemon": {[]string{labelled("nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3, nvidia.com/cuda.driver-version.full: 580.95.05") + "\n---\n" + daemonSet("")}, nil, "",
			"a NVIDIA H100 80GB HBM3 0 0 0 - 580.95.05 no daemon - label", "No daemon runs in the cluster, thus none on node a: DaemonSet kube-system/gpu-device-plugin selects it and has no pod there"},
		"kdp#1213 labels of stock NFD": {[]string{labelled(nfd), daemonSet(nfdAffinity)}, nil, "", "a - 0 0 0 - - no daemon",
			"DaemonSet kube-system/gpu-device-plugin does not select it: its affinity wants feature.node.kubernetes.io/pci-10de.present=true, or " +
				"nvidia.com/gpu.present=true, and the node has none of these; if it has NVIDIA GPUs: kubectl label node NODE nvidia.com/gpu.present=true."},
		"nvkind#4 no label at all": {[]string{node("a", "", ""), daemonSet(nfdAffinity)}, nil, "", "",
			"No daemon runs in the cluster: DaemonSet kube-system/gpu-device-plugin wants a pod on 0 of 1 nodes: it selects nodes with feature.node.kubernetes.io/pci-10de.present=true, or nvidia.com/gpu.present=true"},
		"gop#78 a nodeSelector": {[]string{labelled(nfd), daemonSet("nodeSelector: {nvidia.com/gpu.present: 'true'}")}, nil,
			"a", "a - 0 0 0 - - no daemon",
			"it: its nodeSelector wants nvidia.com/gpu.present=true, and the node has no such label; if it has NVIDIA GPUs: kubectl label node NODE nvidia.com/gpu.present=true."},
		"talos#12103 a taint": {[]string{strings.Replace(labelled(nfd), "status:",
			"spec: {taints: [{key: dedicated, value: gpu, effect: NoSchedule}]}\nstatus:", 1), daemonSet("")}, nil, "a", "",
			"No daemon runs on node a: DaemonSet kube-system/gpu-device-plugin does not tolerate its taint dedicated=gpu:NoSchedule"},
		"a cordoned node keeps no DaemonSet away": {[]string{strings.Replace(labelled(nfd), "status:",
			"spec: {unschedulable: true, taints: [{key: node.kubernetes.io/unschedulable, effect: NoSchedule}]}\nstatus:", 1), daemonSet("")},
			nil, "a", "", "selects it and has no pod there"},
		"its pod crashes": {[]string{labelled(nfd), daemonSet(""),
			daemonPod("phase: Running, containerStatuses: [{name: gpu-device-plugin, image: i, imageID: x, state: {waiting: {reason: CrashLoopBackOff, message: back-off 5m0s}}, " +
				"lastState: {terminated: {exitCode: 1, reason: Error, message: no NVIDIA driver}}}]")}, nil, "a", "a - 0 0 0 - - no daemon",
			"No daemon runs on node a: container gpu-device-plugin of its pod kube-system/daemon-x does not start (CrashLoopBackOff): back-off 5m0s; it ended (Error, exit status 1): no NVIDIA driver."},
		"a container beside it crashes": {[]string{labelled(nfd), daemonSet(""),
			strings.Replace(daemonPod("phase: Running, containerStatuses: [{name: gpu-device-plugin, image: i, imageID: x, state: {running: {}}}, "+
				"{name: agent, image: i, imageID: x, state: {waiting: {reason: CrashLoopBackOff}}}]"), "image: i}]}", "image: 'i:v7'}, {name: agent, image: j}]}", 1)}, nil, "a --ask never", "a - 0 0 0 - - v7 not ready -", ""},
		"its pod cannot be scheduled": {[]string{labelled(nfd), daemonSet(""),
			daemonPod("phase: Pending, conditions: [{type: PodScheduled, status: 'False', message: '0/1 nodes: 1 Insufficient memory.'}]")}, nil, "a", "",
			"its pod kube-system/daemon-x is not scheduled: 0/1 nodes: 1 Insufficient memory."},
		"its pod has no folder": {[]string{labelled(nfd), daemonSet(""),
			daemonPod("phase: Pending, containerStatuses: [{name: gpu-device-plugin, image: i, imageID: x, state: {waiting: {reason: ContainerCreating}}}]"),
			"apiVersion: events.k8s.io/v1\nkind: Event\nmetadata: {namespace: kube-system, name: e}\ntype: Warning\nreason: FailedMount\nnote: 'hostPath type check failed: /var/lib/kubelet/pod-resources is not a directory'\n" +
				"regarding: {kind: Pod, namespace: kube-system, name: daemon-x}"}, nil, "a", "", "its pod kube-system/daemon-x is Pending: hostPath type check failed: /var/lib/kubelet/pod-resources is not a directory."},
		"its pod cannot be made": {[]string{labelled(nfd), daemonSet("") +
			"\nstatus: {desiredNumberScheduled: 1, currentNumberScheduled: 0, numberMisscheduled: 0, numberReady: 0}",
			"apiVersion: events.k8s.io/v1\nkind: Event\nmetadata: {namespace: kube-system, name: e}\ntype: Warning\nreason: FailedCreate\nnote: 'violates PodSecurity \"restricted:latest\"'\n" +
				"regarding: {kind: DaemonSet, namespace: kube-system, name: gpu-device-plugin}"}, nil, "a", "", `DaemonSet kube-system/gpu-device-plugin cannot make its pod: violates PodSecurity "restricted:latest".`},
		"a layout without a daemon": {[]string{labelled("nvidia.com/mig.config: all-balanced, nvidia.com/mig.config.state: success, nvidia.com/gpu.count: '8'")}, nil, "",
			"a - 0 0 0 all-balanced (success) by its label - no daemon - label", ""},
		"a list where nothing is": {[]string{node("a", "nvidia.com/gpu: 8", "nvidia.com/gpu: 7"), daemonSet("")}, nil,
			"list -o wide",
			"a - - Unknown unknown - - - - - - no daemon runs on the node: DaemonSet kube-system/gpu-device-plugin selects it and has no pod there: see kubectl describe daemonset -n kube-system gpu-device-plugin; the Node has 7 of 8 nvidia.com/gpu", ""},
		"a daemon without a driver": {[]string{node("a", "", "")}, answering(status.Status{Stale: "no NVIDIA driver"}),
			"list -o wide", "a - - Unknown unknown - - - - - - no NVIDIA driver; to find the cause, run: gpu-device-plugin doctor", ""},
		"a node that is not ready": {[]string{node("a", oneGPU,
			oneGPU+"}, conditions: [{type: Ready, status: Unknown, lastTransitionTime: '2026-11-01T00:00:00Z'}], nodeInfo: {architecture: x")}, nil, "", "a - 1 0 1", "Node a has not been ready for"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			for _, o := range tt.objects {
				s.load(o)
			}
			if tt.daemon != nil {
				s.addDaemon("daemon-a", "a", tt.daemon)
			}
			out, problems, code := s.run(strings.Fields(tt.arguments)...)
			if code != 0 || !strings.Contains(fields(out), tt.rows) || !strings.Contains(problems, tt.says) ||
				tt.rows == "" && strings.Count(out, "\n") > 2 {
				t.Errorf("exit status %d\n%s\n%s\nwant\n%s\n%s", code, fields(out), problems, tt.rows, tt.says)
			}
		})
	}
}

// TestFieldCommandsOfANode: a command that finds no daemon says why none runs there.
func TestFieldCommandsOfANode(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, func(n *corev1.Node) { n.Labels = nil })
	s.load(daemonSet(nfdAffinity))
	if _, problems, code := s.run("status", "a"); code != 1 ||
		!strings.Contains(problems, "no pod of the daemon runs on node a: DaemonSet kube-system/gpu-device-plugin does not select it: its affinity wants") {
		t.Errorf("exit status %d: %s", code, problems)
	}
}

// TestFieldSelectors: what devices have of that which a selector asks for stands beside it.
func TestFieldSelectors(t *testing.T) {
	t.Parallel()
	for selector, want := range map[string]string{
		`device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) >= 0`:          "excludes gpu-0, gpu-1 (memory is 81559Mi).",
		`device.attributes["gpu.nvidia.com"].architecture == "hopper"`:                       "excludes gpu-0, gpu-1 (architecture is Hopper).",
		`device.attributes["gpu.nvidia.com"]["productName"].startsWith("A100")`:              "excludes gpu-0, gpu-1 (productName is NVIDIA H100 80GB HBM3).",
		`device.attributes["gpu.nvidia.com"].index == 3`:                                     "CEL runtime error: no such key: index",
		`device.driver == "gpu.example.com"`:                                                 "excludes gpu-0, gpu-1 (driver is gpu.nvidia.com).",
		`device.attributes["gpu.nvidia.com"].uuid in ["GPU-9"]`:                              "excludes gpu-0 (uuid is GPU-0), gpu-1 (uuid is GPU-1).",
		`device.attributes["gpu.nvidia.com"].driverVersion.compareTo(semver("590.0.0")) > 0`: "excludes gpu-0, gpu-1 (driverVersion is 580.95.5).",
		`device.attributes["gpu.nvidia.com"].?family.orValue("") == "Hopper"`:                "excludes gpu-0, gpu-1 (no attribute gpu.nvidia.com/family).",
	} {
		t.Run(selector, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			for _, o := range []string{node("a", "", ""), gpuClass, slicesOf("a", 2),
				pod("cpu: 1", "  resourceClaims: [{name: gpu, resourceClaimName: own}]", "phase: Pending"),
				"apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {namespace: team, name: own}\nspec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.nvidia.com, " +
					"allocationMode: ExactCount, count: 1, selectors: [{cel: {expression: " + fmt.Sprintf("%q", selector) +
					"}}]}}]}}"} {
				s.load(o)
			}
			if got := s.must("why", "p", "-n", "team"); !strings.Contains(got, want) {
				t.Errorf("it says %q, want %q", got, want)
			}
		})
	}
}

// TestFieldErrorsOfOthers: what daemons say on their standard error is bounded, and changes no
// terminal, also where it is an error of the command itself.
func TestFieldErrorsOfOthers(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	s.addNode("a", 8, nil)
	noisy := func([]string) (string, string, int) {
		return "", strings.Repeat("\x1b[2J bad ", 1<<16) + strings.Repeat("\nline", 1000), 1
	}
	s.addDaemon("old", "a", noisy)
	s.addDaemon("new", "a", noisy)
	for _, arguments := range [][]string{{"quiesce", "a"}, {"list"}, {"--ask", "always"}} {
		if _, problems, code := s.run(arguments...); code != 1 || len(problems) > 20_000 ||
			strings.Contains(problems, "\x1b") {
			t.Errorf("%v: exit status %d, %d bytes, %.200q", arguments, code, len(problems), problems)
		}
	}
}

// TestFieldLabelsOfTheChart: a node with a label by which the chart selects nodes is shown, also
// without a daemon.
func TestFieldLabelsOfTheChart(t *testing.T) {
	t.Parallel()
	values, err := os.ReadFile("../../../../deployments/helm/gpu-device-plugin/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := newStage(t)
	labels := regexp.MustCompile(`(?m)^ +- \{key: (\S+/\S+), operator: (?:Exists|In, values: \["?(\w+)"?\])\}$`).FindAllStringSubmatch(string(values), -1)
	for i, label := range labels {
		if label[2] == "" {
			label[2] = "nvidia-h100"
		}
		s.load(strings.Replace(node(fmt.Sprint("n-", i), "", ""), "{name:",
			fmt.Sprintf("{labels: {%s: '%s'}, name:", label[1], label[2]), 1))
	}
	if got := s.must(); len(labels) < 10 || strings.Count(got, "\nn-") != len(labels) {
		t.Errorf("%q\n%s", labels, got)
	}
}
