package offer

import (
	"context"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
)

// Specs are the CDI spec files, in which container runtimes look up the CDI names
// of devices, and the host's device nodes, which kubelet gives to containers.
type Specs interface {
	// Apply writes the missing files and creates the missing nodes of a plan. It
	// waits for the disk.
	Apply(inventory.Snapshot, resource.Plan, config.Config) error
	// Lacks returns holds on the devices of a plan whose names are in no file or whose nodes could
	// not be created. It does not wait for the disk, even while Apply runs.
	Lacks(inventory.Snapshot, resource.Plan, config.Config) []resource.Hold
}

// rewriteEvery is how often the unchanged files are checked, because another
// program may have removed them.
const rewriteEvery = 30 * time.Second

// A specRequest asks for the files of a plan.
type specRequest struct {
	number   uint64 // rises by one with every request that differs from the one before
	snapshot inventory.Snapshot
	plan     resource.Plan
	config   config.Config
}

// A specTask writes the files in its own goroutine, so that no change of health waits for the disk.
type specTask struct {
	specs     Specs
	requested *feed.Feed[specRequest]
	// tried is the number of the last attempted request, successful or not.
	tried *feed.Feed[uint64]
	// inForce is the configuration by which containers get devices; nil before the first plan.
	inForce *config.Config
}

func newSpecTask(s Specs) *specTask {
	return &specTask{specs: s, requested: feed.New(specRequest{}), tried: feed.New(uint64(0))}
}

// prepare requests the files of a plan. It returns holds on the devices whose names are in no file,
// and the configuration by which containers get the other devices now. While new files are missing,
// this is the previous configuration. The same holds if the new files cannot be written, so that no
// device could be offered; then problem has the reason.
func (t *specTask) prepare(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) (
	holds []resource.Hold, way config.Config, problem string,
) {
	if needsFiles(c) {
		t.request(specRequest{snapshot: snapshot, plan: plan, config: c})
		if t.inForce != nil && !reflect.DeepEqual(t.inForce.Edits, c.Edits) {
			waits := t.tried.Value() != t.requested.Value().number
			if !waits {
				problem = t.withdraws(snapshot, plan, c)
			}
			if waits || problem != "" {
				c = *t.inForce
			}
		}
	}
	t.inForce = &c
	return t.lacks(snapshot, plan, c), c, problem
}

// needsFiles reports whether a configuration needs CDI specs or device nodes.
func needsFiles(c config.Config) bool { return c.Edits.UsesCDI() || c.Edits.GivesNodes() }

// lacks returns holds on the devices whose files are missing.
func (t *specTask) lacks(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) []resource.Hold {
	if !needsFiles(c) {
		return nil
	}
	return t.specs.Lacks(snapshot, plan, c)
}

// withdraws returns why a configuration removes all devices offered by the
// configuration in force; empty if it does not.
func (t *specTask) withdraws(snapshot inventory.Snapshot, plan resource.Plan, c config.Config) string {
	holds := t.lacks(snapshot, plan, c)
	if len(holds) == 0 || len(plan.Under(holds).Resources) > 0 ||
		len(plan.Under(t.lacks(snapshot, plan, *t.inForce)).Resources) == 0 {
		return ""
	}
	return holds[0].Reason
}

// request requests files, unless the last request was the same.
func (t *specTask) request(r specRequest) {
	last := t.requested.Value()
	if r.snapshot.Equal(last.snapshot) && r.plan.Equal(last.plan) && reflect.DeepEqual(r.config, last.config) {
		return
	}
	r.number = last.number + 1
	t.requested.Publish(r)
}

// run writes files until ctx ends.
func (t *specTask) run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	again := time.NewTicker(rewriteEvery)
	defer again.Stop()
	failing := ""
	for {
		r, changed := t.requested.Latest()
		if r.number > 0 {
			err := t.specs.Apply(r.snapshot, r.plan, r.config)
			switch {
			case err == nil && failing != "":
				log.Info("CDI specs and device nodes are complete again")
				failing = ""
			case err != nil && err.Error() != failing:
				log.Error(err, "Cannot make all CDI specs and device nodes; devices without them are not offered")
				failing = err.Error()
			}
			t.tried.Publish(r.number)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again.C:
		}
	}
}
