package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// asRuntime is the variable that makes this program the stand-in for NVIDIA's runtime.
const asRuntime = "E2E_AS_NVIDIA_RUNTIME"

func TestMain(m *testing.M) {
	if os.Getenv(asRuntime) == "" {
		os.Exit(m.Run())
	}
	err := runtimeOfNVIDIA(os.Args[1:])
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// runtimeOfNVIDIA does what NVIDIA's runtime does for the operator's pods, and becomes runc. It
// gives a container that says NVIDIA_VISIBLE_DEVICES=all the device nodes of the driver, if it has
// the capability SYS_ADMIN: as NVIDIA's where
// accept-nvidia-visible-devices-envvar-when-unprivileged is false.
func runtimeOfNVIDIA(args []string) error {
	if at := slices.Index(args, "--bundle"); slices.Contains(args, "create") && at >= 0 && at+1 < len(args) {
		if err := addDevices(filepath.Join(args[at+1], "config.json")); err != nil {
			return err
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ())
}

func addDevices(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return err
	}
	in := func(from map[string]any, key string) map[string]any {
		inner, is := from[key].(map[string]any)
		if !is {
			inner = map[string]any{}
			from[key] = inner
		}
		return inner
	}
	has := func(from map[string]any, key, value string) bool {
		values, _ := from[key].([]any)
		return slices.Contains(values, any(value))
	}
	process, linux := in(spec, "process"), in(spec, "linux")
	if !has(process, "env", "NVIDIA_VISIBLE_DEVICES=all") ||
		!has(in(process, "capabilities"), "bounding", "CAP_SYS_ADMIN") {
		return nil
	}
	nodes, err := filepath.Glob(filepath.Join(driverRoot, "dev/nvidia*"))
	if err != nil {
		return err
	}
	devices, _ := linux["devices"].([]any)
	resources := in(linux, "resources")
	allowed, _ := resources["devices"].([]any)
	for _, path := range nodes {
		var found unix.Stat_t
		if err := unix.Stat(path, &found); err != nil || found.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		major, minor := unix.Major(found.Rdev), unix.Minor(found.Rdev)
		devices = append(devices, map[string]any{
			"path": strings.TrimPrefix(path, driverRoot), "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0,
		})
		allowed = append(allowed, map[string]any{"allow": true, "type": "c", "major": major, "minor": minor, "access": "rw"})
	}
	linux["devices"], resources["devices"] = devices, allowed
	if text, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

// installRuntime puts the stand-in where containerd looks for it, and makes its RuntimeClass, until
// the story ends.
func installRuntime(ctx context.Context, t *testing.T, n *node.Node) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(*state, "nvidia-container-runtime")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"+asRuntime+"=1 exec "+self+" \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	classes := n.Client.NodeV1().RuntimeClasses()
	remove := func(ctx context.Context) error {
		if err := classes.Delete(ctx, "nvidia", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	}
	persist(ctx, t, "make the RuntimeClass", func(ctx context.Context) error {
		if err := remove(ctx); err != nil { // another story has one that is runc
			return err
		}
		_, err := classes.Create(ctx, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"},
			metav1.CreateOptions{})
		return err
	})
	t.Cleanup(func() {
		if err := remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
