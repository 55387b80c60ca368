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
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Told is which GPUs may be given to pods, as the process that leads tells its standbys, which
// serve kubelet, too. Make it with NewTold.
type Told struct {
	lead     *lead.Lead
	owners   *feed.Feed[dra.Owners]
	dividing *feed.Feed[map[string]resource.GPUHold]
	proofs   *feed.Feed[cudacheck.Records]
	resets   *feed.Feed[reset.Status]
	divides  bool

	deciders *feed.Feed[int] // how many tasks run that publish these feeds
	mu       sync.Mutex      // held while what was heard is published, and for changes of deciders
}

// NewTold returns what a process tells and hears. Who gives out each GPU is published to owners;
// holds on GPUs that are being divided anew to dividing, nil where nobody changes layouts; verdicts
// on CUDA to proofs. Standbys are told of resets as holds. Divides says that this process changes
// layouts.
func NewTold(
	l *lead.Lead, owners *feed.Feed[dra.Owners], dividing *feed.Feed[map[string]resource.GPUHold], proofs *feed.Feed[cudacheck.Records],
	resets *feed.Feed[reset.Status], divides bool,
) *Told {
	return &Told{lead: l, owners: owners, dividing: dividing, proofs: proofs, resets: resets, divides: divides,
		deciders: feed.New(0)}
}

// heldFor returns holds with those on GPUs that are being reset. Without other holds all GPUs have
// an entry, as the standby may give them.
func heldFor(s reset.Status, dividing map[string]resource.GPUHold, owners dra.Owners) map[string]resource.GPUHold {
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

// told is the form in which Told is sent.
type told struct {
	Owners   dra.Owners                  `json:"owners"`
	Dividing map[string]resource.GPUHold `json:"dividing"`
	Proofs   cudacheck.Records           `json:"proofs,omitempty"`
}

// Tell tells standbys what this process knows, while it leads. Owners that it heard before stay
// until it has decided itself.
func (t *Told) Tell(ctx context.Context) error {
	if !t.divides {
		t.dividing.Publish(nil)
	}
	for {
		dividing, divided := t.dividing.Latest()
		owners, decided := t.owners.Latest()
		proofs, proven := t.proofs.Latest()
		resets, begun := t.resets.Latest()
		if owners != nil {
			text, err := json.Marshal(told{owners, heldFor(resets, dividing, owners), proofs})
			if err != nil {
				return err
			}
			t.lead.Tell(text)
		}
		if feed.WaitAny(ctx, decided, divided, proven, begun); ctx.Err() != nil {
			return nil
		}
	}
}

// Follow takes over what the process that leads tells, while this one does not.
func (t *Told) Follow(ctx context.Context) error {
	for {
		_, elected := t.lead.Statuses().Latest()
		_, ended := t.deciders.Latest()
		text, said := t.lead.Heard().Latest()
		if text != nil {
			var now told
			if err := json.Unmarshal(text, &now); err != nil { // of a later version; what is known stays
				klog.FromContext(ctx).Error(err, "Cannot read what the process that leads tells")
			} else {
				t.take(now)
			}
		}
		if feed.WaitAny(ctx, elected, ended, said); ctx.Err() != nil {
			return nil
		}
	}
}

// take publishes what was told, unless this process leads, or a task that decides has not ended
// since this process led.
func (t *Told) take(now told) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lead.Statuses().Value().Leads || t.deciders.Value() > 0 {
		return
	}
	if !reflect.DeepEqual(t.dividing.Value(), now.Dividing) {
		t.dividing.Publish(now.Dividing)
	}
	if now.Proofs != nil && !reflect.DeepEqual(t.proofs.Value(), now.Proofs) {
		t.proofs.Publish(now.Proofs)
	}
	if before := t.owners.Value(); now.Owners != nil && (before == nil || !maps.Equal(before, now.Owners)) {
		t.owners.Publish(now.Owners)
	}
}

// Deciding returns a task under the lead that publishes what it decides. What was heard before is
// published when it begins, and what is heard later when it has ended, also where the lead was lost
// before that.
func (t *Told) Deciding(task Task) Task {
	run := task.Run
	task.Lead, task.Run = true, func(ctx context.Context) error {
		t.decides(1)
		defer t.decides(-1)
		return run(ctx)
	}
	return task
}

// decides counts a task that has begun, or one that has ended.
func (t *Told) decides(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deciders.Publish(t.deciders.Value() + n)
}

// mayDivide returns why no MIG layout may be made now; nil if one may. A standby serves kubelet by
// the devices that are there.
func (d *daemon) mayDivide() error {
	if err := d.lead.Check(); err != nil {
		return err
	}
	if d.lead.Statuses().Value().Standbys > 0 {
		return errors.New("another process of this program runs on the node, as in a roll-out")
	}
	return nil
}
