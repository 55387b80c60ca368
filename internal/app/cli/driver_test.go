package cli_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/cli"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/documents"
)

// driverNode writes the files of a node with a driver, without modules for the next boot, and with a
// process whose name changes terminals.
func driverNode(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"etc/os-release":                           "ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n",
		"boot/grub/grub.cfg":                       "set default=\"0\"\nmenuentry 'Debian' {\n\tlinux /vmlinuz-6.1.0-29-amd64 ro\n}\n",
		"lib/modules/6.1.0-28-amd64/modules.dep":   "",
		"proc/sys/kernel/osrelease":                "6.1.0-28-amd64\n",
		"proc/modules":                             "nvidia 8192 1 - Live 0x0 (OE)\n",
		"proc/driver/nvidia/version":               "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
		"sys/bus/pci/devices/0000:3b:00.0/vendor":  "0x10de\n",
		"sys/bus/pci/devices/0000:3b:00.0/class":   "0x030200\n",
		"sys/bus/pci/devices/0000:3b:00.0/device":  "0x2330\n",
		"sys/module/module/parameters/sig_enforce": "N\n",
		"sys/class/drm/version":                    "drm\n",
		"proc/7/comm":                              "\x1b[2Jtrain\n",
		"proc/7/cgroup":                            "0::/user.slice/session-1.scope\n",
		"proc/7/maps":                              "7f00-7f01 r-xp 0 fe:00 1 /usr/lib/libcuda.so.580.95.05\n",
		"sys/firmware/acpi/x":                      "",
		"usr/bin/nvidia-uninstall":                 "",
		"usr/bin/x":                                "",
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text),
			0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(filepath.Join(root, "proc/7/fd"), 0o700),
		os.Symlink("/dev/nvidia0", filepath.Join(root, "proc/7/fd/3"))); err != nil {
		t.Fatal(err)
	}
	return root
}

const driverDoc = "../../../docs/driver.md"

// TestDriverDoc holds the example of docs/driver.md to what the command prints on a made-up node. `go
// test ./internal/app/cli -run TestDriverDoc -update` rewrites it.
func TestDriverDoc(t *testing.T) {
	root := driverNode(t)
	const uid, id = "8d7c1a52-31a5-4a6e-9f43-0f5a4f1c7a11", "4f1c7a110f5a8d7c1a5231a54a6e9f434f1c7a110f5a8d7c1a5231a54a6e9f43"
	for name, text := range map[string]string{
		"proc/7/comm": "python3\n",
		"proc/7/cgroup": "0::/kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-",
			"_") + ".slice/cri-containerd-" + id + ".scope\n",
		"var/log/pods/team_train-0_" + uid + "/main/0.log":     "",
		"var/log/containers/train-0_team_main-" + id + ".log":  "",
		"lib/modules/6.1.0-28-amd64/build/Makefile":            "",
		"usr/src/nvidia-580.95.05/dkms.conf":                   "",
		"lib/modules/6.1.0-28-amd64/updates/dkms/nvidia.ko.xz": "",
		"proc/8/comm":   "nvidia-persiste\n",
		"proc/8/cgroup": "0::/system.slice/nvidia-persistenced.service\n",
		"lib/modules/6.1.0-28-amd64/updates/dkms/nvidia-uvm.ko.xz": "",
		"lib/modules/6.1.0-28-amd64/modules.dep":                   "updates/dkms/nvidia.ko.xz:\nupdates/dkms/nvidia-uvm.ko.xz: updates/dkms/nvidia.ko.xz\n",
		"proc/8/maps":                                              "",
		"proc/modules":                                             "gdrdrv 32768 0 - Live 0x0 (OE)\nnvidia_uvm 4096 2 - Live 0x0 (OE)\nnvidia 8192 9 nvidia_uvm,gdrdrv, Live 0x0 (OE)\n",
		"var/lib/dpkg/status":                                      "Package: nvidia-driver\nStatus: install ok installed\nVersion: 580.95.05-1\n",
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text),
			0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Remove(filepath.Join(root, "usr/bin/nvidia-uninstall")), os.Mkdir(filepath.Join(root,
		"proc/8/fd"), 0o700),
		os.Symlink("/dev/nvidiactl", filepath.Join(root, "proc/8/fd/3"))); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NODE_NAME", "node-1")
	printed, _ := run(t, "driver", "preflight", "--host-root", root, "--pod-resources-socket=", "--control-socket=")
	printed, _, _ = strings.Cut(printed, "\nok  ")
	documents.HoldPart(t, driverDoc, "preflight", "```text\n# gpu-device-plugin driver preflight\n"+
		strings.TrimSpace(printed)+"\n…\n```\n", *update)
}

// TestDriverPreflight: the sentence, the holders and the findings as text without effect on the
// terminal, the same as JSON, and the exit status by the worst finding.
func TestDriverPreflight(t *testing.T) {
	root := driverNode(t)
	t.Setenv("NODE_NAME", "node-1")
	args := []string{"driver", "preflight", "--host-root", root, "--pod-resources-socket=", "--control-socket="}
	text, err := run(t, args...)
	var status cli.ExitStatus
	if !errors.As(err, &status) || status != 3 {
		t.Errorf("it ends with %v, want exit status 3", err)
	}
	const want = `node-1: blocked: There is no nvidia module for kernel 6.1.0-28-amd64 (this boot); and 1 more
  problem; in use by 1 process (^[[2Jtrain (7)); 1 check not made
driver 580.95.05, of NVIDIA's .run installer; kernel 6.1.0-28-amd64, next boot 6.1.0-29-amd64

held by      process            ^[[2Jtrain (7): /dev/nvidia0, libcuda; PID 7
                                to let go: end the process: kill 7
`
	head, findings, _ := strings.Cut(text, "\nerror ")
	if diff := cmp.Diff(want, head); diff != "" {
		t.Errorf("the text (-want +got):\n%s", diff)
	}
	if strings.ContainsRune(text, '\x1b') || !strings.Contains(findings, "after a restart the node has no GPUs") {
		t.Errorf("the findings:\n%s", findings)
	}
	text, err = run(t, append(args, "-o", "json")...)
	var report struct {
		Node, Verdict, Kernel, NextKernel string
		NotChecked                        int
		Findings                          []struct{ Check, Severity string }
		Holders                           []struct{ Kind, Name, Release string }
	}
	if problem := json.Unmarshal([]byte(text), &report); problem != nil || !errors.As(err, &status) || status != 3 {
		t.Fatalf("%v, %v: %s", problem, err, text)
	}
	if report.Node != "node-1" || report.Verdict != "blocked" || report.NextKernel != "6.1.0-29-amd64" || len(report.Holders) != 1 ||
		report.Holders[0].Name != "\x1b[2Jtrain (7)" || report.Findings[0].Severity != "error" || strings.ContainsRune(text, '\x1b') {
		t.Errorf("the report: %+v", report)
	}
}

// TestDriverTarget: values of --to that are no driver.
func TestDriverTarget(t *testing.T) {
	root := driverNode(t)
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]string{
		"58":       "no version such as 580.95.05",
		"newest":   "no version such as 580.95.05",
		"/none":    "no such file or directory",
		"./x; rm":  "no such file or directory",
		"/usr":     "",
		"/file":    "it is not a folder",
		"570.1":    "",
		"580":      "",
		"../../..": "",
	} {
		_, err := run(t, "driver", "preflight", "--host-root", root, "--pod-resources-socket=", "--control-socket=",
			"--to", to)
		var status cli.ExitStatus
		if want == "" && !errors.As(err, &status) || want != "" && (err == nil || !strings.Contains(err.Error(),
			want)) {
			t.Errorf("--to %s: %v, want %q", to, err, want)
		}
	}
}
