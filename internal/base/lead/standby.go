package lead

import (
	"cmp"
	"context"

	"k8s.io/klog/v2"
)

// standBy is connected to the process that leads with the socket that was seen. It reports true
// when this process may take the lead, and returns the link to the other one if that is there
// still.
func (l *Lead) standBy(ctx context.Context, seen identity) (may bool, former *link) {
	conn, there := dial(ctx, l.path)
	if !there {
		return true, nil
	}
	var k *link
	var in <-chan message
	if conn != nil {
		k = newLink(ctx, conn)
		in = k.in
	}
	if identify(l.path) != seen { // another process took the lead before the connection
		k.close()
		return false, nil
	}
	ticker := l.o.Clock.NewTicker(tick)
	defer ticker.Stop()
	var leader message
	sent, missed := false, 0
	for {
		wanted, changed := l.asked.Latest()
		if wanted && !sent && leader.Token != "" && leader.Token < l.o.Token && l.refused == nil {
			sent = l.ask(ctx, k)
		}
		select {
		case <-ctx.Done():
			return false, nil
		case <-changed:
		case <-l.refused:
			l.refused = nil
		case m, open := <-in:
			missed = 0
			switch {
			case !open:
				return false, nil
			case m.Yours:
				l.former = cmp.Or(m.Former, leader.Name)
				return true, k
			case m.Token != "":
				leader = m
				l.set(func(s *Status) { *s = Status{Name: m.Name, Since: m.Since, Later: m.Token > l.o.Token} })
			case m.Told != nil:
				l.heard.Publish(m.Told)
			}
		case <-ticker.C():
			if missed++; missed > silence {
				klog.FromContext(ctx).Info("The process that leads does not answer", "name", leader.Name)
				l.former = leader.Name
				return true, k
			}
			k.tell(message{Ping: true})
		}
	}
}

// ask asks for the lead. It reports false if this process could not take it, and the next try is
// later.
func (l *Lead) ask(ctx context.Context, k *link) bool {
	if err := l.try(ctx); err != nil {
		l.cannot(ctx, err)
		return false
	}
	k.send(message{Ask: true})
	return true
}
