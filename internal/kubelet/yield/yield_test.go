package yield_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet/yield"
)

// The sockets of two processes, and their tokens.
const (
	later, laterToken = "gpu-device-plugin-gpu-000000-zzzzzzzzzzzz-1.sock", "zzzzzzzzzzzz"
	third, thirdToken = "gpu-device-plugin-gpu-000000-zzzzzzzzzzzy-1.sock", "zzzzzzzzzzzy"
)

func peers(later ...string) kubelet.Peers { return kubelet.Peers{Later: later} }

// serves is a server on which the kubelet of one client relies.
var serves = yield.Server{Streams: true, OneClient: true, Listed: true}

// with returns serves after a change.
func with(change func(*yield.Server)) yield.Server {
	s := serves
	change(&s)
	return s
}

// TestObservations has one row for each event, in the order of a roll-out: which later processes may
// serve the resource, and what the server does that is mute for them.
func TestObservations(t *testing.T) {
	t.Parallel()
	var s yield.State
	announce := func(token string) { s.Answer(token, serves) }
	for _, row := range []struct {
		event     string
		happens   func()
		peers     kubelet.Peers
		running   []string
		account   yield.Account
		step      yield.Step
		forgotten bool
		yielded   bool
		leaving   int
	}{
		{event: "no other process", step: yield.Compare},
		{event: "no other process, the kubelet kept the list", account: yield.AccountKept, step: yield.Resume},
		{event: "no other process, the kubelet uses another list", account: yield.AccountChanged, step: yield.RegisterAgain},
		{event: "the socket of a later process", peers: peers(later), running: []string{later}, account: yield.AccountKept,
			step: yield.AwaitEnd},
		{event: "the sockets of two", peers: peers(later, third), running: []string{later, third}, step: yield.AwaitEnd},
		{event: "one has ended", happens: func() { s.NoteEnd(later) }, peers: peers(later, third), running: []string{third},
			step: yield.AwaitEnd},
		{event: "the other has ended", happens: func() { s.NoteEnd(third) }, peers: peers(later, third), step: yield.Compare},
		{event: "a new socket of a process whose socket ended", peers: peers(later + "2"), running: []string{later + "2"},
			step: yield.AwaitEnd},
		{event: "no socket", step: yield.Compare},
		{event: "a later process announces its end", happens: func() { s = yield.State{}; announce(laterToken) },
			peers: peers(later), step: yield.TakeOver, account: yield.AccountKept, forgotten: true, leaving: 1},
		{event: "another one comes", peers: peers(later, third), running: []string{third}, step: yield.AwaitEnd, forgotten: true,
			leaving: 1},
		{event: "the other one announces its end", happens: func() { announce(thirdToken) }, peers: peers(later, third),
			step: yield.TakeOver, forgotten: true, leaving: 2},
		{event: "it announces its end again", happens: func() { announce(thirdToken) }, peers: peers(third),
			step: yield.TakeOver, forgotten: true, leaving: 1},
		{event: "both sockets are gone", step: yield.Compare, forgotten: true},
		{event: "the kubelet kept the list, but forgot another one", account: yield.AccountKept, step: yield.RegisterAgain,
			forgotten: true},
		{event: "a process with the token of one that had left", peers: peers(later), running: []string{later},
			step: yield.AwaitEnd, forgotten: true},
		{event: "a registration begins", happens: s.Begin, step: yield.Compare, forgotten: true},
		{event: "the kubelet accepted it", happens: s.Accept, account: yield.AccountKept, step: yield.Resume},
		{event: "the server yields to another later process", happens: s.NoteYield, peers: peers(third),
			running: []string{third}, step: yield.AwaitEnd, yielded: true},
		{event: "that process is killed", account: yield.AccountKept, step: yield.Resume, yielded: true},
		{event: "a registration begins after it yielded", happens: s.Begin, step: yield.Compare, yielded: true},
		{event: "the kubelet accepted that registration", happens: s.Accept, step: yield.Compare},
	} {
		if row.happens != nil {
			row.happens()
		}
		s.Refresh(row.peers)
		if got := s.Running(row.peers); !slices.Equal(got, row.running) {
			t.Errorf("%s: running %q, want %q", row.event, got, row.running)
		}
		if got := s.Yielding(row.peers, row.account); got != row.step {
			t.Errorf("%s: step %d, want %d", row.event, got, row.step)
		}
		for _, oneClient := range []bool{false, true} {
			v := yield.Server{OneClient: oneClient, Peers: row.peers}
			want := (row.forgotten || row.yielded && oneClient) && row.running == nil
			if got := s.RegistersBeforeExit(v); got != want {
				t.Errorf("%s: registers before it exits %v, want %v; one client: %v", row.event, got, want, oneClient)
			}
		}
		if s.Forgotten() != row.forgotten || s.Leaving() != row.leaving {
			t.Errorf("%s: forgotten %v, %d leave; want %v, %d", row.event, s.Forgotten(), s.Leaving(), row.forgotten, row.leaving)
		}
	}
}

// TestForgotten: a registration undoes only what was before it. The answer to a registration may come
// after an earlier process has made the kubelet forget this process once more.
func TestForgotten(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ before, during, refused, want bool }{
		"never":                     {},
		"before":                    {before: true},
		"before, and it is refused": {before: true, refused: true, want: true},
		"during":                    {during: true, want: true},
		"before and during":         {before: true, during: true, want: true},
	} {
		var s yield.State
		if tt.before {
			s.Answer(thirdToken, serves)
		}
		s.Begin()
		if tt.during {
			s.Answer(thirdToken, serves)
		}
		if !tt.refused {
			s.Accept()
		}
		s.End()
		if answer, _ := s.Answer(thirdToken, serves); answer != yield.WillNot || s.Forgotten() != tt.want {
			t.Errorf("%s: forgotten %v, want %v; a process that ends answers %d", name, s.Forgotten(), tt.want, answer)
		}
		// the same if the registration of a later process may have failed
		var y yield.State
		if tt.before {
			y.NoteYield()
		}
		y.Begin()
		if tt.during {
			y.NoteYield()
		}
		if !tt.refused {
			y.Accept()
		}
		if got := y.RegistersBeforeExit(serves); got != tt.want {
			t.Errorf("%s: registers before it exits %v, want %v", name, got, tt.want)
		}
		other := serves
		other.Mute = yield.MuteOtherPlugin
		if y.RegistersBeforeExit(other) || s.RegistersBeforeExit(other) {
			t.Errorf("%s: registers over another program", name)
		}
	}
}

// TestAnswer: the later process, or another one, announces its end.
func TestAnswer(t *testing.T) {
	t.Parallel()
	mute := func(m yield.Mute, sockets ...string) yield.Server {
		return with(func(s *yield.Server) { s.Mute, s.Peers = m, peers(sockets...) })
	}
	for name, tt := range map[string]struct {
		server  yield.Server
		known   bool // the process announced its end before this registration began
		answer  yield.Answer
		newMute yield.Mute
	}{
		"the kubelet uses its list":           {server: serves, answer: yield.WillReregister},
		"the kubelet may":                     {server: mute(yield.MuteAccountDiffers), answer: yield.WillReregister, newMute: yield.MuteAccountDiffers},
		"an earlier process, and a third one": {server: mute(yield.MuteLaterProcess, third), newMute: yield.MuteLaterProcess},
		"the later process, and a third one": {server: mute(yield.MuteLaterProcess, later, third), answer: yield.WillRegister,
			newMute: yield.MuteLaterProcess},
		"another program":               {server: mute(yield.MuteOtherPlugin), newMute: yield.MuteOtherPlugin},
		"its next registration":         {server: mute(yield.MuteReplaced), answer: yield.WillRegister, newMute: yield.MuteReplaced},
		"no stream":                     {server: yield.Server{}, answer: yield.WillRegister},
		"no list":                       {server: with(func(s *yield.Server) { s.Listed = false }), answer: yield.WillRegister},
		"a later process, not yet seen": {server: mute(yield.MuteNone, later), answer: yield.WillRegister, newMute: yield.MuteLaterProcess},
		"a third one, not yet seen":     {server: mute(yield.MuteNone, third), answer: yield.WillReregister},
		"a later process that was known to end": {server: mute(yield.MuteNone, later), known: true,
			answer: yield.WillReregister},
		"a kubelet of several clients": {server: with(func(s *yield.Server) { s.OneClient = false })},
	} {
		var s yield.State
		if tt.known {
			s.Answer(laterToken, serves)
		}
		s.Begin()
		answer, newMute := s.Answer(laterToken, tt.server)
		if answer != tt.answer || newMute != tt.newMute || !s.Forgotten() {
			t.Errorf("%s: answer %d, want %d; mute %d, want %d; forgotten %v", name, answer, tt.answer, newMute, tt.newMute,
				s.Forgotten())
		}
	}
}

// TestRegisteredServer has what a registered server does beside other processes.
func TestRegisteredServer(t *testing.T) {
	t.Parallel()
	var leaving yield.State
	leaving.Answer(laterToken, serves)
	promised := func(change func(*yield.Server)) yield.Server {
		s := with(change)
		s.Promised = true
		return s
	}
	for name, tt := range map[string]struct {
		state  yield.State
		server yield.Server
		locked bool
		held   time.Duration
		// the results of Yields, Overtaken, ReregistersSoon and Detaches
		yields, overtaken, soon, detaches bool
	}{
		"alone":                        {server: serves, detaches: true},
		"no stream":                    {server: with(func(s *yield.Server) { s.Streams = false })},
		"a kubelet of several clients": {server: with(func(s *yield.Server) { s.OneClient = false })},
		"another program":              {server: with(func(s *yield.Server) { s.Mute = yield.MuteOtherPlugin })},
		"mute":                         {server: with(func(s *yield.Server) { s.Mute = yield.MuteLaterProcess }), yields: true, detaches: true},
		"a later process, after the list": {server: with(func(s *yield.Server) { s.Peers = peers(later) }), yields: true,
			detaches: true},
		"a later process, before the list": {server: with(func(s *yield.Server) { s.Peers, s.Listed = peers(later), false }),
			yields: true, overtaken: true, detaches: true},
		"a later process that waits for the lock": {server: with(func(s *yield.Server) { s.Peers, s.Listed = peers(later), false }),
			locked: true, held: kubelet.LockTimeout - 1, yields: true, detaches: true},
		"a later process that waited too long": {server: with(func(s *yield.Server) { s.Peers, s.Listed = peers(later), false }),
			locked: true, held: kubelet.LockTimeout, yields: true, overtaken: true, detaches: true},
		"a later process that ends": {state: leaving, detaches: true,
			server: promised(func(s *yield.Server) { s.Peers, s.Listed = peers(later), false })},
		"promised":                         {server: promised(func(*yield.Server) {}), soon: true, detaches: true},
		"promised, an earlier one is left": {server: promised(func(s *yield.Server) { s.Peers.Earlier = []string{third} }), detaches: true},
		"promised, another program":        {server: promised(func(s *yield.Server) { s.Mute = yield.MuteOtherPlugin })},
	} {
		s, v := tt.state, tt.server
		if s.Yields(v) != tt.yields || s.Overtaken(v, tt.locked, tt.held) != tt.overtaken || s.ReregistersSoon(v) != tt.soon ||
			v.Detaches() != tt.detaches {
			t.Errorf("%s: yields %v, overtaken %v, registers again soon %v, detaches %v", name, s.Yields(v),
				s.Overtaken(v, tt.locked, tt.held), s.ReregistersSoon(v), v.Detaches())
		}
	}
}
