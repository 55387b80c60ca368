package plugin

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// emptyAccount is that of a kubelet that knows no device.
type emptyAccount struct{}

func (emptyAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (emptyAccount) Held(context.Context) ([]kubelet.HeldDevice, error)       { return nil, nil }

// noRivals is the directory of a node on which nobody else is.
type noRivals struct{ Registrar }

func (noRivals) Rivals(string) kubelet.Rivals { return kubelet.Rivals{} }

func TestTheAccountIsComparedWhilePlansThatSayTheSameKeepComing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r := oneGPU()
		l := &life{Collaborators: Collaborators{Registrar: noRivals{}, Accountant: emptyAccount{}, Clock: clock.RealClock{}}, list: newList(r.Name, clock.RealClock{}),
			past: &past{}, compared: func(string) {}}
		l.list.publish(r, Options{}, nil)
		l.sent.Publish(l.list.views.Value().response)
		var plans sync.WaitGroup
		plans.Go(func() {
			for ctx.Err() == nil {
				l.list.publish(r, Options{}, nil)
				select {
				case <-ctx.Done():
				case <-time.After(checkSoon / 2):
				}
			}
		})
		_, err := l.checkAccount(ctx, 1)
		if !errors.Is(err, errDisagrees) {
			t.Errorf("checkAccount() = %v, want %v", err, errDisagrees)
		}
		cancel()
		plans.Wait()
	})
}

// A noted account notes when it is asked, and answers the question of that number.
type notedAccount struct {
	emptyAccount
	answer func(n int) ([]string, error)
	asked  []time.Time
}

func (a *notedAccount) Allocatable(context.Context) (map[string][]string, error) {
	a.asked = append(a.asked, time.Now())
	ids, err := a.answer(len(a.asked))
	return map[string][]string{oneGPU().Name: ids}, err
}

func TestThePaceOfComparing(t *testing.T) {
	const ms = time.Millisecond
	list := []string{oneGPU().Devices[0].ID}
	refused := errors.New("rejected by rate limit")
	tests := map[string]struct {
		answer func(n int) ([]string, error)
		pauses []time.Duration
	}{
		"it agrees": {
			func(int) ([]string, error) { return list, nil },
			[]time.Duration{1000 * ms, 2000 * ms, 4000 * ms, 8000 * ms, 16000 * ms, 30000 * ms, 30000 * ms},
		},
		"it is never answered": {
			func(int) ([]string, error) { return nil, refused },
			[]time.Duration{1000 * ms, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms, 30000 * ms},
		},
		"it fails now and then": {
			func(n int) ([]string, error) {
				if n%2 == 1 {
					return nil, refused
				}
				return list, nil
			},
			[]time.Duration{1000 * ms, 100 * ms, 200 * ms, 100 * ms, 200 * ms, 100 * ms},
		},
		"it differs for good": { // nothing, and another device, in turn
			func(int) ([]string, error) { return []string{"another"}, nil },
			[]time.Duration{1000 * ms, 100 * ms, 100 * ms, 200 * ms, 400 * ms, 200 * ms},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				account := &notedAccount{answer: test.answer}
				l := &life{Collaborators: Collaborators{Registrar: noRivals{}, Accountant: account, Clock: clock.RealClock{}},
					list: newList(oneGPU().Name, clock.RealClock{}), past: &past{}, compared: func(string) {}}
				l.list.publish(oneGPU(), Options{}, nil)
				l.sent.Publish(l.list.views.Value().response)
				_, err := l.checkAccount(ctx, 1)
				if differs := name == "it differs for good"; differs != errors.Is(err, errDisagrees) {
					t.Errorf("checkAccount() = %v", err)
				}
				var pauses []time.Duration
				for _, at := range account.asked {
					pauses = append(pauses, at.Sub(began))
					began = at
				}
				if len(pauses) < len(test.pauses) || !slices.Equal(pauses[:len(test.pauses)], test.pauses) {
					t.Errorf("asked after pauses of %v, want %v", pauses, test.pauses)
				}
			})
		})
	}
}

// A kubelet that takes a long list in on a busy node counts nothing meanwhile.
func TestAKubeletThatIsStillTakingTheListInIsNotRegisteredWithAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		account := &notedAccount{answer: func(n int) ([]string, error) {
			if n > 2 { // the first answer is of the list before, which has no device
				return []string{oneGPU().Devices[0].ID}, nil
			}
			return nil, nil
		}}
		l := &life{Collaborators: Collaborators{Registrar: noRivals{}, Accountant: account, Clock: clock.RealClock{}},
			list: newList(oneGPU().Name, clock.RealClock{}), past: &past{}, compared: func(string) {}}
		l.sent.Publish(l.list.views.Value().response)
		time.AfterFunc(checkSoon+time.Millisecond, func() {
			l.list.publish(oneGPU(), Options{}, nil)
			l.sent.Publish(l.list.views.Value().response)
		})
		agreed, err := l.checkAccount(ctx, 1)
		if !agreed || !errors.Is(err, context.DeadlineExceeded) || len(account.asked) < 4 {
			t.Errorf("checkAccount() = %t, %v after %d questions", agreed, err, len(account.asked))
		}
	})
}

// A list that is only sent again must not be kubelet's last one while another program serves the resource.
func TestAListIsSentAgainOnlyWhereTheAccountAgrees(t *testing.T) {
	list := []string{oneGPU().Devices[0].ID}
	for name, test := range map[string]struct {
		answers []string
		err     error
		again   bool
	}{
		"it agrees":          {answers: list, again: true},
		"it differs":         {answers: []string{"another"}},
		"it is not answered": {err: errors.New("no PodResources here"), again: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second+500*time.Millisecond)
				defer cancel()
				asked := time.Now().Add(20 * time.Second)
				account := &notedAccount{answer: func(int) ([]string, error) {
					if time.Now().Before(asked) {
						return list, nil
					}
					return test.answers, test.err
				}}
				l := &life{Collaborators: Collaborators{Registrar: noRivals{}, Accountant: account, Clock: clock.RealClock{}},
					list: newList(oneGPU().Name, clock.RealClock{}), past: &past{}, compared: func(string) {}}
				l.list.publish(oneGPU(), Options{}, nil)
				l.sent.Publish(l.list.views.Value().response)
				time.AfterFunc(time.Until(asked), func() { l.list.again.Publish(1) })
				_, _ = l.checkAccount(ctx, 1)
				if again := l.again.Value() == 1; again != test.again {
					t.Errorf("sent again: %v, want %v", again, test.again)
				}
				if differs := name == "it differs"; differs != (l.silence.Value() == forDifference) {
					t.Errorf("silence %v while the account differs: %v", l.silence.Value(), differs)
				}
			})
		})
	}
}

func TestDisputes(t *testing.T) {
	var d disputes
	now := time.Now()
	for i, want := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
		want *= time.Second
		if wait, ok := d.register(now); !ok {
			t.Fatalf("difference %d waits for %v, want a new life at once", i, wait)
		}
		if wait, ok := d.register(now.Add(time.Second)); ok || wait != want-time.Second {
			t.Errorf("after new life %d: %v, %v; want a wait of %v", i, wait, ok, want-time.Second)
		}
		now = now.Add(want)
	}
	now = now.Add(disputeMost + time.Second)
	if _, ok := d.register(now); !ok || d.wait != disputeFirst {
		t.Errorf("a difference long after the last waits for %v, want %v again", d.wait, disputeFirst)
	}
}
