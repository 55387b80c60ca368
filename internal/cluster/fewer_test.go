package cluster_test

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const fewerTaint = "gpu-device-plugin.github.io/fewer-devices"

// A shrinking is a node whose lists get fewer devices: 32, and 8 after Proceed.
type shrinking struct {
	*process

	mu     sync.Mutex // guards all following fields
	listed int
	went   []uint64 // the changes that Proceed was called for
}

func (s *stage) shrinking() *shrinking {
	s.Helper()
	w := s.shrinks()
	w.start()
	return w
}

// shrinks returns one that is not started.
func (s *stage) shrinks() *shrinking {
	w := &shrinking{process: s.new(config.Config{Live: config.Live{Features: config.Features{ChangeTaint: true}}}), listed: 32}
	w.PendingShrink = feed.New(uint64(0))
	w.Listed = func() map[string]int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return map[string]int{"nvidia.com/gpu": w.listed}
	}
	w.ApproveShrink = w.proceed
	s.shows(32)
	return w
}

func (w *shrinking) proceed(number uint64) {
	w.mu.Lock()
	w.listed, w.went = 8, append(w.went, number)
	w.mu.Unlock()
	w.PendingShrink.Publish(0)
}

func (w *shrinking) proceeded() []uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.went)
}

// shows sets the number of devices in the Node's status.
func (s *stage) shows(devices int) {
	s.change(func(n *corev1.Node) {
		n.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": apiresource.MustParse(strconv.Itoa(devices))}
	})
}

func (s *stage) isFewer() bool { return slices.Contains(s.taints(), fewerTaint) }

// bound adds a pod to the node that the kubelet has or has not admitted.
func (s *stage) bound(name string, admitted bool) {
	s.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: corev1.PodSpec{NodeName: nodeName}}
	if pod.Status.Phase = corev1.PodPending; admitted {
		pod.Status.StartTime = &metav1.Time{Time: time.Now()}
	}
	if err := s.server.AddPod(pod); err != nil {
		s.Fatal(err)
	}
}

// The Node is tainted, the devices go when all earlier pods are admitted, and the taint is removed
// when the Node's status shows the new number. Other taints stay.
func TestFewerDevices(t *testing.T) {
	onStage(t, func(s *stage) {
		w := s.shrinking()
		if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 || s.isFewer() {
			s.Errorf("%d writes while no change waits", n)
		}
		s.bound("runs", true)
		s.bound("sent", false)
		w.PendingShrink.Publish(1)
		s.until("tainted", s.isFewer)
		if s.pass(10 * time.Second); len(w.proceeded()) > 0 || !s.isFewer() {
			s.Errorf("changes %v went on before a pod was admitted", w.proceeded())
		}
		s.bound("sent", true)
		s.until("the devices are gone", func() bool { return slices.Equal(w.proceeded(), []uint64{1}) })
		if s.pass(10 * time.Second); !s.isFewer() {
			s.Error("the taint is gone, and the Node's status shows 32 devices")
		}
		s.shows(8)
		s.until("the taint is gone", func() bool { return slices.Equal(s.taints(), []string{theirTaint}) })

		// The next change comes at any time later, and another one before the status shows the first.
		w.PendingShrink.Publish(2)
		s.until("tainted again", s.isFewer)
		s.until("the devices are gone", func() bool { return slices.Equal(w.proceeded(), []uint64{1, 2}) })
		s.until("the taint is gone again", func() bool { return !s.isFewer() })
		s.shows(9)
		w.PendingShrink.Publish(3)
		s.until("tainted for the third", func() bool { return s.isFewer() && len(w.proceeded()) == 3 })
		w.PendingShrink.Publish(4)
		s.until("the fourth goes on under the same taint", func() bool { return len(w.proceeded()) == 4 && s.isFewer() })
		s.shows(8)
		s.until("the taint is gone after all", func() bool { return !s.isFewer() })
	})
}

// The taint stays for a minute at most.
func TestFewerDevicesTimeout(t *testing.T) {
	for name, never := range map[string]func(*stage, *shrinking){
		"a pod is not admitted":       func(s *stage, _ *shrinking) { s.bound("sent", false) },
		"the status does not show it": func(*stage, *shrinking) {},
		"the pods are not listed": func(s *stage, _ *shrinking) {
			s.server.SetFault(apiserver.Fault{Status: 403, Only: func(r apiserver.Request) bool { return r.Resource == "pods" }})
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				w := s.shrinking()
				never(s, w)
				w.PendingShrink.Publish(1)
				s.until("tainted", s.isFewer)
				began := time.Now()
				s.until("not tainted", func() bool { return !s.isFewer() })
				if took := time.Since(began); took > 65*time.Second {
					s.Errorf("the taint was there for %v", took)
				}
				if !slices.Equal(w.proceeded(), []uint64{1}) {
					s.Errorf("changes %v went on", w.proceeded())
				}
				if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 {
					s.Errorf("%d writes afterwards", n)
				}
			})
		})
	}
}

// A taint left by a killed process is removed at the next start if no change waits, when the option
// is disabled, and at the end of the process.
func TestTaintOfEarlierProcess(t *testing.T) {
	for name, wait := range map[string]func(*stage, *shrinking){
		"a start": func(*stage, *shrinking) {},
		"switched off": func(s *stage, w *shrinking) {
			w.PendingShrink.Publish(1)
			s.until("the node is watched", func() bool { return strings.Contains(w.requests(), "WATCH nodes 200") })
			w.PendingShrink.Publish(0)
			w.configure(func(c *config.Config) { c.Features = config.Features{} })
		},
		"a change back": func(s *stage, w *shrinking) {
			w.PendingShrink.Publish(1)
			s.pass(time.Second)
			w.PendingShrink.Publish(0)
		},
		"an end": func(s *stage, w *shrinking) {
			w.PendingShrink.Publish(1)
			s.until("tainted", s.isFewer)
			w.stop()
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				if name != "an end" {
					s.change(func(n *corev1.Node) {
						n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: fewerTaint, Effect: corev1.TaintEffectNoSchedule})
					})
				}
				w := s.shrinking()
				wait(s, w)
				s.until("the taint is gone", func() bool { return slices.Equal(s.taints(), []string{theirTaint}) })
				if len(w.proceeded()) > 0 {
					s.Errorf("changes %v went on", w.proceeded())
				}
			})
		})
	}
}

// The response to the taint is lost, and the process ends: the taint is removed.
func TestExitAfterLostResponse(t *testing.T) {
	onStage(t, func(s *stage) {
		w := s.shrinking()
		s.until("the node is watched", func() bool { return strings.Contains(w.requests(), "WATCH nodes 200") })
		s.server.SetFault(apiserver.Fault{Status: 500, Late: true, RetryAfter: time.Minute, Only: apiserver.Request.IsWrite})
		w.PendingShrink.Publish(1)
		s.until("tainted", s.isFewer)
		s.server.SetFault(apiserver.Fault{})
		w.stop()
		s.until("the taint is gone", func() bool { return slices.Equal(s.taints(), []string{theirTaint}) })
	})
}

// Whatever the API server does, the change continues after a timeout in package serve, and the
// taint is removed.
func TestFewerDevicesThroughFaults(t *testing.T) {
	throughFaults(t, func(s *stage, fault apiserver.NamedFault) {
		w := s.shrinking()
		s.until("the node is known", func() bool { return w.cluster.Problem() == nil && w.requests() != "" })
		s.during(fault, func() {
			w.PendingShrink.Publish(1)
			s.pass(30 * time.Second)
			w.proceed(1)
			s.shows(8)
		})
		s.until("the taint is gone", func() bool { return slices.Equal(s.taints(), []string{theirTaint}) })
		s.pass(10 * time.Minute)
		if s.isFewer() {
			s.Error("the taint is there again")
		}
		w.PendingShrink.Publish(2)
		s.until("the next change goes on", func() bool { return slices.Contains(w.proceeded(), 2) })
		s.until("its taint is gone", func() bool { return !s.isFewer() })
	})
}

// Another process becomes the leader before the Node's status shows the change of the first: the
// Node stays tainted until it does, and for a minute at most. The new leader may have a change of
// its own.
func TestFewerDevicesWithChangeOfLeader(t *testing.T) {
	for name, tt := range map[string]struct{ waits, shows bool }{
		"the status shows it": {false, true}, "it never does": {false, false}, "another change waits": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				first, second := s.shrinking(), s.shrinking()
				second.leads.Publish(false)
				if !tt.waits {
					second.proceed(0)
				}
				first.PendingShrink.Publish(1)
				s.until("the devices are gone", func() bool { return s.isFewer() && slices.Equal(first.proceeded(), []uint64{1}) })
				first.leads.Publish(false)
				s.until("the first has ended", func() bool { return !s.isFewer() })
				if tt.waits {
					second.PendingShrink.Publish(7)
				}
				second.leads.Publish(true)
				if s.pass(6 * time.Second); !s.isFewer() {
					t.Error("the taint is gone, and the Node's status shows 32 devices")
				}
				if tt.waits && !slices.Equal(second.proceeded(), []uint64{7}) {
					t.Errorf("changes %v went on", second.proceeded())
				}
				if tt.shows {
					s.shows(8)
				}
				s.pass(time.Minute)
				if n := s.writes(func() { s.pass(10 * time.Minute) }); n > 0 || s.isFewer() {
					t.Errorf("%d writes afterwards, taints %v", n, s.taints())
				}
			})
		})
	}
}

// A stopped process does not remove the taint of its successor.
func TestTaintOfPreviousLeader(t *testing.T) {
	onStage(t, func(s *stage) {
		w := s.shrinks()
		w.Lead = lead.New(lead.Options{Dir: s.TempDir()}) // it has none of the folder's
		s.change(func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: fewerTaint, Effect: corev1.TaintEffectNoSchedule})
		})
		w.start()
		s.pass(10 * time.Minute)
		if w.stop(); !s.isFewer() {
			t.Error("the taint is gone")
		}
	})
}
