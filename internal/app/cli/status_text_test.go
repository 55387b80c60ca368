package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/terminal"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

var statusTime = time.Date(2026, 11, 22, 1, 2, 3, 0, time.UTC)

// printed returns a printed status.
func printed(s status.Status, v view) string {
	v.now = statusTime
	s.Summary = status.Summarize(s)
	var text strings.Builder
	printStatus(&text, s, v)
	return text.String()
}

func sickStatus() status.Status {
	at := statusTime.Add(-90 * time.Second)
	s := status.Status{
		Version: "v1", Driver: "580", Looked: at, Readiness: status.Readiness{Ready: true},
		GPUs: []status.Device{
			{Index: "0", UUID: "GPU-01234567-89ab", Model: "T4", State: "Lost", Since: at, Reason: "gone", Remedy: "reboot",
				Events: []string{"XID 79 × 1"}},
			{Index: "0:0", UUID: "MIG-01234567-89ab", Model: "MIG 1g", State: "Lost", Since: at, Reason: "gone",
				Remedy: "reboot"},
		},
		Holds: []status.Hold{{Device: "GPU-1", Resource: "a/b", Reason: "busy", Listed: true},
			{Device: "GPU-1", Resource: "a/b", Reason: "not tried", Listed: true, Waits: true},
			{Device: "GPU-2", Resource: "a/b", Reason: "no file"}},
		Resources: []status.Resource{
			{Name: "a/b", Devices: 2, Healthy: 1, Server: "registering", Problem: "refused"}, {Name: "a/c", Server: "serving"},
		},
	}
	for i := range maxDeparting + 2 {
		s.Resources[1].Departing = append(s.Resources[1].Departing,
			status.Departing{ID: fmt.Sprint("GPU-", i), Reason: "renamed", Waiting: "pod p holds it"})
	}
	return s
}

func TestPrintStatus(t *testing.T) {
	t.Parallel()
	text := printed(sickStatus(), view{})
	for _, want := range []string{
		"degraded: GPU 0 Lost; a/b: registering, refused; not offered yet: 2; a/b: 1 of 2; a/c: 0 of 0\n" +
			"version v1, driver 580, last successful scan 90s ago\n",
		"GPU  UUID          MODEL   STATE  SINCE    REMEDY\n" +
			"0    GPU-01234567  T4      Lost   90s ago  reboot\n" +
			"     gone\n" +
			"     events: XID 79 × 1\n" +
			"0:0  MIG-01234567  MIG 1g  Lost   90s ago  reboot\n\n",
		"a/b       2        1        registering\n  refused\n",
		"not offered yet: a/b GPU-1; busy\n",
		"not offered yet: a/b GPU-1; not tried (another reason counts first)\n",
		"no longer offered: a/c GPU-19: renamed; still listed: pod p holds it\n",
		"no longer offered: a/c: 2 more devices, see -o json\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("there is no %q in:\n%s", want, text)
		}
	}
	for _, hidden := range []string{"GPU-20:", "GPU-2: no file", "\x1b"} {
		if strings.Contains(text, hidden) {
			t.Errorf("%q is printed:\n%s", hidden, text)
		}
	}
	wide := printed(sickStatus(), view{wide: true})
	for _, want := range []string{"GPU-01234567-89ab  T4", "2026-11-22T01:00:33Z", "scan at 2026-11-22T01:00:33Z"} {
		if !strings.Contains(wide, want) {
			t.Errorf("there is no %q in the wide view:\n%s", want, wide)
		}
	}
	coloured := printed(sickStatus(), view{colour: true})
	if !strings.HasPrefix(coloured, "\x1b[33mdegraded\x1b[0m: ") || !strings.Contains(coloured, "\x1b[31mLost\x1b[0m ") {
		t.Errorf("colours: %q", coloured)
	}
	if plain := strings.NewReplacer("\x1b[31m", "", "\x1b[32m", "", "\x1b[33m", "", "\x1b[1m", "", "\x1b[0m",
		"").Replace(coloured); plain != text {
		t.Errorf("without colours:\n%s\nwant:\n%s", plain, text)
	}
}

// TestStatusFits: no line is longer than 100 columns on any node, and no part of a sentence is
// lost.
func TestStatusFits(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a reason of many words ", 12) + "/a/path/" + strings.Repeat("x", 150) + " end"
	nodes := map[string]status.Status{"sick": sickStatus(), "nothing": {Version: "v1"}}
	for _, name := range simulator.Names() {
		profile, err := simulator.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		node := simulator.New(profile)
		s := sickStatus()
		s.GPUs = nil
		for _, g := range node.List() {
			s.GPUs = append(s.GPUs, status.Device{Index: fmt.Sprint(g.Index), UUID: g.UUID, Model: g.Model, State: "Unhealthy",
				Since: statusTime.Add(-1000 * time.Hour), Reason: long, Remedy: "drain+reset"})
			for _, m := range g.MIG {
				s.GPUs = append(s.GPUs, status.Device{Index: fmt.Sprintf("%d:%d", g.Index, m.Index), UUID: m.UUID,
					Model: "MIG " + m.Profile,
					State: "Unhealthy", Reason: long, Remedy: "drain+reset"})
			}
		}
		node.Close()
		nodes["profile "+name] = s
	}
	large := sickStatus()
	large.GPUs, large.LeftOut, large.ConfigError, large.ConfigFile, large.Stale = nil, []string{long}, long, "/"+
		strings.Repeat("f", 200), long
	for g := range 16 {
		large.GPUs = append(large.GPUs, status.Device{Index: fmt.Sprint(g),
			UUID:  fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", g),
			Model: "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", State: "Unhealthy", Remedy: "drain+reset"})
		for m := range 7 {
			large.GPUs = append(large.GPUs, status.Device{Index: fmt.Sprintf("%d:%d", g, m),
				UUID:  fmt.Sprintf("MIG-00000000-0000-0000-%04d-%012d", g, m),
				Model: "MIG 1g.10gb+me", State: "Suspect", Since: statusTime, Reason: long, Events: []string{long}})
		}
	}
	name := "nvidia.com/" + strings.Repeat("very-long-name.", 16)
	for i := range 20 {
		r := status.Resource{Name: name + fmt.Sprint(i), Devices: 1000, Healthy: 999,
			Server: "standing by: another server has registered", Problem: long}
		for d := range 1000 {
			r.Departing = append(r.Departing, status.Departing{ID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d::%d", i, d),
				Reason: long, Waiting: long})
		}
		large.Resources = append(large.Resources, r)
	}
	nodes["16 GPUs, 112 MIG devices, 20 resources with 1,000 replicas"] = large
	for name, s := range nodes {
		t.Run(name, func(t *testing.T) {
			v := view{columns: 60 + 20*(len(name)%3)}
			text := printed(s, v)
			for line := range strings.Lines(text) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > v.maxColumns() {
					t.Errorf("%d columns: %s", n, line)
				}
			}
			if s.ConfigError != "" && !strings.Contains(strings.ReplaceAll(strings.ReplaceAll(text, "\n", ""), " ", ""),
				strings.ReplaceAll(long, " ", "")) {
				t.Errorf("a part of a sentence is lost:\n%s", text)
			}
		})
	}
}

func TestShortenedUUIDs(t *testing.T) {
	t.Parallel()
	devices := []status.Device{{UUID: "GPU-01234567-89ab-0"}, {UUID: "GPU-01234567-89ab-1"}, {UUID: "MIG-1"}}
	for i, want := range []string{"GPU-01234567-89ab-0", "GPU-01234567-89ab-1", "MIG-1"} {
		if got := shortened(devices, view{})[i]; got != want {
			t.Errorf("%s is printed as %s", want, got)
		}
	}
}

func TestColourOfTerminals(t *testing.T) {
	if newView(io.Discard, false).colour {
		t.Error("a buffer is a terminal")
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if newView(&terminal.Writer{To: file}, false).colour {
		t.Error("a file is a terminal")
	}
	device, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer device.Close()
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	if !newView(&terminal.Writer{To: device}, false).colour {
		t.Error("a terminal is none")
	}
	t.Setenv("NO_COLOR", "1")
	if newView(&terminal.Writer{To: device}, false).colour {
		t.Error("NO_COLOR has no effect")
	}
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "dumb")
	if newView(&terminal.Writer{To: device}, false).colour {
		t.Error("a terminal without colours has colours")
	}
}

// TestWatchPrints: the summary comes first, then changes, and the end and return of the daemon.
func TestWatchPrints(t *testing.T) {
	t.Parallel()
	before, after := sickStatus(), sickStatus()
	before.Summary, after.Summary = status.Summary{State: "ready", Text: "fine"}, status.Summary{State: "degraded",
		Text: "bad"}
	before.GPUs[0].State, before.GPUs[0].Reason, before.GPUs[0].Remedy, before.GPUs[0].Events = "Healthy", "", "", nil
	run := func(format string, v view) string {
		var out bytes.Buffer
		w, err := newWatcher(&out, format, v)
		if err != nil {
			t.Fatal(err)
		}
		w.now = func() time.Time { return statusTime }
		for _, s := range []status.Status{before, after, after} {
			if err := w.receive(s); err != nil {
				t.Fatal(err)
			}
		}
		w.away = true
		if err := w.receive(after); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	const want = "2026-11-22T01:02:03Z  summary: ready: fine\n" +
		"2026-11-22T01:02:03Z  GPU 0: Healthy → Lost (remedy: reboot): gone\n" +
		"2026-11-22T01:02:03Z  event of GPU 0: XID 79 × 1\n" +
		"2026-11-22T01:02:03Z  summary: ready → degraded: bad\n" +
		"2026-11-22T01:02:03Z  connection: waiting for the daemon → connected\n"
	if got := run(outputTable, view{}); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	if got := run(outputWide, view{wide: true, colour: true}); !strings.Contains(got,
		"GPU 0: Healthy → \x1b[31mLost\x1b[0m (remedy: reboot): gone (GPU-01234567-89ab)\n") {
		t.Errorf("wide, in colour:\n%s", got)
	}
	for line := range strings.Lines(run(outputTable, view{columns: 40})) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 40 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	objects := json.NewDecoder(strings.NewReader(run(outputJSON, view{})))
	var all []status.Change
	for objects.More() {
		var c status.Change
		if err := objects.Decode(&c); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	if len(all) < 10 || all[0].Kind != "daemon" || !all[0].Time.Equal(statusTime) {
		t.Errorf("objects: %+v", all)
	}
	if _, err := newWatcher(io.Discard, outputYAML, view{}); err == nil {
		t.Error("a watch in YAML is no error")
	}
}

// TestScanOfAReleasedDriver: no scan has failed while the driver is released.
func TestScanOfAReleasedDriver(t *testing.T) {
	t.Parallel()
	const why = "the driver is released"
	for s, want := range map[*status.Status]bool{
		{Stale: why, Node: why, Quiet: true}: false, {Stale: "no answer", Node: why, Quiet: true}: true,
		{Stale: why, Node: why}: true,
	} {
		if text := printed(*s, view{}); strings.Contains(text, "last scan failed: ") != want {
			t.Errorf("quiet %v, stale %q, want the line: %v\n%s", s.Quiet, s.Stale, want, text)
		}
	}
}
