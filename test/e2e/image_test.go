package e2e

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestImages holds what is in the images: programs under NVIDIA's names, sizes, a shell where there
// is to be one and nowhere else.
func TestImages(t *testing.T) {
	const mb = 1e6
	plugin, both := treeSize(t, "plugin"), treeSize(t, "plugin")+treeSize(t, "agent")
	t.Logf("gpu-device-plugin's layer has %.1f MB, both programs' %.1f MB, compat's own %.1f MB", plugin/mb, both/mb,
		treeSize(t, "compat")/mb)
	// In the image, the layer also has what the program is made of and the licences' texts: under 1
	// MB.
	if plugin >= 25*mb || both >= 80*mb {
		t.Errorf("the layer of gpu-device-plugin has %.1f MB, that of both programs %.1f MB, want under 25 and 80", plugin/mb,
			both/mb)
	}

	programs := map[string]string{ // name → what its help begins with
		"gpu-device-plugin":     "gpu-device-plugin is a Kubernetes device plugin",
		"gpu-node-agent":        "gpu-node-agent is gpu-device-plugin with a client of the API server",
		"mps-control-daemon":    "mps-control-daemon runs one nvidia-cuda-mps-control",
		"gpu-feature-discovery": "gpu-feature-discovery finds the GPUs of the node",
		"config-manager":        "config-manager links the configuration file",
		"nvidia-device-plugin":  "",
	}
	lean, compat := rootOf(t, "plugin", "agent"), rootOf(t, "plugin", "agent", "compat")
	for _, root := range []string{lean, compat} {
		for name, begins := range programs {
			out, err := chroot(root, "/usr/bin/"+name, "--help")
			if err != nil || !strings.HasPrefix(out, begins) {
				t.Errorf("%s --help: %v: %.200q, want it to begin with %q", name, err, out, begins)
			}
		}
	}
	for _, shell := range []string{"/bin/sh", "/usr/bin/sh", "/usr/bin/busybox"} {
		if out, err := chroot(lean, shell, "-c", "echo there"); err == nil {
			t.Errorf("the default image has %s: %s", shell, out)
		}
	}

	// The operator mounts its scripts at /bin/entrypoint.sh. The two forms differ in the shell.
	for _, script := range []string{
		"#!/bin/sh\nuntil [ -f /ready ]; do sleep 5; done\nset -o allexport\ncat /ready\n. /ready\nexec sh -c 'echo $ROOT'\n",
		"#!/bin/bash\nuntil [[ -f /ready ]]; do sleep 5; done\nset -o allexport\ncat /ready\n. /ready\nexec bash -c 'echo $ROOT'\n",
	} {
		shell, _, _ := strings.Cut(strings.TrimPrefix(script, "#!"), "\n")
		for file, text := range map[string]string{"ready": "ROOT=/driver-root\n", "usr/bin/entrypoint.sh": script} {
			if err := os.WriteFile(filepath.Join(compat, file), []byte(text), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := chroot(compat, shell, "-c", "/bin/entrypoint.sh"); err != nil ||
			out != "ROOT=/driver-root\n/driver-root\n" {
			t.Errorf("%s -c /bin/entrypoint.sh: %v: %q", shell, err, out)
		}
	}
	for _, command := range []string{"sleep 0", "echo nvidia | grep -q ^nvidia",
		"lsmod --help 2>/dev/null; [ $? != 127 ]"} {
		if out, err := chroot(compat, "/bin/sh", "-c", command); err != nil {
			t.Errorf("%s: %v: %s", command, err, out)
		}
	}
}

// treeSize returns how many bytes the files of a layer have.
func treeSize(t *testing.T, layer string) float64 {
	t.Helper()
	var size int64
	err := filepath.WalkDir(filepath.Join(*imageRoot, layer), func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		size += info.Size()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return float64(size)
}

// rootOf returns a folder with these layers above each other, as a container has them.
func rootOf(t *testing.T, layers ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, layer := range layers {
		if out, err := exec.CommandContext(t.Context(), "cp", "-a", filepath.Join(*imageRoot, layer)+"/.",
			root).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return root
}

// chroot runs a program of a container's root there, and returns what it wrote.
func chroot(root, program string, args ...string) (string, error) {
	cmd := exec.Command(program, args...)
	cmd.Env = []string{"PATH=/usr/bin"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	out, err := cmd.CombinedOutput()
	return string(out), err
}
