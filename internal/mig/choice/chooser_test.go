package choice_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig/choice"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// The most recent request wins: a command until the configuration or the label changes, then the
// label, then the configuration. The next process chooses the same before the API server responds.
func TestMostRecentRequestWins(t *testing.T) {
	t.Parallel()
	for requests, want := range map[string][2]string{
		"":                                {"", ""},
		"key=k":                           {"k", "configuration file"},
		"label=l":                         {"l", "label"},
		"label=l key=k":                   {"l", "label"},
		"command=c":                       {"c", "mig apply"},
		"key=k label=l command=c":         {"c", "mig apply"},
		"key=k label=l command=c label=l": {"c", "mig apply"}, // the API server repeats the label
		"key=k label=l command=c label=m": {"m", "label"},
		"key=k label=l command=c label=":  {"k", "configuration file"},
		"key=k command=c key=n":           {"n", "configuration file"},
		"key=k label=l command=c key=n":   {"l", "label"},
		"key=k command=c key=":            {"", ""},
		"key=k label=l command=c label=m label=l": {"l", "label"}, // the command is no longer valid
		"key=k label=l command=c command=":        {"l", "label"},
	} {
		t.Run(requests, func(t *testing.T) {
			t.Parallel()
			d := newDesk(t, config.MIG{Label: true})
			d.SetLabel(t.Context(), "") // the API server responds: the node has no label
			for request := range strings.FieldsSeq(requests) {
				switch source, layout, _ := strings.Cut(request, "="); source {
				case "key":
					d.set(func(m *config.MIG) { m.Layout = layout })
				case "label":
					d.SetLabel(t.Context(), layout)
				case "command":
					if err := d.apply(layout); err != nil {
						t.Fatal(err)
					}
				}
			}
			d.wants(want[0], want[1])
			d.restart()
			d.wants(want[0], want[1])
		})
	}
}

// A desk is a Chooser with its inputs.
type desk struct {
	*choice.Chooser
	t       *testing.T
	configs *feed.Feed[config.Config]
	dir     string
	clock   *clocktesting.FakeClock
}

func newDesk(t *testing.T, m config.MIG) *desk {
	t.Helper()
	m.Enabled = true
	d := &desk{t: t, configs: feed.New(config.Config{Live: config.Live{MIG: m}}), dir: t.TempDir(),
		clock: clocktesting.NewFakeClock(time.Now())}
	d.restart()
	return d
}

// restart creates the Chooser of a new process.
func (d *desk) restart() {
	d.Chooser = choice.New(d.t.Context(), d.configs, d.dir, func() error { return nil },
		func() (bool, bool) { return false, true }, d.clock)
}

// layouts writes a file with layouts of these names, and returns its path.
func (d *desk) layouts(names ...string) string {
	d.t.Helper()
	text := "version: v1\nmig-configs:\n"
	for _, name := range names {
		text += "  " + name + ":\n  - {devices: all, mig-enabled: false}\n"
	}
	path := filepath.Join(d.dir, "layouts.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		d.t.Fatal(err)
	}
	return path
}

// wants checks the present layout and its origin.
func (d *desk) wants(layout, origin string) mig.DesiredLayout {
	d.t.Helper()
	w := d.Desired().Value()
	if w.Layout != layout || w.Origin != origin {
		d.t.Errorf("the desired layout is %q from %q, want %q from %q", w.Layout, w.Origin, layout, origin)
	}
	return w
}

func (d *desk) set(change func(*config.MIG)) {
	c := d.configs.Value()
	change(&c.MIG)
	d.configs.Publish(c)
	d.Reload(d.t.Context())
}

func (d *desk) apply(layout string, gpus ...string) error {
	_, err := d.Apply(d.t.Context(), layout, gpus)
	return err
}

// A desired layout has all that the configuration says about changes. The same command again is
// another order. Labels count only if they are enabled, and layouts only if they are.
func TestDesiredLayout(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{Layout: "all-disabled", Replace: true, Evict: true, EvictTimeout: time.Hour})
	d.SetLabel(t.Context(), "all-balanced")
	if diff := cmp.Diff(mig.DesiredLayout{Layout: "all-disabled", Replace: true, Evict: true, EvictTimeout: time.Hour,
		Origin: "configuration file"}, d.Desired().Value()); diff != "" {
		t.Errorf("the first desired layout (-want +got):\n%s", diff)
	}
	for number := range uint64(2) {
		if err := d.apply("all-enabled", "0", "3"); err != nil {
			t.Fatal(err)
		}
		if w := d.wants("all-enabled", "mig apply"); w.OrderNumber != number+1 || !cmp.Equal([]string{"0", "3"}, w.GPUs) {
			t.Errorf("after %d commands: %+v", number+1, w)
		}
	}
	d.set(func(m *config.MIG) { m.Enabled = false })
	d.wants("", "")
	if err := d.apply("all-enabled"); !errors.Is(err, choice.ErrOff) {
		t.Errorf("a command where layouts are not changed: %v", err)
	}
}

// An unusable file, or a file without the layout, changes nothing: the last layout stays in force,
// and the error gives the reason.
func TestUnknownLayout(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{})
	path := d.layouts("a", "b")
	d.set(func(m *config.MIG) { m.File, m.Layout = path, "a" })
	first := d.wants("a", "configuration file")
	refused := func(what, why string) {
		t.Helper()
		if w := d.wants("a", "configuration file"); !cmp.Equal(w.File.Names(), first.File.Names()) {
			t.Errorf("%s: the desired layout has another file", what)
		}
		if err := d.Choices().Value().Err; err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: error %v, want %q", what, err, why)
		}
	}
	d.set(func(m *config.MIG) { m.Layout = "c" })
	refused("a name that is not in the file", "give one of a, b")
	d.set(func(m *config.MIG) { m.Layout, m.File = "a", path+".not-there" })
	refused("no file", "check mig.configFile")
	d.set(func(m *config.MIG) { m.File = path })
	if err := d.Choices().Value().Err; err != nil {
		t.Errorf("good again: %v", err)
	}
	if err := os.WriteFile(path, []byte("version: v2"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Reload(t.Context())
	refused("a file that is none", "version must be v1")
	if err := d.apply("b"); err == nil {
		t.Error("a command with a bad file was taken")
	}
	d.layouts("a", "b")
	if err := d.apply("c"); err == nil || !strings.Contains(err.Error(), "give one of a, b") {
		t.Errorf("a command with an unknown name: %v", err)
	}
	d.wants("a", "configuration file")
}

// The file is read again periodically. The layout is published only if the content has changed.
func TestFileOfLayouts(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{})
	path := d.layouts("a", "b")
	d.set(func(m *config.MIG) { m.File, m.Layout = path, "a" })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	_, changed := d.Desired().Latest()
	d.Reload(t.Context())
	select {
	case <-changed:
		t.Error("the owner is told what it knows")
	default:
	}
	d.layouts("a") // a partially written file is refused at first
	poll.Until(t, "the file is read again", func() bool {
		d.clock.Step(time.Second)
		return cmp.Equal([]string{"a"}, d.Desired().Value().File.Names())
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A node whose label was never known waits some seconds for it, because otherwise its first layout
// would be applied twice.
func TestWaitForFirstLabel(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{Layout: "all-disabled", Label: true})
	d.wants("", "")
	d.clock.Step(5 * time.Second)
	d.Reload(t.Context())
	d.wants("all-disabled", "configuration file")
	d.SetLabel(t.Context(), "")
	d.restart()
	d.wants("all-disabled", "configuration file")
}

// In a rolling update one of two processes leads and saves its orders. The other one reads them
// when it becomes the leader, and saves its own.
func TestStateOfTwoProcesses(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{Label: true, Layout: "all-disabled"})
	d.SetLabel(t.Context(), "")
	earlier := d.Chooser
	waits := errors.New("another process leads")
	next := func() {
		waits = errors.New("another process leads")
		d.Chooser = choice.New(t.Context(), d.configs, d.dir, func() error { return waits },
			func() (bool, bool) { return false, true }, d.clock)
	}
	leads := func() { waits = nil; d.Reload(t.Context()) }
	next()
	if _, err := earlier.Apply(t.Context(), "all-enabled", []string{"1"}); err != nil {
		t.Fatal(err)
	}
	d.wants("all-disabled", "configuration file")
	leads()
	if w := d.wants("all-enabled", "mig apply"); !cmp.Equal([]string{"1"}, w.GPUs) {
		t.Errorf("the order is about %v", w.GPUs)
	}
	// A label received by the first process takes precedence over an earlier order of the second one.
	next()
	if err := d.apply("all-balanced"); err != nil {
		t.Fatal(err)
	}
	earlier.SetLabel(t.Context(), "all-1g.10gb")
	d.wants("all-balanced", "mig apply")
	leads()
	d.wants("all-1g.10gb", "label")
	// A label and an order received by the second process take precedence.
	next()
	d.SetLabel(t.Context(), "all-7g.80gb")
	earlier.SetLabel(t.Context(), "all-disabled")
	if _, err := earlier.Apply(t.Context(), "all-enabled", nil); err != nil {
		t.Fatal(err)
	}
	leads()
	d.wants("all-7g.80gb", "label")
	next()
	if err := d.apply("all-balanced"); err != nil {
		t.Fatal(err)
	}
	leads()
	d.restart()
	d.wants("all-balanced", "mig apply")
}

// A hanging state directory delays the start by some seconds, and loses no saved state.
func TestHangingDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, config.MIG{Label: true, Layout: "all-disabled"})
		if err := d.apply("all-enabled"); err != nil {
			t.Fatal(err)
		}
		d.restart()
		answer := d.HangDisk()
		synctest.Wait()
		began := time.Now()
		d.Reload(t.Context())
		d.SetLabel(t.Context(), "")
		d.wants("all-disabled", "configuration file")
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("took %v", took)
		}
		answer()
		d.Reload(t.Context())
		d.wants("all-enabled", "mig apply")
		d.restart()
		d.wants("all-enabled", "mig apply")
	})
}

// An unreadable state file is set aside. An unwritable one does not prevent changes.
func TestUnwritableState(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{Label: true})
	path := filepath.Join(d.dir, "mig-wish.json")
	if err := os.WriteFile(path, []byte(`{"version": 9, "label": "all-enabled"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	d.restart()
	d.wants("", "")
	if _, err := os.Stat(path + ".damaged"); err != nil {
		t.Error(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	d.SetLabel(t.Context(), "all-balanced")
	d.wants("all-balanced", "label")
}
