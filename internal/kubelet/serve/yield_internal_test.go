package serve

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// A shared directory is one in which a test has servers of later processes come, and at which it
// sees who registers.
type sharedDirectory struct {
	Registrar
	registered func()                                     // called in each Register
	asked      func(ctx context.Context, endpoint string) // called in each Register and Leave, if it is not nil
	called     func(resource string) error                // called in each CallEarlier; nil if there is no earlier server
	dir        string                                     // of endpoints
	err        error                                      // Register's
	listening  bool                                       // another plugin does
	lasts      bool                                       // no server ends
	neverLocks bool                                       // registrations cannot be locked

	mu      sync.Mutex // guards all following fields
	earlier []string
	later   []string
	foreign []kubelet.Socket
	refuses []string // sockets that refuse connections
	locks   int      // of registrations that are not unlocked
}

func (d *sharedDirectory) LockRegistrations(context.Context) (unlock func(), locked bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.locks++
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.locks--
	}), !d.neverLocks
}

func (d *sharedDirectory) locked() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.locks > 0
}

func (d *sharedDirectory) come(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.later = append(d.later, name)
}

// beside makes these sockets those of other programs.
func (d *sharedDirectory) beside(foreign ...kubelet.Socket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.foreign = foreign
}

// behind makes these sockets those of earlier processes.
func (d *sharedDirectory) behind(earlier ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.earlier = earlier
}

func (d *sharedDirectory) Peers(string) kubelet.Peers {
	d.mu.Lock()
	defer d.mu.Unlock()
	return kubelet.Peers{Earlier: slices.Clone(d.earlier), Later: slices.Clone(d.later),
		OtherPlugins: slices.Clone(d.foreign)}
}

func (d *sharedDirectory) Refuses(_ context.Context, name string) bool {
	return slices.Contains(d.refuses, name)
}
func (d *sharedDirectory) AwaitEnd(ctx context.Context, _ string) error {
	if d.lasts {
		<-ctx.Done()
	}
	return ctx.Err()
}

func (d *sharedDirectory) Listening(context.Context) []string {
	if d.listening {
		return []string{"another.sock"}
	}
	return nil
}

func (d *sharedDirectory) CallEarlier(
	_ context.Context, resource string, _ func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	if d.called == nil {
		return fs.ErrNotExist
	}
	return d.called(resource)
}

// alone returns the service of a life beside which no other server is. Its Registrar, if it has
// none, knows of none.
func alone(l *registration) *service {
	if l.Registrar == nil {
		l.Registrar = &sharedDirectory{}
	}
	return newService(l, klog.Background())
}

func (d *sharedDirectory) NewEndpoint(string) string { return filepath.Join(d.dir, "e.sock") }

func (d *sharedDirectory) Detach(ctx context.Context, _ uint64, _ string) error {
	d.asked(ctx, "")
	return d.err
}

func (d *sharedDirectory) Register(ctx context.Context, _ uint64, _, endpoint string,
	_ *pluginapi.DevicePluginOptions) error {
	if !d.locked() {
		return errors.New("registrations are not locked")
	}
	if d.asked != nil {
		d.asked(ctx, endpoint)
		return d.err
	}
	d.registered()
	return d.err
}

// A server that may send becomes silent for one later server. One that is silent for another reason
// stays so for that reason.
func TestMaySend(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before mute
		later  []string
		want   mute
	}{
		"nobody else":                        {muteNone, nil, muteNone},
		"one later":                          {muteNone, []string{"a"}, muteLaterProcess},
		"one that has ended":                 {muteNone, []string{"ended"}, muteNone},
		"one later, and the account differs": {muteAccountDiffers, []string{"a"}, muteAccountDiffers},
		"the account differs":                {muteAccountDiffers, nil, muteAccountDiffers},
	} {
		l := &registration{Collaborators: Collaborators{Registrar: &sharedDirectory{later: tt.later}},
			list: newList(gpuName), previous: &previous{}}
		l.previous.noteEnd("ended")
		l.mute.Publish(tt.before)
		if may, _ := l.maySend(); may != (tt.want == muteNone) || l.mute.Value() != tt.want {
			t.Errorf("%s: may send %v, silence %v, want %v", name, may, l.mute.Value(), tt.want)
		}
	}
}

// A new kubelet has removed the sockets of both. The later server gets a second to come back, and
// no more is waited once it is there.
func TestTheLaterServerMayReturnFirst(t *testing.T) {
	const never = -1
	for name, tt := range map[string]struct{ comes, ends, want time.Duration }{
		"it was there all the time":   {comes: 0, ends: never, want: 0},
		"it returns":                  {comes: time.Second / 2, ends: never, want: time.Second / 2},
		"it does not return":          {comes: never, ends: never, want: returnTimeout},
		"the daemon ends before that": {comes: never, ends: time.Second / 4, want: time.Second / 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				directory := &sharedDirectory{}
				sockets := feed.New([]string(nil))
				come := func() { directory.come("later.sock"); sockets.Publish(nil) }
				if tt.comes == 0 {
					come()
				} else if tt.comes != never {
					time.AfterFunc(tt.comes/2, func() { sockets.Publish(nil) }) // another socket
					time.AfterFunc(tt.comes, come)
				}
				if tt.ends != never {
					time.AfterFunc(tt.ends, cancel)
				}
				l := &registration{Collaborators: Collaborators{Registrar: directory, Sockets: sockets, Clock: clock.RealClock{}},
					list: newList(gpuName), previous: &previous{}}
				began := time.Now()
				l.awaitLater(ctx)
				if took := time.Since(began); took != tt.want {
					t.Errorf("waited for %v, want %v", took, tt.want)
				}
			})
		})
	}
}

// A later server that comes while this one registers may have registered before or after it. It
// comes after if a list was sent before, or if it still waits for the lock of registrations.
func TestALaterServerComesDuringTheRegistration(t *testing.T) {
	waits, ended := kubelet.LockTimeout, context.DeadlineExceeded
	for name, tt := range map[string]struct {
		before, during bool // when the later one comes
		sent           bool // a list was sent before that
		neverLocks     bool // others can register at the same time
		takes          time.Duration
		began, closed  bool // kubelet calls ListAndWatch; it closes its connection
		want           error
	}{
		"before":                      {before: true, want: errLaterCame},
		"during, it waits":            {during: true, began: true, takes: waits - 1, want: ended},
		"during, it waited too long":  {during: true, began: true, takes: waits, want: errLaterCame},
		"during, nothing is locked":   {during: true, began: true, neverLocks: true, want: errLaterCame},
		"after the first list":        {during: true, began: true, neverLocks: true, sent: true, want: ended},
		"after a list, after waiting": {during: true, began: true, takes: waits, sent: true, want: ended},
		"never":                       {sent: true, began: true, want: ended},
		"never, there is no stream":   {want: errNoStream},
		"never, kubelet hangs up":     {closed: true, want: errClosedEarly},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 2*registerTimeout)
				defer cancel()
				account := &notedAccount{answer: func(int) ([]string, error) { return []string{oneGPU().Devices[0].ID}, nil }}
				directory := &sharedDirectory{neverLocks: tt.neverLocks}
				l := &registration{Collaborators: Collaborators{Registrar: directory, Accountant: account, Clock: clock.RealClock{},
					Metrics: noMetrics{}}, list: newList(gpuName), previous: &previous{}, report: func(Phase) {},
					reportDifference: func(string) {}, adopt: func(context.Context) {},
					session: session{connections: newConnections()}}
				s := newService(l, klog.Background())
				registered := false
				directory.registered = func() {
					registered = true
					time.Sleep(tt.takes)
					if tt.sent {
						l.list.publish(listOf(oneGPU()), Options{})
						l.sent.Publish(l.list.views.Value().response)
					}
					if tt.during {
						directory.come("later.sock")
					}
					if tt.began {
						close(s.began)
					}
					if tt.closed {
						close(l.connections.kubeletClosedCh)
					}
				}
				if tt.before {
					directory.come("later.sock")
				}
				proven, err := l.stayRegistered(ctx, 1, "/d/e.sock", s)
				if !errors.Is(err, tt.want) || registered == tt.before || l.accepted != registered {
					t.Errorf("stayRegistered() = %v, want %v; registered %v, want %v", err, tt.want, registered, !tt.before)
				}
				if proven != errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("the registration has worked: %v", proven)
				}
			})
		})
	}
}

// TestUndisturbed: another server has ended, and kubelet goes by the list of this one all the time.
func TestUndisturbed(t *testing.T) {
	list := []string{oneGPU().Devices[0].ID}
	for name, tt := range map[string]struct {
		answers  [2][]string
		err      error
		unsent   bool
		empty    bool // the list that was sent
		restarts bool
		want     bool
		asked    int
	}{
		"it is":                   {answers: [2][]string{list, list}, want: true, asked: 2},
		"another list":            {answers: [2][]string{{"another"}, list}, asked: 1},
		"another list after that": {answers: [2][]string{list, {"another"}}, asked: 2},
		"nothing any more":        {answers: [2][]string{list, nil}, asked: 2},
		"no answer":               {answers: [2][]string{list, list}, err: errors.New("away"), asked: 1},
		"no list was sent":        {answers: [2][]string{list, list}, unsent: true, asked: 1},
		"no device was listed":    {empty: true, asked: 1},
		"kubelet restarts":        {answers: [2][]string{list, list}, restarts: true, asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				account := &notedAccount{answer: func(n int) ([]string, error) { return tt.answers[n-1], tt.err }}
				l := &registration{Collaborators: Collaborators{Accountant: account, Clock: clock.RealClock{},
					Incarnation: feed.New(uint64(1))},
					list: newList(gpuName)}
				if !tt.empty {
					l.list.publish(listOf(oneGPU()), Options{})
				}
				if !tt.unsent {
					l.sent.Publish(l.list.views.Value().response)
				}
				if tt.restarts {
					time.AfterFunc(checkSoon, func() { l.Incarnation.Publish(2) })
				}
				if got := l.undisturbed(t.Context(), 1); got != tt.want || len(account.asked) != tt.asked {
					t.Errorf("undisturbed() = %v after %d questions, want %v after %d", got, len(account.asked), tt.want, tt.asked)
				}
			})
		})
	}
}

// TestASilentServerAtANewKubelet: it remembers that a later one was there, and lets that one
// register first.
func TestASilentServerAtANewKubelet(t *testing.T) {
	t.Parallel()
	l := &registration{Collaborators: Collaborators{Registrar: &sharedDirectory{later: []string{"later.sock"}},
		Incarnation: feed.New(uint64(2))},
		list: newList(gpuName), previous: &previous{}, report: func(Phase) {}}
	if err := l.yield(t.Context(), 1); !errors.Is(err, errKubeletLeft) || !l.previous.yielded {
		t.Errorf("yield() = %v, yielded %v", err, l.previous.yielded)
	}
}

// TestTheTurnAfterASilence: the next life gives the later server time to return, once.
func TestTheTurnAfterASilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &registration{Collaborators: Collaborators{Registrar: &sharedDirectory{}, Sockets: feed.New([]string(nil)),
			Clock: clock.RealClock{}},
			list: newList(gpuName), previous: &previous{yielded: true}}
		for _, want := range []time.Duration{returnTimeout, 0} {
			began := time.Now()
			if ended := l.awaitLaterEnds(t.Context(), 1); !ended || time.Since(began) != want {
				t.Errorf("awaitLaterEnds() = %v after %v, want %v", ended, time.Since(began), want)
			}
		}
	})
}

// TestTheTurnAfterALaterServer: kubelet up to 1.36 would stop a server that registers before
// kubelet has taken notice of the later one's end.
func TestTheTurnAfterALaterServer(t *testing.T) {
	for counted, want := range map[int]time.Duration{0: stopDelay, 2: 3 * stopDelay, 1000: stopTimeout} {
		synctest.Test(t, func(t *testing.T) {
			account := &notedAccount{answer: func(n int) ([]string, error) {
				if n > counted {
					return nil, nil
				}
				return []string{"GPU-0"}, nil
			}}
			l := &registration{Collaborators: Collaborators{Registrar: &sharedDirectory{later: []string{"later.sock"}},
				Accountant:  account,
				Incarnation: feed.New(uint64(1)), Clock: clock.RealClock{}},
				list: newList(gpuName), previous: &previous{}, report: func(Phase) {}}
			began := time.Now()
			if ended := l.awaitLaterEnds(t.Context(), 1); !ended || time.Since(began) != want {
				t.Errorf("counted %d times: awaitLaterEnds() = %v after %v, want true after %v", counted, ended, time.Since(began),
					want)
			}
		})
	}
}

// TestASilentServerThatMaySpeakAgain does so only if kubelet went by its list all the time, and was
// not made to forget another server.
func TestASilentServerThatMaySpeakAgain(t *testing.T) {
	list := []string{oneGPU().Devices[0].ID}
	for name, tt := range map[string]struct {
		counts           []string
		forgotten, comes bool // another one comes while kubelet's account is looked at
		takes            time.Duration
		want             error
	}{
		"kubelet kept it":              {counts: list, takes: stopDelay + checkSoon},
		"kubelet went by another list": {takes: stopDelay, want: errOtherEnded},
		"kubelet was made to forget":   {counts: list, forgotten: true, takes: stopDelay + checkSoon, want: errOtherEnded},
		"another one comes":            {counts: list, comes: true, takes: 2 * (stopDelay + checkSoon)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				directory := &sharedDirectory{later: []string{"later.sock"}}
				l := sentList(directory, &notedAccount{answer: func(n int) ([]string, error) {
					if n == 1 && tt.comes {
						directory.come("another.sock")
					}
					return slices.Clone(tt.counts), nil
				}})
				var phases []Phase
				l.report = func(p Phase) { phases = append(phases, p) }
				if tt.forgotten {
					l.previous.noteForgotten()
				}
				began := time.Now()
				err := l.yield(t.Context(), 1)
				want := []Phase{PhaseYielding}
				if tt.want == nil {
					want = append(want, PhaseServing)
				}
				if !errors.Is(err, tt.want) || !slices.Equal(phases, want) || (l.mute.Value() == muteNone) != (tt.want == nil) {
					t.Errorf("yield() = %v, want %v; phases %q, silence %v", err, tt.want, phases, l.mute.Value())
				}
				if took := time.Since(began); took != tt.takes {
					t.Errorf("it took %v, want %v", took, tt.takes)
				}
			})
		})
	}
}

// TestTheTurnThatNeverComes: kubelet leaves, or the process ends, while a later server serves.
func TestTheTurnThatNeverComes(t *testing.T) {
	t.Parallel()
	for _, left := range []bool{true, false} {
		directory := &sharedDirectory{later: []string{"later.sock"}, lasts: true}
		l := sentList(directory, emptyAccount{})
		var phases []Phase
		ctx, cancel := context.WithCancel(t.Context())
		l.report = func(p Phase) {
			phases = append(phases, p)
			if left {
				l.Incarnation.Publish(2)
			} else {
				cancel()
			}
		}
		if ended := l.awaitLaterEnds(ctx, 1); ended || l.previous.yielded != left ||
			!slices.Equal(phases, []Phase{PhaseYielding}) {
			t.Errorf("kubelet left %v: its ended %v, yielded %v, phases %q", left, ended, l.previous.yielded, phases)
		}
		cancel()
	}
}
