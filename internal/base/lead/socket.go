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

// Files in the folder. newName is the name of a socket before it replaces the socket at socketName.
const (
	socketName = "lead.sock"
	newName    = "lead.new"
	shareName  = "lead.lock"
)

// lockTimeout limits the wait for another process that takes the lead: it may have been stopped in
// the middle. The lock keeps two standbys from taking the lead one after the other. Without it the
// last one leads: the identity decides.
const lockTimeout = time.Second

// errTaken is the error of a process that came too late.
var errTaken = errors.New("another process took the lead")

// An identity tells a socket from all others. The zero value is that of none. While its process
// listens, no other file gets it.
type identity struct{ device, inode uint64 }

// identify returns the identity of the file at path.
func identify(path string) identity {
	var stat unix.Stat_t
	if unix.Lstat(path, &stat) != nil {
		return identity{}
	}
	return identity{stat.Dev, stat.Ino} //nolint:unconvert // other types on other platforms
}

// A socket is one with which this process leads. A process keeps its share of the lock as long as
// it may change hardware. Who cannot have one does not lead: nobody would know.
type socket struct {
	*net.UnixListener
	identity identity
	share    *statefile.Lock
}

// drop closes a socket with which this process does not lead.
func (s *socket) drop() error {
	s.share.Close()
	return s.Close()
}

// take makes a socket, and replaces the socket that was seen by it. It fails with errTaken if
// another socket is there.
func (l *Lead) take(ctx context.Context, seen identity) (*socket, error) {
	unlock, err := l.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if identify(l.path) != seen {
		return nil, errTaken
	}
	s, err := l.bind(ctx)
	if err != nil {
		return nil, err
	}
	if err = os.Rename(filepath.Join(l.o.Dir, newName), l.path); err == nil && identify(l.path) != s.identity {
		err = errTaken
	}
	if err != nil {
		_ = s.drop()
		return nil, err
	}
	return s, nil
}

// try returns why this process could not take the lead; nil if it could.
func (l *Lead) try(ctx context.Context) error {
	unlock, err := l.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	s, err := l.bind(ctx)
	if err != nil {
		return err
	}
	return errors.Join(s.drop(), os.Remove(filepath.Join(l.o.Dir, newName)))
}

// bind makes a socket at newName, and takes a share of the lock.
func (l *Lead) bind(ctx context.Context) (*socket, error) {
	path := filepath.Join(l.o.Dir, newName)
	if err := statefile.Remove(path); err != nil { // of a process that was killed
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
	return &socket{listener, identify(path), held}, nil
}

// lock makes the folder, if its parent folder exists, and takes the lock of the folder.
func (l *Lead) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.Mkdir(l.o.Dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("make the folder of the lead: %w", err)
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

// A message is what the process that leads and a standby tell each other, as JSON.
type message struct {
	// Name, Token and Since are those of the process that leads.
	Name  string    `json:"name,omitempty"`
	Token string    `json:"token,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Told is what it tells.
	Told json.RawMessage `json:"told,omitempty"`
	// Ping of a standby is answered by a message without anything.
	Ping bool `json:"ping,omitempty"`
	// Ask of a standby is answered by Yours once the tasks of the term have ended. Former is who holds
	// the hardware still.
	Ask    bool   `json:"ask,omitempty"`
	Yours  bool   `json:"yours,omitempty"`
	Former string `json:"former,omitempty"`
}

// A link is the connection of two processes.
type link struct {
	conn  net.Conn
	in    chan message    // closed when the connection has ended
	ended <-chan struct{} // closed before that
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

// send sends a message. An error ends the connection, and the reader sees that. It waits while the
// other process reads nothing.
func (k *link) send(m message) {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // the value that is told is no JSON
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	_, _ = k.conn.Write(text)
}

// tell sends a message beside all else: the other process may be stopped.
func (k *link) tell(m message) {
	if k != nil {
		go k.send(m)
	}
}

func (k *link) close() {
	if k != nil {
		k.end()
	}
}

// dial connects to the process that leads. It reports false if no process listens.
func dial(ctx context.Context, path string) (conn net.Conn, there bool) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist)
	}
	return conn, true
}
