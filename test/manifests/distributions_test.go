package manifests

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// asProgram is the environment variable by which a process of this test is gpu-device-plugin.
const asProgram = "GPU_DEVICE_PLUGIN_MANIFESTS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(cli.DevicePlugin().Main())
	}
	os.Exit(m.Run())
}

// A layout says how the node of a distribution differs from others.
type layout struct {
	root    string // the kubelet's --root-dir; /var/lib/kubelet if empty
	private bool   // / is a private mount
}

var layouts = map[string]layout{
	"kubeadm, GKE, AKS, EKS": {}, "k3s": {}, "RKE2": {}, "Talos": {}, "Bottlerocket": {},
	"k0s":                 {root: "/var/lib/k0s/kubelet"},
	"MicroK8s":            {root: "/var/snap/microk8s/common/var/lib/kubelet"},
	"IBM Cloud":           {root: "/var/data/kubelet"},
	"TKGI":                {root: "/var/vcap/data/kubelet"},
	"kind":                {},
	"k3d, Docker Desktop": {private: true},
	"k3s on WSL":          {private: true},
}

// TestDistributions renders each row of the table in docs/platforms.md, checks the volumes of the
// pod against the layout of the node, as the kubelet and the container runtime do, and starts the
// daemon there. It offers its GPUs, and misses nothing.
func TestDistributions(t *testing.T) {
	t.Parallel()
	_, text, _ := strings.Cut(string(read(t, "../../docs/platforms.md")), "<!-- distributions:")
	text, _, _ = strings.Cut(text, "<!-- end of distributions -->")
	rows := regexp.MustCompile("(?m)^\\| (.*?) \\| `(\\{.*?\\})` \\|").FindAllStringSubmatch(text, -1)
	if len(rows) != len(layouts) {
		t.Fatalf("docs/platforms.md has %d distributions, want %d", len(rows), len(layouts))
	}
	for _, row := range rows {
		t.Run(row[1], func(t *testing.T) {
			t.Parallel()
			l, known := layouts[row[1]]
			if !known {
				t.Fatal("no layout")
			}
			n := startOn(t, l, row[2])
			if status := n.status(); strings.Contains(status, "PodResources not asked") {
				t.Errorf("status:\n%s", status)
			}
		})
	}
}

// TestPrivateRoot: on a node whose / is a private mount, the default values fail with the error
// that the documents name.
func TestPrivateRoot(t *testing.T) {
	t.Parallel()
	pod := daemonSet(t, decode(t, "chart", render(t, "{}")), "gpu-device-plugin").Spec.Template.Spec
	tree := loopback.Folder(t)
	if err := os.MkdirAll(tree+"/var/lib/kubelet/device-plugins", 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := create(tree, layout{private: true}, pod)
	if err == nil {
		t.Fatal("the pod is created on a private mount")
	}
	for _, page := range []string{"../../docs/platforms.md", "../../docs/install.md"} {
		if !strings.Contains(string(read(t, page)), err.Error()) {
			t.Errorf("%s does not have the error: %v", page, err)
		}
	}
}

// TestUnmountsReachPods: a mount of the node with volumes of pods below it propagates unmounts into
// the pod. Otherwise the pod keeps the file system of a volume in use after the kubelet has
// unmounted it, and a volume that is then detached loses data.
func TestUnmountsReachPods(t *testing.T) {
	t.Parallel()
	sets := deployedDaemonSets(t)
	sets["cleanup"] = decode(t, "cleanup", read(t, cleanupFolder+"/cleanup.yaml"))
	for _, values := range []string{
		"{}", "{nvidiaDriverRoot: /}", "{nvidiaDriverRootPropagation: null}", "{nvidiaDriverRootFolders: [/var]}", "{nvidiaDriverRoot: /run/nvidia/driver}",
		"{mps: {enabled: true}}", "{cleanup: {enabled: true}}", "{cleanup: {enabled: true}, mps: {enabled: true}}", "{cleanup: {enabled: true}, config: {name: a}}",
		"{rebootFile: /var/lib/reboot-required}",
	} {
		sets[values] = decode(t, "chart", render(t, values))
	}
	for _, values := range []string{"{}", "{cleanup: {enabled: true}}", "{cleanup: {enabled: true}, config: {name: a}}",
		"{rebootFile: /var/lib/reboot-required}"} {
		values = strings.Replace(values, "{", "{nvidiaDriverRootPropagation: None, ", 1)
		sets[values] = decode(t, "chart", render(t, values))
	}
	for from, objects := range sets {
		private := strings.Contains(from, "None")
		for _, object := range objects {
			set, is := object.(*appsv1.DaemonSet)
			if !is {
				continue
			}
			pod := set.Spec.Template.Spec
			folders := map[string]string{}
			for _, v := range pod.Volumes {
				if v.HostPath != nil {
					folders[v.Name] = v.HostPath.Path
				}
			}
			for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
				for _, m := range c.VolumeMounts {
					folder := strings.TrimSuffix(folders[m.Name], "/")
					pods := "/var/lib/kubelet/pods/"
					if _, mounted := folders[m.Name]; !mounted || !strings.HasPrefix(pods, folder+"/") {
						continue
					}
					if (m.MountPropagation == nil) != private {
						t.Errorf("%s: %s, container %s: %q has the propagation %v", from, set.Name, c.Name, m.MountPath,
							m.MountPropagation)
					}
				}
			}
		}
	}
}

// TestDefaultsOnEveryLayout: with the default values the pod starts on every layout whose / is a
// shared mount and offers the GPUs. What is missing is said, with the value that helps.
func TestDefaultsOnEveryLayout(t *testing.T) {
	t.Parallel()
	layouts := map[string]layout{"another root": {root: "/data/kubelet"}, "k0s": layouts["k0s"],
		"MicroK8s": layouts["MicroK8s"]}
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startOn(t, l, "{}")
			want := ""
			switch {
			case name == "another root":
				want = "Set the kubelet's --root-dir, such as /var/lib/k0s/kubelet, as kubeletRoot in the chart"
			case l.root != "":
				want = "Set the kubelet's --root-dir, which is " + l.root + ", as kubeletRoot in the chart"
			}
			status := strings.Join(strings.Fields(n.status()), " ")
			if strings.Contains(status, "PodResources not asked") != (want != "") || !strings.Contains(status, want) {
				t.Errorf("status says not %q:\n%s", want, status)
			}
		})
	}
}

// A node has the daemon of a rendered pod on it.
type node struct {
	t       *testing.T
	control string
}

// startOn renders the chart with values, and starts its pod on a node of that layout with a
// simulated machine. It returns when the kubelet counts the GPUs.
func startOn(t *testing.T, l layout, values string) node {
	t.Helper()
	objects := decode(t, "chart", render(t, strings.Replace(values, "{", "{simulate: dgx-h100, ", 1)))
	pod := daemonSet(t, objects, "gpu-device-plugin").Spec.Template.Spec
	tree := loopback.Folder(t)
	root := cmp.Or(l.root, "/var/lib/kubelet")
	for _, folder := range []string{"/usr/lib", "/etc", "/dev", filepath.Join(root, "pod-resources")} {
		if err := os.MkdirAll(tree+folder, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	k, err := kubelet.Start(kubelet.Options{
		Dir: tree + "/var/lib/kubelet/device-plugins", PodResourcesSocket: tree + filepath.Join(root,
			"pod-resources/kubelet.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	seen, err := create(tree, l, pod)
	if err != nil {
		t.Fatalf("the pod cannot be created: %v", err)
	}
	kubeletRoot := "/var/lib/kubelet"
	env := []string{asProgram + "=1", "GORACE=atexit_sleep_ms=0"}
	for _, e := range pod.Containers[0].Env {
		switch e.Name {
		case "KUBELET_ROOT":
			kubeletRoot = e.Value
		case "METRICS_ADDRESS", "POD_IP", "NODE_NAME": // no network
		case "CONTAINER_DRIVER_ROOT":
			env = append(env, e.Name+"="+seen(e.Value))
		default:
			env = append(env, e.Name+"="+e.Value)
		}
	}
	control := seen("/run/gpu-device-plugin/control.sock")
	cmd := exec.CommandContext(t.Context(), os.Args[0],
		"--kubelet-socket", seen("/var/lib/kubelet/device-plugins/kubelet.sock"),
		"--pod-resources-socket", seen(kubeletRoot+"/pod-resources/kubelet.sock"),
		"--state-dir", seen("/var/lib/gpu-device-plugin"), "--cdi-dir", filepath.Join(tree,
			"var/run/cdi"), "--control-socket", control)
	var log bytes.Buffer
	cmd.Env, cmd.Stderr, cmd.SysProcAttr = env, &log, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // of a process that was killed
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", log.String())
		}
	})
	poll.Until(t, "the kubelet counts 8 GPUs", func() bool { return k.Allocatable("nvidia.com/gpu") == 8 })
	return node{t, control}
}

// status returns what gpu-device-plugin status prints.
func (n node) status() string {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), os.Args[0], "status", "--control-socket", n.control)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.t.Fatalf("status: %v: %s", err, out)
	}
	return string(out)
}

// create makes of the volumes of a pod what the kubelet and the container runtime make of them on a
// node whose files are in tree. It returns where the container's paths are.
func create(tree string, l layout, pod corev1.PodSpec) (seen func(string) string, err error) {
	sources, onNode := map[string]string{}, map[string]string{}
	for _, v := range pod.Volumes {
		if v.HostPath == nil {
			sources[v.Name] = filepath.Join(tree, "pod", v.Name)
			if err := os.MkdirAll(sources[v.Name], 0o700); err != nil {
				return nil, err
			}
			continue
		}
		folder := filepath.Join(tree, v.HostPath.Path)
		sources[v.Name], onNode[v.Name] = folder, v.HostPath.Path
		switch info, err := os.Stat(folder); *v.HostPath.Type {
		case corev1.HostPathDirectoryOrCreate:
			if err := os.MkdirAll(folder, 0o750); err != nil {
				return nil, err
			}
		case corev1.HostPathDirectory:
			if err != nil || !info.IsDir() {
				return nil, fmt.Errorf("hostPath type check failed: %s is not a directory", v.HostPath.Path)
			}
		default:
			return nil, fmt.Errorf("the volume %s has the type %q", v.Name, *v.HostPath.Type)
		}
	}
	at := map[string]string{}
	for _, m := range pod.Containers[0].VolumeMounts {
		if m.MountPropagation != nil && l.private {
			return nil, fmt.Errorf("path %q is mounted on %q but it is not a shared or slave mount", onNode[m.Name], "/")
		}
		at[m.MountPath] = sources[m.Name]
	}
	return func(path string) string {
		for mount := path; mount != "/"; mount = filepath.Dir(mount) {
			if source, is := at[mount]; is {
				return source + strings.TrimPrefix(path, mount)
			}
		}
		return filepath.Join(tree, "container", path)
	}, nil
}
