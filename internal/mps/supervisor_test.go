package mps_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

// TestDaemonThatDoesNotStop: meanwhile, daemons of other GPUs are started, but no other daemon of
// the same GPU.
func TestDaemonThatDoesNotStop(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a daemon that does not quit is killed after 10 s: make test-all runs it")
	}
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2)))
	n.untilReady()
	stopped := n.pid(one)
	if err := syscall.Kill(stopped, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	const three = "nvidia.com/gpu.third"
	n.wanted.Publish([]mps.Group{group(two, gpu("b", 80, 2)), group(three, gpu("a", 80, 2))})
	n.until("a daemon of "+two, func() bool { return n.has(two + "/.started") })
	if !alive(stopped) {
		t.Error("a daemon of another GPU was not started before the one that hangs had ended")
	}
	n.until("a daemon of "+three, func() bool {
		if n.pid(three) != 0 && alive(stopped) {
			t.Error("two daemons have one GPU")
		}
		return n.has(three + "/.started")
	})
	n.untilReady()
}

// TestGPUChangesResource: the old daemon stops before the new daemon starts, although the
// old resource is still shared.
func TestGPUChangesResource(t *testing.T) {
	locks := t.TempDir()
	t.Setenv("MPS_STAND_IN_GPUS", locks)
	n := newNode(t)
	n.supervise(group(one, gpu("a", 80, 2), gpu("b", 80, 2)))
	n.untilReady()
	first := n.pid(one)
	const units = "gpu.GPU-b"
	n.wanted.Publish([]mps.Group{group(one, gpu("a", 80, 2)),
		{Resource: units, GPUs: []mps.GPU{{UUID: "GPU-b", Replicas: 1}}, Unlimited: true}})
	n.until("a daemon of "+units, func() bool { return n.has(units + "/.started") })
	if shared, err := os.ReadFile(filepath.Join(locks, "shared")); err == nil {
		t.Fatalf("two daemons have one GPU: %s", shared)
	}
	n.until("another daemon of "+one, func() bool { return n.pid(one) != first && n.has(one+"/.started") })
	n.untilReady()
}
