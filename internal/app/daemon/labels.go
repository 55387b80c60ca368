package daemon

import (
	"context"
	"maps"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/labels"
)

// Labels computes the labels of the node.
type Labels struct {
	Configs   *feed.Feed[config.Config]
	Snapshots *feed.Feed[inventory.Snapshot]
	// Make computes labels, such as labels.All.
	Make func(inventory.Snapshot, labels.Options) map[string]string
	// Machine returns the machine's name from a file, or labels.UnknownMachine.
	Machine func(file string) string
	Now     func() time.Time
	// InUse are the prepared claims, by the UUID of the GPU; nil until they are known.
	// Without the feed there are none.
	InUse *feed.Feed[map[string][]claims.Holder]
	// Run publishes the wanted labels of the node to Wanted. They are nil before the first
	// successful scan, and while links are still due after it. They stay unchanged while
	// scans fail: a missing driver says nothing about the node.
	Wanted *feed.Feed[map[string]string]
}

// Run computes labels for every Snapshot and Config until ctx ends, and then returns nil.
// The timestamp is the Config's.
func (l *Labels) Run(ctx context.Context) error {
	var o labels.Options
	for c, configChanged := l.Configs.Latest(); ; c, configChanged = l.Configs.Latest() {
		o.Resources, o.Machine, o.Timestamp = c.Resource, l.Machine(c.Features.MachineTypeFile), 0
		if c.Features.LabelsTimestamp {
			o.Timestamp = l.Now().Unix()
		}
		for same := true; same; {
			s, snapshotChanged := l.Snapshots.Latest()
			inUse, claimsChanged := l.inUse()
			// Without the label the control daemons end, and with them the work of claims
			// that were prepared before the mode changed.
			o.ClaimsByMPS = c.Edits.MPSRoot != "" && (c.DRA.Mode != config.DRAOff || len(inUse) > 0)
			if s.Generation > 0 && s.Stale == "" && inUse != nil && !(s.LinksDue && l.Wanted.Value() == nil) {
				if wanted := l.Make(s, o); !maps.Equal(wanted, l.Wanted.Value()) {
					l.Wanted.Publish(wanted)
				}
			}
			select {
			case <-ctx.Done():
				return nil
			case <-configChanged:
				same = false
			case <-snapshotChanged:
			case <-claimsChanged:
			}
		}
	}
}

func (l *Labels) inUse() (holders map[string][]claims.Holder, changed <-chan struct{}) {
	if l.InUse == nil {
		return map[string][]claims.Holder{}, nil
	}
	return l.InUse.Latest()
}
