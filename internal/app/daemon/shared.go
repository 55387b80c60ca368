package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"reflect"
	"sync"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/cudacheck"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reset"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Shared is the state of the GPUs, published by the leader to its standbys. The standbys
// also serve the kubelet. Create it with NewShared.
type Shared struct {
	lead           *lead.Lead
	owners         *feed.Feed[dra.Owners]
	dividing       *feed.Feed[map[string]resource.GPUHold]
	proofs         *feed.Feed[cudacheck.Records]
	resets         *feed.Feed[reset.Status]
	driver         *feed.Feed[driverchange.Status]
	changesLayouts bool

	publishers *feed.Feed[int] // number of running tasks that publish these feeds
	mu         sync.Mutex      // held while a received state is published, and for changes of publishers
}

// NewShared returns the state shared by the processes of a node. The owner of each GPU is published
// to owners, the results of CUDA checks to proofs, the change of the driver to driver, and holds on
// GPUs with a changing MIG layout to dividing; nil if no process changes layouts. Standbys receive
// resets as holds. changesLayouts is true if this process changes layouts.
func NewShared(
	l *lead.Lead, owners *feed.Feed[dra.Owners], dividing *feed.Feed[map[string]resource.GPUHold],
	proofs *feed.Feed[cudacheck.Records],
	resets *feed.Feed[reset.Status], driver *feed.Feed[driverchange.Status], changesLayouts bool,
) *Shared {
	return &Shared{lead: l, owners: owners, dividing: dividing, proofs: proofs, resets: resets,
		driver:         driver,
		changesLayouts: changesLayouts,
		publishers:     feed.New(0)}
}

// withHolds returns the holds, including the holds on GPUs being reset. Without other holds, every
// GPU gets an entry, so that the standby may allocate the remaining GPUs.
func withHolds(s reset.Status, dividing map[string]resource.GPUHold, owners dra.Owners) map[string]resource.GPUHold {
	if !s.Withholds() {
		return dividing
	}
	holds := maps.Clone(dividing)
	if holds == nil {
		holds = map[string]resource.GPUHold{}
		for uuid := range owners {
			holds[uuid] = resource.GPUHold{}
		}
	}
	for _, uuid := range s.GPUs {
		holds[uuid] = resource.GPUHold{Reason: "it is being reset"}
	}
	return holds
}

// sharedState is the JSON form of Shared.
type sharedState struct {
	Owners   dra.Owners                  `json:"owners"`
	Dividing map[string]resource.GPUHold `json:"dividing"`
	Proofs   cudacheck.Records           `json:"proofs,omitempty"`
	Driver   driverchange.Status         `json:"driver"`
}

// Publish sends the state of this process to the standbys while this process leads. Owners
// received from an earlier leader stay valid until this process has decided itself.
func (t *Shared) Publish(ctx context.Context) error {
	if !t.changesLayouts {
		t.dividing.Publish(nil)
	}
	for {
		divisions, divisionsChanged := t.dividing.Latest()
		owners, ownersChanged := t.owners.Latest()
		proofs, proofsChanged := t.proofs.Latest()
		resets, resetsChanged := t.resets.Latest()
		driver, driverChanged := t.driver.Latest()
		if owners != nil {
			holds := withHolds(resets, divisions, owners)
			text, err := json.Marshal(sharedState{owners, holds, proofs, driver})
			if err != nil {
				return err
			}
			t.lead.Publish(text)
		}
		feed.WaitAny(ctx, ownersChanged, divisionsChanged, proofsChanged, resetsChanged, driverChanged)
		if ctx.Err() != nil {
			return nil
		}
	}
}

// Follow applies the state received from the leader while this process is a standby.
func (t *Shared) Follow(ctx context.Context) error {
	for {
		_, leadChanged := t.lead.Statuses().Latest()
		_, publishersChanged := t.publishers.Latest()
		text, textChanged := t.lead.Received().Latest()
		if text != nil {
			var now sharedState
			if err := json.Unmarshal(text, &now); err != nil { // sent by a later version; the current state is kept
				klog.FromContext(ctx).Error(err, "Cannot read the state sent by the leading process")
			} else {
				t.accept(now)
			}
		}
		if feed.WaitAny(ctx, leadChanged, publishersChanged, textChanged); ctx.Err() != nil {
			return nil
		}
	}
}

// accept publishes a received state, unless this process leads, or a publisher of an
// earlier tenure is still running.
func (t *Shared) accept(now sharedState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lead.Statuses().Value().Leads || t.publishers.Value() > 0 {
		return
	}
	if !reflect.DeepEqual(t.dividing.Value(), now.Dividing) {
		t.dividing.Publish(now.Dividing)
	}
	if now.Proofs != nil && !reflect.DeepEqual(t.proofs.Value(), now.Proofs) {
		t.proofs.Publish(now.Proofs)
	}
	if !t.driver.Value().Equal(now.Driver) {
		t.driver.Publish(now.Driver)
	}
	if before := t.owners.Value(); now.Owners != nil && (before == nil || !maps.Equal(before, now.Owners)) {
		t.owners.Publish(now.Owners)
	}
}

// Publisher returns a task that runs under the lead and publishes its own decisions.
// Before the start and after the end of the task, the received state is published, even if
// the lead is lost before.
func (t *Shared) Publisher(task Task) Task {
	run := task.Run
	task.Lead, task.Run = true, func(ctx context.Context) error {
		t.countPublishers(1)
		defer t.countPublishers(-1)
		return run(ctx)
	}
	return task
}

// countPublishers adds n to the number of running publishers.
func (t *Shared) countPublishers(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.publishers.Publish(t.publishers.Value() + n)
}

// mayDivide returns an error if MIG layouts must not change now. A standby serves the
// kubelet with the devices that exist.
func (w *leadership) mayDivide() error {
	if err := w.lead.Check(); err != nil {
		return err
	}
	if w.lead.Statuses().Value().Standbys > 0 {
		return errors.New("another process of this program is running on the node, as in a roll-out")
	}
	return nil
}
