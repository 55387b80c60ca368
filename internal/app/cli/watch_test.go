package cli_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// watched returns what status --watch prints of statuses: a first daemon sends all but the last, and
// ends, and a second daemon sends the last. The output ends at a line with the text last. Each line
// is without the time.
func watched(t *testing.T, to *screen, last string, statuses []status.Status, args ...string) string {
	t.Helper()
	socket := filepath.Join(loopback.Folder(t), "c.sock")
	var daemons atomic.Int32
	there := map[string]control.Handler{"there": func(context.Context, json.RawMessage) (any, error) { return nil, nil }}
	running(t, control.NewServer(socket, there, map[string]control.Stream{
		daemon.CallStatusWatch: func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			if daemons.Add(1) > 1 {
				if err := send(statuses[len(statuses)-1]); err != nil {
					return err
				}
				<-ctx.Done()
				return nil
			}
			for _, s := range statuses[:len(statuses)-1] {
				if err := send(s); err != nil {
					return err
				}
			}
			return nil
		},
	}).Run)
	poll.Until(t, "the socket is answered", func() bool {
		return control.Call(t.Context(), socket, "there", nil, nil) == nil
	})
	lines := watch(t, to, socket, args...)
	var text strings.Builder
	for {
		select {
		case line := <-lines:
			text.WriteString(regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ {2}`).ReplaceAllString(line, "") + "\n")
			if strings.Contains(line, last) {
				return text.String()
			}
		case <-time.After(patience):
			t.Fatalf("it does not print %q:\n%s", last, text.String())
		}
	}
}

// watch runs status --watch until the end of the test, and returns the lines that it prints: to a
// terminal, if one is given.
func watch(t *testing.T, to *screen, socket string, args ...string) <-chan string {
	t.Helper()
	args = append([]string{"status", "--watch", "--control-socket", socket}, args...)
	execute := func(w io.Writer) {
		running(t, func(ctx context.Context) error {
			return cli.DevicePlugin().Execute(ctx, "gpu-device-plugin", args, w)
		})
	}
	if to != nil {
		execute(to.File)
		return to.lines
	}
	reader, writer := io.Pipe()
	lines := make(chan string, 1000)
	t.Cleanup(func() { _ = reader.Close() })
	execute(writer)
	go func() {
		for all := bufio.NewScanner(reader); all.Scan(); {
			lines <- all.Text()
		}
	}()
	return lines
}

// running runs a task until the test ends.
func running(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestWatchPrints: the summary comes first, then changes, and the end and return of the daemon.
func TestWatchPrints(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	before, after := sickStatus(), sickStatus()
	before.Summary, after.Summary = status.Summary{State: "ready", Text: "fine"}, status.Summary{State: "degraded",
		Text: "bad"}
	before.GPUs[0].State, before.GPUs[0].Reason, before.GPUs[0].Remedy, before.GPUs[0].Events = "Healthy", "", "", nil
	later := after
	later.Driver = "9"
	all := []status.Status{{}, before, after, after, later}
	const last = "580 → 9"
	const want = "summary: ready: fine\n" +
		"GPU 0: Healthy → Lost (remedy: reboot): gone\n" +
		"event of GPU 0: XID 79 × 1\n" +
		"summary: ready → degraded: bad\n" +
		"connection: waiting for the daemon: the daemon has ended the connection: EOF\n" +
		"connection: waiting for the daemon → connected\n" +
		"driver: 580 → 9\n"
	if diff := cmp.Diff(want, watched(t, nil, last, all)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	device := newScreen(t, 40)
	if got := watched(t, &device, last, all, "-o", "wide"); !strings.Contains(got,
		"GPU 0: Healthy → \x1b[31mLost\x1b[0m (remedy: reboot): gone (GPU-01234567-89ab)\n") {
		t.Errorf("wide, in colour:\n%s", got)
	}
	var objects []status.Change
	for line := range strings.Lines(watched(t, nil, `"9"`, all, "-o", "json")) {
		var c status.Change
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatal(err)
		}
		objects = append(objects, c)
	}
	if len(objects) < 10 || !slices.ContainsFunc(objects, func(c status.Change) bool { return c.Kind == "daemon" }) ||
		time.Since(time.Time(objects[0].Time)) > time.Hour {
		t.Errorf("objects: %+v", objects)
	}
}

// TestLinesOfChanges: the new state has its colour, and long lines are cut.
func TestLinesOfChanges(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	device := func(state, reason string) status.Status {
		return status.Status{Version: "v1", Driver: "1", GPUs: []status.Device{{Index: "0", UUID: "GPU-0", State: state,
			Reason: reason}}}
	}
	const stamp = 22 // columns
	for name, test := range map[string]struct {
		columns       uint16
		before, after status.Status
		want          string
	}{
		"as wide as it is": {stamp + 36, device("Lost", ""), device("Healthy", "Healthy again"),
			"GPU 0: Lost → \x1b[32mHealthy\x1b[0m: Healthy again"},
		"one column less": {stamp + 35, device("Lost", ""), device("Healthy", "Healthy again"),
			"GPU 0: Lost → \x1b[32mHealthy\x1b[0m: Healthy aga…"},
		"no width": {0, device("Lost", ""), device("Healthy", "Healthy again"),
			"GPU 0: Lost → \x1b[32mHealthy\x1b[0m: Healthy again"},
		"cut in the state": {stamp + 18, device("Lost", ""), device("Healthy", "Healthy again"), "GPU 0: Lost → Hea…"},
		"a new device":     {100, status.Status{Version: "v1", Driver: "1"}, device("Lost", "r"), "GPU 0: \x1b[31mLost\x1b[0m: r"},
		"the same state":   {100, device("Lost", ""), device("Lost", "r"), "GPU 0: still \x1b[31mLost\x1b[0m: r"},
		"without a colour": {100, status.Status{Version: "v1", Driver: "1"}, status.Status{Version: "v1", Driver: "2"},
			"driver: 1 → 2"},
	} {
		end := test.after
		end.Driver = "9"
		terminal := newScreen(t, test.columns)
		got := watched(t, &terminal, "→ 9", []status.Status{test.before, test.after, end})
		if !strings.Contains("\n"+got, "\n"+test.want+"\n") {
			t.Errorf("%s: there is no %q in\n%q", name, test.want, got)
		}
	}
}

// TestWatchOfADaemonThatGoes: the end of the daemon and the next daemon are each reported once.
func TestWatchOfADaemonThatGoes(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(loopback.Folder(t), "c.sock")
	lines := watch(t, nil, socket)
	prints := func(want string) {
		t.Helper()
		select {
		case line := <-lines:
			if !strings.Contains(line, want) {
				t.Errorf("it prints %q, want %q", line, want)
			}
		case <-time.After(patience):
			t.Fatalf("it does not print %q", want)
		}
	}
	prints("connection: waiting for the daemon: no daemon answers at")
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		stream := func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			if err := send(status.Status{Version: "v1", Summary: status.Summary{State: "ready", Text: "fine"}}); err != nil {
				return err
			}
			<-ctx.Done()
			return nil
		}
		go func() {
			ended <- control.NewServer(socket, nil, map[string]control.Stream{daemon.CallStatusWatch: stream}).Run(ctx)
		}()
		prints("connection: waiting for the daemon → connected")
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for line := range lines { // the summary of the first daemon
			if strings.Contains(line, "connection: waiting for the daemon: ") {
				break
			}
			if !strings.Contains(line, "summary: ready: fine") {
				t.Errorf("it prints %q", line)
			}
		}
	}
}
