package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/keeper"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/pool"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// slicePace is the shortest time between changes of slices that can wait. Deterioration is written
	// at once.
	slicePace = time.Second
	// nodePoll is how often a missing Node is checked again.
	nodePoll = 5 * time.Second
	// maxSliceAttempts limits the attempts to write if another program changes the slices first.
	maxSliceAttempts = 4
	// After maxForeignWrites changes by another program within foreignWriteWindow, the publisher stops
	// writing for foreignWriteWindow.
	maxForeignWrites   = 3
	foreignWriteWindow = 10 * time.Minute
)

// A sliceLedger is the state of a publisher between writes.
type sliceLedger struct {
	// listed are the slices of the last list without the watch, at listedAt.
	listed   kubeapi.Slices
	listedAt time.Time
	// ownWrites are the results of this process's writes, by the name of the slice. The watch may not
	// show them yet.
	ownWrites map[string]ownSlice
	// stored are slices that the API server stored differently from the request, by name.
	stored map[string]storedSlice
	droppedParts
	// generation is the last written generation of the pool.
	generation int64
	writtenAt  time.Time
	recreation
	// attempted are the last slices sent by this process, by name. They may exist even if the response
	// was an error or did not arrive.
	attempted map[string]dra.PublishedSlice
	// checkedVersions are the versions of the slices already checked for foreign writes, by name.
	checkedVersions map[string]string
	// foreignWrites are the times of changes by other programs. Until idleUntil the publisher does not
	// write.
	foreignWrites []time.Time
	idleUntil     time.Time
}

// droppedParts are the parts of slices that the API server does not store.
type droppedParts struct {
	dropped dra.Dropped
	// taintsChecked says that dropped.Taints is known from a response of the API server.
	taintsChecked bool
	// checkedAt is when the last dropped part was found or checked.
	checkedAt time.Time
}

// recreation paces the creation of slices that another program removes.
type recreation struct {
	// recreatedAt is when slices were last created again, after recreateDelay.
	recreatedAt   time.Time
	recreateDelay time.Duration
	// delayRegistrations is the number of registrations to which recreateDelay refers.
	delayRegistrations int
}

type ownSlice struct {
	kubeapi.Slice
	removed   bool
	writtenAt time.Time
}

func newSliceLedger() sliceLedger {
	return sliceLedger{
		ownWrites: map[string]ownSlice{}, stored: map[string]storedSlice{}, attempted: map[string]dra.PublishedSlice{},
		checkedVersions: map[string]string{},
	}
}

// A notNowError says why due writes are postponed.
type notNowError struct{ reason string }

func (e *notNowError) Error() string { return e.reason }

// reportProblem publishes why the slices are not as wanted. It returns err if a retry may help.
func (p *publisher) reportProblem(err error) error {
	publication := p.devices.Publication().Value()
	if publication.Problem = ""; err != nil {
		publication.Problem = err.Error()
	}
	if publication != p.devices.Publication().Value() {
		p.devices.Publication().Publish(publication)
	}
	var notNow *notNowError
	if errors.As(err, &notNow) {
		return nil
	}
	return err
}

// errLinksDue postpones the first slices until the links between GPUs are known, which saves a
// second write.
var errLinksDue = &notNowError{"the driver is slow: the links between GPUs are not known yet"}

// publish makes all due writes.
func (p *publisher) publish(ctx context.Context) error {
	r := &round{publisher: p, created: map[string]bool{}}
	for {
		if done, err := r.step(ctx); done || err != nil {
			return err
		}
	}
}

// A round is the sequence of writes that are due at one time.
type round struct {
	*publisher
	writing   bool            // a write was made; the remaining writes of the round do not wait
	refreshed bool            // the slices were listed without the watch
	owner     string          // UID of the Node; empty until needed
	created   map[string]bool // slices created in this round, by name
	attempts  int             // number of writes that failed because another program was faster
}

// step makes the next write, or lists the slices. It reports whether nothing is left to do now.
func (r *round) step(ctx context.Context) (done bool, err error) {
	view, known := r.view()
	if !known {
		if err := r.problem.Value(); err != nil {
			return true, &notNowError{err.Error()} // the watch restarts by itself
		}
		return true, nil
	}
	pool, published, err := r.state(view)
	switch {
	case err != nil:
		return true, err
	case pool.Name == "" && r.refreshed: // no write before the existing slices are known
		return true, r.devices.SetPublished(ctx, gpusOf(published))
	case pool.Name == "":
		r.refreshed = true
		return false, r.refresh(ctx)
	case pool.LinksDue && r.ledger.generation == 0: // the slices of an earlier process have the links
		return true, errLinksDue
	}
	if err := r.detectOtherWriter(ctx, pool, published, view); err != nil {
		return true, err
	}
	if step, more := dra.Next(pool, published, r.ledger.generation, r.isStored); more {
		return r.advance(ctx, step, pool, view, published)
	}
	if !r.isConfirmed(published, r.refreshed) {
		r.refreshed = true
		return false, r.refresh(ctx)
	}
	if r.storesMore(ctx) {
		return false, nil
	}
	return true, r.record(ctx, published)
}

// advance makes a write if it is due.
func (r *round) advance(
	ctx context.Context, step dra.Write, pool dra.Pool, view map[string]kubeapi.Slice,
	published map[string]dra.PublishedSlice,
) (done bool, err error) {
	l := &r.ledger
	// the slice was removed at once, possibly because its owner is gone: pause before the next attempt
	if step.New && r.created[step.Name] {
		r.writing, r.owner = false, ""
		clear(r.created)
	}
	if delay := r.delay(step, published); delay > 0 && !r.writing {
		r.alarm.After(ctx, delay)
		return true, nil
	}
	if step.New && !r.writing {
		l.recreatedAt, l.recreateDelay = time.Now(), min(max(2*l.recreateDelay, keeper.MinPace), keeper.MaxPace)
	}
	r.writing = true
	if step.New && r.owner == "" {
		if r.owner, err = r.findOwner(ctx); err != nil {
			return true, err
		}
		if r.owner == "" {
			r.alarm.After(ctx, nodePoll)
			return true, &notNowError{fmt.Sprintf("the API server has no Node %s", step.Published.Pool)}
		}
	}
	if !l.taintsChecked && step.Published.Slice.ShowsTainted(published[step.Name].Slice) {
		return false, r.checkTaints(ctx, pool)
	}
	r.created[step.Name] = step.New
	err = r.write(ctx, step, view, published, r.owner)
	if kubeapi.IsStale(err) {
		if r.attempts++; r.attempts < maxSliceAttempts {
			err = r.refresh(ctx)
		}
	}
	return err != nil, err
}

// findOwner returns the UID of the Node; empty if the API server does not have it. It asks the API
// server if nothing watches the Node, and if existing slices are gone: slices are deleted with
// their Node, and the watch may not show this yet.
func (p *publisher) findOwner(ctx context.Context) (string, error) {
	if node := p.client.Nodes().Value(); node.UID != "" && p.ledger.generation == 0 {
		return node.UID, nil
	}
	node, err := p.client.Get(ctx)
	return node.UID, err
}

// view returns the slices of the node: the slices of the watch, updated by newer results of this
// process.
func (p *publisher) view() (map[string]kubeapi.Slice, bool) {
	l, now := &p.ledger, time.Now()
	observed := p.observed.Value()
	if l.listed.ResourceVersion != "" && now.Sub(l.listedAt) < keeper.OwnWriteTTL &&
		(observed.ResourceVersion == "" || observed.IsBefore(l.listed.ResourceVersion)) {
		observed = l.listed
	} else { // a list from before the restart of the watch would be outdated
		l.listed = kubeapi.Slices{}
	}
	if observed.ResourceVersion == "" {
		return nil, false
	}
	view := maps.Clone(observed.ByName)
	for name, own := range l.ownWrites {
		actual, exists := view[name]
		switch {
		case now.Sub(own.writtenAt) < keeper.OwnWriteTTL && own.removed && exists && actual.UID == own.UID:
			delete(view, name)
		case now.Sub(own.writtenAt) < keeper.OwnWriteTTL && !own.removed && observed.IsBefore(own.ResourceVersion):
			view[name] = own.Slice
		default:
			delete(l.ownWrites, name)
		}
	}
	return view, true
}

// state returns the wanted pool, and the existing slices.
func (p *publisher) state(view map[string]kubeapi.Slice) (dra.Pool, map[string]dra.PublishedSlice, error) {
	pool, published := p.devices.Pools().Value(), map[string]dra.PublishedSlice{}
	if p.driver.Value().CompetingDriver != "" {
		pool = pool.Withheld()
	}
	pool = pool.Without(p.ledger.dropped)
	for name, s := range view {
		slice, err := content(s)
		if err != nil {
			return dra.Pool{}, nil, err
		}
		published[name] = dra.PublishedSlice{Pool: s.Pool, Generation: s.Generation, Count: s.Count, Slice: slice}
	}
	return pool, published, nil
}

// content decodes the devices and counters of a slice.
func content(s kubeapi.Slice) (dra.Slice, error) {
	slice := dra.Slice{}
	if len(s.Devices) > 0 {
		if err := json.Unmarshal(s.Devices, &slice.Devices); err != nil {
			return slice, fmt.Errorf("read the devices of ResourceSlice %s: %w", s.Name, err)
		}
	}
	if len(s.Counters) > 0 {
		if err := json.Unmarshal(s.Counters, &slice.SharedCounters); err != nil {
			return slice, fmt.Errorf("read the counters of ResourceSlice %s: %w", s.Name, err)
		}
	}
	return slice, nil
}

// isStored reports whether the API server stores desired as actual.
func (p *publisher) isStored(name string, desired, actual dra.Slice) bool {
	stored, exists := p.ledger.stored[name]
	return desired.Timed(actual).Equal(actual) || exists && stored.sent.Equal(desired) && stored.stored.Equal(actual)
}

// detectOtherWriter counts changes by other programs. It returns an error if the publisher must not
// write for now.
func (p *publisher) detectOtherWriter(ctx context.Context, pool dra.Pool, published map[string]dra.PublishedSlice,
	view map[string]kubeapi.Slice) error {
	l, now := &p.ledger, time.Now()
	own := map[string]dra.Slice{}
	for i, slice := range pool.Slices {
		own[pool.SliceName(i)] = slice
	}
	first := len(l.checkedVersions) == 0
	maps.DeleteFunc(l.checkedVersions, func(name, _ string) bool { return view[name].Name == "" })
	for name, s := range view {
		before, known := l.checkedVersions[name]
		if actual := (kubeapi.Slices{ResourceVersion: s.ResourceVersion}); before == s.ResourceVersion ||
			actual.IsBefore(before) {
			continue // already checked, or from an API server that lags behind
		}
		l.checkedVersions[name] = s.ResourceVersion
		actual, attempted := published[name], l.attempted[name]
		desired, isOwn := own[name]
		switch {
		case first, known && !isOwn: // the slice is being removed
		// written by this process
		case actual.Generation == attempted.Generation && actual.Count == attempted.Count &&
			p.isStored(name, attempted.Slice, actual.Slice):
		case isOwn && actual.Generation == l.generation && p.isStored(name, desired,
			actual.Slice): // no relevant change
		default:
			l.foreignWrites = append(l.foreignWrites, now)
			klog.FromContext(ctx).Info("Another program changed a ResourceSlice of this driver", "name", name)
		}
	}
	l.foreignWrites = slices.DeleteFunc(l.foreignWrites,
		func(at time.Time) bool { return now.Sub(at) >= foreignWriteWindow })
	if len(l.foreignWrites) >= maxForeignWrites {
		l.foreignWrites, l.idleUntil = nil, now.Add(foreignWriteWindow)
		klog.FromContext(ctx).Error(errOtherPublisher,
			"Not writing ResourceSlices, because another program writes them",
			"for", foreignWriteWindow.String())
		p.alarm.After(ctx, foreignWriteWindow)
	}
	if now.Before(l.idleUntil) {
		return errOtherPublisher
	}
	return nil
}

// errOtherPublisher is the problem of slices that another program changes repeatedly.
var errOtherPublisher = &notNowError{
	"another program changes the ResourceSlices of this driver on this node: " +
		"remove that program, or disable claims in this one",
}

// delay returns how long a write must wait.
func (p *publisher) delay(step dra.Write, published map[string]dra.PublishedSlice) time.Duration {
	l, now := &p.ledger, time.Now()
	switch {
	case step.New && l.generation > 0: // another program has removed the slice
		// a starting kubelet removes the slices
		if n := p.driver.Value().Registrations; n != l.delayRegistrations ||
			now.Sub(l.recreatedAt) >= l.recreateDelay+keeper.QuietTime {
			l.delayRegistrations, l.recreateDelay = n, 0
		}
		return l.recreatedAt.Add(l.recreateDelay).Sub(now)
	case step.New, step.Remove, published[step.Name].Slice.Worse(step.Published.Slice):
		return 0
	}
	return l.writtenAt.Add(slicePace).Sub(now)
}

// write makes one write. owner is the UID of the Node that owns a new slice.
func (p *publisher) write(
	ctx context.Context, step dra.Write, view map[string]kubeapi.Slice, existing map[string]dra.PublishedSlice,
	owner string,
) error {
	l, now := &p.ledger, time.Now()
	if step.Remove {
		old := view[step.Name]
		if err := p.client.DeleteSlice(ctx, step.Name, old.UID); err != nil {
			return err
		}
		l.ownWrites[step.Name] = ownSlice{Slice: old, removed: true, writtenAt: now}
		return nil
	}
	if published := p.devices.Published().Value(); published != nil { // nil means that all GPUs may be published
		published = maps.Clone(published)
		maps.Copy(published, step.Published.Slice.GPUs())
		if err := p.devices.SetPublished(ctx, published); err != nil {
			return err
		}
	}
	sent := step.Published.Slice
	s := view[step.Name]
	s.Name, s.Driver, s.Pool = step.Name, p.devices.Driver(), step.Published.Pool
	s.Generation, s.Count = step.Published.Generation, step.Published.Count
	if err := fill(&s, sent.Timed(existing[step.Name].Slice)); err != nil {
		return err
	}
	l.attempted[step.Name] = step.Published
	var err error
	if step.New {
		s.Owners = []kubeapi.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: step.Published.Pool, UID: owner,
			Controller: true}}
		s, err = p.client.CreateSlice(ctx, s)
	} else {
		s, err = p.client.UpdateSlice(ctx, s)
	}
	if kubeapi.IsContentRejected(err) && sent.Counted() {
		l.dropped.Counters, l.checkedAt = true, now
		klog.FromContext(ctx).Error(err,
			"The API server rejects counters; MIG devices created for claims are not published in slices")
		return nil
	}
	if err != nil {
		return err
	}
	l.ownWrites[step.Name] = ownSlice{Slice: s, writtenAt: now}
	l.generation, l.writtenAt = step.Published.Generation, now
	klog.FromContext(ctx).V(2).Info("Wrote a slice", "name", step.Name, "devices", len(sent.Devices), "generation",
		l.generation)
	return p.checkStored(ctx, step.Name, sent, s)
}

// refresh lists the latest slices.
func (p *publisher) refresh(ctx context.Context) error {
	listed, err := p.client.Slices(ctx, p.devices.Driver())
	if err != nil {
		return err
	}
	p.ledger.listed, p.ledger.listedAt = listed, time.Now()
	clear(p.ledger.ownWrites)
	return nil
}

// isConfirmed reports whether the existing slices are certain. Only a list without the cache proves
// that a GPU is no longer published.
func (p *publisher) isConfirmed(existing map[string]dra.PublishedSlice, refreshed bool) bool {
	published := p.devices.Published().Value()
	if refreshed {
		return true
	}
	if published == nil {
		return false
	}
	gpus := gpusOf(existing)
	for uuid := range published {
		if !gpus[uuid] {
			return false
		}
	}
	return true
}

// record publishes the state of the slices after all writes.
func (p *publisher) record(ctx context.Context, published map[string]dra.PublishedSlice) error {
	wanted := p.devices.Pools().Value().Slices
	publication := pool.Publication{
		Slices: len(published), API: p.client.ResourceVersion(),
		NoTaints:   p.ledger.dropped.Taints,
		NoCounters: p.ledger.dropped.Counters && slices.ContainsFunc(wanted, dra.Slice.Counted),
		NoShares:   p.ledger.dropped.Shares && slices.ContainsFunc(wanted, dra.Slice.Shared),
	}
	for _, s := range published {
		publication.Devices += len(s.Slice.Devices)
		publication.Generation = max(publication.Generation, s.Generation)
	}
	p.ledger.generation = max(p.ledger.generation, publication.Generation)
	if p.devices.Publication().Value() != publication {
		p.devices.Publication().Publish(publication)
	}
	return p.devices.SetPublished(ctx, gpusOf(published))
}

func gpusOf(published map[string]dra.PublishedSlice) map[string]bool {
	gpus := map[string]bool{}
	for _, s := range published {
		maps.Copy(gpus, s.Slice.GPUs())
	}
	return gpus
}
