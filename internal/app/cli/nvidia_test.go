package cli_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/version"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
)

// runAs executes a command line under the name of a process and returns its output.
func runAs(t *testing.T, p cli.Program, process string, args ...string) (string, error) {
	t.Helper()
	var printed bytes.Buffer
	err := p.Execute(t.Context(), process, args, &printed)
	return strings.TrimSpace(printed.String()), err
}

// TestVersionUnderNVIDIAsNames: --version and -v print the version under the title of NVIDIA's
// program.
func TestVersionUnderNVIDIAsNames(t *testing.T) {
	for name, title := range map[string]string{
		"nvidia-device-plugin": "NVIDIA Device Plugin", "mps-control-daemon": "NVIDIA MPS Control Daemon",
		"gpu-feature-discovery": "GPU Feature Discovery", "config-manager": "config-manager",
	} {
		for _, args := range [][]string{{"--version"}, {"-v"}, {"-version"}, {"--version", "argument"}} {
			got, err := runAs(t, cli.NodeAgent(cluster.New(cluster.Options{})), "/usr/bin/"+name, args...)
			if want := title + " version " + version.String(); err != nil || got != want {
				t.Errorf("%s %q prints %q, %v, want %q", name, args, got, err, want)
			}
		}
		for _, args := range [][]string{{"--help"}, {"-h"}, {"help"}} {
			if got, err := runAs(t, cli.NodeAgent(cluster.New(cluster.Options{})), name, args...); err != nil ||
				!strings.Contains(got, name+" [flags]") {
				t.Errorf("%s %q prints %q, %v", name, args, got, err)
			}
		}
		if _, err := runAs(t, cli.NodeAgent(cluster.New(cluster.Options{})), name, "--no-such-flag"); err == nil ||
			!strings.Contains(err.Error(), "no-such-flag") {
			t.Errorf("%s with an unknown flag: %v", name, err)
		}
	}
	if _, err := runAs(t, cli.DevicePlugin(), "config-manager"); err == nil ||
		!strings.Contains(err.Error(), "gpu-node-agent") {
		t.Errorf("config-manager without a client of the API server: %v", err)
	}
	if _, err := run(t, "-v"); err == nil || !strings.Contains(err.Error(), "flag needs an argument") {
		t.Errorf("-v under our own name: %v", err)
	}
}

// TestFlagsOfNVIDIAsPrograms: each flag of NVIDIA's gpu-feature-discovery and config-manager v0.20,
// with each of its names.
func TestFlagsOfNVIDIAsPrograms(t *testing.T) {
	for name, flags := range map[string]string{
		"gpu-feature-discovery": "mig-strategy fail-on-init-error oneshot no-timestamp sleep-interval output-file output " +
			"machine-type-file config-file " +
			"use-node-feature-api device-discovery-strategy driver-root-ctr-path container-driver-root kubeconfig " +
			"kube-api-qps kube-api-burst " +
			"namespace node-name pod-name",
		"config-manager": "oneshot kubeconfig node-name node-label config-file-srcdir config-file-dst default-config " +
			"fallback-strategies send-signal " +
			"signal process-to-signal",
	} {
		for _, flag := range append(strings.Fields(flags), "version", "help") {
			// An unknown flag is refused before the help is printed.
			value := map[bool]string{true: "=1", false: ""}[flag != "version" && flag != "help"]
			if _, err := runAs(t, cli.NodeAgent(cluster.New(cluster.Options{})), name, "--"+flag+value, "--help"); err != nil {
				t.Errorf("%s --%s: %v", name, flag, err)
			}
		}
	}
}

// TestCompatibilityHasARowForEveryProgram: docs/dev/compatibility.md has a row for each program and
// each flag of config-manager.
func TestCompatibilityHasARowForEveryProgram(t *testing.T) {
	text, err := os.ReadFile("../../../docs/dev/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, programs, _ := strings.Cut(string(text), "\n## Programs\n")
	for _, name := range []string{"nvidia-device-plugin", "mps-control-daemon", "mps-control-daemon mount-shm",
		"gpu-feature-discovery", "config-manager"} {
		if !strings.Contains(programs, "\n| `"+name+"` |") {
			t.Errorf("no row for the program %s", name)
		}
	}
	_, flags, _ := strings.Cut(programs, "\n### config-manager\n")
	commands := cluster.New(cluster.Options{}).Commands()
	manager := commands[slices.IndexFunc(commands, func(c *cobra.Command) bool { return c.Name() == "config-manager" })]
	manager.Flags().VisitAll(func(f *pflag.Flag) {
		row := "\n| `--" + f.Name + "` | `" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")) + "` |"
		if !strings.Contains(flags, row) {
			t.Errorf("no row %s", row)
		}
	})
}

// TestArgumentsUnderNVIDIAsNames: everything after the first argument that is not a flag is
// ignored, including flags.
func TestArgumentsUnderNVIDIAsNames(t *testing.T) {
	args := []string{"--simulate=t4", "--oneshot", "--no-timestamp", "--output=", "--machine-type-file=" + machineFile(t),
		"now", "--mig-strategy=many", "-v"}
	got, err := runAs(t, cli.DevicePlugin(), "gpu-feature-discovery", args...)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(discovered(t, "t4-none"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if _, err := run(t, append([]string{"gpu-feature-discovery"}, args...)...); err == nil {
		t.Error("the command takes arguments")
	}
}

// TestMountWithoutAFile: mount-shm needs no configuration file, because config-manager may link it
// later. The test has no folder to mount below.
func TestMountWithoutAFile(t *testing.T) {
	t.Setenv("CONFIG_FILE", "/nowhere/config.yaml")
	file := machineFile(t)
	_, err := runAs(t, cli.DevicePlugin(), "mps-control-daemon", "mount-shm", "--mps-root-ctr-path="+file, "argument")
	if err == nil || !strings.Contains(err.Error(), "create the folder of shared memory") {
		t.Errorf("%v, want that it cannot make a folder in a file", err)
	}
}

// TestLabelsUnderNVIDIAsName: NVIDIA's program ignores names in the file, and the command does not.
func TestLabelsUnderNVIDIAsName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	const text = "sharing: {timeSlicing: {resources: [{name: gpu, rename: gpu.dev, replicas: 2}]}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--simulate=t4", "--oneshot", "--no-timestamp", "--output=", "--config-file=" + file}
	named, err := runAs(t, cli.DevicePlugin(), "gpu-feature-discovery", args...)
	command, other := run(t, append([]string{"gpu-feature-discovery"}, args...)...)
	if err != nil || other != nil {
		t.Fatal(err, other)
	}
	const label = "nvidia.com/gpu.product=Tesla-T4"
	if !slices.Contains(strings.Split(named, "\n"), label+"-SHARED") ||
		!slices.Contains(strings.Split(command, "\n"), label) {
		t.Errorf("under NVIDIA's name:\n%s\nas a command:\n%s", named, command)
	}
}
