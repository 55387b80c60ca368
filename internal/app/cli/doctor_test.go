package cli

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"unicode/utf8"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/containeredits"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
)

// TestFindingsFitTheScreen: findings fit the screen for any contents of the node's files.
func TestFindingsFitTheScreen(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("/a-long-folder", 40)
	for i, text := range []string{
		"short", strings.Repeat("word ", 100), long, "a " + long + " b " + long, "\x1b[2J\x00\r\n\u202e" +
			long, strings.Repeat("é", 300),
		strings.Repeat("x", 68), strings.Repeat("x", 64) + " y", strings.Repeat("ab ", 32) + "c", "",
	} {
		printed := findingsText(text, []diagnosis.Finding{
			{Check: "container-runtime", Severity: diagnosis.NotChecked, Message: text, Evidence: []string{text, "b"},
				Remedy: []string{text, "ls"}},
			{Check: "driver", Severity: diagnosis.OK, Message: text, Evidence: []string{text}},
		}, 100-i%2*20)
		for line := range strings.Lines(printed) {
			if width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); width > 100-i%2*20 {
				t.Errorf("%d columns: %q", width, line)
			}
			if strings.ContainsAny(line, "\x1b\r\x00\u202e") {
				t.Errorf("what a file has controls the terminal: %q", line)
			}
		}
	}
}

// TestCommandsThatAreCopied: a command longer than a line stays one command.
func TestCommandsThatAreCopied(t *testing.T) {
	t.Parallel()
	command := "kubectl" + strings.Repeat(" --flag=value", 20)
	printed := findingsText("", []diagnosis.Finding{{Severity: diagnosis.Error, Remedy: []string{command}}}, 100)
	_, copied, _ := strings.Cut(printed, "$ ")
	joined := strings.Join(strings.Fields(strings.ReplaceAll(copied, "\\\n", " ")), " ")
	if joined != command {
		t.Errorf("copied: %q, want %q", joined, command)
	}
}

func TestPlaces(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, name := range []string{"host/etc/containerd", "host/proc", "host/sys", "host/dev", "host/run/nvidia/driver/dev",
		"driver/dev"} {
		if err := os.MkdirAll(filepath.Join(folder, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	host, driver := filepath.Join(folder, "host"), filepath.Join(folder, "driver")
	for name, tt := range map[string]struct {
		driver    config.Driver
		hostRoot  string
		container bool
		at        string
		host      bool // its files are visible
		libraries bool
		devices   bool
		own       bool // the container's
	}{
		"on the node": {config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/none"}, "", false,
			"the node's files: /", true, true, true, false},
		"in the daemon's container": {config.Driver{Root: "/", DevRoot: "/", ContainerRoot: host}, "", true,
			"the node's files: " + host, true, true, true, true},
		"with a driver container": {config.Driver{Root: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver",
			ContainerRoot: driver}, "", true, "not visible", false, true, true, true},
		"with that and the node's /": {config.Driver{Root: "/run/nvidia/driver", DevRoot: "/", ContainerRoot: driver}, host,
			true, "the node's files: " + host, true, true, true, true},
		"with nothing mounted": {config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/none"}, "", true,
			"not visible", false, false, false, true},
		"on a node that is one": {config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/none"}, "/", true,
			"the node's files: /", true, true, true, false},
		"a folder that is not there": {config.Driver{Root: "/", DevRoot: "/", ContainerRoot: "/none"}, "/none", false, "",
			false, false, false, false},
	} {
		p, at, err := places(config.Config{Startup: config.Startup{Driver: tt.driver}}, tt.hostRoot, tt.container)
		if (err != nil) != (tt.at == "") || !strings.Contains(at, tt.at) {
			t.Errorf("%s: at %q, error %v, want at %q", name, at, err, tt.at)
		}
		got := fmt.Sprint(p.Host != nil, p.Driver != nil, p.Devices != nil, p.Container != nil)
		if want := fmt.Sprint(tt.host, tt.libraries, tt.devices, tt.own); got != want && err == nil {
			t.Errorf("%s: sees host, libraries, devices, container: %s, want %s", name, got, want)
		}
		if (p.Hidden == "") != (p.Host != nil) && err == nil {
			t.Errorf("%s: the node's files are hidden: %q", name, p.Hidden)
		}
		if strings.HasSuffix(at, host) {
			if _, err := fs.Stat(p.Host, "etc/containerd"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

var update = flag.Bool("update", false, "update the parts of docs/reference.md that are made from the code")

const doctorDoc = "../../../docs/reference.md"

// exampleNode is a node with an upgraded driver before its restart, and with containerd's package.
var exampleNode = fstest.MapFS{
	"sys/bus/pci/devices/0000:3b:00.0/vendor": {Data: []byte("0x10de\n")},
	"sys/bus/pci/devices/0000:3b:00.0/class":  {Data: []byte("0x030200\n")},
	"sys/bus/pci/devices/0000:3b:00.0/driver": {Data: []byte("../../drivers/nvidia"), Mode: fs.ModeSymlink},
	"sys/bus/pci/drivers/nvidia/bind":         {},
	"proc/driver/nvidia/version": {Data: []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  " +
		"570.86.15\n")},
	"proc/driver/nvidia/gpus/0000:3b:00.0/information": {Data: []byte("Device Minor: \t 0\n")},
	"proc/1/comm":   {Data: []byte("systemd\n")},
	"proc/600/comm": {Data: []byte("nvidia-persiste\n")},
	"proc/700/comm": {Data: []byte("containerd\n")},
	"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": {Data: []byte("libnvidia-ml.so.580.95.05"),
		Mode: fs.ModeSymlink},
	"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05": {},
	"dev/nvidiactl":  {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"dev/nvidia0":    {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"dev/nvidia-uvm": {Mode: fs.ModeDevice | fs.ModeCharDevice},
	"etc/containerd/config.toml": {Data: []byte("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\n" +
		"enable_cdi = false\n" +
		"[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'nvidia'\n" +
		"[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia.options]\n" +
		"BinaryName = '/usr/bin/nvidia-container-runtime'\n")},
	"usr/bin/nvidia-container-runtime": {},
}

// TestDoctorDoc compares the table and the example of docs/reference.md with the code. `go test
// ./internal/app/cli -run TestDoctorDoc -update` rewrites them.
func TestDoctorDoc(t *testing.T) {
	var table strings.Builder
	table.WriteString("| check | content when | needs to see |\n|---|---|---|\n")
	for _, c := range doctor.Checks {
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", c.Name, c.About, c.Needs)
	}
	facts := nodefacts.Places{
		Kernel: exampleNode, Host: exampleNode, Driver: exampleNode, DriverRoot: "/", Devices: exampleNode, DevFolder: "/dev",
	}.Gather(t.Context())
	facts.Settings = doctor.Settings{CDI: true, CDIFolder: "/var/run/cdi", CDIVendor: containeredits.CDIVendor,
		KernelLog: true, DriverRoot: "/"}
	facts.Kubelet = diagnosis.Fact[doctor.Kubelet]{Value: doctor.Kubelet{Socket: config.DefaultKubeletSocket}}
	facts.PodResources = diagnosis.Fact[doctor.PodResourcesAnswer]{}
	facts.Daemon.Missing = noDaemon(config.DefaultControlSocket)
	example := findingsText("the node's files: /", doctor.Examine(facts), 100)
	example, _, cut := strings.Cut(example, "not checked  ") // problems come first
	if !cut {
		t.Fatal("the example has no check that is not checked")
	}
	example += "…\n"

	text, err := os.ReadFile(doctorDoc)
	if err != nil {
		t.Fatal(err)
	}
	written := string(text)
	for name, part := range map[string]string{
		"checks": table.String(), "example": "```console\n# gpu-device-plugin doctor --device-list-strategy=cdi-cri\n" +
			example + "```\n",
	} {
		before, rest, begins := strings.Cut(written, "<!-- "+name+": written by internal/app/cli's TestDoctorDoc -->\n")
		_, after, ends := strings.Cut(rest, "<!-- end of "+name+" -->\n")
		if !begins || !ends {
			t.Fatalf("%s has no place for the %s", doctorDoc, name)
		}
		written = before + "<!-- " + name + ": written by internal/app/cli's TestDoctorDoc -->\n" + part + "<!-- end of " +
			name + " -->\n" + after
	}
	if written == string(text) {
		return
	}
	if !*update {
		t.Fatal("it differs from the code; update it: go test ./internal/app/cli -run TestDoctorDoc -update")
	}
	if err := os.WriteFile(doctorDoc, []byte(written), 0o644); err != nil {
		t.Fatal(err)
	}
}
