package fleet

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/plugins"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

var (
	kueueDir    = flag.String("kueue", "", "folder with Kueue's controller and its chart, for TestKueue: see make kueue")
	helmProgram = flag.String("helm", "helm", "program of Helm")
	agent       = flag.String("agent", "", "program of gpu-node-agent")
)

const (
	gpuNode    = "dgx-h100"
	agentSpace = "kube-system"
	agentName  = "gpu-device-plugin" // of the release and of its account
	wholeGPU   = "gpu.nvidia.com"
	migDevice  = "mig.nvidia.com"
	gpuMemory  = corev1.ResourceName("gpu.memory")
	gpuCount   = corev1.ResourceName("gpu.count")
	// soon is how long Kueue, the scheduler and the controllers together may take for what they are
	// to do, on a machine that has other things to do.
	soon = 2 * time.Minute
)

// TestKueue has Kueue's own controller hold Jobs to a quota of GPU memory, by the counters of the
// slices that gpu-node-agent writes for a node whose GPUs are given as a whole or in parts. Jobs,
// claims and pods are those of the real controllers and of the real scheduler.
func TestKueue(t *testing.T) {
	if *kueueDir == "" {
		t.Skip("needs -kueue: see make kueue")
	}
	admin, _ := startAPIServer(t)
	kubeconfig := writeKubeconfig(t, adminToken, "administrator")
	c := &quotaCluster{t: t, admin: admin, folder: t.TempDir(), kubeconfig: kubeconfig}
	createReadyNode(t, admin, gpuNode)
	run(t, filepath.Join(*kubernetesDir, "kube-scheduler"), "--kubeconfig="+kubeconfig, "--leader-elect=false",
		"--secure-port=0")
	run(t, filepath.Join(*kubernetesDir, "kube-controller-manager"), "--kubeconfig="+kubeconfig, "--leader-elect=false",
		"--secure-port=0", "--controllers=job-controller,resourceclaim-controller,serviceaccount-controller")
	c.startAgent()

	// MIG devices are charged by their memory, and GPUs as a whole by their number.
	mappings := c.documentedMappings()
	k := c.installKueue()
	k.start(mappings)
	k.apply(documented(t, "kueue: queues"))
	half, small := c.charge("3g.40gb"), c.charge("1g.10gb")
	if sum := half.Value()*2 + small.Value(); half.Value()*2 > 80<<30 || sum <= 80<<30 {
		t.Fatalf("two of %v fit into 80Gi and %v beside them does not: that is not so", &half, &small)
	}
	c.job("first-half", migDevice, "3g.40gb", 1)
	k.admits("first-half", corev1.ResourceList{gpuMemory: half})
	c.gets("first-half", half)
	c.job("second-half", migDevice, "3g.40gb", 1)
	k.admits("second-half", corev1.ResourceList{gpuMemory: half})
	c.gets("second-half", half)
	k.uses(gpuMemory, half.Value()*2)

	c.job("small", migDevice, "1g.10gb", 1)
	k.holds("small", "insufficient unused quota for gpu.memory in flavor h100", "more needed")
	c.job("three-halves", migDevice, "3g.40gb", 3)
	k.holds("three-halves", "insufficient quota for gpu.memory in flavor h100", "maximum capacity (80Gi)")
	c.finish("first-half")
	k.admits("small", corev1.ResourceList{gpuMemory: small})
	c.gets("small", small)
	k.uses(gpuMemory, half.Value()+small.Value())

	c.job("whole", wholeGPU, "", 1)
	k.admits("whole", corev1.ResourceList{gpuCount: apiresource.MustParse("1")})
	c.gets("whole", c.charge(""))
	c.jobByResource("by-resource", true)
	k.holds("by-resource", "insufficient unused quota for gpu.count in flavor h100", "1 more needed")
	c.finish("whole")
	k.admits("by-resource", corev1.ResourceList{gpuCount: apiresource.MustParse("1")})
	c.finish("by-resource")
	c.jobByResource("by-limit", false)
	k.holds("by-limit", "resource nvidia.com/gpu unavailable in ClusterQueue") // kueue#14393
	c.jobByClaim("by-claim")
	k.holds("by-claim", "does not support use of resource claims")

	// After a restart both are charged by their memory. What is admitted stays so.
	k.stop()
	mappings[0]["deviceClassNames"] = []any{migDevice, wholeGPU}
	k.start(mappings[:1])
	k.uses(gpuMemory, half.Value()+small.Value())
	whole := c.charge("")
	c.job("whole-by-memory", wholeGPU, "", 1)
	k.holds("whole-by-memory", "insufficient unused quota for gpu.memory in flavor h100", "more needed")
	c.jobByResource("refused", true)
	k.holds("refused", "extended resource nvidia.com/gpu resolves to DeviceClass gpu.nvidia.com with counters configured")
	c.finish("second-half")
	c.finish("small")
	k.admits("whole-by-memory", corev1.ResourceList{gpuMemory: whole})
	c.gets("whole-by-memory", whole)
	k.uses(gpuMemory, whole.Value())
}

// A quotaCluster is a real control plane and a node whose GPUs gpu-node-agent publishes. Nothing
// runs containers: the test says how they end.
type quotaCluster struct {
	t          *testing.T
	admin      *kubernetes.Clientset
	folder     string
	kubeconfig string // of the administrator
}

// startAgent installs the chart and runs gpu-node-agent with the rights of its pod, until all
// devices are in slices. The part of the kubelet that finds DRA drivers is a stand-in.
func (c *quotaCluster) startAgent() {
	c.t.Helper()
	c.helm("install", agentName, "../../deployments/helm/gpu-device-plugin", "--namespace", agentSpace,
		"--set", "dra.enabled=true,dra.mode=dra,dra.dynamicMIG=true,dra.switchMIG=true")
	// The admission policy of the chart lets an account write the slices of the node of its pod alone.
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: agentName}, Spec: corev1.PodSpec{
		NodeName: gpuNode, ServiceAccountName: agentName, Containers: []corev1.Container{{Name: "c", Image: "none"}},
	}}
	pod, err := c.admin.CoreV1().Pods(agentSpace).Create(c.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	n, err := node.Open(node.Setup{Daemon: *agent, Profile: gpuNode})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Logf("the log of gpu-node-agent ends with:\n%s", n.Logged())
		}
		if err := n.Close(); err != nil {
			c.t.Errorf("end the node: %v", err)
		}
	})
	registry, file := n.Path("plugins_registry"), n.Path("config.yaml")
	if err := os.Mkdir(registry, 0o700); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("dra: {mode: dra, dynamicMIG: true, switchMIG: true}"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	kubelet := plugins.Start(plugins.Options{Dir: registry})
	c.t.Cleanup(kubelet.Stop)
	token := accountToken(c.t, c.admin, agentSpace, agentName, pod)
	n.Args = []string{
		"--kubeconfig", writeKubeconfig(c.t, token, agentName), "--node-name", gpuNode,
		"--kubelet-root", n.Path(""), "--config-file", file,
	}
	if err := n.StartDaemon(); err != nil {
		c.t.Fatal(err)
	}
	poll.Within(c.t, soon, "all GPUs and their MIG devices are in slices", func() bool {
		with := 0
		for _, d := range c.devices() {
			if len(d.ConsumesCounters) > 0 && len(d.Taints) == 0 {
				with++
			}
		}
		return with == 8*26
	})
}

// devices returns all devices in slices, by name.
func (c *quotaCluster) devices() map[string]resourceapi.Device {
	c.t.Helper()
	list, err := c.admin.ResourceV1().ResourceSlices().List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	all := map[string]resourceapi.Device{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			all[d.Name] = d
		}
	}
	return all
}

// charge returns the most memory that a MIG device of a profile takes of its GPU, or a whole GPU
// without one.
func (c *quotaCluster) charge(profile string) apiresource.Quantity {
	c.t.Helper()
	var most apiresource.Quantity
	for _, d := range c.devices() {
		if ptr.Deref(d.Attributes["profile"].StringValue, "") != profile {
			continue
		}
		if taken := memoryOf(d); taken.Cmp(most) > 0 {
			most = taken
		}
	}
	if most.IsZero() {
		c.t.Fatalf("nothing in slices has the profile %q", profile)
	}
	return most
}

// memoryOf returns what a device takes of the memory of its GPU.
func memoryOf(d resourceapi.Device) (taken apiresource.Quantity) {
	for _, use := range d.ConsumesCounters {
		taken.Add(use.Counters["memory"].Value)
	}
	return taken
}

// job creates a Job with a pod whose claim asks for devices of a class, and of a profile if there
// is one.
func (c *quotaCluster) job(name, class, profile string, devices int64) {
	c.t.Helper()
	exactly := &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: devices,
	}
	if profile != "" {
		exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", profile),
		}}}
	}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}}
	template.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}}
	templates := c.admin.ResourceV1().ResourceClaimTemplates(namespace)
	if _, err := templates.Create(c.t.Context(), template, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	c.createJob(name, func(pod *corev1.PodSpec) {
		pod.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &name}}
		pod.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	})
}

// jobByResource creates a Job with a pod that asks for a GPU as a resource, which it gets by a
// class with that name. The Job has it below limits and, with requests, below both.
func (c *quotaCluster) jobByResource(name string, requests bool) {
	c.t.Helper()
	c.createJob(name, func(pod *corev1.PodSpec) {
		one := corev1.ResourceList{"nvidia.com/gpu": apiresource.MustParse("1")}
		if pod.Containers[0].Resources.Limits = one; requests {
			pod.Containers[0].Resources.Requests = one
		}
	})
}

// jobByClaim creates a Job with a pod that names a claim, which need not exist.
func (c *quotaCluster) jobByClaim(name string) {
	c.t.Helper()
	c.createJob(name, func(pod *corev1.PodSpec) {
		pod.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
		pod.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	})
}

func (c *quotaCluster) createJob(name string, change func(*corev1.PodSpec)) {
	c.t.Helper()
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}}
	job.Labels = map[string]string{"kueue.x-k8s.io/queue-name": "team"}
	job.Spec.Template.Spec = corev1.PodSpec{
		RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "none"}},
	}
	change(&job.Spec.Template.Spec)
	if _, err := c.admin.BatchV1().Jobs(namespace).Create(c.t.Context(), job, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// pods returns the pods of a Job.
func (c *quotaCluster) pods(job string) []corev1.Pod {
	c.t.Helper()
	of := metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job}
	list, err := c.admin.CoreV1().Pods(namespace).List(c.t.Context(), of)
	if err != nil {
		c.t.Fatal(err)
	}
	return list.Items
}

// gets waits until the scheduler has given the pod of a Job a device that takes so much memory.
func (c *quotaCluster) gets(job string, taken apiresource.Quantity) {
	c.t.Helper()
	poll.Within(c.t, soon, "the pod of "+job+" has its device", func() bool {
		pods := c.pods(job)
		if len(pods) != 1 || pods[0].Spec.NodeName != gpuNode || len(pods[0].Status.ResourceClaimStatuses) != 1 {
			return false
		}
		name := *pods[0].Status.ResourceClaimStatuses[0].ResourceClaimName
		claim, err := c.admin.ResourceV1().ResourceClaims(namespace).Get(c.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		if claim.Status.Allocation == nil {
			return false
		}
		results := claim.Status.Allocation.Devices.Results
		if has := memoryOf(c.devices()[results[0].Device]); len(results) != 1 || has.Cmp(taken) != 0 {
			c.t.Fatalf("%s has %v with %v, and was charged %v", job, results, &has, &taken)
		}
		return true
	})
}

// finish has the pod of a Job end well, and waits until the Job has.
func (c *quotaCluster) finish(job string) {
	c.t.Helper()
	poll.Within(c.t, soon, "the pod of "+job+" is on the node", func() bool {
		pods := c.pods(job)
		return len(pods) == 1 && pods[0].Spec.NodeName == gpuNode
	})
	pod := c.pods(job)[0]
	pod.Status.Phase = corev1.PodSucceeded
	if _, err := c.admin.CoreV1().Pods(namespace).UpdateStatus(c.t.Context(), &pod, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	poll.Within(c.t, soon, job+" is complete", func() bool {
		j, err := c.admin.BatchV1().Jobs(namespace).Get(c.t.Context(), job, metav1.GetOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		return slices.ContainsFunc(j.Status.Conditions, func(is batchv1.JobCondition) bool {
			return is.Type == batchv1.JobComplete && is.Status == corev1.ConditionTrue
		})
	})
}

// helm runs Helm as the administrator.
func (c *quotaCluster) helm(args ...string) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), *helmProgram, append(args, "--kubeconfig", c.kubeconfig)...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+c.folder, "HELM_CONFIG_HOME="+c.folder, "HELM_DATA_HOME="+c.folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("helm %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// A workload is what Kueue makes of a Job.
type workload struct {
	metav1.ObjectMeta `json:"metadata"`
	Status            struct {
		Conditions []metav1.Condition
		Admission  *struct {
			PodSetAssignments []struct{ ResourceUsage corev1.ResourceList }
		}
	}
}

// workload returns that of a Job; without conditions if there is none yet.
func (k *kueue) workload(job string) (found workload) {
	k.t.Helper()
	var list struct{ Items []workload }
	k.get("/namespaces/"+namespace+"/workloads", &list)
	for _, w := range list.Items {
		if len(w.OwnerReferences) == 1 && w.OwnerReferences[0].Name == job {
			return w
		}
	}
	return workload{}
}

// condition returns a condition of the workload of a Job, which may be empty.
func (w workload) condition(name string) metav1.Condition {
	return ptr.Deref(meta.FindStatusCondition(w.Status.Conditions, name), metav1.Condition{})
}

// admits waits until Kueue has admitted a Job, and checks what it is charged.
func (k *kueue) admits(job string, charge corev1.ResourceList) {
	k.t.Helper()
	var w workload
	poll.Within(k.t, soon, job+" is admitted", func() bool {
		w = k.workload(job)
		return w.condition("Admitted").Status == metav1.ConditionTrue
	})
	usage := w.Status.Admission.PodSetAssignments[0].ResourceUsage
	k.t.Logf("%s is admitted and charged %v", job, shown(usage))
	if len(usage) != len(charge) {
		k.t.Errorf("%s is charged %v, want %v", job, shown(usage), shown(charge))
	}
	for name, want := range charge {
		if got := usage[name]; got.Cmp(want) != 0 {
			k.t.Errorf("%s is charged %v, want %v", job, shown(usage), shown(charge))
		}
	}
}

func shown(list corev1.ResourceList) string {
	text, _ := json.Marshal(list) // quantities have a text
	return string(text)
}

// holds waits until Kueue says with these words why it does not admit a Job, which has no pod then.
func (k *kueue) holds(job string, words ...string) {
	k.t.Helper()
	var last metav1.Condition
	poll.Within(k.t, soon, job+" is held: "+strings.Join(words, " … "), func() bool {
		now := k.workload(job).condition("QuotaReserved")
		if now.Status == metav1.ConditionTrue {
			k.t.Fatalf("%s has quota", job)
		}
		if now != last && cmp.Or(now.Message, now.Reason) != "" {
			k.t.Logf("%s: %s: %s", job, now.Reason, now.Message)
		}
		last = now
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(now.Message, word) })
	})
	if pods := k.pods(job); len(pods) > 0 {
		k.t.Errorf("%s is held and has the pod %s", job, pods[0].Name)
	}
}

// uses waits until the ClusterQueue counts so much of a resource.
func (k *kueue) uses(resource corev1.ResourceName, want int64) {
	k.t.Helper()
	poll.Within(k.t, soon, fmt.Sprintf("%d of %s are in use", want, resource), func() bool {
		var queue struct {
			Status struct {
				FlavorsUsage []struct {
					Resources []struct {
						Name  corev1.ResourceName
						Total apiresource.Quantity
					}
				}
			}
		}
		k.get("/clusterqueues/team", &queue)
		for _, flavor := range queue.Status.FlavorsUsage {
			for _, r := range flavor.Resources {
				if r.Name == resource {
					return r.Total.Value() == want
				}
			}
		}
		return false
	})
}
