package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/kubelet/scenario"
)

// anotherServer has a second daemon register for the same resource, beside the pod's, and end: told
// to, and killed. A kubelet before 1.37 keeps the endpoint of the one that registered last, and stops it
// then, whereas the stream of the pod's daemon stays open: it has to see for itself that it must
// register again.
func anotherServer(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const wanted = 5 * time.Second // before 1.37, for which the daemon may have to find out by itself
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		before := registrations(ctx, t, n)[gpu]
		end := watch(ctx, t, kubelet, gpu, signal.String())
		other := startAnother(ctx, t)
		start := time.Now()
		if err := other.Process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		_ = other.Wait() // A process that was killed is an error.
		if !isKubelet("1.37") {
			wait(ctx, t, func(ctx context.Context) error {
				if registrations(ctx, t, n)[gpu] == before {
					return errors.New("the daemon has not registered again")
				}
				return nil
			})
			t.Logf("%v: registered again within %v", signal, time.Since(start).Round(time.Millisecond))
		}
		waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		runPod(ctx, t, n, fmt.Sprintf("after-signal-%d", signal), gpu, 1)
		lowest, longest := end().below(gpus)
		switch {
		case longest > far*wanted:
			t.Errorf("%v: below %d for %v, want %v", signal, gpus, longest, wanted)
		case lowest < gpus && isKubelet("1.37"):
			t.Errorf("%v: the kubelet counted %d, want never below %d", signal, lowest, gpus)
		}
	}
}

// otherPlugin has another device plugin register for the same resource with a list of its own, as
// NVIDIA's does: it says what it has once, and again when that changes. Whichever registered last
// serves, with its list. Nobody can tell how long the other stays, so the daemon leaves it the
// resource until its socket is gone or refuses connections. It comes a second time under the same
// name, and is killed then.
func otherPlugin(ctx context.Context, t *testing.T, n *node.Node, kubelet podresources.PodResourcesListerClient) {
	const others = 3
	// more than the daemon needs to notice anything
	for round, stays := range []time.Duration{15 * time.Second, 5 * time.Second} {
		// A server that was killed a moment ago may not have been missed yet: when it is, the daemon
		// registers again, and is the last.
		pause(ctx, 5*time.Second)
		other, err := scenario.StartPlugin(pluginSockets, "nvidia-gpu.sock", gpu, scenario.Script{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(other.Stop)
		var devices []*v1beta1.Device
		for i := range others {
			devices = append(devices, &v1beta1.Device{ID: fmt.Sprintf("GPU-other-%d", i), Health: v1beta1.Healthy})
		}
		other.Send(devices...)
		if err := other.Register(ctx); err != nil {
			t.Fatal(err)
		}
		waitAllocatable(ctx, t, kubelet, gpu, others, promptly)
		end := watch(ctx, t, kubelet, gpu, "another plugin serves")
		pause(ctx, stays)
		pod := fmt.Sprintf("of-other-%d", round)
		runPod(ctx, t, n, pod, gpu, 1)
		if got := shell(ctx, t, n, pod, "echo $SERVED_BY"); strings.TrimSpace(got) != "nvidia-gpu.sock" {
			t.Errorf("the pod was served by %q, want the other plugin", got)
		}
		if seen := end(); len(seen.steps) != 1 || seen.steps[0].count != others {
			t.Errorf("while the other plugin serves, the kubelet counted %v, want %d throughout", seen, others)
		}

		if round == 0 {
			other.Stop()
		} else {
			other.Kill()
		}
		took := waitAllocatable(ctx, t, kubelet, gpu, gpus, promptly)
		t.Logf("the other plugin ended: all GPUs after %v", took.Round(time.Millisecond))
		pod = fmt.Sprintf("after-other-%d", round)
		runPod(ctx, t, n, pod, gpu, 1)
		if got := visibleDevices(ctx, t, n, pod); !strings.HasPrefix(got[0], "GPU-") {
			t.Errorf("the pod has %v, want a GPU of the daemon's", got)
		}
		for _, pod := range []string{fmt.Sprintf("of-other-%d", round), pod} { // the next plugin has no device for more
			deletePod(ctx, t, n, pod)
		}
	}
}

// startAnother starts a daemon that is in no container, and returns when it has registered.
func startAnother(ctx context.Context, t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(ctx, filepath.Join(*imageRoot, "plugin/usr/bin/gpu-device-plugin"),
		"--simulate=dgx-h100", "--control-socket=", "--state-dir=")
	log := &lockedBuffer{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatalf("start another daemon: %v", err)
	}
	wait(ctx, t, func(context.Context) error {
		if text := log.String(); !strings.Contains(text, `"Registered"`) {
			return fmt.Errorf("the other daemon has not registered: %s", text)
		}
		return nil
	})
	return cmd
}

// lockedBuffer is written by one goroutine and read by another.
type lockedBuffer struct {
	mu      sync.Mutex
	content bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.String()
}
