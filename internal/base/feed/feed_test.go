package feed_test

import (
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
)

func TestReadersSeeTheNewestValueLast(t *testing.T) {
	const readers, last = 8, 10_000
	f := feed.New(0)
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			for seen := -1; seen != last; {
				value, changed := f.Latest()
				if value < seen {
					t.Errorf("read %d after %d", value, seen)
					return
				}
				seen = value
				if seen != last {
					<-changed
				}
			}
		})
	}
	for i := 1; i <= last; i++ {
		f.Publish(i)
	}
	wg.Wait()
}

func TestLatestIsQuietUntilTheNextPublish(t *testing.T) {
	var f feed.Feed[string]
	value, changed := f.Latest()
	if value != "" {
		t.Fatalf("zero Feed holds %q", value)
	}
	select {
	case <-changed:
		t.Fatal("changed before anything was published")
	default:
	}
	f.Publish("a")
	<-changed
	for range 2 {
		read := make(chan string, 1)
		go func() { read <- f.Value() }()
		select {
		case got := <-read:
			if got != "a" {
				t.Fatalf("Value() = %q, want a", got)
			}
		case <-time.After(time.Minute):
			t.Fatal("Value() waits")
		}
	}
}
