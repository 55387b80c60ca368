package mps_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mps"
)

// mount mounts a file system on the folder of a resource, and returns a function that unmounts it.
func (n *node) mount(resource, kind, options string) (end func()) {
	n.t.Helper()
	dir := n.path(resource)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := unix.Mount("none", dir, kind, 0, options); err != nil {
		n.t.Skipf("only root may mount a file system, which this test needs: %v", err)
	}
	mounted := true
	end = func() {
		if mounted {
			mounted = false
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				n.t.Error(err)
			}
		}
	}
	n.t.Cleanup(end)
	return end
}

// hang makes each access to the folder of a resource hang: the program of the file system answers
// nothing. heal unmounts the file system.
func (n *node) hang(resource string) (heal func()) {
	n.t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		n.t.Skipf("without /dev/fuse this test cannot have a disk hang: %v", err)
	}
	n.t.Cleanup(func() { _ = fuse.Close() }) // ends each access with an error
	end := n.mount(resource, "fuse", fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd()))
	return func() {
		_ = fuse.Close()
		end()
	}
}

// TestProberWithFullDisk: a daemon on a full disk is unusable although it answers. Other
// daemons are usable.
func TestProberWithFullDisk(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]string{"no byte is free": "size=64k",
		"no file is free": "size=1m,nr_inodes=64"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			unmount := n.mount(one, "tmpfs", options)
			end := n.supervise(group(one, gpu("a", 80, 2)), group(two, gpu("b", 80, 2)))
			t.Cleanup(func() { end(); unmount() })
			n.untilReady()
			p := n.probe(one, two)
			n.untilReason(p, one, "")
			n.untilReason(p, two, "")
			var files []string
			for err := error(nil); err == nil; {
				path := n.path(fmt.Sprint(one, "/full-", len(files)))
				files = append(files, path)
				var f *os.File
				if f, err = os.Create(path); err == nil {
					_, err = f.Write(make([]byte, 4096))
					_ = f.Close()
				}
				if err != nil && !errors.Is(err, syscall.ENOSPC) {
					t.Fatal(err)
				}
			}
			n.untilReason(p, one, "the MPS control daemon of nvidia.com/gpu cannot write its files: the disk is "+
				"full; make room in "+
				n.path(one+"/pipe")+" (--mps-root)")
			if now := p.Unready().Value(); len(now) != 1 {
				t.Errorf("not ready: %q", now)
			}
			for _, path := range files {
				_ = os.Remove(path)
			}
			n.untilReason(p, one, "")
		})
	}
}

// TestProberWithHangingDisk: a resource with a hanging folder is unusable, before the first answer
// and after it. Other resources stay usable, and the Prober stops.
func TestProberWithHangingDisk(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a disk that hangs is noticed after 5 s, twice: make test-all runs it")
	}
	n := newNode(t)
	end := n.supervise(group(two, gpu("b", 80, 2)))
	t.Cleanup(end)
	n.untilReady()
	heal := n.hang(one)
	ctx, stop := context.WithCancel(t.Context())
	p := &probe{clock: clocktest.NewFakeClock(time.Unix(0, 0))}
	p.Prober = mps.NewProber(n.root, p.clock)
	p.Follow([]string{one, two})
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	const hangs = "the MPS control daemon of nvidia.com/gpu does not answer: the disk does not answer; check the " +
		"disk of "
	n.untilReason(p, one, hangs+n.root+" (--mps-root)")
	if !p.HasResult(one) {
		t.Error("a daemon whose disk hangs from the start counts as not asked")
	}
	n.untilReason(p, two, "")
	heal()
	n.untilReason(p, one, "the MPS control daemon of nvidia.com/gpu does not answer: stat ")
	n.wanted.Publish([]mps.Group{group(one, gpu("a", 80, 2)), group(two, gpu("b", 80, 2))})
	n.untilReason(p, one, "")

	heal = n.hang(one)
	n.untilReason(p, one, hangs)
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("Run: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("it does not end while a disk hangs")
	}
	heal()
}

// TestMarkOnADiskThatIsFull: daemons are marked as ready when there is room.
func TestMarkOnADiskThatIsFull(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	unmount := n.mount("", "tmpfs", "size=64k")
	ending := n.path("claims/uid.ending")
	if err := errors.Join(
		os.Mkdir(filepath.Dir(ending), 0o755), os.WriteFile(ending, []byte("{}"), 0o600),
		os.WriteFile(n.path("full"), make([]byte, 60<<10), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(ending) // keeps its page when it is removed, or the mark would fit at the next try
	if err != nil {
		t.Fatal(err)
	}
	end := n.supervise() // no daemon is wanted: all are ready
	t.Cleanup(func() { _ = open.Close(); end(); unmount() })
	n.until("the mark was tried: this is next", func() bool { return !n.has("claims/uid.ending") })
	if n.has(".ready") {
		t.Fatal("the disk is not full")
	}
	if err := os.Remove(n.path("full")); err != nil {
		t.Fatal(err)
	}
	n.untilReady()
}

// TestClaimsOnADiskThatHangs: who asks about daemons of claims is told so after a time, in each
// way, and goes on when the disk does.
func TestClaimsOnADiskThatHangs(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a disk that hangs is noticed after 2 s, four times: make test-all runs it")
	}
	n := newNode(t)
	c := mps.NewClaimDaemons(n.root)
	heal := n.hang("")
	const hangs = "the directory of MPS state: the disk does not answer; check the disk of "
	says := func(call, got string) {
		t.Helper()
		if !strings.HasPrefix(got, hangs) {
			t.Errorf("%s says %q", call, got)
		}
	}
	_, err := c.All()
	says("All", fmt.Sprint(err))
	for _, id := range []string{oneClaim, "other"} {
		says("Problems of "+id, c.Problems(oneClaim, "other")[id])
	}
	says("Stop", fmt.Sprint(c.Stop(oneClaim)))
	says("Start", fmt.Sprint(c.Start(t.Context(), oneClaim, wantedGPUs)))
	heal()
	n.supervise()
	n.untilReady()
	if err := n.start(oneClaim, wantedGPUs); err != nil {
		t.Error(err)
	}
	if all, err := c.All(); err != nil || len(all) != 1 {
		t.Errorf("daemons of claims after that: %v, %v", all, err)
	}
	n.end(oneClaim)
}
