package lead

import (
	"cmp"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// someone names a process that led before and has told nothing.
const someone = "an earlier process"

// An office is one time in which this process leads.
type office struct {
	*Lead
	socket *socket
	term   *term
	lost   chan struct{} // closed when another process has the lead
	asks   chan *link    // from standbys that want the lead
}

// lead leads until ctx ends or another process has the lead. Former is the link to the one that led before; nil if there is none.
func (l *Lead) lead(ctx context.Context, socket *socket, former *link) {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	o := &office{Lead: l, socket: socket, term: newTerm(), lost: make(chan struct{}), asks: make(chan *link)}
	lose := sync.OnceFunc(func() { close(o.lost) })
	name := cmp.Or(l.statuses.Value().Name, someone)
	held, err := takeShare(l.o.Dir)
	if err != nil { // then a former lead is known by its connection alone
		log.Info("Cannot show other processes that this one leads", "reason", err.Error())
	}
	gone := o.watch(former)
	look := func() {
		l.set(func(s *Status) {
			switch {
			case gone != nil:
				s.Former = name
			case held.others():
				s.Former = cmp.Or(l.inherited, someone)
			default:
				s.Former = ""
			}
		})
	}

	l.mu.Lock()
	l.own, l.lost = socket.identity, lose
	l.mu.Unlock()
	l.told.Publish(nil) // what an earlier term told
	l.set(func(s *Status) { *s = Status{Leads: true, Name: l.o.Name, Since: l.o.Clock.Now()} })
	look()
	log.Info("This process leads on the node", "former", l.statuses.Value().Former)
	l.terms.Publish(o.term)
	var standbys sync.WaitGroup
	standbys.Go(func() { o.accept(ctx, &standbys, lose) })

	o.follow(ctx, gone, look, func() { gone = nil })
	l.terms.Publish(nil)
	ended := o.term.stop()
	left := ctx.Err() != nil
	l.mu.Lock()
	l.own = identity{}
	l.mu.Unlock()
	l.heard.Publish(nil) // it is older than what this process decided
	l.set(func(s *Status) { *s = Status{} })
	l.inherited = ""
	if left {
		l.leave(context.WithoutCancel(ctx), socket)
	} else {
		log.Info("This process does not lead any more")
	}
	released := make(chan struct{})
	go func() { // the hardware may be changed by others when nothing of this term is under way
		defer close(released)
		for <-ended; l.o.Busy(); <-l.o.Clock.After(tick) {
		}
		held.close()
	}()
	select {
	case <-released:
	case <-l.o.Clock.After(pause):
	}
	_ = socket.Close()
	cancel() // ends the connections
	standbys.Wait()
	former.close()
}

// follow returns when this process leads no more, or ctx has ended.
func (o *office) follow(ctx context.Context, gone <-chan struct{}, look, forget func()) {
	for {
		var due <-chan time.Time
		if o.statuses.Value().Former != "" {
			due = o.o.Clock.After(tick)
		}
		select {
		case <-ctx.Done():
			return
		case <-o.lost:
			return
		case <-gone:
			gone = nil
			forget()
			look()
		case <-due:
			look()
		case to := <-o.asks:
			o.handOver(ctx, to)
			return
		}
	}
}

// watch tells the former lead that this process leads, and returns what is closed when their connection has ended; nil if there is none.
func (o *office) watch(former *link) <-chan struct{} {
	if former == nil {
		return nil
	}
	go former.send(message{Taken: true})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for range former.in { // what it says counts no more
		}
	}()
	return gone
}

// handOver ends the term, tells a standby to take the lead, and waits until it has. If it does not, whoever is there takes the lead.
func (o *office) handOver(ctx context.Context, to *link) {
	klog.FromContext(ctx).Info("Handing the lead over to a process that started later")
	o.terms.Publish(nil)
	select {
	case <-o.term.stop():
	case <-o.o.Clock.After(finish):
	case <-to.ended:
		return
	case <-o.lost:
		return
	case <-ctx.Done():
		return
	}
	go to.send(message{Yours: true, Former: o.statuses.Value().Former})
	select {
	case <-o.lost:
	case <-to.ended:
	case <-o.o.Clock.After(silence * tick):
	case <-ctx.Done():
	}
}

// accept serves standbys until the socket is closed.
func (o *office) accept(ctx context.Context, standbys *sync.WaitGroup, lose func()) {
	for {
		conn, err := o.socket.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // too many open files, for instance
			o.sleep(ctx, pause)
			continue
		}
		standbys.Go(func() { o.serve(ctx, newLink(conn), lose) })
	}
}

// serve tells a standby what it is to know, and answers it, until it ends.
func (o *office) serve(ctx context.Context, standby *link, lose func()) {
	ctx, cancel := context.WithCancel(ctx)
	var telling sync.WaitGroup
	defer telling.Wait()
	defer context.AfterFunc(ctx, standby.close)()
	defer standby.close()
	defer cancel()
	o.set(func(s *Status) { s.Standbys++ })
	defer o.set(func(s *Status) { s.Standbys = max(0, s.Standbys-1) })
	telling.Go(func() {
		standby.send(message{Name: o.o.Name, Token: o.o.Token, Since: o.statuses.Value().Since})
		for {
			value, changed := o.told.Latest()
			if value != nil {
				standby.send(message{Told: value})
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	})
	for m := range standby.in {
		switch {
		case m.Ping:
			standby.send(message{Pong: true})
		case m.Taken:
			lose()
		case m.Ask:
			telling.Go(func() {
				select {
				case o.asks <- standby:
				case <-ctx.Done():
				}
			})
		}
	}
}
