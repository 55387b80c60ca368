package plugin

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// noCalls is an account that is told of no call.
type noCalls struct{}

func (noCalls) Allocating() (ended func()) { return func() {} }

// emptyAccount is that of a kubelet that knows no device.
type emptyAccount struct{ noCalls }

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

// TestSocketsOfOtherPrograms: those that came after the registration count, and when they ended.
func TestSocketsOfOtherPrograms(t *testing.T) {
	t.Parallel()
	c := clocktesting.NewFakeClock(time.Now())
	d := &sharedDirectory{}
	l := &life{Collaborators: Collaborators{Registrar: d, Clock: c}, list: newList(gpuName, c)}
	var k comparison
	sees := func(what string, foreign []kubelet.Socket, came map[kubelet.Socket]time.Time, ended time.Time, passed bool) {
		t.Helper()
		c.Step(time.Second)
		d.foreign = foreign
		l.see(&k)
		if !maps.Equal(k.foreign, came) || !k.ended.Equal(ended) || k.passed != passed {
			t.Errorf("%s: %v, ended %v, passed %v; want %v, %v, %v", what, k.foreign, k.ended, k.passed, came, ended, passed)
		}
		k.passed = true
	}
	first, second := kubelet.Socket{Name: "first.sock"}, kubelet.Socket{Name: "second.sock"}
	always := map[kubelet.Socket]time.Time{first: {}}
	sees("one that was there before", []kubelet.Socket{first}, always, time.Time{}, false)
	both := map[kubelet.Socket]time.Time{first: {}, second: c.Now().Add(time.Second)}
	sees("one more", []kubelet.Socket{first, second}, both, time.Time{}, true)
	sees("the same", []kubelet.Socket{first, second}, both, time.Time{}, true)
	ended := c.Now().Add(time.Second)
	sees("it ends", []kubelet.Socket{first}, always, ended, false)
	sees("the one that was there before ends", nil, map[kubelet.Socket]time.Time{}, ended, true)

	sees("it comes again", []kubelet.Socket{first, second}, map[kubelet.Socket]time.Time{first: c.Now().Add(time.Second), second: c.Now().Add(time.Second)},
		ended, true)
	d.refuses = []string{second.Name}
	c.Step(time.Second)
	l.noteEnds(t.Context(), &k)
	if !k.ended.Equal(c.Now()) || k.passed || !k.foreign[second].IsZero() || k.foreign[first].IsZero() {
		t.Errorf("a socket that refuses: ended %v, passed %v, %v", k.ended, k.passed, k.foreign)
	}
	c.Step(time.Second)
	if l.noteEnds(t.Context(), &k); k.ended.Equal(c.Now()) {
		t.Error("it ended twice")
	}
}

// TestWhatADifferenceLeadsTo: it has to last for a second. Then a program that came within the last minute is the reason, and without
// one the resource is registered again, unless that was done a short time ago.
func TestWhatADifferenceLeadsTo(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	socket := kubelet.Socket{Name: "another.sock"}
	for name, tt := range map[string]struct {
		foreign  map[kubelet.Socket]time.Duration // how long ago they came; 0 for before the registration
		counted  bool
		disputed bool
		counts   []string
		pauses   []time.Duration // after 0, 300 and 800 ms; all of them are without an error
		last     error           // after a second
		silence  silence
	}{
		"another list":                  {counts: []string{"a"}, pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms}, last: errDisagrees, silence: forDifference},
		"nothing":                       {pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms}, last: errDisagrees, silence: forDifference},
		"nothing any more":              {counted: true, last: errDisagrees, silence: forDifference},
		"registered a short time ago":   {counts: []string{"a"}, disputed: true, pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms}, silence: speaks},
		"a program that has just come":  {map[kubelet.Socket]time.Duration{socket: suspectFor}, false, false, nil, []time.Duration{100 * ms, 300 * ms, 200 * ms}, errOtherEnded, forForeign},
		"a program that came long ago":  {map[kubelet.Socket]time.Duration{socket: suspectFor + 1}, false, false, nil, []time.Duration{100 * ms, 300 * ms, 200 * ms}, errDisagrees, forDifference},
		"a program that was there ever": {map[kubelet.Socket]time.Duration{socket: 0}, false, false, nil, []time.Duration{100 * ms, 300 * ms, 200 * ms}, errDisagrees, forDifference},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := clocktesting.NewFakeClock(time.Now())
			d := &sharedDirectory{}
			c := comparison{counted: tt.counted, foreign: map[kubelet.Socket]time.Time{}}
			for s, ago := range tt.foreign {
				d.foreign, c.foreign[s] = append(d.foreign, s), time.Time{}
				if ago > 0 {
					c.foreign[s] = clock.Now().Add(-ago)
				}
			}
			said := ""
			l := &life{Collaborators: Collaborators{Registrar: d, Clock: clock, Incarnation: feed.New(uint64(1))}, list: newList(gpuName, clock),
				past: &past{}, report: func(Phase) {}, compared: func(text string) { said = text }}
			if tt.disputed {
				l.past.disputes.register(clock.Now().Add(-disputeFirst / 2))
			}
			began := clock.Now()
			for i, at := range []time.Duration{0, 300 * ms, 800 * ms, differsFor} {
				clock.SetTime(began.Add(at))
				pause, err := l.differs(t.Context(), 1, &c, tt.counts, []string{"GPU-0"})
				if i < len(tt.pauses) && (err != nil || pause != tt.pauses[i]) {
					t.Errorf("after %v: a pause of %v, %v; want %v", at, pause, err, tt.pauses[i])
				}
				if i < len(tt.pauses) {
					continue
				}
				if want := disputeFirst/2 - differsFor; !errors.Is(err, tt.last) || tt.disputed && (pause != want || !strings.Contains(said, "is tried again at")) {
					t.Errorf("after %v: %v, a pause of %v; want %v; %s", at, err, pause, tt.last, said)
				}
				break
			}
			if got := l.silence.Value(); got != tt.silence {
				t.Errorf("silence %v, want %v", got, tt.silence)
			}
		})
	}
}

// TestGapsInTheEvidence: what tells that a pod may hold a device that no account names.
func TestGapsInTheEvidence(t *testing.T) {
	t.Parallel()
	incarnation := feed.New(uint64(1))
	var unreadable, failed error
	var meanwhile func()
	key := deviceKey{gpuName, "GPU-0"}
	a := accounts{Collaborators: Collaborators{Incarnation: incarnation, Clock: clock.RealClock{},
		Checkpoint: func() (kubelet.Checkpoint, error) {
			return kubelet.Checkpoint{Held: []kubelet.HeldDevice{{Resource: gpuName, ID: "GPU-0", Pod: "saved"}}}, unreadable
		},
		Accountant: heldAccount(func() ([]kubelet.HeldDevice, error) {
			if meanwhile != nil {
				meanwhile()
			}
			if failed != nil {
				return nil, failed
			}
			return []kubelet.HeldDevice{{Resource: gpuName, ID: "GPU-0", Pod: "told"}}, nil
		})}}
	away, damaged := errors.New("away"), errors.New("damaged")
	for _, step := range []struct {
		name               string
		kubelet            uint64
		failed, unreadable error
		meanwhile          func()
		gap                string
		want               holder
	}{
		{"PodResources has never answered", 1, away, nil, nil, "", holder{"saved", true}},
		{"it answers", 1, nil, nil, nil, "", holder{"told", false}},
		{"it answers no more", 1, away, nil, nil, "away", holder{"saved", true}},
		{"nor later", 1, away, nil, nil, "away", holder{"saved", true}},
		{"that of another kubelet has not answered", 2, away, nil, nil, "", holder{"saved", true}},
		{"the checkpoint is damaged", 2, nil, damaged, nil, "damaged", holder{"told", false}},
		{"kubelet restarts meanwhile", 2, nil, nil, func() { incarnation.Publish(3) }, "kubelet has just restarted", holder{"told", false}},
		{"no kubelet", 0, nil, damaged, nil, "kubelet does not run", holder{"told", false}},
	} {
		incarnation.Publish(step.kubelet)
		failed, unreadable, meanwhile = step.failed, step.unreadable, step.meanwhile
		e := a.read(t.Context())
		if e.gap != step.gap || e.kubelet != step.kubelet || e.held[key] != step.want || e.unreadable != (step.gap == "damaged") {
			t.Errorf("%s: %+v, want the gap %q and %+v", step.name, e, step.gap, step.want)
		}
	}
}

// A heldAccount says who holds devices.
type heldAccount func() ([]kubelet.HeldDevice, error)

func (heldAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (h heldAccount) Held(context.Context) ([]kubelet.HeldDevice, error)     { return h() }
func (heldAccount) Allocating() (ended func())                               { return func() {} }
