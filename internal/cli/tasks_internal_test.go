package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/control"
	agent "github.com/gpu-device-plugin/gpu-device-plugin/internal/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
)

// running has a task run until the test ends.
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

// TestWatchedStatus: the status is sent at once, and again when more of it changes than the time of the last look.
func TestWatchedStatus(t *testing.T) {
	t.Parallel()
	d := looking(t, unstarted(t, nil, alone...))
	sent := make(chan status.Status)
	running(t, func(ctx context.Context) error {
		return d.watch(ctx, func(s any) error {
			select {
			case sent <- s.(status.Status):
			case <-ctx.Done():
			}
			return nil
		})
	})
	until := func(what string, is func(status.Status) bool) {
		t.Helper()
		for late := time.After(time.Minute); ; {
			select {
			case s := <-sent:
				if is(s) {
					return
				}
			case <-late:
				t.Fatalf("never sent: %s", what)
			}
		}
	}
	until("the GPUs", func(s status.Status) bool { return len(s.GPUs) > 0 })
	for what, change := range map[string]struct {
		publish func()
		is      func(status.Status) bool
	}{
		"readiness":        {func() { d.readiness.Answer().Publish(status.Readiness{Ready: true}) }, func(s status.Status) bool { return s.Readiness.Ready }},
		"an error":         {func() { d.watcher.Errors().Publish(errors.New("e")) }, func(s status.Status) bool { return s.ConfigError == "e" }},
		"MPS":              {func() { d.mps.Unready().Publish(map[string]string{"a": "b"}) }, func(s status.Status) bool { return len(s.MPS) == 1 }},
		"what is offered":  {func() { d.set.Offered().Publish(resource.Plan{Warnings: []string{"w"}}) }, func(s status.Status) bool { return len(s.Warnings) == 1 }},
		"what no feed has": {func() { d.unlabeled.Publish(errors.New("l")) }, func(s status.Status) bool { return s.LabelsError == "l" }},
	} {
		change.publish()
		until(what, change.is)
	}
	if _, err := d.monitor.Look(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case s := <-sent:
		t.Errorf("sent again: %+v", s)
	case <-time.After(3 * watchGap):
	}
	refused := errors.New("the client takes no more")
	if err := d.watch(t.Context(), func(any) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("a watch whose client has gone: %v", err)
	}
}

// TestLinesOfChanges: the state that begins is in its colour, what fits is printed, and a wide line names the device.
func TestLinesOfChanges(t *testing.T) {
	t.Parallel()
	sick := status.Change{Kind: "device", Name: "0", Device: "GPU-0", From: "Lost", To: "Healthy", Reason: "Healthy again"}
	for name, test := range map[string]struct {
		change  status.Change
		view    view
		columns int
		want    string
	}{
		"plain":               {sick, view{}, 0, "GPU 0: Lost → Healthy: Healthy again"},
		"as wide as it is":    {sick, view{}, 36, "GPU 0: Lost → Healthy: Healthy again"},
		"one column less":     {sick, view{}, 35, "GPU 0: Lost → Healthy: Healthy aga…"},
		"wide":                {sick, view{wide: true}, 0, "GPU 0: Lost → Healthy: Healthy again (GPU-0)"},
		"of no device":        {status.Change{Kind: "summary", To: "x"}, view{wide: true}, 0, "summary: x"},
		"in colour":           {sick, view{colour: true}, 0, "GPU 0: Lost → \x1b[32mHealthy\x1b[0m: Healthy again"},
		"of what is new":      {status.Change{Kind: "device", Name: "0", To: "Lost", Reason: "r"}, view{colour: true}, 0, "GPU 0: \x1b[31mLost\x1b[0m: r"},
		"without a colour":    {status.Change{Kind: "driver", From: "1", To: "2"}, view{colour: true}, 0, "driver: 1 → 2"},
		"that is cut off":     {sick, view{colour: true}, 18, "GPU 0: Lost → Hea…"},
		"of one name with it": {status.Change{Kind: "device", Name: "0", From: "Lost", To: "Lost"}, view{colour: true}, 0, "GPU 0: still \x1b[31mLost\x1b[0m"},
	} {
		w := &watcher{view: test.view}
		if got := w.line(test.change, test.columns); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestWatchOfADaemonThatGoes: that it has gone is said once, and that another one is there.
func TestWatchOfADaemonThatGoes(t *testing.T) {
	t.Parallel()
	folder, err := os.MkdirTemp("", "c")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
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
		stream := func(ctx context.Context, send func(any) error) error {
			if err := send(status.Status{Version: "v1", Summary: status.Summary{State: "ready", Text: "fine"}}); err != nil {
				return err
			}
			<-ctx.Done()
			return nil
		}
		go func() {
			ended <- control.NewServer(socket, nil, map[string]control.Stream{callStatusWatch: stream}).Run(ctx)
		}()
		prints("connection: waiting for the daemon → connected")
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for line := range lines { // the summary of the first one
			if strings.Contains(line, "connection: waiting for the daemon: ") {
				break
			}
			if !strings.Contains(line, "summary: ready: fine") {
				t.Errorf("it prints %q", line)
			}
		}
	}
}

// TestGroupsOfMPS: they are made of each Snapshot after the first look, and of each configuration.
func TestGroupsOfMPS(t *testing.T) {
	t.Parallel()
	d := looking(t, unstarted(t, nil, append(slices.Clone(alone), "--simulate=t4")...))
	asked := make(chan os.Signal, 1)
	m := &mpsNode{watcher: d.watcher, monitor: d.monitor, wanted: feed.New[[]mps.Group](nil), asked: asked}
	running(t, m.followPlan)
	groups := func(want int) {
		t.Helper()
		for late := time.After(time.Minute); ; {
			now, changed := m.wanted.Latest()
			if len(now) == want {
				return
			}
			select {
			case <-changed:
			case <-late:
				t.Fatalf("%d groups, want %d", len(now), want)
			}
		}
	}
	c := d.watcher.Configs().Value()
	shared := c
	shared.Resource.Sharing = resource.Sharing{Mode: resource.MPS, Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}}
	d.watcher.Configs().Publish(shared)
	groups(1)
	d.watcher.Configs().Publish(c)
	groups(0)
}

// printedLabels notes each time that labels are printed.
type printedLabels struct {
	mu      sync.Mutex
	texts   []string
	refuses error
}

func (p *printedLabels) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.texts = append(p.texts, string(text))
	return len(text), p.refuses
}

// taken returns what was printed since the last time.
func (p *printedLabels) taken() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { p.texts = nil }()
	return p.texts
}

// TestLabelsArePrinted when they change, and again after each interval, where there is no file.
func TestLabelsArePrinted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c config.Config
		c.Features.Labels, c.Discovery.Sleep = config.LabelsFile, time.Minute
		out := &printedLabels{}
		d := &discovery{daemon: daemon{
			watcher: config.NewWatcher(config.Sources{}, c, clock.RealClock{}), labels: &agent.Labels{Wanted: feed.New[map[string]string](nil)},
		}, output: out}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.print(ctx) }()
		printed := func(what string, passes time.Duration, want ...string) {
			t.Helper()
			time.Sleep(passes)
			synctest.Wait()
			if diff := cmp.Diff(want, out.taken()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
		printed("before they are known", 90*time.Second)
		d.labels.Wanted.Publish(map[string]string{"a": "1"})
		printed("at once", time.Second, "a=1\n")
		printed("after two intervals", 2*time.Minute, "a=1\n", "a=1\n")
		d.labels.Wanted.Publish(map[string]string{"a": "2", "b": "3"})
		printed("others", time.Second, "a=2\nb=3\n")
		c.Discovery.Sleep = 0
		d.watcher.Configs().Publish(c)
		printed("without an interval", time.Hour, "a=2\nb=3\n")
		c.Features.LabelsFile = "/f"
		d.watcher.Configs().Publish(c)
		d.labels.Wanted.Publish(map[string]string{"a": "4"})
		printed("into a file", time.Hour)
		c.Features.LabelsFile, c.Features.Labels = "", config.LabelsOff
		d.watcher.Configs().Publish(c)
		printed("nowhere", time.Hour)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		c.Features.Labels = config.LabelsFile
		d.watcher.Configs().Publish(c)
		out.refuses = errors.New("no space is left")
		if err := d.print(t.Context()); !errors.Is(err, out.refuses) {
			t.Errorf("an output that takes no more: %v", err)
		}
	})
}

// labeledCluster notes the labels that are written once.
type labeledCluster struct {
	fakeCluster
	labels map[string]string
}

func (l *labeledCluster) LabelOnce(_ context.Context, _ config.Config, labels map[string]string) error {
	l.labels = labels
	return nil
}

// TestLabelsOnce: printed, into a file, or as an object, with a timestamp if one is wanted; and where the driver cannot be used.
func TestLabelsOnce(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "f")
	base := config.Config{Simulate: "t4"}
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
		"printed":            {func(*config.Config) {}, base, false, "out", false},
		"with a timestamp":   {func(c *config.Config) { c.Features.LabelsTimestamp = true }, base, false, "out", true},
		"into a file":        {func(c *config.Config) { c.Features.LabelsFile = file }, base, false, "file", false},
		"as an object":       {func(c *config.Config) { c.Features.Labels = config.LabelsNodeFeature }, base, false, "object", false},
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
		if (err != nil) != test.fails || where != test.where || strings.Contains(text, "gfd.timestamp=") != test.stamp || strings.Contains(text, "expiry") {
			t.Errorf("%s: %v, in %q: %s", name, err, where, text)
		}
	}
}

// TestMetricsOfADaemon: they are served at the address of the configuration, with the name of the node, or of this machine.
func TestMetricsOfADaemon(t *testing.T) {
	t.Parallel()
	address, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d := looking(t, unstarted(t, nil, append(slices.Clone(alone), "--metrics-address", address)...))
	running(t, d.serveMetrics)
	for late := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		text := scraped(address)
		if strings.Contains(text, "gpu_device_plugin_") && strings.Contains(text, "200 OK") {
			break
		}
		if time.Now().After(late) {
			t.Fatalf("metrics are not served: %s", text)
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for given, want := range map[string]string{"": host, "node-1": "node-1"} {
		d := unstarted(t, nil, append(slices.Clone(alone), "--node-name", given)...)
		if got := d.gpuMetrics(nil, nil); got.Hostname != want || got.XIDName(79) == "" {
			t.Errorf("of node %q: %q, %q", given, got.Hostname, got.XIDName(79))
		}
	}
}

func scraped(address string) string {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET /metrics HTTP/1.0\r\n\r\n")
	text, _ := io.ReadAll(conn)
	return string(text)
}

// TestSpecsAreWritten: what was written is not lacking, and nothing else is said to be there.
func TestSpecsAreWritten(t *testing.T) {
	t.Parallel()
	d := looking(t, unstarted(t, nil, append(slices.Clone(alone), "--simulate=t4", "--device-list-strategy=cdi-cri")...))
	c, snapshot := d.watcher.Configs().Value(), d.monitor.Snapshots().Value()
	plan := resource.New(snapshot, c.Resource)
	folder := t.TempDir()
	s := newSpecs(folder)
	if lacks := s.Lacks(snapshot, plan, c); len(lacks) == 0 {
		t.Error("nothing is written, and nothing is lacking")
	}
	if err := s.Apply(snapshot, plan, c); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(folder)
	if lacks := s.Lacks(snapshot, plan, c); len(lacks) > 0 || len(files) == 0 || err != nil {
		t.Errorf("it lacks %v; files: %v, %v", lacks, files, err)
	}
}

// TestContainerIsChecked: by the variable of this process, which is in no container with GPUs.
func TestContainerIsChecked(t *testing.T) {
	for visible, test := range map[string]struct{ args, prints, fails string }{
		"GPU-a,GPU-b": {"--devices 2 --simulated", "devices: GPU-a, GPU-b; device nodes: ", ""},
		"GPU-a":       {"--devices 2 --simulated", "", "the container requested 2 devices and got others"},
		"all":         {"", "", "nobody allocated devices for this container"},
	} {
		t.Setenv(visibleDevices, visible)
		got, err := execute(t.Context(), append([]string{"check-container"}, strings.Fields(test.args)...)...)
		if !strings.HasPrefix(got, test.prints) || (err == nil) != (test.fails == "") || err != nil && !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%s: %q, %v", visible, got, err)
		}
	}
}

// TestProcessCountsItsLives: by a variable, which is none at first.
func TestProcessCountsItsLives(t *testing.T) {
	for value, want := range map[string]int{"": 0, "2": 2, "x": 0} {
		if t.Setenv(reexecuted, value); reexecutions() != want {
			t.Errorf("%q: %d", value, reexecutions())
		}
	}
}
