package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

const (
	chartNamespace = "nvidia-device-plugin"
	chartPlugin    = "nvdp-nvidia-device-plugin"
	chartDiscovery = chartPlugin + "-gpu-feature-discovery"
	chartMPS       = chartPlugin + "-mps-control-daemon"
	staticPlugin   = "nvidia-device-plugin-daemonset"
)

// A chartExample is an example of the README of NVIDIA's device plugin: what its values change in
// the objects that the chart renders, and what the node offers then.
type chartExample struct {
	name     string
	env      map[string]string // of the plugin
	files    map[string]string // of the ConfigMap, which has another name with config.name
	chosen   string            // config.default
	external bool              // config.name
	plugin   string            // the plugin's DaemonSet; empty where devicePlugin.enabled is false
	gfd      bool
	mps      bool
	change   func(*corev1.PodSpec) // of the plugin
	machine  string                // simulated
	want     map[string]int
	check    func(context.Context, *testing.T, *node.Node, podresources.PodResourcesListerClient)
}

// oneExampleOfNVIDIAsChart: what the chart renders for one of its README's examples starts our
// image.
func oneExampleOfNVIDIAsChart(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	before := waitPod(ctx, t, n, holder, isRunning)
	severalFiles.show(ctx, t, n, kubelet)
	waitPod(ctx, t, n, holder, isSame(before))
}

// allExamplesOfNVIDIAsChart does that for each of the others, on a node where no pod holds a GPU.
func allExamplesOfNVIDIAsChart(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	withoutDaemon(ctx, t, n)
	deletePod(ctx, t, n, holder)
	makeRuntimeClass(ctx, t, n)
	for _, e := range chartExamples {
		if !t.Run(e.name, func(t *testing.T) { e.show(ctx, t, n, kubelet) }) {
			return
		}
	}
}

// show applies the objects, waits until the node offers what the example says, checks it, and
// removes the objects.
func (e chartExample) show(ctx context.Context, t *testing.T, n *node.Node,
	kubelet podresources.PodResourcesListerClient) {
	if e.machine == "" {
		e.machine = "dgx-h100"
	}
	if e.want == nil {
		e.want = map[string]int{gpu: gpus}
	}
	startProxy(t)
	installDriver(ctx, t)
	installMPS(t)
	makeFolder(t, "/run/nvidia/mps")
	// Whoever asks it, such as dcgm-exporter, has kubelet forget the pods of an earlier example. The
	// chart's plugin cannot.
	if _, err := kubelet.List(ctx, &podresources.ListPodResourcesRequest{}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename",
		filepath.Join(*source, "test/e2e/testdata/operator/nodefeatures.yaml"))
	objects, sets := e.objects(t)
	file := filepath.Join(t.TempDir(), "objects.json")
	if err := os.WriteFile(file, objects, 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename", file)
	t.Cleanup(func() { removeChart(t, n, sets) })
	publishCA(ctx, t, n, chartNamespace)
	publishCA(ctx, t, n, namespace)
	if e.mps {
		kubectl(ctx, t, n, "label", "--overwrite", "node", node.Name, mpsCapable+"=true")
	}
	for _, set := range sets {
		wait(ctx, t, func(ctx context.Context) error { return setRuns(ctx, n, set) })
	}
	waitAllocatables(ctx, t, n, e.want)
	t.Logf("the node offers %v after %v", e.want, time.Since(start).Round(time.Millisecond))
	e.check(ctx, t, n, kubelet)
	for _, set := range sets { // none was restarted meanwhile
		if err := setRuns(ctx, n, set); err != nil {
			t.Error(err)
		}
	}
}

// objects returns the objects as JSON, and the DaemonSets among them.
func (e chartExample) objects(t *testing.T) (list []byte, sets []*appsv1.DaemonSet) {
	t.Helper()
	name := "objects.yaml"
	if e.plugin == staticPlugin {
		name = "static.yaml"
	}
	text, err := os.ReadFile(filepath.Join(*source, "test/e2e/testdata/nvidia-chart", name))
	if err != nil {
		t.Fatal(err)
	}
	configMap := chartPlugin + "-configs"
	if e.external {
		configMap = "nvidia-plugin-configs"
	}
	items := []any{&corev1.Namespace{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: chartNamespace},
	}}
	if e.files != nil {
		items = append(items, &corev1.ConfigMap{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
			ObjectMeta: metav1.ObjectMeta{Name: configMap, Namespace: chartNamespace}, Data: e.files,
		})
	}
	if e.change == nil {
		e.change = func(*corev1.PodSpec) {}
	}
	for documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		var object map[string]any
		if err := documents.Decode(&object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if object["kind"] != "DaemonSet" {
			items = append(items, object)
			continue
		}
		set := &appsv1.DaemonSet{}
		text, err := json.Marshal(object)
		if err := errors.Join(err, json.Unmarshal(text, set)); err != nil {
			t.Fatal(err)
		}
		process := set.Spec.Template.Spec.Containers[0].Command
		switch set.Name {
		case e.plugin:
			e.change(&set.Spec.Template.Spec)
		case chartDiscovery:
			if !e.gfd {
				continue
			}
		case chartMPS:
			if !e.mps {
				continue
			}
			process = []string{"/usr/bin/mps-control-daemon"}
		default:
			continue
		}
		if e.files != nil {
			addConfigManager(&set.Spec.Template.Spec, process[0], configMap, e.chosen)
		}
		e.adapt(set)
		items, sets = append(items, set), append(sets, set)
	}
	list, err = json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		t.Fatal(err)
	}
	return list, sets
}

// addConfigManager adds to a pod what the chart does where there is a ConfigMap.
func addConfigManager(pod *corev1.PodSpec, process, configMap, chosen string) {
	main := &pod.Containers[0]
	name := strings.TrimSuffix(main.Name, "-ctr")
	mounts := []corev1.VolumeMount{{Name: "available-configs", MountPath: "/available-configs"},
		{Name: "config", MountPath: "/config"}}
	manager := func(name, once, send, signal, process string) corev1.Container {
		env := []corev1.EnvVar{{Name: "NODE_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}}
		for _, v := range [][2]string{
			{"ONESHOT", once}, {"KUBECONFIG", ""}, {"NODE_LABEL", configLabel}, {"CONFIG_FILE_SRCDIR", "/available-configs"},
			{"CONFIG_FILE_DST", "/config/config.yaml"}, {"DEFAULT_CONFIG", chosen}, {"FALLBACK_STRATEGIES", "named,single"},
			{"SEND_SIGNAL", send}, {"SIGNAL", signal}, {"PROCESS_TO_SIGNAL", process},
		} {
			env = append(env, corev1.EnvVar{Name: v[0], Value: v[1]})
		}
		return corev1.Container{Name: name, Command: []string{"config-manager"}, Env: env, VolumeMounts: mounts}
	}
	if main.SecurityContext.Privileged == nil {
		main.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}}
	}
	main.Env = append(main.Env,
		corev1.EnvVar{Name: "CONFIG_FILE", Value: "/config/config.yaml"}, corev1.EnvVar{Name: "NVIDIA_MIG_MONITOR_DEVICES",
			Value: "all"})
	main.VolumeMounts = append(main.VolumeMounts, mounts...)
	sidecar := manager(name+"-sidecar", "false", "true", "1", process)
	if !pod.HostPID {
		pod.ShareProcessNamespace = ptr.To(true)
		sidecar.SecurityContext = main.SecurityContext
	}
	pod.InitContainers = append(pod.InitContainers, manager(name+"-init", "true", "false", "", ""))
	pod.Containers = append(pod.Containers, sidecar)
	pod.Volumes = append(pod.Volumes, corev1.Volume{
		Name: "available-configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: configMap},
		}},
	}, corev1.Volume{Name: "config", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
}

// adapt gives a DaemonSet our image, the variables of the example, simulated GPUs, the way to the
// API server, and for MPS the program of the driver, which NVIDIA's runtime would bring.
func (e chartExample) adapt(set *appsv1.DaemonSet) {
	pod := &set.Spec.Template.Spec
	for _, containers := range [][]corev1.Container{pod.InitContainers, pod.Containers} {
		for i := range containers {
			c := &containers[i]
			c.Image = daemonImage
			c.Env = append(c.Env,
				corev1.EnvVar{Name: "KUBERNETES_SERVICE_HOST", Value: "192.0.2.1"}, corev1.EnvVar{Name: "KUBERNETES_SERVICE_PORT",
					Value: "6444"})
		}
	}
	main := &pod.Containers[0]
	main.Env = append(main.Env, corev1.EnvVar{Name: "SIMULATE", Value: e.machine})
	if set.Name == e.plugin {
		for name, value := range e.env {
			main.Env = append(main.Env, corev1.EnvVar{Name: name, Value: value})
		}
	}
	if e.mps {
		main.VolumeMounts = append(main.VolumeMounts,
			corev1.VolumeMount{Name: "mps-program", MountPath: "/usr/bin/nvidia-cuda-mps-control", ReadOnly: true})
		pod.Volumes = append(pod.Volumes, corev1.Volume{
			Name: "mps-program", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: mpsProgram}},
		})
	}
}

// mountsDriverRoot is what the value nvidiaDriverRoot adds.
func mountsDriverRoot(pod *corev1.PodSpec) {
	main := &pod.Containers[0]
	main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: "driver-root", MountPath: "/driver-root",
		ReadOnly: true})
	pod.Volumes = append(pod.Volumes, corev1.Volume{
		Name: "driver-root",
		VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: driverRoot,
			Type: ptr.To(corev1.HostPathDirectory)}},
	})
}

// setRuns asks whether the one pod of a DaemonSet runs, none of its containers for the second time.
func setRuns(ctx context.Context, n *node.Node, set *appsv1.DaemonSet) error {
	pod, err := setPod(ctx, n, set.Namespace, set.Name)
	if err != nil {
		return err
	}
	for _, s := range pod.Status.ContainerStatuses {
		if s.State.Running == nil || s.RestartCount > 0 {
			return fmt.Errorf("%s of %s: %+v, %d restarts", s.Name, set.Name, s.State, s.RestartCount)
		}
	}
	return isRunning(pod)
}

// setPod returns the only pod of a DaemonSet. The chart's DaemonSets all have the same labels.
func setPod(ctx context.Context, n *node.Node, namespace, set string) (*corev1.Pod, error) {
	pods, err := n.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	items := slices.DeleteFunc(pods.Items, func(pod corev1.Pod) bool { return len(pod.OwnerReferences) != 1 || pod.OwnerReferences[0].Name != set })
	if len(items) != 1 {
		return nil, fmt.Errorf("%s has %d pods, want 1", set, len(items))
	}
	return &items[0], nil
}

// removeChart removes the DaemonSets, and what another example would find.
func removeChart(t *testing.T, n *node.Node, sets []*appsv1.DaemonSet) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit) // the test's has ended by then
	defer cancel()
	if t.Failed() {
		for _, set := range sets {
			out, err := n.Kubectl(ctx, "--namespace", set.Namespace, "logs", "ds/"+set.Name, "--all-containers", "--prefix",
				"--tail", "100")
			t.Logf("the logs of %s, error %v:\n%s", set.Name, err, out)
		}
	}
	removeSets(ctx, t, n, sets)
	for _, args := range [][]string{
		{"label", "node", node.Name, mpsCapable + "-", configLabel + "-"},
		{"--namespace", chartNamespace, "delete", "--all", "--ignore-not-found", "nodefeatures"},
	} {
		if _, err := n.Kubectl(ctx, args...); err != nil {
			t.Error(err)
		}
	}
	waitAllocatables(ctx, t, n, map[string]int{})
}

// removeSets removes DaemonSets, and waits until their pods have gone.
func removeSets(ctx context.Context, t *testing.T, n *node.Node, sets []*appsv1.DaemonSet) {
	t.Helper()
	for _, set := range sets {
		kubectl(ctx, t, n, "--namespace", set.Namespace, "delete", "--ignore-not-found", "daemonset", set.Name)
		wait(ctx, t, func(ctx context.Context) error {
			if pod, err := setPod(ctx, n, set.Namespace, set.Name); err == nil {
				return fmt.Errorf("pod %s is there still", pod.Name)
			}
			return nil
		})
	}
}

// makeRuntimeClass makes the RuntimeClass of the README. Its handler is that of all other pods:
// this machine has no runtime of NVIDIA's.
func makeRuntimeClass(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	persist(ctx, t, "make the RuntimeClass", func(ctx context.Context) error {
		class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "runc"}
		_, err := n.Client.NodeV1().RuntimeClasses().Create(ctx, class, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
}
