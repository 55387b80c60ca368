package feed

import (
	"context"
	"reflect"
	"time"
)

// WaitAny waits until a channel is closed, for example a channel of Latest, or ctx ends. It returns
// false if ctx has ended. A nil channel is never closed.
func WaitAny(ctx context.Context, changed ...<-chan struct{}) bool {
	cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}}
	for _, c := range changed {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)})
	}
	reflect.Select(cases)
	return ctx.Err() == nil
}

// Until waits until wanted returns true for the latest value of a feed, or ctx ends. It returns
// false if ctx ended first.
func Until[T any](ctx context.Context, f *Feed[T], wanted func(T) bool) bool {
	for {
		value, changed := f.Latest()
		if wanted(value) {
			return true
		}
		if !WaitAny(ctx, changed) {
			return false
		}
	}
}

// An Alarm wakes a loop at a set time. Only one goroutine may use an Alarm. The zero Alarm is not
// set.
type Alarm struct {
	rings Feed[struct{}]
	due   time.Time       // the time of the next ring
	until <-chan struct{} // after its end, no ring is due
}

// Rings returns a channel that is closed when the Alarm rings next. The channel may be taken before
// the Alarm is set.
func (a *Alarm) Rings() <-chan struct{} {
	_, rings := a.rings.Latest()
	return rings
}

// After sets the Alarm to ring after a time, unless an earlier ring is due. After the end of ctx
// the Alarm does not ring.
func (a *Alarm) After(ctx context.Context, d time.Duration) {
	now := time.Now()
	select {
	case <-a.until:
		a.due = time.Time{}
	default:
	}
	if due := now.Add(d); a.due.After(now) && !a.due.After(due) {
		return
	}
	a.due, a.until = now.Add(d), ctx.Done()
	over := time.After(d)
	go func() {
		select {
		case <-ctx.Done():
		case <-over:
			a.rings.Publish(struct{}{})
		}
	}()
}
