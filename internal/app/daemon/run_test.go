package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A cluster is a client of an API server that has one observation and one output. It has no other
// methods than the daemon calls here.
type cluster struct {
	daemon.Cluster
	observes atomic.Bool
	views    chan daemon.View // receives the View of the output
}

func (c *cluster) Problem() error { return errors.New("no API server") }
func (c *cluster) Observation(*feed.Feed[config.Config], string) []daemon.Task {
	return []daemon.Task{{Name: "own node", Run: func(ctx context.Context) error {
		c.observes.Store(true)
		<-ctx.Done()
		return nil
	}}}
}

func (c *cluster) Outputs(v daemon.View) []daemon.Task {
	return []daemon.Task{{Name: "labels of the node", Run: func(ctx context.Context) error {
		c.views <- v
		<-ctx.Done()
		return nil
	}}}
}

// A node is a simulated node with a running daemon.
type node struct {
	t       *testing.T
	socket  string // of the calls
	signals chan os.Signal
	cluster *cluster
}

// run runs a daemon on a simulated node until the test ends, after its first scan. It uses nothing
// of the machine that the arguments do not name.
func run(t *testing.T, args ...string) *node {
	t.Helper()
	n := &node{t, filepath.Join(loopback.Folder(t), "c.sock"), make(chan os.Signal, 1), &cluster{views: make(chan daemon.View, 1)}}
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	config.AddFlags(flags)
	if err := flags.Parse(append([]string{"--simulate=a100-mig-mixed", "--cdi-dir", t.TempDir(), "--kubelet-socket=",
		"--pod-resources-socket=", "--state-dir=", "--control-socket", n.socket}, args...)); err != nil {
		t.Fatal(err)
	}
	sources := config.Sources{Env: func(string) (string, bool) { return "", false }, Flags: flags}
	c, _, err := config.Load(sources)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	ended := make(chan error, 1)
	go func() {
		ended <- daemon.Run(ctx, daemon.Options{Config: c, Sources: sources, Cluster: n.cluster, Signals: n.signals})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	poll.Until(t, "the daemon has scanned its node", func() bool {
		var s status.Status
		return n.call(daemon.CallStatus, nil, &s) == nil && (!s.Looked.IsZero() || s.Stale != "")
	})
	return n
}

func (n *node) call(name string, arguments, result any) error {
	return control.Call(n.t.Context(), n.socket, name, arguments, result)
}

// status waits until the status is as wanted, and returns it.
func (n *node) status(what string, wanted func(status.Status) bool) (s status.Status) {
	n.t.Helper()
	poll.Until(n.t, what, func() bool {
		s = status.Status{}
		if err := n.call(daemon.CallStatus, nil, &s); err != nil {
			n.t.Fatal(err)
		}
		return wanted(s)
	})
	return s
}

func (n *node) inject(fault simulator.Fault) {
	n.t.Helper()
	if err := n.call(daemon.CallSimulateInject, fault, nil); err != nil {
		n.t.Fatal(err)
	}
}

// write replaces a file.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// TestViewOfTheCluster: the tasks for the API server run, with all parts of the daemon except for
// disabled parts.
func TestViewOfTheCluster(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ args, missing []string }{
		"nothing else": {nil, []string{"MIGChoice", "MIG", "DRA", "ClaimsOf", "Checkpoint"}},
		"all": {[]string{"--kubelet-socket", filepath.Join(loopback.Folder(t), "kubelet.sock"), "--mig-enabled",
			"--state-dir", t.TempDir()}, nil},
	} {
		n := run(t, test.args...)
		v := reflect.ValueOf(<-n.cluster.views)
		var missing []string
		for _, field := range reflect.VisibleFields(v.Type()) { // with those of ConfigView and the like
			if !field.Anonymous && v.FieldByIndex(field.Index).IsZero() {
				missing = append(missing, field.Name)
			}
		}
		if diff := cmp.Diff(test.missing, missing); diff != "" || !n.cluster.observes.Load() {
			t.Errorf("%s: it observes: %t; not there (-want +got):\n%s", name, n.cluster.observes.Load(), diff)
		}
	}
}

// TestCalls: GPUs and MIG devices by index and UUID, and invalid requests.
func TestCalls(t *testing.T) {
	t.Parallel()
	n := run(t)
	clears := func(gpu string) error { return n.call(daemon.CallHealthClear, daemon.ClearArguments{GPU: gpu}, nil) }
	s := n.status("MIG devices are there", func(s status.Status) bool { return len(s.GPUs) > 8 })
	part := slices.IndexFunc(s.GPUs, func(d status.Device) bool { return d.GPU != "" })
	for _, known := range []string{s.GPUs[part].Index, s.GPUs[part].UUID, s.GPUs[part].GPU, "0"} {
		if err := clears(known); err != nil {
			t.Errorf("%s: %v", known, err)
		}
	}
	for _, unknown := range []string{"99", "0:99", "GPU-9", ""} {
		if clears(unknown) == nil {
			t.Errorf("%q is cleared", unknown)
		}
	}
	if err := n.call(daemon.CallHealthClear, map[string]int{"gpu": 3}, nil); err == nil ||
		!strings.HasPrefix(err.Error(), "read the call's arguments: ") {
		t.Errorf("arguments of another form: %v", err)
	}
	n.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "0"})
	var gpus []simulator.Status
	if err := n.call(daemon.CallSimulateList, nil, &gpus); err != nil || len(gpus) == 0 || gpus[0].State != "lost" {
		t.Errorf("%+v, %v", gpus, err)
	}
	for _, name := range []string{daemon.CallMIGStatus, daemon.CallMIGApply} {
		if err := n.call(name, struct{}{}, nil); err == nil || err.Error() != choice.ErrOff.Error() {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestCallsOfRealGPUs: nothing is simulated.
func TestCallsOfRealGPUs(t *testing.T) {
	t.Parallel()
	n := run(t, "--simulate=", "--fail-on-init-error=false", "--driver-root-ctr-path", t.TempDir())
	for name, arguments := range map[string]any{
		daemon.CallSimulateInject: simulator.Fault{Kind: simulator.KindLost, GPU: "0"}, daemon.CallSimulateList: nil,
	} {
		if err := n.call(name, arguments, nil); err == nil || !strings.Contains(err.Error(), "serves real GPUs") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSignals: SIGUSR1 releases the driver, SIGUSR2 resumes its use, SIGHUP scans the node and
// reads the configuration.
func TestSignals(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.yaml")
	write(t, file, "version: v1\n")
	n := run(t, "--config-file", file)
	n.signals <- syscall.SIGUSR1
	s := n.status("the driver is released", func(s status.Status) bool { return s.Quiet })
	if s.Quiesced.Allocate {
		t.Error("new pods get GPUs")
	}
	n.signals <- syscall.SIGUSR2
	n.status("the driver is in use", func(s status.Status) bool { return !s.Quiet })
	n.inject(simulator.Fault{Kind: simulator.KindRemove, GPU: "7"})
	write(t, file, "version: v1\nmig: {enabled: true}\n")
	n.signals <- syscall.SIGHUP
	n.status("a GPU is missing", func(s status.Status) bool {
		return !slices.ContainsFunc(s.GPUs, func(d status.Device) bool { return d.Index == "7" })
	})
	poll.Until(t, "MIG layouts are switched on too late", func() bool {
		err := n.call(daemon.CallMIGStatus, struct{}{}, nil)
		return err != nil && strings.Contains(err.Error(), "start it again")
	})
}

// TestKernelLogIsSwitched: an XID in the kernel log counts only while the log is configured.
func TestKernelLogIsSwitched(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.yaml")
	write(t, file, "version: v1\n")
	n := run(t, "--config-file", file)
	healthy := func(gpu string) bool {
		s := n.status("", func(status.Status) bool { return true })
		i := slices.IndexFunc(s.GPUs, func(d status.Device) bool { return d.Index == gpu })
		return i >= 0 && s.GPUs[i].State == "Healthy"
	}
	logged := simulator.Fault{Kind: simulator.KindLoggedXID, GPU: "1", XID: 64, Count: 1}
	n.inject(logged)
	poll.Until(t, "GPU 2 has a fault", func() bool {
		n.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "2", XID: 64})
		return !healthy("2")
	})
	if !healthy("1") {
		t.Error("the log is read without being configured")
	}
	write(t, file, "version: v1\nhealth: {kernelLog: true}\n")
	n.signals <- syscall.SIGHUP
	poll.Until(t, "GPU 1 has a fault", func() bool { // the log is read from the time when it is opened
		n.inject(logged)
		return !healthy("1")
	})
}

// TestReadinessIsAwaited: the answer comes when the daemon is ready, or after the wait, or at the
// end of the daemon.
func TestReadinessIsAwaited(t *testing.T) {
	t.Parallel()
	ready := func(n *node, wait time.Duration) (r status.Readiness) {
		if err := n.call(daemon.CallReady, daemon.ReadyArguments{WaitMilliseconds: wait.Milliseconds()}, &r); err != nil {
			t.Error(err)
		}
		return r
	}
	if got := ready(run(t), time.Hour); !got.Ready {
		t.Errorf("%+v", got)
	}
	n := run(t, "--kubelet-socket", filepath.Join(loopback.Folder(t), "kubelet.sock"))
	began := time.Now()
	if got := ready(n, 0); got.Ready || got.Reason == "" {
		t.Errorf("%+v", got)
	}
	if got := ready(n, 20*time.Millisecond); got.Ready || time.Since(began) < 20*time.Millisecond {
		t.Errorf("%+v after %v", got, time.Since(began))
	}
	go func() { // the end of the daemon waits for its calls
		_ = control.Call(context.Background(), n.socket, daemon.CallReady, daemon.ReadyArguments{WaitMilliseconds: 1 << 40}, nil)
	}()
}

// TestWatchedStatus: the status is sent at once, and again when it changes in more than the time of
// the last scan.
func TestWatchedStatus(t *testing.T) {
	t.Parallel()
	n := run(t)
	view := <-n.cluster.views
	sent := make(chan status.Status)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- control.Follow(ctx, n.socket, daemon.CallStatusWatch, nil, func(s status.Status) error {
			select {
			case sent <- s:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	until := func(what string, is func(status.Status) bool) {
		t.Helper()
		for late := time.After(patience); ; {
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
	until("the GPUs", func(s status.Status) bool { return len(s.GPUs) > 0 && s.Readiness.Ready })
	view.ConfigErrors.Publish(errors.New("e"))
	until("an error", func(s status.Status) bool { return s.ConfigError == "e" })
	view.LabelsProblem.Publish(errors.New("l"))
	until("what no feed has", func(s status.Status) bool { return s.LabelsError == "l" })
	for unread := false; !unread; { // the last change may be sent in parts
		select {
		case <-sent:
		case <-time.After(300 * time.Millisecond):
			unread = true
		}
	}
	scan := n.status("the time of the last scan", func(status.Status) bool { return true }).Looked
	if err := n.call(daemon.CallHealthClear, daemon.ClearArguments{GPU: "1"}, nil); err != nil {
		t.Fatal(err)
	}
	n.status("a scan", func(s status.Status) bool { return s.Looked.After(scan) })
	select {
	case s := <-sent:
		t.Errorf("sent again: %+v", s)
	case <-time.After(300 * time.Millisecond):
	}
	before := view.Snapshots.Value().Generation
	n.inject(simulator.Fault{Kind: simulator.KindLost, GPU: "0"})
	until("a scan", func(s status.Status) bool { return s.Generation > before })
	cancel()
	if err := <-ended; !errors.Is(err, control.ErrEnded) {
		t.Error(err)
	}
}

// TestMetrics: metrics are served at the configured address, with the name of this machine as the
// name of the node if there is no other.
func TestMetrics(t *testing.T) {
	t.Parallel()
	address, err := loopback.Free(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	n := run(t, "--metrics-address", address)
	n.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "0", XID: 79})
	for _, want := range []string{"200 OK", "gpu_device_plugin_", fmt.Sprintf("hostname=%q", host), `err_msg="`} {
		poll.Until(t, "metrics have "+want, func() bool { return strings.Contains(scraped(address), want) })
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

// TestSpecsAreWritten: devices are withheld only until their CDI specs are written.
func TestSpecsAreWritten(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	n := run(t, "--simulate=t4", "--device-list-strategy=cdi-cri", "--cdi-dir", folder)
	view := <-n.cluster.views
	poll.Until(t, "a GPU is offered", func() bool { return len(view.Offered.Value().Resources) > 0 })
	if files, err := os.ReadDir(folder); err != nil || len(files) == 0 {
		t.Errorf("%d files, %v", len(files), err)
	}
	blocked := filepath.Join(t.TempDir(), "file")
	write(t, blocked, "")
	n = run(t, "--simulate=t4", "--device-list-strategy=cdi-cri", "--cdi-dir", filepath.Join(blocked, "cdi"))
	s := n.status("the GPU is withheld", func(s status.Status) bool { return len(s.Holds) > 0 })
	if offered := (<-n.cluster.views).Offered.Value().Resources; len(offered) > 0 || s.Holds[0].Listed {
		t.Errorf("offered without a spec: %+v; %+v", offered, s.Holds)
	}
}

// TestKubeletIsSeen: each socket of the kubelet counts as a kubelet.
func TestKubeletIsSeen(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(loopback.Folder(t), "kubelet.sock")
	n := run(t, "--kubelet-socket", socket)
	n.status("no kubelet is seen", func(s status.Status) bool { return s.Kubelets == 0 })
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	n.status("a kubelet is seen", func(s status.Status) bool { return s.Kubelets == 1 })
}
