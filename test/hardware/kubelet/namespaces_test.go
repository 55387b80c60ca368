package kubelet_test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/hardware"
)

// inside is set in the environment of a test that is run again in namespaces of its own.
const inside = "HARDWARE_INSIDE"

// inNamespaces runs this test once more as the first process of namespaces of its own for mounts,
// processes, the network and System V IPC, and reports whether this is that run. What is started
// there ends with it. Nothing that it mounts, writes below /run or listens at is seen on the
// machine, nor is the machine's own kubelet seen there. The GPUs are the machine's; without any the
// test is left out.
func inNamespaces(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inside) == "" {
		hardware.NeedGPU(t, *daemon, *client, *programs)
		if os.Geteuid() != 0 {
			t.Skip("it needs root: namespaces, mounts, cgroups")
		}
		run := exec.CommandContext(t.Context(), "unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child",
			"--mount-proc",
			os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v", "-daemon", *daemon, "-client", *client, "-programs", *programs,
			"-source", *source)
		run.Env = append(os.Environ(), inside+"=yes")
		run.Stdout, run.Stderr = os.Stdout, os.Stderr
		run.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // where this test runs into its timeout
		// containers that were left running have ended then
		defer removeCgroups()
		if err := run.Run(); err != nil {
			t.Errorf("in namespaces of its own: %v", err)
		}
		return false
	}
	loopbackUp(t)
	state := t.TempDir()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		t.Fatalf("mounts made from here on are seen in containers: %v", err)
	}
	for _, folder := range []string{"/run", "/var/log"} {
		if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "mode=0755"); err != nil {
			t.Fatalf("mount %s: %v", folder, err)
		}
	}
	for _, folder := range []string{"/var/lib/kubelet", "/var/lib/gpu-device-plugin"} {
		own := filepath.Join(state, filepath.Base(folder))
		if err := os.Mkdir(own, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(folder, 0o755); err == nil {
			t.Cleanup(func() { _ = os.Remove(folder) }) // a folder that was not there before
		}
		if err := unix.Mount(own, folder, "", unix.MS_BIND, ""); err != nil {
			t.Fatalf("mount %s: %v", folder, err)
		}
		t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	}
	return true
}

// loopbackUp sets the loopback interface of this network namespace up.
func loopbackUp(t *testing.T) {
	t.Helper()
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		t.Fatal(err)
	}
	request.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil {
		t.Fatalf("set the loopback interface up: %v", err)
	}
	if _, err := net.InterfaceByName("lo"); err != nil {
		t.Fatal(err)
	}
}
