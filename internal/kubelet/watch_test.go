package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

// folder is a directory of kubelet's with a path short enough for sockets.
func folder(t *testing.T) string {
	t.Helper()
	path, err := os.MkdirTemp("", "k")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(path) })
	return path
}

// listen makes a socket that leaves its file behind when the returned function closes it, as a dead process does.
func listen(t *testing.T, path string) (kill func()) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = l.Close() })
	return func() { _ = l.Close() }
}

// patience bounds every wait for something that must happen.
const patience = time.Minute

// state is what a watch published last.
type state struct {
	Incarnation uint64
	Sockets     []string
}

// watch starts a watch and returns a function that waits for a state that fits.
func watch(t *testing.T, d *Directory) (await func(what string, fits func(state) bool) state) {
	t.Helper()
	incarnation, sockets := feed.New(uint64(0)), feed.New([]string(nil))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(ctx, incarnation, sockets) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Watch() = %v, want nil when ctx ends", err)
		}
	})
	return func(what string, fits func(state) bool) state {
		t.Helper()
		deadline := time.After(patience)
		for {
			_, came := incarnation.Latest()
			_, changed := sockets.Latest()
			now := state{incarnation.Value(), sockets.Value()}
			if fits(now) {
				return now
			}
			select {
			case <-came:
			case <-changed:
			case <-deadline:
				t.Fatalf("no state with %s: %v", what, now)
			}
		}
	}
}

func newDirectory(t *testing.T, path string) *Directory {
	t.Helper()
	d, err := NewDirectory(filepath.Join(path, "kubelet.sock"), nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func incarnation(n uint64) func(state) bool { return func(s state) bool { return s.Incarnation == n } }

func TestEveryKubeletIsAnIncarnation(t *testing.T) {
	tests := map[string]func() (*fsnotify.Watcher, error){
		"with inotify":      fsnotify.NewWatcher,
		"inotify exhausted": func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") },
	}
	for name, newWatcher := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t, folder(t))
			d.newWatcher = newWatcher
			await := watch(t, d)
			await("no kubelet", incarnation(0))
			socket := filepath.Join(d.Path(), "kubelet.sock")
			for n := range uint64(3) {
				kill := listen(t, socket)
				await("a new kubelet", incarnation(n+1))
				kill()
				if err := os.Remove(socket); err != nil {
					t.Fatal(err)
				}
				await("no kubelet", incarnation(0))
			}
			if n := d.Kubelets(); n != 3 {
				t.Errorf("%d kubelets were seen, want 3", n)
			}
		})
	}
}

// A socket that came and went between two looks is in none of the lists.
func TestSocketsArePublishedWheneverOneMayHaveGone(t *testing.T) {
	t.Parallel()
	for name, newWatcher := range map[string]func() (*fsnotify.Watcher, error){
		"with inotify":      fsnotify.NewWatcher,
		"inotify exhausted": func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDirectory(t, folder(t))
			d.newWatcher = newWatcher
			listen(t, d.socket)
			seen, sockets := feed.New(uint64(0)), feed.New([]string(nil))
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- d.Watch(ctx, seen, sockets) }()
			for deadline := time.After(patience); ; {
				incarnation, came := seen.Latest()
				if incarnation != 0 {
					break
				}
				select {
				case <-came:
				case <-deadline:
					t.Fatal("kubelet is not seen")
				}
			}
			_, changed := sockets.Latest()
			path := filepath.Join(d.Path(), "a file")
			if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Remove(path)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-changed:
			case <-time.After(patience):
				t.Error("nothing is published")
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestASocketThatIsReplacedIsAnotherIncarnation(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	socket := filepath.Join(d.Path(), "kubelet.sock")
	listen(t, socket)
	// A file system may give the second socket the inode of the first, within the same tick of the kernel's clock.
	if err := os.Link(socket, filepath.Join(folder(t), "first.sock")); err != nil {
		t.Fatal(err)
	}
	await := watch(t, d)
	await("the first kubelet", incarnation(1))
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	listen(t, socket)
	// One look may see the gap or not: what counts is that one more kubelet is seen, and not two.
	await("the second kubelet", incarnation(2))
	listen(t, filepath.Join(d.Path(), "other.sock"))
	after := await("the other socket", func(s state) bool { return slices.Contains(s.Sockets, "other.sock") })
	if after.Incarnation != 2 {
		t.Errorf("incarnation is %d after an unrelated change, want 2", after.Incarnation)
	}
}

func TestADirectoryThatIsReplacedIsFollowed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(folder(t), "device-plugins")
	await := watch(t, newDirectory(t, path)) // not there yet
	await("no kubelet", incarnation(0))
	for n := range uint64(2) {
		if err := os.Mkdir(path, 0o750); err != nil {
			t.Fatal(err)
		}
		listen(t, filepath.Join(path, "kubelet.sock"))
		listen(t, filepath.Join(path, "a.sock"))
		await("kubelet and a socket", func(s state) bool {
			return s.Incarnation == n+1 && slices.Equal(s.Sockets, []string{"a.sock"})
		})
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		await("nothing", func(s state) bool { return s.Incarnation == 0 && s.Sockets == nil })
	}
}

// TestADirectoryThatIsAwayIsLookedForEachSecond: inotify says that it goes, and not that another one comes.
func TestADirectoryThatIsAwayIsLookedForEachSecond(t *testing.T) {
	t.Parallel()
	path := filepath.Join(folder(t), "device-plugins")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	d := newDirectory(t, path)
	c := clocktesting.NewFakeClock(time.Now())
	d.clock = c
	listen(t, d.socket)
	await := watch(t, d)
	await("kubelet", incarnation(1))
	c.Step(lookInterval)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	await("no kubelet", incarnation(0))
	for range 1000 { // the watch has seen all that inotify says
		if err := d.Alive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	listen(t, d.socket)
	began := c.Now()
	stop := make(chan struct{})
	stepped := make(chan struct{})
	go func() {
		defer close(stepped)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for c.Since(began) < lookRarely-2*lookInterval { // the pause while notices come has not ended
			select {
			case <-stop:
				return
			case <-tick.C:
				c.Step(lookInterval / 10)
			}
		}
	}()
	await("another kubelet", incarnation(2))
	close(stop)
	<-stepped
}

// TestWithNoticesTheDirectoryIsLookedAtRarely: each look wakes an idle process.
func TestWithNoticesTheDirectoryIsLookedAtRarely(t *testing.T) {
	t.Parallel()
	notices, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = notices.Close() })
	l := look{directory: newDirectory(t, folder(t)), notices: notices}
	if err := l.once(klog.Logger{}); err != nil {
		t.Fatal(err)
	}
	if got := l.pause(); got != lookRarely || len(notices.WatchList()) != 1 {
		t.Errorf("the next look comes after %v, and %q are watched; want %v", got, notices.WatchList(), lookRarely)
	}
}

// TestWithoutNoticesTheDirectoryIsLookedAtEachSecond: nothing else says that kubelet has come.
func TestWithoutNoticesTheDirectoryIsLookedAtEachSecond(t *testing.T) {
	t.Parallel()
	d := newDirectory(t, folder(t))
	c := clocktesting.NewFakeClock(time.Now())
	d.clock = c
	d.newWatcher = func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") }
	await := watch(t, d)
	for n := range uint64(3) {
		if err := d.Alive(t.Context()); err != nil { // it has looked
			t.Fatal(err)
		}
		_ = os.Remove(d.socket)
		listen(t, d.socket)
		c.Step(lookInterval)
		await("a new kubelet", incarnation(n+1))
	}
}

func TestADirectoryInTheMomentOfItsRemovalIsNoDeadMount(t *testing.T) {
	t.Parallel()
	path := filepath.Join(folder(t), "device-plugins")
	ctx, cancel := context.WithCancel(t.Context())
	var removals sync.WaitGroup
	removals.Go(func() {
		for ctx.Err() == nil {
			_ = os.Mkdir(path, 0o750)
			_ = os.Remove(path)
		}
	})
	look := &look{directory: newDirectory(t, path), notices: &fsnotify.Watcher{}}
	for range 50_000 { // one in some hundred comes at the moment
		if err := look.once(klog.Background()); err != nil {
			t.Errorf("a look at the directory = %v", err)
			break
		}
	}
	cancel()
	removals.Wait()
}

func TestADeadMountEndsTheWatch(t *testing.T) {
	t.Parallel()
	// A process keeps seeing a removed directory through what it holds of it: a bind mount in a container, or here a
	// descriptor.
	path := filepath.Join(folder(t), "device-plugins")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	d := newDirectory(t, "/proc/self/fd/"+strconv.Itoa(int(held.Fd())))
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(t.Context(), feed.New(uint64(0)), feed.New([]string(nil))) }()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, ErrNoDirectory) || !strings.Contains(err.Error(), "new container") {
			t.Errorf("Watch() = %v, want ErrNoDirectory with the remedy", err)
		}
	case <-time.After(patience):
		t.Fatal("the watch goes on")
	}
}
