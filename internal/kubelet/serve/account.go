package serve

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/listing"
)

const (
	// checkSoon is the time between sending a list and comparing the kubelet's account with it.
	checkSoon = listing.CompareSoon
	// accountTimeout limits one question about the kubelet's account.
	accountTimeout = 2 * time.Second
)

// An Accountant reads the kubelet's own account of the devices of this node.
type Accountant interface {
	// Allocatable returns the IDs of the devices that the kubelet considers healthy, by resource.
	Allocatable(ctx context.Context) (map[string][]string, error)
	// Held returns the devices held by pods, according to the kubelet. The question
	// to the kubelet begins after the call.
	Held(ctx context.Context) ([]kubelet.HeldDevice, error)
	// Allocating is called when the kubelet begins a call that allocates devices. The returned
	// function is called at the end of that call. more says that a call of Allocate follows. Held
	// must not ask the kubelet between the two. Both return at once.
	Allocating() (ended func(more bool))
}

// An accountCheck compares the kubelet's account with the list of a registration. Package listing
// decides what follows from a comparison.
type accountCheck struct {
	*listing.Comparison[kubelet.Socket]
	last     *pluginapi.ListAndWatchResponse // the list that was sent last
	lastAt   time.Time                       // when that was seen
	repeated uint64                          // the last request to send the list again that was carried out
	timer    clock.Timer                     // ends the pause
}

// next sets the pause until the next comparison, in place of the current pause.
func (c *accountCheck) next(pause time.Duration) {
	select { // a timer that has expired meanwhile
	case <-c.timer.C():
	default:
	}
	c.timer.Reset(pause)
}

// checkAccount compares the kubelet's account with the list repeatedly. It returns when ctx ends or
// a new registration is needed, and reports whether the two have ever been equal. A missing answer
// is no reason for a new registration.
//
// checkAccount never answers a difference by sending the list again: the kubelet may allocate
// devices through another server, and list and server must belong to the same process. While the
// cause of a difference is unknown, no list is sent, and a list is repeated only after a comparison.
// If another program registered later, the new registration waits until that program has ended.
func (l *registration) checkAccount(ctx context.Context, incarnation uint64) (agreed bool, err error) {
	c := &accountCheck{Comparison: listing.NewComparison[kubelet.Socket](&l.previous.disputes),
		timer: l.Clock.NewTimer(checkSoon), repeated: l.list.resend.Value()}
	defer c.timer.Stop()
	l.noteOtherPlugins(c)
	for {
		repeat, err := l.awaitComparison(ctx, c)
		if err != nil {
			return c.Agreed, err
		}
		sent := c.last
		if mute := l.mute.Value(); sent == nil || mute == yield.MuteLaterProcess || mute == yield.MuteOtherPlugin {
			c.repeated = repeat
			c.next(checkSoon)
			continue
		}
		l.noteOtherPlugins(c) // the notice of a socket may be late
		pause, err := l.compare(ctx, incarnation, c, sent)
		if err != nil {
			return c.Agreed, err
		}
		if repeat != c.repeated && l.mute.Value() == yield.MuteNone {
			l.resend.Publish(repeat)
			pause = checkSoon
			c.Pace = pause
		}
		c.repeated = repeat
		c.next(pause)
	}
}

// awaitComparison waits for the next comparison. It returns the latest request to send the list
// again.
func (l *registration) awaitComparison(ctx context.Context, c *accountCheck) (repeat uint64, err error) {
	for {
		sent, changed := l.sent.Latest()
		if sent != c.last {
			c.last, c.lastAt = sent, l.Clock.Now()
			c.Send()
			l.endMuteForDifference()
			c.next(checkSoon)
		}
		repeat, resendChanged := l.list.resend.Latest()
		// the kubelet may still be taking the list in, and writes its checkpoint then
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
			c.Pace = stopDelay
			c.next(stopDelay)
		case <-resendChanged:
		case <-c.timer.C():
			return repeat, nil
		}
	}
}

// compare compares the account with the list that was sent. It returns the pause until the next
// comparison, or an error that ends this registration.
func (l *registration) compare(
	ctx context.Context, incarnation uint64, c *accountCheck, sent *pluginapi.ListAndWatchResponse,
) (pause time.Duration, err error) {
	allocatable, err := l.allocatable(ctx)
	list := healthyIDs(sent)
	switch {
	case err == nil && l.sent.Value() != sent: // the account may be of one list or the other
		return checkSoon, nil
	case err != nil, listing.SameIDs(allocatable, list):
		c.SetEnds(func(socket kubelet.Socket) bool { return l.Registrar.Refuses(ctx, socket.Name) }, l.Clock.Now())
	case !c.Differs():
		l.noteOtherPlugins(c) // a socket that came while the kubelet was asked
	}
	var v listing.Verdict
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot compare the kubelet's account with the list", "reason", err.Error())
		v = c.Miss(l.Clock.Now())
	} else if v = c.Compare(allocatable, list, l.Clock.Now()); !errors.Is(v.End, errOtherEnded) {
		l.reportDifference(v.Difference)
	}
	if v.Began {
		klog.FromContext(ctx).Info("The kubelet's account differs from the list", "kubelet", len(allocatable),
			"list", len(list))
		if l.mute.Value() == yield.MuteNone {
			l.mute.Publish(yield.MuteAccountDiffers)
		}
	}
	if v.Resume {
		l.endMuteForDifference()
	}
	if v.AwaitOther {
		return 0, l.awaitOther(ctx, incarnation, c.Suspects)
	}
	return v.Pause, v.End
}

// awaitOther sends no lists until one of the other programs with these sockets has ended. It returns
// why this registration ends.
func (l *registration) awaitOther(ctx context.Context, incarnation uint64, others []kubelet.Socket) error {
	l.mute.Publish(yield.MuteOtherPlugin)
	l.report(PhaseOtherPlugin)
	var names []string
	for _, socket := range others {
		names = append(names, socket.Name)
	}
	slices.Sort(names)
	klog.FromContext(ctx).Info("Sending no more lists: another program has registered the resource", "sockets", names)
	return cmp.Or(l.awaitEnd(ctx, incarnation, names, nil), errOtherEnded)
}

// endMuteForDifference allows lists again after a difference.
func (l *registration) endMuteForDifference() {
	if l.mute.Value() == yield.MuteAccountDiffers {
		l.mute.Publish(yield.MuteNone)
	}
}

// noteOtherPlugins records the sockets of other programs.
func (l *registration) noteOtherPlugins(c *accountCheck) {
	c.SetOthers(l.Registrar.Peers(l.list.name).OtherPlugins, l.Clock.Now())
}

func (l *registration) allocatable(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, accountTimeout)
	defer cancel()
	all, err := l.Accountant.Allocatable(ctx)
	return all[l.list.name], err
}
