package nodeevents_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodeevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

func TestJudge(t *testing.T) {
	whole := gpu(0, "Healthy")
	stale := func(s *status.Status) { s.Stale = "no driver" }
	neverLooked := func(s *status.Status) { s.Stale, s.Looked = "no driver", time.Time{} }
	for name, tt := range map[string]struct {
		status status.Status
		there  bool
		want   string // empty for no condition
	}{
		"all healthy": {node(whole, gpu(1, "Healthy")), false, "True AllHealthy all GPUs are healthy"},
		"Suspect": {node(gpu(0, "Suspect xid 154 reset")), false,
			"True AllHealthy all GPUs are healthy"},
		"no fault": {node(gpu(0, "Unhealthy")), false,
			"False GPUUnhealthy GPU-0 Unhealthy: unknown, remedy: none"},
		"never looked, the driver away": {with(node(gpu(0, "Unknown silence none")), neverLooked), false, ""},
		"never looked, the driver away, a condition": {with(node(gpu(0, "Unknown silence none")), neverLooked), true,
			"Unknown DriverNotReady no driver"},
		"one of one": {node(gpu(0, "Unhealthy xid 79 reboot")), false,
			"False GPUUnhealthy GPU-0 Unhealthy: XID 79, remedy: reboot"},
		"Lost": {node(whole, gpu(1, "Lost lost reconnect")), false,
			"False GPULost GPU-1 Lost: lost, remedy: reconnect"},
		"sorted, both": {node(gpu(2, "Lost lost reconnect"), gpu(1, "Unhealthy hang reset")), false,
			"False GPULost GPU-1 Unhealthy: hang, remedy: reset; GPU-2 Lost: lost, remedy: reconnect"},
		"MIG device": {node(whole, mig(whole, 3, "Unhealthy xid 95 reset")), false,
			"False GPUUnhealthy MIG-0-3 Unhealthy: XID 95, remedy: reset"},
		"MIG devices of a bad GPU": {
			node(gpu(0, "Unhealthy hang reset"), mig(whole, 0, "Unhealthy hang reset")), false,
			"False GPUUnhealthy GPU-0 Unhealthy: hang, remedy: reset",
		},
		"unreadable": {
			with(node(whole), func(s *status.Status) { s.Retries = []status.Retry{{Index: 1}} }), false,
			"False GPULost GPU 1 cannot be read, remedy: reconnect",
		},
		"unreadable and known": {
			with(node(gpu(1, "Lost lost reconnect")), func(s *status.Status) { s.Retries = []status.Retry{{Index: 1}} }), false,
			"False GPULost GPU-1 Lost: lost, remedy: reconnect",
		},
		"two without a verdict": {
			node(gpu(1, "Unknown contact reset"), gpu(0, "Unknown contact reset")), false,
			"Unknown GPUUnknown no verdict yet: GPU-0; GPU-1",
		},
		"unreadable, beside another": {
			with(node(gpu(0, "Lost lost reconnect")), func(s *status.Status) { s.Retries = []status.Retry{{Index: 1}} }), false,
			"False GPULost GPU 1 cannot be read, remedy: reconnect; GPU-0 Lost: lost, remedy: reconnect",
		},
		"a MIG device with a fault of its own on a bad GPU": {
			node(gpu(0, "Unhealthy hang reset"), mig(whole, 0, "Unhealthy xid 95 reset")), false,
			"False GPUUnhealthy GPU-0 Unhealthy: hang, remedy: reset; MIG-0-0 Unhealthy: XID 95, remedy: reset",
		},
		"of two faults, the one of the verdict": {
			with(node(gpu(0, "Unhealthy hang reset")), func(s *status.Status) {
				s.GPUs[0].Faults = append([]status.Fault{{Source: "contact", Remedy: "human"},
					{Source: "xid", XID: 48, Remedy: "reset"}}, s.GPUs[0].Faults...)
			}), false, "False GPUUnhealthy GPU-0 Unhealthy: hang, remedy: reset",
		},
		"no verdict yet": {node(whole, gpu(1, "Unknown contact reset")), false,
			"Unknown GPUUnknown no verdict yet: GPU-1"},
		"driver away": {with(node(gpu(0, "Unknown silence none")), stale), false, "Unknown DriverNotReady no driver"},
		"away, known bad": {with(node(gpu(0, "Unhealthy xid 79 reboot")), stale), false,
			"False GPUUnhealthy GPU-0 Unhealthy: XID 79, remedy: reboot"},
		"released": {with(node(whole), func(s *status.Status) { s.Quiet = true }), false,
			"Unknown DriverNotReady the driver is released"},
		"not looked at": {with(node(whole), func(s *status.Status) { s.Looked = start.Add(-121 * time.Second) }), false,
			"Unknown MonitorStalled the GPUs have not been scanned for more than 2 minutes"},
		"looked at a little": {with(node(whole), func(s *status.Status) { s.Looked = start.Add(-119 * time.Second) }), false,
			"True AllHealthy all GPUs are healthy"},
		"never had a GPU":    {node(), false, ""},
		"never had a driver": {with(node(), func(s *status.Status) { s.Looked = time.Time{}; stale(s) }), false, ""},
		"had GPUs":           {node(), true, "False GPULost the GPUs of the node have disappeared"},
		"had a driver": {with(node(), func(s *status.Status) { s.Looked = time.Time{}; stale(s) }), true,
			"Unknown DriverNotReady no driver"},
		"first look": {with(node(), func(s *status.Status) { s.Looked = time.Time{} }), true, ""},
		"no status":  {status.Status{}, true, ""},
		"released before the first look": {
			with(node(), func(s *status.Status) { s.Looked, s.Quiet = time.Time{}, true }), true,
			"Unknown DriverNotReady the driver is released",
		},
		"not looked at for two minutes": {
			with(node(whole), func(s *status.Status) { s.Looked = start.Add(-120 * time.Second) }), false,
			"True AllHealthy all GPUs are healthy",
		},
		"none was readable ever": {
			with(node(), func(s *status.Status) { s.Retries = []status.Retry{{Index: 0}} }), false,
			"False GPULost GPU 0 cannot be read, remedy: reconnect",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, ok := nodeevents.Judge(tt.status, start, tt.there)
			got := strings.TrimSpace(c.Status + " " + string(c.Reason) + " " + c.Message)
			if got != tt.want || ok != (tt.want != "") {
				t.Errorf("%v %q, want %q", ok, got, tt.want)
			}
		})
	}
}

// TestLongMessage: a message about many GPUs has at most 1024 bytes and only complete entries.
func TestLongMessage(t *testing.T) {
	var devices []status.Device
	for i := range 64 {
		d := gpu(i, "Unhealthy xid 79 reboot")
		d.UUID = strings.Repeat("a", 90) + d.UUID
		devices = append(devices, d)
	}
	c, _ := nodeevents.Judge(node(devices...), start, false)
	if len(c.Message) > 1024 || !strings.Contains(c.Message, "; and ") || !strings.HasSuffix(c.Message, " more") {
		t.Errorf("%d bytes: %q", len(c.Message), c.Message)
	}
}

// TestRowOfAnotherReason: a reason outside of the table is a warning.
func TestRowOfAnotherReason(t *testing.T) {
	if diff := cmp.Diff(nodeevents.Row{Reason: "Other", Type: "Warning"}, nodeevents.Reason("Other").Row()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestNoHealthyGPU(t *testing.T) {
	bad, whole := gpu(0, "Unhealthy hang reset"), gpu(1, "Healthy")
	for name, tt := range map[string]struct {
		status      status.Status
		none, known bool
	}{
		"one of two":       {node(bad, whole), false, true},
		"the only one":     {node(bad), true, true},
		"both":             {node(bad, gpu(1, "Lost lost reconnect")), true, true},
		"one unknown":      {node(bad, gpu(1, "Unknown contact reset")), false, false},
		"Suspect":          {node(bad, gpu(1, "Suspect xid 154 reset")), false, true},
		"no GPU":           {node(), false, true},
		"none can be read": {with(node(), func(s *status.Status) { s.Retries = []status.Retry{{Index: 0}} }), true, true},
		"no GPU, stale":    {with(node(), func(s *status.Status) { s.Stale = "away" }), false, false},
		"no GPU, released": {with(node(), func(s *status.Status) { s.Quiet = true }), false, false},
		"none can be read, stale": {
			with(node(), func(s *status.Status) { s.Retries, s.Stale = []status.Retry{{Index: 0}}, "away" }), true, false,
		},
		"none can be read, released": {
			with(node(), func(s *status.Status) { s.Retries, s.Quiet = []status.Retry{{Index: 0}}, true }), true, false,
		},
		"first look":      {with(node(bad), func(s *status.Status) { s.Looked = time.Time{} }), false, false},
		"no status":       {status.Status{}, false, false},
		"MIG device good": {node(bad, mig(bad, 0, "Healthy")), true, true},
		"MIG device bad":  {node(whole, mig(whole, 0, "Unhealthy xid 95 reset")), false, true},
	} {
		if none, known := nodeevents.NoHealthyGPU(tt.status); none != tt.none || known != tt.known {
			t.Errorf("%s: %v, known %v", name, none, known)
		}
	}
}

func TestPace(t *testing.T) {
	good, bad, away := nodeevents.Condition{nodeevents.True, "", "fine"}, nodeevents.Condition{nodeevents.False, "",
		"a"}, nodeevents.Condition{nodeevents.Unknown, "", "?"}
	two := nodeevents.Condition{nodeevents.False, "", "a; b"}
	for name, tt := range map[string]struct {
		there  *nodeevents.Condition
		wanted nodeevents.Condition
		want   time.Duration
	}{
		"worse":              {&good, bad, time.Second},
		"unknown":            {&good, away, time.Second},
		"one more bad":       {&bad, two, time.Second},
		"better":             {&bad, good, 30 * time.Second},
		"one bad less":       {&two, bad, 30 * time.Second},
		"known again":        {&away, good, 30 * time.Second},
		"unknown, now bad":   {&away, bad, time.Second},
		"bad, now unknown":   {&bad, away, 30 * time.Second},
		"first, good":        {nil, good, 0},
		"first, bad":         {nil, bad, time.Second},
		"still unknown":      {&away, nodeevents.Condition{Status: nodeevents.Unknown, Message: "!"}, 30 * time.Second},
		"right, slow repeat": {&good, good, time.Hour},
	} {
		p := nodeevents.Pace{Fraction: 0.5, Heartbeat: time.Hour}
		if got := p.Due(tt.there, start, tt.wanted, start).Sub(start); got != tt.want {
			t.Errorf("%s: after %v, want %v", name, got, tt.want)
		}
	}
}

// TestPaceOfTwoFaults: the GPUs were recovering between two faults, so the second fault has its own
// delay.
func TestPaceOfTwoFaults(t *testing.T) {
	away, p := nodeevents.Condition{Status: nodeevents.Unknown, Message: "?"}, nodeevents.Pace{}
	bad := nodeevents.Condition{Status: nodeevents.False, Message: "a"}
	p.Due(&away, start, bad, start)
	p.Due(&away, start, nodeevents.Condition{Status: nodeevents.True}, start.Add(10*time.Second))
	if due := p.Due(&away, start, bad, start.Add(20*time.Second)); !due.Equal(start.Add(21 * time.Second)) {
		t.Errorf("due after %v, want 21 s", due.Sub(start))
	}
}

// TestPaceOfMany: GPUs become bad one after the other. The first write does not wait for the last
// of them. A GPU that flaps is never better.
func TestPaceOfMany(t *testing.T) {
	good, p := nodeevents.Condition{Status: nodeevents.True}, nodeevents.Pace{}
	first := time.Time{}
	for i := range 8 {
		now := start.Add(time.Duration(i) * 300 * time.Millisecond)
		wanted := nodeevents.Condition{Status: nodeevents.False, Message: strings.Repeat("x; ", i) + "x"}
		if due := p.Due(&good, start, wanted, now); first.IsZero() {
			first = due
		} else if !due.Equal(first) {
			t.Errorf("due %v, want %v", due, first)
		}
	}
	bad := nodeevents.Condition{Status: nodeevents.False, Message: "x"}
	for i := range 100 {
		now := start.Add(time.Duration(i) * 10 * time.Second)
		wanted := good
		if i%3 == 2 {
			wanted = bad
		}
		if due := p.Due(&bad, start, wanted, now); wanted == good && !due.After(now) {
			t.Fatalf("better after %v of flapping", now.Sub(start))
		}
	}
}

// TestHeartbeat: repeated writes are spread, can be switched off, and survive a clock that is set
// back.
func TestHeartbeat(t *testing.T) {
	c := nodeevents.Condition{Status: nodeevents.True}
	for _, tt := range []struct {
		beat          time.Duration
		fraction      float64
		written, want time.Duration
	}{
		{0, 0.5, 0, -1},
		{10 * time.Minute, 0, 0, 8 * time.Minute},
		{10 * time.Minute, 1, 0, 12 * time.Minute},
		{10 * time.Minute, 0, 24 * time.Hour, 0},
	} {
		p := nodeevents.Pace{Fraction: tt.fraction, Heartbeat: tt.beat}
		due := p.Due(&c, start.Add(tt.written), c, start)
		if tt.want < 0 != due.IsZero() || tt.want >= 0 && !due.Equal(start.Add(tt.want)) {
			t.Errorf("%+v: due %v", tt, due.Sub(start))
		}
	}
}

// TestWritesOfACondition: a condition that changes at every scan is written ten times, then once a
// minute.
func TestWritesOfACondition(t *testing.T) {
	for name, conditions := range map[string][2]nodeevents.Condition{
		"another source": {
			{Status: nodeevents.False, Message: "GPU-0 Unhealthy: hang, remedy: reset"}, {Status: nodeevents.False,
				Message: "GPU-0 Unhealthy: contact, remedy: reset"},
		},
		"another reason to know nothing": {{Status: nodeevents.Unknown, Message: "a"},
			{Status: nodeevents.Unknown, Message: "b"}},
		"good and bad": {{Status: nodeevents.True}, {Status: nodeevents.False, Message: "GPU-0"}},
	} {
		there, writes, p := conditions[0], 0, nodeevents.Pace{}
		for i := range 900 { // an hour of scans
			now, wanted := start.Add(time.Duration(i)*4*time.Second), conditions[i%2]
			if due := p.Due(&there, start, wanted, now); !due.IsZero() && !due.After(now.Add(2*time.Second)) {
				there = wanted
				p.RecordWrite(now)
				writes++
			}
		}
		if writes > 70 {
			t.Errorf("%s: %d writes in an hour", name, writes)
		}
	}
}

// TestWritesInARow: the tenth write in a row waits for nothing, and the eleventh for a minute.
func TestWritesInARow(t *testing.T) {
	good, bad, p := nodeevents.Condition{Status: nodeevents.True}, nodeevents.Condition{Status: nodeevents.False,
		Message: "GPU-0"}, nodeevents.Pace{}
	for i := range 10 {
		if due := p.Due(&good, start, bad, start); due.After(start.Add(30 * time.Second)) {
			t.Errorf("write %d is due after %v", i+1, due.Sub(start))
		}
		p.RecordWrite(start)
	}
	if due := p.Due(&good, start, bad, start); !due.Equal(start.Add(time.Minute)) {
		t.Errorf("the eleventh write is due after %v", due.Sub(start))
	}
}

// TestPaceWhenTheClockGoesBack: a clock that is set back restarts a delay, but does not lengthen
// it.
func TestPaceWhenTheClockGoesBack(t *testing.T) {
	good, bad := nodeevents.Condition{Status: nodeevents.True}, nodeevents.Condition{Status: nodeevents.False,
		Message: "a"}
	for name, tt := range map[string]struct {
		there, wanted nodeevents.Condition
		wait          time.Duration
	}{"better": {bad, good, 30 * time.Second}, "worse": {good, bad, time.Second}} {
		p := nodeevents.Pace{}
		p.Due(&tt.there, start, tt.wanted, start.Add(time.Hour))
		if due := p.Due(&tt.there, start, tt.wanted, start); !due.Equal(start.Add(tt.wait)) {
			t.Errorf("%s: due after %v, want %v", name, due.Sub(start), tt.wait)
		}
		if due := p.Due(&tt.there, start, tt.wanted, start.Add(tt.wait/2)); !due.Equal(start.Add(tt.wait)) {
			t.Errorf("%s: due after %v when asked again, want %v", name, due.Sub(start), tt.wait)
		}
	}
}
