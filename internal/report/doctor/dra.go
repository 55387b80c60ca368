package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// draDriver is the name of NVIDIA's DRA driver for GPUs, and the default name of this program's
// driver.
const draDriver = "gpu.nvidia.com"

// allocation judges Dynamic Resource Allocation: the state at the kubelet and the API server, and
// whether each GPU is offered in one way only.
func allocation(f *NodeFacts, r *findings) {
	if !require(r, f.Daemon) {
		return
	}
	s := f.Daemon.Value.Status
	if s.DRA == nil {
		r.ok("No GPU is offered by Dynamic Resource Allocation")
		return
	}
	const registrations = "journalctl -u kubelet -n 200 | grep -iE 'plugin_manager|plugin_watcher|dra'"
	const served = "kubectl get --raw /apis/resource.k8s.io"
	driver := cmp.Or(s.DRA.DriverName, draDriver)
	slicesOfNode := "kubectl get resourceslices --field-selector spec.driver=" + driver + ",spec.nodeName=NODE"
	switch d := s.DRA.Driver; {
	case d.NameConflict != "":
		r.fail("dra-driver-twice",
			"Another driver named "+driver+" is registered with the kubelet: this driver publishes nothing "+
				"until the other one is removed",
			[]string{d.NameConflict}, "kubectl get pods -A -o wide --field-selector spec.nodeName=NODE | grep -iE "+
				"'nvidia|gpu|dra'", slicesOfNode)
	case !d.Registered && f.Settings.Claims:
		r.fail("dra-not-registered", "The kubelet has not registered the driver for claims: "+cmp.Or(d.Problem,
			"it has not checked the driver's socket yet"),
			nil,
			registrations, "ls -l /var/lib/kubelet/plugins_registry   # in the container: the same path has to be "+
				"mounted")
	}
	driverName(s.DRA, r)
	if s.DRA.Problem != "" {
		r.fail("slices-differ",
			"The ResourceSlices of this node are not as wanted: "+s.DRA.Problem, nil, served, slicesOfNode)
	}
	switch s.DRA.API {
	case "", "v1":
	default:
		r.info("dra-api-old",
			"The API server serves resource.k8s.io as "+s.DRA.API+", and may drop newer fields, such as taints",
			[]string{"status: dra: api: " + s.DRA.API}, served)
	}
	onlyEnvvar := f.Settings.Envvar && !f.Settings.VolumeMounts && !f.Settings.CDI && !f.Settings.DeviceNodes
	if onlyEnvvar && s.DRA.Mode == "split" {
		r.fail("dra-cdi-spec",
			"A container with nvidia.com/gpu and a claim gets only the GPU of its claim: the CDI spec of the "+
				"claim sets NVIDIA_VISIBLE_DEVICES=void, by which NVIDIA's runtime would give it the other GPU",
			[]string{"status: dra: mode: split", "the device list strategy is envvar"},
			"gpu-device-plugin --device-list-strategy=cdi-cri   # in the DaemonSet")
	}
	const gates = "kubectl get --raw /metrics | grep 'kubernetes_feature_enabled.*DRA'"
	gate := func(name string) string {
		return "kube-apiserver --feature-gates=" + name + "=true   # also kube-scheduler's; on by default since " +
			"Kubernetes 1.36; gpu-node-agent notices within an hour"
	}
	if s.DRA.NoTaints {
		r.info("dra-no-taints",
			"The API server does not keep taints of devices: a faulty GPU is left out of its slice, and "+
				"claims that tolerate the fault do not get it", []string{"status: dra: noTaints: true"},
			gate("DRADeviceTaints"), gates)
	}
	if s.DRA.NoCounters {
		r.fail("dra-no-counters",
			"The API server keeps no counters of devices: MIG devices created for claims are not published, "+
				"and GPUs in MIG mode are offered to nobody", []string{"status: dra: noCounters: true"},
			gate("DRAPartitionableDevices")+"; of no use on Kubernetes 1.34, which has other rules for counters", gates)
	}
	if s.DRA.NoShares {
		r.warn("dra-no-shares", "The API server keeps no shares of devices: GPUs to be shared are allocated as a whole",
			[]string{"status: dra: noShares: true"}, gate("DRAConsumableCapacity"), gates)
	}
	inSlices := offeredTwice(f, s, r)
	waiting(s.DRA, r)
	if !r.hasProblem() {
		published := wording.Count(s.DRA.Slices, "ResourceSlice")
		r.ok(fmt.Sprintf("%s of %d in %s", wording.Count(inSlices, "GPU"), len(s.DRA.GPUs), published), "status: dra")
	}
}

// waiting finds GPUs that pods get neither by the device plugin nor by new claims.
func waiting(s *status.DRA, r *findings) {
	report := r.warn
	if s.Driver.Registered {
		report = r.info // the driver releases claims as their pods end
	}
	for _, sentence := range s.Waiting() {
		report("gpu-changes-owner", "No new pod gets "+sentence, nil,
			"gpu-device-plugin status   # shows what each GPU waits for, and the prepared claims",
			"kubectl get resourceclaims -A   # shows the pods that have reserved them")
	}
}

// driverName judges the name of the driver.
func driverName(s *status.DRA, r *findings) {
	if s.Driver.CompetingDriver != "" {
		r.fail("dra-competing-driver", "No GPU is offered to claims: "+s.Driver.CompetingDriver, nil,
			"kubectl get resourceslices --field-selector spec.driver="+draDriver+",spec.nodeName=NODE")
	}
	if s.DriverNameKept != "" {
		r.warn("dra-driver-name", "The driver does not use the configured name: "+s.DriverNameKept, nil,
			"gpu-device-plugin status   # shows the prepared claims")
	}
}

// offeredTwice finds GPUs that pods have, or can get, in both ways. It returns the number of GPUs
// in slices.
func offeredTwice(f *NodeFacts, s status.Status, r *findings) (inSlices int) {
	gpuOf := map[string]string{}
	for _, d := range s.GPUs {
		gpuOf[d.UUID] = cmp.Or(d.GPU, d.UUID)
	}
	gpu := func(id string) string {
		uuid, _, _ := strings.Cut(id, "::") // without the number of a replica
		return cmp.Or(gpuOf[uuid], uuid)
	}
	offered, held := map[string]string{}, map[string]string{}
	p := f.PodResources.Value // pod-resources reports a missing answer
	for _, name := range slices.Sorted(maps.Keys(p.Offered)) {
		for _, id := range p.Offered[name] {
			offered[gpu(id)] = name
		}
	}
	for _, h := range p.Held {
		held[gpu(h.ID)] = "the pod " + h.Pod + ", by " + h.Resource
	}
	for _, g := range s.DRA.GPUs {
		if g.Owner != "dra" && g.Owner != "leaving-dra" {
			continue
		}
		if g.Unpublished == "" {
			inSlices++
		}
		name := fmt.Sprintf("GPU %d", g.Index)
		remedy := []string{
			"kubectl get pods -A -o wide --field-selector spec.nodeName=NODE | grep -iE 'nvidia|gpu'   # shows " +
				"other device plugins",
			"gpu-device-plugin status   # shows the claims that have the GPU",
		}
		switch {
		case held[g.UUID] != "":
			r.fail("gpu-held-twice", name+" is in a ResourceSlice, and a pod has it by a device plugin: two pods "+
				"can have it", []string{g.UUID, "PodResources: " + held[g.UUID]}, remedy...)
		case offered[g.UUID] != "":
			r.fail("gpu-offered-twice",
				name+" is in a ResourceSlice, and the kubelet offers it as a device of "+offered[g.UUID]+
					": two pods can get it",
				[]string{g.UUID, "PodResources: " + offered[g.UUID]}, remedy...)
		}
	}
	return inSlices
}
