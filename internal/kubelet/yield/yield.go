// Package yield decides what the server of a resource does beside the servers of other processes of
// this program. It has no I/O: serve reports what happened, and carries the decision out.
//
// The words of yield and serve:
//
//   - earlier, later: a process that started before or after this process.
//   - mute: a server whose stream stays open and sends no lists. A server yields while it is mute for
//     a later process.
//   - detach: an ending process makes the kubelet forget the last registration of the resource. The
//     kubelet then ignores the end of a stream. The process of that registration is forgotten until
//     it registers again.
//   - leave: an ending process announces its end to another process, which answers whether it will
//     register afterwards.
//   - kept stream: the stream of the previous registration, which stays open beside the stream of
//     the current registration.
package yield

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
)

// A Mute says why a server sends no list.
type Mute int

// The reasons for sending no list.
const (
	MuteNone           Mute = iota
	MuteLaterProcess        // a process that started later serves the resource
	MuteOtherPlugin         // another program has registered since
	MuteAccountDiffers      // the kubelet's account differs, and the reason is not known yet
	MuteReplaced            // another registration, of this or of another process, has the list
)

// A Step is what a server does next that is mute for a later process.
type Step int

// The steps of such a server.
const (
	AwaitEnd      Step = iota // wait until a later process has ended or announces its end
	TakeOver                  // register beside the open stream, because the later process waits for it
	Compare                   // find out whether the kubelet still uses the list
	RegisterAgain             // end this registration, and begin the next one
	Resume                    // send lists again
)

// Account says whether the kubelet still uses the list of a server after another server ended.
type Account int

// The knowledge of the kubelet's account.
const (
	AccountUnknown Account = iota
	AccountKept
	AccountChanged
)

// An Answer is what a process tells a process that announces its end.
type Answer int

// The answers.
const (
	WillNot        Answer = iota // another server serves the resource, or this process ends, too
	WillRegister                 // this process is about to register
	WillReregister               // this process serves the resource, and registers again afterwards
)

// A Server is what a registered server knows of itself and of the other servers of its resource.
type Server struct {
	Streams   bool // the kubelet has called ListAndWatch
	OneClient bool // the kubelet takes the end of any stream for the end of the server that registered last
	Listed    bool // a list was sent
	Promised  bool // this process has promised to register again after the end of another process
	Mute      Mute
	Peers     kubelet.Peers
}

// Detaches reports whether the server detaches before this process ends. It does not if another
// program serves the resource.
func (v Server) Detaches() bool { return v.Streams && v.OneClient && v.Mute != MuteOtherPlugin }

// A State is what a process knows of the other processes that serve a resource, over all its
// registrations. The zero value is ready.
type State struct {
	ended  map[string]bool // sockets of later processes that ended without removing them
	ending bool            // this process is ending, or no longer serves the resource
	// the tokens of processes that announced their end, with the value of forgotten at that time
	leaving map[string]int
	// forgotten counts how often another process made the kubelet forget this process.
	forgotten counter
	// yields counts how often this process has yielded. If the registration of the later process
	// failed, the kubelet has forgotten this process.
	yields counter
}

// A counter counts what may happen while the kubelet handles a registration.
type counter struct {
	n        int
	atStart  int // n when the last registration began
	atAccept int // n when the last accepted registration began
}

func (c *counter) begin()  { c.atStart = c.n }
func (c *counter) accept() { c.atAccept = c.atStart }

// hasGrown reports whether something was counted since the last accepted registration began.
func (c *counter) hasGrown() bool { return c.n > c.atAccept }

// NoteEnd records that the server behind a socket has ended.
func (s *State) NoteEnd(socket string) {
	if s.ended == nil {
		s.ended = map[string]bool{}
	}
	s.ended[socket] = true
}

// Begin records that a registration begins.
func (s *State) Begin() {
	s.forgotten.begin()
	s.yields.begin()
}

// Accept records that the kubelet has accepted the registration that began last.
func (s *State) Accept() {
	s.forgotten.accept()
	s.yields.accept()
}

// NoteYield records that a server yields.
func (s *State) NoteYield() { s.yields.n++ }

// End records that this process is ending.
func (s *State) End() { s.ending = true }

// Forgotten reports whether the kubelet was made to forget this process and has accepted no
// registration of it since. The kubelet may also have forgotten a later process, and missed the end
// of that process.
func (s *State) Forgotten() bool { return s.forgotten.hasGrown() }

// Leaving returns how many processes have announced their end.
func (s *State) Leaving() int { return len(s.leaving) }

// Refresh forgets the announcements of processes that have no socket any more.
func (s *State) Refresh(p kubelet.Peers) {
	there := map[string]bool{}
	for _, socket := range p.Later {
		there[tokenOf(socket)] = true
	}
	maps.DeleteFunc(s.leaving, func(token string, _ int) bool { return !there[token] })
}

// Running returns the sockets of later processes that may serve the resource: their servers have not
// ended and have not announced their end.
func (s *State) Running(p kubelet.Peers) []string {
	return slices.DeleteFunc(slices.Clone(p.Later),
		func(socket string) bool { return s.ended[socket] || s.isLeaving(socket) })
}

func tokenOf(socket string) string {
	_, token, _ := kubelet.ParseSocketName(socket)
	return token
}

func (s *State) isLeaving(socket string) bool {
	_, leaving := s.leaving[tokenOf(socket)]
	return leaving
}

// Yields reports whether a server sends no lists because of a later process.
func (s *State) Yields(v Server) bool {
	return v.Mute == MuteLaterProcess || len(s.Running(v.Peers)) > 0
}

// Overtaken reports whether a later process may register, or have registered, before this server. It
// registers afterwards if it still waits for the lock of registrations, or if this server has sent a
// list before the other socket appeared. locked says that this server has the lock, for so long.
func (s *State) Overtaken(v Server, locked bool, held time.Duration) bool {
	waits := locked && held < kubelet.LockTimeout
	return len(s.Running(v.Peers)) > 0 && !waits && !v.Listed
}

// ReregistersSoon reports whether no other process that ends has a socket any more. The promise is
// due as soon as the kubelet has noticed their end.
func (s *State) ReregistersSoon(v Server) bool {
	return v.Promised && v.Mute == MuteNone && len(v.Peers.Earlier) == 0 &&
		!slices.ContainsFunc(v.Peers.Later, s.isLeaving)
}

// RegistersBeforeExit reports whether an ending process that has not detached registers once more:
// the kubelet may not notice the end of its streams, and neither a later process nor another program
// serves the resource.
func (s *State) RegistersBeforeExit(v Server) bool {
	isForgotten := s.Forgotten() || s.yields.hasGrown() && v.OneClient
	return isForgotten && v.Mute != MuteOtherPlugin && len(s.Running(v.Peers)) == 0
}

// Yielding returns what a server does that is mute for a later process. The account is AccountUnknown
// until Compare. The kubelet 1.36 uses the list again only if the later process was never registered.
func (s *State) Yielding(p kubelet.Peers, a Account) Step {
	switch {
	case len(s.Running(p)) > 0:
		return AwaitEnd
	case slices.ContainsFunc(p.Later, s.isLeaving):
		return TakeOver
	case a == AccountUnknown:
		return Compare
	case a == AccountChanged || s.Forgotten():
		return RegisterAgain
	}
	return Resume
}

// Answer records that the process with this token is ending and makes the kubelet forget this
// process, and returns the answer for it. newMute is the Mute of the server from now on.
//
// This process serves the resource when the kubelet has its list and calls no other process. The
// kubelet calls a later process that registered after this registration, even if this registration
// has not noticed the other socket yet.
func (s *State) Answer(token string, v Server) (a Answer, newMute Mute) {
	if s.ending {
		return WillNot, v.Mute
	}
	s.forgotten.n++
	if _, known := s.leaving[token]; !known {
		if s.leaving == nil {
			s.leaving = map[string]int{}
		}
		s.leaving[token] = s.forgotten.n
	}
	isCaller := func(socket string) bool { return tokenOf(socket) == token }
	switch {
	case !v.Streams:
		return WillRegister, v.Mute
	case !v.OneClient, v.Mute == MuteOtherPlugin:
		return WillNot, v.Mute
	case v.Mute == MuteReplaced:
		return WillRegister, v.Mute
	case v.Mute == MuteLaterProcess: // for that process, or for another one that ends
		if slices.ContainsFunc(v.Peers.Later, s.isLeaving) {
			return WillRegister, v.Mute
		}
		return WillNot, v.Mute
	case slices.ContainsFunc(v.Peers.Later, isCaller) && s.leaving[token] > s.forgotten.atStart:
		// it may have registered last
		return WillRegister, MuteLaterProcess
	case !v.Listed:
		return WillRegister, v.Mute
	}
	return WillReregister, v.Mute
}
