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

// A leadership is a period during which this process leads.
type leadership struct {
	*Lead
	socket   *socket
	drop     func()          // called when another process took the lead
	lost     <-chan struct{} // closed by drop
	requests chan *link      // standbys that ask for the lead
}

// lead leads until ctx ends or another process takes the lead.
func (l *Lead) lead(ctx context.Context, socket *socket) {
	serving, drop := context.WithCancel(context.WithoutCancel(ctx)) // standbys are served until the tasks have ended
	o := &leadership{Lead: l, socket: socket, drop: drop, lost: serving.Done(), requests: make(chan *link, 1)}
	l.hold(o)
	l.shared.Publish(nil) // discards the value of an earlier tenure
	l.set(func(s *Status) {
		*s = Status{Leads: true, Name: l.o.Name, Since: l.o.Clock.Now(), PreviousLeader: o.previousHolder()}
	})
	klog.FromContext(ctx).Info("This process leads on the node", "previousLeader", o.previousHolder())
	t := make(tenure)
	l.tenures.Publish(t)
	var standbys sync.WaitGroup
	standbys.Go(func() { o.accept(serving, &standbys) })

	to := o.follow(ctx)
	ended := l.endTenure(t)
	if to != nil {
		o.handOver(ctx, to, ended)
	}
	ending := ctx.Err() != nil
	if ending {
		select {
		case <-ended:
		case <-o.lost:
		case <-l.o.Clock.After(exitTimeout):
		}
	}
	l.hold(nil)
	l.received.Publish(nil) // the value is older than this process's own decisions
	l.set(func(s *Status) { *s = Status{} })
	if !ending {
		klog.FromContext(ctx).Info("This process does not lead any more")
	}
	o.release(ended)
	_ = socket.Close()
	drop() // ends the connections
	standbys.Wait()
}

// hold sets the leadership of this process; nil means no lead.
func (l *Lead) hold(o *leadership) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leadership = o
}

// release lets other processes change the hardware once all tasks and hardware changes of the
// tenure have ended. It waits only briefly, and may be called again.
func (o *leadership) release(ended <-chan struct{}) {
	released := make(chan struct{})
	go func() {
		defer close(released)
		for <-ended; o.o.Busy(); <-o.o.Clock.After(tick) {
		}
		o.socket.share.Close()
	}()
	select {
	case <-released:
	case <-o.o.Clock.After(retryInterval):
	}
}

// previousHolder returns the name of the previous leader while that process may still change
// hardware, otherwise an empty string.
func (o *leadership) previousHolder() string {
	if !o.socket.share.Others() {
		return ""
	}
	return cmp.Or(o.previous, "an earlier process") // the name is unknown
}

// follow waits until this process loses the lead, ctx ends, or a standby asks for the lead. Then it
// returns the link to the standby.
func (o *leadership) follow(ctx context.Context) (to *link) {
	for {
		var due <-chan time.Time
		if o.statuses.Value().PreviousLeader != "" {
			due = o.o.Clock.After(tick)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-o.lost:
			return nil
		case <-due:
			o.set(func(s *Status) { s.PreviousLeader = o.previousHolder() })
		case to = <-o.requests:
			return to
		}
	}
}

// handOver waits for the tasks of the tenure, and then for a standby to take the lead. If the
// standby fails to, any process may take the lead.
func (o *leadership) handOver(ctx context.Context, to *link, ended <-chan struct{}) {
	klog.FromContext(ctx).Info("Handing the lead over to a process that started later")
	select {
	case <-ended:
	case <-o.o.Clock.After(handOverTimeout):
	case <-to.ended:
		return
	case <-o.lost:
		return
	case <-ctx.Done():
		return
	}
	o.release(ended)
	to.sendAside(message{Yours: true, PreviousLeader: o.statuses.Value().PreviousLeader})
	select {
	case <-o.lost:
	case <-to.ended:
	case <-o.o.Clock.After(maxMissedTicks * tick):
	case <-ctx.Done():
	}
}

// accept serves standbys until the socket is closed.
func (o *leadership) accept(ctx context.Context, standbys *sync.WaitGroup) {
	for {
		conn, err := o.socket.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // too many open files, for instance
			o.sleep(ctx, retryInterval)
			continue
		}
		standbys.Go(func() { o.serve(newLink(ctx, conn)) })
	}
}

// serve sends the published values to a standby and answers its messages until the connection ends.
func (o *leadership) serve(standby *link) {
	o.set(func(s *Status) { s.Standbys++ })
	var sending sync.WaitGroup
	sending.Go(func() {
		standby.send(message{Name: o.o.Name, Token: o.o.Token, Since: o.statuses.Value().Since})
		for {
			value, changed := o.shared.Latest()
			if value != nil {
				standby.send(message{Shared: value})
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
			case o.requests <- standby:
			default: // another standby asked first
			}
		}
	}
	sending.Wait()
	o.set(func(s *Status) { s.Standbys = max(0, s.Standbys-1) })
	_ = o.Check() // the standby may have closed the connection because it leads now
}
