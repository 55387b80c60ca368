package cluster_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A managed is a node with a folder of configurations, and config-manager on it.
type managed struct {
	t      *testing.T
	server *apiserver.Server
	dir    string
	link   string
	args   []string
}

func newManaged(t *testing.T) *managed {
	t.Helper()
	server, err := apiserver.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	m := &managed{t: t, server: server, dir: t.TempDir()}
	m.link = filepath.Join(t.TempDir(), "config.yaml")
	m.args = []string{
		"--kubeconfig=" + server.Kubeconfig(), "--node-name=n", "--config-file-srcdir=" + m.dir, "--config-file-dst=" +
			m.link,
	}
	m.write("a", "1")
	m.write("b", "1")
	return m
}

func (m *managed) write(name, text string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *managed) label(value string) {
	m.t.Helper()
	err := m.server.ChangeNode("n", func(n *corev1.Node) {
		n.Labels = map[string]string{}
		if value != "" {
			n.Labels[configLabel] = value
		}
	})
	if err != nil {
		m.t.Fatal(err)
	}
}

// execute runs config-manager until it ends by itself or by ctx.
func (m *managed) execute(ctx context.Context, args ...string) error {
	cmd := cluster.New(cluster.Options{}).Commands()[0]
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(append(append([]string{}, m.args...), args...))
	return cmd.ExecuteContext(ctx)
}

// sidecar runs it until the returned function is called.
func (m *managed) sidecar(args ...string) (end func()) {
	ctx, cancel := context.WithCancel(m.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.execute(ctx, args...) }()
	return func() {
		m.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			m.t.Errorf("it ended with %v", err)
		}
	}
}

// linked waits until the link leads to a file; "" for the null device.
func (m *managed) linked(name string) {
	m.t.Helper()
	want := filepath.Join(m.dir, name)
	if name == "" {
		want = os.DevNull
	}
	m.until("the link leads to "+want, func() bool {
		target, err := os.Readlink(m.link)
		return err == nil && target == want
	})
}

func (m *managed) until(what string, is func() bool) {
	m.t.Helper()
	poll.Until(m.t, what, is)
}

func TestConfigManagerOnce(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		label   string
		args    []string
		want    string
		problem string
	}{
		"the label's":           {label: "a", want: "a"},
		"the default":           {args: []string{"--default-config=b"}, want: "b"},
		"a fallback":            {args: []string{"--fallback-strategies=named,single,empty"}, want: ""},
		"an unknown one":        {label: "c", args: []string{"--default-config=b"}, want: "b"},
		"an unknown one, alone": {label: "c", problem: configLabel + "=c"},
		"nothing is said":       {problem: "no fallback is possible"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newManaged(t)
			m.label(tt.label)
			err := m.execute(t.Context(), append(tt.args, "--oneshot", "--process-to-signal=nobody")...)
			if tt.problem != "" {
				if _, missing := os.Lstat(m.link); err == nil || !strings.Contains(err.Error(), tt.problem) || missing == nil {
					t.Errorf("it ended with %v, want %q, and the link is there: %v", err, tt.problem, missing == nil)
				}
				return
			}
			if err != nil {
				t.Error(err)
			}
			m.linked(tt.want)
		})
	}
}

// TestConfigManagerUnknownName: an init container that is started again keeps the pod
// from starting no longer.
func TestConfigManagerUnknownName(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	m.label("a")
	for _, label := range []string{"a", "c", "c"} {
		m.label(label)
		if err := m.execute(t.Context(), "--oneshot", "--default-config=b"); err != nil {
			t.Errorf("label %s: %v", label, err)
		}
		m.linked("a")
	}
}

func TestConfigManagerWaitsForTheAPIServer(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	m.label("a")
	m.server.Stop()
	ended := make(chan error, 1)
	go func() { ended <- m.execute(t.Context(), "--oneshot") }()
	if err := m.server.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	m.linked("a")
}

func TestConfigManagerFlags(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		env  string
		want string
	}{
		"no node":          {args: []string{"--node-name="}, want: "--node-name"},
		"no folder":        {args: []string{"--config-file-srcdir="}, want: "--config-file-srcdir"},
		"no link":          {args: []string{"--config-file-dst="}, want: "--config-file-dst"},
		"unknown fallback": {args: []string{"--oneshot", "--fallback-strategies=named,last"}, want: "named, single, empty"},
		"no process":       {args: []string{"--process-to-signal="}, want: "--process-to-signal"},
		"no such signal":   {args: []string{"--signal=65"}, want: "65"},
		"no signal":        {args: []string{"--signal=0"}, want: "--signal is 0"},
		"a large file":     {args: []string{"--oneshot", "--default-config=large"}, want: "large"},
		"no place for it": {args: []string{"--oneshot", "--default-config=a", "--config-file-dst=/dev/null/link"},
			want: "replace the link"},
		"a bad folder": {args: []string{"--oneshot", "--default-config=a", "--config-file-srcdir=/dev/null/x"},
			want: "read the directory"},
		"a bad truth":       {env: "ONESHOT=maybe", want: "ONESHOT"},
		"an unknown in env": {env: "FALLBACK_STRATEGIES=x", args: []string{"--oneshot"}, want: `"x"`},
	} {
		t.Run(name, func(t *testing.T) {
			m := newManaged(t)
			m.write("large", strings.Repeat("x", 1<<20+1)) // a byte more than a ConfigMap holds
			m.label("")
			if variable, value, given := strings.Cut(tt.env, "="); given {
				t.Setenv(variable, value)
			}
			if err := m.execute(t.Context(), tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

// TestConfigManagerEnvironment: NVIDIA's chart gives everything by variables.
func TestConfigManagerEnvironment(t *testing.T) {
	m := newManaged(t)
	m.label("")
	for name, value := range map[string]string{
		"ONESHOT": "true", "KUBECONFIG": m.server.Kubeconfig(), "NODE_NAME": "n", "NODE_LABEL": configLabel, "CONFIG_FILE_SRCDIR": m.dir,
		"CONFIG_FILE_DST": m.link, "DEFAULT_CONFIG": "b", "FALLBACK_STRATEGIES": "named,single", "SEND_SIGNAL": "false", "SIGNAL": "1",
		"PROCESS_TO_SIGNAL": "nvidia-device-plugin",
	} {
		t.Setenv(name, value)
	}
	m.args = nil
	if err := m.execute(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.linked("b")
	if err := m.execute(t.Context(), "--default-config=a"); err != nil { // a flag counts more than its variable
		t.Fatal(err)
	}
	m.linked("a")
}

// TestConfigManagerUnusedSettings: what is wrong with a setting that is not needed is no
// reason to refuse it.
func TestConfigManagerUnusedSettings(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	m.label("")
	if err := m.execute(t.Context(), "--oneshot", "--default-config=b", "--fallback-strategies=last",
		"--send-signal=false", "--signal=0"); err != nil {
		t.Fatal(err)
	}
	m.linked("b")
}

// A daemon is a process with a name of its own that writes a line for each SIGHUP.
type fakeDaemon struct {
	name  string
	lines chan string
	cmd   *exec.Cmd
}

// daemonVariable has the program of the tests be such a process.
const daemonVariable = "CLUSTER_TEST_DAEMON"

func TestMain(m *testing.M) {
	received := make(chan os.Signal, 100)
	signal.Notify(received, syscall.SIGHUP)
	if os.Getenv(daemonVariable) == "" {
		os.Exit(m.Run())
	}
	_, _ = os.Stdout.WriteString("ready\n") // what cannot be written is missed by the test
	for range received {
		_, _ = os.Stdout.WriteString("HUP\n")
	}
}

func (m *managed) daemon(name string) *fakeDaemon {
	m.t.Helper()
	program, err := os.Executable()
	if err != nil {
		m.t.Fatal(err)
	}
	d := &fakeDaemon{name: name, lines: make(chan string, 100)}
	d.cmd = exec.Command(program)
	d.cmd.Args[0], d.cmd.Env = name, append(os.Environ(), daemonVariable+"=yes")
	output, err := d.cmd.StdoutPipe()
	if err == nil {
		err = d.cmd.Start()
	}
	if err != nil {
		m.t.Fatal(err)
	}
	go func() {
		for scanner := bufio.NewScanner(output); scanner.Scan(); {
			d.lines <- scanner.Text()
		}
	}()
	m.t.Cleanup(d.end)
	d.says(m.t, "ready")
	return d
}

func (d *fakeDaemon) end() {
	_ = d.cmd.Process.Signal(syscall.SIGKILL)
	_ = d.cmd.Wait()
}

func (d *fakeDaemon) says(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-d.lines:
		if got != want {
			t.Fatalf("%s says %q, want %q", d.name, got, want)
		}
	case <-time.After(patience):
		t.Fatalf("%s does not say %q", d.name, want)
	}
}

// silent ends the daemon, and fails if it has said anything that nobody read.
func (d *fakeDaemon) silent(t *testing.T) {
	t.Helper()
	d.end()
	select {
	case got := <-d.lines:
		t.Errorf("%s says %q", d.name, got)
	default:
	}
}

func TestConfigManagerSignals(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	name := fmt.Sprintf("daemon-%d", os.Getpid())
	process := "--process-to-signal=" + name
	m.label("a")
	if err := m.execute(t.Context(), "--oneshot", process); err != nil {
		t.Fatal(err)
	}
	daemon := m.daemon("/usr/bin/" + name)
	end := m.sidecar(process)
	m.label("b")
	daemon.says(t, "HUP")
	m.linked("b")
	m.label("c") // no such file
	m.label("a")
	daemon.says(t, "HUP")
	m.linked("a")
	end()

	// A sidecar that is started again signals nothing that was signalled.
	recorded := func() string {
		text, _ := os.ReadFile(filepath.Join(filepath.Dir(m.link), ".config.yaml.delivered"))
		return string(text)
	}
	m.until("the signal is on record", func() bool { return strings.Contains(recorded(), `/a"`) })
	before := recorded()
	end = m.sidecar(process)
	m.label("b")
	daemon.says(t, "HUP")
	m.until("the signal is on record", func() bool { return recorded() != before })
	end()

	// Nor does it forget what changed while it was not there: neither the label nor the content of the
	// file.
	m.write("b", "2")
	end = m.sidecar(process)
	daemon.says(t, "HUP")
	m.until("the signal is on record", func() bool { return !strings.Contains(recorded(), before) })
	end()
	daemon.silent(t)

	// Where both are paths they must be the same. NVIDIA's chart gives a path for a process that has
	// none.
	m.write("b", "3")
	bare := m.daemon(name)
	end = m.sidecar("--process-to-signal=/opt/" + name)
	bare.says(t, "HUP")
	end()
	daemon.silent(t)
}

// TestConfigManagerDelayedSignal: the link is moved, and there is nobody to signal. Whoever comes is
// signalled, also by a sidecar that was started again: it does not take the link for a sign that
// the signal was sent.
func TestConfigManagerDelayedSignal(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	name := fmt.Sprintf("late-%d", os.Getpid())
	process := "--process-to-signal=" + name
	m.label("a")
	if err := m.execute(t.Context(), "--oneshot", process); err != nil {
		t.Fatal(err)
	}
	end := m.sidecar(process)
	m.label("b")
	m.linked("b")
	end()
	daemon := m.daemon(name)
	end = m.sidecar(process)
	daemon.says(t, "HUP")
	end()
	daemon.silent(t)
}

// TestConfigManagerReplacesFile: what another program left in the link's place does not
// stop it, but for a folder.
func TestConfigManagerReplacesFile(t *testing.T) {
	t.Parallel()
	m := newManaged(t)
	m.label("a")
	if err := errors.Join(os.WriteFile(m.link, nil, 0o600), os.WriteFile(m.link+".new", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := m.execute(t.Context(), "--oneshot"); err != nil {
		t.Fatal(err)
	}
	m.linked("a")
}

// TestConfigManagerEmptyVariables: an empty variable means what it means to NVIDIA's program.
func TestConfigManagerEmptyVariables(t *testing.T) {
	m := newManaged(t)
	m.label("a")
	for name, value := range map[string]string{
		"SEND_SIGNAL": "", "SIGNAL": "", "PROCESS_TO_SIGNAL": "", "DEFAULT_CONFIG": "", "FALLBACK_STRATEGIES": "", "ONESHOT": "true",
	} {
		t.Setenv(name, value)
	}
	if err := m.execute(t.Context()); err != nil {
		t.Errorf("it does not link without a process to signal: %v", err)
	}
	t.Setenv("NODE_LABEL", "")
	if err := m.execute(t.Context()); err == nil || !strings.Contains(err.Error(), "--node-label is required") {
		t.Errorf("without a label: %v", err)
	}
}
