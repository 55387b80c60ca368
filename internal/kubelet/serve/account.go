package serve

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

const (
	// checkSoon is how long after a list was sent kubelet's account is compared with it: kubelet takes
	// a list in within milliseconds, and a second leaves room for a busy node.
	checkSoon = time.Second
	// checkLater is the longest pause between two comparisons. Each pause is twice the one before.
	checkLater = 30 * time.Second
	// askAgain is the first pause after a question that failed or an account that differs.
	askAgain = 100 * time.Millisecond
	// accountTimeout limits one question about kubelet's account.
	accountTimeout = 2 * time.Second
	// differsFor is how long the account has to differ before that counts.
	differsFor = time.Second
	// suspectFor is how old the socket of another program may be for the program to count as the
	// reason of a difference.
	suspectFor = time.Minute
	// endsWithin is how long after its socket another program may end its stream.
	endsWithin = 10 * time.Second
	// disputeFirst and disputeMost are the shortest and the longest time between two registrations
	// because of a difference.
	disputeFirst = 10 * time.Second
	disputeMost  = 5 * time.Minute
)

// An Accountant knows kubelet's own account of the devices of this node.
type Accountant interface {
	// Allocatable returns, for each resource, the IDs of the devices that kubelet holds for healthy.
	Allocatable(ctx context.Context) (map[string][]string, error)
	// Held returns the devices that pods hold, as kubelet says. Kubelet is asked after the call has
	// begun.
	Held(ctx context.Context) ([]kubelet.HeldDevice, error)
	// Allocating is called when kubelet begins a call that allocates devices. The function that it
	// returns is called when that call has ended; more says that a call of Allocate follows. Between
	// the two, kubelet must not be asked by Held. Both return at once.
	Allocating() (ended func(more bool))
}

// disputes limit how often a resource is registered again because kubelet's account differs from
// the list. A new registration does not end every difference.
type disputes struct {
	next time.Time     // no earlier
	wait time.Duration // between the last one and next
}

// register reports whether to register again now, and if not, how long to wait.
func (d *disputes) register(now time.Time) (wait time.Duration, ok bool) {
	if now.Before(d.next) {
		return d.next.Sub(now), false
	}
	if now.Sub(d.next) > d.wait { // the last one is long ago
		d.wait = disputeFirst
	} else {
		d.wait = min(2*d.wait, disputeMost)
	}
	d.next = now.Add(d.wait)
	return 0, true
}

// A comparison is what a life knows from comparing kubelet's account with its list.
type comparison struct {
	agreed  bool      // the two have been the same at least once
	counted bool      // they have been the same since the list was sent
	since   time.Time // when they began to differ; zero if they do not
	// of other programs → when they came; zero if that was before the registration
	foreign map[kubelet.Socket]time.Time
	// when another program that came after the registration was seen to have ended; zero if none was
	ended    time.Time
	passed   bool                            // the two were the same after that
	common   *pluginapi.ListAndWatchResponse // the list at the last comparison in which the two were the same
	suspects []string                        // sockets of other programs that may be the reason of the difference

	last     *pluginapi.ListAndWatchResponse // the list that was sent last
	lastAt   time.Time                       // when that was seen
	repeated uint64                          // the request to send the list again that was met last
	timer    clock.Timer                     // ends the pause
	pace     time.Duration                   // the pause after an account that is the same
	retry    time.Duration                   // the pause after a question that failed
}

// next sets the pause until the accounts are compared next. It replaces the pause that was set
// before.
func (c *comparison) next(pause time.Duration) {
	select { // a timer that has expired meanwhile
	case <-c.timer.C():
	default:
	}
	c.timer.Reset(pause)
}

// checkAccount compares kubelet's account with the list again and again. It returns when ctx ends
// or when a new life is needed, and reports whether the two have ever been the same. An account
// that does not answer is no reason for a new life.
//
// A difference is never answered by sending the list again: kubelet may allocate devices through
// another server, and list and server must not be of two processes. While the reason of a
// difference is not known, no list is sent, and a list that is only to be sent again is sent after
// a comparison. If another program registered after us, the new life waits until that has ended.
func (l *life) checkAccount(ctx context.Context, incarnation uint64) (agreed bool, err error) {
	c := &comparison{pace: checkSoon, retry: askAgain, timer: l.Clock.NewTimer(checkSoon), repeated: l.list.again.Value()}
	defer c.timer.Stop()
	l.see(c)
	for {
		repeat, err := l.awaitComparison(ctx, c)
		if err != nil {
			return c.agreed, err
		}
		sent := c.last
		if silence := l.silence.Value(); sent == nil || silence == forLater || silence == forForeign {
			c.repeated = repeat
			c.next(checkSoon)
			continue
		}
		l.see(c) // the notice of a socket may be late
		pause, err := l.compare(ctx, incarnation, c, sent)
		if err != nil {
			return c.agreed, err
		}
		if repeat != c.repeated && l.silence.Value() == speaks {
			l.again.Publish(repeat)
			pause = checkSoon
		}
		c.pace, c.repeated = pause, repeat
		c.next(pause)
	}
}

// awaitComparison waits until the account is to be compared with the list. It returns the latest
// request to send the list again.
func (l *life) awaitComparison(ctx context.Context, c *comparison) (repeat uint64, err error) {
	for {
		sent, changed := l.sent.Latest()
		if sent != c.last {
			c.last, c.lastAt, c.pace, c.since, c.counted = sent, l.Clock.Now(), checkSoon, time.Time{}, false
			l.explained()
			c.next(c.pace)
		}
		repeat, asked := l.list.again.Latest()
		if l.Clock.Since(c.lastAt) < checkSoon { // kubelet may still be taking the list in, and writes its checkpoint then
			c.repeated = repeat
		}
		if repeat != c.repeated {
			return repeat, nil
		}
		select {
		case <-ctx.Done():
			return repeat, context.Cause(ctx)
		case <-changed:
		case <-l.siblingChanged:
			l.see(c)
			c.pace = stopDelay
			c.next(c.pace)
		case <-asked:
		case <-c.timer.C():
			return repeat, nil
		}
	}
}

// compare compares the account with the list that was sent. It returns the pause until the next
// comparison, or an error with which this life ends.
func (l *life) compare(
	ctx context.Context, incarnation uint64, c *comparison, sent *pluginapi.ListAndWatchResponse,
) (pause time.Duration, err error) {
	allocatable, err := l.allocatable(ctx)
	switch {
	case err != nil:
		klog.FromContext(ctx).V(2).Info("Cannot compare kubelet's account with the list", "reason", err.Error())
		if l.noteEnds(ctx, c); !c.ended.IsZero() && !c.passed {
			return 0, errOtherEnded // kubelet 1.37 goes by the list that it received last, 1.36 has stopped both
		}
		if !c.since.IsZero() && l.Clock.Since(c.since) >= differsFor && len(c.suspects) == 0 {
			l.explained() // it may be long before there is an answer, and withdrawals do not wait for that
		}
		pause, c.retry = c.retry, min(2*c.retry, checkLater)
		return pause, nil
	case l.sent.Value() != sent: // the account may be of one list or the other
		return c.pace, nil
	case !sameIDs(allocatable, healthyIDs(sent)):
		return l.differs(ctx, incarnation, c, allocatable, healthyIDs(sent))
	}
	// After a list, kubelet 1.36 counts its devices although it has stopped both servers.
	if l.noteEnds(ctx, c); sent != c.common && !c.ended.IsZero() && l.Clock.Since(c.ended) <= endsWithin {
		return 0, errOtherEnded
	}
	c.agreed, c.counted, c.passed, c.since, c.common, c.retry = true, true, true, time.Time{}, sent, askAgain
	l.compared("")
	l.explained()
	return min(2*c.pace, checkLater), nil
}

// explained ends the silence for a difference.
func (l *life) explained() {
	if l.silence.Value() == forDifference {
		l.silence.Publish(speaks)
	}
}

// see takes note of the sockets of other programs.
func (l *life) see(c *comparison) {
	now, before := l.Clock.Now(), c.foreign
	c.foreign = map[kubelet.Socket]time.Time{}
	for _, socket := range l.Registrar.Rivals(l.list.name).Foreign {
		came, known := before[socket]
		if !known && before != nil {
			came = now
		}
		c.foreign[socket] = came
	}
	for socket, came := range before {
		if _, there := c.foreign[socket]; !there && !came.IsZero() {
			c.ended, c.passed = now, false
		}
	}
}

// noteEnds takes note of other programs whose sockets refuse connections.
func (l *life) noteEnds(ctx context.Context, c *comparison) {
	for socket, came := range c.foreign {
		if !came.IsZero() && l.Registrar.Refuses(ctx, socket.Name) {
			c.foreign[socket], c.ended, c.passed = time.Time{}, l.Clock.Now(), false
		}
	}
}

// differs decides what to do about an account that differs from the list: to ask again after the
// returned pause, or an error with which this life ends.
func (l *life) differs(ctx context.Context, incarnation uint64, c *comparison,
	allocatable, list []string) (time.Duration, error) {
	now := l.Clock.Now()
	difference := fmt.Sprintf("kubelet counts %d healthy devices, and the list has %d", len(allocatable), len(list))
	l.compared(difference)
	if c.since.IsZero() {
		klog.FromContext(ctx).Info("Kubelet's account differs from the list", "kubelet", len(allocatable), "list", len(list))
		if l.silence.Value() == speaks {
			l.silence.Publish(forDifference)
		}
		c.since, c.suspects, c.retry = now, nil, askAgain
		l.see(c) // a socket that came while kubelet was asked
		for socket, came := range c.foreign {
			if !came.IsZero() && now.Sub(came) <= suspectFor {
				c.suspects = append(c.suspects, socket.Name)
			}
		}
	}
	if len(allocatable) == 0 && c.counted {
		// Another server has ended, and kubelet 1.36 has stopped the endpoint that it went by. A kubelet
		// that has not counted this list yet may still be taking it in.
		return 0, errDisagrees
	}
	if lasted := now.Sub(c.since); lasted < differsFor {
		return min(max(askAgain, lasted), differsFor-lasted), nil
	}
	if len(c.suspects) > 0 {
		l.silence.Publish(forForeign)
		l.report(PhaseForeign)
		klog.FromContext(ctx).Info("Sending no more lists: another program has registered the resource",
			"sockets", slices.Sorted(slices.Values(c.suspects)))
		if err := l.awaitEnd(ctx, incarnation, c.suspects, nil); err != nil {
			return 0, err
		}
		return 0, errOtherEnded
	}
	wait, ok := l.past.disputes.register(now)
	if ok {
		return 0, errDisagrees
	}
	l.explained()
	l.compared(difference + "; registering again did not end that, and is tried again at " +
		now.Add(wait).UTC().Format(time.RFC3339))
	return min(wait, checkLater), nil
}

func (l *life) allocatable(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	all, err := l.Accountant.Allocatable(ctx)
	return all[l.list.name], err
}

// sameIDs reports whether a and b hold the same IDs, however often. It may reorder both.
func sameIDs(a, b []string) bool {
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(slices.Compact(a), slices.Compact(b))
}
