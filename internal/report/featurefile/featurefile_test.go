package featurefile_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/featurefile"
)

// A rig is a Writer on a virtual clock.
type rig struct {
	t       *testing.T
	folder  string
	wanted  *feed.Feed[featurefile.Target]
	problem *feed.Feed[error]
	log     ktesting.Underlier
}

func (r *rig) path() string { return filepath.Join(r.folder, "gpu-device-plugin") }

func (r *rig) want(labels map[string]string) {
	r.wanted.Publish(featurefile.Target{Path: r.path(), Labels: labels, Renewal: 15 * time.Minute, Lifetime: time.Hour})
	synctest.Wait()
}

// check compares the contents of the folder, by file name.
func (r *rig) check(when string, want map[string]string) {
	r.t.Helper()
	got := map[string]string{}
	entries, _ := os.ReadDir(r.folder)
	for _, e := range entries {
		content, _ := os.ReadFile(filepath.Join(r.folder, e.Name()))
		got[e.Name()] = string(content)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		r.t.Errorf("%s: files (-want +got):\n%s", when, diff)
	}
}

func (r *rig) put(name, content string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.folder, name), []byte(content), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// run runs a Writer beside the test.
func run(t *testing.T, test func(*rig)) {
	t.Helper()
	folder := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		r := &rig{
			t: t, folder: filepath.Join(folder, "features.d"), wanted: feed.New(featurefile.Target{}),
			problem: feed.New[error](nil),
			log:     logger.GetSink().(ktesting.Underlier),
		}
		ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
		latest := func() (featurefile.Target, <-chan struct{}, <-chan struct{}) {
			wanted, changed := r.wanted.Latest()
			return wanted, changed, nil
		}
		w := &featurefile.Writer{Wanted: latest, Problem: r.problem}
		ended := make(chan error)
		go func() { ended <- w.Run(ctx) }()
		synctest.Wait()
		test(r)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// expiring is the content of a file written at a time after the start of the virtual clock,
// 2000-01-01.
func expiring(at time.Duration, lines ...string) string {
	expiry := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(at + time.Hour)
	return "# +expiry-time=" + expiry.Format(time.RFC3339) + "\n" + strings.Join(lines, "\n") + "\n"
}

// TestFile: labels are written when they change and before they expire, and stay when the daemon
// ends.
func TestFile(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		r.check("nothing is wanted", map[string]string{})
		r.want(nil)
		r.check("labels are not known", map[string]string{})
		r.want(map[string]string{"nvidia.com/gpu.count": "8", "nvidia.com/cuda.driver.rev": ""})
		one := []string{"nvidia.com/cuda.driver.rev=", "nvidia.com/gpu.count=8"}
		r.check("first labels", map[string]string{"gpu-device-plugin": expiring(0, one...)})
		time.Sleep(14 * time.Minute)
		r.want(nil)
		r.check("the driver went away", map[string]string{"gpu-device-plugin": expiring(0, one...)})
		r.want(map[string]string{"nvidia.com/gpu.count": "7"})
		r.check("a GPU is gone", map[string]string{"gpu-device-plugin": expiring(14*time.Minute, "nvidia.com/gpu.count=7")})
		time.Sleep(16 * time.Minute)
		r.check("renewal", map[string]string{"gpu-device-plugin": expiring(29*time.Minute, "nvidia.com/gpu.count=7")})
		if err := os.Remove(r.path()); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(15 * time.Minute)
		r.check("somebody removed it", map[string]string{"gpu-device-plugin": expiring(44*time.Minute,
			"nvidia.com/gpu.count=7")})
		r.wanted.Publish(featurefile.Target{})
		time.Sleep(time.Hour)
		r.check("no file is wanted any more: it expires", map[string]string{"gpu-device-plugin": expiring(44*time.Minute,
			"nvidia.com/gpu.count=7")})
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		r.t.Cleanup(func() {
			if info, err := os.Stat(r.path()); err != nil || info.Mode().Perm() != 0o644 {
				r.t.Errorf("after the end of the daemon: %v, %v, want a file of mode 0644", info, err)
			}
		})
	})
}

// TestAnotherName: when the name of the file changes, the labels move at once, even after a pause.
func TestAnotherName(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		target := featurefile.Target{Path: filepath.Join(r.folder, "gpus"), Renewal: 15 * time.Minute, Lifetime: time.Hour}
		r.wanted.Publish(target)
		synctest.Wait()
		r.check("labels are not known", map[string]string{"gpu-device-plugin": expiring(0, "nvidia.com/gpu.count=8")})
		target.Labels = map[string]string{"nvidia.com/gpu.count": "7"}
		r.wanted.Publish(target)
		synctest.Wait()
		r.check("another name", map[string]string{"gpus": expiring(0, "nvidia.com/gpu.count=7")})
		r.wanted.Publish(featurefile.Target{})
		time.Sleep(30 * time.Minute)
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		r.check("the first name", map[string]string{"gpu-device-plugin": expiring(30*time.Minute, "nvidia.com/gpu.count=8")})
		if err := r.problem.Value(); err != nil || strings.Contains(r.log.GetBuffer().String(), "not written") {
			r.t.Errorf("problem %v, log:\n%s", err, r.log.GetBuffer().String())
		}
		r.put("gfd", "nvidia.com/gpu.count=8\n")
		r.wanted.Publish(target)
		synctest.Wait()
		r.check("beside GFD", map[string]string{"gpu-device-plugin": expiring(30*time.Minute, "nvidia.com/gpu.count=8"),
			"gfd": "nvidia.com/gpu.count=8\n"})
	})
}

// TestAnotherNameAfterARestart: the file of an earlier process of this program is removed, whatever
// its name.
func TestAnotherNameAfterARestart(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		if err := os.Mkdir(r.folder, 0o700); err != nil {
			r.t.Fatal(err)
		}
		r.put("gpus", expiring(-30*time.Minute, "gpu-device-plugin.github.io/gpu.health=healthy", "nvidia.com/gpu.count=7"))
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		r.check("another name", map[string]string{"gpu-device-plugin": expiring(0, "nvidia.com/gpu.count=8")})
		if err := r.problem.Value(); err != nil {
			r.t.Errorf("problem %v", err)
		}
	})
}

// TestRestartWithoutADriver: labels of an earlier process do not expire while their correctness is
// unknown. Expired labels, and files without expiry, are left alone.
func TestRestartWithoutADriver(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		if err := os.Mkdir(r.folder, 0o700); err != nil {
			r.t.Fatal(err)
		}
		r.put("gpu-device-plugin", expiring(-30*time.Minute, "nvidia.com/gpu.count=8", "nvidia.com/gpu.present=true"))
		r.want(nil)
		r.check("at the start", map[string]string{"gpu-device-plugin": expiring(0, "nvidia.com/gpu.count=8",
			"nvidia.com/gpu.present=true")})
		time.Sleep(2*time.Hour + time.Minute)
		r.check("after two hours", map[string]string{"gpu-device-plugin": expiring(2*time.Hour, "nvidia.com/gpu.count=8",
			"nvidia.com/gpu.present=true")})
		for what, content := range map[string]string{
			"expired": expiring(0, "nvidia.com/gpu.count=8"), "without an end": "nvidia.com/gpu.count=8\n",
		} {
			r.put("gpu-device-plugin", content)
			time.Sleep(time.Hour)
			r.check(what, map[string]string{"gpu-device-plugin": content})
		}
	})
}

// TestOtherPrograms: nothing is written beside another program's labels of GPUs. The problem is
// reported once, and ends with the other file.
func TestOtherPrograms(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		if err := os.Mkdir(r.folder, 0o700); err != nil {
			r.t.Fatal(err)
		}
		for name, content := range map[string]string{
			"old": expiring(-2*time.Hour, "nvidia.com/gpu.count=8"), "other": "vendor/feature=1\n",
			".gfd": "nvidia.com/gpu.count=1\n", ".gpu-device-plugin.12.gpu-device-plugin.tmp": "left",
			"gfd": "nvidia.com/gpu.count=8\n",
		} {
			r.put(name, content)
		}
		if err := os.Mkdir(filepath.Join(r.folder, "folder"), 0o700); err != nil {
			r.t.Fatal(err)
		}
		r.put("../elsewhere", "nvidia.com/gpu.count=1\n")
		if err := os.Symlink("../elsewhere", filepath.Join(r.folder, "link")); err != nil {
			r.t.Fatal(err)
		}
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		others := map[string]string{"old": expiring(-2*time.Hour, "nvidia.com/gpu.count=8"), "other": "vendor/feature=1\n",
			".gfd": "nvidia.com/gpu.count=1\n", "gfd": "nvidia.com/gpu.count=8\n", "folder": "",
			"link": "nvidia.com/gpu.count=1\n"}
		r.check("beside GFD", others)
		time.Sleep(9*time.Minute + 45*time.Second)
		for _, name := range []string{"gfd", "link"} { // NFD follows links
			if err := r.problem.Value(); err == nil || !strings.Contains(err.Error(), name+" already has labels of GPUs") {
				r.t.Errorf("problem beside %s: %v", name, err)
			}
			if err := os.Remove(filepath.Join(r.folder, name)); err != nil {
				r.t.Fatal(err)
			}
			time.Sleep(time.Minute)
			delete(others, name)
		}
		others["gpu-device-plugin"] = expiring(11*time.Minute, "nvidia.com/gpu.count=8")
		r.check("without GFD", others)
		log := r.log.GetBuffer().String()
		if strings.Count(log, "Labels are not written") != 2 || strings.Count(log, "Labels are written again") != 1 ||
			r.problem.Value() != nil {
			r.t.Errorf("problem %v, log:\n%s", r.problem.Value(), log)
		}
	})
}

// TestNoFolder: without the folder of node-feature-discovery nothing is created, and writes are
// retried.
func TestNoFolder(t *testing.T) {
	t.Parallel()
	run(t, func(r *rig) {
		r.folder = filepath.Join(r.folder, "missing", "features.d")
		r.want(map[string]string{"nvidia.com/gpu.count": "8"})
		if err := r.problem.Value(); err == nil || !strings.Contains(err.Error(),
			"mount the folder of node-feature-discovery there") {
			r.t.Errorf("problem: %v", err)
		}
		if err := os.MkdirAll(filepath.Dir(r.folder), 0o700); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(31 * time.Second)
		r.check("the folder is there now", map[string]string{"gpu-device-plugin": expiring(30*time.Second,
			"nvidia.com/gpu.count=8")})
	})
}

// TestTooLong: a file that node-feature-discovery would ignore is not written.
func TestTooLong(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "gfd")
	for size, want := range map[int]bool{64 << 10: true, 64<<10 + 1: false} {
		labels := map[string]string{"a": strings.Repeat("x", size-len("a=\n"))}
		if err := featurefile.Write(path, labels, time.Time{}); (err == nil) != want {
			t.Errorf("a file of %d bytes: %v", size, err)
		}
	}
	if got := string(featurefile.Content(map[string]string{"b": "2", "a": "1"}, time.Time{})); got != "a=1\nb=2\n" {
		t.Errorf("content %q", got)
	}
}

// TestTargets: the lifetime of a file follows from the interval of its writes.
func TestTargets(t *testing.T) {
	t.Parallel()
	set := map[string]string{"a": "b"}
	for name, test := range map[string]struct{ got, want featurefile.Target }{
		"of the daemon": {featurefile.DaemonTarget("/f", set),
			featurefile.Target{Path: "/f", Labels: set, Renewal: 15 * time.Minute, Lifetime: time.Hour}},
		"of GFD": {featurefile.DiscoveryTarget("/f", set, time.Minute),
			featurefile.Target{Path: "/f", Labels: set, Renewal: time.Minute, Lifetime: time.Hour}},
		"of GFD, rarely": {featurefile.DiscoveryTarget("/f", set, time.Hour),
			featurefile.Target{Path: "/f", Labels: set, Renewal: time.Hour, Lifetime: 4 * time.Hour}},
		"of GFD, only once": {featurefile.DiscoveryTarget("/f", set, 0), featurefile.Target{Path: "/f", Labels: set}},
	} {
		if diff := cmp.Diff(test.want, test.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestPrinter: labels are printed when they change and after each interval, if there is no file.
func TestPrinter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &prints{}
		wanted := feed.New(featurefile.Target{Renewal: time.Minute})
		p := &featurefile.Printer{Output: out, Wanted: func() (featurefile.Target, <-chan struct{}, <-chan struct{}) {
			target, changed := wanted.Latest()
			return target, changed, nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		printed := func(what string, passes time.Duration, want ...string) {
			t.Helper()
			time.Sleep(passes)
			synctest.Wait()
			out.mu.Lock()
			defer out.mu.Unlock()
			if diff := cmp.Diff(want, out.texts); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
			out.texts = nil
		}
		printed("before they are known", 90*time.Second)
		wanted.Publish(featurefile.DiscoveryTarget("", map[string]string{"a": "1"}, time.Minute))
		printed("at once", time.Second, "a=1\n")
		printed("after two intervals", 2*time.Minute, "a=1\n", "a=1\n")
		wanted.Publish(featurefile.DiscoveryTarget("", map[string]string{"a": "2", "b": "3"}, time.Minute))
		printed("others", time.Second, "a=2\nb=3\n")
		wanted.Publish(featurefile.DiscoveryTarget("", map[string]string{"a": "2", "b": "3"}, 0))
		printed("without an interval", time.Hour, "a=2\nb=3\n")
		wanted.Publish(featurefile.DiscoveryTarget("/f", map[string]string{"a": "4"}, time.Minute))
		printed("into a file", time.Hour)
		wanted.Publish(featurefile.Target{})
		printed("nowhere", time.Hour)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		wanted.Publish(featurefile.DiscoveryTarget("", map[string]string{"a": "5"}, time.Minute))
		out.err = errors.New("no space is left")
		if err := p.Run(t.Context()); !errors.Is(err, out.err) {
			t.Errorf("an output that takes no more: %v", err)
		}
	})
}

// prints records each printed set of labels.
type prints struct {
	mu    sync.Mutex // guards texts
	texts []string
	err   error
}

func (p *prints) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.texts = append(p.texts, string(text))
	return len(text), p.err
}
