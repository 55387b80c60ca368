package reboot_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"
	clocktest "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/reboot"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/ownprocess"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const (
	apt    = "*** System restart required ***\n"
	reason = "GPU 3 is Lost: XID 79"
	ours   = "gpu-device-plugin asks for a restart of this node: " + reason + "\n"
)

// start runs an Asker on a published state until ctx ends.
func start(ctx context.Context, t *testing.T, wanted *feed.Feed[reboot.Sentinel]) (ended <-chan struct{}) {
	t.Helper()
	return startOf(ctx, t, "", wanted)
}

// startOf does so on a node with a boot ID.
func startOf(ctx context.Context, t *testing.T, boot string,
	wanted *feed.Feed[reboot.Sentinel]) (ended <-chan struct{}) {
	t.Helper()
	a := &reboot.Asker{Clock: clock.RealClock{}, BootID: boot,
		Wanted: func() (reboot.Sentinel, [3]<-chan struct{}) {
			w, changed := wanted.Latest()
			return w, [3]<-chan struct{}{changed}
		}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	return done
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// settled waits until the file has a text, empty for no file, and nothing else is in the folder.
func settled(t *testing.T, path, want string) {
	t.Helper()
	poll.Until(t, fmt.Sprintf("the file has %q, and nothing else is in its folder", want), func() bool {
		entries, err := os.ReadDir(filepath.Dir(path))
		return err == nil && read(t, path) == want && (want == "") == (len(entries) == 0) && len(entries) <= 1
	})
}

// TestAskAndWithdraw: the file exists while there is a reason, also across restarts of the process;
// an unknown state changes nothing.
func TestAskAndWithdraw(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "reboot-required")
	wanted := feed.New(reboot.Sentinel{Path: path})
	ctx, end := context.WithCancel(t.Context())
	ended := start(ctx, t, wanted)
	wanted.Publish(reboot.Sentinel{Path: path, Known: true, Reason: "GPU 3 is Lost:\n XID 79"})
	settled(t, path, ours)
	end()
	<-ended
	settled(t, path, ours) // a restart of the process withdraws nothing

	wanted = feed.New(reboot.Sentinel{Path: path})
	ctx, end = context.WithCancel(t.Context())
	defer end()
	start(ctx, t, wanted)
	wanted.Publish(reboot.Sentinel{Path: path, Known: true, Reason: reason})
	settled(t, path, ours)
	wanted.Publish(reboot.Sentinel{Path: path, Known: true}) // the node was restarted
	settled(t, path, "")
	wanted.Publish(reboot.Sentinel{Path: path, Known: true, Reason: reason})
	settled(t, path, ours)
	wanted.Publish(reboot.Sentinel{}) // switched off
	settled(t, path, "")
}

// TestFileOfOthers: a file written by another program stays unchanged, whatever its text and time.
func TestFileOfOthers(t *testing.T) {
	t.Parallel()
	for what, text := range map[string]string{"apt's": apt, "ours and more": ours + apt, "another text": "a\n" + ours,
		"unfinished": strings.TrimSpace(ours)} {
		path := filepath.Join(t.TempDir(), "reboot-required")
		write(t, path, text)
		wanted := feed.New(reboot.Sentinel{Path: path, Known: true, Reason: reason})
		other := filepath.Join(t.TempDir(), "other")
		start(t.Context(), t, wanted)
		for range 3 {
			wanted.Publish(reboot.Sentinel{Path: path, Known: true})
			wanted.Publish(reboot.Sentinel{Path: path, Known: true, Reason: reason})
		}
		wanted.Publish(reboot.Sentinel{Path: other, Known: true, Reason: reason})
		settled(t, other, ours) // so everything before is done
		if got := read(t, path); got != text {
			t.Errorf("%s: the file has %q", what, got)
		}
	}
	folder := filepath.Join(t.TempDir(), "reboot-required")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	wanted := feed.New(reboot.Sentinel{Path: folder, Known: true, Reason: reason})
	start(t.Context(), t, wanted)
	other := filepath.Join(t.TempDir(), "other")
	wanted.Publish(reboot.Sentinel{Path: other, Known: true, Reason: reason})
	settled(t, other, ours)
	if _, err := os.Stat(folder); err != nil {
		t.Error(err)
	}
}

// TestKilled: the next process completes the work of a killed process: an unfinished file requests
// nothing, and a file that was being checked gets its name back if it is another program's.
func TestKilled(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ what, name, left, there, known, want string }{
		{"while it wrote", "new", "gpu-dev", "", "", ""},
		{"while it wrote, with a reason", "new", "", "", reason, ours},
		{"after it had the name", "new", ours, ours, reason, ours},
		{"while it removed", "old", ours, "", "", ""},
		{"while it judged the file of somebody else", "old", apt, "", "", apt},
		{"while it judged that, which was written again", "old", apt + "old", apt, "", apt},
		{"while it removed, and there is a reason again", "old", ours, "", reason, ours},
	} {
		path := filepath.Join(t.TempDir(), "reboot-required")
		write(t, filepath.Join(filepath.Dir(path), ".reboot-required.gpu-device-plugin."+tt.name), tt.left)
		if tt.there != "" {
			write(t, path, tt.there)
		}
		t.Log(tt.what)
		start(t.Context(), t, feed.New(reboot.Sentinel{Path: path, Known: true, Reason: tt.known}))
		settled(t, path, tt.want)
	}
}

// TestFileOfEarlierBoot: a file from before a restart of the node requests no other restart, even
// while nothing is known, for example without a driver. Without a known boot ID the file stays.
func TestFileOfEarlierBoot(t *testing.T) {
	t.Parallel()
	of := func(boot string) string { return strings.TrimSpace(ours) + " (boot " + boot + ")\n" }
	long := strings.Repeat("é", 4096)
	for what, tt := range map[string]struct{ there, boot, reason, want string }{
		"another boot":                     {of("1"), "2", "", ""},
		"another boot, and a reason again": {of("1"), "2", reason, of("2")},
		"the same boot":                    {of("2"), "2", "", of("2")},
		"a boot that is not known":         {of("1"), "", "", of("1")},
		"a file without a boot":            {ours, "2", "", ours},
		"the file of somebody else":        {apt + "(boot 1)\n", "2", "", apt + "(boot 1)\n"},
		"a long reason": {"", "2", long, "gpu-device-plugin asks for a restart of this node: " +
			long[:4034] + " (boot 2)\n"},
	} {
		path := filepath.Join(t.TempDir(), "reboot-required")
		if tt.there != "" {
			write(t, path, tt.there)
		}
		t.Log(what)
		wanted := feed.New(reboot.Sentinel{Path: path})
		if tt.reason != "" {
			wanted = feed.New(reboot.Sentinel{Path: path, Known: true, Reason: tt.reason})
		}
		ctx, end := context.WithCancel(t.Context())
		ended := startOf(ctx, t, tt.boot, wanted)
		settled(t, path, tt.want)
		end()
		<-ended
		settled(t, path, tt.want)
	}
}

// TestLinks: a link instead of the file is not followed. A link with the name of the file belongs
// to another program.
func TestLinks(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path, elsewhere := filepath.Join(folder, "reboot-required"), filepath.Join(t.TempDir(), "elsewhere")
	write(t, elsewhere, ours)
	link := func(name string) {
		t.Helper()
		if err := os.Symlink(elsewhere, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	link(".reboot-required.gpu-device-plugin.new")
	wanted := feed.New(reboot.Sentinel{Path: path, Known: true, Reason: reason + " again"})
	start(t.Context(), t, wanted)
	settled(t, path, strings.TrimSpace(ours)+" again\n")
	wanted.Publish(reboot.Sentinel{Path: path, Known: true})
	settled(t, path, "")
	link("reboot-required")
	other := filepath.Join(t.TempDir(), "other")
	for _, w := range []reboot.Sentinel{{Path: path, Known: true, Reason: reason}, {Path: path, Known: true},
		{Path: other, Known: true, Reason: reason}} {
		wanted.Publish(w)
	}
	settled(t, other, ours)
	if to, err := os.Readlink(path); err != nil || to != elsewhere {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if got := read(t, elsewhere); got != ours {
		t.Errorf("what a link leads to has %q", got)
	}
}

// TestFullDisk: if the text does not fit on the disk, no part is left; the file is written when
// there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	if !ownprocess.Is(t) {
		return
	}
	ownprocess.LimitFiles(t, 10)
	path := filepath.Join(t.TempDir(), "reboot-required")
	now := clocktest.NewFakeClock(time.Now())
	a := &reboot.Asker{Clock: now, Wanted: func() (reboot.Sentinel, [3]<-chan struct{}) {
		return reboot.Sentinel{Path: path, Known: true, Reason: reason}, [3]<-chan struct{}{}
	}}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	poll.Until(t, "it has tried", now.HasWaiters)
	settled(t, path, "")
	ownprocess.LimitFiles(t, 0)
	now.Step(time.Minute)
	settled(t, path, ours)
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestDiskThatHangs: Run returns although the disk does not answer, and nothing is written
// afterwards. Without the end of Run, the file is in the wanted state when the disk answers.
func TestDiskThatHangs(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{true, false} {
		path := filepath.Join(t.TempDir(), "reboot-required")
		synctest.Test(t, func(t *testing.T) {
			disk, answers := statefile.NewDisk(), make(chan struct{})
			go func() {
				_ = disk.Do(context.WithoutCancel(t.Context()), time.Hour, func() error { <-answers; return nil })
			}()
			synctest.Wait()
			wanted := feed.New(reboot.Sentinel{Path: path, Known: true, Reason: reason})
			a := &reboot.Asker{Clock: clock.RealClock{}, Disk: disk,
				Wanted: func() (reboot.Sentinel, [3]<-chan struct{}) {
					w, changed := wanted.Latest()
					return w, [3]<-chan struct{}{changed}
				}}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- a.Run(ctx) }()
			time.Sleep(time.Minute)
			if ends {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
			close(answers)
			time.Sleep(time.Minute)
			if got := read(t, path); ends != (got == "") {
				t.Errorf("when the disk answers, the file has %q", got)
			}
			if cancel(); !ends {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		})
	}
}
