package agent

import (
	"context"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/resource"
)

// Specs are the files in which container runtimes look up the CDI names that containers are given.
type Specs interface {
	// Apply makes the files say what a plan promises, as far as they do not yet. It may take as long as the disk does.
	Apply(inventory.Snapshot, resource.Plan, config.Config) error
	// Lacks returns the devices of a plan, by UUID, whose names are in no file, each with the reason. It answers at once,
	// and while Apply runs, too.
	Lacks(inventory.Snapshot, resource.Plan, config.Config) map[string]string
}

// rewriteEvery is how often the files are looked at without a reason: somebody may have removed them.
const rewriteEvery = 30 * time.Second

// A promise is what the files are to say.
type promise struct {
	number   uint64 // rises by one with every promise that differs from the one before
	snapshot inventory.Snapshot
	plan     resource.Plan
	config   config.Config
}

// keeper keeps promises: it writes the files behind the plan's back, so that no news waits for the disk.
type keeper struct {
	specs Specs
	made  *feed.Feed[promise]
	// tried is the number of the last promise that was kept, or could not be.
	tried *feed.Feed[uint64]
	// inForce is the configuration by which containers were last given devices; nil before.
	inForce *config.Config
}

func newKeeper(s Specs) *keeper {
	return &keeper{specs: s, made: feed.New(promise{}), tried: feed.New(uint64(0))}
}

// offer returns what of a plan can be given to containers now, and the configuration by which. Devices whose names are new
// wait for their files; so does another way of giving those that are served already.
func (k *keeper) offer(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) (resource.Plan, config.Config) {
	if c.Edits.UsesCDI() {
		k.promise(promise{snapshot: snapshot, plan: plan, config: c})
		waiting := k.tried.Value() != k.made.Value().number
		if waiting && k.inForce != nil && !reflect.DeepEqual(k.inForce.Edits, c.Edits) {
			c = *k.inForce
		}
	}
	k.inForce = &c
	if !c.Edits.UsesCDI() {
		return plan, c
	}
	return plan.Without(k.specs.Lacks(snapshot, plan, c)), c
}

// promise has the files say something else, if it is not what they are to say already.
func (k *keeper) promise(p promise) {
	last := k.made.Value()
	if last.number > 0 && p.snapshot.Equal(last.snapshot) && p.plan.Equal(last.plan) && reflect.DeepEqual(p.config, last.config) {
		return
	}
	p.number = last.number + 1
	k.made.Publish(p)
}

// run writes files until ctx ends.
func (k *keeper) run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	again := time.NewTicker(rewriteEvery)
	defer again.Stop()
	failing := ""
	for {
		p, changed := k.made.Latest()
		if p.number > 0 {
			err := k.specs.Apply(p.snapshot, p.plan, p.config)
			switch {
			case err == nil && failing != "":
				log.Info("CDI specs are written again")
				failing = ""
			case err != nil && err.Error() != failing:
				log.Error(err, "Devices that containers cannot be given by CDI are not offered")
				failing = err.Error()
			}
			k.tried.Publish(p.number)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again.C:
		}
	}
}
