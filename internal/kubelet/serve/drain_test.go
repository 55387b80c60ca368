package serve_test

import (
	"fmt"
	"testing"
	"time"

	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
)

// TestAChangeUnderConstantLoadEnds: each GPU is always held by a pod, and the next pod comes before
// the last one ends. The GPUs are withdrawn one after the other, so that they become free.
func TestAChangeUnderConstantLoadEnds(t *testing.T) {
	t.Parallel()
	for _, announce := range []bool{false, true} {
		t.Run(fmt.Sprintf("announced %v", announce), func(t *testing.T) {
			t.Parallel()
			s := newReplicated(t, standin.V137)
			s.admit("0")
			s.admit("1")
			s.offers(1, announce)
			if announce {
				s.daemon.ApproveShrink(1)
			}
			s.awaitAllocatable(t, 2)
			pods, made, refused, lowest := []string{"0", "1"}, 2, 0, 2
			took := until(t, s.clock, "both GPUs are whole", func() bool {
				if number := s.daemon.PendingShrink().Value(); number > 1 {
					s.daemon.ApproveShrink(number)
				}
				if _, err := s.Admit(t.Context(), standin.Container{Pod: fmt.Sprint(made), Name: "c", Resource: gpu,
					Count: 1}); err != nil {
					refused++
				} else {
					pods = append(pods, fmt.Sprint(made))
				}
				made++
				if len(pods) > 0 {
					s.Remove(pods[0])
					pods = pods[1:]
				}
				lowest = min(lowest, s.Allocatable(gpu))
				return s.whole()
			})
			t.Logf("after %v and %d pods, %d refused, %d devices at least", took, made, refused, lowest)
			if took > 3*time.Minute { // of a clock that may be ahead of a process that has no processor
				t.Errorf("it took %v", took)
			}
			if lowest < 1 {
				t.Errorf("kubelet counted %d at least, want 1: one GPU at a time is withdrawn", lowest)
			}
		})
	}
}

// TestPodsThatStay: a GPU whose pod stays is offered in its old form again, and is left alone from
// then on.
func TestPodsThatStay(t *testing.T) {
	t.Parallel()
	s := newReplicated(t, standin.V137)
	for _, pod := range []string{"a", "b", "c", "d", "e"} {
		s.admit(pod)
	}
	s.offers(1, false)
	s.awaitAllocatable(t, 2)
	for range 6 {
		s.clock.Step(time.Second)
	}
	s.admit("again") // the pods hold both GPUs, and one was given since the change
	until(t, s.clock, "a GPU is withdrawn", func() bool { return s.Allocatable(gpu) == 1 })
	withdrawn := until(t, s.clock, "it is offered again", func() bool { return s.Allocatable(gpu) == 2 })
	if withdrawn < 25*time.Second || withdrawn > 35*time.Second {
		t.Errorf("it was withdrawn for %v, want 30s", withdrawn)
	}
	began := s.clock.Now()
	until(t, s.clock, "two minutes", func() bool {
		if s.Allocatable(gpu) < 2 {
			t.Error("a GPU is withdrawn for a pod that stays")
		}
		return s.clock.Since(began) > 2*time.Minute
	})
	for _, pod := range []string{"a", "b", "c", "d", "e", "again"} {
		s.Remove(pod)
	}
	until(t, s.clock, "both GPUs are whole", s.whole)
}
