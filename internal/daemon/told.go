package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"reflect"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// What the process that leads tells its standbys, which serve kubelet, too: which GPUs they may give to pods.
type told struct {
	// Owners say who gives out each GPU; nil in a process that does not know Dynamic Resource Allocation: then the device plugin does.
	Owners dra.Owners `json:"owners"`
	// Dividing are the holds on GPUs that are being divided anew; nil where layouts are not changed.
	Dividing map[string]resource.GPUHold `json:"dividing"`
}

// tell tells standbys what this process knows, while it leads. What it heard itself stays until it has decided.
func (d *daemon) tell(ctx context.Context) error {
	for {
		var now told
		var changed []<-chan struct{}
		known := true
		if d.dra != nil {
			owners, decided := d.dra.Owners.Latest()
			now.Owners, known = owners, owners != nil
			changed = append(changed, decided)
		}
		if d.mig != nil {
			holds, divided := d.mig.Holds().Latest()
			now.Dividing = holds
			changed = append(changed, divided)
		}
		if known {
			text, err := json.Marshal(now)
			if err != nil {
				return err
			}
			d.lead.Tell(text)
		}
		if feed.AnyOf(ctx, changed...); ctx.Err() != nil {
			return nil
		}
	}
}

// hear takes over what the process that leads tells, while this one does not.
func (d *daemon) hear(ctx context.Context) error {
	for {
		_, elected := d.lead.Statuses().Latest()
		text, said := d.lead.Heard().Latest()
		snapshot, looked := d.monitor.Snapshots().Latest()
		if text != nil {
			var now told
			if err := json.Unmarshal(text, &now); err != nil { // of a later version; what is known stays
				klog.FromContext(ctx).Error(err, "Cannot read what the process that leads tells")
			} else {
				d.follow(now, snapshot.GPUs)
			}
		}
		if feed.AnyOf(ctx, elected, said, looked); ctx.Err() != nil {
			return nil
		}
	}
}

// follow has the device plugin serve by what was told, unless this process leads.
func (d *daemon) follow(now told, gpus []inventory.GPU) {
	d.hearing.Lock()
	defer d.hearing.Unlock()
	if d.lead.Statuses().Value().Leads {
		return
	}
	if now.Owners == nil {
		now.Owners = dra.Owners{}
		for _, g := range gpus {
			now.Owners[g.UUID] = dra.OwnedByPlugin
		}
	}
	if now.Dividing == nil {
		now.Dividing = map[string]resource.GPUHold{}
		for _, g := range gpus {
			now.Dividing[g.UUID] = resource.GPUHold{}
		}
	}
	if d.dra != nil && !maps.Equal(d.dra.Owners.Value(), now.Owners) {
		d.dra.Owners.Publish(now.Owners)
	}
	if d.mig != nil && !reflect.DeepEqual(d.mig.Holds().Value(), now.Dividing) {
		d.mig.Holds().Publish(now.Dividing)
	}
}

// deciding returns a task under the lead that begins when what this process heard before is published, and is the only one to publish then.
func (d *daemon) deciding(t Task) Task {
	run := t.Run
	t.Lead, t.Run = true, func(ctx context.Context) error {
		d.hearing.Lock()
		d.hearing.Unlock() //nolint:staticcheck,gocritic // it is waited for
		return run(ctx)
	}
	return t
}

// mayDivide returns why no MIG layout is made now; nil if it may be. Another process that runs serves kubelet by the devices that are
// there.
func (d *daemon) mayDivide() error {
	if err := d.lead.Check(); err != nil {
		return err
	}
	if d.lead.Statuses().Value().Standbys > 0 {
		return errors.New("another process of this program runs on the node, as in a roll-out")
	}
	return nil
}

// mayHaveDivided returns which former process may still divide GPUs; nil if none may.
func (d *daemon) mayHaveDivided() error {
	if d.former.Does(FormerDivides) {
		return errors.New("one of version 0.1 runs")
	}
	return d.mayChangeHardware()
}
