package nodeevents_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

var start = time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)

const plenty = 64

// gpu is a device in a state: "Healthy", "Unhealthy xid 79 reboot", "Lost lost reconnect", "Unknown
// silence human".
func gpu(index int, state string) status.Device {
	d := status.Device{Index: fmt.Sprint(index), UUID: fmt.Sprintf("GPU-%d", index), State: state}
	words := strings.Fields(state)
	d.State = words[0]
	if len(words) == 1 {
		return d
	}
	f := status.Fault{Source: words[1], Remedy: words[len(words)-1]}
	if f.Source == "xid" {
		_, _ = fmt.Sscan(words[2], &f.XID)
	}
	d.Faults, d.XID, d.Remedy, d.Reason = []status.Fault{f}, f.XID, f.Remedy, "found by "+strings.Join(words[1:], " ")
	return d
}

func mig(g status.Device, index int, state string) status.Device {
	d := gpu(index, state)
	d.Index, d.UUID, d.GPU = fmt.Sprintf("%s:%d", g.Index, index), fmt.Sprintf("MIG-%s-%d", g.Index, index), g.UUID
	return d
}

// node is the status of a node right after a successful scan.
func node(devices ...status.Device) status.Status {
	return status.Status{Version: "v1", Driver: "580.1", Looked: start, GPUs: devices, ConfigFile: "/c.yaml"}
}

func with(s status.Status, change func(*status.Status)) status.Status {
	change(&s)
	return s
}

// reasonsOf returns the reasons of the Events, with devices and XID.
func reasonsOf(b nodeevents.Batch) []string {
	var all []string
	for _, e := range b.Events {
		text := string(e.Reason)
		if len(e.Devices) > 0 {
			text += " " + strings.Join(e.Devices, ",")
		}
		if e.XID != 0 {
			text += fmt.Sprint(" XID ", e.XID)
		}
		all = append(all, text)
	}
	return all
}

// TestTransitions covers every transition and its reverse, with or without an Event.
func TestTransitions(t *testing.T) {
	stale := func(s *status.Status) { s.Stale = "no driver" }
	quiet := func(s *status.Status) { s.Quiet = true; s.Stale = "released" }
	refused := func(s *status.Status) { s.ConfigError = "line 3" }
	leftOut := func(s *status.Status) { s.LeftOut = []string{"GPU 1: no UUID"} }
	whole := gpu(0, "Healthy")
	for name, tt := range map[string]struct {
		before, after status.Status
		want, back    []string
	}{
		"Unhealthy": {
			node(gpu(0, "Healthy")), node(gpu(0, "Unhealthy hang reset")), []string{"GPUUnhealthy GPU-0"},
			[]string{"GPURecovered GPU-0"},
		},
		"Unhealthy by an XID": {
			node(gpu(0, "Healthy")), node(gpu(0, "Unhealthy xid 79 reboot")),
			[]string{"GPUUnhealthy GPU-0 XID 79"}, []string{"GPURecovered GPU-0 XID 79"},
		},
		"Lost": {node(gpu(0, "Healthy")), node(gpu(0, "Lost lost reconnect")), []string{"GPULost GPU-0"},
			[]string{"GPURecovered GPU-0"}},
		"needs an operator": {
			node(gpu(0, "Healthy")), node(gpu(0, "Unhealthy flapping human")),
			[]string{"GPUNeedsOperator GPU-0"}, []string{"GPURecovered GPU-0"},
		},
		"needs hardware": {
			node(gpu(0, "Unhealthy xid 48 reset")), node(gpu(0, "Unhealthy memory hardware")),
			[]string{"GPUNeedsOperator GPU-0"}, []string{"GPUXid GPU-0 XID 48"},
		},
		"Unhealthy, then Lost": {
			node(gpu(0, "Unhealthy hang reset")), node(gpu(0, "Lost lost reconnect")),
			[]string{"GPULost GPU-0"}, []string{"GPUUnhealthy GPU-0"},
		},
		"Lost, another remedy": {
			node(gpu(0, "Lost lost reconnect")), node(gpu(0, "Lost lost reboot")), []string{"GPULost GPU-0"},
			[]string{"GPULost GPU-0"},
		},
		"another XID": {
			node(gpu(0, "Unhealthy xid 48 reset")), node(gpu(0, "Unhealthy xid 79 reboot")),
			[]string{"GPUXid GPU-0 XID 79"}, []string{"GPUXid GPU-0 XID 48"},
		},
		"another remedy": {
			node(gpu(0, "Unhealthy recovery-action reset")), node(gpu(0, "Unhealthy recovery-action reboot")),
			[]string{"GPUUnhealthy GPU-0"}, []string{"GPUUnhealthy GPU-0"},
		},
		"an XID, then another source": {
			node(gpu(0, "Unhealthy xid 79 reboot")), node(gpu(0, "Unhealthy hang reboot")), nil, []string{"GPUXid GPU-0 XID 79"},
		},
		"another source, the same remedy": {
			node(gpu(0, "Unhealthy hang reset")), node(gpu(0, "Unhealthy contact reset")), nil, nil,
		},
		"an XID that changes no verdict": {
			node(gpu(0, "Healthy")), with(node(gpu(0, "Healthy")),
				func(s *status.Status) { s.GPUs[0].Events = []string{"XID 31 × 1"} }), nil, nil,
		},
		"Suspect": {node(gpu(0, "Healthy")), node(gpu(0, "Suspect xid 154 reset")), nil, nil},
		"Unknown": {node(gpu(0, "Healthy")), node(gpu(0, "Unknown contact reset")), nil, nil},
		"removed": {
			node(gpu(0, "Healthy"), gpu(1, "Healthy")), node(gpu(0,
				"Healthy")), []string{"GPURemoved GPU-1"}, []string{"GPURecovered GPU-1"},
		},
		"added": {node(gpu(0, "Healthy")), node(gpu(0, "Healthy"), gpu(1, "Healthy")), nil,
			[]string{"GPURemoved GPU-1"}},
		"MIG device": {node(whole, mig(whole, 0, "Healthy")), node(whole, mig(whole, 0, "Unhealthy xid 95 reset")),
			[]string{"GPUUnhealthy MIG-0-0 XID 95"}, []string{"GPURecovered MIG-0-0 XID 95"}},
		"MIG device removed": {node(whole, mig(whole, 0, "Healthy")), node(whole), nil, nil},
		"MIG devices of a bad GPU": {
			node(whole, mig(whole, 0, "Healthy")), node(gpu(0, "Unhealthy hang reset"), mig(whole, 0, "Unhealthy hang reset")),
			[]string{"GPUUnhealthy GPU-0"}, []string{"GPURecovered GPU-0"},
		},
		"driver away": {node(whole), with(node(gpu(0, "Unknown silence none")), stale), []string{"DriverNotReady"},
			[]string{"DriverReady"}},
		"driver released": {node(whole), with(node(whole), quiet), []string{"DriverReleased"}, []string{"DriverReady"}},
		"released while away": {
			with(node(whole), stale), with(node(whole), quiet), []string{"DriverReleased"}, []string{"DriverNotReady"},
		},
		"driver away, no GPU": {node(), with(node(), stale), nil, nil},
		"configuration": {node(whole), with(node(whole), refused), []string{"ConfigRejected"},
			[]string{"ConfigApplied"}},
		"left out": {node(whole), with(node(whole), leftOut), []string{"ResourceLeftOut"}, nil},
		"left out, as it is lost": {
			node(gpu(0, "Healthy"), gpu(1, "Healthy")), with(node(gpu(0, "Healthy"), gpu(1, "Lost lost reconnect")), leftOut),
			[]string{"GPULost GPU-1"}, []string{"GPURecovered GPU-1"},
		},
		"first look not ended": {
			node(whole), with(node(gpu(0, "Unhealthy hang reset")), func(s *status.Status) { s.Looked = time.Time{} }), nil, nil,
		},
		"no status": {node(whole), status.Status{}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var h nodeevents.History
			h.Next(tt.before, start, plenty)
			if diff := cmp.Diff(tt.want, reasonsOf(h.Next(tt.after, start, plenty))); diff != "" {
				t.Errorf("forth (-want +got):\n%s", diff)
			}
			if again := h.Next(tt.after, start, plenty); len(again.Events) != 0 {
				t.Errorf("told twice: %v", reasonsOf(again))
			}
			back := reasonsOf(h.Next(tt.before, start, plenty))
			if diff := cmp.Diff(tt.back, back); diff != "" {
				t.Errorf("back (-want +got):\n%s", diff)
			}
		})
	}
}

// TestStatesBetween: intermediate states do not hide the origin of a GPU.
func TestStatesBetween(t *testing.T) {
	var h nodeevents.History
	bad := gpu(0, "Unhealthy xid 79 reboot")
	h.Next(node(gpu(0, "Healthy")), start, plenty)
	h.Next(node(bad), start, plenty)
	h.Next(with(node(gpu(0, "Unknown silence none")), func(s *status.Status) { s.Stale = "away" }), start, plenty)
	if got := reasonsOf(h.Next(node(bad), start, plenty)); !cmp.Equal(got, []string{"DriverReady"}) {
		t.Errorf("the same fault after the driver was away: %v", got)
	}
	h.Next(node(gpu(0, "Suspect xid 79 reboot")), start, plenty)
	if got := reasonsOf(h.Next(node(gpu(0, "Healthy")), start, plenty)); !cmp.Equal(got,
		[]string{"GPURecovered GPU-0 XID 79"}) {
		t.Errorf("recovered by way of Suspect: %v", got)
	}
}

// TestThreeGPUs: three GPUs in different states each have an Event and a key, even with the same
// reason.
func TestThreeGPUs(t *testing.T) {
	var h nodeevents.History
	h.Next(node(gpu(0, "Healthy"), gpu(1, "Healthy"), gpu(2, "Healthy")), start, plenty)
	b := h.Next(node(gpu(0, "Unhealthy xid 79 reboot"), gpu(1, "Unhealthy xid 79 reboot"), gpu(2, "Lost lost reconnect")),
		start, plenty)
	want := []string{"GPUUnhealthy GPU-0 XID 79", "GPUUnhealthy GPU-1 XID 79", "GPULost GPU-2"}
	if diff := cmp.Diff(want, reasonsOf(b)); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	if b.Events[0].Key() == b.Events[1].Key() || b.Events[0].Note == b.Events[1].Note {
		t.Errorf("two GPUs with one reason merge: %q and %q", b.Events[0].Note, b.Events[1].Note)
	}
	if want := "GPU 0 (GPU-0) is Unhealthy: found by xid 79 reboot; remedy: reboot"; b.Events[0].Note != want {
		t.Errorf("note %q, want %q", b.Events[0].Note, want)
	}
	got := reasonsOf(h.Next(node(gpu(0, "Healthy"), gpu(1, "Unhealthy xid 79 reboot"), gpu(2, "Unhealthy flapping human")),
		start, plenty))
	if diff := cmp.Diff([]string{"GPURecovered GPU-0 XID 79", "GPUNeedsOperator GPU-2"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestAlike: more than four similar GPUs share one Event; four have four.
func TestAlike(t *testing.T) {
	for n := 4; n <= 16; n++ {
		var h nodeevents.History
		var good, bad []status.Device
		for i := range n {
			good, bad = append(good, gpu(i, "Healthy")), append(bad, gpu(i, "Unhealthy xid 79 reboot"))
		}
		bad = append(bad, gpu(n, "Unhealthy xid 48 reset"))
		h.Next(node(append(good, gpu(n, "Healthy"))...), start, plenty)
		want := 2
		if n == 4 {
			want = 5
		}
		b := h.Next(node(bad...), start, plenty)
		if len(b.Events) != want {
			t.Fatalf("%d GPUs: %d Events, want %d", n, len(b.Events), want)
		}
		if first := b.Events[0]; n > 4 && (len(first.Devices) != n ||
			!strings.Contains(first.Note, fmt.Sprintf("GPU-%d", n-1))) {
			t.Errorf("%d GPUs: %v %q", n, first.Devices, first.Note)
		}
		if again := h.Next(node(bad...), start, plenty); len(again.Events) != 0 {
			t.Errorf("%d GPUs: told twice: %v", n, reasonsOf(again))
		}
		if got := len(h.Next(node(append(good, gpu(n, "Healthy"))...), start, plenty).Events); got != want {
			t.Errorf("%d GPUs: %d Events of recovery, want %d", n, got, want)
		}
	}
}

// TestFlapping: a GPU that flaps gets five Events, then one in five minutes. When the flapping
// stops, the last Event is true.
func TestFlapping(t *testing.T) {
	var h nodeevents.History
	states := []status.Status{node(gpu(0, "Unhealthy hang reset")), node(gpu(0, "Healthy"))}
	h.Next(states[1], start, plenty)
	told, dropped, now := 0, 0, start
	last := ""
	for i := range 600 { // 10 minutes of one change a second
		now = start.Add(time.Duration(i) * time.Second)
		b := h.Next(states[i%2], now, plenty)
		dropped += len(b.Dropped)
		for _, e := range b.Events {
			told++
			last = string(e.Reason)
		}
	}
	if told < 6 || told > 7 {
		t.Errorf("%d Events in ten minutes, want 5 and one for each of 5 minutes", told)
	}
	if dropped < 200 {
		t.Errorf("%d drops counted", dropped)
	}
	// The last state is Unhealthy. It is reported when the rate allows it, unless the last report
	// said the same.
	b := h.Next(states[0], now, plenty)
	if last == "GPURecovered" {
		if b.Again.IsZero() || b.Again.Sub(now) > 5*time.Minute {
			t.Fatalf("again %v", b.Again)
		}
		if got := reasonsOf(h.Next(states[0], b.Again, plenty)); !cmp.Equal(got, []string{"GPUUnhealthy GPU-0"}) {
			t.Errorf("the last state is not told: %v", got)
		}
	} else if len(b.Events) != 0 {
		t.Errorf("told again: %v", reasonsOf(b))
	}
}

// TestRates: every GPU has its own rate; the node's rate applies to all.
func TestRates(t *testing.T) {
	var h nodeevents.History
	one := func(i int, state string) status.Status {
		devices := make([]status.Device, 10)
		for j := range devices {
			devices[j] = gpu(j, "Healthy")
		}
		devices[i] = gpu(i, state)
		return node(devices...)
	}
	h.Next(one(0, "Healthy"), start, plenty)
	told, causes := 0, map[string]int{}
	for i := range 10 {
		for range 3 {
			for _, state := range []string{"Unhealthy hang reset", "Healthy"} {
				b := h.Next(one(i, state), start, plenty)
				told += len(b.Events)
				for _, c := range b.Dropped {
					causes[c]++
				}
			}
		}
	}
	if told != 25 {
		t.Errorf("%d Events of a node at once, want 25", told)
	}
	if causes[nodeevents.DropSubjectRate] == 0 || causes[nodeevents.DropNodeRate] == 0 {
		t.Errorf("causes %v", causes)
	}
	later := start.Add(time.Minute)
	got := h.Next(one(9, "Unhealthy hang reset"), later, plenty)
	if len(got.Events) != 1 {
		t.Errorf("a minute later: %v", reasonsOf(got))
	}
}

// TestClockGoesBack: a clock that is set back delays nothing for longer than the rates.
func TestClockGoesBack(t *testing.T) {
	var h nodeevents.History
	states := []status.Status{node(gpu(0, "Unhealthy hang reset")), node(gpu(0, "Healthy"))}
	h.Next(states[1], start, plenty)
	for i := range 10 {
		h.Next(states[i%2], start, plenty)
	}
	earlier := start.Add(-24 * time.Hour)
	b := h.Next(states[0], earlier, plenty)
	if b.Again.Sub(earlier) > 25*time.Minute {
		t.Errorf("silent for %v", b.Again.Sub(earlier))
	}
	told := len(b.Events)
	for i := range 2 {
		told += len(h.Next(states[i], earlier.Add(25*time.Minute), plenty).Events)
	}
	if told == 0 {
		t.Error("silent after the time of all rates")
	}
}

// TestRestart: a new daemon learns past reports from the node's condition. It reports new facts,
// and facts that ended meanwhile.
func TestRestart(t *testing.T) {
	before := node(gpu(0, "Unhealthy xid 79 reboot"), gpu(1, "Lost lost reconnect"), gpu(2, "Healthy"))
	c, _ := nodeevents.Judge(before, start, false)
	var same nodeevents.History
	same.Recall(c, true)
	if got := reasonsOf(same.Next(before, start, plenty)); got != nil {
		t.Errorf("the same state after a restart: %v", got)
	}
	var other nodeevents.History
	other.Recall(c, true)
	after := node(gpu(0, "Healthy"), gpu(1, "Lost lost reconnect"), gpu(2, "Unhealthy hang reset"))
	want := []string{"GPURecovered GPU-0 XID 79", "GPUUnhealthy GPU-2"}
	if diff := cmp.Diff(want, reasonsOf(other.Next(after, start, plenty))); diff != "" {
		t.Errorf("another state after a restart (-want +got):\n%s", diff)
	}
	// Without a condition, the Event keeps its key and is marked as a fact from the start.
	var first, second nodeevents.History
	first.Next(node(gpu(0, "Healthy")), start, plenty)
	told := first.Next(node(gpu(0, "Unhealthy xid 79 reboot")), start, plenty).Events[0]
	again := second.Next(node(gpu(0, "Unhealthy xid 79 reboot")), start.Add(time.Hour), plenty).Events[0]
	if told.Key() != again.Key() || told.AtStart || !again.AtStart {
		t.Errorf("keys %s and %s, at start %v and %v", told.Key(), again.Key(), told.AtStart, again.AtStart)
	}
}

// TestDriverAwayAtStart: a missing driver at the start is reported if the node is known to have
// GPUs.
func TestDriverAwayAtStart(t *testing.T) {
	away := with(node(), func(s *status.Status) { s.Stale, s.Looked = "no driver", time.Time{} })
	for _, hadGPUs := range []bool{false, true} {
		var h nodeevents.History
		h.Recall(nodeevents.Condition{}, hadGPUs)
		if got := len(h.Next(away, start, plenty).Events); (got == 1) != hadGPUs {
			t.Errorf("%d Events of a node that had GPUs: %v", got, hadGPUs)
		}
		if got := len(h.Next(node(gpu(0, "Healthy")), start, plenty).Events); (got == 1) != hadGPUs {
			t.Errorf("%d Events when the driver came, of a node that had GPUs: %v", got, hadGPUs)
		}
	}
}

// TestNotes: notes are one line of valid UTF-8 that Kubernetes accepts, for any reason.
func TestNotes(t *testing.T) {
	d := gpu(0, "Unhealthy hang reset")
	for _, reason := range []string{strings.Repeat("ä", 3000), "a\nb\tc", "\xff\xfe", strings.Repeat("x", 1023)} {
		d.Reason = reason
		var h nodeevents.History
		for _, e := range h.Next(node(d), start, plenty).Events {
			if len(e.Note) > 1024 || strings.ContainsAny(e.Note, "\n\t") || strings.ToValidUTF8(e.Note, "") != e.Note {
				t.Errorf("%d bytes: %q", len(e.Note), e.Note)
			}
			if row := e.Reason.Row(); row.Action == "" {
				t.Errorf("%s is not in the table", e.Reason)
			}
		}
	}
}

// TestFlappingOfTheNode: any fact that flaps at every scan is limited.
func TestFlappingOfTheNode(t *testing.T) {
	whole := gpu(0, "Healthy")
	for name, states := range map[string][2]status.Status{
		"driver":        {node(whole), with(node(whole), func(s *status.Status) { s.Stale = "away" })},
		"configuration": {node(whole), with(node(whole), func(s *status.Status) { s.ConfigError = "line 3" })},
		"left out": {
			with(node(whole), func(s *status.Status) { s.LeftOut = []string{"GPU 1: a"} }),
			with(node(whole), func(s *status.Status) { s.LeftOut = []string{"GPU 2: b"} }),
		},
		"the reason of what is left out": {
			with(node(whole), func(s *status.Status) { s.LeftOut = []string{"GPU 1: a"} }),
			with(node(whole), func(s *status.Status) { s.LeftOut = []string{"GPU 1: b"} }),
		},
	} {
		var h nodeevents.History
		told := 0
		for i := range 900 { // an hour of scans
			told += len(h.Next(states[i%2], start.Add(time.Duration(i)*4*time.Second), plenty).Events)
		}
		most := 17
		if strings.HasPrefix(name, "the reason") {
			most = 1
		}
		if told > most || told == 0 {
			t.Errorf("%s: %d Events in an hour, want at most %d", name, told, most)
		}
	}
}

// TestRestartOfTheDriver: the driver is replaced under the daemon, which starts again. The new
// process reports changes, and nothing twice.
func TestRestartOfTheDriver(t *testing.T) {
	whole := node(gpu(0, "Healthy"))
	away := with(node(gpu(0, "Unknown silence none")), func(s *status.Status) { s.Stale = "no driver" })
	quiet := with(whole, func(s *status.Status) { s.Quiet = true })
	for name, tt := range map[string]struct {
		before, after status.Status
		want          []string
	}{
		"away, back":         {away, whole, []string{"DriverReady"}},
		"away, still":        {away, away, nil},
		"released, back":     {quiet, whole, []string{"DriverReady"}},
		"released, still":    {quiet, quiet, nil},
		"released, now away": {quiet, away, []string{"DriverNotReady"}},
		"there, still":       {whole, whole, nil},
	} {
		c, _ := nodeevents.Judge(tt.before, start, true)
		var h nodeevents.History
		h.Recall(c, true)
		if diff := cmp.Diff(tt.want, reasonsOf(h.Next(tt.after, start, plenty))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestRateOfMIGDevices: MIG devices count towards the rate of their GPU.
func TestRateOfMIGDevices(t *testing.T) {
	var h nodeevents.History
	told := 0
	for round := range 8 {
		g := gpu(0, "Healthy")
		devices := []status.Device{g}
		for i := range 3 {
			devices = append(devices, mig(g, i, []string{"Healthy", "Unhealthy xid 95 reset"}[round%2]))
		}
		told += len(h.Next(node(devices...), start, plenty).Events)
	}
	if told != 5 {
		t.Errorf("%d Events of one GPU at once, want 5", told)
	}
}

// TestGroups: two groups of devices have two Events, each with enough room for its names.
func TestGroups(t *testing.T) {
	keys := map[string]bool{}
	for _, first := range []int{0, 10} {
		var sentences []string
		for i := range 6 {
			sentences = append(sentences, fmt.Sprintf("GPU %d: no UUID", first+i))
		}
		var h nodeevents.History
		b := h.Next(with(node(gpu(99, "Healthy")), func(s *status.Status) { s.LeftOut = sentences }), start, plenty)
		if len(b.Events) != 1 || !strings.HasSuffix(b.Events[0].Note, fmt.Sprintf("; GPU %d: no UUID", first+5)) {
			t.Fatalf("%+v", b.Events)
		}
		if want := strings.Join(sentences, "; "); b.Events[0].Cause != want {
			t.Errorf("cause %q, want %q", b.Events[0].Cause, want)
		}
		keys[b.Events[0].Key()] = true
	}
	if len(keys) != 2 {
		t.Error("two groups merge")
	}
}
