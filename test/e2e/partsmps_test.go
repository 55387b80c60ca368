package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// controlProgram returns the path of NVIDIA's own nvidia-cuda-mps-control of make real, or of the
// stand-in where make real has not run.
func controlProgram(t *testing.T) string {
	t.Helper()
	program := filepath.Join(filepath.Dir(*cache), "real/mps/trixie/usr/bin/nvidia-cuda-mps-control")
	if _, err := os.Stat(program); err != nil {
		t.Logf("with a stand-in for MPS: %v", err)
		installMPS(t)
		return mpsProgram
	}
	return program
}

// partsByMPS: a container with units is a client of the control daemon of its GPU, has its limits
// in its environment, and can ask that daemon. While the daemon is away no units are offered; then
// the same container finds the next one.
func partsByMPS(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const (
		units  = "volcano.sh/gpu-mem.128Mi"
		cores  = "volcano.sh/gpu-core.percentage"
		each   = (81559 - 1024) / 128 // units of a GPU
		wanted = 80                   // units of the pod
		name   = "part-by-mps"
	)
	held := heldDevices(ctx, t, kubelet, holder)
	free := slices.DeleteFunc(simulatedGPUs(ctx, t, n), func(g simulated) bool { return slices.Contains(held, g.UUID) })
	withoutDaemon(ctx, t, n)
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, fmt.Sprintf(
		"config: {map: {default: '{selectors: [{uuids: [%s], units: true}], units: {reserveMiB: 1024}}'}}\n", free[0].UUID,
	))...)...)
	program := controlProgram(t)
	for _, set := range []string{daemonSet, controlDaemons} {
		findMPS(ctx, t, n, set, program)
	}
	label := func(value string) { kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, mpsCapable+value) }
	label("=true")
	t.Cleanup(func() { // the test's context has ended by then
		if t.Failed() {
			out, err := n.Kubectl(context.Background(), "--namespace", namespace, "logs", "daemonset/"+controlDaemons, "--tail",
				"100")
			t.Logf("the log of mps-control-daemon, error %v:\n%s", err, out)
		}
		if _, err := n.Kubectl(context.Background(), "label", "node", node.Name, mpsCapable+"-"); err != nil {
			t.Error(err)
		}
	})
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitAllocatable(ctx, t, kubelet, gpu, gpus-1, stepLimit)
	waitAllocatable(ctx, t, kubelet, units, each, stepLimit)
	waitNodeCapacity(ctx, t, n, units, each)

	pod := podOf(name, units, wanted)
	main := &pod.Spec.Containers[0]
	main.Image = compatImage // it has the C library, which NVIDIA's program needs
	main.Command = []string{"busybox", "sh", "-c", "while sleep 1; do :; done"}
	main.Resources.Limits[cores] = apiresource.MustParse("25")
	main.VolumeMounts = []corev1.VolumeMount{{Name: "program", MountPath: "/usr/bin/nvidia-cuda-mps-control",
		ReadOnly: true}}
	pod.Spec.Volumes = []corev1.Volume{{
		Name: "program", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: program}},
	}}
	startPod(ctx, t, n, pod)
	waitPod(ctx, t, n, name, isRunning)
	const environment = `echo $NVIDIA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
		grep -c " /dev/shm " /proc/mounts`
	want := []string{free[0].UUID, "/mps/pipe", "0=10240M", "25", "1"}
	if got := strings.Fields(shell(ctx, t, n, name, environment)); !slices.Equal(got, want) {
		t.Errorf("the container has %v, want %v", got, want)
	}
	if holders := daemonExec(ctx, t, n, "status", "--holders"); !strings.Contains(holders,
		"10240 MiB, 25 percent, by mps") {
		t.Errorf("status --holders does not name the layer:\n%s", holders)
	}
	asks(ctx, t, n, name, "100.0") // the daemon has no limits of its own

	label("-")
	waitAllocatable(ctx, t, kubelet, units, 0, stepLimit)
	asks(ctx, t, n, name, "Cannot find MPS control daemon process")
	label("=true")
	waitAllocatable(ctx, t, kubelet, units, each, stepLimit)
	asks(ctx, t, n, name, "100.0")
}

// findMPS has the pods of a DaemonSet find the program of MPS, which NVIDIA's runtime brings in a
// cluster.
func findMPS(ctx context.Context, t *testing.T, n *node.Node, set, program string) {
	t.Helper()
	const pod = "/spec/template/spec"
	kubectl(ctx, t, n, "--namespace", namespace, "patch", "daemonset", set, "--type", "json", "--patch", `[
		{"op": "add", "path": "`+pod+`/volumes/-", "value": {"name": "mps-program", "hostPath": {"path": "`+program+`", "type": "File"}}},
		{"op": "add", "path": "`+pod+`/containers/0/volumeMounts/-",
			"value": {"name": "mps-program", "mountPath": "/usr/bin/nvidia-cuda-mps-control", "readOnly": true}}]`)
}

// asks waits until a container that asks the control daemon of its GPU for the threads of a client
// is answered so. A daemon takes no command for a moment when a client comes or goes.
func asks(ctx context.Context, t *testing.T, n *node.Node, pod, want string) {
	t.Helper()
	wait(ctx, t, func(ctx context.Context) error {
		got := shell(ctx, t, n, pod, "echo get_default_active_thread_percentage | nvidia-cuda-mps-control 2>&1 || true")
		if strings.TrimSpace(got) != want {
			return fmt.Errorf("the control daemon answers %q to a container, want %q", got, want)
		}
		return nil
	})
}
