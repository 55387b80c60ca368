package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// run executes a command line and returns its trimmed output.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	text, err := printed(t, args...)
	return strings.TrimSpace(text), err
}

// printed executes a command line and returns its output. A test whose command line is that of a
// daemon cannot be parallel.
func printed(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if isDaemon(args) {
		t.Setenv("GPU_DEVICE_PLUGIN_TEST_DAEMON", "1") // ends a parallel test
	}
	var out bytes.Buffer
	err := cli.DevicePlugin().Execute(t.Context(), "gpu-device-plugin", args, &out)
	return out.String(), err
}

// isDaemon reports whether the command line runs a daemon, also if the daemon then refuses a flag.
// A daemon changes the log of the whole process, which is a race with any other test.
func isDaemon(args []string) bool {
	if len(args) == 0 {
		return true
	}
	first := args[0]
	return (strings.HasPrefix(first, "-") || first == "mps-control-daemon" || first == "gpu-feature-discovery") &&
		!slices.Contains(args, "--help")
}

func TestErrorsNameTheRemedy(t *testing.T) {
	deep := "/" + strings.Repeat("d", 100) + "/kubelet.sock"
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	if err := os.WriteFile(broken, []byte("version: v1\nflags: {migStrategy: some}\n"+
		"sharing: {timeSlicing: {resources: []}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args []string
		says []string
	}{
		"unknown flag":          {[]string{"--mig-stratgy=none"}, []string{"--mig-stratgy", "--help"}},
		"unknown command":       {[]string{"stats"}, []string{`"stats"`, "status"}},
		"one dash":              {[]string{"-mig-strategy=some"}, []string{"--mig-strategy", "none, single, mixed"}},
		"one dash and a space":  {[]string{"-mig-strategy", "some"}, []string{"--mig-strategy", "none, single, mixed"}},
		"unknown MIG strategy":  {[]string{"--mig-strategy=some"}, []string{"--mig-strategy", "none, single, mixed"}},
		"unknown list strategy": {[]string{"--device-list-strategy=guess"}, []string{"--device-list-strategy", "envvar"}},
		"unknown profile":       {[]string{"--simulate=dgx-9"}, []string{`"dgx-9"`, "dgx-h100"}},
		"unreadable profile": {[]string{"plan", "--simulate=/nowhere/node.yaml"},
			[]string{"/nowhere/node.yaml", "no such file"}},
		"unreadable file": {[]string{"--config-file=/nowhere/config.yaml"},
			[]string{"/nowhere/config.yaml", "--config-file"}},
		"long socket path":     {[]string{"--kubelet-socket=" + deep}, []string{"bytes"}},
		"relative socket path": {[]string{"--control-socket=control.sock"}, []string{"control.sock", "absolute"}},
		"unknown output":       {[]string{"plan", "--simulate=t4", "-o", "xml"}, []string{"table, yaml, json"}},
		"a file with problems": {[]string{"config", "check", broken},
			[]string{"flags.migStrategy", "sharing.timeSlicing.resources"}},
		"a choice by a label": {[]string{"--node-config-dir=/configs"}, []string{"--node-config-dir", "gpu-node-agent"}},
		"one for MPS":         {[]string{"mps-control-daemon", "--node-config-dir=/configs"}, []string{"gpu-node-agent"}},
		"Events":              {[]string{"--node-events"}, []string{"features", "gpu-node-agent"}},
		"no daemon": {[]string{"status", "--control-socket=/nowhere/control.sock"},
			[]string{"/nowhere/control.sock", "--control-socket"}},
		"clear without a GPU": {[]string{"health", "clear"}, []string{"gpu"}},
		"a fault without a GPU": {[]string{"simulate", "xid", "--control-socket=/nowhere/control.sock"},
			[]string{"/nowhere"}},
		"MPS of no machine": {[]string{"mps-control-daemon", "--simulate=dgx-9"}, []string{`"dgx-9"`, "dgx-h100"}},
		"MPS of a bad flag": {[]string{"mps-control-daemon", "--mig-strategy=some"},
			[]string{"--mig-strategy", "none, single, mixed"}},
		"connections, a bad flag": {[]string{"topology", "--simulate=t4", "--node-config-dir=some"},
			[]string{"--node-config-dir", `"some" is not an absolute path`}},
		"no driver": {[]string{"plan", "--driver-root-ctr-path=/nowhere"},
			[]string{"to scan a simulated node, use --simulate"}},
		"a plan of a bad flag": {[]string{"plan", "--simulate=t4", "--mig-strategy=some"},
			[]string{"--mig-strategy", "none, single, mixed"}},
		"an argument to a daemon": {[]string{"serve"}, []string{`"serve"`}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := run(t, test.args...)
			if err == nil {
				t.Fatalf("%v succeeded", test.args)
			}
			for _, words := range test.says {
				if !strings.Contains(err.Error(), words) {
					t.Errorf("%v says %q, want %q in it", test.args, err, words)
				}
			}
		})
	}
}

func TestPlan(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	const text = "selectors: [{indices: [0], exclude: true}, {indices: [9], replicas: 2}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args []string
		says []string
	}{
		"what is excluded": {[]string{"--simulate=dgx-h100", "--config-file=" + file}, []string{
			"nvidia.com/gpu: 7", "left out: device 0 (GPU-",
			"): it is excluded by selectors[0] of the configuration\nwarning: selectors[1] selects no",
		}},
		"what is not fit": {[]string{"--simulate=a100-mig-mixed", "--mig-strategy=single", "-o=yaml"},
			[]string{"leftOut:\n- 'device 0 (GPU-"}},
		"whole GPUs": {[]string{"--simulate=dgx-2"}, []string{"nvidia.com/gpu: 16", "NVIDIA_VISIBLE_DEVICES=GPU-"}},
		"by index":   {[]string{"--simulate=t4", "--device-id-strategy=index"}, []string{"NVIDIA_VISIBLE_DEVICES=0"}},
		"YAML": {[]string{"--simulate=t4", "-o", "yaml"},
			[]string{"resources:", "- container:", "name: nvidia.com/gpu"}},
		"JSON": {[]string{"--simulate=t4", "-o", "json"}, []string{`"name": "nvidia.com/gpu"`}},
		"MIG mixed": {[]string{"--simulate=a100-mig-mixed", "--mig-strategy=mixed"},
			[]string{"nvidia.com/gpu:", "nvidia.com/mig-1g"}},
		"MIG single": {[]string{"--simulate=h100-mig-1g", "--mig-strategy=single"},
			[]string{"nvidia.com/gpu: 56", "=MIG-"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := run(t, append([]string{"plan"}, test.args...)...)
			if err != nil {
				t.Fatal(err)
			}
			for _, words := range test.says {
				if !strings.Contains(got, words) {
					t.Errorf("plan %v printed\n%s\nwithout %q", test.args, got, words)
				}
			}
		})
	}
}

func TestConfigCheck(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	t.Setenv("MPS_ROOT", "")
	mps := write("mps.yaml", "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n")
	if _, err := run(t, "config", "check", mps); err == nil || !strings.Contains(err.Error(), "--mps-root") {
		t.Errorf("a file that needs a flag: %v", err)
	}
	if got, err := run(t, "config", "check", mps, "--mps-root=/run/nvidia/mps"); err != nil || got != mps+" is valid" {
		t.Errorf("with that flag: %q, %v", got, err)
	}
	t.Setenv("MPS_ROOT", "/run/nvidia/mps")
	if got, err := run(t, "config", "check", mps); err != nil || got != mps+" is valid" {
		t.Errorf("with its variable: %q, %v", got, err)
	}

	broken := write("broken.yaml", "colour: x\nflags:\n  migStrategy: some\n  failOnInitError: 3\n")
	got, err := run(t, "config", "check", broken)
	if !strings.HasPrefix(got, "warning: line 1: colour: unknown key") {
		t.Errorf("warnings: %q", got)
	}
	want := broken + " is not valid:\n" +
		"  line 3: flags.migStrategy: \"some\" is not one of: none, single, mixed\n" +
		"  line 4: flags.failOnInitError: must be true or false, not \"3\""
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestHelpOfEveryCommand(t *testing.T) {
	for _, command := range []string{"", "plan", "status", "simulate", "simulate xid", "config check", "health clear",
		"quiesce", "resume", "topology", "version"} {
		got, err := run(t, append(strings.Fields(command), "--help")...)
		if err != nil || !strings.Contains(got, "Usage:") {
			t.Errorf("%s --help: %v\n%s", command, err, got)
		}
	}
}

// TestCommandsIgnoreHiddenFlags: flags of the daemon outside of a command's help do not change its
// output, even with values that the daemon refuses.
func TestCommandsIgnoreHiddenFlags(t *testing.T) {
	for command, most := range map[string]int{
		"plan": 36, "plan --dra --node-name=n": 36, "topology": 9, "topology prefer": 13,
		"mig plan --layout=all-disabled": 12, "mig export": 10, "doctor": 26,
	} {
		args := append(strings.Fields(command), "--simulate=t4", "--control-socket=")
		help, err := run(t, append(args, "--help")...)
		if err != nil {
			t.Fatal(err)
		}
		shown := 0
		for line := range strings.Lines(help) {
			if strings.HasPrefix(strings.TrimSpace(line), "-") {
				shown++
			}
		}
		if shown > most || shown < 5 {
			t.Errorf("%s --help shows %d flags, want at most %d", command, shown, most)
		}
		others := args
		for _, o := range config.Options() {
			if !strings.Contains(help, "--"+o.Flag+" ") {
				others = append(others, "--"+o.Flag+"=\x00")
			}
		}
		if len(others) < len(args)+20 {
			t.Errorf("%s --help shows all but %d flags", command, len(others)-len(args))
		}
		want, problem := run(t, args...)
		if got, err := run(t, others...); got != want || fmt.Sprint(err) != fmt.Sprint(problem) {
			t.Errorf("%s with flags that its help does not show: %v\n%s\nwant %v\n%s", command, err, got, problem, want)
		}
	}
}

// TestHelpShowsCommonFlagsFirst: common flags come first, and the others below them.
func TestHelpShowsCommonFlagsFirst(t *testing.T) {
	for _, command := range []string{"", "doctor", "mps-control-daemon", "config check"} {
		help, err := run(t, append(strings.Fields(command), "--help")...)
		common, further, divided := strings.Cut(help, "\nFurther flags:\n")
		if err != nil || !divided || !strings.Contains(common, "--config-file ") ||
			!strings.Contains(further, "--state-dir ") || strings.Count(common, "      --") > 20 {
			t.Errorf("%s --help: %v\n%s", command, err, help)
		}
	}
}

// TestPlanTable: the complete table of a plan, for each way to pass devices to a container.
func TestPlanTable(t *testing.T) {
	const head = `nvidia.com/gpu: 1
  DEVICE                                     INDEX   NUMA   HEALTH
  GPU-f7c679d9-af1d-83ba-98bd-017873bac2de   0       -      Healthy
  a container with the first device gets:
`
	for strategy, want := range map[string]string{
		"envvar,cdi-cri": `    env NVIDIA_VISIBLE_DEVICES=GPU-f7c679d9-af1d-83ba-98bd-017873bac2de
    device node /dev/nvidiactl from /dev/nvidiactl (rw)
    device node /dev/nvidia-uvm from /dev/nvidia-uvm (rw)
    device node /dev/nvidia-uvm-tools from /dev/nvidia-uvm-tools (rw)
    device node /dev/nvidia-modeset from /dev/nvidia-modeset (rw)
    device node /dev/nvidia0 from /dev/nvidia0 (rw)
    CDI device k8s.device-plugin.nvidia.com/gpu=GPU-f7c679d9-af1d-83ba-98bd-017873bac2de`,
		"volume-mounts": `    env NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices
    mount /var/run/nvidia-container-devices/GPU-f7c679d9-af1d-83ba-98bd-017873bac2de from /dev/null
    device node /dev/nvidiactl from /dev/nvidiactl (rw)
    device node /dev/nvidia-uvm from /dev/nvidia-uvm (rw)
    device node /dev/nvidia-uvm-tools from /dev/nvidia-uvm-tools (rw)
    device node /dev/nvidia-modeset from /dev/nvidia-modeset (rw)
    device node /dev/nvidia0 from /dev/nvidia0 (rw)`,
	} {
		got, err := run(t, "plan", "--simulate=t4", "--device-list-strategy="+strategy, "--pass-device-specs")
		if diff := cmp.Diff(head+want, got); err != nil || diff != "" {
			t.Errorf("%s: %v, (-want +got):\n%s", strategy, err, diff)
		}
	}
	got, err := printed(t, "plan", "--simulate", brokenNode(t), "--device-list-strategy=cdi-annotations")
	want := `nvidia.com/gpu: 3
  DEVICE   INDEX   NUMA   HEALTH
  GPU-a    0       0      Unhealthy: GPU-a is Unhealthy: the driver asks for recovery action gpu-reset: stop all processes on the GPU and reset it; remedy: reset
  GPU-c    2       -      Healthy
  GPU-d    3       1      Healthy
  a container with the first device gets:
    env NVIDIA_VISIBLE_DEVICES=void
    annotation cdi.k8s.io/nvidia-device-plugin_ID=k8s.device-plugin.nvidia.com/gpu=GPU-a
left out: GPU 1: the GPU cannot be identified: nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST
`
	got = regexp.MustCompile("_[0-9a-f]{32}=").ReplaceAllString(got, "_ID=")
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("a node with faults: %v, (-want +got):\n%s", err, diff)
	}
	got, err = run(t, "plan", "--simulate=t4", "--mig-strategy=single", "--config-file="+excluding(t))
	if err != nil || !strings.HasPrefix(got, "The node has no resources.\nleft out: device 0 (GPU-") {
		t.Errorf("without resources: %v: %s", err, got)
	}
}

// excluding returns the path of a configuration without GPU 0.
func excluding(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte("selectors: [{indices: [0], exclude: true}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
