package kubelet_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// startPlugin starts the daemon beside a node, with these arguments beside those for CDI, and waits
// until a resource has this many healthy devices, or any number above 0 where that is 0.
func startPlugin(t *testing.T, resource string, devices int, args ...string) *process {
	t.Helper()
	if err := os.MkdirAll("/run/gpu-device-plugin", 0o755); err != nil {
		t.Fatal(err)
	}
	p := start(t, "gpu-device-plugin", nil, *daemon, append([]string{"--device-list-strategy", "cdi-cri", "-v", "2"},
		args...)...)
	p.until(t, "kubelet has "+resource, func() bool {
		n := healthy(t, resource)
		return n > 0 && (devices == 0 || n == devices)
	})
	return p
}

// TestContainers: kubelet gives a container the GPU, and in it CUDA computes with the device nodes
// and the driver's files of our CDI spec alone. A container that asks for none has neither, and one
// that asks while the GPU is held is refused.
func TestContainers(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	n := startNode(t)
	startPlugin(t, "nvidia.com/gpu", 1)
	const gpu = "nvidia.com/gpu"

	none := n.run(t, "none", nil, nil, "info")
	if got := none.line(t, 0); got.Error == "" {
		t.Errorf("a container without a GPU has %+v", got)
	}
	first := n.run(t, "first", map[string]string{gpu: "1"}, nil, "spin", "-for", "5s")
	if got := first.line(t, 0); !got.Started {
		t.Errorf("a container with the GPU does not compute: %+v", got)
	}
	second := n.run(t, "second", map[string]string{gpu: "1"}, nil, "info")
	t.Logf("a container that asks while the GPU is held is refused: %s", second.refused(t))
	got := first.line(t, 1)
	if got.Launches == 0 {
		t.Errorf("the container computed: %+v", got)
	}
	t.Logf("the container made %d launches in %.1f s, %.3g multiplications and additions", got.Launches, got.Seconds,
		got.FMAs)
	first.ended(t)
	first.remove(t)
	second.remove(t)

	info := n.run(t, "info", map[string]string{gpu: "1"}, nil, "info")
	whole := info.line(t, 0)
	t.Logf("in a container with the GPU, CUDA says %+v", whole)
	if whole.Error != "" || whole.SMs == 0 || whole.Total == 0 {
		t.Errorf("CUDA in a container with the GPU: %+v", whole)
	}
	info.ended(t)
	info.remove(t)
	n.startTimes(t, "a GPU", map[string]string{gpu: "1"})
}

// TestDaemonInAContainer: the daemon, as deployments/host-dev starts it, finds the driver of the
// node, and a container gets the GPU by CDI.
func TestDaemonInAContainer(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	n := startNode(t)
	n.start(t, "gpu-device-plugin", hostDev(t))
	until(t, "kubelet has nvidia.com/gpu", func() bool { return n.allocatable(t, "nvidia.com/gpu") == 1 })
	p := n.run(t, "info", map[string]string{"nvidia.com/gpu": "1"}, nil, "info")
	got := p.line(t, 0)
	if got.Error != "" || got.SMs == 0 {
		t.Errorf("CUDA in a container with the GPU: %+v", got)
	}
	t.Logf("the daemon runs in its container, and a container with the GPU says %+v", got)
}

// hostDev returns the pod of deployments/host-dev for a kubelet without an API server and without
// an address.
func hostDev(t *testing.T) item {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(*source, "deployments/static/gpu-device-plugin.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var set struct {
		Spec struct {
			Template struct {
				Spec item `json:"spec"`
			} `json:"template"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(text, &set); err != nil {
		t.Fatal(err)
	}
	spec := set.Spec.Template.Spec
	for _, key := range []string{"affinity", "serviceAccountName", "priorityClassName"} {
		delete(spec, key)
	}
	spec["hostNetwork"] = true
	main := spec["containers"].([]any)[0].(item)
	for _, key := range []string{"readinessProbe", "livenessProbe", "ports"} {
		delete(main, key)
	}
	env := []any{item{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
		item{"name": "DEVICE_LIST_STRATEGY", "value": "cdi-cri"}}
	for _, e := range main["env"].([]any) {
		switch e.(item)["name"] {
		case "POD_IP", "NODE_NAME", "MPS_ROOT", "METRICS_ADDRESS":
		default:
			env = append(env, e)
		}
	}
	main["env"], main["imagePullPolicy"], main["securityContext"] = env, "Never", item{"privileged": true}
	dev := item{"name": "dev", "mountPath": "/dev", "mountPropagation": "HostToContainer"}
	main["volumeMounts"] = append(main["volumeMounts"].([]any), dev)
	spec["volumes"] = append(spec["volumes"].([]any), item{"name": "dev",
		"hostPath": item{"path": "/dev", "type": "Directory"}})
	return item{"apiVersion": "v1", "kind": "Pod", "metadata": item{"name": "gpu-device-plugin", "namespace": "default"},
		"spec": spec}
}

// removeAll removes all pods of the node and waits until no process of the client is left: kubelet
// forgets such a pod before that.
func (n *node) removeAll(t *testing.T) {
	t.Helper()
	found, err := filepath.Glob(n.path("pods/*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "all pods have ended", func() bool {
		all, err := n.pods()
		return err == nil && len(all) == 0 && !isRunning("client")
	})
}

// isRunning reports whether a process of a program runs.
func isRunning(program string) bool {
	found, _ := filepath.Glob("/proc/[0-9]*/comm")
	return slices.ContainsFunc(found, func(path string) bool {
		name, err := os.ReadFile(path)
		return err == nil && strings.TrimSpace(string(name)) == program
	})
}

// startTimes logs how long pods with these limits take from their manifest to the first answer of
// CUDA, one after the other.
func (n *node) startTimes(t *testing.T, what string, limits map[string]string) {
	t.Helper()
	var took []time.Duration
	for i := range 7 {
		began := time.Now()
		p := n.run(t, fmt.Sprintf("time-%d", i), limits, nil, "info")
		if got := p.line(t, 0); got.Error != "" {
			t.Errorf("a container with %s: %s", what, got.Error)
		}
		took = append(took, time.Since(began).Round(time.Millisecond))
		p.ended(t)
		p.remove(t)
	}
	slices.Sort(took)
	t.Logf("from the manifest of a pod with %s to CUDA's answer: median %v, %v to %v", what, took[len(took)/2], took[0],
		took[len(took)-1])
}
