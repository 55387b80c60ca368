// Package repair decides which GPU of a node is reset next, because a reset is its remedy, and why
// each other such GPU waits. Fleet decides whether the nodes of a cluster may repair GPUs at all.
package repair

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// The limits of a GPU.
const (
	// Budget is how often a GPU is reset within BudgetTime. Afterwards its remedy is manual.
	Budget     = 2
	BudgetTime = 24 * time.Hour
	// settleTime is how long a GPU must have needed the reset, so that the verdict is final.
	settleTime = 10 * time.Second
	// retryTime is the time between two resets of a GPU: the readings after a reset need some seconds.
	retryTime = 10 * time.Minute
)

// Mode is what the daemon does about GPUs whose remedy is a reset.
type Mode int

// The modes.
const (
	Off   Mode = iota // nothing
	Plan              // it reports what the mode Idle would do
	Idle              // it resets a GPU that no pod, claim and process uses
	Evict             // it also evicts the pods of such a GPU first
)

// modeNames are the names of the modes.
var modeNames = []string{"off", "plan", "idle", "evict"}

func (m Mode) String() string {
	if m < 0 || int(m) >= len(modeNames) {
		return fmt.Sprintf("Mode(%d)", int(m))
	}
	return modeNames[m]
}

// MarshalText returns the name of the mode.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText accepts the name of a mode.
func (m *Mode) UnmarshalText(text []byte) error {
	i := slices.Index(modeNames, string(text))
	if i < 0 {
		return fmt.Errorf("%q is not one of: %s", text, strings.Join(modeNames, ", "))
	}
	*m = Mode(i)
	return nil
}

// Acts reports whether the mode resets GPUs.
func (m Mode) Acts() bool { return m == Idle || m == Evict }

// Users are the users of a GPU and of its MIG devices.
type Users struct {
	// Names are pods, claims and processes, in words for people.
	Names []string
	// Pods are the pods to evict; empty if the GPU has other users too.
	Pods []Pod
	// Unknown is why the users are not known; empty if they are.
	Unknown string
}

// A Pod is a pod that uses a GPU.
type Pod struct {
	Namespace, Name, UID string
	// Priority and Created are those at the API server; zero if unknown.
	Priority int
	Created  time.Time
}

// An Attempt is a repair: a reset of a GPU, with the GPUs that had to be reset together with it.
type Attempt struct {
	// GPUs are the UUIDs.
	GPUs []string `json:"gpus"`
	// Began is when the GPUs were withdrawn, and Ended when the result was known; Ended is zero
	// during the repair.
	Began time.Time `json:"began"`
	Ended time.Time `json:"ended,omitzero"`
	// Before and After are the states of the GPUs, in words for people.
	Before string `json:"before"`
	After  string `json:"after,omitempty"`
	// Repaired is true if all GPUs were Healthy at the end.
	Repaired bool `json:"repaired,omitempty"`
}

// State is what the daemon does about a GPU.
type State string

// The states.
const (
	// Ready means that the GPU is the next one, and nothing of this node is in the way.
	Ready State = "ready"
	// Waiting means that the GPU waits for something, which the reason names.
	Waiting State = "waiting"
	// Repairing means that the GPU is being reset.
	Repairing State = "repairing"
	// Manual means that resets did not repair the GPU: an operator must.
	Manual State = "manual"
)

// A Step is what the daemon does about a GPU that needs a reset.
type Step struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	State State  `json:"state"`
	// Reason is a sentence without a full stop: what the GPU waits for, or why an operator is needed.
	Reason string `json:"reason"`
	// Fault is why the GPU needs a reset, and Since when the GPU got its present state of health.
	Fault string    `json:"fault"`
	Since time.Time `json:"since"`
}

// Status is what the daemon does about GPUs whose remedy is a reset. The zero value says that nothing
// is known yet.
type Status struct {
	Mode Mode `json:"mode"`
	// Known is true after the first decision since the start of the process.
	Known bool `json:"-"`
	// Wanted is true while a repair may begin or is under way: the node then needs a slot.
	Wanted bool `json:"wanted,omitempty"`
	// Steps are the GPUs that need a reset, and Attempts the repairs of the last 24 hours, oldest
	// first.
	Steps    []Step    `json:"steps,omitempty"`
	Attempts []Attempt `json:"attempts,omitempty"`
	// Repaired and Failed count the repairs since the start of the process.
	Repaired int `json:"repaired"`
	Failed   int `json:"failed"`
	// Problem is why nothing is repaired at all; empty if there is no problem.
	Problem string `json:"problem,omitempty"`
}

// Input is what a decision is based on.
type Input struct {
	Mode     Mode
	Snapshot inventory.Snapshot
	// Users are the users of the GPUs that Candidates returns, by UUID.
	Users map[string]Users
	// CreatesMIG is true if the daemon creates the MIG devices of the node again after a reset.
	CreatesMIG bool
	// Attempts are the repairs of the last 24 hours, oldest first.
	Attempts []Attempt
	// EvictAfter are the times before which the pods of a GPU are not evicted, by UUID.
	EvictAfter map[string]time.Time
	Now        time.Time
}

// A Decision is what to do now.
type Decision struct {
	// Reset are the UUIDs of the GPUs to reset now, together; the first one needs it. It is empty if
	// no GPU is to be reset, and in the mode Plan.
	Reset []string
	// Evict are the pods to evict now, in the mode Evict if no GPU can be reset, and EvictFor is the
	// UUID of the GPU that needs the reset.
	Evict    []Pod
	EvictFor string
	// Steps has each GPU that needs a reset, by index.
	Steps []Step
	// Next is when the decision may change by itself; zero if it does not.
	Next time.Time
}

// NeedsReset returns the health for which a GPU needs a reset: its own, or that of one of its MIG
// devices. It returns false if the remedy is another one, or none.
func NeedsReset(g inventory.GPU) (inventory.Health, bool) {
	if g.Health.Remedy != inventory.NoRemedy {
		return g.Health, resetRepairs(g.Health)
	}
	for _, d := range g.MIGDevices {
		if resetRepairs(d.Health) {
			return d.Health, true
		}
	}
	return inventory.Health{}, false
}

func resetRepairs(h inventory.Health) bool {
	return !h.Allocatable() && (h.Remedy == inventory.RemedyReset || h.Remedy == inventory.RemedyDrain)
}

// Candidates returns the GPUs whose users the caller must find out before it calls Decide: those
// that need a reset, and those that must be reset together with them.
func Candidates(s inventory.Snapshot) []inventory.GPU {
	var found []inventory.GPU
	for _, g := range s.GPUs {
		if _, needs := NeedsReset(g); !needs {
			continue
		}
		for _, member := range Together(s, g) {
			if !slices.ContainsFunc(found, func(f inventory.GPU) bool { return f.UUID == member.UUID }) {
				found = append(found, member)
			}
		}
	}
	return found
}

// Together returns a GPU and the GPUs that can only be reset together with it. Before Ampere these
// are all GPUs that NVLinks connect. From Ampere on a GPU is reset alone; if nvidia-smi refuses,
// nothing is reset.
func Together(s inventory.Snapshot, g inventory.GPU) []inventory.GPU {
	group := []inventory.GPU{g}
	if g.ComputeCapability.Major >= 8 || g.ComputeCapability.Major == 0 {
		return group
	}
	for i := 0; i < len(group); i++ {
		for _, link := range group[i].Links {
			peer, known := s.GPU(link.Peer)
			if known && link.NVLinks > 0 && !slices.ContainsFunc(group, func(m inventory.GPU) bool {
				return m.UUID == peer.UUID
			}) {
				group = append(group, peer)
			}
		}
	}
	return group
}

// Decide returns what to do. At most one GPU of the node is reset at a time: of several that may be
// reset now, the one that has needed it for the longest time.
func Decide(in Input) Decision {
	var d Decision
	var first *Step
	var group []string
	for _, g := range in.Snapshot.GPUs {
		health, needs := NeedsReset(g)
		if !needs {
			continue
		}
		members := Together(in.Snapshot, g)
		step := Step{Index: g.Index, UUID: g.UUID, Fault: health.Why(), Since: health.Since}
		var next time.Time
		step.State, step.Reason, next = judge(in, g, health, members)
		d.Next = order.Earliest(d.Next, next)
		d.Steps = append(d.Steps, step)
	}
	for i := range d.Steps {
		s := &d.Steps[i]
		if s.State == Ready && (first == nil || s.Since.Before(first.Since)) {
			first = s
		}
	}
	if first == nil {
		if in.Mode == Evict {
			d.Evict, d.EvictFor = chooseEviction(in, d.Steps)
		}
		return d
	}
	for i := range d.Steps {
		if s := &d.Steps[i]; s.State == Ready && s != first {
			s.State = Waiting
			s.Reason = fmt.Sprintf("GPU %d is first: one GPU of a node is reset at a time", first.Index)
		}
	}
	g, _ := in.Snapshot.GPU(first.UUID)
	var others []string
	for _, member := range Together(in.Snapshot, g) {
		group = append(group, member.UUID)
		if member.UUID != g.UUID {
			others = append(others, fmt.Sprint(member.Index))
		}
	}
	first.Reason = "nobody uses the GPU"
	if len(others) > 0 {
		first.Reason = "nobody uses the GPU, nor GPU " + strings.Join(others, ", ") + ", which must be reset with it"
	}
	if !in.Mode.Acts() {
		first.Reason += "; repair: idle would reset it now"
		return d
	}
	d.Reset = group
	return d
}

// chooseEviction returns the pods to evict, and the GPU for whose reset they must end. Only one GPU
// of the node is freed at a time. Of several, it is the one whose most important pod has the lowest
// priority, and then the one whose oldest pod is the youngest.
func chooseEviction(in Input, steps []Step) (pods []Pod, gpu string) {
	var chosen []Pod
	for _, s := range steps {
		g, _ := in.Snapshot.GPU(s.UUID)
		users, evictable := []Pod{}, s.State == Waiting && !in.Now.Before(s.Since.Add(settleTime)) &&
			!in.Now.Before(in.EvictAfter[s.UUID])
		members := Together(in.Snapshot, g)
		if why, _ := obstacle(in, g, members); why != "" {
			evictable = false
		}
		for _, m := range members {
			u, asked := in.Users[m.UUID]
			_, needs := NeedsReset(m) // pods of a GPU that is well stay
			evictable = evictable && asked && u.Unknown == "" && (len(u.Names) == 0 || len(u.Pods) > 0 && needs)
			users = append(users, u.Pods...)
		}
		if evictable && len(users) > 0 && (gpu == "" || compareEvictions(users, chosen) < 0) {
			chosen, gpu = users, s.UUID
		}
	}
	return chosen, gpu
}

// compareEvictions returns a negative number if the pods of a are evicted before those of b.
func compareEvictions(a, b []Pod) int {
	rank := func(pods []Pod) (priority int, oldest time.Time) {
		priority, oldest = pods[0].Priority, pods[0].Created
		for _, p := range pods[1:] {
			priority = max(priority, p.Priority)
			if p.Created.Before(oldest) {
				oldest = p.Created
			}
		}
		return priority, oldest
	}
	priorityA, oldestA := rank(a)
	priorityB, oldestB := rank(b)
	return cmp.Or(cmp.Compare(priorityA, priorityB), oldestB.Compare(oldestA))
}

// judge returns what to do about a GPU that needs a reset, regardless of the other ones, and when
// that may change by itself.
func judge(in Input, g inventory.GPU, health inventory.Health, members []inventory.GPU) (State, string, time.Time) {
	for _, m := range members {
		if n, last := attempts(in, m.UUID); n >= Budget {
			return Manual, fmt.Sprintf("%s reset %d times in 24 hours, and needs a reset again: an operator must find "+
				"the cause", subject(g, m), n), last.Add(BudgetTime)
		}
	}
	if why, next := obstacle(in, g, members); why != "" {
		return Waiting, why, next
	}
	var users, unknown []string
	for _, m := range members {
		u, asked := in.Users[m.UUID]
		for _, name := range u.Names {
			users = append(users, fmt.Sprintf("GPU %d by %s", m.Index, name))
		}
		if u.Unknown != "" || !asked {
			unknown = append(unknown, fmt.Sprintf("the users of GPU %d are not known: %s", m.Index,
				cmp.Or(u.Unknown, "they were not asked for yet")))
		}
	}
	switch settled := health.Since.Add(settleTime); {
	case len(users) > 0:
		return Waiting, "in use: " + strings.Join(users, ", "), time.Time{}
	case len(unknown) > 0:
		return Waiting, strings.Join(unknown, "; "), time.Time{}
	case in.Now.Before(settled):
		return Waiting, fmt.Sprintf("the fault must have lasted for %v", settleTime), settled
	}
	return Ready, "", time.Time{}
}

// obstacle returns why a GPU cannot be reset now even if nobody uses it, and when that may change by
// itself; empty if it can.
func obstacle(in Input, g inventory.GPU, members []inventory.GPU) (why string, next time.Time) {
	if in.Snapshot.Stale != "" {
		return "the driver does not answer: " + in.Snapshot.Stale, time.Time{}
	}
	for _, m := range members {
		n, last := attempts(in, m.UUID)
		if again := last.Add(retryTime); n > 0 && in.Now.Before(again) {
			return fmt.Sprintf("%s reset at %s; the next reset is at %s at the earliest", subject(g, m),
				stamp(last), stamp(again)), again
		}
	}
	for _, m := range members {
		switch {
		case m.BDF == "":
			return fmt.Sprintf("the PCI address of GPU %d is not known", m.Index), time.Time{}
		case m.VGPU.Present:
			return "a virtual GPU is reset by its hypervisor", time.Time{}
		case len(m.MIGDevices) > 0 && !in.CreatesMIG:
			return fmt.Sprintf("a reset destroys the MIG devices of GPU %d, and this program does not create "+
				"them again: set mig.enabled and a layout, or reset the GPU by hand", m.Index), time.Time{}
		case m.Health.Remedy == inventory.RemedyReboot:
			return fmt.Sprintf("GPU %d must be reset with it, and needs a restart of the node", m.Index),
				time.Time{}
		}
	}
	return "", time.Time{}
}

// subject is the start of a sentence about resets of a GPU that must be reset with g.
func subject(g, member inventory.GPU) string {
	if g.UUID == member.UUID {
		return "the GPU was"
	}
	return fmt.Sprintf("GPU %d, which must be reset with it, was", member.Index)
}

// attempts returns how often a GPU was reset in the last 24 hours. Parameter last is the time of
// the oldest one that counts if the budget is used up, and otherwise of the newest one.
func attempts(in Input, uuid string) (n int, last time.Time) {
	var times []time.Time
	for _, a := range Recent(in.Attempts, in.Now) {
		if slices.Contains(a.GPUs, uuid) {
			times = append(times, a.Began)
		}
	}
	switch n = len(times); {
	case n == 0:
		return 0, time.Time{}
	case n >= Budget:
		return n, times[n-Budget]
	}
	return n, times[n-1]
}

// Recent returns the attempts of the last 24 hours. An attempt that seems to be in the future, after
// the clock was set back, counts.
func Recent(all []Attempt, now time.Time) []Attempt {
	var recent []Attempt
	for _, a := range all {
		if now.Sub(a.Began) < BudgetTime {
			recent = append(recent, a)
		}
	}
	return recent
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
