package question_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/question"
)

// TestAnAnswerIsNotOlderThanItsQuestion: an account that is older than an Allocate names the pod
// before, and the device would count as free although the next pod holds it. Callers that came
// before the question was sent share its answer.
func TestAnAnswerIsNotOlderThanItsQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := question.New[int](clock.RealClock{}, 0, nil)
		put := 0
		ask := func() int {
			answer, err := q.Ask(t.Context(), func() (int, error) {
				put++
				number := put
				time.Sleep(time.Second)
				return number, nil
			})
			if err != nil {
				t.Errorf("Ask() = %v", err)
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
		begins := true
		q := question.New[int](clock.RealClock{}, 0, func(ctx context.Context) error {
			if begins {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		seven := func() (int, error) { return 7, nil }
		answered, ended := make(chan struct{}), make(chan error, 1)
		failed := errors.New("no answer")
		go func() {
			_, err := q.Ask(t.Context(), func() (int, error) { <-answered; return 7, failed })
			ended <- err
		}()
		synctest.Wait()
		began := time.Now()
		_, err := q.Ask(t.Context(), seven)
		if took := time.Since(began); took != 10*time.Second || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", took, err)
		}
		gone, leave := context.WithCancel(t.Context())
		leave()
		if _, err := q.Ask(gone, seven); !errors.Is(err, context.Canceled) {
			t.Errorf("Ask() = %v while another caller asks, want the end of the context", err)
		}
		close(answered)
		if err := <-ended; !errors.Is(err, failed) {
			t.Errorf("Ask() = %v", err)
		}
		begins, began = false, time.Now()
		if _, err := q.Ask(t.Context(), seven); err == nil || time.Since(began) != 10*time.Second {
			t.Errorf("a question that may not be sent: %v after %v", err, time.Since(began))
		}
		begins = true
		if n, err := q.Ask(t.Context(), seven); n != 7 || err != nil {
			t.Errorf("Ask() = %d, %v", n, err)
		}
	})
}

// TestFreshAnswers: an answer is sent again until it is too old.
func TestFreshAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := question.New[int](clock.RealClock{}, time.Second, nil)
		sent := 0
		for i, want := range []int{1, 1, 2} {
			if got, err := q.Ask(t.Context(), func() (int, error) { sent++; return sent, nil }); got != want || err != nil {
				t.Errorf("answer %d is of question %d, %v, want %d", i, got, err, want)
			}
			time.Sleep(600 * time.Millisecond)
		}
	})
}
