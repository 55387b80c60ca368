// Package keeper is the only writer of the daemon's own Node while the daemon runs. The Keeper has a
// single loop and a single newest Node. Each part decides how to change the Node, and the Keeper
// sends the patches.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

const (
	// slowWrite is how long a write delays the writes of other parts. A slower API server or webhook
	// delays only the part of the write.
	slowWrite = time.Second
	// maxStaleWrites limits the immediate repetitions of a write after another program changed the Node
	// first.
	maxStaleWrites = 3
	// minPause is the shortest time until the next decision of a part.
	minPause = 10 * time.Millisecond
	// OwnWriteTTL is how long the response to a write takes precedence over the watch.
	OwnWriteTTL = 10 * time.Minute
	// shutdownTimeout limits the last writes of a process.
	shutdownTimeout = time.Second
)

// A Part is the content of the Node for a feature, such as the labels. The Keeper calls the methods
// of a Part one after the other.
type Part interface {
	// Inputs returns channels to close when the inputs change. While the feature is disabled, Inputs
	// returns only the channel of the configuration.
	Inputs() []<-chan struct{}
	// Look reads the inputs, and may take long. The Keeper calls Look after a change of the inputs or
	// of the Node, and at the time of the last Decision.
	Look(ctx context.Context, node kubeapi.Node)
	// Want decides how to change the newest Node. The Decision depends only on the arguments, on the
	// inputs of the last Look, and on the memory of the Part. The Keeper may call Want at any time
	// after a Look.
	Want(node kubeapi.Node, now time.Time) Decision
}

// A finalWriter is a part with a last write at the end of the process, because there may be no next
// process.
type finalWriter interface {
	// needsFinalWrite reports whether a last write may be needed.
	needsFinalWrite() bool
	// finalPatch returns the last write; nil for none.
	finalPatch(node kubeapi.Node, now time.Time) kubeapi.NodePatch
	// recordFinalWrite records the result of the last write.
	recordFinalWrite(ctx context.Context, err error)
}

// A Decision is the next step of a Part: an action, a patch, or nothing.
type Decision struct {
	// Act is an action before the patch, such as a request; nil for none.
	Act func(context.Context) error
	// Patch is the change of the Node; nil if the Node is as wanted, or the time for the change has
	// not come.
	Patch kubeapi.NodePatch
	// Lock is held during the write; nil for none.
	Lock sync.Locker
	// Crowd is true if all nodes of a cluster may write at the same time. The write waits for the turn
	// of the node.
	Crowd bool
	// At is the time of the next decision, if nothing changes before; zero for never.
	At time.Time
	// Problem says why the Node differs from the wanted content although no write helps; nil for none.
	Problem error
	// Done records the result of Act or Patch, and may be nil. node is the Node after the write, or as
	// read again after a conflict. It returns true if the next decision takes the error into account.
	Done func(ctx context.Context, node kubeapi.Node, err error, now time.Time) (handled bool)
}

// A latestNode is the newest known Node, from the watch or from the response to a write, and the
// time of its last update.
type latestNode struct {
	node      kubeapi.Node
	updatedAt time.Time
}

// update stores a Node unless a newer Node was stored within OwnWriteTTL. After OwnWriteTTL, an older
// Node means a restore of the cluster from a backup.
func (l *latestNode) update(node kubeapi.Node, now time.Time) {
	if !l.node.After(node) || now.Sub(l.updatedAt) >= OwnWriteTTL {
		l.node, l.updatedAt = node, now
	}
}

// A Keeper is the only writer of the daemon's own Node. The loop calls each Part with the newest Node,
// and sends patch after patch. A rejected or slow write delays only its own Part.
type Keeper struct {
	client *kubeapi.Client
	turn   func(context.Context) error
	woken  feed.Feed[struct{}] // published when the loop has work

	mu     sync.Mutex // guards latest
	latest latestNode
}

// New returns a Keeper of the Node of a client. turn waits for the turn of this node among all nodes
// of the cluster; nil never waits.
func New(client *kubeapi.Client, turn func(context.Context) error) *Keeper {
	if turn == nil {
		turn = func(context.Context) error { return nil }
	}
	return &Keeper{client: client, turn: turn}
}

// A Slot is a Part with a name for the log and the loop's knowledge about the Part.
type Slot struct {
	Part
	// Report publishes the problem of the Part, and returns the problem; nil if nobody reads problems.
	Report func(error) error

	lookSchedule
	slotWork
	slotRetry
}

// A lookSchedule says when the Keeper looks at a Part again.
type lookSchedule struct {
	hasLooked bool
	changed   []<-chan struct{} // inputs of the last look
	version   [2]string         // UID and version of the Node at the last look
	at        time.Time         // time of the next look, if nothing changes before
	fresh     bool              // the next decision comes before the next look
}

// slotWork is the work in progress for a Part.
type slotWork struct {
	working   bool      // a look, an action or a write is in progress
	lookingAt time.Time // start of the look in progress; zero if there is none
	writingAt time.Time // start of the write in progress; zero if there is none
	results   chan func(now time.Time)
}

// A slotRetry says when the work for a Part is tried again after a failure.
type slotRetry struct {
	retry       kubeapi.Retry
	retryAt     time.Time       // no write before this time
	restored    <-chan struct{} // closed when the watch works again, so that retryAt may be too late
	actFailed   bool            // the last failure was that of an action
	staleWrites int             // in a row
}

// NewSlot returns the Slot of a part.
func NewSlot(name string, p Part) *Slot {
	return &Slot{Part: p, slotRetry: slotRetry{retry: kubeapi.Retry{What: name}},
		slotWork: slotWork{results: make(chan func(time.Time), 1)}}
}

// A term is the work of a Keeper while this process leads.
type term struct {
	*Keeper
	parts   []*Slot // the last one is that of turn
	turn    *turnPart
	workers sync.WaitGroup
}

// Run keeps the Node as wanted by the parts until ctx ends, and then makes the last writes. If several
// parts need a write, the first part of the list writes first.
func (k *Keeper) Run(ctx context.Context, parts ...*Slot) {
	turn := &turnPart{await: k.turn}
	t := &term{Keeper: k, turn: turn, parts: append(parts, NewSlot("first write", turn))}
	timer := time.AfterFunc(0, func() {})
	for ctx.Err() == nil {
		_, wakeChanged := k.woken.Latest()
		_, nodeChanged := k.client.Nodes().Latest()
		now, next := time.Now(), time.Time{}
		t.takeResults(now)
		node := k.Newest() // after takeResults: the newest Node includes the results of writes
		changes := []<-chan struct{}{wakeChanged, nodeChanged}
		for _, p := range t.parts {
			next = order.Earliest(next, t.advance(ctx, p, node, now))
			if !p.working {
				changes = append(append(changes, p.changed...), p.restored)
				if p.isDue(node, now) { // the Node changed while the part worked
					next = now
				}
			}
		}
		if timer.Stop(); !next.IsZero() {
			timer = time.AfterFunc(next.Sub(now), func() { k.woken.Publish(struct{}{}) })
		}
		feed.WaitAny(ctx, changes...)
	}
	timer.Stop()
	t.workers.Wait()
	t.takeResults(time.Now())
	k.writeFinally(ctx, parts)
}

// takeResults records the results of finished work.
func (t *term) takeResults(now time.Time) {
	for _, p := range t.parts {
		select {
		case record := <-p.results:
			p.working, p.lookingAt, p.writingAt, p.fresh = false, time.Time{}, time.Time{}, true
			record(now)
		default:
		}
	}
}

// advance starts the next work of a part. It returns when to call it again, if nothing changes
// before; zero for never.
func (t *term) advance(ctx context.Context, p *Slot, node kubeapi.Node, now time.Time) time.Time {
	switch {
	case p.working:
		return time.Time{}
	case !p.fresh && p.isDue(node, now):
		p.hasLooked, p.changed, p.version, p.at = true, p.Inputs(), versionOf(node), time.Time{}
		p.lookingAt = now
		t.start(p, func() func(time.Time) {
			p.Look(ctx, node)
			return func(time.Time) {}
		})
		return time.Time{}
	}
	p.fresh = false
	d := p.Want(node, now)
	if p.at = d.At; !d.At.IsZero() && d.At.Before(now.Add(minPause)) {
		p.at = now.Add(minPause)
	}
	waits := p.waits(now)
	switch {
	case d.Act != nil && waits && p.actFailed, d.Act == nil && d.Patch != nil && waits:
		return order.Earliest(p.at, p.retryAt)
	case d.Act != nil:
		t.start(p, func() func(time.Time) {
			err := d.Act(ctx)
			return func(now time.Time) { p.record(ctx, d, node, err, false, now) }
		})
	case d.Patch == nil:
		if !waits {
			p.retry.Succeeded(ctx)
			p.settle(d)
		}
	case d.Crowd && !t.turn.passed:
		t.turn.wanted = true
	default:
		if until := t.mayWrite(p); now.Before(until) {
			return order.Earliest(p.at, until)
		}
		p.writingAt = now
		t.start(p, func() func(time.Time) {
			if d.Lock != nil {
				d.Lock.Lock()
				defer d.Lock.Unlock()
			}
			after, refreshed, err := t.write(ctx, node, d.Patch)
			return func(now time.Time) { p.record(ctx, d, after, err, refreshed, now) }
		})
	}
	return p.at
}

// start starts work of a part. work returns how to record its result.
func (t *term) start(p *Slot, work func() func(time.Time)) {
	p.working = true
	t.workers.Go(func() {
		p.results <- work()
		t.woken.Publish(struct{}{})
	})
}

// isDue reports whether the inputs must be read again.
func (p *Slot) isDue(node kubeapi.Node, now time.Time) bool {
	due := !p.hasLooked || p.version != versionOf(node) || !p.at.IsZero() && !now.Before(p.at)
	for _, c := range p.changed {
		due = due || isClosed(c)
	}
	return due
}

// waits reports whether the part waits after a failure.
func (p *Slot) waits(now time.Time) bool {
	if p.restored != nil && isClosed(p.restored) {
		p.restored = nil
		p.retryAt = order.Earliest(p.retryAt, now.Add(kubeapi.RestoreDelay()))
	}
	return now.Before(p.retryAt)
}

// settle reports the problem of a part without a next step.
func (p *Slot) settle(d Decision) {
	if p.Report != nil && d.At.IsZero() {
		_ = p.Report(d.Problem)
	}
}

// record records the result of an action or a write. refreshed says that another program changed
// the Node first, and that the Node was read again.
func (p *Slot) record(ctx context.Context, d Decision, node kubeapi.Node, err error, refreshed bool,
	now time.Time) {
	handled := d.Done != nil && d.Done(ctx, node, err, now)
	if p.actFailed = err != nil && d.Act != nil; err == nil {
		p.retry.Succeeded(ctx)
	}
	switch {
	case err == nil || handled || ctx.Err() != nil:
		p.staleWrites, p.retryAt = 0, time.Time{}
	case refreshed && p.staleWrites < maxStaleWrites:
		p.staleWrites++
	default:
		delay, restored := p.retry.Failed(ctx, err)
		p.staleWrites, p.retryAt, p.restored = 0, now.Add(delay), restored
		if p.Report != nil {
			_ = p.Report(err)
		}
	}
}

// mayWrite returns the earliest time of a write of a part. Writes in progress delay the write, as do
// earlier parts of the list during a Look.
func (t *term) mayWrite(p *Slot) (at time.Time) {
	before := true
	for _, other := range t.parts {
		before = before && other != p
		since := other.writingAt
		if before && since.IsZero() {
			since = other.lookingAt
		}
		if end := since.Add(slowWrite); !since.IsZero() && end.After(at) {
			at = end
		}
	}
	return at
}

// Newest returns the newest known Node.
func (k *Keeper) Newest() kubeapi.Node {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.latest.update(k.client.Nodes().Value(), time.Now())
	return k.latest.node
}

// Refresh reads the newest Node from the API server.
func (k *Keeper) Refresh(ctx context.Context) (kubeapi.Node, error) {
	node, err := k.client.Get(ctx)
	if err == nil {
		k.store(node)
	}
	return node, err
}

// store stores a Node received from the API server, unless a newer one is known.
func (k *Keeper) store(node kubeapi.Node) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.latest.node.After(node) {
		k.latest = latestNode{node, time.Now()}
	}
}

// write sends a patch of a Node, and returns the updated Node. If another program was faster, it
// returns an error, the Node as it is now, and true.
func (k *Keeper) write(ctx context.Context, node kubeapi.Node, patch kubeapi.NodePatch) (kubeapi.Node, bool, error) {
	after, err := k.client.PatchNode(ctx, node, patch)
	if err == nil {
		k.store(after)
		return after, false, nil
	}
	var conflict *kubeapi.Conflict
	_, swap := patch.(kubeapi.LabelSwap)
	if errors.As(err, &conflict) || kubeapi.IsStale(err) || swap && kubeapi.IsInvalid(err) {
		if now, unknown := k.Refresh(ctx); unknown == nil {
			return now, true, err
		}
	}
	if t, ok := patch.(kubeapi.TaintPatch); ok && !t.Wanted && kubeapi.IsInaccessible(err) {
		err = fmt.Errorf("the taint %s stays, because the right to remove it is missing; "+
			"remove it with: kubectl taint node %s %s-: %w", t.Taint, node.Name, t.Taint, err)
	}
	return node, false, err
}

// Change writes the result of patch for a Node, and returns the updated Node. The patch nil writes
// nothing. If another program was faster, Change retries a few times. Change may be called while the
// loop runs.
func (k *Keeper) Change(
	ctx context.Context, node kubeapi.Node, patch func(kubeapi.Node) kubeapi.NodePatch,
) (kubeapi.Node, error) {
	for attempt := 0; ; attempt++ {
		p := patch(node)
		if p == nil {
			return node, nil
		}
		now, refreshed, err := k.write(ctx, node, p)
		node = now
		if k.woken.Publish(struct{}{}); !refreshed || attempt == maxStaleWrites {
			return node, err
		}
	}
}

// writeFinally makes the last writes at the end of ctx. It first reads the Node from the API server: the
// watch may be late, and the end of ctx may have interrupted the response to a write.
func (k *Keeper) writeFinally(ctx context.Context, parts []*Slot) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	for _, p := range parts {
		l, ok := p.Part.(finalWriter)
		if !ok || !l.needsFinalWrite() {
			continue
		}
		node, err := k.Refresh(last)
		if err == nil {
			_, err = k.Change(last, node, func(node kubeapi.Node) kubeapi.NodePatch {
				return l.finalPatch(node,
					time.Now())
			})
		}
		l.recordFinalWrite(ctx, err)
	}
}

// A turnPart writes nothing, and waits for the turn of this node among all nodes of the cluster.
type turnPart struct {
	await  func(context.Context) error
	wanted bool // a part waits for the turn
	passed bool // the turn of this node has come
}

func (t *turnPart) Inputs() []<-chan struct{} { return nil }

func (t *turnPart) Look(context.Context, kubeapi.Node) {}

func (t *turnPart) Want(kubeapi.Node, time.Time) Decision {
	if !t.wanted || t.passed {
		return Decision{}
	}
	return Decision{
		Act: t.await,
		Done: func(_ context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
			t.passed = err == nil
			return false
		},
	}
}

// inputsIf returns the channel of the configuration, and the others if the part is enabled.
func inputsIf(enabled bool, configured <-chan struct{}, others ...<-chan struct{}) []<-chan struct{} {
	if !enabled {
		return []<-chan struct{}{configured}
	}
	return append(others, configured)
}

// versionOf identifies a version of a Node.
func versionOf(node kubeapi.Node) [2]string { return [2]string{node.UID, node.ResourceVersion} }

// isClosed reports whether a channel is closed.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
