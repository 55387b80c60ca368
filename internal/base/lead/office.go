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

// An office is one time in which this process leads.
type office struct {
	*Lead
	socket *socket
	lose   func()          // called when another process has the lead
	lost   <-chan struct{} // closed then
	asks   chan *link      // from standbys that want the lead
}

// lead leads until ctx ends or another process has the lead.
func (l *Lead) lead(ctx context.Context, socket *socket) {
	serving, lose := context.WithCancel(context.WithoutCancel(ctx)) // standbys are served until the tasks have ended
	o := &office{Lead: l, socket: socket, lose: lose, lost: serving.Done(), asks: make(chan *link, 1)}
	l.enter(o)
	l.told.Publish(nil) // what an earlier term told
	l.set(func(s *Status) { *s = Status{Leads: true, Name: l.o.Name, Since: l.o.Clock.Now(), Former: o.holder()} })
	klog.FromContext(ctx).Info("This process leads on the node", "former", o.holder())
	t := make(term)
	l.terms.Publish(t)
	var standbys sync.WaitGroup
	standbys.Go(func() { o.accept(serving, &standbys) })

	to := o.follow(ctx)
	ended := l.stop(t)
	if to != nil {
		o.handOver(ctx, to, ended)
	}
	left := ctx.Err() != nil
	if left {
		select {
		case <-ended:
		case <-o.lost:
		case <-l.o.Clock.After(leaving):
		}
	}
	l.enter(nil)
	l.heard.Publish(nil) // it is older than what this process decided
	l.set(func(s *Status) { *s = Status{} })
	if !left {
		klog.FromContext(ctx).Info("This process does not lead any more")
	}
	o.release(ended)
	_ = socket.Close()
	lose() // ends the connections
	standbys.Wait()
}

// enter makes an office that of this process; nil means that it does not lead.
func (l *Lead) enter(o *office) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.office = o
}

// release lets others change the hardware once nothing of this term is under way. It returns then,
// and soon in any case. It may be called again.
func (o *office) release(ended <-chan struct{}) {
	released := make(chan struct{})
	go func() {
		defer close(released)
		for <-ended; o.o.Busy(); <-o.o.Clock.After(tick) {
		}
		o.socket.share.Close()
	}()
	select {
	case <-released:
	case <-o.o.Clock.After(pause):
	}
}

// holder names the process that led before and may still change hardware; empty if there is none.
func (o *office) holder() string {
	if !o.socket.share.Others() {
		return ""
	}
	return cmp.Or(o.former, "an earlier process") // which has told nothing
}

// follow returns when this process leads no more, when ctx has ended, or when a standby asks for
// the lead, which it returns.
func (o *office) follow(ctx context.Context) (to *link) {
	for {
		var due <-chan time.Time
		if o.statuses.Value().Former != "" {
			due = o.o.Clock.After(tick)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-o.lost:
			return nil
		case <-due:
			o.set(func(s *Status) { s.Former = o.holder() })
		case to = <-o.asks:
			return to
		}
	}
}

// handOver waits for the tasks of the term, tells a standby to take the lead, and waits until it
// has. If the standby does not, any process takes the lead.
func (o *office) handOver(ctx context.Context, to *link, ended <-chan struct{}) {
	klog.FromContext(ctx).Info("Handing the lead over to a process that started later")
	select {
	case <-ended:
	case <-o.o.Clock.After(finish):
	case <-to.ended:
		return
	case <-o.lost:
		return
	case <-ctx.Done():
		return
	}
	o.release(ended)
	to.tell(message{Yours: true, Former: o.statuses.Value().Former})
	select {
	case <-o.lost:
	case <-to.ended:
	case <-o.o.Clock.After(silence * tick):
	case <-ctx.Done():
	}
}

// accept serves standbys until the socket is closed.
func (o *office) accept(ctx context.Context, standbys *sync.WaitGroup) {
	for {
		conn, err := o.socket.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // too many open files, for instance
			o.sleep(ctx, pause)
			continue
		}
		standbys.Go(func() { o.serve(newLink(ctx, conn)) })
	}
}

// serve tells a standby what it is to know, and answers it, until it ends.
func (o *office) serve(standby *link) {
	o.set(func(s *Status) { s.Standbys++ })
	var telling sync.WaitGroup
	telling.Go(func() {
		standby.send(message{Name: o.o.Name, Token: o.o.Token, Since: o.statuses.Value().Since})
		for {
			value, changed := o.told.Latest()
			if value != nil {
				standby.send(message{Told: value})
			}
			select {
			case <-changed:
			case <-standby.ended:
				return
			}
		}
	})
	for m := range standby.in {
		switch {
		case m.Ping:
			standby.send(message{})
		case m.Ask:
			select {
			case o.asks <- standby:
			default: // another one has asked before
			}
		}
	}
	telling.Wait()
	o.set(func(s *Status) { s.Standbys = max(0, s.Standbys-1) })
	_ = o.Check() // it may have ended the connection because it leads now
}
