package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	pciPresent = "feature.node.kubernetes.io/pci-10de.present" // a label of node-feature-discovery
	gpuPresent = "nvidia.com/gpu.present"
)

// A takeover is a form in which NVIDIA's chart is installed, and the values with which ours takes
// its place.
type takeover struct {
	name   string
	theirs chartExample
	// override is the value fullnameOverride of theirs, in the namespace of ours; ours with the same
	// is refused.
	override string
	// discovery says that node-feature-discovery comes and goes with theirs, and alone says which
	// nodes have GPUs.
	discovery bool
	values    string
}

var takeovers = []takeover{
	{name: "as it is", theirs: chartExample{plugin: chartPlugin}},
	{name: "with gpu-feature-discovery and node-feature-discovery", theirs: chartExample{plugin: chartPlugin, gfd: true},
		discovery: true,
		values: "features: {labels: node}\ndevicePlugin: {containers: {main: {env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.1}, " +
			"{name: KUBERNETES_SERVICE_PORT, value: \"6444\"}]}}}\n"},
	{name: "with fullnameOverride", theirs: chartExample{plugin: chartPlugin}, override: "gpus"},
}

// takesOverUnderLoad: our chart is installed beside NVIDIA's, whose objects start our image, and
// these are removed; and back in the same way, while short pods come and go. On 1.37 no pod fails
// and the kubelet counts all GPUs in each answer.
func takesOverUnderLoad(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	for _, way := range takeovers {
		if !t.Run(way.name, func(t *testing.T) { way.tell(ctx, t, n, kubelet) }) {
			return
		}
	}
}

func (w takeover) tell(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	startProxy(t)
	makeFolder(t, "/run/nvidia/mps")
	w.theirs.machine = "dgx-h100"
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename",
		filepath.Join(*source, "test/e2e/testdata/operator/nodefeatures.yaml"))
	if w.discovery {
		// The label of ours that an earlier story left would keep the daemon.
		kubectl(ctx, t, n, "label", "node", node.Name, pciPresent+"=true", gpuPresent+"-", healthLabel+"-")
		t.Cleanup(func() { // other stories look for the labels
			labels := []string{pciPresent + "-", gpuPresent + "=true", "nvidia.com/gpu.count-", "nvidia.com/gpu.product-",
				healthLabel + "-"}
			if _, err := n.Kubectl(context.Background(), append([]string{"label", "--overwrite", "node", node.Name},
				labels...)...); err != nil {
				t.Error(err)
			}
		})
		goesWithItsLabel(ctx, t, n)
	}
	file, sets := w.objects(t)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename", file)
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, n)
		}
		_, _ = n.Helm(context.Background(), "--namespace", namespace, "uninstall", daemonSet, "--ignore-not-found")
		removeChart(t, n, sets)
	})
	publishCA(ctx, t, n, chartNamespace)
	publishCA(ctx, t, n, namespace)
	waitServes(ctx, t, n, sets)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	if w.override != "" {
		_, err := n.Helm(ctx, append([]string{"--namespace", namespace, "install"},
			chartWith(t, "fullnameOverride: "+w.override)...)...)
		if err == nil || !strings.Contains(err.Error(), "selectorLabelsOverride") {
			t.Errorf("ours with the name of theirs: %v, want it refused with a value that helps", err)
		}
	}

	seen := watch(ctx, t, kubelet, gpu, "taken over and back, "+w.name)
	end := startChurn(ctx, t, n)
	w.takeOver(ctx, t, n, sets)
	waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename", file)
	waitServes(ctx, t, n, sets)
	helm(ctx, t, n, "uninstall", daemonSet)
	wait(ctx, t, func(ctx context.Context) error {
		if pod, err := setPod(ctx, n, namespace, daemonSet); err == nil {
			return fmt.Errorf("pod %s is there still", pod.Name)
		}
		return nil
	})
	waitAllocatable(ctx, t, kubelet, gpu, gpus, stepLimit)
	churn := end()
	lowest, longest := seen().below(gpus)
	t.Logf("there and back: the kubelet counted %d at least, below %d for %v; %v", lowest, gpus, longest, churn)
	if isKubelet("1.37") && (len(churn.refused) > 0 || lowest < gpus) {
		t.Errorf("%d of %d pods failed, and the kubelet counted %d at least; want none and %d", len(churn.refused),
			churn.made, lowest, gpus)
	}
	if ours := churn.ofOurs(); len(ours) > 0 {
		t.Errorf("%d of %d pods failed for what a device plugin did", len(ours), churn.made)
	}
	waitPod(ctx, t, n, holder, isSame(before))
}

// goesWithItsLabel: without a label of its own, our pod goes when node-feature-discovery takes its
// label from the Node.
func goesWithItsLabel(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, "")...)...)
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	kubectl(ctx, t, n, "label", "node", node.Name, pciPresent+"-")
	waitNoDaemon(ctx, t, n)
	helm(ctx, t, n, "uninstall", daemonSet)
	kubectl(ctx, t, n, "label", "node", node.Name, pciPresent+"=true")
}

// takeOver installs ours and removes theirs. Where node-feature-discovery goes with theirs, ours
// has a label of its own before, by which it stays.
func (w takeover) takeOver(ctx context.Context, t *testing.T, n *node.Node, sets []*appsv1.DaemonSet) {
	t.Helper()
	helm(ctx, t, n, append([]string{"install"}, chartWith(t, w.values)...)...)
	wait(ctx, t, func(ctx context.Context) error { return setRolledOut(ctx, n) })
	if !w.discovery {
		removeSets(ctx, t, n, sets)
		return
	}
	waitNodeSays(ctx, t, n, "the label of its own", time.Now(), stepLimit, hasLabel(healthLabel, "healthy"))
	ours, err := setPod(ctx, n, namespace, daemonSet)
	if err != nil {
		t.Fatal(err)
	}
	kubectl(ctx, t, n, "label", "node", node.Name, pciPresent+"-")
	removeSets(ctx, t, n, sets)
	if stays, err := setPod(ctx, n, namespace, daemonSet); err != nil || stays.UID != ours.UID ||
		stays.DeletionTimestamp != nil {
		t.Errorf("ours did not stay: error %v", err)
	}
	kubectl(ctx, t, n, "label", "node", node.Name, pciPresent+"=true") // it comes back with theirs
}

// waitServes waits until the containers of DaemonSets run and the first, which is the plugin's, has
// registered.
func waitServes(ctx context.Context, t *testing.T, n *node.Node, sets []*appsv1.DaemonSet) {
	t.Helper()
	for _, set := range sets {
		wait(ctx, t, func(ctx context.Context) error { return setRuns(ctx, n, set) })
	}
	wait(ctx, t, func(ctx context.Context) error {
		pod, err := setPod(ctx, n, sets[0].Namespace, sets[0].Name) // the selectors of their DaemonSets have pods in common
		if err != nil {
			return err
		}
		log, err := n.Kubectl(ctx, "--namespace", pod.Namespace, "logs", pod.Name)
		if err == nil && !strings.Contains(log, "Registered") {
			err = fmt.Errorf("%s has not registered: %s", sets[0].Name, log)
		}
		return err
	})
}

// objects returns a file with what NVIDIA's chart renders, and its DaemonSets.
func (w takeover) objects(t *testing.T) (file string, sets []*appsv1.DaemonSet) {
	t.Helper()
	text, sets := w.theirs.objects(t)
	if w.override != "" { // which is the name of the DaemonSet in the place of RELEASE-nvidia-device-plugin
		text = []byte(strings.NewReplacer(
			`"`+chartPlugin+`"`, `"`+w.override+`"`, `"namespace":"`+chartNamespace+`"`, `"namespace":"`+namespace+`"`,
		).Replace(string(text)))
		for _, set := range sets {
			set.Name, set.Namespace = w.override, namespace
		}
	}
	file = filepath.Join(t.TempDir(), "objects.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file, sets
}
