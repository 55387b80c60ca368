package driverchange_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
)

var now = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

// host is a node with the driver 570 loaded, and the folders of 570 and 580.
func host(changes ...func(*driverchange.Host)) *driverchange.Host {
	h := &driverchange.Host{LoadedVersion: "570.1", LoadedDigest: "aa", Current: "aa",
		Folders: []driverchange.Folder{{Digest: "aa", Version: "570.1"}, {Digest: "bb", Version: "580.1"}}}
	for _, change := range changes {
		change(h)
	}
	return h
}

func in(p driverchange.Phase, age time.Duration, holders ...string) func(*driverchange.Host) {
	return func(h *driverchange.Host) {
		h.Change = &driverchange.Change{To: "bb", Phase: p, Since: now.Add(-age), Holders: holders}
	}
}

func because(reason string) func(*driverchange.Host) {
	return func(h *driverchange.Host) { h.Change.Reason = reason }
}

// archives are those of the folder of 580.
func archives(digests ...string) func(*driverchange.Host) {
	return func(h *driverchange.Host) { h.Folders[1].Archives = digests }
}

func downloads(d driverchange.Download) func(*driverchange.Host) {
	return func(h *driverchange.Host) { h.Download = &d }
}

func TestNext(t *testing.T) {
	loaded := func(h *driverchange.Host) { h.LoadedVersion, h.LoadedDigest, h.Current = "580.1", "bb", "bb" }
	ready := driverchange.Facts{Wanted: "580.1", Host: host(), HasSlot: true, Withheld: true, Settled: true}
	with := func(f driverchange.Facts, change func(*driverchange.Facts)) driverchange.Facts { change(&f); return f }
	for _, test := range []struct {
		name   string
		facts  driverchange.Facts
		act    driverchange.Act
		state  driverchange.State
		reason string // a part of it
	}{
		{"no driver is wanted", driverchange.Facts{Host: host()}, driverchange.Nothing, driverchange.Off, ""},
		{"no driver is wanted, and no gpu-driver", driverchange.Facts{Silent: "x"}, driverchange.Nothing, driverchange.Off, ""},
		{"gpu-driver is away", driverchange.Facts{Wanted: "580.1", Silent: "no socket"}, driverchange.Nothing, driverchange.Waiting, "no socket"},
		{"gpu-driver is away in a change", driverchange.Facts{Wanted: "580.1", Silent: "x", Withheld: true,
			SilentFor: driverchange.SilenceLimit - 1}, driverchange.Nothing, driverchange.Waiting, "does not answer: x"},
		{"gpu-driver is away in a change that nobody wants", driverchange.Facts{Silent: "x", Withheld: true}, driverchange.Nothing,
			driverchange.Waiting, "does not answer: x"},
		{"gpu-driver is away for too long", driverchange.Facts{Wanted: "580.1", Silent: "x", Withheld: true,
			SilentFor: driverchange.SilenceLimit}, driverchange.Nothing, driverchange.Waiting, "for 10m0s, and GPUs are offered: x"},
		{"gpu-driver is away for too long, and the driver is released", driverchange.Facts{Wanted: "580.1", Silent: "x",
			Withheld: true, Released: true, SilentFor: driverchange.SilenceLimit}, driverchange.UseDriver, driverchange.Waiting, "the driver is used"},
		{"the wanted driver is loaded", driverchange.Facts{Wanted: "580.1", Host: host(loaded)}, driverchange.Nothing, driverchange.Done, ""},
		{"by its digest", driverchange.Facts{Wanted: "sha256:bb", Host: host(loaded)}, driverchange.Nothing, driverchange.Done, ""},
		{"only the next boot loads it", driverchange.Facts{Wanted: "580.1", Host: host(func(h *driverchange.Host) { h.Current = "bb" })}, driverchange.TakeSlot, driverchange.Waiting, ""},
		{"no folder", driverchange.Facts{Wanted: "590.1", Host: host()}, driverchange.Nothing, driverchange.Blocked, "no driver 590.1: it has 570.1, 580.1"},
		{"no folder at all", driverchange.Facts{Wanted: "590.1", Host: new(driverchange.Host)}, driverchange.Nothing, driverchange.Blocked, "it has none"},
		{"two folders of the version", driverchange.Facts{Wanted: "580.1", Host: host(func(h *driverchange.Host) {
			h.Folders = append(h.Folders, driverchange.Folder{Digest: "b0", Version: "580.1"})
		})}, driverchange.Nothing, driverchange.Blocked, "sha256:b0, sha256:bb"},
		{"the operator owns the driver", driverchange.Facts{Wanted: "580.1", Host: host(), Refused: "the operator"}, driverchange.Nothing, driverchange.Blocked, "the operator"},
		{"packages own the driver", driverchange.Facts{Wanted: "580.1", Host: host(func(h *driverchange.Host) { h.Refusals = []string{"a", "b"} })}, driverchange.Nothing,
			driverchange.Blocked, "a; b"},
		{"not downloaded", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host()}, driverchange.Fetch, driverchange.Waiting, "downloads the driver"},
		{"a folder of another archive", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(archives("a2"))}, driverchange.Fetch, driverchange.Waiting, "downloads"},
		{"being downloaded", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(downloads(driverchange.Download{Archive: "a1", Done: 1e6, Total: 2.5e6}))},
			driverchange.Fetch, driverchange.Waiting, "downloads the driver: 1.0 of 2.5 MB"},
		{"another archive is being downloaded", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(downloads(driverchange.Download{Archive: "a2", Problem: "b", IsFinal: true}))},
			driverchange.Fetch, driverchange.Waiting, "downloads the driver"},
		{"the server has an error", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(downloads(driverchange.Download{Archive: "a1", Problem: "503"}))},
			driverchange.Fetch, driverchange.Waiting, "the last try failed: 503"},
		{"the server has no such file", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(downloads(driverchange.Download{Archive: "a1", Problem: "404", IsFinal: true}))},
			driverchange.Fetch, driverchange.Blocked, "cannot be downloaded: 404"},
		{"nothing is downloaded where packages own the driver", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(func(h *driverchange.Host) { h.Refusals = []string{"a"} })},
			driverchange.Nothing, driverchange.Blocked, "a"},
		{"nor where the operator does", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(), Refused: "the operator"}, driverchange.Nothing, driverchange.Blocked, "the operator"},
		{"downloaded", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(archives("a0", "a1"))}, driverchange.TakeSlot, driverchange.Waiting, ""},
		{"downloaded, and another folder has the version", driverchange.Facts{Wanted: "580.1", Archive: "a1", Host: host(archives("a1"), func(h *driverchange.Host) {
			h.Folders = append(h.Folders, driverchange.Folder{Digest: "b0", Version: "580.1"})
		})}, driverchange.TakeSlot, driverchange.Waiting, ""},
		{"downloaded, by the digest of the folder", driverchange.Facts{Wanted: "sha256:bb", Archive: "a1", Host: host(archives("a1"), loaded)}, driverchange.Nothing, driverchange.Done, ""},
		{"the archive has another version", driverchange.Facts{Wanted: "590.1", Archive: "a1", Host: host(archives("a1"))}, driverchange.Nothing, driverchange.Blocked,
			"the archive with driver.sha256 has driver 580.1 (sha256:bb), and driver.version is 590.1: correct one of them"},
		{"failed, another archive is wanted", with(ready, func(f *driverchange.Facts) { f.Host, f.Archive = host(in(driverchange.PhaseFailed, 0)), "a1" }), driverchange.Forget,
			driverchange.Changing, "another driver"},
		{"no modules for the kernel", driverchange.Facts{Wanted: "580.1", Host: host(func(h *driverchange.Host) { h.Folders[1].Problem = "no modules" })}, driverchange.Nothing,
			driverchange.Blocked, "no modules"},
		{"no slot", driverchange.Facts{Wanted: "580.1", Host: host(), NoSlot: "all slots are in use"}, driverchange.TakeSlot, driverchange.Waiting, "all slots"},
		{"released by somebody else", driverchange.Facts{Wanted: "580.1", Host: host(), HasSlot: true, ReleasedByOthers: true},
			driverchange.Nothing, driverchange.Waiting, "the change waits: the driver is released by quiesce"},
		{"a person releases it while pods are waited for", with(ready, func(f *driverchange.Facts) {
			f.Users, f.ReleasedByOthers = []string{"a/p"}, true
		}), driverchange.Nothing, driverchange.Waiting, "quiesce"},
		{"a person releases it while modules are unloaded", with(ready, func(f *driverchange.Facts) {
			f.Host, f.ReleasedByOthers = host(in(driverchange.PhaseUnloading, 0)), true
		}), driverchange.Nothing, driverchange.Changing, ""},
		{"a person has it released when it is to be tried", with(ready, func(f *driverchange.Facts) {
			f.Host, f.ReleasedByOthers = host(in(driverchange.PhaseUnproven, time.Hour)), true
		}), driverchange.Nothing, driverchange.Waiting, "is not tried yet: the driver is released by quiesce"},
		{"with a slot", driverchange.Facts{Wanted: "580.1", Host: host(), HasSlot: true}, driverchange.Withhold, driverchange.Changing, ""},
		{"pods are waited for", with(ready, func(f *driverchange.Facts) { f.Users = []string{"b/q", "a/p"} }), driverchange.Nothing, driverchange.Waiting, "a/p, b/q"},
		{"many pods", with(ready, func(f *driverchange.Facts) { f.Users = strings.Split("g f e d c b a", " ") }), driverchange.Nothing, driverchange.Waiting, "d, e and 2 more"},
		{"pods are evicted", with(ready, func(f *driverchange.Facts) { f.Users, f.Pods = []string{"a/p"}, driverchange.Evict }), driverchange.EvictPods, driverchange.Changing, "a/p"},
		{"pods are left alone", with(ready, func(f *driverchange.Facts) { f.Users, f.Pods = []string{"a/p"}, driverchange.None }), driverchange.Swap, driverchange.Changing, ""},
		{"pods are not known", with(ready, func(f *driverchange.Facts) { f.Unknown = "no kubelet" }), driverchange.Nothing, driverchange.Waiting, "no kubelet"},
		{"no pods", ready, driverchange.Swap, driverchange.Changing, ""},
		{"copying", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhasePlacing, 0)) }), driverchange.Nothing, driverchange.Changing, "copied"},
		{"unloading begins", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhaseUnloading, 0)) }), driverchange.Release, driverchange.Changing, ""},
		{"users are waited for", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Released = host(in(driverchange.PhaseUnloading, driverchange.HoldersLimit-1, "service x")), true
		}), driverchange.Nothing, driverchange.Changing, "in use: service x"},
		{"users stay", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Released = host(in(driverchange.PhaseUnloading, driverchange.HoldersLimit, "service x")), true
		}), driverchange.ChangeAtNextBoot, driverchange.Changing, "still in use: service x"},
		{"users are not known", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Released = host(in(driverchange.PhaseUnloading, driverchange.HoldersLimit-1), because("of x")), true
		}), driverchange.Nothing, driverchange.Changing, "of x"},
		{"users stay unknown", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Released = host(in(driverchange.PhaseUnloading, driverchange.HoldersLimit), because("of x")), true
		}), driverchange.ChangeAtNextBoot, driverchange.Changing, "is not unloaded: of x"},
		{"loading", with(ready, func(f *driverchange.Facts) { f.Host, f.Released = host(in(driverchange.PhaseLoading, 0)), true }), driverchange.Nothing, driverchange.Changing, ""},
		{"the new driver is used", with(ready, func(f *driverchange.Facts) { f.Host, f.Released = host(in(driverchange.PhaseUnproven, 0)), true }), driverchange.UseDriver, driverchange.Changing, ""},
		{"the new driver works", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhaseUnproven, 0)) }), driverchange.Confirm, driverchange.Changing, ""},
		{"it does not work yet", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Problem = host(in(driverchange.PhaseUnproven, driverchange.ProofLimit-1)), "no GPU"
		}), driverchange.Nothing,
			driverchange.Changing, "no GPU"},
		{"it never works", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Problem, f.Tried = host(in(driverchange.PhaseUnproven, driverchange.ProofLimit)), "no GPU", driverchange.MinTrial
		}), driverchange.Revert, driverchange.Changing, "no GPU"},
		{"a new process has not tried it for long", with(ready, func(f *driverchange.Facts) {
			f.Host, f.Problem, f.Tried = host(in(driverchange.PhaseUnproven, time.Hour)), "no GPU", driverchange.MinTrial-1
		}), driverchange.Nothing, driverchange.Changing, "no GPU"},
		{"the new driver is released", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhaseReverting, 0)) }), driverchange.Release,
			driverchange.Changing, ""},
		{"the old driver is loaded again", with(ready, func(f *driverchange.Facts) { f.Host, f.Released = host(in(driverchange.PhaseReverting, 0)), true }),
			driverchange.Nothing, driverchange.Changing, ""},
		{"left to the next boot", with(ready, func(f *driverchange.Facts) { f.Host, f.Released = host(in(driverchange.PhaseNextBoot, 0)), true }), driverchange.UseDriver, driverchange.AwaitsBoot, "next boot"},
		{"waiting for the boot", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhaseNextBoot, time.Hour)) }), driverchange.Nothing, driverchange.AwaitsBoot, "next boot"},
		{"failed and released", with(ready, func(f *driverchange.Facts) { f.Host, f.Released = host(in(driverchange.PhaseFailed, 0)), true }), driverchange.UseDriver, driverchange.Failed, ""},
		{"failed", with(ready, func(f *driverchange.Facts) { f.Host = host(in(driverchange.PhaseFailed, 0)) }), driverchange.Nothing, driverchange.Failed, ""},
		{"tried again", with(ready, func(f *driverchange.Facts) {
			f.Host, f.SlotSince = host(in(driverchange.PhaseFailed, time.Minute)), now
		}), driverchange.Forget, driverchange.Failed, "again"},
		{"failed, another driver is wanted", with(ready, func(f *driverchange.Facts) { f.Host, f.Wanted = host(in(driverchange.PhaseFailed, 0)), "570.1" }), driverchange.Forget,
			driverchange.Changing, "another driver"},
		{"failed, none is wanted", with(ready, func(f *driverchange.Facts) { f.Host, f.Wanted = host(in(driverchange.PhaseFailed, 0)), "" }), driverchange.Forget, driverchange.Failed, ""},
		{"a phase of a newer gpu-driver", with(ready, func(f *driverchange.Facts) { f.Host = host(in("dancing", 0)) }), driverchange.Nothing, driverchange.Waiting, "upgrade"},
		{"cancelled by a person", with(ready, func(f *driverchange.Facts) { f.Released = true }), driverchange.UseDriver, driverchange.Changing, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.facts.Now = now
			got := driverchange.Next(test.facts)
			if got.Act != test.act || got.State != test.state || !strings.Contains(got.Reason, test.reason) {
				t.Errorf("%v, %s, %q; want %v, %s, %q", got.Act, got.State, got.Reason, test.act, test.state, test.reason)
			}
		})
	}
}

// TestWithheldInSilence: which GPUs pods get while gpu-driver does not answer.
func TestWithheldInSilence(t *testing.T) {
	for _, test := range []struct {
		name  string
		facts driverchange.Facts
		want  bool
	}{
		{"without a change", driverchange.Facts{Wanted: "580.1"}, false},
		{"in a change", driverchange.Facts{Wanted: "580.1", Withheld: true}, true},
		{"in a change that nobody wants", driverchange.Facts{Withheld: true}, true},
		{"for too long", driverchange.Facts{Wanted: "580.1", Withheld: true, SilentFor: driverchange.SilenceLimit}, false},
		{"for too long, and the driver is still released", driverchange.Facts{Wanted: "580.1", Withheld: true, Released: true,
			SilentFor: driverchange.SilenceLimit}, true},
	} {
		test.facts.Silent = "no socket"
		if got := driverchange.Next(test.facts).Withholds; got != test.want {
			t.Errorf("%s: withheld %v", test.name, got)
		}
	}
}

// A world is a node with gpu-driver, pods and a cluster that behave at random.
type world struct {
	random  *rand.Rand
	facts   driverchange.Facts
	works   bool // the new driver does
	stays   bool // a user of the driver never ends
	slots   int  // how often the slot was taken
	trouble []string
}

// act does what a step says, and then lets some time pass.
func (w *world) act(s driverchange.Step) {
	f, h := &w.facts, w.facts.Host
	bad := func(what string) { w.trouble = append(w.trouble, fmt.Sprintf("%s at %v", what, s.Act)) }
	if f.Host == nil { // nothing can be asked of it
		return
	}
	if f.Withheld, f.Settled = s.Withholds, f.Settled && s.Withholds; s.Act == driverchange.Withhold {
		f.Withheld, f.Settled = true, true
	}
	if !s.NeedsSlot {
		f.HasSlot = false
	}
	switch s.Act {
	case driverchange.TakeSlot:
		if w.random.IntN(3) == 0 {
			f.HasSlot = true
			w.slots++
		}
	case driverchange.EvictPods:
		if len(f.Users) > 0 && w.random.IntN(2) == 0 {
			f.Users = f.Users[1:]
		}
	case driverchange.Swap:
		if !f.HasSlot || len(f.Users) > 0 && f.Pods != driverchange.None || !f.Settled {
			bad("a change began too early")
		}
		h.Change = &driverchange.Change{To: s.Digest, Phase: driverchange.PhasePlacing, Since: f.Now}
	case driverchange.Release:
		f.Released = true
	case driverchange.ChangeAtNextBoot:
		h.Change.Phase, h.Change.Since = driverchange.PhaseNextBoot, f.Now
	case driverchange.UseDriver:
		f.Released = false
	case driverchange.Confirm:
		if f.Problem != "" || h.Change.Phase != driverchange.PhaseUnproven || h.LoadedDigest != h.Change.To {
			bad("a driver that does not work was confirmed")
		}
		h.Current, h.Change = h.LoadedDigest, nil
	case driverchange.Revert:
		h.Change.Phase, h.Change.Reason = driverchange.PhaseReverting, s.Reason
	case driverchange.Forget:
		if f.Released {
			bad("the driver is released for ever")
		}
		h.Change = nil
	default:
	}
}

// pass lets gpu-driver and the pods do something, or a process start again.
func (w *world) pass() {
	f, h := &w.facts, w.facts.Host
	f.Now = f.Now.Add(time.Duration(w.random.IntN(90)) * time.Second)
	if len(f.Users) > 0 && w.random.IntN(4) == 0 {
		f.Users = f.Users[1:]
	}
	if w.random.IntN(20) == 0 { // this process was killed: the next one withholds nothing if gpu-driver has not begun
		f.Withheld, f.Settled = false, false
	}
	if h == nil || h.Change == nil || w.random.IntN(2) == 0 {
		return
	}
	c := h.Change
	set := func(p driverchange.Phase) { c.Phase, c.Since = p, f.Now }
	load := func(digest, version string) { h.LoadedDigest, h.LoadedVersion = digest, version }
	switch c.Phase {
	case driverchange.PhasePlacing:
		set(driverchange.PhaseUnloading)
	case driverchange.PhaseUnloading:
		switch c.Holders = nil; {
		case !f.Released:
			c.Holders = []string{"gpu-node-agent"}
		case w.stays:
			c.Holders = []string{"process 7"}
		default:
			set(driverchange.PhaseLoading)
		}
	case driverchange.PhaseNextBoot: // somebody restarts the node
		if w.random.IntN(5) == 0 {
			w.stays, f.Released = false, false
			set(driverchange.PhaseLoading)
		}
	case driverchange.PhaseLoading:
		load("bb", "580.1")
		set(driverchange.PhaseUnproven)
		if f.Problem = "no GPU"; w.works && w.random.IntN(2) == 0 {
			f.Problem = ""
		}
	case driverchange.PhaseUnproven:
		if w.works {
			f.Problem = ""
		}
	case driverchange.PhaseReverting:
		if !f.Released { // gpu-driver waits for this program
			return
		}
		load("aa", "570.1")
		f.Problem = ""
		set(driverchange.PhaseFailed)
	default:
	}
}

// TestWalks: from any order of events a node ends with the new driver, or failed with the old one and
// its slot, and never released or withheld for ever.
func TestWalks(t *testing.T) {
	ends := map[driverchange.State]int{}
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 38))
		w := &world{random: random, works: random.IntN(3) > 0, stays: random.IntN(3) == 0}
		w.facts = driverchange.Facts{Wanted: "580.1", Pods: driverchange.Pods(random.IntN(3)), Host: host(), Now: now,
			Users: []string{"a/p", "a/q"}[:random.IntN(3)], NoSlot: "all slots are in use", Tried: driverchange.MinTrial}
		var s driverchange.Step
		for range 600 {
			there := w.facts.Host
			if random.IntN(10) == 0 {
				w.facts.Host, w.facts.Silent = nil, "it restarts"
			}
			s = driverchange.Next(w.facts)
			w.act(s)
			w.facts.Host = there
			if s.State == driverchange.Done || s.State == driverchange.Failed && s.Act == driverchange.Nothing {
				break
			}
			w.pass()
		}
		ends[s.State]++
		h := w.facts.Host
		wanted, digest := driverchange.Done, "bb"
		if !w.works {
			wanted, digest = driverchange.Failed, "aa"
		}
		if s.State != wanted || h.LoadedDigest != digest || w.facts.Released || s.Withholds || w.facts.HasSlot != (wanted == driverchange.Failed) ||
			w.slots != 1 || len(w.trouble) > 0 {
			t.Fatalf("seed %d ends %s (%s), want %s: driver %s, released %v, withheld %v, slot %v, taken %d times, trouble %v", seed,
				s.State, s.Reason, wanted, h.LoadedDigest, w.facts.Released, s.Withholds, w.facts.HasSlot, w.slots, w.trouble)
		}
	}
	if ends[driverchange.Done] == 0 || ends[driverchange.Failed] == 0 {
		t.Errorf("ends %v", ends)
	}
}

// TestWords: each act and policy has a name of its own.
func TestWords(t *testing.T) {
	var names []string
	for a := driverchange.Nothing; a <= driverchange.Forget; a++ {
		names = append(names, a.String())
	}
	for p := driverchange.Wait; p <= driverchange.None; p++ {
		names = append(names, p.String())
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != 15 {
		t.Errorf("names %v", names)
	}
}

func TestLine(t *testing.T) {
	for want, s := range map[string]*driverchange.Status{
		"": nil,
		"changing, 40 % to 580.1 from 570.1 since 2026-11-28T12:00:00Z: modules are loaded": {State: driverchange.Changing, Percent: 40,
			Wanted: "580.1", Loaded: "570.1", Since: now, Reason: "modules are loaded"},
		"done to 580.1":                    {State: driverchange.Done, Wanted: "580.1", Loaded: "580.1", Percent: 100},
		"done to sha256:0a, version 580.1": {State: driverchange.Done, Wanted: "sha256:0a", Loaded: "580.1", Percent: 100},
		"failed":                           {State: driverchange.Failed},
		"waiting, 7 % to 580.1: gpu-driver downloads the driver": {State: driverchange.Waiting, Wanted: "580.1", Percent: 7,
			Reason: "gpu-driver downloads the driver"},
	} {
		if got := s.Line(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
