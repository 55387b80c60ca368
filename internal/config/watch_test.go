package config_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const patience = time.Minute // how long a test waits for what must come

// watch starts a Watcher of a file that says migStrategy: single.
func watch(t *testing.T, path string, c clock.WithTicker) *config.Watcher {
	t.Helper()
	return watchIn(t.Context(), t, path, c)
}

func watchIn(ctx context.Context, t *testing.T, path string, c clock.WithTicker) *config.Watcher {
	t.Helper()
	return watchFrom(ctx, t, func(s *config.Sources) { *s = sources(t, "", "--config-file="+path) }, c)
}

func watchFrom(ctx context.Context, t *testing.T, change func(*config.Sources), c clock.WithTicker) *config.Watcher {
	t.Helper()
	s := sources(t, "", "")
	change(&s)
	first, _, err := config.Load(s)
	if err != nil {
		t.Fatal(err)
	}
	w := config.NewWatcher(s, first, c)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return w
}

// await waits until a config with the strategy is published.
func await(t *testing.T, w *config.Watcher, want resource.MIGStrategy) {
	t.Helper()
	poll.Latest(t, "MIG strategy "+want.String(), w.Configs(),
		func(c config.Config) bool { return c.Resource.MIG == want })
}

// awaitFault waits until the Watcher's fault says want, or is none if want is empty.
func awaitFault(t *testing.T, w *config.Watcher, want string) {
	t.Helper()
	_ = poll.Latest(t, "fault "+want, w.Errors(), func(err error) bool {
		return want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(), want)
	})
}

// write puts a whole file at path at once: nobody finds a part of it.
func write(t *testing.T, path, text string) {
	t.Helper()
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, path); err != nil {
		t.Fatal(err)
	}
}

func TestWatchPublishesValidFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {migStrategy: single}")
	w := watch(t, path, clock.RealClock{})
	await(t, w, resource.MIGSingle)

	write(t, path, "flags: {migStrategy: mixed}")
	await(t, w, resource.MIGMixed)

	write(t, path, "flags: {migStrategy: none, failOnInitError: 3}")
	awaitFault(t, w, "line 1: flags.failOnInitError")
	await(t, w, resource.MIGMixed)

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	awaitFault(t, w, "no such file")
	await(t, w, resource.MIGMixed)

	write(t, path, "flags: {migStrategy: single}")
	await(t, w, resource.MIGSingle)
	awaitFault(t, w, "")
}

// TestWatchKeepsStartup: a changed file changes nothing for which the daemon must be restarted, and
// the log says so. The paths of the driver in CDI specs would otherwise not fit the loaded NVML.
func TestWatchKeepsStartup(t *testing.T) {
	t.Parallel()
	logged := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	text := func() string { return logged.GetSink().(ktesting.Underlier).GetBuffer().String() }
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {nvidiaDriverRoot: /a, migStrategy: single}")
	w := watchIn(klog.NewContext(t.Context(), logged), t, path, clock.RealClock{})
	before := w.Configs().Value()

	write(t, path, "flags: {nvidiaDriverRoot: /b, migStrategy: mixed}")
	await(t, w, resource.MIGMixed)
	after := w.Configs().Value()
	if diff := cmp.Diff(before.Startup, after.Startup); diff != "" {
		t.Errorf("Startup (-before +after):\n%s", diff)
	}
	if after.CDI.DriverRoot != "/a" || after.Edits.DevRoot != "/a" {
		t.Errorf("CDI specs have the driver root %s, device nodes %s", after.CDI.DriverRoot, after.Edits.DevRoot)
	}
	const waits = `line 1: flags.nvidiaDriverRoot: a change needs a restart of the daemon; \"/a\" stays in use until then`
	if !strings.Contains(text(), waits) {
		t.Errorf("the log has no %s:\n%s", waits, text())
	}

	write(t, path, "flags: {nvidiaDriverRoot: /a, migStrategy: mixed, failOnInitError: false}")
	poll.Until(t, "a warning without another change", func() bool {
		return strings.Contains(text(), `flags.failOnInitError: a change needs a restart of the daemon; \"true\" stays`)
	})
	write(t, path, "flags: {migStrategy: mixed, failOnInitError: perhaps}")
	awaitFault(t, w, "line 1: flags.failOnInitError")
}

func TestWatchSeesTheSwapOfAConfigMap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"..1": "flags: {migStrategy: single}",
		"..2": "flags: {migStrategy: mixed}"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "config.yaml"), text)
	}
	link := func(to, from string) {
		t.Helper()
		if err := os.Symlink(to, filepath.Join(dir, from)); err != nil {
			t.Fatal(err)
		}
	}
	link("..1", "..data")
	link(filepath.Join("..data", "config.yaml"), "config.yaml")
	w := watch(t, filepath.Join(dir, "config.yaml"), clock.RealClock{})
	await(t, w, resource.MIGSingle)

	link("..2", "..data_tmp")
	if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	await(t, w, resource.MIGMixed)
}

// TestWatchSeesEventsOfARelativePath: a change is seen before the next look that is due anyway.
func TestWatchSeesEventsOfARelativePath(t *testing.T) {
	t.Chdir(t.TempDir())
	write(t, "config.yaml", "flags: {migStrategy: single}")
	fake := testclock.NewFakeClock(time.Now())
	w := watch(t, "config.yaml", fake)
	if err := w.Alive(t.Context()); err != nil { // it has read the file and waits
		t.Fatal(err)
	}
	write(t, "config.yaml", "flags: {migStrategy: mixed}")
	for range 9 { // seconds, less than until that look
		_, changed := w.Configs().Latest()
		if w.Configs().Value().Resource.MIG == resource.MIGMixed {
			return
		}
		fake.Step(time.Second)
		select {
		case <-changed:
		case <-time.After(patience / 60):
		}
	}
	await(t, w, resource.MIGMixed)
}

// A file reached by a link into another directory changes without an event in the directory that is
// watched.
func TestWatchWithoutEvents(t *testing.T) {
	t.Parallel()
	elsewhere := filepath.Join(t.TempDir(), "real.yaml")
	write(t, elsewhere, "flags: {migStrategy: single}")
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.Symlink(elsewhere, path); err != nil {
		t.Fatal(err)
	}
	fake := testclock.NewFakeClock(time.Now())
	w := watch(t, path, fake)
	write(t, elsewhere, "flags: {migStrategy: mixed}")
	ctx, cancel := context.WithCancel(t.Context())
	passed := make(chan struct{})
	go func() { // time passes
		defer close(passed)
		for tick := time.NewTicker(time.Millisecond); ctx.Err() == nil; <-tick.C {
			fake.Step(10 * time.Second)
		}
	}()
	await(t, w, resource.MIGMixed)
	cancel()
	<-passed

	write(t, elsewhere, "flags: {migStrategy: none}")
	w.Reload()
	w.Reload()
	await(t, w, resource.MIGNone)
}

// TestWatchOfEmptiedFile: an editor that truncates first or a full disk
// leaves an empty file.
func TestWatchOfEmptiedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {migStrategy: single}")
	w := watch(t, path, clock.RealClock{})
	for _, text := range []string{"", "\n # nothing yet\n \r\n", "---\n", "null", "~\n", "--- ~\n...\n", "{}\n",
		"\ufeff"} {
		write(t, path, text)
		awaitFault(t, w, "file: is empty; the last valid configuration stays in use. To use the defaults, write version: v1")
		await(t, w, resource.MIGSingle)
		write(t, path, "flags: {migStrategy: single}")
		awaitFault(t, w, "")
	}
	write(t, path, "version: v1")
	await(t, w, resource.MIGNone)
	write(t, path, "flags: {migStrategy: many}")
	awaitFault(t, w, "many")
	write(t, path, "")
	awaitFault(t, w, "") // the defaults are in force
}

// TestWatchReadsAFileThatKeepsChanging: a file that is written every 10 ms, for ever, is read
// within a second.
func TestWatchReadsAFileThatKeepsChanging(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {migStrategy: single}")
	w := watch(t, path, clock.RealClock{})
	await(t, w, resource.MIGSingle)
	strategies := []string{"none", "mixed"}
	for tick, n := time.NewTicker(10*time.Millisecond), 0; w.Configs().Value().Resource.MIG == resource.MIGSingle; n++ {
		if n == 1000 { // the ticks that a busy machine leaves out do not count
			t.Fatal("the file was written 1000 times and never read")
		}
		write(t, path, "flags: {migStrategy: "+strategies[n%2]+"} # "+strconv.Itoa(n))
		<-tick.C
	}
}

// TestWatchOfNonFile: a FIFO in the place of the file is a fault, and blocks nothing.
func TestWatchOfNonFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {migStrategy: single}")
	w := watch(t, path, clock.RealClock{})
	await(t, w, resource.MIGSingle)
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	awaitFault(t, w, "is a FIFO, not a regular file")
	write(t, path, "flags: {migStrategy: mixed}")
	await(t, w, resource.MIGMixed)
	awaitFault(t, w, "")
}

// TestWatchFollowsALinkToNothing: NVIDIA's config-manager makes it for nodes that are to have the
// defaults.
func TestWatchFollowsALinkToNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "flags: {migStrategy: single}")
	w := watch(t, path, clock.RealClock{})
	write(t, path, "")
	awaitFault(t, w, "is empty")
	if err := os.Symlink(os.DevNull, path+".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	await(t, w, resource.MIGNone)
}

// TestReloadLogsAgain: who asks for the file to be read is told what is wrong with it, however
// often that was said. A look that nobody asked for says it once.
func TestReloadLogsAgain(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"flags: {migStrategy: many}", ""} { // the second is taken away, too
		path := filepath.Join(t.TempDir(), "config.yaml")
		write(t, path, "flags: {migStrategy: single}")
		logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
		told := func() int {
			return strings.Count(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), "Cannot use the configuration file")
		}
		w := watchIn(klog.NewContext(t.Context(), logger), t, path, testclock.NewFakeClock(time.Now()))
		await(t, w, resource.MIGSingle)
		write(t, path, text)
		if text == "" {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		for want := 1; want <= 3; want++ {
			w.Reload()
			poll.Until(t, "as many are told as there were SIGHUPs", func() bool { return told() >= want })
		}
	}
}

func TestWatchWithoutAFileWaits(t *testing.T) {
	t.Parallel()
	w := config.NewWatcher(sources(t, "", ""), defaults(), clock.RealClock{})
	w.Reload()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Run(ctx); err != nil || w.Errors().Value() != nil {
		t.Errorf("Run: %v, fault: %v", err, w.Errors().Value())
	}
}

// TestWatchFollowsChosenFile: another file is another configuration, and one that is not valid
// leaves the last one in force.
func TestWatchFollowsChosenFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(name, text string) string {
		path := filepath.Join(dir, name)
		write(t, path, text)
		return path
	}
	single, mixed := at("single", "flags: {migStrategy: single}"), at("mixed", "flags: {migStrategy: mixed}")
	chosen := feed.New(config.Chosen{File: single})
	w := watchFrom(t.Context(), t, func(s *config.Sources) { s.Chosen = chosen }, clock.RealClock{})
	await(t, w, resource.MIGSingle)

	chosen.Publish(config.Chosen{File: mixed, Err: errors.New("not the one that was asked for")})
	await(t, w, resource.MIGMixed)
	awaitFault(t, w, "not the one that was asked for")
	if got := w.Configs().Value().File; got != mixed {
		t.Errorf("the file in force is %s", got)
	}
	at("mixed", "flags: {migStrategy: none}")
	await(t, w, resource.MIGNone)
	awaitFault(t, w, "not the one that was asked for")

	chosen.Publish(config.Chosen{File: at("invalid", "flags: {migStrategy: some}")})
	awaitFault(t, w, "migStrategy")
	await(t, w, resource.MIGNone)

	chosen.Publish(config.Chosen{File: single})
	await(t, w, resource.MIGSingle)
	awaitFault(t, w, "")

	// No file means the defaults, and so does a file that has always been empty.
	chosen.Publish(config.Chosen{})
	await(t, w, resource.MIGNone)
	chosen.Publish(config.Chosen{File: single})
	await(t, w, resource.MIGSingle)
	chosen.Publish(config.Chosen{File: at("empty", "")})
	await(t, w, resource.MIGNone)
	awaitFault(t, w, "")
	if got := w.Generation(); got != 7 {
		t.Errorf("%d configurations were in force, want 7", got)
	}
}
