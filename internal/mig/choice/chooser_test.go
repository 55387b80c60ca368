package choice

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
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

func TestChoose(t *testing.T) {
	t.Parallel()
	command := func(key, label string) *Order {
		return &Order{Layout: "c", GPUs: []string{"1"}, Key: key, Label: label}
	}
	for name, tt := range map[string]struct {
		said sources
		want string
	}{
		"nothing":                                     {sources{}, "  "},
		"the configuration":                           {sources{key: "k"}, "k configuration file "},
		"the label":                                   {sources{label: "l"}, "l label "},
		"the label before the configuration":          {sources{key: "k", label: "l"}, "l label "},
		"the command before both":                     {sources{"k", "l", command("k", "l")}, "c mig apply 1"},
		"the command alone":                           {sources{order: command("", "")}, "c mig apply 1"},
		"a label after the command":                   {sources{"k", "m", command("k", "l")}, "m label "},
		"a label that went after the command":         {sources{"k", "", command("k", "l")}, "k configuration file "},
		"a configuration after the command":           {sources{"n", "", command("k", "")}, "n configuration file "},
		"a configuration after it, below the label":   {sources{"n", "l", command("k", "l")}, "l label "},
		"nothing after the command but what was gone": {sources{"", "", command("k", "")}, "  "},
	} {
		layout, gpus, from := choose(tt.said)
		if got := layout + " " + string(from) + " " + strings.Join(gpus, ","); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// A desk is a Chooser with its inputs.
type desk struct {
	*Chooser
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
	d.Chooser = New(d.t.Context(), d.configs, d.dir, func() error { return nil },
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
	d.update(d.t.Context())
}

func (d *desk) apply(layout string, gpus ...string) error {
	_, err := d.Apply(d.t.Context(), layout, gpus)
	return err
}

// The most recent request wins, also in the next process before the API server responds.
func TestMostRecentRequestWins(t *testing.T) {
	t.Parallel()
	d := newDesk(t, config.MIG{Layout: "all-disabled", Replace: true, Evict: true, EvictTimeout: time.Hour})
	first := d.wants("all-disabled", "configuration file")
	if want := (mig.DesiredLayout{Layout: "all-disabled", Replace: true, Evict: true, EvictTimeout: time.Hour,
		Origin: "configuration file"}); !cmp.Equal(want, first) {
		t.Errorf("the first desired layout is %+v", first)
	}
	d.SetLabel(t.Context(), "all-balanced")
	d.wants("all-disabled", "configuration file") // the label is disabled
	d.set(func(m *config.MIG) { m.Label = true })
	d.wants("all-balanced", "label")
	d.restart()
	d.wants("all-balanced", "label")
	if err := d.apply("all-enabled", "0", "3"); err != nil {
		t.Fatal(err)
	}
	before := d.wants("all-enabled", "mig apply")
	if diff := cmp.Diff([]string{"0", "3"}, before.GPUs); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if err := d.apply("all-enabled", "0", "3"); err != nil {
		t.Fatal(err)
	}
	if again := d.wants("all-enabled", "mig apply"); again.OrderNumber <= before.OrderNumber {
		t.Errorf("the same command again does not have it tried again: %d after %d", again.OrderNumber, before.OrderNumber)
	}
	d.restart()
	d.SetLabel(t.Context(), "all-balanced") // the API server repeats the label
	d.wants("all-enabled", "mig apply")
	d.SetLabel(t.Context(), "all-1g.10gb")
	d.wants("all-1g.10gb", "label")
	d.SetLabel(t.Context(), "all-balanced") // the order is no longer valid
	d.wants("all-balanced", "label")
	if err := d.apply("all-enabled"); err != nil {
		t.Fatal(err)
	}
	if err := d.apply(""); err != nil {
		t.Fatal(err)
	}
	d.wants("all-balanced", "label")
	d.SetLabel(t.Context(), "")
	d.wants("all-disabled", "configuration file")
	d.set(func(m *config.MIG) { m.Enabled = false })
	d.wants("", "")
	if err := d.apply("all-enabled"); !errors.Is(err, ErrOff) {
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
	d.update(t.Context())
	refused("a file that is none", "version must be v1")
	if err := d.apply("b"); err == nil {
		t.Error("a command with a bad file was taken")
	}
	d.layouts("a", "b")
	if err := d.apply("c"); err == nil || !strings.Contains(err.Error(), "give one of a, b") {
		t.Errorf("a command with an unknown name: %v", err)
	}
	d.wants("a", "configuration file")
	if again := d.wants("a", "configuration file"); again.File == nil {
		t.Error("no file")
	}
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
	d.update(t.Context())
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
	d.clock.Step(labelTimeout)
	d.update(t.Context())
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
		d.Chooser = New(t.Context(), d.configs, d.dir, func() error { return waits },
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
		hangs := make(chan struct{})
		go func() { _ = d.disk.Do(t.Context(), time.Minute, func() error { <-hangs; return nil }) }()
		synctest.Wait()
		began := time.Now()
		d.state = savedState{Version: stateVersion} // nothing was read
		d.Reload(t.Context())
		d.SetLabel(t.Context(), "")
		d.wants("all-disabled", "configuration file")
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("took %v", took)
		}
		close(hangs)
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
	path := filepath.Join(d.dir, stateFileName)
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
	d.stateDir = ""
	if err := d.apply("all-enabled"); err != nil {
		t.Error(err)
	}
	d.wants("all-enabled", "mig apply")
}
