package daemon

import (
	"context"
	"encoding/json"
	"reflect"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	// watchEvery is the interval of updates for changes without a feed: pending calls and
	// phases of servers.
	watchEvery = time.Second
	// watchGap is the shortest interval of two updates. One change often causes another at once.
	watchGap = 100 * time.Millisecond
)

func (d *daemon) streams() map[string]control.Stream {
	return map[string]control.Stream{
		CallStatusWatch: func(ctx context.Context, _ json.RawMessage,
			send func(any) error) error {
			return d.watch(ctx, send)
		},
		CallReset:         d.maintenance.reset,
		CallSimulateReset: d.gpus.simulateReset,
	}
}

// watch sends the status now, and again whenever it changes in more than the time of the
// last scan. It costs nothing while nobody watches. A slow client receives the newest
// status, but not every status.
func (d *daemon) watch(ctx context.Context, send func(any) error) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var last status.Status
	for {
		_, snapshotChanged := d.gpus.monitor.Snapshots().Latest()
		_, planChanged := d.kubelet.set.Offered().Latest()
		_, readinessChanged := d.report.readiness.Answer().Latest()
		_, configChanged := d.watcher.Configs().Latest()
		_, errorChanged := d.watcher.Errors().Latest()
		_, mpsChanged := d.kubelet.mps.Unready().Latest()
		_, kubeletsChanged := d.kubelet.kubelets.Latest()
		s, err := d.status(ctx)
		if err != nil {
			return err
		}
		now := s
		now.Looked = last.Looked // changes with each scan
		if !reflect.DeepEqual(now, last) {
			if err := send(s); err != nil {
				return err
			}
			last = s
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-snapshotChanged:
		case <-planChanged:
		case <-readinessChanged:
		case <-configChanged:
		case <-errorChanged:
		case <-mpsChanged:
		case <-kubeletsChanged:
		case <-tick.C:
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(watchGap):
		}
	}
}
