package serve

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
)

// These tests are inside because they measure pauses by the clock of a synctest bubble, in which no
// socket can be used. Package yield has the tables of the decisions.

// A laterDirectory has the sockets of later processes.
type laterDirectory struct {
	Registrar
	later func() []string
	lasts bool // no server ends
}

func (d laterDirectory) Peers(string) kubelet.Peers { return kubelet.Peers{Later: d.later()} }
func (d laterDirectory) AwaitEnd(ctx context.Context, _ string) error {
	if d.lasts {
		<-ctx.Done()
	}
	return ctx.Err()
}

// noPeers returns a directory without sockets of other processes.
func noPeers() laterDirectory { return laterDirectory{later: func() []string { return nil }} }

// muted returns a registration beside a later process.
func muted(a accountFunc, d laterDirectory) *registration {
	if d.later == nil {
		d.later = func() []string { return []string{"later.sock"} }
	}
	return &registration{Collaborators: Collaborators{Registrar: d, Accountant: a, Clock: clock.RealClock{},
		Incarnation: feed.New(uint64(1)), Sockets: feed.New([]string(nil))},
		list: newList(gpuName), previous: &previous{}, report: func(Phase) {}}
}

// A new kubelet has removed the sockets of both processes. The later server gets a second to return,
// once.
func TestLaterServerReturnsFirst(t *testing.T) {
	const never = time.Hour
	for name, tt := range map[string]struct{ returns, ends, want time.Duration }{
		"it was there all the time": {ends: never},
		"it returns":                {returns: time.Second / 2, ends: never, want: time.Second / 2},
		"it does not return":        {returns: never, ends: never, want: returnTimeout},
		"the daemon ends first":     {returns: never, ends: time.Second / 4, want: time.Second / 4},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tt.ends)
			defer cancel()
			began := time.Now()
			l := muted(nil, laterDirectory{later: func() []string {
				if time.Since(began) < tt.returns {
					return nil
				}
				return []string{"later.sock"}
			}})
			for _, at := range []time.Duration{tt.returns / 2, tt.returns} { // another socket, and its own
				time.AfterFunc(at, func() { l.Sockets.Publish(nil) })
			}
			l.awaitLater(ctx)
			if took := time.Since(began); took != tt.want {
				t.Errorf("%s: waited for %v, want %v", name, took, tt.want)
			}
		})
	}
}

// The kubelet up to 1.36 would stop a server that registers before the kubelet has noticed the end of
// the later process.
func TestRegistrationAfterLaterServer(t *testing.T) {
	for counted, want := range map[int]time.Duration{0: stopDelay, 2: 3 * stopDelay, 1000: stopTimeout} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			l := muted(func() ([]string, error) {
				if asked++; asked > counted {
					return nil, nil
				}
				return []string{"GPU-0"}, nil
			}, laterDirectory{})
			began := time.Now()
			if ended := l.awaitLaterEnds(t.Context(), 1); !ended || time.Since(began) != want {
				t.Errorf("counted %d times: awaitLaterEnds() = %v after %v, want %v", counted, ended, time.Since(began), want)
			}
		})
	}
}

// The kubelet leaves, or the process ends, while a later server serves. The next registration remembers
// the later server only at a new kubelet.
func TestEndBesideLaterServer(t *testing.T) {
	t.Parallel()
	for _, left := range []bool{true, false} {
		l := muted(nil, laterDirectory{lasts: true})
		ctx, cancel := context.WithCancel(t.Context())
		l.report = func(p Phase) {
			if p == PhaseYielding && left {
				l.Incarnation.Publish(2)
			} else {
				cancel()
			}
		}
		if ended := l.awaitLaterEnds(ctx, 1); ended || l.previous.yielded != left {
			t.Errorf("the kubelet left %v: ended %v, yielded %v", left, ended, l.previous.yielded)
		}
		if err := l.yield(ctx, 1); err == nil || !l.previous.yielded || errors.Is(err, errKubeletLeft) != left {
			t.Errorf("the kubelet left %v: yield() = %v, yielded %v", left, err, l.previous.yielded)
		}
		cancel()
	}
}

// Another server has ended, and the kubelet uses the list of this one all the time.
func TestUndisturbed(t *testing.T) {
	list := []string{oneGPU().Devices[0].ID}
	for name, tt := range map[string]struct {
		answers                 [2][]string
		fails, unsent, restarts bool
		want                    bool
		asked                   int
	}{
		"it is":                   {answers: [2][]string{list, list}, want: true, asked: 2},
		"another list":            {answers: [2][]string{{"another"}, list}, asked: 1},
		"another list after that": {answers: [2][]string{list, {"another"}}, asked: 2},
		"nothing any more":        {answers: [2][]string{list, nil}, asked: 2},
		"no answer":               {answers: [2][]string{list, list}, fails: true, asked: 1},
		"no list was sent":        {answers: [2][]string{list, list}, unsent: true, asked: 1},
		"the kubelet restarts":    {answers: [2][]string{list, list}, restarts: true, asked: 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			l := muted(func() ([]string, error) {
				if asked++; tt.fails {
					return nil, errors.New("away")
				}
				return tt.answers[asked-1], nil
			}, laterDirectory{})
			if !tt.unsent {
				sendOneGPU(l)
			}
			if tt.restarts {
				time.AfterFunc(stopDelay+time.Millisecond, func() { l.Incarnation.Publish(2) })
			}
			if got := l.undisturbed(t.Context(), 1); got != tt.want || asked != tt.asked {
				t.Errorf("%s: undisturbed() = %v after %d questions, want %v after %d", name, got, asked, tt.want, tt.asked)
			}
		})
	}
}

// The next registration gives the later server time to return, once.
func TestTurnAfterYielding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := muted(nil, noPeers())
		l.previous.yielded = true
		for _, want := range []time.Duration{returnTimeout, 0} {
			began := time.Now()
			if ended := l.awaitLaterEnds(t.Context(), 1); !ended || time.Since(began) != want {
				t.Errorf("awaitLaterEnds() = %v after %v, want %v", ended, time.Since(began), want)
			}
		}
	})
}

// Each change of sockets is signalled once. The promise to register again is not kept while another
// program serves the resource.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		sockets := []kubelet.Socket{}
		l := muted(nil, noPeers())
		l.Registrar = otherPluginsDirectory{sockets: func() []kubelet.Socket { return sockets }}
		l.siblingChanged = make(chan struct{}, 1)
		l.reregisterPromised.Publish(true)
		var err error
		go func() { err = l.follow(ctx, t.TempDir(), 1, false) }()
		synctest.Wait()
		l.mute.Publish(yield.MuteOtherPlugin)
		sockets = []kubelet.Socket{{Name: "another.sock"}}
		l.Sockets.Publish(nil)
		synctest.Wait()
		<-l.siblingChanged
		l.Sockets.Publish(nil)
		synctest.Wait()
		if len(l.siblingChanged) > 0 {
			t.Error("one change is signalled twice")
		}
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("follow() = %v, want that it stays", err)
		}
	})
}

// An otherPluginsDirectory has the sockets of other programs.
type otherPluginsDirectory struct {
	Registrar
	sockets func() []kubelet.Socket
}

func (o otherPluginsDirectory) Peers(string) kubelet.Peers {
	return kubelet.Peers{OtherPlugins: o.sockets()}
}
