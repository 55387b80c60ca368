package slots_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
)

// now is a Saturday.
var now = time.Date(2026, 11, 28, 23, 30, 0, 0, time.UTC)

func window(t *testing.T, text string) slots.Window {
	t.Helper()
	w, err := slots.ParseWindow(text)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestTake(t *testing.T) {
	held := func(number int, node string, with ...func(*slots.Slot)) slots.Slot {
		s := slots.Slot{Name: slots.Name(number), Node: node, State: slots.Working, Wave: slots.LastWave}
		for _, change := range with {
			change(&s)
		}
		return s
	}
	failed := func(s *slots.Slot) { s.State = slots.Failed }
	first := func(s *slots.Slot) { s.Wave = 0 }
	rack := func(name string) func(*slots.Slot) { return func(s *slots.Slot) { s.Domain = name } }
	node := slots.Request{Node: "n", Wave: slots.LastWave, Domain: "r1"}
	two := slots.Rules{Slots: 2}
	for _, test := range []struct {
		name    string
		rules   slots.Rules
		cluster slots.Cluster
		take    string
		reason  string // a part of it
	}{
		{"nobody changes", two, slots.Cluster{}, "gpu-change-0", ""},
		{"one other changes", two, slots.Cluster{Slots: []slots.Slot{held(0, "a")}}, "gpu-change-1", ""},
		{"the first slot is free again", two, slots.Cluster{Slots: []slots.Slot{held(1, "a")}}, "gpu-change-0", ""},
		{"all are in use", two, slots.Cluster{Slots: []slots.Slot{held(0, "b"), held(1, "a", failed)}}, "",
			"failed: a; changing: b"},
		{"all have failed", two, slots.Cluster{Slots: []slots.Slot{held(0, "b", failed), held(1, "a", failed)}}, "",
			"failed: a, b; repair the nodes, or try again with kubectl gpu rollout retry NODE"},
		{"there were more slots", two, slots.Cluster{Slots: []slots.Slot{held(4, "b"), held(5, "a")}}, "",
			"changing: a, b"},
		{"an earlier Node of the name has the only slot", slots.Rules{Slots: 1},
			slots.Cluster{Slots: []slots.Slot{held(0, "n")}}, "",
			"all slots of the cluster are in use; one belongs to an earlier Node of this name"},
		{"no slots", slots.Rules{}, slots.Cluster{}, "", "no node may change: rollout.slots is 0"},
		{"paused", two, slots.Cluster{Paused: true}, "", "are paused; continue"},
		{"paused with a reason", two, slots.Cluster{Paused: true, Reason: "cold"}, "", "are paused: cold; continue"},
		{"the same rack", two, slots.Cluster{Slots: []slots.Slot{held(0, "a", rack("r1"))}}, "",
			"node a in the same topology domain r1 is changing"},
		{"a failed node of the same rack", two,
			slots.Cluster{Slots: []slots.Slot{held(0, "a", rack("r1"), failed)}}, "", "has failed to change"},
		{"another rack", two, slots.Cluster{Slots: []slots.Slot{held(0, "a", rack("r2"))}}, "gpu-change-1", ""},
		{"a node without a rack", two, slots.Cluster{Slots: []slots.Slot{held(0, "a")}}, "gpu-change-1", ""},
		{"an earlier wave changes", two, slots.Cluster{Slots: []slots.Slot{held(0, "a", first)}}, "",
			"node a of an earlier wave is changing"},
		{"an earlier wave is to change", two, slots.Cluster{Unfinished: []string{"c", "b"}}, "", "not finished: b, c"},
		{"many are to change", two, slots.Cluster{Unfinished: strings.Split("g f e d c b a", " ")}, "",
			"a, b, c, d, e and 2 more"},
		{"an earlier wave has just changed", slots.Rules{Slots: 2, Soak: time.Hour},
			slots.Cluster{WellSince: now.Add(-time.Hour + 1)}, "", "well for 1h0m0s"},
		{"an earlier wave is well", slots.Rules{Slots: 2, Soak: time.Hour},
			slots.Cluster{WellSince: now.Add(-time.Hour)}, "gpu-change-0", ""},
		{"in a window", slots.Rules{Slots: 1, Windows: []slots.Window{window(t, "Sun 10:00-11:00"),
			window(t, "Sat 22:00-04:00")}}, slots.Cluster{}, "gpu-change-0", ""},
		{"outside of the windows", slots.Rules{Slots: 1, Windows: []slots.Window{window(t, "Sun 10:00-11:00")}},
			slots.Cluster{}, "", "maintenance windows: Sun 10:00-11:00 UTC"},
	} {
		t.Run(test.name, func(t *testing.T) {
			take, reason := slots.Take(node, test.rules, test.cluster, now)
			if take != test.take || (reason == "") != (test.reason == "") || !strings.Contains(reason, test.reason) {
				t.Errorf("takes %q, %q; want %q, %q", take, reason, test.take, test.reason)
			}
		})
	}
}

// The first wave waits for nobody, however long the nodes have been well.
func TestFirstWave(t *testing.T) {
	take, reason := slots.Take(slots.Request{Node: "n"}, slots.Rules{Slots: 1, Soak: time.Hour},
		slots.Cluster{WellSince: now}, now)
	if take != "gpu-change-0" {
		t.Errorf("takes %q, %q", take, reason)
	}
}

// A node that compares its new slot with the others does not count its own.
func TestOwnSlotDoesNotCount(t *testing.T) {
	own := slots.Slot{Name: slots.Name(0), Node: "n", State: slots.Checking, Domain: "r1"}
	request := slots.Request{Node: "n", Domain: "r1"}
	for _, test := range []struct {
		others []slots.Slot
		want   string
	}{
		{nil, ""},
		{[]slots.Slot{{Name: slots.Name(1), Node: "a", State: slots.Checking, Domain: "r1"}}, "is changing"},
		{[]slots.Slot{{Name: slots.Name(1), Node: "a", State: slots.Checking, Domain: "r2"}}, ""},
		{[]slots.Slot{{Name: slots.Name(1), Node: "a", State: slots.Checking}, {Name: slots.Name(7), Node: "b"}},
			"all slots"},
	} {
		reason := slots.Refusal(request, slots.Rules{Slots: 2}, slots.Cluster{Slots: append(test.others, own)}, now)
		if (reason == "") != (test.want == "") || !strings.Contains(reason, test.want) {
			t.Errorf("beside %v: %q, want %q", test.others, reason, test.want)
		}
	}
}

func TestWindows(t *testing.T) {
	at := func(day, hour, minute int) time.Time { // 23 November 2026 is a Monday
		return time.Date(2026, 11, day, hour, minute, 0, 0, time.UTC)
	}
	for _, test := range []struct {
		window string
		open   []time.Time
		closed []time.Time
	}{
		{"22:00-04:00", []time.Time{at(23, 22, 0), at(24, 3, 59), at(28, 0, 0)},
			[]time.Time{at(23, 21, 59), at(24, 4, 0)}},
		{"Sat 22:00-04:00", []time.Time{at(28, 22, 0), at(29, 3, 59)},
			[]time.Time{at(28, 3, 0), at(29, 22, 0), at(29, 4, 0)}},
		{"Mon-Fri 01:00-05:00", []time.Time{at(23, 1, 0), at(27, 4, 59)}, []time.Time{at(28, 1, 0), at(29, 2, 0)}},
		{"Sat-Mon 01:00-05:00", []time.Time{at(28, 1, 0), at(29, 1, 0), at(23, 1, 0)}, []time.Time{at(24, 1, 0)}},
		{"Sun 00:00-00:00", []time.Time{at(29, 0, 0), at(29, 23, 59)}, []time.Time{at(28, 23, 59), at(30, 0, 0)}},
	} {
		w := window(t, test.window)
		for _, moment := range test.open {
			if local := moment.In(time.FixedZone("", 3600*5)); !w.Has(moment) || !w.Has(local) {
				t.Errorf("%s is not open at %v", w, moment)
			}
		}
		for _, moment := range test.closed {
			if w.Has(moment) {
				t.Errorf("%s is open at %v", w, moment)
			}
		}
	}
	for _, text := range []string{"", "Sat", "Sat 22:00", "sat 22:00-04:00", "Sat 22:00-24:00", "Sat  22:00-04:00",
		"Sat,  1:00-2:00", "22-04", "Mo-Fr 01:00-05:00", "Tue,Thu 01:00-05:00"} {
		if _, err := slots.ParseWindow(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
