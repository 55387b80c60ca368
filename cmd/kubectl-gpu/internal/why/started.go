package why

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// explainAssigned explains a pod on a node: why its containers do not run, or whether they have
// their GPUs.
func (o Objects) explainAssigned(ctx context.Context) string {
	p := o.Pod
	if t := view.FirstTrouble(p); t != nil {
		if strings.Contains(t.Message, "PreStartContainer") { // the kubelet's word for the check by a device plugin
			return fmt.Sprintf("Container %s waits for its GPU: %s. It starts by itself when the GPU is good; to get "+
				"another GPU, delete the pod.", t.Container, strings.TrimSuffix(t.Message, "."))
		}
		text := fmt.Sprintf("Container %s %s.", t.Container, t.Text("on node "+p.Spec.NodeName, o.Now))
		return text + o.badGPU(ctx, t.Container) + o.nextStep(ctx, t.FullText(), t.Container)
	}
	if text := o.starting(ctx); text != "" {
		return text
	}
	return o.running(ctx)
}

// starting explains containers that are being created; empty if there are none.
func (o Objects) starting(ctx context.Context) string {
	p := o.Pod
	waits := slices.IndexFunc(view.Containers(p), func(c corev1.ContainerStatus) bool { return c.State.Waiting != nil })
	if p.Status.Phase != corev1.PodPending && waits < 0 {
		return ""
	}
	for _, e := range view.Newest(o.Events) {
		// an earlier pod may have had the name, and the pod is already scheduled
		if e.Regarding.UID != p.UID || e.Reason == "FailedScheduling" ||
			e.Type != corev1.EventTypeWarning && e.Reason != claimFailed {
			continue
		}
		note := strings.TrimSuffix(strings.TrimSpace(e.Note), ".")
		ago := view.Ago(", ", view.EventTime(e), o.Now)
		if e.Reason == claimFailed {
			return fmt.Sprintf("Node %s cannot prepare its claim: %s. The kubelet retries.", p.Spec.NodeName, note) +
				o.nextStep(ctx, note, "")
		}
		return fmt.Sprintf("It is on node %s, and its containers cannot be created (%s%s): %s.", p.Spec.NodeName,
			e.Reason, ago, note) +
			o.nextStep(ctx, e.Reason+": "+note, "")
	}
	for _, c := range p.Status.InitContainerStatuses {
		if c.State.Running != nil && (c.Started == nil || !*c.Started || !isSidecar(p, c.Name)) {
			return fmt.Sprintf("It is on node %s, and waits for its init container %s, which runs%s.", p.Spec.NodeName,
				c.Name, view.Ago(" since it was started ", c.State.Running.StartedAt.Time, o.Now))
		}
	}
	return fmt.Sprintf("It is on node %s, and its containers are being created.", p.Spec.NodeName)
}

// claimFailed is the reason of the kubelet's Event about a claim that a driver cannot prepare.
const claimFailed = "FailedPrepareDynamicResources"

func isSidecar(p *corev1.Pod, name string) bool {
	return slices.ContainsFunc(p.Spec.InitContainers, func(c corev1.Container) bool {
		return c.Name == name && c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
	})
}

// nextSteps has the next step for a container that does not start or run, by a text in the
// message of the kubelet or the container runtime. The first match counts. Steps about the
// node refer to doctor.
var nextSteps = []struct {
	has  []string
	then string
	node bool // doctor finds the cause
}{
	{[]string{"no runtime for", "runtime handler", "RuntimeHandler", "invalid runtime name", "unknown runtime"},
		"The container runtime of the node does not know the runtime class of the pod: configure the runtime there, " +
			"as NVIDIA's container toolkit does, or remove runtimeClassName from the pod if GPUs are injected by CDI",
		true},
	{[]string{"unresolvable CDI devices", "CDI device injection failed", "cdi devices"},
		"The container runtime does not find the CDI spec of the device: CDI is off there, or it looks in another " +
			"folder", true},
	{[]string{"river/library version mismatch"},
		"The driver on the node's disk differs from the loaded driver: restart the node", true},
	{[]string{"driver not loaded", "libnvidia-ml.so", "load library failed", "driver rpc error"},
		"The container runtime cannot use the NVIDIA driver of the node", true},
	{[]string{"unsatisfied condition", "requirement error"},
		"The image needs a newer driver than the node has: use an older image, or update the driver", false},
	{[]string{"unknown device", "no such device", "device error"},
		"The GPU of the pod no longer exists: delete the pod to get another one", true},
	{[]string{"nvidia-container-runtime", "nvidia-container-cli", "nvidia-cdi-hook", "nvidia-ctk"},
		"NVIDIA's container runtime on the node failed", true},
	{[]string{"OOMKilled"}, "It needed more memory of the node than its limit: raise the limit of memory", false},
	{[]string{"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
		"RegistryUnavailable"},
		"This is not a GPU problem: check the name of the image, and the right to pull it", false},
	{[]string{"CreateContainerConfigError"}, "This is not a GPU problem: make what the message names, or correct " +
		"the pod", false},
	{[]string{"executable file not found", "no such file or directory"},
		"The image lacks what the container runs: check the command and the image", false},
	{[]string{"FailedMount", "FailedAttachVolume", "FailedMapVolume"}, "This is not a GPU problem: check its volumes",
		false},
	{[]string{"NetworkNotReady", "network plugin", "failed to setup network"},
		"This is not a GPU problem: check the network plugin of the node", false},
}

// nextStep returns the next step for a container that does not start or run; says is the message.
// The result begins with a space.
func (o Objects) nextStep(ctx context.Context, says, container string) string {
	for _, step := range nextSteps {
		if !slices.ContainsFunc(step.has, func(part string) bool { return strings.Contains(says, part) }) {
			continue
		}
		if step.node {
			return " " + step.then + o.runtimeHandlers(says) + o.doctor(ctx) + "." + o.hiddenGPUs(ctx)
		}
		return " " + step.then + "."
	}
	if container == "" {
		return ""
	}
	previous := ""
	if strings.Contains(says, "CrashLoopBackOff") {
		previous = " --previous"
	}
	return fmt.Sprintf(" See what it printed: kubectl logs -n %s %s -c %s%s.",
		o.Pod.Namespace, o.Pod.Name, container, previous) + cmp.Or(o.hiddenGPUs(ctx), o.checkGPUs(ctx, container))
}

// recordedGPUs returns the UUIDs of the devices that a container of the pod has or had last: by the
// node's daemon, or by the kubelet's record in the pod's status.
func (o Objects) recordedGPUs(d Daemon, container string) (uuids []string) {
	if d.Status != nil {
		uuids = o.devicesOf(*d.Status, container)
	}
	if len(uuids) > 0 {
		return uuids
	}
	for _, c := range view.Containers(o.Pod) {
		for _, r := range c.AllocatedResourcesStatus {
			for _, device := range r.Resources {
				uuid, _, _ := strings.Cut(string(device.ResourceID), "::")
				if c.Name == container && !slices.Contains(uuids, uuid) {
					uuids = append(uuids, uuid)
				}
			}
		}
	}
	return uuids
}

// badGPU describes an unhealthy device of a container that does not run, with the daemon's
// reason; empty if all devices are healthy. The result begins with a space.
func (o Objects) badGPU(ctx context.Context, container string) string {
	if !o.asksForGPUs() {
		return ""
	}
	d := o.ask(ctx, o.Pod.Spec.NodeName)
	if d.Status == nil {
		return ""
	}
	for _, uuid := range o.recordedGPUs(d, container) {
		if text := illnessOf(*d.Status, uuid); text != "" {
			return fmt.Sprintf(" Its GPU %s is not healthy: %s. Delete the pod to get another GPU.", uuid, text)
		}
	}
	return ""
}

// checkGPUs says how to check the GPUs of a container that crashes although the daemon calls them
// Healthy; empty if none is known. The result begins with a space.
func (o Objects) checkGPUs(ctx context.Context, container string) string {
	d := o.ask(ctx, o.Pod.Spec.NodeName)
	if d.Status == nil {
		return ""
	}
	uuids := o.recordedGPUs(d, container)
	if len(uuids) == 0 || o.badGPU(ctx, container) != "" {
		return ""
	}
	return fmt.Sprintf(" The daemon calls its GPUs Healthy: %s. Check that CUDA works on them once no pod uses "+
		"them: kubectl gpu validate %s --gpu %s; and what a container gets: gpu-device-plugin check-container "+
		"--devices %d in a pod with this program and the same limits.",
		inventory.Few(uuids), o.Pod.Spec.NodeName, strings.Join(uuids, ","),
		len(uuids))
}

// crashed returns the last crash of a running container; nil if it has not crashed.
func (o Objects) crashed(container string) *corev1.ContainerStateTerminated {
	for _, c := range view.Containers(o.Pod) {
		if ended := c.LastTerminationState.Terminated; c.Name == container && ended != nil && ended.ExitCode != 0 {
			return ended
		}
	}
	return nil
}

// restarts says that a running container has crashed, and how to check its GPUs; empty
// without a crash. The result begins with a space.
func (o Objects) restarts(ctx context.Context, users []string) string {
	for _, name := range users {
		if ended := o.crashed(name); ended != nil {
			return fmt.Sprintf(" But container %s has crashed before: it ended%s (%s, exit status %d). See what it "+
				"printed: kubectl logs -n %s %s -c %s --previous.", name, view.Ago(" ", ended.FinishedAt.Time, o.Now),
				ended.Reason,
				ended.ExitCode, o.Pod.Namespace, o.Pod.Name, name) + o.checkGPUs(ctx, name)
		}
	}
	return ""
}

// runtimeHandlers names the runtime handlers of the pod's node if the message mentions one; empty
// if they are unknown.
func (o Objects) runtimeHandlers(says string) string {
	node := o.node(o.Pod.Spec.NodeName)
	if node == nil || !strings.Contains(says, "runtime") {
		return ""
	}
	var names []string
	for _, h := range node.Status.RuntimeHandlers {
		if h.Name != "" { // not the default handler
			names = append(names, h.Name)
		}
	}
	if names == nil {
		return ""
	}
	slices.Sort(names)
	return ". The node has the runtimes " + inventory.Few(names)
}

// doctor names the doctor command for the pod's node if its daemon responds.
func (o Objects) doctor(ctx context.Context) string {
	d := o.ask(ctx, o.Pod.Spec.NodeName)
	if d.Status == nil {
		return fmt.Sprintf(". Nothing more is known of the node: %s", strings.TrimSuffix(d.Problem, "."))
	}
	return "; the cause, with the remedy: kubectl gpu doctor " + o.Pod.Spec.NodeName
}

// hiddenGPUs explains why containers cannot see the GPUs allocated to them: a volume of the pod
// hides the shared memory of MPS, the node lacks something, or the pod lacks a runtime class. It is
// empty if nothing is known, and otherwise begins with a space.
func (o Objects) hiddenGPUs(ctx context.Context) string {
	node := o.Pod.Spec.NodeName
	if len(view.FromPlugins(o.Pod)) == 0 {
		return ""
	}
	told := o.ask(ctx, node).Status
	if told == nil {
		return ""
	}
	if text := hiddenMemory(o.Pod, told.Resources); text != "" {
		return text
	}
	if o.Doctor == nil {
		return ""
	}
	switch says := o.Doctor(ctx, node); {
	case says.None != "":
		return fmt.Sprintf(" Doctor says of node %s: %s. The remedy: kubectl gpu doctor %s.",
			node, strings.TrimSuffix(says.None, "."), node)
	case says.NeedsClass != "" && o.Pod.Spec.RuntimeClassName == nil:
		return fmt.Sprintf(" The pod has no runtimeClassName, and doctor says of node %s: %s. Set runtimeClassName in "+
			"the pod.",
			node, strings.TrimSuffix(says.NeedsClass, "."))
	}
	return ""
}

// sharedMemory is the path of the shared memory of a container's processes, including an MPS
// server.
const sharedMemory = "/dev/shm"

// hiddenMemory names the first container whose own volume at /dev/shm hides the shared
// memory of MPS mounted by a resource of the container; empty if there is none. The
// kubelet lists the mounts of a device plugin before the volumes of the pod, and the
// container runtime mounts in this order. The result begins with a space.
func hiddenMemory(p *corev1.Pod, resources []status.Resource) string {
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		at := slices.IndexFunc(c.VolumeMounts,
			func(m corev1.VolumeMount) bool { return path.Clean(m.MountPath) == sharedMemory })
		if at < 0 {
			continue
		}
		for _, r := range resources {
			if r.MPS && amount(&c, corev1.ResourceName(r.Name)) > 0 {
				return fmt.Sprintf(" Container %s mounts the volume %s at %s. It hides the shared memory of MPS, "+
					"which shares %s: remove that mount from the pod. The shared memory of MPS holds up to half of "+
					"the node's memory.",
					c.Name, c.VolumeMounts[at].Name, sharedMemory, r.Name)
			}
		}
	}
	return ""
}

// firstUnhealthy returns the first Unhealthy device of a running container.
func firstUnhealthy(p *corev1.Pod) (container, uuid string) {
	for _, c := range view.Containers(p) {
		for _, r := range c.AllocatedResourcesStatus {
			for _, d := range r.Resources {
				if d.Health == corev1.ResourceHealthStatusUnhealthy && c.State.Terminated == nil {
					uuid, _, _ := strings.Cut(string(d.ResourceID), "::")
					return c.Name, uuid
				}
			}
		}
	}
	return "", ""
}

// running explains a pod whose containers run.
func (o Objects) running(ctx context.Context) string {
	p := o.Pod
	d := o.ask(ctx, p.Spec.NodeName)
	if container, uuid := firstUnhealthy(p); uuid != "" {
		return fmt.Sprintf("Container %s has lost %s: %s. The pod keeps running; delete it to get another GPU.",
			container, uuid, o.illness(d, uuid))
	}
	users := o.users()
	begin := fmt.Sprintf("It runs on node %s", p.Spec.NodeName)
	switch {
	case len(view.Containers(p)) == 0:
		return fmt.Sprintf("It is on node %s, and the kubelet has not reported its containers.", p.Spec.NodeName)
	case len(users) == 0:
		return begin + ". Its containers that run request no GPU themselves."
	case d.Status == nil:
		return begin + o.recordedDevices(users, d.Problem) + o.hiddenGPUs(ctx)
	case d.Status.HoldersError != "":
		return begin + o.recordedDevices(users, "the kubelet does not tell the daemon: "+d.Status.HoldersError) +
			o.hiddenGPUs(ctx)
	case d.Status.Holders == nil:
		return begin + o.recordedDevices(users, "the daemon of the node does not know which containers have them") +
			o.hiddenGPUs(ctx)
	}
	var has []string
	for _, name := range users {
		devices := o.devicesOf(*d.Status, name)
		if len(devices) == 0 {
			return fmt.Sprintf("%s, and the kubelet has given container %s no GPU: a pod that was not placed by the "+
				"scheduler (spec.nodeName, a static pod) starts so where the node does not have its resource. "+
				"Create it again without spec.nodeName.", begin, name)
		}
		for _, uuid := range devices {
			if text := illnessOf(*d.Status, uuid); text != "" {
				return fmt.Sprintf("%s, and container %s has %s, which is not healthy: %s. The pod keeps running; "+
					"delete it to get another GPU.",
					begin, name, uuid, text)
			}
		}
		has = append(has, fmt.Sprintf("container %s has %s", name, inventory.Few(devices))+o.receipts(*d.Status, name))
	}
	if unseen := o.hiddenGPUs(ctx); unseen != "" {
		return begin + ", and the kubelet has given it GPUs that its containers may not see: " +
			strings.Join(has, "; ") +
			"." + unseen
	}
	return begin + " and has its GPUs: " + strings.Join(has, "; ") + "." + o.restarts(ctx, users)
}

// recordedDevices names the devices recorded by the kubelet in the pod's status, or says
// that there are none, if the daemon does not respond. The kubelet records devices with
// its feature gate ResourceHealthStatus.
func (o Objects) recordedDevices(users []string, problem string) string {
	problem = strings.TrimSuffix(problem, ".")
	var has []string
	for _, c := range view.Containers(o.Pod) {
		for _, r := range c.AllocatedResourcesStatus {
			for _, d := range r.Resources {
				if uuid, _, _ := strings.Cut(string(d.ResourceID), "::"); slices.Contains(users, c.Name) {
					has = append(has, fmt.Sprintf("container %s has %s", c.Name, uuid))
				}
			}
		}
	}
	if has == nil {
		return ". Whether its GPUs are in it is not known: " + problem + "."
	}
	return ", and by the kubelet's record in the pod's status " + inventory.Few(slices.Compact(has)) +
		". Nothing newer is known: " + problem + "."
}

// users returns the running containers that request GPUs, without ended init containers
// and containers of unknown state.
func (o Objects) users() (names []string) {
	p := o.Pod
	running := map[string]bool{}
	for _, c := range view.Containers(p) {
		running[c.Name] = c.State.Running != nil
	}
	wanted := o.wantedDevices()
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if !running[c.Name] {
			continue
		}
		uses := slices.ContainsFunc(c.Resources.Claims,
			func(by corev1.ResourceClaim) bool { return o.hasGPUs(o.Own[by.Name]) })
		for name := range c.Resources.Requests {
			uses = uses || wanted[name] > 0
		}
		for name := range c.Resources.Limits {
			uses = uses || wanted[name] > 0
		}
		if uses {
			names = append(names, c.Name)
		}
	}
	return names
}

// hasGPUs reports whether a claim has devices of a GPU driver.
func (o Objects) hasGPUs(c *resourceapi.ResourceClaim) bool {
	if c == nil || c.Status.Allocation == nil {
		return false
	}
	drivers := o.Drivers()
	return slices.ContainsFunc(c.Status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return drivers[r.Driver]
		})
}

// devicesOf returns the UUIDs of the devices that a container of the pod holds.
func (o Objects) devicesOf(s status.Status, container string) (uuids []string) {
	for _, h := range s.Holders {
		if h.Namespace == o.Pod.Namespace && h.Pod == o.Pod.Name && h.Container == container &&
			!slices.Contains(uuids, h.Device) {
			uuids = append(uuids, h.Device)
		}
	}
	slices.Sort(uuids)
	return uuids
}

// receipts describes the part of a GPU held by a container with units, and the difference
// from its request; empty without units.
func (o Objects) receipts(s status.Status, container string) string {
	for _, h := range s.Holders {
		if h.Receipt != nil && h.Namespace == o.Pod.Namespace && h.Pod == o.Pod.Name && h.Container == container {
			return " (" + h.Receipt.String() + ")"
		}
	}
	return ""
}

// illness says why a device is not healthy, or why this is unknown.
func (o Objects) illness(d Daemon, uuid string) string {
	if d.Status == nil {
		return "the kubelet calls it Unhealthy, and why is not known: " + strings.TrimSuffix(d.Problem, ".")
	}
	if text := illnessOf(*d.Status, uuid); text != "" {
		return text
	}
	if !slices.ContainsFunc(d.Status.GPUs, func(g status.Device) bool { return g.UUID == uuid }) {
		return "the node does not have it any more"
	}
	return "the kubelet called it Unhealthy, and its daemon says that it is Healthy now"
}

// illnessOf says why a device is Unhealthy or Lost; empty otherwise.
func illnessOf(s status.Status, uuid string) string {
	for _, g := range s.GPUs {
		if g.UUID == uuid && (g.State == unhealthy || g.State == lostState) {
			return stateText(g)
		}
	}
	return ""
}
