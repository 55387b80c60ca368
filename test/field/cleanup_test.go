package field_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A left is the root directory of a node on which a daemon gave GPUs by CDI and was killed, with a
// kubelet.
type left struct {
	*reinstalled
	// theirs are the files that other programs have there.
	theirs []string
}

func newLeft(t *testing.T) *left {
	folder := loopback.Folder(t)
	below := func(path string) string { return filepath.Join(folder, path) }
	k, err := kubelet.Start(kubelet.Options{
		Dir:                below("var/lib/kubelet/device-plugins"),
		PodResourcesSocket: below("var/lib/kubelet/pod-resources/kubelet.sock"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	l := &left{reinstalled: &reinstalled{&host{t: t, folder: folder, socket: filepath.Join(folder, "c.sock")}, k}}
	for _, path := range []string{
		"var/run/cdi/nvidia.yaml", "var/run/cdi/k8s.nic.example.com-claim_u9.yaml", "var/lib/kubelet/plugins_registry/other.sock",
	} {
		l.file(path, "theirs")
		l.theirs = append(l.theirs, path)
	}
	return l
}

// file writes a file below the root directory.
func (l *left) file(path, text string) {
	l.t.Helper()
	path = filepath.Join(l.folder, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// install starts the daemon with the node's folders.
func (l *left) install() {
	l.t.Helper()
	l.reinstalled.install(
		"--state-dir", filepath.Join(l.folder, "var/lib/gpu-device-plugin"), "--cdi-dir", filepath.Join(l.folder,
			"var/run/cdi"),
		"--kubelet-root", filepath.Join(l.folder, "var/lib/kubelet"), "--device-list-strategy=cdi-cri",
		"--mps-root", filepath.Join(l.folder, "run/nvidia/mps"), "--validate",
	)
}

// leads waits until the daemon leads: before, its socket has another name.
func (l *left) leads() {
	l.t.Helper()
	poll.Until(l.t, "the daemon leads", func() bool {
		all := l.ours()
		return slices.ContainsFunc(all, func(path string) bool { return strings.HasSuffix(path, "/lead.sock") }) &&
			!slices.ContainsFunc(all, func(path string) bool { return strings.HasSuffix(path, "/lead.new") })
	})
}

// use has the node used by everything that leaves files: the daemon, claims and MPS.
func (l *left) use() {
	l.t.Helper()
	l.install()
	poll.Until(l.t, "CDI specs are written", func() bool { return len(l.ours()) >= 4 })
	l.killed()
	l.file("run/nvidia/mps/nvidia.com/gpu.shared/log/control.log", "")
	l.file("var/run/cdi/k8s.gpu.nvidia.com-claim_u1.yaml", "# {}\n{}")
	l.file("var/lib/gpu-device-plugin/claims/u1.json", "{}")
	l.file("etc/kubernetes/node-feature-discovery/features.d/gpu-device-plugin", "nvidia.com/gpu.count=8\n")
}

// initializes has an init container of the pod p hold GPUs by CDI, and ends the daemon.
func (l *left) initializes() {
	l.t.Helper()
	l.install()
	l.serves(8)
	if _, err := l.kubelet.Admit(context.Background(), kubelet.Container{
		Pod: "p", Name: "c", Resource: "nvidia.com/gpu", Count: 1, Init: true,
	}); err != nil {
		l.t.Fatal(err)
	}
	l.killed()
	l.checkpoint("")
}

// ours returns the files and folders that only this program makes.
func (l *left) ours() (paths []string) {
	l.t.Helper()
	err := filepath.WalkDir(l.folder, func(path string, _ fs.DirEntry, err error) error {
		name, _ := filepath.Rel(l.folder, path)
		for _, begin := range []string{
			"var/lib/gpu-device-plugin", "var/lib/kubelet/device-plugins/gpu-device-plugin", "run/nvidia/mps", "var/run/cdi/k8s.device-plugin",
			"var/run/cdi/k8s.gpu.nvidia.com", "etc/kubernetes/node-feature-discovery/features.d/gpu-device-plugin",
		} {
			if strings.HasPrefix(name, begin) && !strings.HasSuffix(name, ".tmp") {
				paths = append(paths, name)
			}
		}
		if os.IsNotExist(err) {
			return nil
		}
		return err
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return paths
}

// checkpoint writes the kubelet's checkpoint of claims.
func (l *left) checkpoint(driver string, devices ...string) {
	l.t.Helper()
	l.claims(driver, devices...)
	root := filepath.Join(l.folder, "var/lib/kubelet")
	if err := os.Rename(filepath.Join(l.folder, "dra_manager_state"),
		filepath.Join(root, "dra_manager_state")); err != nil {
		l.t.Fatal(err)
	}
}

// TestCleanup: cleanup leaves nothing of an uninstalled daemon but what a container uses, and
// nothing of others is removed (A3).
func TestCleanup(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before func(*left)
		args   []string
		fails  bool
		says   string
		keeps  []string // what of the program's is there afterwards: beginnings of paths; nil for nothing
	}{
		"everything":      {before: func(l *left) { l.use(); l.checkpoint("") }, says: "removed "},
		"nothing is left": {before: func(l *left) { l.checkpoint("") }, says: ""},
		"a dry run": {before: func(l *left) { l.use(); l.checkpoint("") }, args: []string{"--dry-run"},
			says: "would remove ", keeps: []string{""}},
		"a daemon that runs": {before: func(l *left) { l.install(); l.leads() }, fails: true,
			says: "a daemon of this program runs on the node", keeps: []string{""}},
		"a kubelet that is away": {
			before: func(l *left) {
				l.use()
				l.kubelet.Stop()
				_ = os.Remove(filepath.Join(l.folder, "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"))
			}, fails: true, says: "the kubelet does not say what containers use, so nothing is removed", keeps: []string{""},
		},
		"a pod with GPUs by CDI": {
			before: func(l *left) {
				l.install()
				l.serves(8)
				if _, err := l.kubelet.Admit(context.Background(), kubelet.Container{
					Pod: "p", Name: "c", Resource: "nvidia.com/gpu", Count: 1,
				}); err != nil {
					l.t.Fatal(err)
				}
				l.killed()
				l.checkpoint("")
			}, says: "uses it", keeps: []string{"var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json", "var/lib/gpu-device-plugin"},
		},
		"an init container with GPUs by CDI": { // PodResources does not name it
			before: func(l *left) {
				l.initializes()
				l.file("sys/fs/cgroup/kubepods.slice/kubepods-podp.slice/pids.current", "1\n")
			},
			says: "uses it", keeps: []string{"var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json", "var/lib/gpu-device-plugin"},
		},
		"a pod that has ended": {
			before: func(l *left) { l.initializes(); l.file("sys/fs/cgroup/kubepods.slice/other", "") }, says: "removed ",
		},
		"a claim that is prepared": {
			before: func(l *left) { l.use(); l.checkpoint("gpu.nvidia.com", "gpu-3") }, says: "the kubelet has the claim",
			keeps: []string{"var/run/cdi/k8s.gpu.nvidia.com-claim_u1.yaml", "var/lib/gpu-device-plugin", "run/nvidia/mps"},
		},
		"a driver of gpu-driver": {
			before: func(l *left) {
				l.use()
				l.checkpoint("")
				l.file("var/lib/gpu-device-plugin/driver/0123/manifest.json", "{}")
				l.file("var/lib/gpu-device-plugin/driver/current", "")
			}, says: "the driver of the node is in it", keeps: []string{"var/lib/gpu-device-plugin/driver"},
		},
		"claims that are not known": {
			before: func(l *left) { l.use() }, says: "read the kubelet's checkpoint of claims",
			keeps: []string{"var/run/cdi/k8s.gpu.nvidia.com-claim_u1.yaml", "var/lib/gpu-device-plugin", "run/nvidia/mps"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLeft(t)
			c.before(l)
			before := l.ours()
			text, status := run(t, append([]string{"cleanup", "--host-root", l.folder}, c.args...)...)
			if failed := status != 0; failed != c.fails || !strings.Contains(text, c.says) {
				t.Errorf("exit status %d, want a failure: %t, and %q:\n%s", status, c.fails, c.says, text)
			}
			if text, again := run(t, append([]string{"cleanup", "--host-root", l.folder}, c.args...)...); again != status {
				t.Errorf("a second time the exit status is %d, and not %d:\n%s", again, status, text)
			}
			kept := func(path string) bool {
				return slices.ContainsFunc(c.keeps, func(begin string) bool {
					return strings.HasPrefix(path, begin) || strings.HasPrefix(begin, path+"/")
				})
			}
			for _, path := range before {
				if there := slices.Contains(l.ours(), path); there != kept(path) {
					t.Errorf("%s is there: %t, want %t:\n%s", path, there, kept(path), text)
				}
			}
			for _, path := range l.theirs {
				if _, err := os.Stat(filepath.Join(l.folder, path)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
