package kubelet_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// folder is a directory of kubelet's.
func folder(t *testing.T) string {
	t.Helper()
	return loopback.Folder(t)
}

// listen makes a socket that leaves its file behind when the returned function closes it, as a dead
// process does.
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
func watch(t *testing.T, d *kubelet.Directory) (await func(what string, fits func(state) bool) state) {
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

// What the package promises of time, with which the tests know when to look.
const (
	lookInterval  = time.Second     // between two looks at the directory while nothing tells of it
	lookRarely    = 5 * time.Second // and while inotify does
	staleAfter    = 2 * time.Minute // of refused connections
	probedWithin  = time.Minute     // by a kubelet that is there
	askInterval   = time.Second
	askSoon       = 20 * time.Millisecond
	listensWithin = time.Second
	hungAfter     = 10 * time.Second
	settleTime    = 50 * time.Millisecond // after a call by which kubelet allocates
	chooseTime    = time.Second           // after one that Allocate is to follow
	listPause     = 25 * time.Millisecond // between two questions about pods
	freshFor      = 20 * time.Millisecond // an answer about allocatable devices
	tellTimeout   = 300 * time.Millisecond
	maxSocketName = 56 // bytes
)

// newDirectoryAt returns the directory with a clock.
func newDirectoryAt(t *testing.T, path string, c clock.WithTicker) *kubelet.Directory {
	t.Helper()
	d, err := kubelet.NewDirectory(filepath.Join(path, "kubelet.sock"), c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// ticking returns a clock whose seconds pass as soon as somebody waits by it, until the test ends.
func ticking(t *testing.T) *clocktesting.FakeClock {
	t.Helper()
	c := clocktesting.NewFakeClock(time.Now())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if c.HasWaiters() {
				c.Step(time.Second)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return c
}

// later returns the directory as a process sees it that started after all before.
func later(t *testing.T, path string, before ...*kubelet.Directory) *kubelet.Directory {
	t.Helper()
	var d *kubelet.Directory
	poll.Until(t, "a token that is greater", func() bool {
		d = newDirectory(t, path)
		return !slices.ContainsFunc(before, func(e *kubelet.Directory) bool { return tokenOf(t, d)[:10] <= tokenOf(t, e)[:10] })
	})
	return d
}

// tokenOf returns the token of the process.
func tokenOf(t *testing.T, d *kubelet.Directory) string {
	t.Helper()
	_, token, ours := kubelet.ParseSocketName(filepath.Base(d.NewEndpoint("nvidia.com/gpu")))
	if !ours {
		t.Fatalf("the endpoint %s is not ours", d.NewEndpoint("nvidia.com/gpu"))
	}
	return token
}

// kubeletSocket returns the path of kubelet's socket.
func kubeletSocket(d *kubelet.Directory) string { return filepath.Join(d.Path(), "kubelet.sock") }

func newDirectory(t *testing.T, path string) *kubelet.Directory {
	t.Helper()
	return newDirectoryAt(t, path, nil)
}

func incarnation(n uint64) func(state) bool { return func(s state) bool { return s.Incarnation == n } }

// isWithoutNotices reports whether this process was started for the test t. The kernel gives this
// process no inotify instance, as if there were too many.
func isWithoutNotices(t *testing.T) bool {
	t.Helper()
	if !ownprocess.Is(t) {
		return false
	}
	ownprocess.Refuse(t, syscall.SYS_INOTIFY_INIT1, syscall.EMFILE)
	return true
}

func TestEveryKubeletIsAnIncarnation(t *testing.T) {
	tests := map[string]bool{"with inotify": true, "inotify exhausted": false}
	for name, notices := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !notices && !isWithoutNotices(t) {
				return
			}
			d := newDirectoryAt(t, folder(t), ticking(t))
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
	for name, notices := range map[string]bool{"with inotify": true, "inotify exhausted": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !notices && !isWithoutNotices(t) {
				return
			}
			d := newDirectoryAt(t, folder(t), ticking(t))
			listen(t, kubeletSocket(d))
			seen, sockets := feed.New(uint64(0)), feed.New([]string(nil))
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- d.Watch(ctx, seen, sockets) }()
			poll.Latest(t, "kubelet is seen", seen, func(incarnation uint64) bool { return incarnation != 0 })
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
	// A file system may give the second socket the inode of the first, within the same tick of the
	// kernel's clock.
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
	await := watch(t, newDirectoryAt(t, path, ticking(t))) // not there yet
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

// TestOneWatchIsLeftWhenTheDirectoryIsALink: a link that is switched from folder to folder leaves
// no inotify watch on the old ones (E11).
func TestOneWatchIsLeftWhenTheDirectoryIsALink(t *testing.T) {
	t.Parallel()
	root := folder(t)
	link := filepath.Join(root, "device-plugins")
	var inodes []uint64
	var await func(what string, fits func(state) bool) state
	for n := range uint64(5) {
		name := "folder" + strconv.FormatUint(n, 10)
		if err := os.Mkdir(filepath.Join(root, name), 0o750); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		inodes = append(inodes, info.Sys().(*syscall.Stat_t).Ino)
		listen(t, filepath.Join(root, name, "kubelet.sock"))
		next := filepath.Join(root, "next")
		if err := errors.Join(os.Symlink(name, next), os.Rename(next, link)); err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			await = watch(t, newDirectoryAt(t, link, ticking(t)))
		}
		await("the kubelet of "+name, incarnation(n+1))
		if watched := watchedOf(t, inodes); len(watched) != 1 || watched[0] != inodes[n] {
			t.Errorf("after %d switches, inotify watches the inodes %d of %d", n, watched, inodes)
		}
	}
}

// watchedOf returns the inodes that inotify watches for this process, of those given.
func watchedOf(t *testing.T, inodes []uint64) (watched []uint64) {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fdinfo/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil { // closed since
			continue
		}
		for _, match := range watchLine.FindAllStringSubmatch(string(text), -1) {
			inode, err := strconv.ParseUint(match[1], 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(inodes, inode) {
				watched = append(watched, inode)
			}
		}
	}
	return watched
}

// watchLine is a line of /proc about one watch.
var watchLine = regexp.MustCompile(`(?m)^inotify wd:\S+ ino:([0-9a-f]+) `)

// TestADirectoryThatIsAwayIsLookedForEachSecond: inotify says that it goes, and not that another
// one comes.
func TestADirectoryThatIsAwayIsLookedForEachSecond(t *testing.T) {
	t.Parallel()
	path := filepath.Join(folder(t), "device-plugins")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	c := clocktesting.NewFakeClock(time.Now())
	d := newDirectoryAt(t, path, c)
	listen(t, kubeletSocket(d))
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
	listen(t, kubeletSocket(d))
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

// TestWithoutNoticesTheDirectoryIsLookedAtEachSecond: nothing else says that kubelet has come.
func TestWithoutNoticesTheDirectoryIsLookedAtEachSecond(t *testing.T) {
	t.Parallel()
	if !isWithoutNotices(t) {
		return
	}
	c := clocktesting.NewFakeClock(time.Now())
	d := newDirectoryAt(t, folder(t), c)
	await := watch(t, d)
	for n := range uint64(3) {
		if err := d.Alive(t.Context()); err != nil { // it has looked
			t.Fatal(err)
		}
		_ = os.Remove(kubeletSocket(d))
		listen(t, kubeletSocket(d))
		c.Step(lookInterval)
		await("a new kubelet", incarnation(n+1))
	}
}

func TestADeadMountEndsTheWatch(t *testing.T) {
	t.Parallel()
	// A process keeps seeing a removed directory through what it holds of it: a bind mount in a
	// container, or here a descriptor.
	path := filepath.Join(folder(t), "device-plugins")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Close() }()
	c := clocktesting.NewFakeClock(time.Now())
	d := newDirectoryAt(t, "/proc/self/fd/"+strconv.Itoa(int(held.Fd())), c)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Watch(t.Context(), feed.New(uint64(0)), feed.New([]string(nil))) }()
	// a directory that is being removed looks alike for a moment
	for _, step := range []time.Duration{0, lookInterval - 1} {
		c.Step(step)
		for range 100 {
			if err := d.Alive(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	c.Step(1)
	select {
	case err := <-ended:
		if !errors.Is(err, kubelet.ErrNoDirectory) || !strings.Contains(err.Error(), "new container") {
			t.Errorf("Watch() = %v, want ErrNoDirectory with the remedy", err)
		}
	case <-time.After(patience):
		t.Fatal("the watch goes on")
	}
}
