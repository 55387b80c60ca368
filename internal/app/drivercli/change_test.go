package drivercli_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/drivercli"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverfolder"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverhost"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverkernel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/pty"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/standinkernel"
)

// The commands of a person on a node, in the order of a change that is taken back, and of one that
// works.
func TestChangeOfTheDriver(t *testing.T) {
	t.Parallel()
	k, sources := standinkernel.New(t), t.TempDir()
	directory := filepath.Join(k.Root, "drivers")
	older := standinkernel.Driver(t, sources, "old", "570.86.15", standinkernel.Release)
	newer := standinkernel.Driver(t, sources, "new", "580.95.05", standinkernel.Release)
	host, err := driverhost.New(driverhost.Options{Directory: directory, Sources: sources, Pause: 10 * time.Millisecond,
		Kernel: &driverkernel.Kernel{Root: k.Root, Calls: k}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	socket := filepath.Join(directory, "driver.sock")
	go func() { ended <- host.Run(ctx, socket) }()
	defer func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		host.Close()
	}()
	call := func(args ...string) (string, error) { return run(t, append(args, "--socket", socket)...) }
	must := func(want string, args ...string) string {
		t.Helper()
		out, err := call(args...)
		if err != nil || !strings.Contains(out, want) {
			t.Fatalf("gpu-driver %s: %v\n%s\nwant: %s", strings.Join(args, " "), err, out, want)
		}
		return out
	}
	poll.Until(t, "the host answers", func() bool { _, err := call("status"); return err == nil })

	must("loaded     none\nnext boot  none\ndriver     570.86.15 sha256:"+older[:12]+": among the sources only", "status")
	must("placed     570.86.15", "place", "570")
	must("next boot  570.86.15", "swap", "570.86.15", "--confirm")
	out := must("what next  try the driver, then: gpu-driver confirm, or gpu-driver revert", "swap", newer[:10])
	if !strings.HasPrefix(out, "placing") && !strings.HasPrefix(out, "unloading") && !strings.HasPrefix(out, "loading") &&
		!strings.HasPrefix(out, "unproven") {
		t.Errorf("no progress: %s", out)
	}
	must("step       failed 100 %", "revert", "--reason", "CUDA\x1b[2J error")
	must("why        CUDA^[[2J error", "status")
	if _, err := call("swap", "580"); err == nil || !strings.Contains(err.Error(), "has failed") {
		t.Errorf("a swap after a failure: %v", err)
	}
	must("loaded     570.86.15", "cancel")

	k.Refuse("nvidia_uvm=580.95.05", unix.ENODEV)
	if _, err := call("swap", "580"); err == nil || !strings.Contains(err.Error(), "the change of the driver failed: the kernel") {
		t.Errorf("a driver that the kernel refuses: %v", err)
	}
	k.Refuse("nvidia_uvm=580.95.05", 0)
	must("next boot  570.86.15", "cancel")
	must("what next  restart the node", "next-boot", "sha256:"+newer)
	must("next boot  570.86.15", "cancel")

	shown := pty.Shown(t, 60, func(terminal *os.File) {
		if err := drivercli.Execute(ctx, []string{"swap", "580", "--socket", socket}, terminal); err != nil {
			t.Error(err)
		}
	})
	if !strings.Contains(shown, "unproven   [##############################] 100 %") {
		t.Errorf("on a terminal: %q", shown)
	}
	must("loaded     580.95.05 sha256:"+newer[:12], "confirm")
	var s driverapi.Status
	if err := json.Unmarshal([]byte(must("{", "status", "-o", "json")), &s); err != nil || s.Change != nil || s.Current != newer {
		t.Errorf("status as JSON: %+v, %v", s, err)
	}
	if _, err := call("swap", "590"); err == nil || !strings.Contains(err.Error(), "the node has no driver folder 590; it has: 570.86.15 (sha256:") {
		t.Errorf("an unknown driver: %v", err)
	}
}

// The containers of a pod that has no image volumes: one copies the program, and the next one, whose
// root is the driver, places it.
func TestPlaceWithoutServe(t *testing.T) {
	t.Parallel()
	sources, top := t.TempDir(), t.TempDir()
	digest := standinkernel.Driver(t, sources, "a", "580.95.05", standinkernel.Release)
	program := filepath.Join(top, "gpu-driver")
	if _, err := run(t, "copy-self", program); err != nil {
		t.Fatal(err)
	}
	own, err := os.Stat("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if copied, err := os.Stat(program); err != nil || copied.Size() != own.Size() || copied.Mode() != 0o755 {
		t.Errorf("the copy: %v, %v", copied, err)
	}
	directory := filepath.Join(top, "driver")
	out, err := run(t, "place", "--from", filepath.Join(sources, "a"), "--directory", directory)
	if err != nil || !strings.Contains(out, "digest   sha256:"+digest) {
		t.Errorf("%v: %s", err, out)
	}
	if _, found, err := driverfolder.Verify(t.Context(), filepath.Join(directory, digest)); err != nil || found != digest {
		t.Errorf("the folder: %s, %v", found, err)
	}
}
