package daemon

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// A shrinking is a node of eight GPUs whose daemon offers 32 replicas, and taints the node before
// they become fewer.
type shrinking struct {
	*stage
	api *apiserver.Server
}

const (
	fourEach = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	whole    = "version: v1\n"
)

func newShrinking(t *testing.T) *shrinking {
	t.Helper()
	opened, server := openAgent(t, "", "--node-change-taint")
	s := &shrinking{opened, server}
	s.saysOf(32)
	s.Args = append(s.Args, "--config-file", s.write("config.yaml", fourEach))
	s.start()
	s.allocatable(32)
	s.eventually("the Node is watched", func() bool { return server.Requests()[apiserver.Request{Verb: "watch", Resource: "nodes"}] > 0 })
	return s
}

// saysOf has the Node's status show so many GPUs, as kubelet would.
func (s *shrinking) saysOf(devices int) {
	s.change(func(n *corev1.Node) {
		n.Status.Allocatable = corev1.ResourceList{gpu: apiresource.MustParse(strconv.Itoa(devices))}
	})
}

func (s *shrinking) change(with func(*corev1.Node)) {
	if err := s.api.ChangeNode(nodeName, with); err != nil {
		panic(err)
	}
}

func (s *shrinking) tainted() bool {
	n, err := s.api.Node(nodeName)
	return err == nil && slices.ContainsFunc(n.Spec.Taints,
		func(t corev1.Taint) bool { return strings.HasSuffix(t.Key, "/fewer-devices") })
}

// sent has a pod that the scheduler sent to the node; kubelet has admitted it, or not yet.
func (s *shrinking) sent(admitted bool) {
	s.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "sent"},
		Spec: corev1.PodSpec{NodeName: nodeName}}
	if pod.Status.Phase = corev1.PodPending; admitted {
		ctx, cancel := context.WithTimeout(s.t.Context(), patience)
		defer cancel()
		if _, err := s.Admit(ctx, standin.Container{Pod: "sent", Name: "main", Resource: gpu, Count: 1}); err != nil {
			s.t.Errorf("a pod that was sent before is refused: %v", err)
		}
		pod.Status.StartTime = &metav1.Time{Time: time.Now()}
	}
	if err := s.api.AddPod(pod); err != nil {
		s.t.Fatal(err)
	}
}

// isWhole waits until kubelet has eight GPUs, and then until the taint is gone.
func (s *shrinking) isWhole() {
	s.t.Helper()
	s.allocatable(8)
	s.saysOf(8)
	s.eventually("the taint is gone", func() bool { return !s.tainted() })
}

// TestFewerDevices: the file takes devices away. They go when the node has a taint and kubelet has
// admitted what was sent before. The process is killed while it waits, and the next one goes on.
func TestFewerDevices(t *testing.T) {
	t.Parallel()
	s := newShrinking(t)
	s.sent(false)
	s.write("config.yaml", whole)
	s.eventually("the node is tainted", s.tainted)
	s.kill()
	mark := s.Mark()
	s.start()
	s.next(mark, standin.Listed)
	s.allocatable(32)
	s.logs("Waiting until the kubelet has admitted pods") // of the second process: it looks two seconds after the taint
	s.sent(true)
	s.isWhole()
}
