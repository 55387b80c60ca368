package node

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"text/template"

	"golang.org/x/sys/unix"
)

const (
	kubeconfigFile = "kubeconfig"
	tokenFile      = "tokens.csv"
	keyFile        = "service-account.key"
	containerdFile = "containerd.toml"
	kubeletFile    = "kubelet.yaml"
	networkFile    = "cni/10-node.conflist"
)

// program is one program of the control plane.
type program struct {
	name string
	args []string
}

func apiServerArgs(o Options) []string {
	path := func(name string) string { return filepath.Join(o.State, name) }
	return []string{
		"--etcd-servers=http://127.0.0.1:2379", "--bind-address=127.0.0.1", "--secure-port=6443",
		"--advertise-address=" + address, "--endpoint-reconciler-type=none", "--cert-dir=/run/kube-apiserver",
		"--service-cluster-ip-range=10.96.0.0/24", "--kubelet-preferred-address-types=InternalIP",
		"--authorization-mode=Node,RBAC", "--allow-privileged=true", "--token-auth-file=" + path(tokenFile),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + path(keyFile),
		"--service-account-signing-key-file=" + path(keyFile),
	}
}

// controlPlanePrograms lists those that follow the API server.
func controlPlanePrograms(o Options) []program {
	path := func(name string) string { return filepath.Join(o.State, name) }
	return []program{{
		name: "kube-controller-manager",
		args: []string{
			"--kubeconfig=" + path(kubeconfigFile), "--bind-address=127.0.0.1", "--leader-elect=false",
			"--service-account-private-key-file=" + path(keyFile),
			// Without the node lifecycle controller the not-ready taint would stay for ever, and without the
			// garbage collector the pods of a DaemonSet that was deleted.
			"--controllers=serviceaccount-controller,daemonset-controller,node-lifecycle-controller," +
				"garbage-collector-controller," +
				"taint-eviction-controller,pod-garbage-collector-controller,namespace-controller,resourceclaim-controller," +
				"device-taint-eviction-controller",
		},
	}, {
		name: "kube-scheduler",
		args: []string{"--kubeconfig=" + path(kubeconfigFile), "--bind-address=127.0.0.1", "--leader-elect=false"},
	}}
}

// writeFiles writes what the programs read.
func writeFiles(o Options) error {
	for _, folder := range []string{"logs", "logs/pods", "cni", "cni-state", "containerd"} {
		if err := os.MkdirAll(filepath.Join(o.State, folder), 0o755); err != nil {
			return fmt.Errorf("make folder for node: %w", err)
		}
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make service account key: %w", err)
	}
	snapshotter, err := snapshotter(filepath.Join(o.State, "containerd"))
	if err != nil {
		return err
	}
	values := struct {
		Options
		Server, Socket, Sandbox, Snapshotter, Token string
	}{o, apiServer, containerdSocket, SandboxImage, snapshotter, rand.Text()}
	files := map[string]string{
		kubeconfigFile: kubeconfig,
		tokenFile:      "{{.Token}},admin,admin,system:masters\n",
		containerdFile: containerd,
		kubeletFile:    kubelet,
		networkFile:    network,
		keyFile: string(pem.EncodeToMemory(
			&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
	}
	for name, text := range files {
		file, err := os.OpenFile(filepath.Join(o.State, name), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("write node's files: %w", err)
		}
		if err := template.Must(template.New(name).Parse(text)).Execute(file, values); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if err := file.Close(); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	return nil
}

// snapshotter is overlayfs where the kernel can mount one in folder; else images are copied.
func snapshotter(folder string) (string, error) {
	trial, err := os.MkdirTemp(folder, "overlay")
	if err != nil {
		return "", fmt.Errorf("try overlayfs: %w", err)
	}
	defer os.RemoveAll(trial)
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(trial, name), 0o755); err != nil {
			return "", fmt.Errorf("try overlayfs: %w", err)
		}
	}
	merged := filepath.Join(trial, "merged")
	options := fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", trial, trial, trial)
	if err := unix.Mount("overlay", merged, "overlay", 0, options); err != nil {
		return "native", nil
	}
	if err := unix.Unmount(merged, 0); err != nil {
		return "", fmt.Errorf("try overlayfs: unmount: %w", err)
	}
	return "overlayfs", nil
}

const kubeconfig = `apiVersion: v1
kind: Config
current-context: node
contexts: [{name: node, context: {cluster: node, user: admin}}]
clusters: [{name: node, cluster: {server: "{{.Server}}", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: "{{.Token}}"}}]
`

const containerd = `version = 3
root = "{{.State}}/containerd"
state = "/run/containerd"

[grpc]
address = "{{.Socket}}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "{{.Snapshotter}}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{{.Sandbox}}"

[plugins.'io.containerd.cri.v1.runtime']
# Lowering oom_score_adj needs CAP_SYS_RESOURCE, which a machine may withhold.
restrict_oom_score_adj = true
# A stand-in for NVIDIA's runtime, which is not the default one. A test that needs it puts its program there.
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
BinaryName = "{{.State}}/nvidia-container-runtime"
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
conf_dir = "{{.State}}/cni"
`

const network = `{
  "cniVersion": "0.4.0",
  "name": "node",
  "plugins": [{
    "type": "ptp",
    "ipam": {
      "type": "host-local", "dataDir": "{{.State}}/cni-state", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]
    }
  }]
}
`

const kubelet = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{{.Socket}}
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: {{.Cgroup}}
failCgroupV1: false
failSwapOn: false
podLogsDir: {{.State}}/logs/pods
volumePluginDir: {{.State}}/volume-plugins
resolvConf: ""
registerWithTaints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]
# Allocatable in the Node object follows within a second; the default of ten hides what the tests look for.
nodeStatusUpdateFrequency: 1s
nodeStatusReportFrequency: 1s
# A changed ConfigMap reaches its pods in this time; the default is a minute.
syncFrequency: 2s
# A small machine must not evict.
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100
evictionHard:
  {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
`
