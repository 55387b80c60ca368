package daemon

import (
	"context"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

// MaxReadyWait is the longest wait of one question, which the control socket bounds, too.
const MaxReadyWait = 20 * time.Second

// ReadyArguments are those of CallReady.
type ReadyArguments struct {
	// WaitMilliseconds is how long the answer may wait for the daemon to be ready.
	WaitMilliseconds int64 `json:"waitMilliseconds"`
}

// ready answers at once if the daemon is ready, and otherwise when it is, or has not become so.
func (d *daemon) ready(ctx context.Context, a ReadyArguments) (any, error) {
	return d.awaitReady(ctx, min(time.Duration(a.WaitMilliseconds)*time.Millisecond, MaxReadyWait), true), nil
}

// awaitReady waits at most that long until the daemon is ready; probed says that kubelet asks.
func (d *daemon) awaitReady(ctx context.Context, wait time.Duration, probed bool) status.Readiness {
	if probed && d.directory != nil {
		d.directory.Probed()
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	for {
		answer, changed := d.readiness.Answer().Latest()
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

// devicePlugins reads from kubelet and its directory which device plugins the node has.
type devicePlugins struct {
	*kubelet.PodResources
	*kubelet.Directory
}

// Remembered implements Others.
func (d devicePlugins) Remembered() (map[string][]string, error) {
	saved, err := d.Checkpoint()
	return saved.Healthy, err
}
