package daemon

import (
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// repairState returns what the daemon does about a GPU.
func (s *stage) repairState(gpu int) (state repair.State, reason string) {
	if r := s.status().Repair; r != nil {
		for _, step := range r.Steps {
			if step.Index == gpu {
				return step.State, step.Reason
			}
		}
	}
	return "", ""
}

// TestRepairByADaemon: the pod of a GPU whose remedy is a reset is evicted, and the GPU is then reset
// with a slot of the cluster, while the other GPUs are allocatable. A daemon that is killed while nvidia-smi runs
// counts the repair.
func TestRepairByADaemon(t *testing.T) {
	t.Parallel()
	s, api := openAgent(t, "", "--namespace=gpus", "--repair=evict", "--rollout-slots=1", "--node-events")
	s.Args = append(s.Args, "--state-dir", s.Path("state"))
	s.start()
	s.shows(8, 8)
	s.admit("train", 8)
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 119})
	s.shows(8, 7)
	s.eventually("it waits for the pod", func() bool {
		state, reason := s.repairState(3)
		return state == repair.Waiting && strings.Contains(reason, "in use: GPU 3 by pod ") && strings.Contains(reason, "train")
	})
	s.eventually("the pod is evicted", func() bool {
		return api.Requests()[apiserver.Request{Verb: "create", Resource: "pods/eviction"}] > 0
	})
	if state, reason := s.repairState(3); state != repair.Waiting {
		t.Errorf("while the pod ends: %s, %s", state, reason)
	}
	s.Remove("train")
	s.shows(8, 8)
	slotIsFree := func() bool { return len(api.Leases("gpus")) == 1 } // the Lease with the repairs stays
	s.eventually("the slot is free", slotIsFree)
	r := s.status().Repair
	if len(r.Attempts) == 1 {
		t.Logf("from the withdrawal until Healthy: %v", r.Attempts[0].Ended.Sub(r.Attempts[0].Began))
	}
	if len(r.Attempts) != 1 || !r.Attempts[0].Repaired || r.Repaired != 1 || len(r.Steps) > 0 ||
		!strings.Contains(r.Attempts[0].Before, "GPU 3 Unhealthy: XID 119") || r.Attempts[0].After != "GPU 3 Healthy" {
		t.Errorf("status says %+v", r)
	}
	s.eventually("an Event says so", func() bool {
		for _, e := range api.Events() {
			if e.Reason == "GPURepaired" {
				return true
			}
		}
		return false
	})

	s.smi("4", "hangs")
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "4", XID: 119})
	child := 0
	s.eventually("the program runs", func() bool { child = s.child(); return child != 0 })
	s.shows(8, 7)
	s.kill()
	s.eventually("the program has ended", func() bool { return ended(child) })
	s.start()
	s.shows(8, 8) // the simulated node has started again, too
	s.eventually("the repair counts", func() bool {
		r := s.status().Repair
		return r != nil && len(r.Attempts) == 2 && r.Attempts[1].After == "the daemon ended during the repair"
	})
	s.eventually("the slot is free", slotIsFree)
}
