package kubelet_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/hack/image"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/hardware"
)

const (
	containerdSocket = "/run/containerd/containerd.sock"
	kubeletPods      = "http://127.0.0.1:10255/pods"
	clientImage      = "test.invalid/client:1"
	daemonImage      = "ghcr.io/gpu-device-plugin/gpu-device-plugin:" + version.Number
	daemonPath       = "/usr/bin/gpu-device-plugin"
)

// A node is containerd and a kubelet without an API server. Its pods are files in a folder, which
// kubelet admits and gives devices like any others.
type node struct {
	state   string
	kubelet *process
}

// startNode starts a node whose only image has the client and the C library. It is to be called in
// namespaces.
func startNode(t *testing.T) *node {
	t.Helper()
	program := func(name string) string {
		found, err := filepath.Glob(filepath.Join(*programs, "*", name))
		if err != nil || len(found) == 0 {
			t.Skipf("no %s below %s: `make e2e` builds it", name, *programs)
		}
		return found[len(found)-1]
	}
	n := &node{state: t.TempDir()}
	for _, folder := range []string{"pods", "logs", "cni"} {
		if err := os.Mkdir(n.path(folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.write(t, "containerd.toml", containerdConfig)
	n.write(t, "kubelet.yaml", kubeletConfig)
	containerd := program("containerd")
	search := "PATH=" + filepath.Dir(containerd) + ":" + os.Getenv("PATH")
	p := start(t, "containerd", []string{search}, containerd, "--config", n.path("containerd.toml"))
	p.until(t, "containerd answers", func() bool {
		c, err := net.Dial("unix", containerdSocket)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	n.load(t, program("ctr"), files(t, *client, "/usr/bin/client"), []string{"/usr/bin/sleep", "infinity"}, clientImage)
	n.load(t, program("ctr"), files(t, *daemon, daemonPath), []string{daemonPath}, daemonImage)
	makeCgroup(t)
	t.Cleanup(func() {
		found, _ := filepath.Glob(n.path("logs/*/*/0.log"))
		for _, path := range found {
			if t.Failed() {
				t.Logf("the log of a container: %s:\n%s", path, tail(path))
			}
		}
	})
	n.kubelet = start(t, "kubelet", []string{search}, program("kubelet"),
		"--config", n.path("kubelet.yaml"), "--hostname-override", "node", "--v", "2")
	n.kubelet.until(t, "kubelet answers", func() bool { _, err := n.pods(); return err == nil })
	return n
}

// load gives containerd an image of the files below a folder.
func (n *node) load(t *testing.T, ctr, folder string, entrypoint []string, reference string) {
	t.Helper()
	archive := filepath.Join(t.TempDir(), "image.tar")
	if err := image.FromFolder(folder, entrypoint, reference, archive); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), ctr, "--address", containerdSocket, "--namespace", "k8s.io", "images", "import",
		archive)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("import image %s: %v: %s", reference, err, out)
	}
}

func (n *node) path(name string) string { return filepath.Join(n.state, name) }

// write writes a file of the node in which STATE stands for its folder.
func (n *node) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(n.path(name), []byte(strings.ReplaceAll(text, "STATE", n.state)), 0o600); err != nil {
		t.Fatal(err)
	}
}

const containerdConfig = `version = 3
root = "STATE/containerd"
state = "/run/containerd"
[grpc]
address = "` + containerdSocket + `"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "` + clientImage + `"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
conf_dir = "STATE/cni"
`

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: STATE/pods
podLogsDir: STATE/logs
volumePluginDir: STATE/volume-plugins
containerRuntimeEndpoint: unix://` + containerdSocket + `
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
address: 127.0.0.1
readOnlyPort: 10255
cgroupDriver: cgroupfs
cgroupRoot: /` + podsCgroup + `
failCgroupV1: false
failSwapOn: false
resolvConf: ""
makeIPTablesUtilChains: false
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100
evictionHard:
  {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
`

// makeCgroup makes the cgroup of all pods, in each hierarchy.
func makeCgroup(t *testing.T) {
	t.Helper()
	hierarchies := []string{"/sys/fs/cgroup"}
	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil { // cgroup v1
		if hierarchies, err = filepath.Glob("/sys/fs/cgroup/*"); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range hierarchies {
		// one at a time: those that cannot be had take no other one along
		for _, c := range strings.Fields(string(controllers)) {
			_ = os.WriteFile(filepath.Join(h, "cgroup.subtree_control"), []byte("+"+c), 0)
		}
		if err := os.MkdirAll(filepath.Join(h, podsCgroup), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// podsCgroup is the name of the cgroup of all pods.
const podsCgroup = "gpu-device-plugin-hardware"

// removeCgroups removes the cgroup of all pods, in each hierarchy.
func removeCgroups() {
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		folders, _ := filepath.Glob(pattern + podsCgroup)
		for _, folder := range folders {
			_ = exec.Command("find", folder, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").Run()
		}
	}
}

// files returns a folder with a program at a path, and what it needs of this machine: the C
// library, with the parts that the driver's libraries ask for, and sleep.
func files(t *testing.T, program, at string) string {
	t.Helper()
	root := t.TempDir()
	add := func(from, to string) {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		to = filepath.Join(root, to)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	add(program, at)
	add("/usr/bin/sleep", "/usr/bin/sleep")
	out, err := exec.CommandContext(t.Context(), "ldd", program).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", program, err)
	}
	for _, path := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
		add(path, path)
		if filepath.Base(path) != "libc.so.6" {
			continue
		}
		for _, name := range []string{"libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libresolv.so.2"} {
			add(filepath.Join(filepath.Dir(path), name), filepath.Join(filepath.Dir(path), name))
		}
	}
	if err := os.Mkdir(filepath.Join(root, "tmp"), 0o777); err != nil {
		t.Fatal(err)
	}
	return root
}

// A pod runs one command of the client on the node.
type pod struct {
	node *node
	name string
}

// run starts a pod with these limits of its container and this environment, as NAME: VALUE each. A
// command that is no path is one of the client.
func (n *node) run(t *testing.T, name string, limits, environment map[string]string, command ...string) pod {
	t.Helper()
	var env []item
	for k, v := range environment {
		env = append(env, item{"name": k, "value": v})
	}
	if !strings.HasPrefix(command[0], "/") {
		command = append([]string{"/usr/bin/client"}, command...)
	}
	return n.start(t, name, item{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": item{"name": name, "namespace": "default"},
		"spec": item{
			"hostNetwork": true, "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "automountServiceAccountToken": false,
			"containers": []item{{
				"name": "main", "image": clientImage, "imagePullPolicy": "Never", "command": command,
				"env": env, "resources": item{"limits": limits},
			}},
		},
	})
}

// An item is an object of a manifest.
type item = map[string]any

// start starts a pod from its manifest.
func (n *node) start(t *testing.T, name string, manifest item) pod {
	t.Helper()
	text, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(n.path("pods/."+name), text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(n.path("pods/."+name), n.path("pods/"+name+".json")); err != nil {
		t.Fatal(err)
	}
	return pod{n, name}
}

// podStatus is what kubelet says of a pod.
type podStatus struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Status struct {
		Phase   string `json:"phase"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
	} `json:"status"`
}

func (n *node) pods() ([]podStatus, error) {
	c := http.Client{Timeout: 10 * time.Second}
	response, err := c.Get(kubeletPods)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []podStatus `json:"items"`
	}
	return list.Items, json.Unmarshal(text, &list)
}

// status returns what kubelet says of the pod, and whether it knows it.
func (p pod) status(t *testing.T) (podStatus, bool) {
	t.Helper()
	all, err := p.node.pods()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Metadata.Name == p.name+"-node" {
			return s, true
		}
	}
	return podStatus{}, false
}

// refused waits until kubelet refuses the pod, and returns its words.
func (p pod) refused(t *testing.T) string {
	t.Helper()
	var words string
	until(t, "kubelet refuses pod "+p.name, func() bool {
		s, known := p.status(t)
		words = s.Status.Reason + ": " + s.Status.Message
		return known && s.Status.Phase == "Failed"
	})
	return words
}

// line waits for the line i, from 0, that the pod's command prints, and reads it.
func (p pod) line(t *testing.T, i int) (answer hardware.Answer) {
	t.Helper()
	until(t, fmt.Sprintf("line %d of pod %s", i, p.name), func() bool {
		lines := p.lines()
		if len(lines) > i {
			if err := json.Unmarshal([]byte(lines[i]), &answer); err != nil {
				t.Fatalf("pod %s prints %q: %v", p.name, lines[i], err)
			}
			return true
		}
		s, known := p.status(t)
		if known && (s.Status.Phase == "Failed" || s.Status.Phase == "Succeeded") && len(p.lines()) <= i {
			t.Fatalf("pod %s has ended, %s %s, after %q", p.name, s.Status.Reason, s.Status.Message, lines)
		}
		return false
	})
	return answer
}

// lines returns the whole lines that the pod's command has printed.
func (p pod) lines() (lines []string) {
	found, _ := filepath.Glob(p.node.path("logs/default_" + p.name + "-node_*/main/0.log"))
	for _, path := range found {
		text, _ := os.ReadFile(path)
		for _, line := range strings.SplitAfter(string(text), "\n") {
			// As the interface of container runtimes has it: time, stream, tag, text.
			if parts := strings.SplitN(line, " ", 4); len(parts) == 4 && strings.HasSuffix(line, "\n") {
				lines = append(lines, strings.TrimSuffix(parts[3], "\n"))
			}
		}
	}
	return lines
}

// ended waits until the pod's container has ended by itself.
func (p pod) ended(t *testing.T) {
	t.Helper()
	until(t, "the end of pod "+p.name, func() bool {
		s, known := p.status(t)
		return known && (s.Status.Phase == "Succeeded" || s.Status.Phase == "Failed")
	})
}

// remove removes the pod and waits until kubelet does not know it any more.
func (p pod) remove(t *testing.T) {
	t.Helper()
	if err := os.Remove(p.node.path("pods/" + p.name + ".json")); err != nil {
		t.Fatal(err)
	}
	until(t, "kubelet forgets pod "+p.name, func() bool { _, known := p.status(t); return !known })
}

// allocatable returns how many devices of a resource kubelet can give to pods.
func (n *node) allocatable(t *testing.T, resource string) (count int) {
	t.Helper()
	connection, err := grpc.NewClient("unix:///var/lib/kubelet/pod-resources/kubelet.sock",
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	kubelet := podresources.NewPodResourcesListerClient(connection)
	answer, err := kubelet.GetAllocatableResources(t.Context(), &podresources.AllocatableResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range answer.GetDevices() {
		if d.GetResourceName() == resource {
			count += len(d.GetDeviceIds())
		}
	}
	return count
}
