package daemon

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// begins has kubelet start a container with all GPUs: for the first time, or again. The refusal
// must have all of the words; without any there must be none.
func (s *stage) begins(pod string, words ...string) {
	s.t.Helper()
	var err error
	s.eventually("somebody has looked at the GPUs of "+pod, func() bool {
		_, err = s.Admit(s.t.Context(), standin.Container{Pod: pod, Name: "main", Resource: gpu, Count: 8})
		// On a busy machine a look may take longer than a container is held up for it; kubelet tries
		// again, too.
		return err == nil || !strings.Contains(err.Error(), "cannot be checked")
	})
	var refused *standin.PodError
	if errors.As(err, &refused) && refused.Reason == standin.UnexpectedAdmission && s.Allocatable(gpu) < 8 {
		s.t.Logf("%s: kubelet heard of it by the list before it could ask: %v", pod, err)
		return
	}
	if len(words) == 0 {
		if err != nil {
			s.t.Errorf("%s was refused: %v", pod, err)
		}
		return
	}
	if refused == nil || refused.Reason != standin.CreateContainerConfig {
		s.t.Errorf("%s: got error %v, want %s", pod, err, standin.CreateContainerConfig)
		return
	}
	for _, w := range append(words, gpu, "delete the pod") {
		if !strings.Contains(err.Error(), w) {
			s.t.Errorf("%s: got error %v, want %q in it", pod, err, w)
		}
	}
}

// TestContainersStartAgainOnGoodGPUsOnly: kubelet allocates nothing for a container that starts
// again, and asks only whether it may.
func TestContainersStartAgainOnGoodGPUsOnly(t *testing.T) {
	t.Parallel()
	struck := simulator.Fault{Kind: simulator.KindRecoveryAction, GPU: "3", Action: "reset"}
	used := simulator.Fault{Kind: simulator.KindProcesses, GPU: "5", Count: 2}
	bad := []string{"GPU 3 (GPU-", "recovery action gpu-reset", "remedy: reset"}
	inUse := []string{"GPU 5 (GPU-", "PID 100000 with 1024 MiB, PID 100001 with 1024 MiB"}
	for mode, want := range map[string]struct{ struck, used []string }{
		"none": {}, "health": {struck: bad}, "clean": {struck: bad, used: inUse},
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := serving(t, node.Setup{Args: []string{"--pre-start-checks", mode}})
			s.begins("work")
			s.inject(used)
			s.begins("work", want.used...)
			s.inject(simulator.Fault{Kind: simulator.KindProcesses, GPU: "5"})
			s.begins("work")

			s.inject(struck)
			s.begins("work", want.struck...)
			s.shows(8, 7) // the refusal may come before the list that says why
			s.inject(simulator.Fault{Kind: simulator.KindRestore})
			s.shows(8, 8)
			s.begins("work")
		})
	}
}
