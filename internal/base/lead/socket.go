package lead

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

// Files in the folder. newName is the name of a socket until it replaces the socket at socketName.
const (
	socketName = "lead.sock"
	newName    = "lead.new"
	shareName  = "lead.lock"
)

// lockTimeout limits the wait for another process that takes the lead and may be stopped meanwhile.
// The lock keeps two standbys from taking the lead in turn. Only the last process leads in any
// case, because the identity of the socket decides.
const lockTimeout = time.Second

// errTaken is returned if another process took the lead first.
var errTaken = errors.New("another process took the lead")

// An identity distinguishes a socket from all others. The zero value means no socket. No other file
// gets the same identity while the process listens.
type identity struct{ device, inode uint64 }

// identityOf returns the identity of the file at path.
func identityOf(path string) identity {
	var stat unix.Stat_t
	if unix.Lstat(path, &stat) != nil {
		return identity{}
	}
	return identity{stat.Dev, stat.Ino} //nolint:unconvert // other types on other platforms
}

// A socket is the listener of a leading process. The process keeps a share of the lock as long as
// it may change hardware. A process without a share does not lead, because others would not notice.
type socket struct {
	*net.UnixListener
	identity identity
	share    *statefile.Lock
}

// discard closes a socket that does not have the lead.
func (s *socket) discard() error {
	s.share.Close()
	return s.Close()
}

// take creates a socket in place of the current one. It returns errTaken if another process was
// faster.
func (l *Lead) take(ctx context.Context, current identity) (*socket, error) {
	unlock, err := l.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if identityOf(l.path) != current {
		return nil, errTaken
	}
	s, err := l.bind(ctx)
	if err != nil {
		return nil, err
	}
	if err = os.Rename(filepath.Join(l.o.Dir, newName), l.path); err == nil && identityOf(l.path) != s.identity {
		err = errTaken
	}
	if err != nil {
		_ = s.discard()
		return nil, err
	}
	return s, nil
}

// checkCanTake returns an error if this process could not take the lead.
func (l *Lead) checkCanTake(ctx context.Context) error {
	unlock, err := l.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := l.bind(ctx)
	if err != nil {
		return err
	}
	return errors.Join(s.discard(), os.Remove(filepath.Join(l.o.Dir, newName)))
}

// bind creates a socket at newName, and takes a share of the lock.
func (l *Lead) bind(ctx context.Context) (*socket, error) {
	path := filepath.Join(l.o.Dir, newName)
	if err := statefile.Remove(path); err != nil { // left by a killed process
		return nil, err
	}
	held, err := statefile.TakeShare(filepath.Join(l.o.Dir, shareName))
	if err != nil {
		return nil, err
	}
	listener, err := statefile.Listen(ctx, path)
	if err != nil {
		held.Close()
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	return &socket{listener, identityOf(path), held}, nil
}

// lock creates the folder, if the parent folder exists, and locks the folder.
func (l *Lead) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.Mkdir(l.o.Dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create the folder of the lead: %w", err)
	}
	unlock = func() {}
	err = statefile.AwaitLock(ctx, l.o.Clock, lockTimeout, time.Millisecond, func() (err error) {
		unlock, err = statefile.LockFolder(l.o.Dir)
		return err
	})
	if errors.Is(err, statefile.ErrLocked) {
		return func() {}, nil
	}
	return unlock, err
}

// A message is exchanged between the leader and a standby, as JSON.
type message struct {
	// Name, Token and Since describe the leader.
	Name  string    `json:"name,omitempty"`
	Token string    `json:"token,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Shared is the value published by the leader.
	Shared json.RawMessage `json:"told,omitempty"`
	// Ping of a standby is answered by an empty message.
	Ping bool `json:"ping,omitempty"`
	// Ask of a standby is answered by Yours once the tasks of the tenure have ended. PreviousLeader
	// is the process that may still change hardware.
	Ask            bool   `json:"ask,omitempty"`
	Yours          bool   `json:"yours,omitempty"`
	PreviousLeader string `json:"former,omitempty"`
}

// A link is the connection of two processes.
type link struct {
	conn  net.Conn
	in    chan message    // closed when the connection has ended
	ended <-chan struct{} // closed before in
	end   func()
	mu    sync.Mutex // one writer at a time
}

// newLink reads messages until the connection ends or is closed. The end of ctx closes it.
func newLink(ctx context.Context, conn net.Conn) *link {
	ctx, end := context.WithCancel(ctx)
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	k := &link{conn: conn, in: make(chan message), ended: ctx.Done(), end: end}
	go func() {
		defer close(k.in)
		defer k.close()
		for decoder := json.NewDecoder(conn); ; {
			var m message
			if decoder.Decode(&m) != nil {
				return
			}
			select {
			case k.in <- m:
			case <-k.ended:
				return
			}
		}
	}()
	return k
}

// send sends a message and blocks while the other process reads nothing. An error ends the
// connection, and the reader notices the end.
func (k *link) send(m message) {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // the published value is not JSON
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	_, _ = k.conn.Write(text)
}

// sendAside sends a message without blocking, because the other process may be stopped.
func (k *link) sendAside(m message) {
	if k != nil {
		go k.send(m)
	}
}

func (k *link) close() {
	if k != nil {
		k.end()
	}
}

// dial connects to the leader. listening is false without a listening process; conn is nil after
// any other failure.
func dial(ctx context.Context, path string) (conn net.Conn, listening bool) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist)
	}
	return conn, true
}
