package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

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

// TestWatchedStatus: the status is sent at once, and again when it changes in more than the time of
// the last scan.
func TestWatchedStatus(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, alone...))
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
		"readiness": {func() { d.report.readiness.Answer().Publish(status.Readiness{Ready: true}) },
			func(s status.Status) bool { return s.Readiness.Ready }},
		"an error": {func() { d.watcher.Errors().Publish(errors.New("e")) },
			func(s status.Status) bool { return s.ConfigError == "e" }},
		"MPS": {func() { d.kubelet.mps.Unready().Publish(map[string]string{"a": "b"}) },
			func(s status.Status) bool { return len(s.MPS) == 1 }},
		"what is offered": {func() { d.kubelet.set.Offered().Publish(resource.Plan{Warnings: []string{"w"}}) },
			func(s status.Status) bool { return len(s.Warnings) == 1 }},
		"what no feed has": {func() { d.report.labelsProblem.Publish(errors.New("l")) },
			func(s status.Status) bool { return s.LabelsError == "l" }},
	} {
		change.publish()
		until(what, change.is)
	}
	for waits := true; waits; { // the last change may be sent in parts
		select {
		case <-sent:
		case <-time.After(3 * watchGap):
			waits = false
		}
	}
	if _, err := d.gpus.monitor.Look(t.Context()); err != nil {
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

// TestGroupsOfMPS: groups are computed for each Snapshot after the first scan, and for each
// configuration.
func TestGroupsOfMPS(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--simulate=t4")...))
	signals := make(chan os.Signal, 1)
	m := &mpsNode{watcher: d.watcher, monitor: d.gpus.monitor, wanted: feed.New[[]mps.Group](nil), signals: signals}
	running(t, m.followPlan)
	groups := func(want int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if !feed.Until(ctx, m.wanted, func(now []mps.Group) bool { return len(now) == want }) {
			t.Fatalf("%d groups, want %d", len(m.wanted.Value()), want)
		}
	}
	c := d.watcher.Configs().Value()
	shared := c
	shared.Resource.Sharing = resource.Sharing{Mode: resource.MPS,
		Rules: []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}}}
	d.watcher.Configs().Publish(shared)
	groups(1)
	d.watcher.Configs().Publish(c)
	groups(0)
}

// TestMetricsOfADaemon: metrics are served at the configured address, with the name of the node, or
// of this machine.
func TestMetricsOfADaemon(t *testing.T) {
	t.Parallel()
	address, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--metrics-address", address)...))
	running(t, d.serveMetrics)
	poll.Until(t, "metrics are served", func() bool {
		text := scraped(address)
		return strings.Contains(text, "gpu_device_plugin_") && strings.Contains(text, "200 OK")
	})
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

// TestSpecsAreWritten: written specs are not missing, and no others are reported as written.
func TestSpecsAreWritten(t *testing.T) {
	t.Parallel()
	d := scanning(t, unstarted(t, nil, append(slices.Clone(alone), "--simulate=t4", "--device-list-strategy=cdi-cri")...))
	c, snapshot := d.watcher.Configs().Value(), d.gpus.monitor.Snapshots().Value()
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
