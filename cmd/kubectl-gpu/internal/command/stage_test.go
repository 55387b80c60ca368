package command_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// A stage is an API server and what answers in its pods.
type stage struct {
	t      *testing.T
	server *apiserver.Server

	mu      sync.Mutex // guards all following fields
	daemons map[string]daemon
	ran     []string // "POD ARGUMENTS", in order
	running int
	most    int // that ran at the same time
}

// A daemon answers commands in a pod.
type daemon func(arguments []string) (out, problems string, code int)

func newStage(t *testing.T) *stage {
	t.Helper()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	s := &stage{t: t, server: server, daemons: map[string]daemon{}}
	server.SetPods(s)
	return s
}

// run runs kubectl gpu, and returns what it prints and its exit status.
func (s *stage) run(arguments ...string) (out, problems string, code int) {
	s.t.Helper()
	var o, p bytes.Buffer
	code = command.Run(s.t.Context(), append([]string{"--kubeconfig", s.server.Kubeconfig()}, arguments...), nil, &o, &p)
	return o.String(), p.String(), code
}

// must runs kubectl gpu, which has to succeed and to say nothing of problems, but for nodes without
// a daemon.
func (s *stage) must(arguments ...string) string {
	s.t.Helper()
	out, problems, code := s.run(arguments...)
	bad := slices.ContainsFunc(slices.Collect(strings.Lines(problems)),
		func(line string) bool { return !strings.HasPrefix(line, "No daemon runs ") })
	if code != 0 || bad {
		s.t.Fatalf("%v: exit status %d: %s", arguments, code, problems)
	}
	return out
}

func (s *stage) add(resource string, object runtime.Object) {
	s.t.Helper()
	if err := s.server.Add(resource, object); err != nil {
		s.t.Fatal(err)
	}
}

// ServeHTTP answers pods/exec by websocket as kubelet does, and pods/proxy with metrics.
func (s *stage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/")
	pod := parts[6]
	if parts[7] == "proxy" {
		_, _ = io.WriteString(w, metrics)
		return
	}
	if container := r.URL.Query().Get("container"); container != "gpu-device-plugin" {
		http.Error(w, "no container "+container, http.StatusBadRequest)
		return
	}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {Binary: true,
		Channels: []wsstream.ChannelType{
			wsstream.ReadChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.ReadChannel,
		}}})
	_, channels, err := conn.Open(w, r)
	if err != nil {
		return
	}
	defer conn.Close()
	words := r.URL.Query()["command"]
	out, problems, code := s.answer(pod, words[1:])
	_, _ = io.WriteString(channels[remotecommand.StreamStdOut], out)
	_, _ = io.WriteString(channels[remotecommand.StreamStdErr], problems)
	end := metav1.Status{Status: metav1.StatusSuccess}
	if code != 0 {
		end = metav1.Status{Status: metav1.StatusFailure, Reason: remotecommand.NonZeroExitCodeReason,
			Message: "command terminated with a status", Details: &metav1.StatusDetails{
				Causes: []metav1.StatusCause{{Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(code)}},
			}}
	}
	text, _ := json.Marshal(end)
	_, _ = channels[remotecommand.StreamErr].Write(text)
}

func (s *stage) answer(pod string, arguments []string) (out, problems string, code int) {
	s.mu.Lock()
	d := s.daemons[pod]
	s.ran = append(s.ran, pod+" "+strings.Join(arguments, " "))
	s.running++
	s.most = max(s.most, s.running)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running--
		s.mu.Unlock()
	}()
	if d == nil {
		return "", "no daemon answers", 1
	}
	return d(arguments)
}

// commands returns what was run in pods, in order, and forgets it.
func (s *stage) commands() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ran := s.ran
	s.ran = nil
	return ran
}

// answering returns a daemon that prints its status, and for any other command its name.
func answering(told status.Status) daemon {
	return func(arguments []string) (string, string, int) {
		if slices.Contains(arguments, "json") {
			text, _ := json.Marshal(told)
			return string(text), "", 0
		}
		return "ran " + strings.Join(arguments, " ") + "\n", "", 0
	}
}

// addNode adds a node with eight GPUs, as the daemon makes it with labels, of which so many are
// healthy.
func (s *stage) addNode(name string, healthy int, change func(*corev1.Node)) {
	s.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8",
		"nvidia.com/cuda.driver-version.full": "580.95.05",
		"nvidia.com/mig.strategy":             "none",
	}}}
	n.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8"), "cpu": resource.MustParse("64")}
	n.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(int64(healthy), resource.DecimalSI),
		"cpu": resource.MustParse("64")}
	if change != nil {
		change(n)
	}
	s.add("nodes", n)
}

var readySince = metav1.NewTime(time.Now().Add(-3 * time.Hour).Truncate(time.Second))

// addDaemon adds a pod of the daemon on a node, in which d answers.
func (s *stage) addDaemon(name, node string, d daemon) {
	s.t.Helper()
	yes := true
	s.add("pods", &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: name, Labels: map[string]string{"app.kubernetes.io/name": "gpu-device-plugin"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "gpu-device-plugin",
				UID: "1", Controller: &yes}},
		},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: "gpu-device-plugin", Image: "ghcr.io/gpu-device-plugin/gpu-device-plugin:v0.1.0",
				Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9400}}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: readySince},
		}},
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.daemons[name] = d
}

// addPod adds a pod with a container that asks for GPUs.
func (s *stage) addPod(name, node string, gpus int, phase corev1.PodPhase) {
	s.t.Helper()
	s.add("pods", &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i",
			Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(int64(gpus), resource.DecimalSI)},
				// The API server gives an extended resource that is limited a request.
				Requests: corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(int64(gpus), resource.DecimalSI)},
			}}}},
		Status: corev1.PodStatus{Phase: phase},
	})
}

// addWaiting adds the pod p, whose container waits on node a.
func (s *stage) addWaiting(reason, message string) {
	s.t.Helper()
	s.add("pods", &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
		Spec:       corev1.PodSpec{NodeName: "a", ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
		}}},
	})
}

// addCrashing adds the pod p, whose container crashed on node a and waits, or runs again.
func (s *stage) addCrashing(runs bool) {
	s.t.Helper()
	one := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
	c := corev1.ContainerStatus{Name: "c", RestartCount: 3, LastTerminationState: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{Reason: "Error", ExitCode: 1}}}
	if runs {
		c.State.Running = &corev1.ContainerStateRunning{}
	} else {
		c.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off"}
	}
	s.add("pods", &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p"},
		Spec: corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{
			{Name: "c", Resources: corev1.ResourceRequirements{Requests: one, Limits: one}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{c}},
	})
}

// fallen returns a GPU that fell off the bus, with the daemon's reason.
func fallen(index int) status.Device {
	d := gpu(index, "Lost")
	d.Reason, d.Remedy = "XID 79 (GPU fell off the bus): restart the node", "reboot"
	return d
}

const metrics = `# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-0",gpu="0"} 87
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{UUID="GPU-0",gpu="0"} 1024
DCGM_FI_DEV_FB_USED{UUID="GPU-1",gpu="1",GPU_I_ID="3"} 7
# TYPE DCGM_FI_DEV_FB_TOTAL gauge
DCGM_FI_DEV_FB_TOTAL{UUID="GPU-0",gpu="0"} 81559
`

// fields returns the lines of a table, each with one space between its cells.
func fields(table string) string {
	var lines []string
	for line := range strings.Lines(table) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(lines, "\n")
}

func gpu(index int, state string) status.Device {
	return status.Device{Index: fmt.Sprint(index), UUID: fmt.Sprint("GPU-", index), Model: "NVIDIA H100 80GB HBM3",
		State: state}
}
