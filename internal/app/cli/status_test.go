package cli_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// statusTime is the present for a printed status: the beginning of a synctest bubble.
var statusTime = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// statusText returns what status prints for a daemon's answer.
func statusText(t *testing.T, s status.Status, args ...string) string {
	t.Helper()
	var text bytes.Buffer
	printStatus(t, &text, s, args...)
	return text.String()
}

func printStatus(t *testing.T, w io.Writer, s status.Status, args ...string) {
	t.Helper()
	if s.Summary == (status.Summary{}) {
		s.Summary = status.Summarize(s)
	}
	socket, _ := answering(t, map[string][]any{daemon.CallStatus: {s}})
	synctest.Test(t, func(t *testing.T) {
		err := cli.DevicePlugin().Execute(t.Context(), "gpu-device-plugin", append([]string{"status", "--control-socket",
			socket}, args...), w)
		if err != nil {
			t.Error(err)
		}
	})
}

// A screen is a terminal.
type screen struct {
	*os.File             // for a program
	lines    chan string // written lines; closed when the terminal is
}

// newScreen returns a terminal of a width in columns, which closes with the test.
func newScreen(t *testing.T, columns uint16) screen {
	t.Helper()
	reader, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	if err := unix.IoctlSetPointerInt(int(reader.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(reader.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	device, err := os.OpenFile(fmt.Sprint("/dev/pts/", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	if err := unix.IoctlSetWinsize(int(device.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns}); err != nil {
		t.Fatal(err)
	}
	s := screen{device, make(chan string, 10000)}
	go func() {
		defer close(s.lines)
		for all := bufio.NewScanner(reader); all.Scan(); {
			s.lines <- strings.TrimSuffix(all.Text(), "\r")
		}
	}()
	t.Cleanup(func() { _, _ = device.Close(), reader.Close() })
	return s
}

// text closes the terminal and returns what was written to it.
func (s screen) text() string {
	_ = s.Close()
	var b strings.Builder
	for line := range s.lines {
		b.WriteString(line + "\n")
	}
	return b.String()
}

const maxDeparting = 20 // printed departing devices of a resource

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
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	text := statusText(t, sickStatus())
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
	wide := statusText(t, sickStatus(), "-o", "wide")
	for _, want := range []string{"GPU-01234567-89ab  T4", "1999-12-31T23:58:30Z", "scan at 1999-12-31T23:58:30Z"} {
		if !strings.Contains(wide, want) {
			t.Errorf("there is no %q in the wide view:\n%s", want, wide)
		}
	}
	device := newScreen(t, 0)
	printStatus(t, device.File, sickStatus())
	coloured := device.text()
	if !strings.HasPrefix(coloured, "\x1b[33mdegraded\x1b[0m: ") || !strings.Contains(coloured, "\x1b[31mLost\x1b[0m ") {
		t.Errorf("colours: %q", coloured)
	}
	if plain := strings.NewReplacer("\x1b[31m", "", "\x1b[32m", "", "\x1b[33m", "", "\x1b[1m", "", "\x1b[0m",
		"").Replace(coloured); plain != text {
		t.Errorf("without colours:\n%s\nwant:\n%s", plain, text)
	}
}

// TestStatusFits: no line is longer than the terminal on any node, and no part of a sentence is
// lost.
func TestStatusFits(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
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
		for d := range 100 {
			r.Departing = append(r.Departing, status.Departing{ID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d::%d", i, d),
				Reason: long, Waiting: long})
		}
		large.Resources = append(large.Resources, r)
	}
	nodes["16 GPUs, 112 MIG devices, 20 resources with 100 departing devices"] = large
	for name, s := range nodes {
		t.Run(name, func(t *testing.T) {
			columns := 60 + 20*(len(name)%3)
			device := newScreen(t, uint16(columns))
			printStatus(t, device.File, s)
			text := device.text()
			for line := range strings.Lines(text) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns {
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

// TestWidthOfDevices: in a table that is wider than 100 columns, the model is shortened to eight
// columns at least, and then the widest column. A shortened text loses its middle.
func TestWidthOfDevices(t *testing.T) {
	t.Parallel()
	const model = "NVIDIA-12345-ÄÖÜ-äöü"
	for name, test := range map[string]struct {
		remedy int // columns
		args   []string
		want   string // the model
	}{
		"fits":             {53, nil, model},
		"one too many":     {54, nil, short(model, 19)},
		"two too many":     {55, nil, short(model, 18)},
		"least":            {65, nil, short(model, 8)},
		"wide":             {120, []string{"-o", "wide"}, model},
		"a longer remedy":  {66, nil, short(model, 8)},
		"an endless other": {200, nil, short(model, 8)},
	} {
		remedy := strings.Repeat("r", test.remedy)
		text := statusText(t, status.Status{Version: "v1", GPUs: []status.Device{{Index: "0", UUID: "u", Model: model,
			State: "s", Remedy: remedy}}}, test.args...)
		if test.remedy > 65 && test.args == nil {
			remedy = short(remedy, 65)
		}
		if want := "\n0    u     " + test.want + "  s      -      " + remedy + "\n"; !strings.Contains(text, want) {
			t.Errorf("%s: there is no %q in:\n%s", name, want, text)
		}
	}
}

// short returns the beginning and the end of a text, as so many characters.
func short(text string, columns int) string {
	all := []rune(text)
	front := (columns - 1) / 2
	return string(all[:front]) + "…" + string(all[len(all)-(columns-1-front):])
}

// TestShortUUIDs: UUIDs are as short as they remain distinct.
func TestShortUUIDs(t *testing.T) {
	t.Parallel()
	text := statusText(t, status.Status{Version: "v1", GPUs: []status.Device{{UUID: "GPU-01234567-89ab-0"},
		{UUID: "GPU-01234567-89ab-1"}, {UUID: "MIG-1"}}})
	for _, want := range []string{"GPU-01234567-89ab-0 ", "GPU-01234567-89ab-1 ", "MIG-1 "} {
		if !strings.Contains(text, " "+want) {
			t.Errorf("%s is not printed:\n%s", want, text)
		}
	}
}

// TestColours: only a terminal has colours, and the user may want none.
func TestColours(t *testing.T) {
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	printStatus(t, file, sickStatus())
	if text, err := os.ReadFile(file.Name()); err != nil || bytes.Contains(text, []byte("\x1b")) || len(text) == 0 {
		t.Errorf("a file: %q, %v", text, err)
	}
	for _, test := range []struct {
		term, none string
		want       bool
	}{{"xterm", "", true}, {"xterm", "1", false}, {"dumb", "", false}} {
		t.Setenv("TERM", test.term)
		t.Setenv("NO_COLOR", test.none)
		device := newScreen(t, 100)
		printStatus(t, device.File, sickStatus())
		if text := device.text(); strings.Contains(text, "\x1b") != test.want {
			t.Errorf("TERM=%s NO_COLOR=%s: %q", test.term, test.none, text)
		}
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
		if text := statusText(t, *s); strings.Contains(text, "last scan failed: ") != want {
			t.Errorf("quiet %v, stale %q, want the line: %v\n%s", s.Quiet, s.Stale, want, text)
		}
	}
}

// fill gives every field a value: two elements to a slice, and to a text the name of its field.
func fill(v reflect.Value, name string) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(statusTime.Add(-90 * time.Second)))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), v.Type().Field(i).Name)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), name)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), name)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, name)
		fill(value, name)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("<" + name + ">")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(3)
	case reflect.Uint64:
		v.SetUint(3)
	case reflect.Float64:
		v.SetFloat(3)
	default:
		panic(v.Kind().String() + " of " + name)
	}
}

// TestPrintStatusOfEverything: every sentence of status at once. `go test ./internal/app/cli -run
// TestPrintStatusOfEverything -update` rewrites the texts.
func TestPrintStatusOfEverything(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	var s status.Status
	fill(reflect.ValueOf(&s).Elem(), "")
	s.DRA = nil // DRA has tests of its own
	s.Summary = status.Summarize(s)
	device := newScreen(t, 80)
	printStatus(t, device.File, s)
	for name, got := range map[string]string{"narrow": statusText(t, s), "wide": statusText(t, s, "-o", "wide"),
		"colour": device.text()} {
		path := "testdata/status/" + name + ".txt"
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got := statusText(t, status.Status{}); strings.Contains(got, "<") || strings.Count(got, "\n") > 4 {
		t.Errorf("of nothing: %s", got)
	}
}

func TestStatusOfDRA(t *testing.T) {
	t.Parallel()
	s := status.Status{DRA: &status.DRA{
		Mode: "split", Driver: status.DRADriver{Registered: true}, Slices: 1, Devices: 2, Generation: 4,
		Problem: "the API server is away",
		GPUs: []status.DRAGPU{{Index: 0, Owner: "plugin"}, {Index: 1, Owner: "dra"},
			{Index: 2, Owner: "leaving-dra", Waiting: "claim a/b has it"},
			{Index: 3, Owner: "leaving-plugin"}, {Index: 4, Owner: "nobody"}, {Index: 5},
			{Index: 6, Owner: "dra", Unpublished: "the API server drops its taint gpu.nvidia.com/xid"}},
		Claims: []status.DRAClaim{{Namespace: "a", Name: "b", Devices: []string{"gpu-2", "gpu-1"},
			Since: statusTime.Add(-time.Minute),
			Shares: []status.DRAShare{{Device: "gpu-1", MemoryBytes: 20 << 30},
				{Device: "gpu-2", MemoryBytes: 10 << 30, Limited: true}}},
			{Namespace: "a", Name: "c", Devices: []string{"gpu-3-mig-1g10gb-19-0"},
				Released: "the driver does not answer"},
			{Namespace: "a", Name: "d", Devices: []string{"gpu-4-mig-1g10gb-19-0"}, Released: "in use", Destroyed: true}},
	}}
	_, got, _ := strings.Cut(statusText(t, s, "-o", "wide"), "Dynamic")
	if diff := cmp.Diff(` Resource Allocation: mode split; registered with the kubelet; slices: 1 with 2 devices, generation 4; the API server is away

owner: GPU 1: in a ResourceSlice
owner: GPU 2: moves from its ResourceSlice to the device plugin; it waits: claim a/b has it
owner: GPU 3: moves from the device plugin into a ResourceSlice
owner: GPU 4: moves to the device plugin
owner: GPU 5: not known yet
owner: GPU 6: owned by claims, but in no ResourceSlice: the API server drops its taint gpu.nvidia.com/xid
claim: a/b has gpu-2, gpu-1 since 1999-12-31T23:59:00Z; 20480 MiB of gpu-1, not a limit; 10240 MiB of gpu-2, a limit by MPS
claim: a/c was released, but its devices at gpu-3-mig-1g10gb-19-0 still exist: the driver does not answer; no claim gets `+
		`this part of the GPU until they are removed; retried every 10 s
claim: a/d was released, and its MIG devices (gpu-4-mig-1g10gb-19-0) are destroyed, but MIG mode is still on: in use; the switch off is retried every 10 s
`, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for want, s := range map[string]status.DRA{
		"mode plugin; another driver of the same name registers at /a.sock": {Mode: "plugin",
			Driver: status.DRADriver{NameConflict: "/a.sock", Problem: "b"}},
		"mode plugin; not registered with the kubelet: b": {Mode: "plugin", Driver: status.DRADriver{Problem: "b"}},
		"mode plugin; not registered with the kubelet":    {Mode: "plugin"},
		"mode dra; not registered with the kubelet" +
			"; the API server drops taints of devices: a GPU that is not healthy leaves its slice" +
			"; the API server drops counters of devices: no MIG devices are created for claims" +
			"; the API server knows no shares of devices: GPUs are given whole": {Mode: "dra", NoTaints: true,
			NoCounters: true, NoShares: true},
	} {
		text := statusText(t, status.Status{DRA: &s}, "-o", "wide")
		if !strings.Contains(text, "\nDynamic Resource Allocation: "+want+"\n") {
			t.Errorf("there is no %q in:\n%s", want, text)
		}
	}
	text := statusText(t, status.Status{DRA: &status.DRA{Mode: "dra", Claims: []status.DRAClaim{{Namespace: "a",
		Name: "b", Devices: []string{"gpu-0"}, Since: statusTime.Add(-time.Minute), Problem: "gpu-0: lost"}}}})
	if !strings.Contains(text, "\nclaim: a/b has gpu-0 since 60s ago; gpu-0: lost\n") {
		t.Errorf("a claim with a problem:\n%s", text)
	}
	if text := statusText(t, status.Status{}); strings.Contains(text, "Allocation") {
		t.Errorf("Dynamic Resource Allocation is not used:\n%s", text)
	}
}

// TestAges: a duration has one unit, with a value of at least two.
func TestAges(t *testing.T) {
	t.Parallel()
	s := status.Status{Version: "v1"}
	var want []string
	for _, test := range []struct {
		age  time.Duration
		text string
	}{
		{-time.Second, "0s"}, {0, "0s"}, {2*time.Minute - 1, "119s"}, {2 * time.Minute, "2m"}, {2*time.Hour - 1, "119m"},
		{2 * time.Hour, "2h"}, {48*time.Hour - 1, "47h"}, {48 * time.Hour, "2d"}, {95 * time.Hour, "3d"},
	} {
		s.GPUs = append(s.GPUs, status.Device{UUID: fmt.Sprint(len(s.GPUs)), State: "age", Since: statusTime.Add(-test.age)})
		want = append(want, test.text)
	}
	var got []string
	for _, found := range regexp.MustCompile(`age +(\S+) ago`).FindAllStringSubmatch(statusText(t, s), -1) {
		got = append(got, found[1])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestNextChecks: the reason is omitted if the state of the GPU has it.
func TestNextChecks(t *testing.T) {
	t.Parallel()
	next := status.Moment(statusTime.Add(90 * time.Second))
	s := status.Status{
		GPUs: []status.Device{{Index: "1", Reason: "gone"}, {Index: "2", Reason: "gone"}, {Index: "4", Reason: "gone"}},
		Retries: []status.Retry{{Index: 1, Reason: "gone", Next: next}, {Index: 2, Reason: "lost", Next: next},
			{Index: 3, Reason: "gone"}, {Index: 4, Reason: "gone", Next: next}},
	}
	_, got, _ := strings.Cut(statusText(t, s), "\nnext check")
	if diff := cmp.Diff(" of GPU 2 in 90s: lost\nnext check of GPU 3 at -: gone\nnext check of GPU 1 in 90s, GPU 4 in 90s\n",
		got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	s.Retries = s.Retries[:1]
	_, got, _ = strings.Cut(statusText(t, s, "-o", "wide"), "\nnext check")
	if diff := cmp.Diff(" of GPU 1 at 2000-01-01T00:01:30Z\n", got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestReadinessLine: the line is printed if it differs from the summary, or has a reason.
func TestReadinessLine(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		state     string
		readiness status.Readiness
		want      string // empty for nothing
	}{
		"all served, ready":       {status.AllServed, status.Readiness{Ready: true}, ""},
		"degraded, ready":         {status.Degraded, status.Readiness{Ready: true}, ""},
		"starting, not ready":     {status.Starting, status.Readiness{}, ""},
		"degraded, not ready":     {status.Degraded, status.Readiness{}, "\nready: no\n"},
		"starting, ready":         {status.Starting, status.Readiness{Ready: true}, "\nready: yes\n"},
		"all served, with reason": {status.AllServed, status.Readiness{Ready: true, Reason: "r"}, "\nready: yes: r\n"},
	} {
		text := statusText(t, status.Status{Summary: status.Summary{State: tt.state}, Readiness: tt.readiness})
		if !strings.Contains(text, tt.want) || tt.want == "" && strings.Contains(text, "\nready: ") {
			t.Errorf("%s: %s", name, text)
		}
	}
}
