package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// without are the values of a release on a node without NVIDIA's runtime. Half of the GPUs are
// given by claims.
const without = agentValues + `
runtime: none
dra: {enabled: true}
config: {map: {default: "dra: {mode: split, gpus: {indices: [0, 1, 2, 3]}}"}}
`

// withoutTheRuntime: on a node with a driver and containerd alone, one helm install gives pods GPUs
// by resource and by claim, with the RuntimeClass nvidia and without. A class of somebody else is
// refused before, and the release's own one goes with it.
func withoutTheRuntime(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	startProxy(t)
	publishCA(ctx, t, n, namespace)
	values := without + "simulate: " + bringDriver(ctx, t) + "\n"
	classes := n.Client.NodeV1().RuntimeClasses()
	makeRuntimeClass(ctx, t, n)
	install := append([]string{"install"}, chartWith(t, values)...)
	if out, err := n.Helm(ctx, append([]string{"--namespace", namespace}, install...)...); err == nil ||
		!strings.Contains(err.Error(), "there is a RuntimeClass nvidia") {
		t.Fatalf("helm install beside a RuntimeClass of somebody else: error %v:\n%s", err, out)
	}
	persist(ctx, t, "remove the RuntimeClass", func(ctx context.Context) error {
		return classes.Delete(ctx, "nvidia", metav1.DeleteOptions{})
	})

	start := time.Now()
	helm(ctx, t, n, install...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	waitDevices(ctx, t, n, gpus/2)
	phase("GPUs offered without NVIDIA's runtime", start)
	makeNodes(t, driverRoot, simulatedGPUs(ctx, t, n))
	makeTemplate(ctx, t, n, "without", oneGPU)
	var pods []*corev1.Pod
	for name, class := range map[string]*string{"plain": nil, "with-class": ptr.To("nvidia")} {
		byResource := podOf("resource-"+name, gpu, 1)
		byClaim := podWith("claim-"+name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To("without")})
		byResource.Spec.RuntimeClassName, byClaim.Spec.RuntimeClassName = class, class
		pods = append(pods, byResource, byClaim)
	}
	for _, pod := range pods {
		startPod(ctx, t, n, pod)
	}
	var given []string
	for _, pod := range pods {
		waitPod(ctx, t, n, pod.Name, isRunning)
		found := nodesIn(ctx, t, n, pod.Name)
		if len(found) != 1 || slices.Contains(given, found[0]) {
			t.Errorf("%s has the GPUs %v, want one, and not of %v", pod.Name, found, given)
		}
		given = append(given, found...)
		for _, file := range []string{"libcuda.so.1", "nvidia-smi"} {
			look := "for f in $(find /usr /lib /lib64 /bin -name " + file + " 2>/dev/null); do [ -s $f ] && echo $f; done; true"
			if shell(ctx, t, n, pod.Name, look) == "" {
				t.Errorf("%s does not find %s", pod.Name, file)
			}
		}
	}

	relies := podOf("relies", "example.com/none", 0)
	relies.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
	relies.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"}}
	relies.Spec.RuntimeClassName = ptr.To("nvidia")
	startPod(ctx, t, n, relies)
	waitPod(ctx, t, n, "relies", isRunning)
	if found := nodesIn(ctx, t, n, "relies"); len(found) > 0 {
		t.Errorf("a pod that relies on NVIDIA_VISIBLE_DEVICES alone has %v, and NOTES.txt says that it has none", found)
	}

	for _, pod := range append(pods, relies) {
		deletePod(ctx, t, n, pod.Name)
	}
	upgrade(ctx, t, n, strings.Replace(values, "{enabled: true}", "{enabled: true, mode: plugin}", 1))
	waitDevices(ctx, t, n, 0)
	helm(ctx, t, n, "uninstall", daemonSet)
	wait(ctx, t, func(ctx context.Context) error {
		if _, err := classes.Get(ctx, "nvidia", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the RuntimeClass of the release is there still: %w", err)
		}
		return nil
	})
}

// bringDriver puts NVIDIA's driver of make real below driverRoot until the story ends, or a
// stand-in where make real has not run. It returns the simulated machine that has a driver of that
// version.
func bringDriver(ctx context.Context, t *testing.T) (machine string) {
	t.Helper()
	parts := filepath.Join(filepath.Dir(*cache), "real/run")
	if _, err := os.Stat(filepath.Join(parts, "usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01")); err != nil {
		t.Logf("with a stand-in for the driver: %v", err)
		installDriver(ctx, t)
		return "dgx-h100"
	}
	for _, folder := range []string{"usr", "etc"} {
		to := filepath.Join(driverRoot, folder)
		makeFolder(t, to)
		if err := unix.Mount(filepath.Join(parts, folder), to, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
	}
	return "l4-x8"
}
