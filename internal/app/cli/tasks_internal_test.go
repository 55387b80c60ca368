package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// TestLinesOfChanges: the new state has its colour, long lines are cut, and a wide line names the
// device.
func TestLinesOfChanges(t *testing.T) {
	t.Parallel()
	sick := status.Change{Kind: "device", Name: "0", Device: "GPU-0", From: "Lost", To: "Healthy", Reason: "Healthy again"}
	for name, test := range map[string]struct {
		change  status.Change
		view    view
		columns int
		want    string
	}{
		"plain":            {sick, view{}, 0, "GPU 0: Lost → Healthy: Healthy again"},
		"as wide as it is": {sick, view{}, 36, "GPU 0: Lost → Healthy: Healthy again"},
		"one column less":  {sick, view{}, 35, "GPU 0: Lost → Healthy: Healthy aga…"},
		"wide":             {sick, view{wide: true}, 0, "GPU 0: Lost → Healthy: Healthy again (GPU-0)"},
		"of no device":     {status.Change{Kind: "summary", To: "x"}, view{wide: true}, 0, "summary: x"},
		"in colour":        {sick, view{colour: true}, 0, "GPU 0: Lost → \x1b[32mHealthy\x1b[0m: Healthy again"},
		"of what is new": {status.Change{Kind: "device", Name: "0", To: "Lost", Reason: "r"}, view{colour: true}, 0,
			"GPU 0: \x1b[31mLost\x1b[0m: r"},
		"without a colour": {status.Change{Kind: "driver", From: "1", To: "2"}, view{colour: true}, 0, "driver: 1 → 2"},
		"that is cut off":  {sick, view{colour: true}, 18, "GPU 0: Lost → Hea…"},
		"of one name with it": {status.Change{Kind: "device", Name: "0", From: "Lost", To: "Lost"}, view{colour: true}, 0,
			"GPU 0: still \x1b[31mLost\x1b[0m"},
	} {
		w := &watcher{view: test.view}
		if got := w.line(test.change, test.columns); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestWatchOfADaemonThatGoes: the end of the daemon and the next daemon are each reported once.
func TestWatchOfADaemonThatGoes(t *testing.T) {
	t.Parallel()
	folder := loopback.Folder(t)
	socket := filepath.Join(folder, "c.sock")
	reader, writer := io.Pipe()
	w, err := newWatcher(writer, outputTable, view{})
	if err != nil {
		t.Fatal(err)
	}
	running(t, func(ctx context.Context) error { return w.follow(ctx, socket) })
	lines := make(chan string, 100)
	go func() {
		defer close(lines)
		for all := bufio.NewScanner(reader); all.Scan(); {
			lines <- all.Text()
		}
	}()
	t.Cleanup(func() { _ = reader.Close() })
	prints := func(want string) {
		t.Helper()
		select {
		case line := <-lines:
			if !strings.Contains(line, want) {
				t.Errorf("it prints %q, want %q", line, want)
			}
		case <-time.After(time.Minute):
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

// labeledCluster records the labels that are written once.
type labeledCluster struct {
	fakeCluster
	labels map[string]string
}

func (l *labeledCluster) LabelOnce(_ context.Context, _ config.Startup, labels map[string]string) error {
	l.labels = labels
	return nil
}

// TestLabelsOnce: labels are printed, written to a file or to an object, with an optional
// timestamp; and the driver may be unusable.
func TestLabelsOnce(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "f")
	base := config.Config{Startup: config.Startup{Simulate: "t4"}}
	base.Features = config.Features{Labels: config.LabelsFile, MachineTypeFile: "/nowhere"}
	broken := base
	broken.Simulate, broken.Driver.ContainerRoot = "", "/nowhere"
	for name, test := range map[string]struct {
		change func(*config.Config)
		config config.Config
		fails  bool
		where  string
		stamp  bool
	}{
		"printed":          {func(*config.Config) {}, base, false, "out", false},
		"with a timestamp": {func(c *config.Config) { c.Features.LabelsTimestamp = true }, base, false, "out", true},
		"into a file":      {func(c *config.Config) { c.Features.LabelsFile = file }, base, false, "file", false},
		"as an object": {func(c *config.Config) { c.Features.Labels = config.LabelsNodeFeature }, base, false, "object",
			false},
		"without a driver":   {func(*config.Config) {}, broken, false, "out", false},
		"a driver is needed": {func(c *config.Config) { c.FailOnInitError = true }, broken, true, "", false},
	} {
		_ = os.Remove(file)
		cluster, c := &labeledCluster{}, test.config
		test.change(&c)
		var out bytes.Buffer
		err := NodeAgent(cluster).discoverOnce(t.Context(), c, &out)
		written, _ := os.ReadFile(file)
		where := ""
		switch {
		case out.Len() > 0:
			where = "out"
		case len(written) > 0:
			where = "file"
		case len(cluster.labels) > 0:
			where = "object"
		}
		text := out.String() + string(written)
		if (err != nil) != test.fails || where != test.where || strings.Contains(text, "gfd.timestamp=") != test.stamp ||
			strings.Contains(text, "expiry") {
			t.Errorf("%s: %v, in %q: %s", name, err, where, text)
		}
	}
}

// TestContainerIsChecked: by the variable of this process, which is not in a container with GPUs.
func TestContainerIsChecked(t *testing.T) {
	for visible, test := range map[string]struct{ args, prints, fails string }{
		"GPU-a,GPU-b": {"--devices 2 --simulated", "devices: GPU-a, GPU-b; device nodes: ", ""},
		"GPU-a":       {"--devices 2 --simulated", "", "the container requested 2 devices and got others"},
		"all":         {"", "", "no devices were allocated for this container"},
	} {
		t.Setenv(visibleDevices, visible)
		got, err := execute(t.Context(), append([]string{"check-container"}, strings.Fields(test.args)...)...)
		if !strings.HasPrefix(got, test.prints) || (err == nil) != (test.fails == "") ||
			err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%s: %q, %v", visible, got, err)
		}
	}
}

// TestReexecutionsAreCounted: the count is in a variable, which is unset at first.
func TestReexecutionsAreCounted(t *testing.T) {
	for value, want := range map[string]int{"": 0, "2": 2, "x": 0} {
		if t.Setenv(reexecuted, value); reexecutions() != want {
			t.Errorf("%q: %d", value, reexecutions())
		}
	}
}

// running runs a task until the test ends.
func running(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestWatchOfNothing: an empty answer has no change to print.
func TestWatchOfNothing(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	w, err := newWatcher(&out, outputTable, view{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.receive(status.Status{}); err != nil || out.String() != "" {
		t.Errorf("receive() = %v, printed %q", err, out.String())
	}
}
