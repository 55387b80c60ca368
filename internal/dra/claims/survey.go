package claims

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// surveyRetry is the time until a query of a GPU without an answer is retried.
const surveyRetry = 10 * time.Second

// A survey is the result of a query of a GPU.
type survey struct {
	binding    uint64 // binding of the GPU at the time of the query
	state      string // MIG devices and settings at the time of the query
	found      dra.Divided
	unanswered bool // the query failed
}

// Divide keeps Divisions up to date until ctx ends, and then returns nil.
func (c *Claims) Divide(ctx context.Context) error {
	done, err := c.begin(ctx) // now the records are known
	if err != nil {
		return nil //nolint:nilerr // ctx has ended
	}
	done()
	surveys := map[string]survey{}
	for {
		snapshot, snapshotChanged := c.options.Snapshots.Latest()
		configured, changed := c.options.Configs.Latest()
		_, recordsChanged := c.inUse.Latest()
		var again <-chan time.Time
		if snapshot.Generation > 0 {
			if c.survey(ctx, snapshot, configured, surveys) {
				again = time.After(surveyRetry)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-snapshotChanged:
		case <-changed:
		case <-recordsChanged:
		case <-again:
		}
	}
}

// survey queries the GPUs whose layout has changed since the last query, and reports
// whether a query failed. The queries run concurrently, so that slow GPUs do not delay
// each other.
func (c *Claims) survey(ctx context.Context, s inventory.Snapshot, configured config.Config,
	surveys map[string]survey) (again bool) {
	divisions, due := dra.Divisions{}, map[string]survey{}
	for _, g := range s.GPUs {
		if g.MIG != inventory.MIGEnabled && !needsSurvey(g, configured.DRA) {
			delete(surveys, g.UUID)
			continue
		}
		own := c.dynamicMIG(g.UUID, c.all())
		if !configured.DRA.DynamicMIG {
			if delete(surveys, g.UUID); len(own) > 0 {
				divisions[g.UUID] = dra.Divided{Own: places(own), Fixed: dynamicMIGOff}
			}
			continue
		}
		state := fmt.Sprint(g.Binding, configured.DRA.SwitchMIG)
		for _, m := range g.MIGDevices {
			state += fmt.Sprintf(" %s/%d/%d", m.UUID, m.GI, m.CI)
		}
		before, known := surveys[g.UUID]
		if !known || before.state != state || before.unanswered || !reflect.DeepEqual(before.found.Own, places(own)) {
			due[g.UUID] = survey{binding: g.Binding, state: state, found: dra.Divided{Own: places(own)}}
		} else {
			divisions[g.UUID] = before.found
		}
	}
	for uuid, now := range c.queryAll(ctx, due) {
		before := surveys[uuid]
		switch {
		case now.unanswered && before.found.Profiles != nil:
			now.found = before.found
		case !now.unanswered && before.found.Switched && now.found.Switched && before.binding == now.binding:
			now.found.Profiles = before.found.Profiles // as reported in the other MIG mode
		}
		surveys[uuid], divisions[uuid] = now, now.found
		again = again || now.unanswered
	}
	if ctx.Err() == nil && (c.options.Divisions.Value() == nil ||
		!reflect.DeepEqual(divisions, c.options.Divisions.Value())) {
		c.options.Divisions.Publish(divisions)
	}
	return again
}

// queryAll queries all GPUs concurrently, and returns the surveys with the results.
func (c *Claims) queryAll(ctx context.Context, due map[string]survey) map[string]survey {
	var mu sync.Mutex // guards found
	var queries sync.WaitGroup
	found := maps.Clone(due)
	for uuid, s := range due {
		queries.Go(func() {
			division, err := c.query(ctx, uuid)
			if s.unanswered = err != nil; s.unanswered {
				s.found.Fixed = err.Error()
			} else {
				s.found = division
			}
			mu.Lock()
			defer mu.Unlock()
			found[uuid] = s
		})
	}
	queries.Wait()
	return found
}

// query returns how a GPU is divided. No MIG device is created or destroyed for a claim
// meanwhile.
func (c *Claims) query(ctx context.Context, uuid string) (dra.Divided, error) {
	ctx, cancel := context.WithTimeout(ctx, divideTimeout)
	defer cancel()
	locks := c.locks.begin()
	defer locks.end()
	if err := locks.gpus(ctx, []string{uuid}); err != nil {
		return dra.Divided{}, err
	}
	return c.division(ctx, uuid, c.dynamicMIG(uuid, c.all()))
}

// division returns how a GPU is divided, with the MIG devices of claims.
func (c *Claims) division(ctx context.Context, uuid string, own []recordMIG) (dra.Divided, error) {
	g, err := c.layoutOf(ctx, uuid)
	if err != nil {
		return dra.Divided{}, err
	}
	found := dra.Divided{Profiles: g.Profiles, Own: places(own)}
	switches := c.options.Configs.Value().DRA.SwitchMIG && g.Resetless
	switch {
	case len(g.Profiles) == 0:
		found.Fixed = "the driver does not report the possible MIG devices: the daemon needs CAP_SYS_ADMIN"
	case g.Mode != inventory.MIGEnabled && !switches:
		found.Fixed = "MIG mode is off, and switching it on needs a reset of the GPU"
	}
	for _, i := range g.Instances {
		if !slices.ContainsFunc(own, func(m recordMIG) bool { return m.isOwn(i) }) {
			found.Fixed = fmt.Sprintf("GPU instance %d (%s at memory slice %d) does not belong to a claim",
				i.ID, i.Profile,
				i.Start)
		}
	}
	found.Switched = switches && found.Fixed == ""
	return found, nil
}

// dynamicMIGOff is why no MIG devices are created for claims.
const dynamicMIGOff = "dra.dynamicMIG is off"

// Divisions returns how the GPUs in MIG mode are divided now. It writes nothing and takes
// no lock: a MIG device that a daemon creates or destroys meanwhile may count as another
// program's. Divisions needs only the Driver, the Configs and the folders, and works
// without Run.
func (c *Claims) Divisions(ctx context.Context, s inventory.Snapshot) (dra.Divisions, error) {
	records := map[string]record{}
	if c.options.StateDir != "" {
		var err error
		if records, err = c.store.all(); err != nil {
			return nil, err
		}
	}
	divisions := dra.Divisions{}
	for _, g := range s.GPUs {
		own := c.dynamicMIG(g.UUID, records)
		switch {
		case needsSurvey(g, c.options.Configs.Value().DRA):
			found, err := c.division(ctx, g.UUID, own)
			if err != nil {
				found = dra.Divided{Own: places(own), Fixed: err.Error()}
			}
			divisions[g.UUID] = found
		case g.MIG == inventory.MIGEnabled && len(own) > 0:
			divisions[g.UUID] = dra.Divided{Own: places(own), Fixed: dynamicMIGOff}
		}
	}
	return divisions, nil
}

// dynamicMIG returns the MIG devices of a GPU that exist or are planned for claims, sorted
// by place.
func (c *Claims) dynamicMIG(uuid string, records map[string]record) (all []recordMIG) {
	for _, r := range records {
		for _, at := range r.dynamicDevices()[uuid] {
			if !r.beforeRestart(c.options.BootID) && !r.Destroyed {
				all = append(all, *r.Devices[at].MIG)
			}
		}
	}
	order.Sort(all, func(a, b recordMIG) int { return a.Start - b.Start })
	return all
}

func places(own []recordMIG) (all []inventory.MIGPlacement) {
	for _, m := range own {
		all = append(all, m.placement())
	}
	return all
}
