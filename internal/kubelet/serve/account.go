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
	// checkSoon is the time between sending a list and comparing the kubelet's
	// account with it. The kubelet processes a list within milliseconds, and a
	// second leaves room for a busy node.
	checkSoon = time.Second
	// checkLater is the longest pause between two comparisons. Each pause is twice
	// as long as the previous pause.
	checkLater = 30 * time.Second
	// askAgain is the first pause after a failed question or a differing account.
	askAgain = 100 * time.Millisecond
	// accountTimeout limits one question about the kubelet's account.
	accountTimeout = 2 * time.Second
	// differsFor is how long the account must differ before the difference counts.
	differsFor = time.Second
	// suspectFor is the greatest age of another program's socket at which the
	// program counts as the cause of a difference.
	suspectFor = time.Minute
	// endsWithin is how long after its socket another program may end its stream.
	endsWithin = 10 * time.Second
	// disputeFirst and disputeMost are the shortest and the longest time between
	// two registrations caused by a difference.
	disputeFirst = 10 * time.Second
	disputeMost  = 5 * time.Minute
)

// An Accountant reads the kubelet's own account of the devices of this node.
type Accountant interface {
	// Allocatable returns the IDs of the devices that the kubelet considers
	// healthy, by resource.
	Allocatable(ctx context.Context) (map[string][]string, error)
	// Held returns the devices held by pods, according to the kubelet. The question
	// to the kubelet begins after the call.
	Held(ctx context.Context) ([]kubelet.HeldDevice, error)
	// Allocating is called when the kubelet begins a call that allocates devices.
	// The returned function is called at the end of that call. more says that a
	// call of Allocate follows. Held must not ask the kubelet between the two. Both
	// return at once.
	Allocating() (ended func(more bool))
}

// disputes limits how often a resource registers again because the kubelet's
// account differs from the list. A new registration does not end every difference.
type disputes struct {
	next time.Time     // no earlier
	wait time.Duration // between the last one and next
}

// register reports whether to register again now, and otherwise how long to wait.
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

// A comparison is the knowledge of a registration from comparing the kubelet's
// account with its list.
type comparison struct {
	agreed    bool      // the two have been the same at least once
	agreedNow bool      // they have been the same since the list was sent
	since     time.Time // when they began to differ; zero if they do not
	// the sockets of other programs, with the times when they appeared; zero for a
	// socket older than the registration
	otherPlugins map[kubelet.Socket]time.Time
	// when a program that appeared after the registration was found to have ended;
	// zero if none was
	otherEnded  time.Time
	agreedSince bool                            // the two were the same after that
	lastAgreed  *pluginapi.ListAndWatchResponse // the list at the last comparison in which the two were the same
	suspects    []string                        // sockets of other programs that may be the reason of the difference

	last     *pluginapi.ListAndWatchResponse // the list that was sent last
	lastAt   time.Time                       // when that was seen
	repeated uint64                          // the request to send the list again that was met last
	timer    clock.Timer                     // ends the pause
	pace     time.Duration                   // the pause after an account that is the same
	retry    time.Duration                   // the pause after a question that failed
}

// next sets the pause until the next comparison, in place of the current pause.
func (c *comparison) next(pause time.Duration) {
	select { // a timer that has expired meanwhile
	case <-c.timer.C():
	default:
	}
	c.timer.Reset(pause)
}

// checkAccount compares the kubelet's account with the list repeatedly. It returns
// when ctx ends or a new registration is needed, and reports whether the two have
// ever been equal. A missing answer is no reason for a new registration.
//
// checkAccount never answers a difference by sending the list again: the kubelet
// may allocate devices through another server, and list and server must belong to
// the same process. While the cause of a difference is unknown, no list is sent,
// and a list is repeated only after a comparison. If another program registered
// later, the new registration waits until that program has ended.
func (l *registration) checkAccount(ctx context.Context, incarnation uint64) (agreed bool, err error) {
	c := &comparison{pace: checkSoon, retry: askAgain, timer: l.Clock.NewTimer(checkSoon),
		repeated: l.list.resend.Value()}
	defer c.timer.Stop()
	l.noteOtherPlugins(c)
	for {
		repeat, err := l.awaitComparison(ctx, c)
		if err != nil {
			return c.agreed, err
		}
		sent := c.last
		if silence := l.mute.Value(); sent == nil || silence == muteLaterProcess || silence == muteOtherPlugin {
			c.repeated = repeat
			c.next(checkSoon)
			continue
		}
		l.noteOtherPlugins(c) // the notice of a socket may be late
		pause, err := l.compare(ctx, incarnation, c, sent)
		if err != nil {
			return c.agreed, err
		}
		if repeat != c.repeated && l.mute.Value() == muteNone {
			l.resend.Publish(repeat)
			pause = checkSoon
		}
		c.pace, c.repeated = pause, repeat
		c.next(pause)
	}
}

// awaitComparison waits for the next comparison. It returns the latest request to
// send the list again.
func (l *registration) awaitComparison(ctx context.Context, c *comparison) (repeat uint64, err error) {
	for {
		sent, changed := l.sent.Latest()
		if sent != c.last {
			c.last, c.lastAt, c.pace, c.since, c.agreedNow = sent, l.Clock.Now(), checkSoon, time.Time{}, false
			l.endMuteForDifference()
			c.next(c.pace)
		}
		repeat, asked := l.list.resend.Latest()
		// the kubelet may still be taking the list in, and writes its checkpoint
		// then
		if l.Clock.Since(c.lastAt) < checkSoon {
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
			l.noteOtherPlugins(c)
			c.pace = stopDelay
			c.next(c.pace)
		case <-asked:
		case <-c.timer.C():
			return repeat, nil
		}
	}
}

// compare compares the account with the list that was sent. It returns the pause
// until the next comparison, or an error that ends this registration.
func (l *registration) compare(
	ctx context.Context, incarnation uint64, c *comparison, sent *pluginapi.ListAndWatchResponse,
) (pause time.Duration, err error) {
	allocatable, err := l.allocatable(ctx)
	switch {
	case err != nil:
		klog.FromContext(ctx).V(2).Info("Cannot compare the kubelet's account with the list", "reason", err.Error())
		if l.noteEnds(ctx, c); !c.otherEnded.IsZero() && !c.agreedSince {
			return 0, errOtherEnded // kubelet 1.37 goes by the list that it received last, 1.36 has stopped both
		}
		if !c.since.IsZero() && l.Clock.Since(c.since) >= differsFor && len(c.suspects) == 0 {
			l.endMuteForDifference() // it may be long before there is an answer, and withdrawals do not wait for that
		}
		pause, c.retry = c.retry, min(2*c.retry, checkLater)
		return pause, nil
	case l.sent.Value() != sent: // the account may be of one list or the other
		return c.pace, nil
	case !sameIDs(allocatable, healthyIDs(sent)):
		return l.differs(ctx, incarnation, c, allocatable, healthyIDs(sent))
	}
	// After a list, the kubelet 1.36 counts its devices although it has stopped
	// both servers.
	if l.noteEnds(ctx, c); sent != c.lastAgreed && !c.otherEnded.IsZero() && l.Clock.Since(c.otherEnded) <= endsWithin {
		return 0, errOtherEnded
	}
	c.agreed, c.agreedNow, c.agreedSince, c.since, c.lastAgreed, c.retry = true, true, true, time.Time{}, sent, askAgain
	l.reportDifference("")
	l.endMuteForDifference()
	return min(2*c.pace, checkLater), nil
}

// endMuteForDifference allows lists again after a difference.
func (l *registration) endMuteForDifference() {
	if l.mute.Value() == muteAccountDiffers {
		l.mute.Publish(muteNone)
	}
}

// noteOtherPlugins records the sockets of other programs.
func (l *registration) noteOtherPlugins(c *comparison) {
	now, before := l.Clock.Now(), c.otherPlugins
	c.otherPlugins = map[kubelet.Socket]time.Time{}
	for _, socket := range l.Registrar.Peers(l.list.name).OtherPlugins {
		came, known := before[socket]
		if !known && before != nil {
			came = now
		}
		c.otherPlugins[socket] = came
	}
	for socket, came := range before {
		if _, there := c.otherPlugins[socket]; !there && !came.IsZero() {
			c.otherEnded, c.agreedSince = now, false
		}
	}
}

// noteEnds records other programs whose sockets refuse connections.
func (l *registration) noteEnds(ctx context.Context, c *comparison) {
	for socket, came := range c.otherPlugins {
		if !came.IsZero() && l.Registrar.Refuses(ctx, socket.Name) {
			c.otherPlugins[socket], c.otherEnded, c.agreedSince = time.Time{}, l.Clock.Now(), false
		}
	}
}

// differs decides what to do about a difference between the account and the list.
// It returns the pause until the next question, or an error that ends this
// registration.
func (l *registration) differs(ctx context.Context, incarnation uint64, c *comparison,
	allocatable, list []string) (time.Duration, error) {
	now := l.Clock.Now()
	difference := fmt.Sprintf("the kubelet counts %d healthy devices, and the list has %d", len(allocatable), len(list))
	l.reportDifference(difference)
	if c.since.IsZero() {
		klog.FromContext(ctx).Info("The kubelet's account differs from the list", "kubelet", len(allocatable),
			"list", len(list))
		if l.mute.Value() == muteNone {
			l.mute.Publish(muteAccountDiffers)
		}
		c.since, c.suspects, c.retry = now, nil, askAgain
		l.noteOtherPlugins(c) // a socket that came while the kubelet was asked
		for socket, came := range c.otherPlugins {
			if !came.IsZero() && now.Sub(came) <= suspectFor {
				c.suspects = append(c.suspects, socket.Name)
			}
		}
	}
	if len(allocatable) == 0 && c.agreedNow {
		// Another server has ended, and the kubelet 1.36 has stopped the endpoint
		// in use. A kubelet that has not counted this list yet may still be
		// processing it.
		return 0, errDisagrees
	}
	if lasted := now.Sub(c.since); lasted < differsFor {
		return min(max(askAgain, lasted), differsFor-lasted), nil
	}
	if len(c.suspects) > 0 {
		l.mute.Publish(muteOtherPlugin)
		l.report(PhaseOtherPlugin)
		klog.FromContext(ctx).Info("Sending no more lists: another program has registered the resource",
			"sockets", slices.Sorted(slices.Values(c.suspects)))
		if err := l.awaitEnd(ctx, incarnation, c.suspects, nil); err != nil {
			return 0, err
		}
		return 0, errOtherEnded
	}
	wait, ok := l.previous.disputes.register(now)
	if ok {
		return 0, errDisagrees
	}
	l.endMuteForDifference()
	l.reportDifference(difference + "; registering again did not end that, and is tried again at " +
		now.Add(wait).UTC().Format(time.RFC3339))
	return min(wait, checkLater), nil
}

func (l *registration) allocatable(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	all, err := l.Accountant.Allocatable(ctx)
	return all[l.list.name], err
}

// sameIDs reports whether a and b have the same IDs, ignoring repetitions. It may
// reorder both.
func sameIDs(a, b []string) bool {
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(slices.Compact(a), slices.Compact(b))
}
