package hardware_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// nobody is a user without capabilities.
var nobody = &syscall.Credential{Uid: 65534, Gid: 65534}

// TestWithoutRights: the daemon serves healthy GPUs as a user without capabilities, and says what
// it is refused.
func TestWithoutRights(t *testing.T) {
	needGPU(t)
	if os.Geteuid() != 0 {
		t.Skip("only root can start it as another user")
	}
	m := open(t, node.Setup{Daemon: *daemonFlag, Credential: nobody, Args: []string{"--gpu-metrics-interval", "1s"}})
	m.measure()
	m.give()
	m.run()
	poll.Until(t, "GPUs were read and measured, also their activity where the driver permits that", func() bool {
		_, active := m.scrape().value("DCGM_FI_PROF_GR_ENGINE_ACTIVE")
		s := m.status()
		return s.GPUs[0].Signals != nil && (active || len(s.MetricsAbsent) > 0)
	})
	s := m.status()
	for _, g := range s.GPUs {
		t.Logf("GPU %s is %s; not read: %q", g.Index, g.State, g.Signals.Unread)
	}
	t.Logf("metrics that are absent: %q; left out: %q; without events: %q; warnings: %q", s.MetricsAbsent, s.LeftOut,
		s.Unwatched, s.Warnings)
	c := exec.CommandContext(t.Context(), m.Setup.Daemon, "doctor", "--control-socket", m.ControlSocket())
	c.SysProcAttr = &syscall.SysProcAttr{Credential: nobody}
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	t.Logf("doctor says:\n%s", out)
}

// give has another user own what the daemon uses. Its program has to be where that user may go.
func (m *machine) give() {
	m.Helper()
	program, err := os.ReadFile(m.Setup.Daemon)
	if err != nil {
		m.Fatal(err)
	}
	m.Setup.Daemon = m.Path("daemon")
	if err := os.WriteFile(m.Setup.Daemon, program, 0o755); err != nil {
		m.Fatal(err)
	}
	err = filepath.WalkDir(m.Path("."), func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(nobody.Uid), int(nobody.Gid))
	})
	if err != nil {
		m.Fatal(err)
	}
}

// TestCUDA: CUDA is proven on a GPU that is idle, and one on which a program computes is not tried.
func TestCUDA(t *testing.T) {
	m := start(t)
	gpu := m.gpu()
	validate := func() (status int, text string) {
		out, err := exec.CommandContext(t.Context(), *daemonFlag, "validate", "--gpu", gpu, "-o", "yaml").CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode(), string(out)
		}
		if err != nil {
			t.Fatal(err)
		}
		return 0, string(out)
	}
	code, text := validate()
	t.Logf("validate on an idle GPU: exit status %d\n%s", code, text)
	if code != 0 || !strings.Contains(text, "result: proven") {
		t.Error("CUDA is not proven")
	}
	load := started(t, gpu, "5s")
	code, text = validate()
	t.Logf("validate beside a program that computes: exit status %d\n%s", code, text)
	if code != 2 || !strings.Contains(text, "result: not tried") {
		t.Error("a GPU on which a program computes was tried")
	}
	load.end(t)
}
