package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/supervise"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const patience = time.Minute // limits every wait for an expected event

// start runs a server at socket until the test ends, and returns after the first answer. waits is
// closed when the call wait has arrived.
func start(t *testing.T, socket string) (waits chan struct{}, stop func()) {
	t.Helper()
	waits = make(chan struct{})
	server := control.NewServer(socket, map[string]control.Handler{
		"wait": func(ctx context.Context, _ json.RawMessage) (any, error) {
			close(waits)
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"echo": func(_ context.Context, arguments json.RawMessage) (any, error) { return arguments, nil },
		"fail": func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("no GPU 9 here") },
	}, map[string]control.Stream{
		"count": func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			for i := 0; ctx.Err() == nil; i++ {
				if err := send(i); err != nil {
					return err
				}
			}
			return ctx.Err()
		},
		"once": func(ctx context.Context, _ json.RawMessage, send func(any) error) error {
			if err := send("first"); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		},
		"bad": func(_ context.Context, _ json.RawMessage, send func(any) error) error { return send(func() {}) },
		"large": func(_ context.Context, _ json.RawMessage, send func(any) error) error {
			return send(strings.Repeat("x", 4<<20)) // more than fits into a socket
		},
		"break": func(_ context.Context, _ json.RawMessage, send func(any) error) error {
			return errors.Join(send("first"), errors.New("the monitor has ended"))
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- supervise.Run(ctx, supervise.Backoff{First: time.Millisecond, Most: 10 * time.Millisecond}, server.Run)
	}()
	answers(t, socket)
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run() = %v, want nil when ctx ends", err)
		}
		ended <- nil
	}
	t.Cleanup(stop)
	return waits, stop
}

// answers waits until a server answers at socket.
func answers(t *testing.T, socket string) {
	t.Helper()
	poll.Until(t, "a server answers", func() bool {
		return control.Call(t.Context(), socket, "echo", "there?", nil) == nil
	})
}

func TestCalls(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "made", "c.sock")
	_, stop := start(t, socket)
	if info, err := os.Stat(filepath.Dir(socket)); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the folder of the socket: %v, %v; want mode 0755", info, err)
	}

	var got []string
	if err := control.Call(t.Context(), socket, "echo", []string{"a", "b"}, &got); err != nil ||
		strings.Join(got, "") != "ab" {
		t.Errorf("echo = %q, %v", got, err)
	}
	for range 100 { // more than are served at a time
		if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := control.Call(t.Context(), socket, "fail", nil, nil); err == nil || err.Error() != "no GPU 9 here" {
		t.Errorf("fail = %v, want the handler's sentence", err)
	}
	if err := control.Call(t.Context(), socket, "eco", nil, nil); err == nil ||
		!strings.Contains(err.Error(), "echo, fail") {
		t.Errorf("unknown call = %v, want the names of the known ones", err)
	}
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket = %v, %v; want mode 0600", info, err)
	}

	stop()
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("Call() = %v, want ErrNoDaemon", err)
	}
}

func TestASocketWithTheLongestPath(t *testing.T) {
	folder := loopback.Folder(t)
	start(t, filepath.Join(folder, strings.Repeat("s", 107-1-len(folder))))
}

// TestASocketThatCannotBeMade: Run says so, and does not wait.
func TestASocketThatCannotBeMade(t *testing.T) {
	err := control.NewServer(filepath.Join(t.TempDir(), strings.Repeat("s", 120)), nil, nil).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "make control socket") {
		t.Errorf("Run() = %v, want that the socket cannot be made", err)
	}
}

func TestALivingDaemonKeepsItsSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	err := control.NewServer(socket, nil, nil).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(),
		"another daemon answers there; choose another with --control-socket") {
		t.Errorf("second Run() = %v, want the reason and the remedy", err)
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
		t.Errorf("the first daemon does not answer any more: %v", err)
	}
}

func TestASocketLeftBehindIsReplaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	echo := func(_ context.Context, arguments json.RawMessage) (any, error) { return arguments, nil }
	go func() { ended <- control.NewServer(socket, map[string]control.Handler{"echo": echo}, nil).Run(ctx) }()
	answers(t, socket)
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run() = %v", err)
	}
}

// TestSocketOfAnotherDaemonIsKept: another daemon's socket has replaced ours.
func TestSocketOfAnotherDaemonIsKept(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	_, stop := start(t, socket)
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	stop()
	if _, err := os.Lstat(socket); err != nil {
		t.Errorf("it was removed: %v", err)
	}
}

// TestWhatIsNoSocketIsLeftAlone: a file, a folder, a FIFO or a link at the path is neither replaced
// nor opened.
func TestWhatIsNoSocketIsLeftAlone(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"file":            func(path string) error { return os.WriteFile(path, []byte("precious"), 0o600) },
		"folder":          func(path string) error { return os.Mkdir(path, 0o700) },
		"FIFO":            func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"link to nothing": func(path string) error { return os.Symlink("nothing", path) },
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "c.sock")
			if err := put(socket); err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(socket)
			if err != nil {
				t.Fatal(err)
			}
			err = control.NewServer(socket, nil, nil).Run(t.Context())
			if err == nil || !strings.Contains(err.Error(), "not a socket") ||
				!strings.Contains(err.Error(), "--control-socket") {
				t.Errorf("Run() = %v, want an error with the remedy", err)
			}
			if after, err := os.Lstat(socket); err != nil || !os.SameFile(before, after) {
				t.Errorf("it was replaced: %v", err)
			}
			if entries, err := os.ReadDir(filepath.Dir(socket)); err != nil || len(entries) != 1 {
				t.Errorf("the folder has %v, %v", entries, err)
			}
		})
	}
}

// TestRemovedSocketIsRestored: the notice of the removal brings the socket back at once, and
// earlier calls are answered. Without the notice the server would find out after ten seconds.
func TestRemovedSocketIsRestored(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	waits, stop := start(t, socket)
	waiting := make(chan error, 1)
	go func() { waiting <- control.Call(t.Context(), socket, "wait", nil, nil) }()
	select {
	case <-waits:
	case <-time.After(patience):
		t.Fatal("the call does not come")
	}
	back := func() {
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		answers(t, socket)
		if after, err := os.Lstat(socket); err != nil || after.Mode().Perm() != 0o600 {
			t.Errorf("the new socket: %v, %v", after, err)
		}
	}
	back() // from the server's last check
	poll.Once(t, "a socket that was removed comes back", 5*time.Second, back)
	select {
	case err := <-waiting:
		t.Errorf("a call from before ended with %v", err)
	default:
	}
	stop()
	if err := <-waiting; err == nil || !strings.Contains(err.Error(), "is stopping") {
		t.Errorf("a call from before ended with %v, want that the daemon is stopping", err)
	}
}

// TestReplacedSocketWithSameInode: another socket at the path may have the same inode number. The
// server listens again.
func TestReplacedSocketWithSameInode(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	other := time.Unix(1, 0)
	if err := os.Chtimes(socket, other, other); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the server does not take the socket for its own", func() bool {
		now, err := os.Lstat(socket)
		return err == nil && !now.ModTime().Equal(other)
	})
	answers(t, socket)
}

// TestSocketMode: the mode of the socket is right from the first moment, whatever the
// umask is.
func TestSocketMode(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	socket := filepath.Join(t.TempDir(), "c.sock")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- control.NewServer(socket, nil, nil).Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for deadline := time.Now().Add(patience); ; {
		info, err := os.Lstat(socket)
		if err == nil {
			if info.Mode().Perm() != 0o600 {
				t.Errorf("the mode is %v", info.Mode())
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// TestRequestsAreBounded: a request over the limit is refused, and the server does not wait for a
// missing request.
func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	for size, want := range map[int]string{1 << 10: "", 8 << 20: "65536 bytes"} {
		err := control.Call(t.Context(), socket, "echo", strings.Repeat("x", size), nil)
		if (err == nil) != (want == "") {
			t.Errorf("a request of %d bytes: %v", size, err)
		}
	}
	silent, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if _, err := silent.Write([]byte(`{"call": "echo"`)); err != nil {
		t.Fatal(err)
	}
	if err := silent.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(silent); err != nil || !strings.Contains(string(text), "5s") {
		t.Errorf("half a request is answered %q, %v; want the limit", text, err)
	}
}

// TestSilentConnectionAtShutdown: the server waits up to 5 s for a request otherwise.
func TestSilentConnectionAtShutdown(t *testing.T) {
	t.Parallel()
	poll.Once(t, "the end with a silent connection", 4*time.Second, func() {
		socket := filepath.Join(t.TempDir(), "c.sock")
		_, stop := start(t, socket)
		silent, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
		stop()
	})
}

// TestCallsAtShutdown: a call that the end of the daemon cuts off says so, and what to do.
func TestCallsAtShutdown(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "c.sock")
	waits, stop := start(t, socket)
	half := dialed(t, socket)
	if _, err := half.Write([]byte(`{"call": "echo"`)); err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	go func() { result <- control.Call(t.Context(), socket, "wait", nil, nil) }()
	<-waits
	stop()
	const want = "the daemon is stopping and did not complete the call; run the command again"
	if err := <-result; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("a call that has begun: %v", err)
	}
	if text, err := io.ReadAll(half); err != nil || !strings.Contains(string(text), want) {
		t.Errorf("half a request is answered %q, %v", text, err)
	}
}

// TestPathsWithSigns: a path is no URL and no format.
func TestPathsWithSigns(t *testing.T) {
	start(t, filepath.Join(t.TempDir(), "c%2F%s ?#.sock"))
}

// TestDaemonUserMayConnect: even a user other than root.
func TestDaemonUserMayConnect(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the other tests show it for a user that is not root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// nobody may not open the folder of the program
	calls := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestCalls$")
	calls.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := calls.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestOtherUsersAreRefused: also where somebody has changed the mode of the socket.
func TestOtherUsersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can connect as another user")
	}
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	for path, mode := range map[string]os.FileMode{socket: 0o666, filepath.Dir(filepath.Dir(socket)): 0o755} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	const nobody, keep = 65534, ^uintptr(0)
	runtime.LockOSThread() // the system call changes the user of one thread only
	defer runtime.UnlockOSThread()
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, nobody, keep); errno != 0 {
		t.Fatal(errno)
	}
	err := control.Call(t.Context(), socket, "echo", nil, nil)
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, 0, keep); errno != 0 {
		panic(errno) // no other test may run as the user
	}
	if err == nil || !strings.Contains(err.Error(), "user 65534 may not control the daemon") {
		t.Errorf("a call of another user: %v", err)
	}
}

// TestConnectionsThatCannotBeAccepted: the server tries again. The process has no free file
// descriptor for a while.
func TestConnectionsThatCannotBeAccepted(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	socket := filepath.Join(t.TempDir(), "c.sock")
	start(t, socket)
	client, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 64, Max: 1024}); err != nil {
		t.Fatal(err)
	}
	var files []*os.File
	fill := func() {
		for file, err := os.Open(os.DevNull); err == nil; file, err = os.Open(os.DevNull) {
			files = append(files, file)
		}
	}
	fill()
	if err := syscall.Connect(client, &syscall.SockaddrUnix{Name: socket}); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "no descriptor is free", func() bool { // the server may close earlier connections late
		fill()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return errors.Is(control.Call(ctx, socket, "echo", nil, nil), syscall.EMFILE)
	})
	for _, file := range files {
		_ = file.Close()
	}
	if err := control.Call(t.Context(), socket, "echo", nil, nil); err != nil {
		t.Errorf("Call() = %v with free descriptors", err)
	}
}
