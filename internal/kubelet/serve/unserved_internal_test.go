package serve

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// TestAResourceThatNobodyServesForTenSeconds: it must be known for ten seconds without a gap, of
// one kubelet, that nobody serves it.
func TestAResourceThatNobodyServesForTenSeconds(t *testing.T) {
	t.Parallel()
	const name = "nvidia.com/mig-1g.10gb"
	held := func(resource string) map[holders.Key]holders.Holder {
		return map[holders.Key]holders.Holder{keyOf(resource, "MIG-00000000-0000-0000-0000-000000000000"): {Pod: "p"}}
	}
	is := evidence{Account: holders.Account{Kubelet: 1, Held: held(name)}, others: others{alone: true}}
	but := func(change func(*evidence)) evidence { e := is; change(&e); return e }
	for title, tt := range map[string]struct {
		meanwhile evidence // after five seconds
		last      time.Duration
		want      bool
	}{
		"nearly":                    {is, unservedFor - 1, false},
		"ten seconds":               {is, unservedFor, true},
		"another listens meanwhile": {but(func(e *evidence) { e.alone = false }), unservedFor, false},
		"a gap":                     {but(func(e *evidence) { e.UnknownBecause = "damaged" }), unservedFor, false},
		"another kubelet":           {but(func(e *evidence) { e.Kubelet = 2 }), unservedFor, false},
		"another serves it": {but(func(e *evidence) { e.healthy = map[string][]string{name: {"x"}} }), unservedFor,
			false},
		"another resource is served": {but(func(e *evidence) { e.healthy = map[string][]string{"x": {"x"}} }), unservedFor,
			true},
		"no pod holds it":   {but(func(e *evidence) { e.Held = nil }), unservedFor, false},
		"of another vendor": {but(func(e *evidence) { e.Held = held("example.com/gpu") }), unservedFor, false},
	} {
		c := clocktesting.NewFakeClock(time.Now())
		s := NewServers(Collaborators{Clock: c})
		began := c.Now()
		s.update(is, began)
		s.update(tt.meanwhile, began.Add(unservedFor/2))
		_, changed := s.update(is, began.Add(tt.last))
		entry, served := s.resources[name]
		if served != tt.want || served && (!entry.list.retired || !changed) {
			t.Errorf("%s: served %v, want %v", title, served, tt.want)
		}
	}
}

// TestWhoseResourceItIs: one that has a name and held devices as this program makes them, or those
// of the plan.
func TestWhoseResourceItIs(t *testing.T) {
	t.Parallel()
	const ours, theirs = "MIG-00000000-0000-0000-0000-000000000000", "nvidia0/vgpu1"
	for name, tt := range map[string]struct {
		resource string
		ids      []string
		claims   int // by which a GPU may be held
		want     bool
	}{
		"ours":                 {"nvidia.com/mig-1g.10gb", []string{ours}, 1, true},
		"ours, two of them":    {"nvidia.com/mig-1g.10gb", []string{ours, ours + "::1"}, 2, true},
		"theirs":               {"nvidia.com/gpu", []string{theirs}, 0, false},
		"ours and theirs":      {"nvidia.com/gpu", []string{theirs, ours}, 1, false},
		"a device of the plan": {"nvidia.com/gpu.shared", []string{"GPU-0::1"}, 1, true},
		"a device of the plan of another vendor's": {"example.com/gpu", []string{"GPU-0::1"}, 1, false},
	} {
		for range 10 { // devices come in any order
			c := clocktesting.NewFakeClock(time.Now())
			s := NewServers(Collaborators{Clock: c})
			s.wanted.uuids = map[string]bool{"GPU-0": true}
			e := evidence{Account: holders.Account{Kubelet: 1, Held: map[holders.Key]holders.Holder{}}, others: others{alone: true}}
			for _, id := range tt.ids {
				e.Held[keyOf(tt.resource, id)] = holders.Holder{Pod: "p"}
			}
			if s.update(e, c.Now()); len(s.observed.unservedForms) != tt.claims {
				t.Errorf("%s: claims %v, want %d", name, s.observed.unservedForms, tt.claims)
			}
			s.update(e, c.Now().Add(unservedFor))
			if _, served := s.resources[tt.resource]; served != tt.want {
				t.Errorf("%s: served %v, want %v", name, served, tt.want)
				break
			}
		}
	}
}

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
