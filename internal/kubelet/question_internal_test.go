package kubelet

// These tests are inside: they are about seconds that pass while kubelet is asked, and the clock of
// a bubble stands still while a socket is read.

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
)

// TestAnAnswerIsNotOlderThanItsQuestion: an account that is older than an Allocate names the pod
// before, and the device would count as free although the next pod holds it. Callers that came
// before the question was sent share its answer.
func TestAnAnswerIsNotOlderThanItsQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQuestion[int](clock.RealClock{}, 0)
		put := 0
		ask := func() int {
			answer, err := q.ask(t.Context(), func() (int, error) {
				put++
				number := put
				time.Sleep(time.Second)
				return number, nil
			})
			if err != nil {
				t.Errorf("ask() = %v", err)
			}
			return answer
		}
		if first, second := ask(), ask(); first != 1 || second != 2 {
			t.Errorf("answers %d and %d, want those of questions 1 and 2", first, second)
		}
		var all sync.WaitGroup
		all.Go(func() {
			if got := ask(); got != 3 {
				t.Errorf("answer %d, want that of question 3", got)
			}
		})
		synctest.Wait()
		for range 20 { // they came after question 3 was sent
			all.Go(func() {
				if got := ask(); got != 4 {
					t.Errorf("answer %d, want that of question 4", got)
				}
			})
		}
		all.Wait()
	})
}

// TestWhoWaitsForItsTurn: for ten seconds, and then is told.
func TestWhoWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := newQuestion[int](clock.RealClock{}, 0)
		q.asking <- struct{}{}
		began := time.Now()
		_, err := q.ask(t.Context(), func() (int, error) { return 0, nil })
		if took := time.Since(began); took != askingTimeout || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", took, err)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if _, err := q.ask(ended, func() (int, error) { return 0, nil }); !errors.Is(err, context.Canceled) {
			t.Errorf("ask() = %v while another caller asks, want the end of the context", err)
		}
		<-q.asking
		failed := errors.New("no answer")
		if _, err := q.ask(t.Context(), func() (int, error) { return 7, failed }); !errors.Is(err, failed) {
			t.Errorf("ask() = %v", err)
		}
		q.begin = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		began = time.Now()
		if _, err := q.ask(t.Context(), func() (int, error) { return 7, nil }); err == nil ||
			time.Since(began) != askingTimeout {
			t.Errorf("a question that may not be sent: %v after %v", err, time.Since(began))
		}
		q.begin = nil
		if n, err := q.ask(t.Context(), func() (int, error) { return 7, nil }); n != 7 || err != nil {
			t.Errorf("ask() = %d, %v", n, err)
		}
	})
}
