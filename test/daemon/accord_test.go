package daemon

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestTheLastListSaysWhatTheDaemonKnows: whatever happened, the last list that kubelet received has
// each device as the daemon has it; and once everything is repaired, as good.
func TestTheLastListSaysWhatTheDaemonKnows(t *testing.T) {
	t.Parallel()
	const rounds, faults = 12, 25
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s := open(t, node.Setup{})
	s.Args = []string{"--config-file", s.write("config.yaml", "version: v1\nhealth: {flapLimit: 10000}\n")}
	s.start()
	s.shows(8, 8)
	for range rounds {
		for range faults {
			// Some cannot be: a GPU that is plugged in cannot be plugged in, and one that is not has no
			// driver to speak of it.
			_ = control.Call(t.Context(), s.ControlSocket(), "simulate.inject", anyFault(r), nil)
		}
		// It ends with a look, whatever that finds, and changes nothing else.
		_ = control.Call(t.Context(), s.ControlSocket(), "resume", nil, nil)
		s.accords(false)
	}
	for i := range 8 {
		add := simulator.Fault{Kind: simulator.KindAdd, GPU: strconv.Itoa(i)}
		_ = control.Call(t.Context(), s.ControlSocket(), "simulate.inject", add, nil)
	}
	s.inject(simulator.Fault{Kind: simulator.KindRestore})
	s.accords(true)
}

// anyFault returns a fault of one GPU that is none of the driver itself.
func anyFault(r *rand.Rand) simulator.Fault {
	f := simulator.Fault{GPU: strconv.Itoa(r.IntN(8))}
	kinds := []simulator.Kind{
		simulator.KindXID, simulator.KindLost, simulator.KindRemove, simulator.KindAdd, simulator.KindRecoveryAction, simulator.KindECC,
		simulator.KindFabric, simulator.KindFail, simulator.KindRestore, simulator.KindRestore,
	}
	switch f.Kind = kinds[r.IntN(len(kinds))]; f.Kind {
	case simulator.KindXID:
		f.XID = 1 + r.Uint64N(176)
	case simulator.KindRecoveryAction:
		f.Action = []string{"none", "reset", "reboot", "drain-p2p"}[r.IntN(4)]
	case simulator.KindECC:
		f.Count = 1
	case simulator.KindFabric:
		f.State = []string{"in-progress", "completed"}[r.IntN(2)]
	case simulator.KindFail:
		f.Return = []string{"UNKNOWN", "RESET_REQUIRED", "GPU_IS_LOST"}[r.IntN(3)]
	default: // takes a GPU alone
	}
	return f
}

// known returns the states of the GPUs that the daemon knows, by UUID; nil if it does not answer.
// They may all be unplugged.
func (s *stage) known() map[string]string {
	s.t.Helper()
	var now struct {
		GPUs []struct {
			UUID  string `json:"uuid"`
			State string `json:"state"`
		} `json:"gpus"`
	}
	if control.Call(s.t.Context(), s.ControlSocket(), "status", nil, &now) != nil {
		return nil
	}
	states := map[string]string{}
	for _, g := range now.GPUs {
		states[g.UUID] = g.State
	}
	return states
}

// accords waits until the last list that kubelet received says what the daemon knows; if good, that
// every GPU is Healthy, which takes an operator's word for some.
func (s *stage) accords(good bool) {
	s.t.Helper()
	var differs string
	defer func() {
		if s.t.Failed() {
			s.t.Logf("the last difference: %s", differs)
		}
	}()
	s.eventually("kubelet's last list says what the daemon knows", func() bool {
		known := s.known()
		for uuid, state := range known {
			if good && state == "Unhealthy" {
				// Refused if the GPU has just gone, and then there is nothing to clear.
				_ = control.Call(s.t.Context(), s.ControlSocket(), "health.clear", map[string]string{"gpu": uuid}, nil)
			}
		}
		differs = difference(known, s.last(), good)
		return differs == ""
	})
}

// last returns the health of the devices of the last list that kubelet received, by ID.
func (s *stage) last() map[string]string {
	listed := map[string]string{}
	for _, e := range s.Events(0) {
		if e.Kind != standin.Listed {
			continue
		}
		clear(listed)
		for _, d := range e.Devices {
			listed[d.GetID()] = d.GetHealth()
		}
	}
	return listed
}

// difference says in what a list is not what is known; empty if it is in nothing.
func difference(known, listed map[string]string, good bool) string {
	if known == nil {
		return "the daemon does not answer"
	}
	for uuid, state := range known {
		want := v1beta1.Unhealthy
		if state == "Healthy" || state == "Suspect" {
			want = v1beta1.Healthy
		}
		if listed[uuid] != want || good && state != "Healthy" {
			return fmt.Sprintf("%s is %s, and listed as %q", uuid, state, listed[uuid])
		}
	}
	for id, health := range listed {
		if _, there := known[id]; !there && (health != v1beta1.Unhealthy || good) {
			return fmt.Sprintf("%s is not there, and listed as %q", id, health)
		}
	}
	if good && len(known) < 8 {
		return fmt.Sprintf("the daemon knows %d GPUs", len(known))
	}
	return ""
}
