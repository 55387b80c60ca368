// Package node runs a real single-node Kubernetes: etcd, the control plane, containerd and a
// kubelet. It takes the whole network and mount namespace it is started in, which the script beside
// the tests makes for it.
package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// Name is the Node object's name; the machine's name in /etc/hosts is the same.
const Name = "node"

// SandboxImage holds a pod's namespaces open. It is a busybox, so test pods run from it too.
const SandboxImage = "docker.io/library/busybox:e2e"

const (
	address           = "192.0.2.1"
	etcdVersion       = "etcd-3.7.0"
	containerdVersion = "containerd-2.4.2"
	helmVersion       = "helm-4.3.1"
	containerdSocket  = "/run/containerd/containerd.sock"
	startTimeout      = 6 * time.Minute
	kubectlTimeout    = time.Minute
	helmTimeout       = 3 * time.Minute
	kubeletHealthz    = "http://127.0.0.1:10248/healthz"
	etcdHealth        = "http://127.0.0.1:2379/health"
	apiServer         = "https://127.0.0.1:6443"
)

// Options say where a node finds its programs and leaves its files.
type Options struct {
	Cache          string   // folder that build.sh filled
	State          string   // empty folder for everything the node writes
	KubeletVersion string   // such as "1.36.3"
	ControlPlane   string   // version of the API server, scheduler, controller manager and kubectl
	Cgroup         string   // cgroup below which pods live; exists in every hierarchy
	Images         []string // docker archives to load
}

// Node is a running node.
type Node struct {
	Client kubernetes.Interface

	options   Options
	kubelet   *process
	apiServer *process
	processes []*process // in the order they were started, without the kubelet and the API server
}

// Start brings the node up and returns when it is Ready. The caller ends it with Close.
func Start(ctx context.Context, o Options) (*Node, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done within %v", startTimeout))
	defer cancel()
	n := &Node{options: o}
	err := n.start(ctx)
	if err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) error {
	if err := writeFiles(n.options); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", n.path(kubeconfigFile))
	if err != nil {
		return fmt.Errorf("read kubeconfig: %w", err)
	}
	config.QPS, config.Burst = 200, 400
	if n.Client, err = kubernetes.NewForConfig(config); err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	if err := n.startContainerd(ctx); err != nil {
		return err
	}
	if err := n.startControlPlane(ctx); err != nil {
		return err
	}
	if err := n.StartKubelet(ctx); err != nil {
		return err
	}
	return n.kubelet.ready(ctx, n.isReady)
}

// Close ends every process of the node.
func (n *Node) Close() {
	for _, p := range []*process{n.kubelet, n.apiServer} {
		if p != nil {
			p.stop()
		}
	}
	for i := len(n.processes) - 1; i >= 0; i-- {
		n.processes[i].stop()
	}
}

// Ended names the processes that have ended, and how; none should have.
func (n *Node) Ended() []string {
	var ended []string
	for _, p := range append(slices.Clone(n.processes), n.kubelet, n.apiServer) {
		select {
		case <-p.done:
			ended = append(ended, fmt.Sprintf("%s: %v%s", p.name, p.err, panicked(p.log)))
		default:
		}
	}
	return ended
}

func (n *Node) startContainerd(ctx context.Context) error {
	p, err := n.run(filepath.Join(n.options.Cache, containerdVersion, "containerd"), "--config", n.path(containerdFile))
	if err != nil {
		return err
	}
	err = p.ready(ctx, func(context.Context) error {
		connection, err := net.Dial("unix", containerdSocket)
		if err != nil {
			return err
		}
		return connection.Close()
	})
	if err != nil {
		return err
	}
	for _, image := range n.options.Images {
		ctr := exec.CommandContext(ctx, filepath.Join(n.options.Cache, containerdVersion, "ctr"),
			"--address", containerdSocket, "--namespace", "k8s.io", "images", "import", image)
		if out, err := ctr.CombinedOutput(); err != nil {
			return fmt.Errorf("import image %s: %w: %s", image, err, out)
		}
	}
	return nil
}

func (n *Node) startControlPlane(ctx context.Context) error {
	p, err := n.run(filepath.Join(n.options.Cache, etcdVersion, "etcd"), "--data-dir", "/run/etcd",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	if err != nil {
		return err
	}
	if err := p.ready(ctx, func(ctx context.Context) error { return getOK(ctx, etcdHealth) }); err != nil {
		return err
	}
	if err := n.StartAPIServer(ctx); err != nil {
		return err
	}
	for _, program := range controlPlanePrograms(n.options) {
		if _, err := n.run(filepath.Join(n.Programs(), program.name), program.args...); err != nil {
			return err
		}
	}
	return nil
}

// StartAPIServer starts the API server, with these arguments beside its own, and returns when it is
// ready.
func (n *Node) StartAPIServer(ctx context.Context, more ...string) error {
	args := append(apiServerArgs(n.options), more...)
	p, err := startProcess(n.path("logs"), filepath.Join(n.Programs(), "kube-apiserver"), args...)
	if err != nil {
		return err
	}
	n.apiServer = p
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done within %v", startTimeout))
	defer cancel()
	return p.ready(ctx, func(ctx context.Context) error {
		return n.Client.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// StopAPIServer ends the API server alone; what is in etcd stays.
func (n *Node) StopAPIServer() { n.apiServer.stop() }

// SetKubelet has a line in the configuration of a kubelet that is started later, in the place of
// one for the same option.
func (n *Node) SetKubelet(option, value string) error {
	text, err := os.ReadFile(n.path(kubeletFile))
	if err != nil {
		return fmt.Errorf("configure the kubelet: %w", err)
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(text), "\n"),
		func(l string) bool { return strings.HasPrefix(l, option+":") })
	lines = append(lines, fmt.Sprintf("%s: %s\n", option, value))
	if err := os.WriteFile(n.path(kubeletFile), []byte(strings.Join(lines, "")), 0o600); err != nil {
		return fmt.Errorf("configure the kubelet: %w", err)
	}
	return nil
}

// StartKubelet starts the kubelet and returns when it is healthy.
func (n *Node) StartKubelet(ctx context.Context) error {
	path := filepath.Join(n.options.Cache, "kubernetes-"+n.options.KubeletVersion, "kubelet")
	p, err := startProcess(n.path("logs"), path, "--config", n.path(kubeletFile), "--kubeconfig", n.path(kubeconfigFile),
		"--hostname-override", Name, "--node-ip", address, "--node-labels", "nvidia.com/gpu.present=true", "--v", "3")
	if err != nil {
		return err
	}
	n.kubelet = p
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not done within %v", startTimeout))
	defer cancel()
	return p.ready(ctx, func(ctx context.Context) error { return getOK(ctx, kubeletHealthz) })
}

// StopKubelet ends the kubelet alone; containers go on running.
func (n *Node) StopKubelet() { n.kubelet.stop() }

// Restart ends the kubelet, all containers and containerd at once, as a restart of the machine
// does, and starts containerd and the kubelet again. It returns when the kubelet was started.
func (n *Node) Restart(ctx context.Context) (time.Time, error) {
	n.kubelet.stop()
	for _, p := range n.processes {
		if p.name == "containerd" {
			p.stop()
		}
	}
	n.processes = slices.DeleteFunc(n.processes, func(p *process) bool { return p.name == "containerd" })
	if err := endContainers(ctx, n.options.Cgroup); err != nil {
		return time.Time{}, err
	}
	if err := n.startContainerd(ctx); err != nil {
		return time.Time{}, err
	}
	start := time.Now()
	return start, n.StartKubelet(ctx)
}

// endContainers kills what runs in containers, and their shims.
func endContainers(ctx context.Context, cgroup string) error {
	return Wait(ctx, 50*time.Millisecond, func(context.Context) error {
		left := 0
		processes, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, folder := range processes {
			id, err := strconv.Atoi(filepath.Base(folder))
			if err != nil || id == os.Getpid() {
				continue
			}
			groups, _ := os.ReadFile(filepath.Join(folder, "cgroup"))
			command, _ := os.ReadFile(filepath.Join(folder, "cmdline"))
			if strings.Contains(string(groups), cgroup+"/kubepods") ||
				strings.Contains(string(command), "containerd-shim-runc-v2") {
				_ = syscall.Kill(id, syscall.SIGKILL) // an error says that it has ended
				left++
			}
		}
		if left > 0 {
			return fmt.Errorf("%d processes of containers are left", left)
		}
		return nil
	})
}

// Kubeconfig is the file by which programs reach the API server.
func (n *Node) Kubeconfig() string { return n.path(kubeconfigFile) }

// Programs is the folder of kubectl and of the programs of the control plane.
func (n *Node) Programs() string {
	return filepath.Join(n.options.Cache, "kubernetes-"+n.options.ControlPlane)
}

// Kubectl runs kubectl against the node and returns what it wrote to its output. It may take a
// minute.
func (n *Node) Kubectl(ctx context.Context, args ...string) (string, error) {
	return n.client(ctx, kubectlTimeout, filepath.Join(n.Programs(), "kubectl"), args)
}

// Helm runs helm against the node and returns what it wrote to its output. It may take three
// minutes.
func (n *Node) Helm(ctx context.Context, args ...string) (string, error) {
	return n.client(ctx, helmTimeout, filepath.Join(n.options.Cache, helmVersion, "helm"), args)
}

// client runs a program that talks to the API server.
func (n *Node) client(ctx context.Context, limit time.Duration, program string, args []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	args = append([]string{"--kubeconfig", n.path(kubeconfigFile)}, args...)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+n.path("helm"), "HELM_CONFIG_HOME="+n.path("helm"),
		"HELM_DATA_HOME="+n.path("helm"))
	out, err := cmd.Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return string(out), fmt.Errorf("%s %v: %w: %s", filepath.Base(program), args[2:], err, exit.Stderr)
	}
	return string(out), err
}

// isReady asks whether pods can run: the Node is Ready and its not-ready taint is gone.
func (n *Node) isReady(ctx context.Context) error {
	object, err := n.Client.CoreV1().Nodes().Get(ctx, Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, taint := range object.Spec.Taints {
		if taint.Key == corev1.TaintNodeNotReady {
			return errors.New("node has the not-ready taint")
		}
	}
	isReady := func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}
	if !slices.ContainsFunc(object.Status.Conditions, isReady) {
		return fmt.Errorf("node is not Ready: %+v", object.Status.Conditions)
	}
	if _, err = n.Client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err
	}
	_, err = n.Client.CoreV1().ServiceAccounts("kube-system").Get(ctx, "default", metav1.GetOptions{})
	return err
}

func (n *Node) run(path string, args ...string) (*process, error) {
	p, err := startProcess(n.path("logs"), path, args...)
	if err != nil {
		return nil, err
	}
	n.processes = append(n.processes, p)
	return p, nil
}

func (n *Node) path(name string) string { return filepath.Join(n.options.State, name) }

// getOK asks url for 200.
func getOK(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}
