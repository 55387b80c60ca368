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

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/handover"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

const (
	// slicePace is the shortest time between changes of slices that can wait. Bad news cannot.
	slicePace = time.Second
	// nodePoll is how often it is looked whether the API server has the Node.
	nodePoll = 5 * time.Second
	// sliceTries is how often a write is made anew because another program was faster.
	sliceTries = 4
	// After this many changes by another program within strikeWindow, slices are left alone for that
	// time.
	maxStrikes   = 3
	strikeWindow = 10 * time.Minute
)

// A sliceLedger is what a publisher knows of its writes.
type sliceLedger struct {
	// listed is what was read last without the watch, at a time.
	listed kubeapi.Slices
	at     time.Time
	// own are slices by name as this process left them. The watch may not have seen that yet.
	own map[string]ownSlice
	// kept is what the API server made of slices by name, where that is not what it was sent.
	kept map[string]keptSlice
	// noTaints says that the API server does not keep the taints of devices, noCounters that it keeps
	// no counters, and noShares that it knows no devices that several claims can have.
	noTaints, noCounters, noShares bool
	// asked is when it was last seen, or asked, what the API server does not keep.
	asked time.Time
	// generation is the pool's, as it was written last.
	generation int64
	written    time.Time
	// restored is when slices were last made anew that another program removed, and pace how long that
	// waited.
	restored time.Time
	pace     time.Duration
	// paced is the number of registrations for which pace counts.
	paced int
	// tried is what this process sent last, by name. It may be there although the answer said
	// otherwise, or did not come.
	tried map[string]dra.PublishedSlice
	// seen are the versions of slices that were judged, by name.
	seen map[string]string
	// struck is when other programs changed slices; until leave, slices are left to them.
	struck []time.Time
	leave  time.Time
}

type ownSlice struct {
	kubeapi.Slice
	removed bool
	at      time.Time
}

func newSliceLedger() sliceLedger {
	return sliceLedger{
		own: map[string]ownSlice{}, kept: map[string]keptSlice{}, tried: map[string]dra.PublishedSlice{}, seen: map[string]string{},
	}
}

// errNotNow is why nothing is written for a time, although something is due.
type errNotNow struct{ reason string }

func (e *errNotNow) Error() string { return e.reason }

// tell tells why the API server does not have what it is to have. It returns err, if trying again
// may help.
func (p *publisher) tell(err error) error {
	now := p.devices.Publication().Value()
	if now.Problem = ""; err != nil {
		now.Problem = err.Error()
	}
	if now != p.devices.Publication().Value() {
		p.devices.Publication().Publish(now)
	}
	var notNow *errNotNow
	if errors.As(err, &notNow) {
		return nil
	}
	return err
}

// errLinksDue is the problem of the first slices while GPUs are asked for their links: a second
// write would follow.
var errLinksDue = &errNotNow{"the driver is slow: the links between GPUs are not known yet"}

// publish makes the writes that are due.
func (p *publisher) publish(ctx context.Context) error {
	r := &round{publisher: p, made: map[string]bool{}}
	for {
		if done, err := r.step(ctx); done || err != nil {
			return err
		}
	}
}

// A round is the writes that are due at one time.
type round struct {
	*publisher
	writing bool            // one was made; the others belong to it and do not wait
	looked  bool            // the slices were read without the watch
	owner   string          // UID of the Node; empty before it is needed
	made    map[string]bool // the slices that were made
	tries   int             // writes that another program was faster than
}

// step makes the next write, or reads what the API server has. It reports whether nothing more is
// to be done now.
func (r *round) step(ctx context.Context) (done bool, err error) {
	view, known := r.view()
	if !known {
		if err := r.problem.Value(); err != nil {
			return true, &errNotNow{err.Error()} // the watch goes on by itself
		}
		return true, nil
	}
	pool, there, err := r.state(view)
	switch {
	case err != nil:
		return true, err
	case pool.Name == "" && r.looked: // nothing is to be written before it is known what is there
		return true, r.devices.SetPublished(ctx, gpusOf(there))
	case pool.Name == "":
		r.looked = true
		return false, r.look(ctx)
	case pool.LinksDue && r.ledger.generation == 0: // what an earlier process wrote has them
		return true, errLinksDue
	}
	if err := r.judge(ctx, pool, there, view); err != nil {
		return true, err
	}
	if step, more := dra.Next(pool, there, r.ledger.generation, r.same); more {
		return r.advance(ctx, step, view, there)
	}
	if !r.settle(there, r.looked) {
		r.looked = true
		return false, r.look(ctx)
	}
	if r.keepsMore(ctx) {
		return false, nil
	}
	return true, r.note(ctx, there)
}

// advance makes a write, if it is time for that.
func (r *round) advance(
	ctx context.Context, step dra.Write, view map[string]kubeapi.Slice, there map[string]dra.PublishedSlice,
) (done bool, err error) {
	l := &r.ledger
	// it was removed at once, as its owner may be gone: that does not go on without a pause
	if step.New && r.made[step.Name] {
		r.writing, r.owner = false, ""
		clear(r.made)
	}
	if pause := r.pause(step, there); pause > 0 && !r.writing {
		r.again.After(ctx, pause)
		return true, nil
	}
	if step.New && !r.writing {
		l.restored, l.pace = time.Now(), min(max(2*l.pace, minPace), maxPace)
	}
	r.writing = true
	if step.New && r.owner == "" {
		if r.owner, err = r.findOwner(ctx); err != nil {
			return true, err
		}
		if r.owner == "" {
			r.again.After(ctx, nodePoll)
			return true, &errNotNow{fmt.Sprintf("the API server has no Node %s", step.Published.Pool)}
		}
	}
	r.made[step.Name] = step.New
	err = r.write(ctx, step, view, there, r.owner)
	if kubeapi.IsOvertaken(err) {
		if r.tries++; r.tries < sliceTries {
			err = r.look(ctx)
		}
	}
	return err != nil, err
}

// findOwner returns the UID of the Node; empty if the API server has none. It is asked where
// nothing watches the Node, and where slices are gone that were there: they go with a Node that is
// deleted, of which the watch may not have told yet.
func (p *publisher) findOwner(ctx context.Context) (string, error) {
	if node := p.client.Nodes().Value(); node.UID != "" && p.ledger.generation == 0 {
		return node.UID, nil
	}
	node, err := p.client.Get(ctx)
	return node.UID, err
}

// view returns the slices of the node: those of the watch, and what this process knows better for
// now.
func (p *publisher) view() (map[string]kubeapi.Slice, bool) {
	l, now := &p.ledger, time.Now()
	seen := p.there.Value()
	if l.listed.ResourceVersion != "" && now.Sub(l.at) < ownWrite &&
		(seen.ResourceVersion == "" || seen.IsBefore(l.listed.ResourceVersion)) {
		seen = l.listed
	} else { // when the watch begins anew, what was read before would be older than what is known
		l.listed = kubeapi.Slices{}
	}
	if seen.ResourceVersion == "" {
		return nil, false
	}
	view := maps.Clone(seen.ByName)
	for name, own := range l.own {
		is, has := view[name]
		switch {
		case now.Sub(own.at) < ownWrite && own.removed && has && is.UID == own.UID:
			delete(view, name)
		case now.Sub(own.at) < ownWrite && !own.removed && seen.IsBefore(own.ResourceVersion):
			view[name] = own.Slice
		default:
			delete(l.own, name)
		}
	}
	return view, true
}

// state returns the pool that is to be there, and what is.
func (p *publisher) state(view map[string]kubeapi.Slice) (dra.Pool, map[string]dra.PublishedSlice, error) {
	pool, there := p.devices.Pools().Value(), map[string]dra.PublishedSlice{}
	if p.driver.Value().Rival != "" {
		pool = pool.Withheld()
	}
	if p.ledger.noTaints {
		pool = pool.Untainted()
	}
	if p.ledger.noCounters {
		pool = pool.Unpartitioned()
	}
	if p.ledger.noShares {
		pool = pool.Unshared()
	}
	for name, s := range view {
		slice, err := content(s)
		if err != nil {
			return dra.Pool{}, nil, err
		}
		there[name] = dra.PublishedSlice{Pool: s.Pool, Generation: s.Generation, Count: s.Count, Slice: slice}
	}
	return pool, there, nil
}

// content returns the devices of a slice.
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

// same reports whether the API server has made of a slice what it has now.
func (p *publisher) same(name string, want, is dra.Slice) bool {
	kept, has := p.ledger.kept[name]
	return want.Timed(is).Equal(is) || has && kept.sent.Equal(want) && kept.kept.Equal(is)
}

// judge counts changes by other programs. It returns why nothing is written for now.
func (p *publisher) judge(ctx context.Context, pool dra.Pool, there map[string]dra.PublishedSlice,
	view map[string]kubeapi.Slice) error {
	l, now := &p.ledger, time.Now()
	ours := map[string]dra.Slice{}
	for i, slice := range pool.Slices {
		ours[pool.SliceName(i)] = slice
	}
	first := len(l.seen) == 0
	maps.DeleteFunc(l.seen, func(name, _ string) bool { return view[name].Name == "" })
	for name, s := range view {
		before, known := l.seen[name]
		if is := (kubeapi.Slices{ResourceVersion: s.ResourceVersion}); before == s.ResourceVersion || is.IsBefore(before) {
			continue // it is known, or of an API server that is behind
		}
		l.seen[name] = s.ResourceVersion
		is, tried := there[name], l.tried[name]
		want, our := ours[name]
		switch {
		case first, known && !our: // it is being removed
		// this process wrote it
		case is.Generation == tried.Generation && is.Count == tried.Count && p.same(name, tried.Slice, is.Slice):
		case our && is.Generation == l.generation && p.same(name, want, is.Slice): // what matters was not changed
		default:
			l.struck = append(l.struck, now)
			klog.FromContext(ctx).Info("Another program changed a slice of the driver", "name", name)
		}
	}
	l.struck = slices.DeleteFunc(l.struck, func(at time.Time) bool { return now.Sub(at) >= strikeWindow })
	if len(l.struck) >= maxStrikes {
		l.struck, l.leave = nil, now.Add(strikeWindow)
		klog.FromContext(ctx).Error(errOtherPublisher, "Not writing slices, because another program writes them too",
			"for", strikeWindow.String())
		p.again.After(ctx, strikeWindow)
	}
	if now.Before(l.leave) {
		return errOtherPublisher
	}
	return nil
}

// errOtherPublisher is the problem of slices that another program changes again and again.
var errOtherPublisher = &errNotNow{
	"another program changes the ResourceSlices of this driver on this node: remove it, or have this one give no GPUs by claims",
}

// pause returns how long a write has to wait.
func (p *publisher) pause(step dra.Write, there map[string]dra.PublishedSlice) time.Duration {
	l, now := &p.ledger, time.Now()
	switch {
	case step.New && l.generation > 0: // another program has removed it
		// kubelet, when it started
		if n := p.driver.Value().Registrations; n != l.paced || now.Sub(l.restored) >= l.pace+calm {
			l.paced, l.pace = n, 0
		}
		return l.restored.Add(l.pace).Sub(now)
	case step.New, step.Remove, there[step.Name].Slice.Worse(step.Published.Slice):
		return 0
	}
	return l.written.Add(slicePace).Sub(now)
}

// write makes one write. The owner of a new slice is the node with this UID.
func (p *publisher) write(
	ctx context.Context, step dra.Write, view map[string]kubeapi.Slice, there map[string]dra.PublishedSlice, owner string,
) error {
	l, now := &p.ledger, time.Now()
	if step.Remove {
		old := view[step.Name]
		if err := p.client.DeleteSlice(ctx, step.Name, old.UID); err != nil {
			return err
		}
		l.own[step.Name] = ownSlice{Slice: old, removed: true, at: now}
		return nil
	}
	if published := p.devices.Published().Value(); published != nil { // otherwise all may be
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
	if err := fill(&s, sent.Timed(there[step.Name].Slice)); err != nil {
		return err
	}
	l.tried[step.Name] = step.Published
	var err error
	if step.New {
		s.Owners = []kubeapi.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: step.Published.Pool, UID: owner,
			Controller: true}}
		s, err = p.client.CreateSlice(ctx, s)
	} else {
		s, err = p.client.UpdateSlice(ctx, s)
	}
	if err != nil {
		return err
	}
	l.own[step.Name] = ownSlice{Slice: s, at: now}
	l.generation, l.written = step.Published.Generation, now
	klog.FromContext(ctx).V(2).Info("Wrote a slice", "name", step.Name, "devices", len(sent.Devices), "generation",
		l.generation)
	return p.compare(ctx, step.Name, sent, s)
}

// look reads the slices as they are now.
func (p *publisher) look(ctx context.Context) error {
	listed, err := p.client.Slices(ctx, p.devices.Driver())
	if err != nil {
		return err
	}
	p.ledger.listed, p.ledger.at = listed, time.Now()
	clear(p.ledger.own)
	return nil
}

// settle reports whether it is certain what the API server has. GPUs count as not published by what
// it has now, and not by what its cache had.
func (p *publisher) settle(there map[string]dra.PublishedSlice, looked bool) bool {
	published := p.devices.Published().Value()
	if looked {
		return true
	}
	if published == nil {
		return false
	}
	gpus := gpusOf(there)
	for uuid := range published {
		if !gpus[uuid] {
			return false
		}
	}
	return true
}

// note notes what the API server has, once that is what it is to have.
func (p *publisher) note(ctx context.Context, there map[string]dra.PublishedSlice) error {
	wanted := p.devices.Pools().Value().Slices
	now := handover.Publication{
		Slices: len(there), API: p.client.ResourceVersion(),
		NoTaints: p.ledger.noTaints, NoCounters: p.ledger.noCounters && slices.ContainsFunc(wanted, dra.Slice.Counted),
		NoShares: p.ledger.noShares && slices.ContainsFunc(wanted, dra.Slice.Shared),
	}
	for _, s := range there {
		now.Devices += len(s.Slice.Devices)
		now.Generation = max(now.Generation, s.Generation)
	}
	p.ledger.generation = max(p.ledger.generation, now.Generation)
	if p.devices.Publication().Value() != now {
		p.devices.Publication().Publish(now)
	}
	return p.devices.SetPublished(ctx, gpusOf(there))
}

func gpusOf(there map[string]dra.PublishedSlice) map[string]bool {
	gpus := map[string]bool{}
	for _, s := range there {
		maps.Copy(gpus, s.Slice.GPUs())
	}
	return gpus
}
