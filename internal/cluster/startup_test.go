package cluster_test

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const startupTaint = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-device-plugin"

func (s *stage) isStarting() bool { return slices.Contains(s.taints(), startupTaint) }

// TestStartupTaint: the taint goes when the daemon is ready and the Node shows the GPUs, and not
// before (kdp#1746). Those of others stay.
func TestStartupTaint(t *testing.T) {
	for name, tt := range map[string]struct {
		effect  corev1.TaintEffect
		on      bool
		listed  int
		slices  int  // devices in slices
		ready   bool // the daemon
		shown   int  // devices in the Node's status
		removed bool
	}{
		"the GPUs are allocatable":          {corev1.TaintEffectNoSchedule, true, 8, 0, true, 8, true},
		"with another effect":               {corev1.TaintEffectNoExecute, true, 8, 0, true, 8, true},
		"the Node does not show all":        {corev1.TaintEffectNoSchedule, true, 8, 0, true, 7, false},
		"the daemon is not ready":           {corev1.TaintEffectNoSchedule, true, 8, 0, false, 8, false},
		"there is no driver":                {corev1.TaintEffectNoSchedule, true, 0, 0, true, 0, false},
		"the GPUs are in slices":            {corev1.TaintEffectNoSchedule, true, 0, 8, true, 0, true},
		"the feature is off":                {corev1.TaintEffectNoSchedule, false, 8, 0, true, 8, false},
		"the GPUs are allocatable later on": {corev1.TaintEffectNoSchedule, true, 8, 0, true, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				s.change(func(n *corev1.Node) {
					n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: startupTaint, Effect: tt.effect})
				})
				if tt.shown > 0 {
					s.shows(tt.shown)
				}
				var listed atomic.Int32
				listed.Store(int32(tt.listed))
				p := s.new(config.Config{Features: config.Features{StartupTaint: tt.on}})
				p.Listed = func() map[string]int { return map[string]int{"nvidia.com/gpu": int(listed.Load())} }
				p.status.Readiness = status.Readiness{Ready: tt.ready}
				p.status.DRA = &status.DRA{Devices: tt.slices}
				p.start()
				if tt.removed {
					s.until("the taint is gone", func() bool { return !s.isStarting() })
				} else if s.pass(10 * time.Minute); !s.isStarting() {
					t.Error("the taint is gone")
				}
				if name == "the GPUs are allocatable later on" {
					s.shows(8)
					s.until("the taint is gone", func() bool { return !s.isStarting() })
				}
				if got := s.taints(); !slices.Contains(got, theirTaint) {
					t.Errorf("taints %v, want %s still", got, theirTaint)
				}
				if !s.isStarting() {
					if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 {
						t.Errorf("%d writes after the taint is gone", n)
					}
				}
			})
		})
	}
}
