package lead

import (
	"cmp"
	"context"

	"k8s.io/klog/v2"
)

// standBy stays connected to the leader with the current socket. It returns true, and any link to
// the previous leader, when this process may take the lead.
func (l *Lead) standBy(ctx context.Context, current identity) (may bool, previous *link) {
	conn, listening := dial(ctx, l.path)
	if !listening {
		return true, nil
	}
	var k *link
	var in <-chan message
	if conn != nil {
		k = newLink(ctx, conn)
		in = k.in
	}
	if identityOf(l.path) != current { // another process took the lead before the connection
		k.close()
		return false, nil
	}
	ticker := l.o.Clock.NewTicker(tick)
	defer ticker.Stop()
	var leader message
	sent, missed := false, 0
	for {
		wanted, changed := l.wantsLead.Latest()
		if wanted && !sent && leader.Token != "" && leader.Token < l.o.Token && l.retryAt == nil {
			sent = l.ask(ctx, k)
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-changed:
		case <-l.retryAt:
			l.retryAt = nil
		case m, open := <-in:
			missed = 0
			switch {
			case !open:
				return false, nil
			case m.Yours:
				l.previous = cmp.Or(m.PreviousLeader, leader.Name)
				return true, k
			case m.Token != "":
				leader = m
				l.set(func(s *Status) { *s = Status{Name: m.Name, Since: m.Since, Later: m.Token > l.o.Token} })
			case m.Shared != nil:
				l.received.Publish(m.Shared)
			}
		case <-ticker.C():
			if missed++; missed > maxMissedTicks {
				klog.FromContext(ctx).Info("The leading process does not answer", "name", leader.Name)
				l.previous = leader.Name
				return true, k
			}
			k.sendAside(message{Ping: true})
		}
	}
}

// ask asks for the lead. It returns false after a failure of this process; the next attempt is
// later.
func (l *Lead) ask(ctx context.Context, k *link) bool {
	if err := l.checkCanTake(ctx); err != nil {
		l.reportProblem(ctx, err)
		return false
	}
	k.send(message{Ask: true})
	return true
}
