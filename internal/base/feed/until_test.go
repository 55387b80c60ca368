package feed_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

// TestUntil: a wanted value ends the wait, even a value from before the wait; so does the end of
// the context.
func TestUntil(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		f := feed.New(1)
		awaited := make(chan bool, 1)
		await := func(wanted int) {
			awaited <- feed.Until(ctx, f, func(value int) bool { return value == wanted })
		}
		if await(1); !<-awaited {
			t.Error("the value that is there is not seen")
		}
		go await(3)
		synctest.Wait()
		f.Publish(2)
		synctest.Wait()
		if len(awaited) > 0 {
			t.Error("another value ended the wait")
		}
		f.Publish(3)
		if !<-awaited {
			t.Error("the value was not seen")
		}
		go await(4)
		cancel()
		if <-awaited {
			t.Error("a value that never came was seen")
		}
	})
}
