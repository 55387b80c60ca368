package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

const (
	// slowWrite is how long a write delays the writes of other parts. An API server or a webhook that
	// needs longer delays only the part of that write.
	slowWrite = time.Second
	// maxStaleWrites limits the writes in a row that are repeated at once after another program
	// changed the Node first.
	maxStaleWrites = 3
	// minPause is the shortest time until the next decision of a part.
	minPause = 10 * time.Millisecond
	// ownWriteTTL is how long the response to a write takes precedence over the watch.
	ownWriteTTL = 10 * time.Minute
	// shutdownTimeout limits the last writes of a process.
	shutdownTimeout = time.Second
)

// A part is the content of the Node that one feature writes. The keeper calls its methods one after
// the other.
type part interface {
	// inputs returns channels that are closed when the inputs change. A part that is switched off
	// returns only the channel of the configuration.
	inputs() []<-chan struct{}
	// look reads the inputs. It may take long. The keeper calls it after a change of the inputs or of
	// the Node, and at the time of the last decision.
	look(ctx context.Context, node kubeapi.Node)
	// want decides what the newest Node needs. It depends only on its arguments, on the inputs of the
	// last look, and on the memory of the part. The keeper may call it at any time after a look.
	want(node kubeapi.Node, now time.Time) decision
}

// A leaver is a part with a last write at the end of the process, because there may be no next
// process.
type leaver interface {
	// owes reports whether a last write may be needed.
	owes() bool
	// leave returns the last write; nil for none.
	leave(node kubeapi.Node, now time.Time) kubeapi.NodePatch
	// left records the result of the last write.
	left(ctx context.Context, err error)
}

// A decision is what a part needs now: an action, or else a patch, or else nothing.
type decision struct {
	// act does what must happen before a patch, such as a request; nil for nothing.
	act func(context.Context) error
	// patch is the change of the Node; nil if the Node is as wanted, or the time for the change has
	// not come.
	patch kubeapi.NodePatch
	// lock is held during the write; nil for none.
	lock sync.Locker
	// crowd says that all nodes of a cluster may make this write at the same time. It waits for the
	// turn of this node.
	crowd bool
	// at is the time of the next decision, if nothing changes before; zero for never.
	at time.Time
	// problem says why the Node is not as wanted, although no write helps; nil if it is.
	problem error
	// done records the result of act or patch, and may be nil. node is the Node after the write, or as
	// read again after a conflict. It returns true if the next decision takes the error into account.
	done func(ctx context.Context, node kubeapi.Node, err error, now time.Time) (handled bool)
}

// A latestNode is the newest known Node, from the watch or from the response to a write, and the
// time of its last update.
type latestNode struct {
	node      kubeapi.Node
	updatedAt time.Time
}

// update stores a Node unless a newer one was stored within ownWriteTTL. An older Node after this
// time means that the cluster was restored from a backup.
func (l *latestNode) update(node kubeapi.Node, now time.Time) {
	if !l.node.After(node) || now.Sub(l.updatedAt) >= ownWriteTTL {
		l.node, l.updatedAt = node, now
	}
}

// A keeper is the only writer of the daemon's own Node. Its loop asks each part what the newest Node
// needs, and sends one patch after the other. A write that is rejected or slow delays only its own
// part.
type keeper struct {
	client *kubeapi.Client
	spread *spread
	woken  feed.Feed[struct{}] // published when the loop has work

	mu     sync.Mutex // guards latest
	latest latestNode
}

// A partState is a part with what the loop knows about it.
type partState struct {
	part
	report func(error) error // publishes the problem of the part, and returns it; nil if nobody reads it

	hasLooked bool
	changed   []<-chan struct{} // inputs of the last look
	version   [2]string         // UID and version of the Node at the last look
	at        time.Time         // time of the next look, if nothing changes before
	fresh     bool              // the next decision comes before the next look

	working   bool      // a look, an action or a write is in progress
	writingAt time.Time // start of the write in progress; zero if there is none
	results   chan func(now time.Time)

	retry       kubeapi.Retry
	retryAt     time.Time       // no write before this time
	restored    <-chan struct{} // closed when the watch works again, so that retryAt may be too late
	actFailed   bool            // the last failure was that of an action
	staleWrites int             // in a row
}

// newPart returns the state of a part with a name for the log.
func newPart(name string, p part) *partState {
	return &partState{part: p, retry: kubeapi.Retry{What: name}, results: make(chan func(time.Time), 1)}
}

// A term is the work of a keeper while this process leads.
type term struct {
	*keeper
	parts   []*partState // the last one is that of turn
	turn    *turnPart
	workers sync.WaitGroup
}

// run keeps the Node as the parts want it until ctx ends, and then makes the last writes. If several
// parts need a write, the part that comes first in the list writes first.
func (k *keeper) run(ctx context.Context, parts ...*partState) {
	turn := &turnPart{spread: k.spread, client: k.client}
	t := &term{keeper: k, turn: turn, parts: append(parts, newPart("first write", turn))}
	timer := time.AfterFunc(0, func() {})
	for ctx.Err() == nil {
		_, woken := k.woken.Latest()
		_, seen := k.client.Nodes().Latest()
		now, next := time.Now(), time.Time{}
		t.takeResults(now)
		node := k.newest(now) // after takeResults: it includes the results of writes
		changes := []<-chan struct{}{woken, seen}
		for _, p := range t.parts {
			next = earlier(next, t.advance(ctx, p, node, now))
			if !p.working {
				changes = append(append(changes, p.changed...), p.restored)
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
	k.leave(ctx, parts)
}

// takeResults records the results of finished work.
func (t *term) takeResults(now time.Time) {
	for _, p := range t.parts {
		select {
		case record := <-p.results:
			p.working, p.writingAt, p.fresh = false, time.Time{}, true
			record(now)
		default:
		}
	}
}

// advance starts the next work of a part. It returns when to call it again, if nothing changes
// before; zero for never.
func (t *term) advance(ctx context.Context, p *partState, node kubeapi.Node, now time.Time) time.Time {
	switch {
	case p.working:
		return time.Time{}
	case !p.fresh && p.isDue(node, now):
		p.hasLooked, p.changed, p.version, p.at = true, p.inputs(), versionOf(node), time.Time{}
		t.start(p, func() func(time.Time) {
			p.look(ctx, node)
			return func(time.Time) {}
		})
		return time.Time{}
	}
	p.fresh = false
	d := p.want(node, now)
	if p.at = d.at; !d.at.IsZero() && d.at.Before(now.Add(minPause)) {
		p.at = now.Add(minPause)
	}
	waits := p.waits(now)
	switch {
	case d.act != nil && waits && p.actFailed, d.act == nil && d.patch != nil && waits:
		return earlier(p.at, p.retryAt)
	case d.act != nil:
		t.start(p, func() func(time.Time) {
			err := d.act(ctx)
			return func(now time.Time) { p.record(ctx, d, node, err, false, now) }
		})
	case d.patch == nil:
		if !waits {
			p.retry.Succeeded(ctx)
			p.settle(d)
		}
	case d.crowd && !t.turn.passed:
		t.turn.wanted = true
	default:
		if until := writeEnds(t.parts); now.Before(until) {
			return earlier(p.at, until)
		}
		p.writingAt = now
		t.start(p, func() func(time.Time) {
			if d.lock != nil {
				d.lock.Lock()
				defer d.lock.Unlock()
			}
			after, refreshed, err := t.write(ctx, node, d.patch)
			return func(now time.Time) { p.record(ctx, d, after, err, refreshed, now) }
		})
	}
	return p.at
}

// start starts work of a part. work returns how to record its result.
func (t *term) start(p *partState, work func() func(time.Time)) {
	p.working = true
	t.workers.Go(func() {
		p.results <- work()
		t.woken.Publish(struct{}{})
	})
}

// isDue reports whether the inputs must be read again.
func (p *partState) isDue(node kubeapi.Node, now time.Time) bool {
	due := !p.hasLooked || p.version != versionOf(node) || !p.at.IsZero() && !now.Before(p.at)
	for _, c := range p.changed {
		due = due || isClosed(c)
	}
	return due
}

// waits reports whether the part waits after a failure.
func (p *partState) waits(now time.Time) bool {
	if p.restored != nil && isClosed(p.restored) {
		p.restored = nil
		p.retryAt = earlier(p.retryAt, now.Add(kubeapi.RestoreDelay()))
	}
	return now.Before(p.retryAt)
}

// settle reports the problem of a part that has nothing to do.
func (p *partState) settle(d decision) {
	if p.report != nil && d.at.IsZero() {
		_ = p.report(d.problem)
	}
}

// record records the result of an action or a write. refreshed says that another program changed
// the Node first, and that the Node was read again.
func (p *partState) record(ctx context.Context, d decision, node kubeapi.Node, err error, refreshed bool,
	now time.Time) {
	handled := d.done != nil && d.done(ctx, node, err, now)
	if p.actFailed = err != nil && d.act != nil; err == nil {
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
		if p.report != nil {
			_ = p.report(err)
		}
	}
}

// writeEnds returns until when the writes in progress delay another write.
func writeEnds(parts []*partState) (until time.Time) {
	for _, p := range parts {
		if end := p.writingAt.Add(slowWrite); !p.writingAt.IsZero() && end.After(until) {
			until = end
		}
	}
	return until
}

// newest returns the newest known Node.
func (k *keeper) newest(now time.Time) kubeapi.Node {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.latest.update(k.client.Nodes().Value(), now)
	return k.latest.node
}

// refresh reads the newest Node from the API server.
func (k *keeper) refresh(ctx context.Context) (kubeapi.Node, error) {
	node, err := k.client.Get(ctx)
	if err == nil {
		k.store(node)
	}
	return node, err
}

// store stores a Node received from the API server, unless a newer one is known.
func (k *keeper) store(node kubeapi.Node) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.latest.node.After(node) {
		k.latest = latestNode{node, time.Now()}
	}
}

// write sends a patch of a Node, and returns the updated Node. If another program was faster, it
// returns an error, the Node as it is now, and true.
func (k *keeper) write(ctx context.Context, node kubeapi.Node, patch kubeapi.NodePatch) (kubeapi.Node, bool, error) {
	after, err := k.client.PatchNode(ctx, node, patch)
	if err == nil {
		k.store(after)
		return after, false, nil
	}
	var conflict *kubeapi.Conflict
	_, swap := patch.(kubeapi.LabelSwap)
	if errors.As(err, &conflict) || kubeapi.IsStale(err) || swap && kubeapi.IsInvalid(err) {
		if now, unknown := k.refresh(ctx); unknown == nil {
			return now, true, err
		}
	}
	if t, ok := patch.(kubeapi.TaintPatch); ok && !t.Wanted && kubeapi.IsInaccessible(err) {
		err = fmt.Errorf("the taint %s stays, because the right to remove it is missing; "+
			"remove it with: kubectl taint node %s %s-: %w", t.Taint, node.Name, t.Taint, err)
	}
	return node, false, err
}

// change writes what patch returns for a Node, and returns the updated Node; nil is nothing to write.
// If another program was faster, it tries again a few times. It may be called while the loop runs.
func (k *keeper) change(
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

// leave makes the last writes at the end of ctx. It first reads the Node from the API server: the
// watch may be late, and the end of ctx may have interrupted the response to a write.
func (k *keeper) leave(ctx context.Context, parts []*partState) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	for _, p := range parts {
		l, ok := p.part.(leaver)
		if !ok || !l.owes() {
			continue
		}
		node, err := k.refresh(last)
		if err == nil {
			_, err = k.change(last, node, func(node kubeapi.Node) kubeapi.NodePatch { return l.leave(node, time.Now()) })
		}
		l.left(ctx, err)
	}
}

// A turnPart writes nothing. It waits for the turn of this node to make a write that all nodes of a
// cluster may make at the same time.
type turnPart struct {
	spread *spread
	client *kubeapi.Client
	wanted bool // a part waits for the turn
	passed bool // the turn of this node has come
}

func (t *turnPart) inputs() []<-chan struct{} { return nil }

func (t *turnPart) look(context.Context, kubeapi.Node) {}

func (t *turnPart) want(kubeapi.Node, time.Time) decision {
	if !t.wanted || t.passed {
		return decision{}
	}
	return decision{
		act: func(ctx context.Context) error { return t.spread.awaitWrite(ctx, t.client) },
		done: func(_ context.Context, _ kubeapi.Node, err error, _ time.Time) bool {
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

// earlier returns the earlier of two times; zero means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
