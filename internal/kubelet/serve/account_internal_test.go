package serve

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// noCalls is an account that is told of no call.
type noCalls struct{}

func (noCalls) Allocating() (ended func(bool)) { return func(bool) {} }

// emptyAccount is that of a kubelet that knows no device.
type emptyAccount struct{ noCalls }

func (emptyAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }
func (emptyAccount) Held(context.Context) ([]kubelet.HeldDevice, error)       { return nil, nil }

// noPeers is the directory of a node on which nobody else is.
type noPeers struct{ Registrar }

func (noPeers) Peers(string) kubelet.Peers { return kubelet.Peers{} }

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
			[]time.Duration{1000 * ms, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms,
				25600 * ms, 30000 * ms},
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
		"it always differs": { // nothing, and another device, in turn
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
				l := &registration{Collaborators: Collaborators{Registrar: noPeers{}, Accountant: account,
					Clock: clock.RealClock{}},
					list: newList(oneGPU().Name), previous: &previous{}, reportDifference: func(string) {}}
				l.list.publish(listOf(oneGPU()), Options{})
				l.sent.Publish(l.list.views.Value().response)
				_, err := l.checkAccount(ctx, 1)
				if differs := name == "it always differs"; differs != errors.Is(err, errDisagrees) {
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

// A list that is only sent again must not be kubelet's last one while another program serves the
// resource.
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
				ctx, cancel := context.WithTimeout(t.Context(), 21*time.Second+100*time.Millisecond)
				defer cancel()
				began, asked := time.Now(), time.Now().Add(20*time.Second)
				account := &notedAccount{answer: func(int) ([]string, error) {
					if time.Now().Before(asked) {
						return list, nil
					}
					return test.answers, test.err
				}}
				l := &registration{Collaborators: Collaborators{Registrar: noPeers{}, Accountant: account,
					Clock: clock.RealClock{}},
					list: newList(oneGPU().Name), previous: &previous{}, reportDifference: func(string) {}}
				l.list.publish(listOf(oneGPU()), Options{})
				l.sent.Publish(l.list.views.Value().response)
				// kubelet is taking the list in, and writes its checkpoint
				time.AfterFunc(checkSoon/2, func() { l.list.resend.Publish(1) })
				time.AfterFunc(time.Until(asked), func() { l.list.resend.Publish(2) })
				_, _ = l.checkAccount(ctx, 1)
				want := uint64(0)
				if test.again {
					want = 2
				}
				if again := l.resend.Value(); again != want || account.asked[0].Sub(began) != checkSoon {
					t.Errorf("sent again: %v, want %v; asked first after %v", again, want, account.asked[0].Sub(began))
				}
				if again := account.asked[len(account.asked)-1].Sub(asked); test.again && again != checkSoon {
					t.Errorf("asked %v after the list was sent again, want %v", again, checkSoon)
				}
				if differs := name == "it differs"; differs != (l.mute.Value() == muteAccountDiffers) {
					t.Errorf("silence %v while the account differs: %v", l.mute.Value(), differs)
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
	l := &registration{Collaborators: Collaborators{Registrar: d, Clock: c}, list: newList(gpuName)}
	var k comparison
	sees := func(what string, foreign []kubelet.Socket, came map[kubelet.Socket]time.Time, ended time.Time, passed bool) {
		t.Helper()
		c.Step(time.Second)
		d.foreign = foreign
		l.noteOtherPlugins(&k)
		if !maps.Equal(k.otherPlugins, came) || !k.otherEnded.Equal(ended) || k.agreedSince != passed {
			t.Errorf("%s: %v, ended %v, passed %v; want %v, %v, %v", what, k.otherPlugins, k.otherEnded, k.agreedSince, came,
				ended, passed)
		}
		k.agreedSince = true
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

	sees("it comes again", []kubelet.Socket{first, second},
		map[kubelet.Socket]time.Time{first: c.Now().Add(time.Second), second: c.Now().Add(time.Second)},
		ended, true)
	d.refuses = []string{second.Name}
	c.Step(time.Second)
	l.noteEnds(t.Context(), &k)
	if !k.otherEnded.Equal(c.Now()) || k.agreedSince || !k.otherPlugins[second].IsZero() ||
		k.otherPlugins[first].IsZero() {
		t.Errorf("a socket that refuses: ended %v, passed %v, %v", k.otherEnded, k.agreedSince, k.otherPlugins)
	}
	c.Step(time.Second)
	if l.noteEnds(t.Context(), &k); k.otherEnded.Equal(c.Now()) {
		t.Error("it ended twice")
	}
}

// TestWhatADifferenceLeadsTo: it has to last for a second. Then a program that came within the last
// minute is the reason, and without one the resource is registered again, unless that was done a
// short time ago.
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
		silence  mute
	}{
		"another list": {counts: []string{"a"}, pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms},
			last: errDisagrees, silence: muteAccountDiffers},
		"nothing": {pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms}, last: errDisagrees,
			silence: muteAccountDiffers},
		"nothing any more": {counted: true, last: errDisagrees, silence: muteAccountDiffers},
		"registered a short time ago": {counts: []string{"a"}, disputed: true,
			pauses: []time.Duration{100 * ms, 300 * ms, 200 * ms}, silence: muteNone},
		"a program that has just come": {map[kubelet.Socket]time.Duration{socket: suspectFor}, false, false, nil,
			[]time.Duration{100 * ms, 300 * ms, 200 * ms}, errOtherEnded, muteOtherPlugin},
		"a program that came long ago": {map[kubelet.Socket]time.Duration{socket: suspectFor + 1}, false, false, nil,
			[]time.Duration{100 * ms, 300 * ms, 200 * ms}, errDisagrees, muteAccountDiffers},
		"a program that was there ever": {map[kubelet.Socket]time.Duration{socket: 0}, false, false, nil,
			[]time.Duration{100 * ms, 300 * ms, 200 * ms}, errDisagrees, muteAccountDiffers},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := clocktesting.NewFakeClock(time.Now())
			d := &sharedDirectory{}
			c := comparison{agreedNow: tt.counted, otherPlugins: map[kubelet.Socket]time.Time{}}
			for s, ago := range tt.foreign {
				d.foreign, c.otherPlugins[s] = append(d.foreign, s), time.Time{}
				if ago > 0 {
					c.otherPlugins[s] = clock.Now().Add(-ago)
				}
			}
			said := ""
			l := &registration{Collaborators: Collaborators{Registrar: d, Clock: clock, Incarnation: feed.New(uint64(1))},
				list:     newList(gpuName),
				previous: &previous{}, report: func(Phase) {}, reportDifference: func(text string) { said = text }}
			if tt.disputed {
				l.previous.disputes.register(clock.Now().Add(-disputeFirst / 2))
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
				if want := disputeFirst/2 - differsFor; !errors.Is(err, tt.last) ||
					tt.disputed && (pause != want || !strings.Contains(said, "is tried again at")) {
					t.Errorf("after %v: %v, a pause of %v; want %v; %s", at, err, pause, tt.last, said)
				}
				break
			}
			if got := l.mute.Value(); got != tt.silence {
				t.Errorf("silence %v, want %v", got, tt.silence)
			}
		})
	}
}

func (heldAccount) Allocatable(context.Context) (map[string][]string, error) { return nil, nil }

// sentList returns a life whose list has one GPU, which was sent.
func sentList(d Registrar, a Accountant) *registration {
	l := &registration{Collaborators: Collaborators{Registrar: d, Accountant: a, Clock: clock.RealClock{},
		Incarnation: feed.New(uint64(1)),
		Sockets:     feed.New([]string(nil)), Metrics: noMetrics{}}, list: newList(oneGPU().Name),
		previous: &previous{}, report: func(Phase) {}, reportDifference: func(string) {},
		adopt:   func(context.Context) {},
		session: session{connections: newConnections(), siblingChanged: make(chan struct{}, 1)}}
	l.list.publish(listOf(oneGPU()), Options{})
	l.sent.Publish(l.list.views.Value().response)
	return l
}

// TestTheAccountAfterAnotherProgram: kubelet up to 1.36 has stopped both servers at its end, and
// counts the devices of a list that is sent afterwards all the same.
func TestTheAccountAfterAnotherProgram(t *testing.T) {
	const s = time.Second
	list := []string{oneGPU().Devices[0].ID}
	away := errors.New("away")
	for name, tt := range map[string]struct {
		ends  time.Duration // it comes after 2 s
		lists time.Duration // when another list is sent; 0: never
		fails time.Duration // from when on PodResources does not answer; 0: never
		want  error
	}{
		"no list is sent":                         {ends: 4 * s, want: context.DeadlineExceeded},
		"a list is sent after its end":            {ends: 4 * s, lists: 4*s + s/100, want: errOtherEnded},
		"a list is sent after a comparison":       {ends: 4 * s, lists: 5 * s, want: errOtherEnded},
		"a list is sent ten seconds later":        {ends: 4 * s, lists: 14 * s, want: context.DeadlineExceeded},
		"a list is sent beside it":                {ends: 20 * s, lists: 3 * s, want: context.DeadlineExceeded},
		"it ends, and nothing is answered":        {ends: 4 * s, fails: 3 * s, want: errOtherEnded},
		"it ends, is answered, and then no more":  {ends: 4 * s, fails: 6 * s, want: context.DeadlineExceeded},
		"it came and went before the next answer": {ends: 2*s + s/100, fails: 1500 * time.Millisecond, want: errOtherEnded},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 19*s)
				defer cancel()
				began := time.Now()
				account := &notedAccount{answer: func(int) ([]string, error) {
					if tt.fails > 0 && time.Since(began) >= tt.fails {
						return nil, away
					}
					return slices.Clone(list), nil
				}}
				d := &sharedDirectory{}
				l := sentList(d, account)
				is := func(foreign ...kubelet.Socket) func() {
					return func() { d.beside(foreign...); l.siblingChanged <- struct{}{} }
				}
				defer time.AfterFunc(2*s, is(kubelet.Socket{Name: "another.sock"})).Stop()
				defer time.AfterFunc(tt.ends, is()).Stop()
				if tt.lists > 0 {
					defer time.AfterFunc(tt.lists, func() {
						r := oneGPU()
						r.Devices[0].NUMANode++
						l.list.publish(listOf(r), Options{})
						l.sent.Publish(l.list.views.Value().response)
					}).Stop()
				}
				if agreed, err := l.checkAccount(ctx, 1); !agreed || !errors.Is(err, tt.want) {
					t.Errorf("checkAccount() = %v, %v after %v, want %v", agreed, err, time.Since(began), tt.want)
				}
			})
		})
	}
}

// TestASilentServerAsksNobody: what kubelet counts is not its list, and it has none to send again.
func TestASilentServerAsksNobody(t *testing.T) {
	for silent, asks := range map[mute]bool{muteNone: true, muteLaterProcess: false, muteOtherPlugin: false,
		muteAccountDiffers: true,
		muteReplaced:       true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			account := &notedAccount{answer: func(int) ([]string, error) { return []string{oneGPU().Devices[0].ID}, nil }}
			l := sentList(&sharedDirectory{}, account)
			l.mute.Publish(silent)
			if silent == muteAccountDiffers {
				time.AfterFunc(time.Millisecond, func() {
					if l.mute.Value() != muteNone { // a list was sent while the difference was found
						t.Error("it is silent after another list")
					}
				})
			}
			time.AfterFunc(5*time.Second, func() { l.list.resend.Publish(1) })
			if _, err := l.checkAccount(ctx, 1); !errors.Is(err, context.DeadlineExceeded) || (len(account.asked) > 0) != asks {
				t.Errorf("silence %d: asked %d times (%v)", silent, len(account.asked), err)
			}
			if again := l.resend.Value() == 1; again != (silent == muteNone || silent == muteAccountDiffers) {
				t.Errorf("silence %d: the list is sent again: %v", silent, again)
			}
		})
	}
}
