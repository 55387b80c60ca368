package cluster_test

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const startupTaint = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin"

func (s *stage) isStarting() bool { return slices.Contains(s.taints(), startupTaint) }

// TestStartupTaint: the taint is removed as soon as the Node shows the GPUs of a ready daemon
// (kdp#1746). Other taints stay.
func TestStartupTaint(t *testing.T) {
	onStage(t, func(s *stage) {
		s.change(func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: startupTaint, Effect: corev1.TaintEffectNoExecute})
		})
		p := s.new(config.Config{Live: config.Live{Features: config.Features{StartupTaint: true}}})
		p.Listed = func() map[string]int { return map[string]int{"nvidia.com/gpu": 8} }
		p.status.Readiness = status.Readiness{Ready: true}
		p.start()
		if s.pass(10 * time.Minute); !s.isStarting() {
			t.Error("the taint is removed, although the Node shows no GPUs")
		}
		s.shows(8)
		s.until("the taint is removed", func() bool { return slices.Equal(s.taints(), []string{theirTaint}) })
		reads := p.reads()
		if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 || p.reads() > reads {
			t.Errorf("%d writes and %d reads of the status afterwards", n, p.reads()-reads)
		}
	})
}
