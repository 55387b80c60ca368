package kubeapi_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// TestRunWithRetry: a step runs at once and after each change, one at a time; after an error it waits,
// whatever changes meanwhile, and what changed while it ran is not missed.
func TestRunWithRetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // guards the following variables
		began := time.Now()
		var calls []time.Duration
		var fails error
		// from has steps fail from now on with err, and returns when there were steps since the last
		// call.
		from := func(err error) []time.Duration {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			were := calls
			calls, began, fails = nil, time.Now(), err
			return were
		}
		one, other := feed.New(0), feed.New(0)
		wake := func() []<-chan struct{} {
			_, a := one.Latest()
			_, b := other.Latest()
			return []<-chan struct{}{a, b}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			kubeapi.RunWithRetry(ctx, clock.RealClock{}, "test", wake, func(context.Context) error {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, time.Since(began))
				if len(calls) == 2 {
					other.Publish(1) // while it runs
				}
				return fails
			})
		}()
		synctest.Wait()
		time.Sleep(time.Hour)
		one.Publish(1)
		got := from(failure(http.StatusTooManyRequests, time.Minute))
		if want := []time.Duration{0, time.Hour, time.Hour}; !slices.Equal(got, want) {
			t.Errorf("steps at %v, want %v", got, want)
		}
		for range 10 {
			one.Publish(1)
			time.Sleep(10 * time.Second)
		}
		got = from(errors.New("away"))
		if len(got) != 2 || got[0] != 0 || got[1] < time.Minute || got[1] > 75*time.Second {
			t.Errorf("steps at %v, want the second one after the minute that the API server asks for", got)
		}
		time.Sleep(24 * time.Hour)
		if n := len(from(nil)); n < 24*60/5 || n > 24*60 {
			t.Errorf("%d steps in a day of an API server that is away, want about one in 2.5 minutes", n)
		}
		time.Sleep(10 * time.Minute)
		from(nil)
		time.Sleep(24 * time.Hour)
		if got = from(nil); len(got) > 0 {
			t.Errorf("steps at %v, and nothing changed", got)
		}
		cancel()
		<-ended
	})
}

// A patient clock lets the times pass that are no longer than spread at once, and the others never.
type patient struct {
	clock.RealClock
	waits chan time.Duration // the others
}

const spread = 5 * time.Second

func (p patient) After(d time.Duration) <-chan time.Time {
	if d <= spread {
		return p.RealClock.After(0)
	}
	p.waits <- d
	return nil
}

// TestRetryAfterWatchRestored: when the watch works again after a long outage, a writer goes on
// soon, whatever its pause is; but not one that was told how long to wait, or that has no right.
func TestRetryAfterWatchRestored(t *testing.T) {
	t.Parallel()
	answers := func(code int, after time.Duration) func(*apiserver.Server) {
		return func(s *apiserver.Server) {
			s.SetFault(apiserver.Fault{Status: code, RetryAfter: after})
			s.DropWatches()
		}
	}
	heal := func(s *apiserver.Server) error { s.SetFault(apiserver.Fault{}); return nil }
	for name, tt := range map[string]struct {
		begin func(*apiserver.Server)
		end   func(*apiserver.Server) error
		soon  bool
	}{
		"away":              {(*apiserver.Server).Stop, (*apiserver.Server).Resume, true},
		"broken":            {answers(http.StatusInternalServerError, 0), heal, true},
		"asked to wait":     {answers(http.StatusServiceUnavailable, time.Minute), heal, false},
		"too many requests": {answers(http.StatusTooManyRequests, 0), heal, false},
		"forbidden":         {answers(http.StatusForbidden, 0), heal, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := start(t)
			client := watch(t, server, hurried{})
			awaitLabel(t, client, "a")
			tt.begin(server)
			awaitProblem(t, client, " ")
			done := feed.New(false)
			timer := patient{waits: make(chan time.Duration, 100)}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				kubeapi.RunWithRetry(ctx, timer, "test", func() []<-chan struct{} { return []<-chan struct{}{nil} },
					func(ctx context.Context) error {
						if _, err := client.PatchNode(ctx, kubeapi.Node{}, kubeapi.ConditionPatch{Type: "T", Status: "True"}); err != nil {
							return err
						}
						done.Publish(true)
						return nil
					})
			}()
			t.Cleanup(func() { cancel(); <-ended })
			select {
			case <-timer.waits:
			case <-time.After(patience):
				t.Fatal("the writer does not wait")
			}
			if err := tt.end(server); err != nil {
				t.Fatal(err)
			}
			awaitProblem(t, client, "")
			if tt.soon {
				poll.Latest(t, "the write", done, func(is bool) bool { return is })
				return
			}
			select {
			case <-ended:
			case <-time.After(200 * time.Millisecond): // the others take a millisecond
			}
			if done.Value() {
				t.Error("the writer went on before its time")
			}
		})
	}
}
