package daemon

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/simulator"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
)

// TestBadInput: a wrong command line and a missing driver end the program with one sentence that says what
// is wrong and what to do. Package config and cli have the sentences for all other wrong values.
func TestBadInput(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const machine = "driver: 550.1\ncuda: \"12.4\"\nmodel: t4\ngpus: [{bdf: \"0000:00:04.0\", pcie: 0/0}]\n"
	tests := map[string]struct {
		args []string
		says []string
	}{
		"unknown flag": {[]string{"--mig-strateg", "mixed"},
			[]string{"unknown flag: --mig-strateg", "--help lists the flags"}},
		"profile that is not there": {
			[]string{"--simulate", "/no/such.yaml"}, []string{"/no/such.yaml", "no such file",
				"give the path of a file that can be read"},
		},
		"profile that is none": {
			[]string{"--simulate", write("none.yaml", "gpus: 3\n")}, []string{"none.yaml", "correct it",
				"a profile has the keys"},
		},
		"no library": {
			[]string{"--simulate", write("nolib.yaml", machine+"faults: [{kind: driver, driver: no-library}]\n")},
			[]string{"libnvidia-ml.so.1", "install the driver", "run: gpu-device-plugin doctor", "--fail-on-init-error=false"},
		},
		"no kernel module": {
			[]string{"--simulate", write("nomod.yaml", machine+"faults: [{kind: driver, driver: missing}]\n")},
			[]string{"the kernel module is not loaded", "modprobe nvidia", "run: gpu-device-plugin doctor",
				"--fail-on-init-error=false"},
		},
		"NVML that cannot be initialised": {
			[]string{"--simulate", write("noinit.yaml", machine+"faults: [{kind: fail, call: Init, return: UNKNOWN}]\n")},
			[]string{"nvmlInit", "run: gpu-device-plugin doctor", "--fail-on-init-error=false"},
		},
		"configuration file that is not there": {
			[]string{"--simulate", "t4", "--config-file", "/no/such.yaml"}, []string{"/no/such.yaml", "check --config-file"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := tt.args
			if strings.HasPrefix(args[0], "--") { // the daemon must touch nothing outside the test
				args = append([]string{
					"--kubelet-socket", "", "--pod-resources-socket", "", "--control-socket", "", "--state-dir", "", "--cdi-dir", folder,
				}, args...)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			output, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
			var failed *exec.ExitError
			if !errors.As(err, &failed) || failed.ExitCode() != 1 {
				t.Errorf("it ended with %v, and not with exit status 1", err)
			}
			lines := strings.Split(strings.TrimSpace(string(output)), "\n")
			sentence := lines[len(lines)-1]
			for _, text := range append(tt.says, "Error: ") {
				if !strings.Contains(sentence, text) {
					t.Errorf("its last word is %q, without %q", sentence, text)
				}
			}
		})
	}
}

// TestLateDriver: with --fail-on-init-error=false a driver that is missing is waited for.
func TestLateDriver(t *testing.T) {
	t.Parallel()
	for missing, strategy := range map[string]string{"missing": "envvar", "no-library": "cdi-cri"} {
		t.Run(missing, func(t *testing.T) {
			t.Parallel()
			s := open(t, node.Setup{Args: []string{"--fail-on-init-error=false", "--device-list-strategy", strategy}})
			s.broken(simulator.Fault{Kind: simulator.KindDriver, Driver: missing})
			s.start()
			s.logs("Waiting for the driver")
			s.logs(`diagnose="gpu-device-plugin doctor"`)
			s.says("there is no driver", func(now status) bool { return strings.Contains(now.Stale, "no NVIDIA driver") })
			if got := s.Resources(); len(got) > 0 {
				t.Errorf("kubelet shows %v without a driver", got)
			}
			s.inject(simulator.Fault{Kind: simulator.KindRestore})
			s.shows(8, 8)
		})
	}
}

// TestLateKubelet: a kubelet whose directory is not there yet is waited for. The path of the
// directory is no URL and no format.
func TestLateKubelet(t *testing.T) {
	t.Parallel()
	s := open(t, node.Setup{})
	folder := s.Path("late%2F%s")
	s.Args = []string{"--kubelet-socket", filepath.Join(folder, "kubelet.sock")}
	s.start()
	s.logs("Waiting for the kubelet")
	s.logs("no kubelet device-plugin directory: stat " + folder)
	s.says("the daemon runs", func(status) bool { return true })
	late, err := standin.Start(standin.Options{Dir: folder})
	if err != nil {
		t.Fatal(err)
	}
	defer late.Stop()
	other := &node.Node{Kubelet: late}
	(&stage{other, t}).shows(8, 8)
}
