package nodefacts_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/doctor"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/nodefacts"
	standin "github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// write puts the good node, without its device nodes, into a folder. Functions in hostile create
// the files at their paths instead.
func write(t *testing.T, hostile map[string]func(path string) error) string {
	t.Helper()
	folder := t.TempDir()
	node := newNode(nil)
	for name := range hostile {
		if node[name] == nil {
			node[name] = &fstest.MapFile{}
		}
	}
	for name, file := range node {
		path := filepath.Join(folder, name)
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		switch {
		case err != nil:
		case hostile[name] != nil:
			err = hostile[name](path)
		case file.Mode&fs.ModeSymlink != 0:
			err = os.Symlink(string(file.Data), path)
		case file.Mode&fs.ModeDevice == 0:
			err = os.WriteFile(path, file.Data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// hostile are unexpected files, each in the place of a file that is read.
var hostile = map[string]func(path string) error{
	"FIFO":     func(path string) error { return unix.Mkfifo(path, 0o600) },
	"a folder": func(path string) error { return os.Mkdir(path, 0o700) },
	"100 MB": func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 100<<20))
	},
	"garbage": func(path string) error {
		return os.WriteFile(path, []byte(strings.Repeat("\x00\xff[{=\x1b[2J\n", 9999)), 0o600)
	},
	"nested":  func(path string) error { return os.WriteFile(path, []byte("a = "+strings.Repeat("[", 100_000)), 0o600) },
	"a loop":  func(path string) error { return os.Symlink(filepath.Base(path), path) },
	"outside": func(path string) error { return os.Symlink("../../../../../../../../dev/zero", path) },
	"empty":   func(path string) error { return os.WriteFile(path, nil, 0o600) },
}

// TestHostileFiles: for any kind of file, all checks end soon and have a finding.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	read := []string{
		"proc/driver/nvidia/version", "sys/bus/pci/devices/" + address +
			"/class", "proc/devices", "proc/700/comm", "proc/700/cmdline",
		libs + "libnvidia-ml.so.580.95.05", config, dropIn, toolkit, "run/cdi/k8s.device-plugin.nvidia.com-gpu.json",
		"etc/cdi/other.yaml",
		"sys/fs/selinux/enforce", "proc/driver/nvidia/gpus/" + address + "/information", "usr/bin/containerd", "dev/nvidia0",
		"etc/crio/crio.conf",
	}
	for kind, makeFile := range hostile {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			files := map[string]func(string) error{}
			for _, name := range read {
				files[name] = makeFile
			}
			facts := gathered(t, os.DirFS(write(t, files)))
			facts.Settings = cdi
			checks := map[string]bool{}
			for _, f := range doctor.Examine(facts) {
				checks[f.Check] = true
				if strings.Contains(f.Message, "did not return") {
					t.Errorf("a file of the kind %s is waited for: %+v", kind, f)
				}
			}
			if len(checks) != len(doctor.Checks) {
				t.Errorf("findings of %d checks, want %d", len(checks), len(doctor.Checks))
			}
		})
	}
}

// TestNothingChanges: neither contents nor dates of the node's files change, except for access
// times.
func TestNothingChanges(t *testing.T) {
	t.Parallel()
	folder := write(t, nil)
	before := state(t, folder)
	facts := gathered(t, os.DirFS(folder))
	facts.Settings = cdi
	doctor.Examine(facts)
	if diff := cmp.Diff(before, state(t, folder)); diff != "" {
		t.Errorf("the node changed (-before +after):\n%s", diff)
	}
	if len(before) < len(goodNode) {
		t.Errorf("%d files, want those of the good node", len(before))
	}
}

func state(t *testing.T, folder string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		var content []byte
		if info.Mode().IsRegular() {
			content, err = os.ReadFile(path)
		}
		all[path] = fmt.Sprint(info.Mode(), info.Size(), info.ModTime(), sha256.Sum256(content))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A stuck file system does not answer about one path until its test has ended.
type stuck struct {
	fstest.MapFS
	at   string
	over <-chan struct{}
}

func (s stuck) Open(name string) (fs.File, error) {
	if name == s.at {
		<-s.over
	}
	return s.MapFS.Open(name)
}

// TestHungRead: a read that does not return is a finding, and the other checks end.
func TestHungRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		over := make(chan struct{})
		defer close(over)
		began := time.Now()
		facts := placesOf(stuck{newNode(nil), "proc/driver/nvidia/version", over}).Gather(t.Context())
		if took := time.Since(began); took != nodefacts.Timeout {
			t.Errorf("gives up after %v, want %v", took, nodefacts.Timeout)
		}
		found := false
		for _, f := range doctor.Examine(facts) {
			found = found || f.Check == "driver" && f.Severity == diagnosis.Warning && strings.Contains(f.Message, "did not return")
		}
		if !found || facts.Runtime.Missing != "" {
			t.Errorf("module %+v, runtime %+v: want only the module's version to be missing", facts.Module, facts.Runtime)
		}
	})
}

// TestNothingVisible: in a container without access to its node, no check that needs the node's
// files succeeds.
func TestNothingVisible(t *testing.T) {
	t.Parallel()
	const hidden = "The node's files are not visible"
	for name, kernel := range map[string]fstest.MapFS{"nothing": {}, "an empty /sys": {"sys/kernel/x": {}}} {
		facts := nodefacts.Places{Kernel: kernel, Hidden: hidden}.Gather(t.Context())
		facts.Daemon.Missing, facts.NextBoot.Missing = "No daemon answers", hidden
		facts.Settings.Companions, facts.Settings.DriverRoot = []doctor.CompanionModule{doctor.GDRCopy}, "/run/nvidia/driver"
		for _, f := range doctor.Examine(facts) {
			without := slices.Contains([]string{"gpus", "driver", "next-boot", "device-nodes", "persistence", "kernel-log",
				"fabric-manager"},
				f.Check)
			if f.Severity != diagnosis.NotChecked && f.Check != "mps" && (name == "nothing" || !without) {
				t.Errorf("%s can be seen, and still: %+v", name, f)
			}
		}
	}
}

// TestKubelet reads the folder of a kubelet with another plugin, and asks its PodResources service.
func TestKubelet(t *testing.T) {
	t.Parallel()
	folder := loopback.Folder(t)
	places := nodefacts.Places{
		Kernel: fstest.MapFS{}, Hidden: "hidden", KubeletSocket: filepath.Join(folder, "kubelet.sock"),
		PodResourcesSocket: filepath.Join(folder, "pod-resources", "kubelet.sock"),
	}
	facts := places.Gather(t.Context())
	if k := facts.Kubelet.Value; facts.Kubelet.Missing != "" || k.Refused == "" || k.Unread == "" ||
		facts.PodResources.Value.Problem == "" {
		t.Errorf("no kubelet: got %+v and %+v", facts.Kubelet, facts.PodResources)
	}
	k, err := standin.Start(standin.Options{Dir: folder, PodResourcesSocket: places.PodResourcesSocket,
		Version: standin.V137})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	other, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", filepath.Join(folder, "nvidia-gpu.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	// On a machine that stands still, a look may find a socket too slow.
	poll.Until(t, "a kubelet and another plugin", func() bool {
		facts := places.Gather(t.Context())
		k := facts.Kubelet.Value
		return k.Refused == "" && slices.Equal(k.Listening, []string{"nvidia-gpu.sock"}) &&
			facts.PodResources.Value.Problem == ""
	})
	k.Stop() // the file of the socket stays
	if facts := places.Gather(t.Context()); facts.Kubelet.Value.Refused == "" || facts.PodResources.Value.Problem == "" {
		t.Errorf("a kubelet that ended: got %+v and %+v", facts.Kubelet, facts.PodResources)
	}
}
