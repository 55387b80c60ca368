package fleet

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// The recipes of docs/recipes.md with the controllers that they are for. Cluster API's comes from its
// Go module. The modules of the others cannot be had: they come from checkouts in which somebody has
// built them.
var (
	clusterAPIDir = flag.String("cluster-api", "", "folder with Cluster API's controller and CRDs: see make recipes")
	kuredDir      = flag.String("kured", "", "checkout of kured, built into bin/kured: see make recipes")
	medik8sDir    = flag.String("node-healthcheck", "",
		"checkout of node-healthcheck-operator, built into bin/manager: see make recipes")
	readinessDir = flag.String("node-readiness-controller", "",
		"checkout of node-readiness-controller, built into bin/manager: see make recipes")
	nvsentinelDir = flag.String("nvsentinel", "", "checkout of NVSentinel, with bin/platform-connectors: see make recipes")
)

// shortTimeout takes the place of the 15 minutes in which the recipes let a GPU be repaired. A reset
// and the 30 seconds after which the condition becomes True fit into it.
const shortTimeout = 2 * time.Minute

// A recipeCluster is a real API server, and nodes on which gpu-node-agent runs as a recipe has it.
type recipeCluster struct {
	*quotaCluster
	recipe  string
	program string // of the daemon that the chart runs with these values
	nodes   map[string]*node.Node
}

// openRecipe installs the chart with the values of a recipe, whose daemon startNode runs.
func openRecipe(t *testing.T, recipe string) *recipeCluster {
	t.Helper()
	admin, _ := startAPIServer(t)
	c := &recipeCluster{recipe: recipe, nodes: map[string]*node.Node{}, quotaCluster: &quotaCluster{
		t: t, admin: admin, folder: t.TempDir(), kubeconfig: writeKubeconfig(t, adminToken, "administrator"),
	}}
	c.helm("install", agentName, "../../deployments/helm/gpu-device-plugin", "--namespace", agentSpace,
		"--values", c.path("values.yaml"))
	set, err := admin.AppsV1().DaemonSets(agentSpace).Get(t.Context(), agentName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	container := set.Spec.Template.Spec.Containers[0]
	c.program = "gpu-device-plugin"
	if len(container.Command) > 0 {
		c.program = container.Command[0]
	}
	for _, e := range container.Env {
		if e.ValueFrom == nil && !strings.Contains(e.Value, "$(") {
			t.Setenv(e.Name, e.Value)
		}
	}
	return c
}

// path returns the path of a file of the recipe.
func (c *recipeCluster) path(file string) string {
	return filepath.Join("../../deployments/recipes", c.recipe, file)
}

// createNode creates a Node that is ready, in the pool of the recipes.
func (c *recipeCluster) createNode(name string) {
	c.t.Helper()
	createReadyNode(c.t, c.admin, name)
	pool := []byte(`{"metadata": {"labels": {"pool": "gpu", "nvidia.com/gpu.present": "true"}}}`)
	_, err := c.admin.CoreV1().Nodes().Patch(c.t.Context(), name, types.MergePatchType, pool, metav1.PatchOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
}

// startNode runs the daemon of the chart with simulated GPUs on a node, with the environment and the
// rights of the chart's pods and with further arguments.
func (c *recipeCluster) startNode(name string, args ...string) {
	c.t.Helper()
	n, err := node.Open(node.Setup{Daemon: filepath.Join(filepath.Dir(*agent), c.program), Profile: gpuNode, Args: args})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Logf("the log of %s on %s ends with:\n%s", c.program, name, n.Logged())
		}
		if err := n.Close(); err != nil {
			c.t.Errorf("end the node %s: %v", name, err)
		}
	})
	if c.program == "gpu-node-agent" {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: agentName + "-" + name}, Spec: corev1.PodSpec{
			NodeName: name, ServiceAccountName: agentName, Containers: []corev1.Container{{Name: "c", Image: "none"}},
		}}
		pod, err := c.admin.CoreV1().Pods(agentSpace).Create(c.t.Context(), pod, metav1.CreateOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		token := accountToken(c.t, c.admin, agentSpace, agentName, pod)
		n.Args = append(n.Args, "--kubeconfig", writeKubeconfig(c.t, token, name), "--node-name", name)
	}
	if err := n.StartDaemon(); err != nil {
		c.t.Fatal(err)
	}
	c.nodes[name] = n
}

// simulate changes the simulated GPUs of a node, by the words of the command.
func (c *recipeCluster) simulate(name string, words ...string) {
	c.t.Helper()
	var err error
	poll.Within(c.t, soon, name+" answers", func() bool {
		err = c.nodes[name].Do(c.t.Context(), append([]string{"simulate"}, words...)...)
		return err == nil || !strings.Contains(err.Error(), "control.sock")
	})
	if err != nil {
		c.t.Fatal(err)
	}
}

// node returns a Node.
func (c *recipeCluster) node(name string) *corev1.Node {
	c.t.Helper()
	n, err := c.admin.CoreV1().Nodes().Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

// condition returns the condition of the GPUs of a node, which may be empty.
func (c *recipeCluster) condition(name string) corev1.NodeCondition {
	c.t.Helper()
	for _, is := range c.node(name).Status.Conditions {
		if is.Type == "GPUHealthy" {
			return is
		}
	}
	return corev1.NodeCondition{}
}

// becomes waits until the condition of a node has a status.
func (c *recipeCluster) becomes(name string, status corev1.ConditionStatus) {
	c.t.Helper()
	poll.Within(c.t, soon, fmt.Sprintf("GPUHealthy of %s is %s", name, status), func() bool {
		return c.condition(name).Status == status
	})
	is := c.condition(name)
	c.t.Logf("GPUHealthy of %s is %s: %s: %s", name, is.Status, is.Reason, is.Message)
}

// kubectl runs kubectl as the administrator with a manifest as its input.
func (c *recipeCluster) kubectl(input string, args ...string) {
	c.t.Helper()
	kubectl := filepath.Join(*kubernetesDir, "kubectl")
	cmd := exec.CommandContext(c.t.Context(), kubectl, append(args, "--kubeconfig="+c.kubeconfig)...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// manifest returns a file of the recipe with one value for another one, which it has to have.
func (c *recipeCluster) manifest(file, from, to string) string {
	c.t.Helper()
	text, err := os.ReadFile(c.path(file))
	if err != nil {
		c.t.Fatal(err)
	}
	if bytes.Count(text, []byte(from)) != 1 {
		c.t.Fatalf("%s has %q not once", file, from)
	}
	return strings.Replace(string(text), from, to, 1)
}

// definitions creates the CustomResourceDefinitions of a folder.
func (c *recipeCluster) definitions(folder string) {
	c.t.Helper()
	c.kubectl("", "create", "-f", folder)
	c.kubectl("", "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
}

// object reads an object by its path.
func (c *recipeCluster) object(path string, into any) {
	c.t.Helper()
	text, err := c.admin.RESTClient().Get().AbsPath(path).Do(c.t.Context()).Raw()
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// TestRecipeOfClusterAPI has Cluster API's own controller judge five machines by the recipe. The
// machine with a GPU that only a new one replaces is marked for remediation. The machine with a GPU that
// the daemon resets is not, nor are the others.
func TestRecipeOfClusterAPI(t *testing.T) {
	if *clusterAPIDir == "" {
		t.Skip("needs -cluster-api: see make recipes")
	}
	c := openRecipe(t, "cluster-api")
	all := []string{"defect", "reset", "third", "fourth", "fifth"} // one of them is 20 %
	for _, name := range all {
		c.createNode(name)
	}
	c.startNode("defect")
	c.startNode("reset")
	c.definitions(filepath.Join(*clusterAPIDir, "crds"))
	c.createMachines(all)
	run(t, filepath.Join(*clusterAPIDir, "clusterapi"), "--kubeconfig="+c.kubeconfig, "-v=4")
	c.kubectl(c.manifest("machinehealthcheck.yaml", "timeoutSeconds: 900",
		fmt.Sprintf("timeoutSeconds: %d", shortTimeout/time.Second)), "create", "-f", "-")

	c.simulate("defect", "remap-failure", "--gpu", "3")
	c.simulate("reset", "xid", "--gpu", "3", "--xid", "119")
	c.becomes("defect", corev1.ConditionFalse)
	c.becomes("reset", corev1.ConditionFalse)
	c.becomes("reset", corev1.ConditionTrue)
	if is := c.machineCondition("defect", "OwnerRemediated"); is.Status != "" {
		t.Errorf("the machine is marked before the timeout: %+v", is)
	}
	poll.Within(t, shortTimeout+soon, "the machine with the defect GPU is marked", func() bool {
		return c.machineCondition("defect", "OwnerRemediated").Status == metav1.ConditionFalse
	})
	why := c.machineCondition("defect", "HealthCheckSucceeded")
	t.Logf("defect: %s: %s", why.Reason, why.Message)
	if why.Status != metav1.ConditionFalse || !strings.Contains(why.Message, "GPUHealthy") {
		t.Errorf("the check of the machine is %+v", why)
	}
	since := c.condition("defect").LastTransitionTime
	if marked := c.machineCondition("defect", "OwnerRemediated").LastTransitionTime; marked.Sub(since.Time) < shortTimeout {
		t.Errorf("marked at %v, %v after %v", marked, marked.Sub(since.Time), since)
	}
	for _, name := range all[1:] {
		if is := c.machineCondition(name, "HealthCheckSucceeded"); is.Status != metav1.ConditionTrue {
			t.Errorf("the check of %s is %+v", name, is)
		}
		if is := c.machineCondition(name, "OwnerRemediated"); is.Status != "" {
			t.Errorf("%s is marked: %+v", name, is)
		}
	}
}

// createMachines creates the cluster of the recipe and a Machine for each Node, as a provider would,
// with a status as Cluster API's other controllers would write it.
func (c *recipeCluster) createMachines(nodes []string) {
	c.t.Helper()
	kubeconfig, err := os.ReadFile(c.kubeconfig)
	if err != nil {
		c.t.Fatal(err)
	}
	c.create(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret", "metadata": map[string]any{
			"name": "my-cluster-kubeconfig", "labels": map[string]any{"cluster.x-k8s.io/cluster-name": "my-cluster"},
		}, "data": map[string]any{"value": kubeconfig},
	})
	now := time.Now().UTC().Format(time.RFC3339)
	condition := func(name string) map[string]any {
		return map[string]any{"type": name, "status": "True", "reason": name, "message": "", "lastTransitionTime": now}
	}
	host, port, _ := net.SplitHostPort("127.0.0.1:" + apiPort)
	c.create(map[string]any{
		"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "metadata": map[string]any{"name": "my-cluster"},
		"spec": map[string]any{"controlPlaneEndpoint": map[string]any{"host": host, "port": json.Number(port)}},
	})
	c.status("cluster", "my-cluster", map[string]any{
		"initialization": map[string]any{"infrastructureProvisioned": true, "controlPlaneInitialized": true},
		"conditions":     []any{condition("ControlPlaneInitialized"), condition("InfrastructureReady")},
	})
	for _, name := range nodes {
		c.create(map[string]any{
			"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine", "metadata": map[string]any{
				"name": name, "labels": map[string]any{"pool": "gpu", "cluster.x-k8s.io/cluster-name": "my-cluster"},
			},
			"spec": map[string]any{
				"clusterName": "my-cluster", "bootstrap": map[string]any{"dataSecretName": "none"},
				"infrastructureRef": map[string]any{
					"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "StandIn", "name": name,
				},
			},
		})
		c.status("machine", name, map[string]any{
			"nodeRef": map[string]any{"name": name}, "conditions": []any{condition("InfrastructureReady")},
		})
	}
}

// create creates an object.
func (c *recipeCluster) create(object map[string]any) {
	c.t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		c.t.Fatal(err)
	}
	c.kubectl(string(text), "create", "-f", "-")
}

// status writes the status of an object.
func (c *recipeCluster) status(kind, name string, status map[string]any) {
	c.t.Helper()
	text, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("", "patch", kind, name, "--subresource=status", "--type=merge", "--patch="+string(text))
}

// machineCondition returns a condition of a Machine, which may be empty.
func (c *recipeCluster) machineCondition(machine, name string) metav1.Condition {
	c.t.Helper()
	var object struct {
		Status struct{ Conditions []metav1.Condition }
	}
	c.object("/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machines/"+machine, &object)
	i := slices.IndexFunc(object.Status.Conditions, func(is metav1.Condition) bool { return is.Type == name })
	if i < 0 {
		return metav1.Condition{}
	}
	return object.Status.Conditions[i]
}

// TestRecipeOfNodeHealthCheck has medik8s' own controller judge five nodes by the recipe. The node with a
// GPU that only a new one replaces gets a remediation of the template. The node with a GPU that the
// daemon resets gets none, nor do the others.
func TestRecipeOfNodeHealthCheck(t *testing.T) {
	if *medik8sDir == "" {
		t.Skip("needs -node-healthcheck: see make recipes")
	}
	c := openRecipe(t, "medik8s")
	for _, name := range []string{"defect", "reset", "third", "fourth", "fifth"} { // four of them are 80 %
		c.createNode(name)
	}
	c.startNode("defect")
	c.startNode("reset")
	const space, remediations = "openshift-workload-availability", "self-node-remediation.medik8s.io"
	for kind, plural := range map[string]string{
		"SelfNodeRemediation": "selfnoderemediations", "SelfNodeRemediationTemplate": "selfnoderemediationtemplates",
	} {
		c.create(map[string]any{
			"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
			"metadata": map[string]any{"name": plural + "." + remediations},
			"spec": map[string]any{
				"group": remediations, "scope": "Namespaced",
				"names": map[string]any{"kind": kind, "plural": plural, "singular": strings.ToLower(kind)},
				"versions": []any{map[string]any{
					"name": "v1alpha1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{
						"type": "object", "x-kubernetes-preserve-unknown-fields": true,
					}},
				}},
			},
		})
	}
	c.definitions(filepath.Join(*medik8sDir, "config/crd/bases"))
	c.kubectl("", "create", "namespace", space)
	c.create(map[string]any{
		"apiVersion": remediations + "/v1alpha1", "kind": "SelfNodeRemediationTemplate",
		"metadata": map[string]any{"name": "self-node-remediation-automatic-strategy-template", "namespace": space},
		"spec":     map[string]any{"template": map[string]any{"spec": map[string]any{}}},
	})
	// The webhooks are not installed; their server wants a certificate all the same.
	temporary := t.TempDir()
	certificates := filepath.Join(temporary, "k8s-webhook-server/serving-certs")
	if err := os.MkdirAll(certificates, 0o700); err != nil {
		t.Fatal(err)
	}
	command(t, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
		"-keyout", filepath.Join(certificates, "tls.key"), "-out", filepath.Join(certificates, "tls.crt"))
	run(t, "env", "TMPDIR="+temporary, "DEPLOYMENT_NAMESPACE="+space, filepath.Join(*medik8sDir, "bin/manager"),
		"--kubeconfig="+c.kubeconfig, "--leader-elect=false", "--metrics-bind-address=0", "--health-probe-bind-address=0")
	c.kubectl(c.manifest("nodehealthcheck.yaml", "duration: 15m", fmt.Sprintf("duration: %v", shortTimeout)),
		"create", "-f", "-")

	c.simulate("defect", "remap-failure", "--gpu", "3")
	c.simulate("reset", "xid", "--gpu", "3", "--xid", "119")
	c.becomes("defect", corev1.ConditionFalse)
	c.becomes("reset", corev1.ConditionFalse)
	c.becomes("reset", corev1.ConditionTrue)
	var list struct {
		Items []struct {
			metav1.ObjectMeta `json:"metadata"`
		}
	}
	poll.Within(t, shortTimeout+soon, "there is a remediation", func() bool {
		c.object("/apis/"+remediations+"/v1alpha1/selfnoderemediations", &list)
		return len(list.Items) > 0
	})
	first, since := list.Items[0], c.condition("defect").LastTransitionTime
	t.Logf("%s/%s, %v after the condition", first.Namespace, first.Name, first.CreationTimestamp.Sub(since.Time))
	if len(list.Items) != 1 || first.Name != "defect" || first.CreationTimestamp.Sub(since.Time) < shortTimeout {
		t.Errorf("the remediations are %+v", list.Items)
	}
}

// TestRecipeOfNodeReadiness has node-readiness-controller follow both rules of the recipe on one node.
// A new node has both taints until its GPUs are healthy. When a GPU becomes bad, the node gets the
// taint of the continuous rule alone, until the GPU is good again.
func TestRecipeOfNodeReadiness(t *testing.T) {
	if *readinessDir == "" {
		t.Skip("needs -node-readiness-controller: see make recipes")
	}
	c := openRecipe(t, "node-readiness-controller")
	c.definitions(filepath.Join(*readinessDir, "config/crd/bases"))
	c.createNode("new")
	run(t, filepath.Join(*readinessDir, "bin/manager"), "--kubeconfig="+c.kubeconfig, "--health-probe-bind-address=0")
	const once, always = "readiness.k8s.io/gpus", "readiness.k8s.io/always"
	c.kubectl(c.manifest("bootstrap-only.yaml", "pending", "pending"), "create", "-f", "-")
	continuous := c.manifest("continuous.yaml", "{name: gpus}", "{name: always}")
	c.kubectl(strings.ReplaceAll(continuous, once, always), "create", "-f", "-")
	has := func(wanted ...string) {
		t.Helper()
		poll.Within(t, soon, fmt.Sprintf("the node has the taints %v", wanted), func() bool {
			var keys []string
			for _, taint := range c.node("new").Spec.Taints {
				keys = append(keys, taint.Key)
			}
			slices.Sort(keys)
			return slices.Equal(keys, wanted)
		})
		t.Logf("the node has the taints %v", wanted)
	}
	has(always, once)
	c.startNode("new")
	c.becomes("new", corev1.ConditionTrue)
	has()
	c.simulate("new", "xid", "--gpu", "3", "--xid", "119")
	c.becomes("new", corev1.ConditionFalse)
	has(always)
	c.simulate("new", "restore", "--gpu", "3")
	c.becomes("new", corev1.ConditionTrue)
	has()
}

// TestRecipeOfKured has kured restart a node while the daemon keeps the file: kured takes its lock,
// cordons and drains the node, and runs the command. After the restart the file is gone, and kured
// uncordons the node and releases the lock.
func TestRecipeOfKured(t *testing.T) {
	if *kuredDir == "" {
		t.Skip("needs -kured: see make recipes")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: kured gets namespaces of its own")
	}
	c := openRecipe(t, "kured")
	c.createNode("gpu")
	for _, file := range []string{"kured-rbac.yaml", "kured-ds.yaml"} {
		c.kubectl("", "create", "-f", filepath.Join(*kuredDir, file))
	}
	file, restarted := filepath.Join(c.folder, "reboot-required"), filepath.Join(c.folder, "restarted")
	c.startNode("gpu", "--reboot-file", file)
	pods := c.admin.CoreV1().Pods(agentSpace)
	work := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "work"}, Spec: corev1.PodSpec{
		NodeName: "gpu", ServiceAccountName: "kured", // the only one here
		Containers: []corev1.Container{{Name: "c", Image: "none"}},
	}}
	work, err := pods.Create(t.Context(), work, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	work.Status.Phase = corev1.PodRunning // so that its eviction waits for the kubelet
	if _, err := pods.UpdateStatus(t.Context(), work, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	kured := c.startKured(file, restarted)
	c.simulate("gpu", "xid", "--gpu", "3", "--xid", "79")
	poll.Within(t, soon, "the file exists", func() bool { return exists(file) })
	poll.Within(t, soon, "the pod is evicted", func() bool {
		pod, err := pods.Get(t.Context(), "work", metav1.GetOptions{})
		return err == nil && pod.DeletionTimestamp != nil
	})
	if !c.node("gpu").Spec.Unschedulable || !strings.Contains(c.kuredLock(), `"nodeID":"gpu"`) {
		t.Errorf("unschedulable: %v, lock: %s", c.node("gpu").Spec.Unschedulable, c.kuredLock())
	}
	if exists(restarted) {
		t.Error("kured restarts a node with a pod")
	}
	t.Logf("kured holds its lock: %s", c.kuredLock())
	// As the kubelet does once the containers have ended.
	if err := pods.Delete(t.Context(), "work", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Fatal(err)
	}
	poll.Within(t, soon, "kured restarts the node", func() bool { return exists(restarted) })
	kured.end()
	c.simulate("gpu", "reboot")
	poll.Within(t, soon, "the daemon removes the file", func() bool { return !exists(file) })
	c.startKured(file, restarted)
	poll.Within(t, soon, "kured uncordons the node", func() bool {
		return !c.node("gpu").Spec.Unschedulable && c.kuredLock() == ""
	})
}

// startKured starts kured, which looks for the file every other second, with its account and a command
// that creates another file. As kured knows the API server only as a pod does, it has a /run of its own
// with the token of its account. It runs the command in the mount namespace of process 1, which is
// kured here.
func (c *recipeCluster) startKured(file, restarted string) process {
	c.t.Helper()
	account := filepath.Join(c.t.TempDir(), "account")
	if err := os.Mkdir(account, 0o700); err != nil {
		c.t.Fatal(err)
	}
	server, err := tls.Dial("tcp", "127.0.0.1:"+apiPort, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		c.t.Fatal(err)
	}
	defer server.Close()
	var authority []byte
	for _, certificate := range server.ConnectionState().PeerCertificates {
		authority = append(authority, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw})...)
	}
	for name, text := range map[string]string{
		"ca.crt": string(authority), "namespace": agentSpace, "token": accountToken(c.t, c.admin, agentSpace, "kured", nil),
	} {
		if err := os.WriteFile(filepath.Join(account, name), []byte(text), 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	host, port, err := net.SplitHostPort(c.freeAddress())
	if err != nil {
		c.t.Fatal(err)
	}
	const own = `mount -t tmpfs none /run && mkdir -p /var/run/secrets/kubernetes.io &&
		ln -s "$0" /var/run/secrets/kubernetes.io/serviceaccount && exec "$@"`
	return run(c.t, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", own, account, "env", "KUBERNETES_SERVICE_HOST=127.0.0.1",
		"KUBERNETES_SERVICE_PORT="+apiPort, filepath.Join(*kuredDir, "bin/kured"), "--node-id=gpu", "--period=2s",
		"--reboot-sentinel="+file, "--reboot-command=touch "+restarted, "--metrics-host="+host, "--metrics-port="+port)
}

// kuredLock returns the annotation that is kured's lock; empty if nobody holds it.
func (c *recipeCluster) kuredLock() string {
	c.t.Helper()
	set, err := c.admin.AppsV1().DaemonSets(agentSpace).Get(c.t.Context(), "kured", metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return set.Annotations["weave.works/kured-node-lock"]
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
