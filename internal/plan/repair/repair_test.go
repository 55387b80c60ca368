package repair_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
)

var now = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

// node returns a Snapshot with GPUs in these states: "" is Healthy, otherwise the state Unhealthy has
// this remedy. The GPU with index i has been in its state for i+1 minutes.
func node(remedies ...inventory.Remedy) inventory.Snapshot {
	s := inventory.Snapshot{Generation: 1}
	for i, remedy := range remedies {
		h := inventory.Health{State: inventory.Healthy, Since: now.Add(-time.Duration(i+1) * time.Minute)}
		if remedy != inventory.NoRemedy {
			h.State, h.Reason, h.Remedy = inventory.Unhealthy, "XID 95", remedy
		}
		s.GPUs = append(s.GPUs, inventory.GPU{
			UUID: "GPU-" + string(rune('a'+i)), Index: i, BDF: "0000:0" + string(rune('1'+i)) + ":00.0", Health: h,
			ComputeCapability: inventory.ComputeCapability{Major: 9},
		})
	}
	return s
}

// volta connects the first GPUs of a node by NVLinks of a chip whose GPUs are reset together.
func volta(s inventory.Snapshot, connected int) inventory.Snapshot {
	for i := range s.GPUs {
		g := &s.GPUs[i]
		g.ComputeCapability.Major = 7
		for j, peer := range s.GPUs {
			lanes := 0
			if i < connected && j < connected {
				lanes = 2
			}
			if i != j {
				g.Links = append(g.Links, inventory.Link{Peer: peer.UUID, PeerIndex: j, NVLinks: lanes})
			}
		}
	}
	return s
}

func attempt(ago time.Duration, gpus ...string) repair.Attempt {
	return repair.Attempt{GPUs: gpus, Began: now.Add(-ago), Ended: now.Add(-ago).Add(time.Second)}
}

func TestDecide(t *testing.T) {
	const reset, drain, reboot = inventory.RemedyReset, inventory.RemedyDrain, inventory.RemedyReboot
	free := map[string]repair.Users{"GPU-a": {}, "GPU-b": {}, "GPU-c": {}}
	for _, test := range []struct {
		name   string
		node   inventory.Snapshot
		change func(*repair.Input)
		reset  string   // UUIDs
		steps  []string // INDEX STATE and a part of the reason
		next   time.Duration
	}{
		{name: "all are Healthy", node: node("", "")},
		{name: "other remedies", node: node(reboot, inventory.RemedyHardware, inventory.RemedyHuman, inventory.RemedyDrainP2P)},
		{name: "one GPU", node: node("", reset), reset: "GPU-b", steps: []string{"1 ready nobody uses the GPU"}},
		{name: "work may finish first", node: node(drain), reset: "GPU-a", steps: []string{"0 ready nobody"}},
		{name: "the oldest of two is first", node: node(reset, reset), reset: "GPU-b",
			steps: []string{"0 waiting GPU 1 is first", "1 ready nobody"}},
		{name: "the plan resets none", node: node(reset), change: func(in *repair.Input) { in.Mode = repair.Plan },
			steps: []string{"0 ready repair: idle would reset it now"}},
		{name: "in use", node: node(reset, reset), change: func(in *repair.Input) {
			in.Users = map[string]repair.Users{"GPU-a": {}, "GPU-b": {Names: []string{"pod a/b", "process 7"}}}
		}, reset: "GPU-a", steps: []string{"0 ready nobody", "1 waiting in use: GPU 1 by pod a/b, GPU 1 by process 7"}},
		{name: "nobody knows the users", node: node(reset), change: func(in *repair.Input) {
			in.Users = map[string]repair.Users{"GPU-a": {Unknown: "the kubelet does not answer"}}
		}, steps: []string{"0 waiting the users of GPU 0 are not known: the kubelet does not answer"}},
		{name: "nobody was asked for the users", node: node(reset), change: func(in *repair.Input) { in.Users = nil },
			steps: []string{"0 waiting not asked for yet"}},
		{name: "a new fault", node: node(reset), change: func(in *repair.Input) { in.Now = now.Add(-55 * time.Second) },
			steps: []string{"0 waiting must have lasted for 10s"}, next: -50 * time.Second},
		{name: "the driver is away", node: node(reset), change: func(in *repair.Input) { in.Snapshot.Stale = "gone" },
			steps: []string{"0 waiting does not answer: gone"}},
		{name: "soon after a reset", node: node(reset), change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(9*time.Minute, "GPU-a")}
		}, steps: []string{"0 waiting the next reset is at 2026-11-28T12:01:00Z at the earliest"}, next: time.Minute},
		{name: "a second time", node: node(reset), change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(25*time.Hour, "GPU-a"), attempt(time.Hour, "GPU-a"),
				attempt(time.Minute, "GPU-b")}
		}, reset: "GPU-a", steps: []string{"0 ready nobody"}},
		{name: "a third time", node: node(reset), change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(23*time.Hour, "GPU-a"), attempt(time.Minute, "GPU-a")}
		}, steps: []string{"0 manual the GPU was reset 2 times in 24 hours"}, next: time.Hour},
		{name: "the clock was set back", node: node(reset), change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(-time.Hour, "GPU-a"), attempt(-2*time.Hour, "GPU-a")}
		}, steps: []string{"0 manual reset 2 times"}, next: 25 * time.Hour},
		{name: "GPUs that go together", node: volta(node(reset, "", reset), 2), reset: "GPU-c",
			steps: []string{"0 waiting GPU 2 is first", "2 ready nobody"}},
		{name: "with a GPU that is Healthy", node: volta(node(reset, "", ""), 2), reset: "GPU-a GPU-b",
			steps: []string{"0 ready nor GPU 1, which must be reset with it"}},
		{name: "with a GPU in use", node: volta(node(reset, "", ""), 3), change: func(in *repair.Input) {
			in.Users = map[string]repair.Users{"GPU-a": {}, "GPU-b": {}, "GPU-c": {Names: []string{"pod a/b"}}}
		}, steps: []string{"0 waiting in use: GPU 2 by pod a/b"}},
		{name: "with a GPU that was reset too often", node: volta(node(reset, ""), 2), change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(3*time.Hour, "GPU-b"), attempt(time.Hour, "GPU-b")}
		}, steps: []string{"0 manual GPU 1, which must be reset with it, was reset 2 times"}, next: 21 * time.Hour},
		{name: "with a GPU that needs a restart", node: volta(node(reset, reboot), 2),
			steps: []string{"0 waiting GPU 1 must be reset with it, and needs a restart of the node"}},
		{name: "MIG devices of others", node: node(reset), change: func(in *repair.Input) {
			in.Snapshot.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1"}}
		}, steps: []string{"0 waiting a reset destroys the MIG devices of GPU 0"}},
		{name: "MIG devices of our own", node: node(reset), change: func(in *repair.Input) {
			in.Snapshot.GPUs[0].MIGDevices, in.CreatesMIG = []inventory.MIGDevice{{UUID: "MIG-1"}}, true
		}, reset: "GPU-a", steps: []string{"0 ready nobody"}},
		{name: "a MIG device alone", node: node(""), change: func(in *repair.Input) {
			in.CreatesMIG = true
			in.Snapshot.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1",
				Health: inventory.Health{State: inventory.Unhealthy, Remedy: reset}}}
		}, reset: "GPU-a", steps: []string{"0 ready nobody"}},
		{name: "no PCI address", node: node(reset), change: func(in *repair.Input) { in.Snapshot.GPUs[0].BDF = "" },
			steps: []string{"0 waiting PCI address of GPU 0 is not known"}},
		{name: "a virtual GPU", node: node(reset), change: func(in *repair.Input) { in.Snapshot.GPUs[0].VGPU.Present = true },
			steps: []string{"0 waiting by its hypervisor"}},
		{name: "Suspect", node: node(reset), change: func(in *repair.Input) {
			in.Snapshot.GPUs[0].Health.State = inventory.Suspect
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := repair.Input{Mode: repair.Idle, Snapshot: test.node, Users: free, Now: now}
			if test.change != nil {
				test.change(&in)
			}
			d := repair.Decide(in)
			if got := strings.Join(d.Reset, " "); got != test.reset {
				t.Errorf("resets %q, want %q", got, test.reset)
			}
			if len(d.Steps) != len(test.steps) {
				t.Fatalf("steps %+v, want %q", d.Steps, test.steps)
			}
			for i, want := range test.steps {
				index, rest, _ := strings.Cut(want, " ")
				state, reason, _ := strings.Cut(rest, " ")
				if s := d.Steps[i]; index != string(rune('0'+s.Index)) || state != string(s.State) ||
					!strings.Contains(s.Reason, reason) {
					t.Errorf("step %+v, want %q", s, want)
				}
			}
			if next := d.Next.Sub(now); d.Next.IsZero() != (test.next == 0) || !d.Next.IsZero() && next != test.next {
				t.Errorf("next in %v, want %v", next, test.next)
			}
		})
	}
}

// In the mode evict, pods are evicted if nothing else is in the way of the reset, for one GPU at a
// time: the lowest priority first, then the youngest pod.
func TestEvictions(t *testing.T) {
	const reset = inventory.RemedyReset
	pod := func(name string, priority int, age time.Duration) repair.Users {
		return repair.Users{Names: []string{"pod " + name}, Pods: []repair.Pod{{Name: name, Priority: priority, Created: now.Add(-age)}}}
	}
	two := repair.Users{Names: []string{"pod a", "pod b"}, Pods: append(pod("a", 0, time.Hour).Pods, pod("b", 9, time.Hour).Pods...)}
	for _, test := range []struct {
		name   string
		node   inventory.Snapshot
		users  [3]repair.Users
		change func(*repair.Input)
		want   string // of the pods
		reset  string
	}{
		{name: "one pod", node: node(reset), users: [3]repair.Users{pod("a", 0, 0)}, want: "a"},
		{name: "no broken GPU", node: node(""), users: [3]repair.Users{pod("a", 0, 0)}},
		{name: "a free GPU first", node: node(reset, reset), users: [3]repair.Users{pod("a", 0, 0)}, reset: "GPU-b"},
		{name: "the lowest priority", node: node(reset, reset), users: [3]repair.Users{pod("a", 5, 0), pod("b", 1, time.Hour)}, want: "b"},
		{name: "the youngest", node: node(reset, reset), users: [3]repair.Users{pod("a", 1, time.Hour), pod("b", 1, time.Minute)}, want: "b"},
		{name: "the most important pod of a GPU counts", node: node(reset, reset), users: [3]repair.Users{two, pod("c", 5, 0)}, want: "c"},
		{name: "two pods of a GPU", node: node(reset), users: [3]repair.Users{two}, want: "a b"},
		{name: "a process of the host, too", node: node(reset), users: [3]repair.Users{{Names: []string{"pod a", "process 7"}}}},
		{name: "the users are not known", node: node(reset), users: [3]repair.Users{{Unknown: "away", Pods: two.Pods, Names: two.Names}}},
		{name: "later", node: node(reset, reset), users: [3]repair.Users{pod("a", 0, 0), pod("b", 9, 0)}, change: func(in *repair.Input) {
			in.EvictAfter = map[string]time.Time{"GPU-a": now.Add(1)}
		}, want: "b"},
		{name: "idle evicts none", node: node(reset), users: [3]repair.Users{two}, change: func(in *repair.Input) { in.Mode = repair.Idle }},
		{name: "a new fault", node: node(reset), users: [3]repair.Users{two}, change: func(in *repair.Input) { in.Now = now.Add(-55 * time.Second) }},
		{name: "after two resets", node: node(reset), users: [3]repair.Users{two}, change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(time.Hour, "GPU-a"), attempt(time.Hour, "GPU-a")}
		}},
		{name: "soon after a reset", node: node(reset), users: [3]repair.Users{two}, change: func(in *repair.Input) {
			in.Attempts = []repair.Attempt{attempt(time.Minute, "GPU-a")}
		}},
		{name: "MIG devices of others", node: node(reset), users: [3]repair.Users{two}, change: func(in *repair.Input) {
			in.Snapshot.GPUs[0].MIGDevices = []inventory.MIGDevice{{UUID: "MIG-1"}}
		}},
		{name: "pods of a GPU that is well stay", node: volta(node(reset, ""), 2), users: [3]repair.Users{{}, pod("b", 0, 0)}},
		{name: "both GPUs are broken", node: volta(node(reset, reset), 2), users: [3]repair.Users{{}, pod("b", 0, 0)}, want: "b"},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := repair.Input{Mode: repair.Evict, Snapshot: test.node, Now: now,
				Users: map[string]repair.Users{"GPU-a": test.users[0], "GPU-b": test.users[1], "GPU-c": test.users[2]}}
			if test.change != nil {
				test.change(&in)
			}
			d := repair.Decide(in)
			var names []string
			for _, p := range d.Evict {
				names = append(names, p.Name)
			}
			if got := strings.Join(names, " "); got != test.want || strings.Join(d.Reset, " ") != test.reset ||
				(d.EvictFor == "") != (test.want == "") {
				t.Errorf("evicts %q for %q, resets %v; want %q, %q", got, d.EvictFor, d.Reset, test.want, test.reset)
			}
		})
	}
}

// The users of all GPUs that go together must be known, each once.
func TestCandidates(t *testing.T) {
	var uuids []string
	for _, g := range repair.Candidates(volta(node("", inventory.RemedyReset, inventory.RemedyReset, ""), 3)) {
		uuids = append(uuids, g.UUID)
	}
	slices.Sort(uuids)
	if diff := cmp.Diff([]string{"GPU-a", "GPU-b", "GPU-c"}, uuids); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestStop(t *testing.T) {
	names := strings.Split("a b c d e f g", " ")
	for _, test := range []struct {
		asking, nodes int
		want          string
	}{
		{2, 2, ""},
		{2, 0, ""},
		{3, 0, "3 nodes asked for a repair within 1h0m0s: a, b, c"},
		{3, 4, "3 of 4 GPU nodes"},
		{3, 15, ""},
		{3, 14, "3 of 14 GPU nodes"},
		{7, 34, "a, b, c, d, e and 2 more"},
		{7, 35, ""},
	} {
		got := repair.StopReason(names[:test.asking], test.nodes)
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%d of %d: %q, want %q", test.asking, test.nodes, got, test.want)
		}
	}
}

func TestAsking(t *testing.T) {
	resumed := now.Add(-30 * time.Minute)
	asks := []repair.Ask{
		{"c", now}, {"b", now.Add(-29 * time.Minute)}, {"a", now.Add(-30 * time.Minute)}, {"d", now.Add(-time.Hour)},
		{"e", now.Add(time.Hour)}, {"c", now.Add(-time.Minute)},
	}
	if diff := cmp.Diff([]string{"b", "c", "e"}, repair.Asking(asks, resumed, now)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a", "b", "c", "e"}, repair.Asking(asks, time.Time{}, now)); diff != "" {
		t.Errorf("never resumed (-want +got):\n%s", diff)
	}
}
