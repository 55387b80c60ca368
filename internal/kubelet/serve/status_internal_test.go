package serve

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestHowAServerIsShown: a new phase forgets what was said of the account, and that of a server
// that serves what went wrong before.
func TestHowAServerIsShown(t *testing.T) {
	t.Parallel()
	s := NewServers(Collaborators{Clock: clocktesting.NewFakeClock(time.Now())})
	s.Apply(resource.Plan{Resources: []resource.Resource{oneGPU()}}, Options{}, 1)
	entry := s.resources[gpuName]
	is := func(step string, phase Phase, agreed bool, problem string) {
		t.Helper()
		if got := s.Status()[0]; got.Phase != phase || got.Agreed != agreed || got.Problem != problem {
			t.Errorf("%s: %+v, want %q, agreed %v, problem %q", step, got, phase, agreed, problem)
		}
	}
	s.setProblem(entry, "refused")
	is("a registration failed", PhaseRegistering, false, "refused")
	s.setPhase(entry, PhaseNoKubelet)
	is("kubelet left", PhaseNoKubelet, false, "refused")
	s.setPhase(entry, PhaseServing)
	is("it serves", PhaseServing, false, "")
	s.setDifference(entry, "")
	is("the account is the same", PhaseServing, true, "")
	s.setDifference(entry, "none")
	is("the account differs", PhaseServing, false, "none")
	s.setDifference(entry, "")
	s.setPhase(entry, PhaseYielding)
	is("it is silent", PhaseYielding, false, "")
}
