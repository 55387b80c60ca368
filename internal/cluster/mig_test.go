package cluster_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

const (
	migLabel = "nvidia.com/mig.config"
	notYet   = "pending the layout has not been read yet"
)

// divider starts a process that follows the label of the layout; the test plays the mig.Controller.
// The label has this value.
func (s *stage) divider(label string) *process {
	s.Helper()
	s.layoutLabel(label)
	p := s.new(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, Label: true}}})
	p.MIGChoice = choice.New(s.Context(), p.Configs, s.TempDir(), func() error { return nil }, undivided,
		clock.RealClock{})
	p.MIG = feed.New(mig.Status{})
	return p.start()
}

// layoutLabel sets the label of the Node, or removes it.
func (s *stage) layoutLabel(value string) {
	s.Helper()
	s.change(func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{"zone": "a"}
		}
		if n.Labels[migLabel] = value; value == "" {
			delete(n.Labels, migLabel)
		}
	})
}

// makes waits until the Controller gets a layout, and reports its state.
func (p *process) makes(layout string, state mig.ConfigState, reason string) {
	p.s.Helper()
	p.s.until("the owner is told "+layout, func() bool { return p.MIGChoice.Desired().Value().Layout == layout })
	w := p.MIGChoice.Desired().Value()
	p.MIG.Publish(mig.Status{Layout: w.Layout, OrderNumber: w.OrderNumber, State: state, Reason: reason})
}

// says returns the state and the reason on the Node.
func (s *stage) says() string {
	n := s.node()
	return n.Labels["nvidia.com/mig.config.state"] + " " + n.Annotations["gpu-device-plugin.github.io/mig.config.reason"]
}

func (s *stage) untilSays(want string) {
	s.Helper()
	s.until("the node says "+want, func() bool { return s.says() == want })
}

// The process follows the label from its start. The Node has the state and the reason on one line,
// and loses them with the label.
func TestMIGLabel(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.divider("all-balanced")
		s.untilSays(notYet)
		p.makes("all-balanced", mig.StatePending, "pod default/p holds GPU 1")
		s.untilSays("pending pod default/p holds GPU 1")
		p.makes("all-balanced", mig.StateRebooting, "restart")
		s.untilSays("rebooting restart")
		p.makes("all-balanced", mig.StateSuccess, "")
		s.untilSays("success ")
		s.layoutLabel("all-disabled")
		s.untilSays(notYet)
		p.makes("all-disabled", mig.StateFailed, "line 1\nline 2 "+strings.Repeat("x", 1009)+"éé")
		s.untilSays("failed line 1 line 2 " + strings.Repeat("x", 1009)) // at most 1 KiB, without half a character
		p.makes("all-disabled", mig.StateSuccess, "")                    // the label has not changed since
		s.untilSays("success ")
		p.configure(func(c *config.Config) { c.MIG.File = "/no/such/file" })
		s.until("the layouts cannot be read", func() bool {
			return strings.HasPrefix(s.says(), "failed ") && strings.Contains(s.says(), "/no/such/file")
		})
		s.layoutLabel("")
		s.untilSays(" ")
		s.until("nothing is named", func() bool { return p.MIGChoice.Desired().Value().Layout == "" })
		if zone := s.node().Labels["zone"]; zone != "a" {
			s.Errorf("the zone is %q", zone)
		}
	})
}

// The layout of mig apply is valid until the label is set again. The Node says so, unless both name
// the same layout for all GPUs.
func TestMIGLabelAfterApply(t *testing.T) {
	for name, tt := range map[string]struct {
		layout string
		gpus   []string
		fails  bool
	}{"another layout": {"all-enabled", nil, true}, "for some GPUs": {"all-balanced", []string{"1"},
		true}, "the same": {layout: "all-balanced"}} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.divider("all-balanced")
				p.makes("all-balanced", mig.StateSuccess, "")
				s.untilSays("success ")
				if _, err := p.MIGChoice.Apply(s.Context(), tt.layout, tt.gpus); err != nil {
					s.Fatal(err)
				}
				s.pass(time.Minute)
				p.makes(tt.layout, mig.StateSuccess, "")
				s.pass(time.Minute)
				fails := strings.HasPrefix(s.says(), "failed mig apply requested layout "+tt.layout) &&
					strings.Contains(s.says(), "mig apply --forget")
				if fails != tt.fails || !fails && s.says() != "success " {
					s.Errorf("it says %q", s.says())
				}
			})
		})
	}
}

// If layouts are disabled, the label has no effect, and the Node loses the state.
func TestMIGLabelWhileDisabled(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.divider("all-balanced")
		s.untilSays(notYet)
		// Events need the watch of the Node
		p.configure(func(c *config.Config) { c.MIG.Enabled, c.Features.Events = false, true })
		s.untilSays(" ")
		s.change(func(n *corev1.Node) { n.Labels["nvidia.com/mig.config.state"] = "theirs" })
		if s.pass(time.Minute); s.says() != "theirs " {
			s.Errorf("what another program says since is %q", s.says())
		}
	})
}

// A restarted process does not write an unchanged state, and replaces the state of another program.
func TestMIGStateAfterRestart(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.divider("all-balanced")
		p.makes("all-balanced", mig.StateSuccess, "")
		s.untilSays("success ")
		p.stop()
		if n := s.writes(func() { p.start(); p.makes("all-balanced", mig.StateSuccess, ""); s.pass(time.Hour) }); n != 0 {
			s.Errorf("%d writes after a restart", n)
		}
		s.change(func(n *corev1.Node) { n.Labels["nvidia.com/mig.config.state"] = "pending" })
		s.untilSays("success ")
	})
}

// Labels by which DaemonSets of driver clients select nodes, and their values.
const (
	deployLabels = "nvidia.com/gpu.deploy."
	deployed     = "true"
	paused       = "paused-for-mig-change"
)

// pauser starts a process that pauses the DaemonSets of NVIDIA's operator.
func (s *stage) pauser() *process {
	s.Helper()
	s.deploy(map[string]string{"dcgm": deployed, "dcgm-exporter": deployed, "nvsm": "false", "driver": deployed,
		"mig-manager": paused})
	for uid, selects := range map[string]map[string]string{
		"dcgm": {deployLabels + "dcgm": deployed}, "driver": {deployLabels + "driver": deployed}, "nvsm": {deployLabels +
			"nvsm": deployed},
		"both": {deployLabels + "dcgm-exporter": deployed, deployLabels + "dcgm": deployed}, "other": {"zone": "a"},
	} {
		s.addPod(uid, "DaemonSet", selects)
	}
	s.addPod("web", "ReplicaSet", map[string]string{deployLabels + "dcgm": deployed})
	return s.pauses()
}

// pauses starts a further process.
func (s *stage) pauses() *process {
	p := s.new(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, PauseClients: true, Label: true}}})
	p.MIG = feed.New(mig.Status{})
	p.start()
	s.until("the node is watched", func() bool { return strings.Contains(p.requests(), "WATCH nodes 200") })
	return p
}

// addPod adds a pod to the node.
func (s *stage) addPod(uid, kind string, selects map[string]string) {
	s.Helper()
	err := s.server.AddPod(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "gpu-operator", Name: uid + "-x", UID: types.UID(uid),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: uid, UID: "o",
				Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: nodeName, NodeSelector: selects},
	})
	if err != nil {
		s.Fatal(err)
	}
}

// deploy sets deploy labels of the Node.
func (s *stage) deploy(values map[string]string) {
	s.Helper()
	s.change(func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		for name, value := range values {
			n.Labels[deployLabels+name] = value
		}
	})
}

// untilDeployed waits until the two labels have these values. The others never change.
func (s *stage) untilDeployed(dcgm, exporter string) {
	s.Helper()
	want := map[string]string{"dcgm": dcgm, "dcgm-exporter": exporter, "nvsm": "false", "driver": deployed,
		"mig-manager": paused}
	s.until("dcgm "+dcgm+", exporter "+exporter, func() bool {
		has := map[string]string{}
		for key, value := range s.node().Labels {
			if name, ok := strings.CutPrefix(key, deployLabels); ok {
				has[name] = value
			}
		}
		return cmp.Equal(want, has)
	})
}

// resumes sets whether the Controller allows DaemonSets to run.
func (p *process) resumes(now bool) { p.MIG.Publish(mig.Status{Resume: now}) }

// Only labels by which the DaemonSets of these pods select the node are paused, and never a label
// of a provider.
func TestPause(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.pauser()
		pause := func(uids ...string) (problem string) {
			if err := p.cluster.Pause(s.Context(), uids); err != nil {
				problem = err.Error()
			}
			return problem
		}
		for _, uid := range []string{"driver", "other", "web"} {
			if problem := pause(uid); !strings.Contains(problem, "pod gpu-operator/"+uid+"-x is of no DaemonSet") {
				s.Errorf("%s: %s", uid, problem)
			}
		}
		if problem := pause("gone", "nvsm"); problem != "" {
			s.Errorf("a pod that is gone, and one whose label is not true: %s", problem)
		}
		s.untilDeployed(deployed, deployed)
		if problem := pause("dcgm"); problem != "" {
			s.Error(problem)
		}
		s.untilDeployed(paused, deployed)
		if problem := pause("both", "web"); !strings.Contains(problem, "gpu-operator/web-x") {
			s.Errorf("one that can be paused and one that cannot: %s", problem)
		}
		s.untilDeployed(paused, paused)
		if n := s.writes(func() { pause("dcgm", "both") }); n != 0 {
			s.Errorf("%d writes to pause again", n)
		}
		p.resumes(true)
		s.untilDeployed(deployed, deployed)
	})
}

// A label changed by another program in the meantime keeps that value, and the others are resumed;
// also while the watch is late.
func TestForeignPauseLabels(t *testing.T) {
	for name, stuck := range map[string]bool{"watched": false, "the watch is stuck": true} {
		t.Run(name, func(t *testing.T) {
			onStage(t, func(s *stage) {
				p := s.pauser()
				if err := p.cluster.Pause(s.Context(), []string{"both"}); err != nil {
					s.Fatal(err)
				}
				s.untilDeployed(paused, paused)
				if stuck {
					s.stuckWatch()
				}
				s.deploy(map[string]string{"dcgm": "paused-for-driver-upgrade"})
				p.resumes(true)
				s.untilDeployed("paused-for-driver-upgrade", deployed)
				s.deploy(map[string]string{"dcgm": "false"})
				if s.pass(10 * time.Minute); s.node().Labels[deployLabels+"dcgm"] != "false" {
					s.Error("it was overwritten")
				}
			})
		})
	}
}

// A pause of an earlier process is resumed when this process allows it, and not before. A process
// that ends resumes its pauses.
func TestPauseOfEarlierProcess(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.pauser()
		if err := p.cluster.Pause(s.Context(), []string{"dcgm"}); err != nil {
			s.Fatal(err)
		}
		p.stop()
		s.untilDeployed(deployed, deployed) // there may be no next process
		s.deploy(map[string]string{"dcgm": paused})
		next := s.pauses() // after a kill
		s.pass(time.Hour)
		s.untilDeployed(paused, deployed)
		next.resumes(true)
		s.untilDeployed(deployed, deployed)
		next.resumes(false)
		s.deploy(map[string]string{"dcgm": paused})
		next.stop() // not by this process
		s.untilDeployed(paused, deployed)
	})
}

// Without the option nothing is resumed. If the option is disabled during a pause, the Node is
// watched until the pause ends.
func TestPauseDisabled(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.pauser()
		if err := p.cluster.Pause(s.Context(), []string{"dcgm"}); err != nil {
			s.Fatal(err)
		}
		s.pass(time.Second)
		p.configure(func(c *config.Config) { c.MIG.PauseClients, c.MIG.Label = false, false })
		s.pass(time.Minute)
		p.resumes(true)
		s.untilDeployed(deployed, deployed)
		p.stop()
		s.deploy(map[string]string{"dcgm": paused})
		again := s.new(config.Config{Live: config.Live{MIG: config.MIG{Enabled: true, Label: true}}})
		again.MIG = feed.New(mig.Status{Resume: true})
		again.start()
		s.pass(time.Hour)
		s.untilDeployed(paused, deployed)
	})
}

// Nothing is paused while the Node is unknown or the API server rejects a request, and each problem
// is reported. A process that ends does not wait for the API server.
func TestFailingPause(t *testing.T) {
	onStage(t, func(s *stage) {
		p := s.pauser()
		unknown := s.new(config.Config{})
		unknown.connect(s.Context())
		if err := unknown.cluster.Pause(s.Context(), []string{"dcgm"}); err == nil ||
			!strings.Contains(err.Error(), "has not sent the Node") {
			s.Errorf("before the node is known: %v", err)
		}
		for what, only := range map[string]func(apiserver.Request) bool{
			"pods are not listed":    func(q apiserver.Request) bool { return q.Resource == "pods" },
			"nothing can be written": apiserver.Request.IsWrite,
		} {
			s.server.SetFault(apiserver.Fault{Status: 500, Only: only})
			err := p.cluster.Pause(s.Context(), []string{"dcgm", "web"})
			if err == nil || strings.Contains(err.Error(), "web-x") != (what == "nothing can be written") {
				s.Errorf("%s: %v", what, err)
			}
		}
		s.untilDeployed(deployed, deployed)
		s.server.SetFault(apiserver.Fault{})
		if err := p.cluster.Pause(s.Context(), []string{"dcgm"}); err != nil {
			s.Fatal(err)
		}
		s.server.SetFault(apiserver.Fault{Status: 403})
		began := time.Now()
		p.resumes(true)
		if p.stop(); time.Since(began) > 2*time.Second {
			s.Errorf("the end took %v", time.Since(began))
		}
		s.server.SetFault(apiserver.Fault{})
		s.pass(time.Minute)
		s.untilDeployed(paused, deployed)
	})
}

// Pods are evicted by name, within their budget.
func TestEviction(t *testing.T) {
	onStage(t, func(s *stage) {
		s.addPod("u", "ReplicaSet", nil)
		p := s.new(config.Config{})
		p.connect(s.Context())
		if err := p.cluster.Evict(s.Context(), mig.Pod{UID: "u"}); err == nil ||
			!strings.Contains(err.Error(), "PodResources") {
			s.Errorf("without a name: %v", err)
		}
		pod := mig.Pod{UID: "u", Namespace: "gpu-operator", Name: "u-x"}
		s.server.SetDisruptionBudget(true)
		if err := p.cluster.Evict(s.Context(), pod); err == nil || len(s.server.Pods()) != 1 {
			s.Errorf("beyond its budget: %v, pods %v", err, s.server.Pods())
		}
		s.server.SetDisruptionBudget(false)
		if err := p.cluster.Evict(s.Context(), pod); err != nil || len(s.server.Pods()) != 0 {
			s.Errorf("%v, pods %v", err, s.server.Pods())
		}
	})
}

// undivided says that no GPU is in MIG mode.
func undivided() (divided, known bool) { return false, true }
