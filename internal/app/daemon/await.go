package daemon

import (
	"context"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// MaxReadyWait is the longest wait in a call, which the control socket also limits.
const MaxReadyWait = 20 * time.Second

// ReadyArguments are the arguments of CallReady.
type ReadyArguments struct {
	// WaitMilliseconds is how long the answer may wait for the daemon to be ready.
	WaitMilliseconds int64 `json:"waitMilliseconds"`
}

// ready answers as soon as the daemon is ready, or after the wait.
func (d *daemon) ready(ctx context.Context, a ReadyArguments) (any, error) {
	return d.awaitReady(ctx, min(time.Duration(a.WaitMilliseconds)*time.Millisecond, MaxReadyWait), true), nil
}

// awaitReady waits up to wait for the daemon to be ready. Parameter probed is true if the
// kubelet asks.
func (d *daemon) awaitReady(ctx context.Context, wait time.Duration, probed bool) status.Readiness {
	if probed && d.kubelet.directory != nil {
		d.kubelet.directory.Probed()
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	for {
		answer, changed := d.report.readiness.Answer().Latest()
		if answer.Ready {
			return answer
		}
		select {
		case <-ctx.Done():
			return answer
		case <-late.C:
			return answer
		case <-changed:
		}
	}
}

// devicePlugins reads the device plugins of the node from the kubelet and its directory.
type devicePlugins struct {
	*kubelet.PodResources
	*kubelet.Directory
}

// Remembered implements Others.
func (d devicePlugins) Remembered() (map[string][]string, error) {
	saved, err := d.Checkpoint()
	return saved.Healthy, err
}
