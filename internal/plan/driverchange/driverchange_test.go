package driverchange_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

var now = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

// host is a node with the driver 570 loaded, and the folders of 570 and 580.
func host(changes ...func(*Host)) *Host {
	h := &Host{LoadedVersion: "570.1", LoadedDigest: "aa", Current: "aa",
		Folders: []Folder{{Digest: "aa", Version: "570.1"}, {Digest: "bb", Version: "580.1"}}}
	for _, change := range changes {
		change(h)
	}
	return h
}

func in(p Phase, age time.Duration, holders ...string) func(*Host) {
	return func(h *Host) {
		h.Change = &Change{To: "bb", Phase: p, Since: now.Add(-age), Holders: holders}
	}
}

func TestNext(t *testing.T) {
	loaded := func(h *Host) { h.LoadedVersion, h.LoadedDigest, h.Current = "580.1", "bb", "bb" }
	ready := Facts{Wanted: "580.1", Host: host(), HasSlot: true, Withheld: true}
	with := func(f Facts, change func(*Facts)) Facts { change(&f); return f }
	for _, test := range []struct {
		name   string
		facts  Facts
		act    Act
		state  State
		reason string // a part of it
	}{
		{"no driver is wanted", Facts{Host: host()}, Nothing, Off, ""},
		{"no driver is wanted, and no gpu-driver", Facts{Silent: "x"}, Nothing, Off, ""},
		{"gpu-driver is away", Facts{Wanted: "580.1", Silent: "no socket"}, Nothing, Waiting, "no socket"},
		{"the wanted driver is loaded", Facts{Wanted: "580.1", Host: host(loaded)}, Nothing, Done, ""},
		{"by its digest", Facts{Wanted: "sha256:bb", Host: host(loaded)}, Nothing, Done, ""},
		{"only the next boot loads it", Facts{Wanted: "580.1", Host: host(func(h *Host) { h.Current = "bb" })}, TakeSlot, Waiting, ""},
		{"no folder", Facts{Wanted: "590.1", Host: host()}, Nothing, Blocked, "no driver 590.1: it has 570.1, 580.1"},
		{"no folder at all", Facts{Wanted: "590.1", Host: new(Host)}, Nothing, Blocked, "it has none"},
		{"two folders of the version", Facts{Wanted: "580.1", Host: host(func(h *Host) {
			h.Folders = append(h.Folders, Folder{Digest: "b0", Version: "580.1"})
		})}, Nothing, Blocked, "sha256:b0, sha256:bb"},
		{"the operator owns the driver", Facts{Wanted: "580.1", Host: host(), Refused: "the operator"}, Nothing, Blocked, "the operator"},
		{"packages own the driver", Facts{Wanted: "580.1", Host: host(func(h *Host) { h.Refusals = []string{"a", "b"} })}, Nothing,
			Blocked, "a; b"},
		{"no modules for the kernel", Facts{Wanted: "580.1", Host: host(func(h *Host) { h.Folders[1].Problem = "no modules" })}, Nothing,
			Blocked, "no modules"},
		{"no slot", Facts{Wanted: "580.1", Host: host(), NoSlot: "all slots are in use"}, TakeSlot, Waiting, "all slots"},
		{"released by somebody else", Facts{Wanted: "580.1", Host: host(), HasSlot: true, Released: true}, Nothing, Waiting, "quiesce"},
		{"with a slot", Facts{Wanted: "580.1", Host: host(), HasSlot: true}, Withhold, Changing, ""},
		{"pods are waited for", with(ready, func(f *Facts) { f.Users = []string{"b/q", "a/p"} }), Nothing, Waiting, "a/p, b/q"},
		{"many pods", with(ready, func(f *Facts) { f.Users = strings.Split("g f e d c b a", " ") }), Nothing, Waiting, "d, e and 2 more"},
		{"pods are evicted", with(ready, func(f *Facts) { f.Users, f.Pods = []string{"a/p"}, Evict }), End, Changing, "a/p"},
		{"pods are left alone", with(ready, func(f *Facts) { f.Users, f.Pods = []string{"a/p"}, None }), Swap, Changing, ""},
		{"pods are not known", with(ready, func(f *Facts) { f.Unknown = "no kubelet" }), Nothing, Waiting, "no kubelet"},
		{"no pods", ready, Swap, Changing, ""},
		{"copying", with(ready, func(f *Facts) { f.Host = host(in(Placing, 0)) }), Nothing, Changing, "copied"},
		{"unloading begins", with(ready, func(f *Facts) { f.Host = host(in(Unloading, 0)) }), Release, Changing, ""},
		{"users are waited for", with(ready, func(f *Facts) {
			f.Host, f.Released = host(in(Unloading, HoldersLimit-1, "service x")), true
		}), Nothing, Changing, "in use: service x"},
		{"users stay", with(ready, func(f *Facts) {
			f.Host, f.Released = host(in(Unloading, HoldersLimit, "service x")), true
		}), Leave, Changing, "still in use: service x"},
		{"loading", with(ready, func(f *Facts) { f.Host, f.Released = host(in(Loading, 0)), true }), Nothing, Changing, ""},
		{"the new driver is used", with(ready, func(f *Facts) { f.Host, f.Released = host(in(Unproven, 0)), true }), Use, Changing, ""},
		{"the new driver works", with(ready, func(f *Facts) { f.Host = host(in(Unproven, 0)) }), Confirm, Changing, ""},
		{"it does not work yet", with(ready, func(f *Facts) { f.Host, f.Problem = host(in(Unproven, ProofLimit-1)), "no GPU" }), Nothing,
			Changing, "no GPU"},
		{"it never works", with(ready, func(f *Facts) { f.Host, f.Problem = host(in(Unproven, ProofLimit)), "no GPU" }), Revert,
			Changing, "no GPU"},
		{"left to the next boot", with(ready, func(f *Facts) { f.Host, f.Released = host(in(NextBoot, 0)), true }), Use, Rebooted, "next boot"},
		{"waiting for the boot", with(ready, func(f *Facts) { f.Host = host(in(NextBoot, time.Hour)) }), Nothing, Rebooted, "next boot"},
		{"failed and released", with(ready, func(f *Facts) { f.Host, f.Released = host(in(Failed, 0)), true }), Use, Broken, ""},
		{"failed", with(ready, func(f *Facts) { f.Host = host(in(Failed, 0)) }), Nothing, Broken, ""},
		{"tried again", with(ready, func(f *Facts) { f.Host, f.IsNewSlot = host(in(Failed, 0)), true }), Forget, Broken, "again"},
		{"failed, another driver is wanted", with(ready, func(f *Facts) { f.Host, f.Wanted = host(in(Failed, 0)), "570.1" }), Forget,
			Changing, "another driver"},
		{"failed, none is wanted", with(ready, func(f *Facts) { f.Host, f.Wanted = host(in(Failed, 0)), "" }), Forget, Broken, ""},
		{"a phase of a newer gpu-driver", with(ready, func(f *Facts) { f.Host = host(in("dancing", 0)) }), Nothing, Waiting, "upgrade"},
		{"cancelled by a person", with(ready, func(f *Facts) { f.Released = true }), Use, Changing, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.facts.Now = now
			got := Next(test.facts)
			if got.Act != test.act || got.State != test.state || !strings.Contains(got.Reason, test.reason) {
				t.Errorf("%v, %s, %q; want %v, %s, %q", got.Act, got.State, got.Reason, test.act, test.state, test.reason)
			}
		})
	}
}

// A world is a node with gpu-driver, pods and a cluster that behave at random.
type world struct {
	random  *rand.Rand
	facts   Facts
	works   bool // the new driver does
	stays   bool // a user of the driver never ends
	slots   int  // how often the slot was taken
	trouble []string
}

// act does what a step says, and then lets some time pass.
func (w *world) act(s Step) {
	f, h := &w.facts, w.facts.Host
	bad := func(what string) { w.trouble = append(w.trouble, fmt.Sprintf("%s at %v", what, s.Act)) }
	if f.Host == nil { // nothing can be asked of it
		return
	}
	if f.Withheld = s.Withholds; s.Act == Withhold {
		f.Withheld = true
	}
	if !s.NeedsSlot {
		f.HasSlot = false
	}
	switch s.Act {
	case TakeSlot:
		if w.random.IntN(3) == 0 {
			f.HasSlot = true
			w.slots++
		}
	case End:
		if len(f.Users) > 0 && w.random.IntN(2) == 0 {
			f.Users = f.Users[1:]
		}
	case Swap:
		if !f.HasSlot || len(f.Users) > 0 && f.Pods != None || !f.Withheld {
			bad("a change began too early")
		}
		h.Change = &Change{To: s.Digest, Phase: Placing, Since: f.Now}
	case Release:
		f.Released = true
	case Leave:
		h.Change.Phase, h.Change.Since = NextBoot, f.Now
	case Use:
		f.Released = false
	case Confirm:
		if f.Problem != "" || h.Change.Phase != Unproven || h.LoadedDigest != h.Change.To {
			bad("a driver that does not work was confirmed")
		}
		h.Current, h.Change = h.LoadedDigest, nil
	case Revert:
		h.Change.Phase, h.Change.Reason = Reverting, s.Reason
	case Forget:
		if f.Released {
			bad("the driver is released for ever")
		}
		h.Change, f.IsNewSlot = nil, false
	}
}

// pass lets gpu-driver and the pods do something, or a process start again.
func (w *world) pass() {
	f, h := &w.facts, w.facts.Host
	f.Now = f.Now.Add(time.Duration(w.random.IntN(90)) * time.Second)
	if len(f.Users) > 0 && w.random.IntN(4) == 0 {
		f.Users = f.Users[1:]
	}
	if w.random.IntN(20) == 0 { // this process was killed: it offers GPUs until the next step
		f.Withheld = false
	}
	if h == nil || h.Change == nil || w.random.IntN(2) == 0 {
		return
	}
	c := h.Change
	set := func(p Phase) { c.Phase, c.Since = p, f.Now }
	load := func(digest, version string) { h.LoadedDigest, h.LoadedVersion = digest, version }
	switch c.Phase {
	case Placing:
		set(Unloading)
	case Unloading:
		switch c.Holders = nil; {
		case !f.Released:
			c.Holders = []string{"gpu-node-agent"}
		case w.stays:
			c.Holders = []string{"process 7"}
		default:
			set(Loading)
		}
	case NextBoot: // somebody restarts the node
		if w.random.IntN(5) == 0 {
			w.stays, f.Released = false, false
			set(Loading)
		}
	case Loading:
		load("bb", "580.1")
		set(Unproven)
		if f.Problem = "no GPU"; w.works && w.random.IntN(2) == 0 {
			f.Problem = ""
		}
	case Unproven:
		if w.works {
			f.Problem = ""
		}
	case Reverting:
		load("aa", "570.1")
		f.Problem = ""
		set(Failed)
	}
}

// TestWalks: from any order of events a node ends with the new driver, or failed with the old one and
// its slot, and never released or withheld for ever.
func TestWalks(t *testing.T) {
	ends := map[State]int{}
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 38))
		w := &world{random: random, works: random.IntN(3) > 0, stays: random.IntN(3) == 0}
		w.facts = Facts{Wanted: "580.1", Pods: Pods(random.IntN(3)), Host: host(), Now: now,
			Users: []string{"a/p", "a/q"}[:random.IntN(3)], NoSlot: "all slots are in use"}
		var s Step
		for range 600 {
			there := w.facts.Host
			if random.IntN(10) == 0 {
				w.facts.Host, w.facts.Silent = nil, "it restarts"
			}
			s = Next(w.facts)
			w.act(s)
			w.facts.Host = there
			if s.State == Done || s.State == Broken && s.Act == Nothing {
				break
			}
			w.pass()
		}
		ends[s.State]++
		h := w.facts.Host
		wanted, digest := Done, "bb"
		if !w.works {
			wanted, digest = Broken, "aa"
		}
		if s.State != wanted || h.LoadedDigest != digest || w.facts.Released || s.Withholds || w.facts.HasSlot != (wanted == Broken) ||
			w.slots != 1 || len(w.trouble) > 0 {
			t.Fatalf("seed %d ends %s (%s), want %s: driver %s, released %v, withheld %v, slot %v, taken %d times, trouble %v", seed,
				s.State, s.Reason, wanted, h.LoadedDigest, w.facts.Released, s.Withholds, w.facts.HasSlot, w.slots, w.trouble)
		}
	}
	if ends[Done] == 0 || ends[Broken] == 0 {
		t.Errorf("ends %v", ends)
	}
}

// TestWords: each act and policy has a name of its own.
func TestWords(t *testing.T) {
	var names []string
	for a := Nothing; a <= Forget; a++ {
		names = append(names, a.String())
	}
	for p := Wait; p <= None; p++ {
		names = append(names, p.String())
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != 14 {
		t.Errorf("names %v", names)
	}
}

func TestLine(t *testing.T) {
	for want, s := range map[string]*Status{
		"": nil,
		"changing, 40 % to 580.1 from 570.1 since 2026-11-28T12:00:00Z: modules are loaded": {State: Changing, Percent: 40,
			Wanted: "580.1", Loaded: "570.1", Since: now, Reason: "modules are loaded"},
		"done to 580.1": {State: Done, Wanted: "580.1", Loaded: "580.1", Percent: 100},
		"failed":        {State: Broken},
	} {
		if got := s.Line(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
