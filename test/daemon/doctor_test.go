package daemon

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/pty"
)

// TestDoctor runs doctor beside a daemon on a simulated node, with the files of a machine on which
// nothing is wrong.
func TestDoctor(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.goodHost()
	// finds runs doctor until its exit status is as wanted, and returns what it printed.
	finds := func(want int, says string, arguments ...string) {
		t.Helper()
		s.eventually(says, func() bool {
			status, output, complaint := s.doctor(arguments...)
			done := status == want && strings.Contains(output+complaint, says)
			if t.Failed() || done {
				t.Logf("exit status %d\n%s%s", status, output, complaint)
			}
			return done
		})
	}

	finds(0, "The GPUs of this node are simulated")
	finds(0, `"worst": "not checked"`, "-o", "json")
	if before, after := s.sockets(), func() []string { s.doctor(); return s.sockets() }(); !slices.Equal(before, after) {
		t.Errorf("doctor changed the sockets of kubelet's folder: %v, now %v", before, after)
	}
	finds(1, "unknown flag", "--no-such-flag")
	finds(1, "--host-root: /none is not a folder", "--host-root", "/none")
	finds(3, "The configuration file cannot be used", "--config-file", s.write("bad.yaml", "version: v9\n"))
	finds(2, "Every pod can get all GPUs", "--host-root", openedNode(t, s))

	s.inject(simulator.Fault{Kind: simulator.KindPersistence, GPU: "3", State: "off"})
	finds(2, "Persistence mode is off on GPU 3")
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	finds(3, "GPU 3 is Lost")
	status, output, _ := s.doctor("-o", "json")
	var report struct {
		Worst    string
		Findings []struct {
			Check, Severity, Message string
			Remedy                   []string
		}
	}
	if err := json.Unmarshal([]byte(output), &report); err != nil || status != 3 || report.Worst != "error" ||
		report.Findings[0].Check != "daemon" || len(report.Findings[0].Remedy) == 0 {
		t.Errorf("exit status %d, error %v, report %+v", status, err, report)
	}
}

// TestDoctorBesideAHealthyDaemon: where only the control socket is named, as beside make run, doctor
// looks at the kubelet that the daemon uses, and not at that of the machine.
func TestDoctorBesideAHealthyDaemon(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.eventually("doctor finds no problem", func() bool {
		cmd := exec.CommandContext(s.t.Context(), binary, "doctor")
		cmd.Env = append(os.Environ(), "CONTROL_SOCKET="+s.ControlSocket())
		output, err := cmd.CombinedOutput()
		well := err == nil && strings.HasPrefix(string(output), "doctor: no problems found: ") &&
			strings.Contains(string(output), "The kubelet answers") && strings.Contains(string(output), "PodResources answers")
		if t.Failed() || well {
			t.Logf("%v\n%s", err, output)
		}
		return well
	})
}

// TestWidthOfTheTerminal: in a terminal of 80 columns no line of doctor and status is longer, and a
// wider one is used.
func TestWidthOfTheTerminal(t *testing.T) {
	t.Parallel()
	s := serving(t, node.Setup{})
	s.inject(simulator.Fault{Kind: simulator.KindXID, GPU: "3", XID: 79})
	s.shows(8, 7)
	widest := map[string]int{}
	for _, columns := range []int{80, 120} {
		for _, command := range []string{"doctor", "status"} {
			shown := pty.Shown(t, uint16(columns), func(out *os.File) {
				cmd := exec.CommandContext(t.Context(), binary, command)
				cmd.Env = append(os.Environ(), "CONTROL_SOCKET="+s.ControlSocket(), "NO_COLOR=1")
				cmd.Stdout, cmd.Stderr = out, out
				var ended *exec.ExitError
				if err := cmd.Run(); err != nil && !errors.As(err, &ended) {
					t.Error(err)
				}
			})
			if !strings.Contains(shown, "XID 79 (GPU fell off the bus): restart the node") {
				t.Errorf("%s at %d columns:\n%s", command, columns, shown)
			}
			for line := range strings.Lines(shown) {
				width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
				if widest[command] = max(widest[command], width); width > columns {
					t.Errorf("%s at %d columns: %q has %d", command, columns, line, width)
				}
			}
		}
	}
	if widest["doctor"] <= 100 {
		t.Errorf("doctor uses %d of 120 columns", widest["doctor"])
	}
}

// goodHost puts the files of a machine on which nothing is wrong into the folder host of the node.
func (s *stage) goodHost() {
	s.t.Helper()
	for name, text := range map[string]string{
		"proc/1/comm": "containerd", "sys/fs/selinux/enforce": "0",
		"etc/containerd/config.toml": "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'nvidia'\n" +
			"[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]\nBinaryName = '/usr/bin/nvidia-container-runtime'\n",
		"usr/bin/nvidia-container-runtime":         "",
		"etc/nvidia-container-runtime/config.toml": "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n",
	} {
		path := s.Path(filepath.Join("host", name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			s.t.Fatal(err)
		}
	}
}

// doctor runs doctor on the node with the files of its folder host. It returns the exit status and
// what was printed.
func (s *stage) doctor(arguments ...string) (status int, output, complaint string) {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), binary, append([]string{
		"doctor", "--host-root", s.Path("host"), "--control-socket", s.ControlSocket(), "--kubelet-socket", s.Socket(),
		"--pod-resources-socket", s.PodResourcesSocket(), "--device-list-strategy", "cdi-cri",
	}, arguments...)...)
	var out, complaints strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &complaints
	var ended *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &ended) {
		s.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), complaints.String()
}

// openedNode returns the root of the node's files with NVIDIA's runtime as its packages install it.
func openedNode(t *testing.T, s *stage) string {
	t.Helper()
	open := s.Path("open")
	if err := os.CopyFS(open, os.DirFS(s.Path("host"))); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(open, "etc/nvidia-container-runtime")); err != nil {
		t.Fatal(err)
	}
	return open
}
