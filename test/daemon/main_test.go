package daemon

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

const (
	gpu = "nvidia.com/gpu"
	// patience bounds every wait for something that must happen. The longest is that for a better
	// condition of the node, which is written after 30 s, on a machine that is slow and has other
	// things to do.
	patience = 3 * time.Minute
	// shortStory is what runs with -short: one story stands for all.
	shortStory = "^TestStory$"
)

var (
	// binary is the path of the daemon's binary, from TestMain on, and nodeAgent that of the one that
	// talks to the API server.
	binary, nodeAgent string
	// few is the path of a script that runs the daemon with as many file descriptors as the last word
	// of its own name says.
	few string
	// within is the path of a script that runs nodeAgent in the mount namespace of the process that
	// the last word of its own name says.
	within string
)

func TestMain(m *testing.M) {
	flag.Parse()
	for _, err := range []error{
		flag.Set("test.parallel", "12"),          // nodes mostly wait
		os.Setenv("GORACE", "atexit_sleep_ms=0"), // else a daemon with the race detector ends a second later
	} {
		if err != nil {
			panic(err)
		}
	}
	// make test has -short.
	if run := flag.Lookup("test.run").Value; testing.Short() && run.String() == "" {
		if err := run.Set(shortStory); err != nil {
			panic(err)
		}
	}
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (code int, err error) {
	folder, err := os.MkdirTemp("", "daemon")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	binary, nodeAgent = filepath.Join(folder, "gpu-device-plugin"), filepath.Join(folder, "gpu-node-agent")
	args := append(append([]string{"build"}, buildFlags...), "-o", folder, "../../cmd/gpu-device-plugin")
	if flag.Lookup("test.run").Value.String() != shortStory {
		args = append(args, "../../cmd/gpu-node-agent")
	}
	if output, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the daemon: %w\n%s", err, output)
	}
	// It is written before any test starts a process: a file that a new process has open for writing
	// cannot be executed.
	few, within = filepath.Join(folder, "few"), filepath.Join(folder, "within")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n ${0##*-}\nexec '%s' \"$@\"\n", binary)
	another := fmt.Sprintf("#!/bin/sh\nexec nsenter --mount=/proc/${0##*-}/ns/mnt '%s' \"$@\"\n", nodeAgent)
	if err := errors.Join(os.WriteFile(few, []byte(script), 0o700),
		os.WriteFile(within, []byte(another), 0o700)); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// A stage is a node and its test.
type stage struct {
	*node.Node
	t *testing.T
}

// open makes a node without a daemon. Everything on it ends with the test, and must end well.
func open(t *testing.T, setup node.Setup) *stage {
	t.Helper()
	if setup.Daemon == "" {
		setup.Daemon = binary
	}
	if setup.Profile == "" {
		setup.Profile = "dgx-h100"
	}
	n, err := node.Open(setup)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log ends with:\n%s", n.Logged())
		}
		if err := n.Close(); err != nil {
			t.Errorf("end the node: %v", err)
		}
	})
	return &stage{n, t}
}

// openAgent is open with gpu-node-agent as the daemon, and with an API server that has the node,
// without labels. The profile is dgx-h100 if it is empty.
func openAgent(t *testing.T, profile string, args ...string) (*stage, *apiserver.Server) {
	t.Helper()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	relabel(t, server, "")
	s := open(t, node.Setup{Daemon: nodeAgent, Profile: profile})
	s.Args = append([]string{"--kubeconfig", server.Kubeconfig(), "--node-name", nodeName}, args...)
	return s, server
}

// serving makes a node whose kubelet has all GPUs of the daemon.
func serving(t *testing.T, setup node.Setup) *stage {
	t.Helper()
	s := open(t, setup)
	s.start()
	s.next(0, standin.Listed)
	return s
}

// start starts the daemon.
func (s *stage) start() {
	s.t.Helper()
	if err := s.StartDaemon(); err != nil {
		s.t.Fatal(err)
	}
}

// next waits for the first event of a kind about the GPUs after a mark.
func (s *stage) next(mark int, kind standin.Kind) standin.Event {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	e, err := s.Next(ctx, mark, standin.Is(kind, gpu))
	if err != nil {
		s.t.Fatal(err)
	}
	return e
}

// until waits until kubelet is as it should be.
func (s *stage) until(what string, holds func() bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.WaitFor(ctx, holds); err != nil {
		s.t.Fatalf("%v, want %s", err, what)
	}
}

// counts waits until kubelet shows these devices, by resource, and no others.
func (s *stage) counts(want map[string]standin.Quantity) {
	s.t.Helper()
	s.until(fmt.Sprint(want), func() bool { return maps.Equal(s.Resources(), want) })
}

// shows waits until kubelet shows so many GPUs, of which so many are Healthy.
func (s *stage) shows(capacity, allocatable int) {
	s.t.Helper()
	s.counts(map[string]standin.Quantity{gpu: {Capacity: capacity, Allocatable: allocatable}})
}

// allocatable waits until kubelet shows so many Healthy GPUs, however many others.
func (s *stage) allocatable(count int) {
	s.t.Helper()
	s.until(fmt.Sprint(count, " Healthy GPUs"), func() bool { return s.Allocatable(gpu) == count })
}

// admit has kubelet start a container with GPUs.
func (s *stage) admit(pod string, count int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	got, err := s.Admit(ctx, standin.Container{Pod: pod, Name: "main", Resource: gpu, Count: count})
	if err != nil {
		s.t.Fatal(err)
	}
	visible := strings.Split(got.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"], ",")
	slices.Sort(visible)
	if !slices.Equal(visible, got.IDs) {
		s.t.Errorf("NVIDIA_VISIBLE_DEVICES has %v, and the devices are %v", visible, got.IDs)
	}
}

// inject makes faults happen.
func (s *stage) inject(faults ...simulator.Fault) {
	s.t.Helper()
	for _, f := range faults {
		s.call("simulate.inject", f)
	}
}

// call makes a call at the daemon's control socket, which may come up after kubelet has its list.
func (s *stage) call(name string, arguments any) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	s.eventually("the daemon answers "+name, func() bool {
		err := control.Call(ctx, s.ControlSocket(), name, arguments, nil)
		if err != nil && !errors.Is(err, control.ErrNoDaemon) {
			s.t.Fatal(err)
		}
		return err == nil
	})
}

// status is what these tests need of the daemon's status.
type status struct {
	Driver         string   `json:"driver"`
	Stale          string   `json:"stale"`
	ConfigFile     string   `json:"configFile"`
	ConfigError    string   `json:"configError"`
	APIServerError string   `json:"apiServerError"`
	NVSwitches     []string `json:"nvswitches"`
	MetricsAbsent  []string `json:"metricsAbsent"`
	LeftOut        []string `json:"leftOut"`
	Warnings       []string `json:"warnings"`
	GPUs           []struct {
		State  string `json:"state"`
		Reason string `json:"reason"`
	} `json:"gpus"`
}

// says waits until the daemon answers and its status is as it should be.
func (s *stage) says(what string, ok func(status) bool) {
	s.t.Helper()
	var now status
	defer func() {
		if s.t.Failed() {
			s.t.Logf("the daemon said last: %+v", now)
		}
	}()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	s.eventually(what, func() bool {
		now = status{}
		return control.Call(ctx, s.ControlSocket(), "status", nil, &now) == nil && ok(now)
	})
}

// eventually waits until something holds that nobody tells of.
func (s *stage) eventually(what string, holds func() bool) {
	s.t.Helper()
	late := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-late:
			s.t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// logs waits until the daemon's log has a text.
func (s *stage) logs(text string) {
	s.t.Helper()
	s.eventually("the log says "+text, func() bool { return s.logged(text) })
}

// logged reports whether the daemon's log has a text.
func (s *stage) logged(text string) bool {
	log, err := os.ReadFile(s.LogPath())
	return err == nil && bytes.Contains(log, []byte(text))
}

// sockets returns the names of the sockets in kubelet's directory, without kubelet's own.
func (s *stage) sockets() []string {
	s.t.Helper()
	entries, err := os.ReadDir(filepath.Dir(s.Socket()))
	if err != nil {
		s.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Type() == fs.ModeSocket && e.Name() != filepath.Base(s.Socket()) {
			names = append(names, e.Name())
		}
	}
	return names
}

// write writes a file of the node, whole or not at all, and returns its path: the daemon may be
// reading it.
func (s *stage) write(name, text string) string {
	s.t.Helper()
	path := s.Path(name)
	if err := replace(path, text); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// replace puts a file with a text in the place of the one before.
func replace(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// broken makes the node one to which faults have happened.
func (s *stage) broken(faults ...simulator.Fault) {
	s.t.Helper()
	profile, err := simulator.Load(s.Profile)
	if err != nil {
		s.t.Fatal(err)
	}
	profile.Faults = faults
	text, err := yaml.Marshal(profile)
	if err != nil {
		s.t.Fatal(err)
	}
	s.Profile = s.write(profile.Name+".yaml", string(text))
}

// ends waits until a daemon has ended.
func (s *stage) ends(d *node.Daemon) {
	s.t.Helper()
	began := time.Now()
	select {
	case <-d.Ended():
		s.t.Logf("the daemon took %v to end", time.Since(began))
	case <-time.After(maxEnd):
		s.t.Fatalf("the daemon does not end within %v", maxEnd)
	}
}

// kill ends the only daemon of the kubelet at once, as stop does in order. Both return when the
// kubelet has noticed, which may be later than the end: what it shows from then on is of a process
// that starts afterwards.
func (s *stage) kill() {
	s.t.Helper()
	d := s.Running()
	s.signal(d, syscall.SIGKILL)
	s.ends(d)
	_ = s.StopDaemon() // it was killed
	s.offersNothing()
}

// stop is described at kill.
func (s *stage) stop() {
	s.t.Helper()
	if err := s.StopDaemon(); err != nil {
		s.t.Fatal(err)
	}
	s.offersNothing()
}

// offersNothing waits until the kubelet has no device that it could give to a pod.
func (s *stage) offersNothing() {
	s.t.Helper()
	s.until("nothing is offered", s.OffersNothing)
}

// signal sends a daemon a signal.
func (s *stage) signal(d *node.Daemon, sig syscall.Signal) {
	s.t.Helper()
	if err := d.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}
