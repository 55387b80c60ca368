package kubelet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// The name of a socket of this program is gpu-device-plugin-<kind>-<token>-<n>.sock. The
// kind of a plugin socket is <resource>-<hash>: the beginning of the resource's name without
// the domain, for people, and the hash of the whole name. The token identifies the process:
// the time of its start and two random characters. Tokens sort as the processes started. n
// counts the sockets of the process.
const (
	// socketPrefix begins the name of every socket of this program.
	socketPrefix    = "gpu-device-plugin-"
	socketSuffix    = ".sock"
	maxResourcePart = 8
	hashLength      = 6
	timeLength      = 10 // microseconds of 35 years
	tokenLength     = timeLength + 2
	// counterLength is the length of a million: the number of sockets of a process in two
	// months if each registration fails.
	counterLength = 4
	// maxSocketName is the length of the longest name that NewEndpoint makes.
	maxSocketName = len(socketPrefix) + maxResourcePart + 1 + hashLength + 1 + tokenLength + 1 + counterLength +
		len(socketSuffix)
)

// NewToken returns a token for this process, greater than the tokens of all processes that
// started before on this node.
func NewToken() string {
	var now unix.Timespec
	// This clock is never set, runs on while the machine sleeps, and is the same in all
	// containers. Linux always has it.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return base32(uint64(now.Nano()/1000), timeLength) + strings.ToLower(rand.Text()[:tokenLength-timeLength])
}

// base32 returns n with so many digits, from 0 to 9 and a to v.
func base32(n uint64, digits int) string {
	text := strconv.FormatUint(n, 32)
	return strings.Repeat("0", max(0, digits-len(text))) + text
}

// NewEndpoint returns the path of a new socket for resource. No process has ever used the
// path.
func (d *Directory) NewEndpoint(resource string) string {
	return filepath.Join(d.Path(),
		SocketName(kindOf(resource), d.token, d.lives.Add(1)))
}

// kindOf returns the common part of the names of all sockets for a resource.
func kindOf(resource string) string {
	name := resource[strings.IndexByte(resource, '/')+1:]
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(resource)) // a hash's Write does not fail
	return name[:min(len(name), maxResourcePart)] + "-" + base32(uint64(hash.Sum32()>>2), hashLength)
}

// SocketName returns the name of the n-th socket of a process of this program.
func SocketName(kind, token string, n uint32) string {
	return socketPrefix + kind + "-" + token + "-" + base32(uint64(n), 1) + socketSuffix
}

// ParseSocketName returns the kind and the token of the process in the name of a socket of this
// program.
func ParseSocketName(name string) (kind, token string, ours bool) {
	rest, prefixed := strings.CutPrefix(name, socketPrefix)
	rest, suffixed := strings.CutSuffix(rest, socketSuffix)
	last := strings.LastIndexByte(rest, '-') // before the counter
	if !prefixed || !suffixed || last <= tokenLength || rest[last-tokenLength-1] != '-' {
		return "", "", false
	}
	return rest[:last-tokenLength-1], rest[last-tokenLength : last], true
}

// Ours reports whether NewEndpoint created the socket.
func (d *Directory) Ours(name string) bool {
	_, token, ours := ParseSocketName(name)
	return ours && token == d.token
}

// Peers are the names of the plugin sockets of other processes, possibly for one resource.
type Peers struct {
	// Later and Earlier are the sockets of processes of this program that started later or
	// earlier than this process.
	Later, Earlier []string
	// OtherPlugins are the sockets of other programs. Their resources are unknown.
	OtherPlugins []Socket
}

// A Socket is a socket of another program. A killed program leaves its socket, and creates
// a new socket with the same name after its restart.
type Socket struct {
	Name string
	Made int64 // nanoseconds of Unix time, by the clock of the file system
}

// Peers returns the present sockets of other servers of a resource.
func (d *Directory) Peers(resource string) Peers {
	var r Peers
	own := kindOf(resource)
	for _, name := range d.sockets() {
		switch kind, token, ours := ParseSocketName(name); {
		case !ours:
			if info, err := os.Lstat(filepath.Join(d.Path(), name)); err == nil { // else the socket is gone
				r.OtherPlugins = append(r.OtherPlugins, Socket{name, info.ModTime().UnixNano()})
			}
		case kind != own || token == d.token:
		case token > d.token:
			r.Later = append(r.Later, name)
		default:
			r.Earlier = append(r.Earlier, name)
		}
	}
	return r
}

// sockets returns the names of the sockets in the directory, without the kubelet's, in order.
func (d *Directory) sockets() []string {
	entries, err := os.ReadDir(d.Path())
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 && e.Name() != filepath.Base(d.socket) {
			names = append(names, e.Name())
		}
	}
	return names
}

// ofOthers returns the names of the sockets of other processes of this program.
func (d *Directory) ofOthers() []string {
	return slices.DeleteFunc(d.sockets(), func(name string) bool {
		_, token, ours := ParseSocketName(name)
		return !ours || token == d.token
	})
}

// dialPlugin connects to a plugin socket.
func (d *Directory) dialPlugin(ctx context.Context, name string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(d.Path(), name))
}

// callTimeout bounds a call to the server of another process.
const callTimeout = 2 * time.Second

// CallEarlier calls the server of a resource in another process of this program: the newest
// of the processes that started before this process. The error wraps fs.ErrNotExist if there
// is none.
func (d *Directory) CallEarlier(
	ctx context.Context, resource string, call func(context.Context, pluginapi.DevicePluginClient) error,
) error {
	earlier := newestFirst(d.Peers(resource).Earlier)
	if len(earlier) == 0 {
		return fmt.Errorf("find the earlier server of %s: %w", resource, fs.ErrNotExist)
	}
	return d.call(ctx, earlier[0], call)
}

// newestFirst sorts socket names of this program by the start of their processes, newest
// first.
func newestFirst(names []string) []string {
	return slices.SortedFunc(slices.Values(names), func(a, b string) int {
		_, x, _ := ParseSocketName(a)
		_, y, _ := ParseSocketName(b)
		return strings.Compare(y, x)
	})
}

// call makes a call to the server with the named socket.
func (d *Directory) call(ctx context.Context, name string,
	call func(context.Context, pluginapi.DevicePluginClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := d.dialPlugin(ctx, name)
	if err != nil {
		return fmt.Errorf("dial %s: %w", name, err)
	}
	client, err := newClient(conn)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	return call(ctx, pluginapi.NewDevicePluginClient(client))
}

const (
	// askInterval is the pace of checking whether other servers are there.
	askInterval = time.Second
	// askSoon is the first pause after the end of a connection, because the end may be the
	// server's.
	askSoon = 20 * time.Millisecond
	// listensWithin is how long a socket may refuse connections before its first connection,
	// because a process creates the socket a moment before listening.
	listensWithin = time.Second
	// hungAfter is how long a server of this program may leave connections unanswered.
	hungAfter = 10 * time.Second
)

// AwaitEnd returns nil once no server uses the socket: the socket is gone or refuses
// connections, or a server of this program has not answered for ten seconds. An error means
// that ctx ended.
func (d *Directory) AwaitEnd(ctx context.Context, name string) error {
	_, _, ours := ParseSocketName(name)
	began := d.clock.Now()
	answered, accepted := began, false
	for {
		pause := askInterval
		conn, err := d.dialPlugin(ctx, name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case errors.Is(err, syscall.ECONNREFUSED):
			if accepted || d.clock.Since(began) >= listensWithin {
				return nil
			}
			pause = askSoon
		case err == nil && !ours:
			accepted = true
			_ = conn.Close() // some programs cannot end while a connection says nothing
		case err == nil:
			accepted, pause = true, askSoon
			if answers(ctx, conn) {
				answered = d.clock.Now()
			}
		}
		if ours && d.clock.Since(answered) >= hungAfter {
			return nil
		}
		timer := d.clock.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("wait for the end of %s: %w", name, ctx.Err())
		case <-timer.C():
		}
	}
}

// answers reports whether the server at the other end of a connection sends anything. A gRPC
// server sends without a request. answers closes the connection, and returns when the server
// closes the connection, which takes about a second, or when ctx ends.
func answers(ctx context.Context, conn net.Conn) bool {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	// An error means that the connection is closed: then the read fails also.
	_ = conn.SetReadDeadline(time.Now().Add(2 * askInterval))
	n, _ := io.Copy(io.Discard, conn)
	return n > 0
}
