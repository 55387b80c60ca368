package choice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/mig"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/layout"
)

const (
	// rereadEvery is how often the file of layouts is read again.
	rereadEvery = 10 * time.Second
	// labelPatience is how long a node of which the label was never known waits for it, before the
	// configuration file counts.
	labelPatience = 5 * time.Second
	// diskTimeout is how long the state directory may take: a disk that hangs keeps no GPU from pods.
	diskTimeout = 5 * time.Second
	// MaxLayouts is the largest file of layouts that is read, in bytes.
	MaxLayouts = 1 << 20
)

// ErrOff is the error of commands where layouts are not changed.
var ErrOff = errors.New("this daemon does not change MIG layouts: set mig.enabled to true in its configuration file, or start it with " +
	"--mig-enabled; docs/mig.md says which rights it needs")

// errDefault is the error of a label that NVIDIA's GPU operator may have given to the node.
var errDefault = errors.New("the label nvidia.com/mig.config=all-disabled may be the default of NVIDIA's GPU operator, and would remove " +
	"the MIG devices of this node; to confirm it, set the label to another layout and back, or mig.layout to all-disabled, or run mig apply")

// A Decision is the layout that counts. The zero value is that of a node for which none is named.
type Decision struct {
	// Layout is its name, and From who named it.
	Layout string
	From   Origin
	// Err is why the Wish is still an earlier one: the file of layouts cannot be used, or does not
	// have the layout. It is nil otherwise.
	Err error
	// Wish is the wish for the owner of the layouts.
	Wish mig.Wish
}

// A Chooser decides which layout counts. Make it with New.
type Chooser struct {
	configs   *feed.Feed[config.Config]
	stateDir  string
	lead      func() error
	divided   func() (divided, known bool)
	disk      *statefile.Disk
	clock     clock.WithTicker
	started   time.Time
	decisions *feed.Feed[Decision]
	wishes    *feed.Feed[mig.Wish]

	mu      sync.Mutex // guards all following fields
	state   savedState
	told    bool // the label, in this life
	ordered bool // the command is this process's, and not saved
	read    bool // what an earlier process saved is in the state
	unsaved bool
	problem error // of the last use of the state directory
	again   uint64
	path    string // of the file of layouts that was read last
	content []byte
	file    *layout.File
}

// The file in the state directory with what the configuration file does not say, so that a process
// that starts makes the same layout.
const (
	stateFile    = "mig-wish.json"
	stateVersion = 1
	maxState     = 64 << 10
)

type savedState struct {
	Version int `json:"version"`
	// Label is the last value of the label that is known; nil if none ever was.
	Label *string `json:"label,omitempty"`
	// Default says that the label came as all-disabled where there was none: NVIDIA's GPU operator
	// gives it to nodes without a label.
	Default bool `json:"default,omitempty"`
	// Command is the last command of mig apply; nil if it does not count any more.
	Command *Command `json:"command,omitempty"`
}

// New returns a Chooser that has made its first choice, by the configuration in force and what the
// state directory remembers. Nothing is remembered without a state directory. Lead returns why this
// process writes nothing there; nil if it may. Divided reports whether GPUs of the node are in MIG
// mode, and whether that is known.
func New(
	ctx context.Context, configs *feed.Feed[config.Config], stateDir string, lead func() error, divided func() (divided,
		known bool),
	c clock.WithTicker,
) *Chooser {
	l := &Chooser{
		configs: configs, stateDir: stateDir, lead: lead, divided: divided, disk: statefile.NewDisk(), clock: c, started: c.Now(),
		decisions: feed.New(Decision{}), wishes: feed.New(mig.Wish{}),
	}
	l.state.Version = stateVersion
	l.Reload(ctx)
	return l
}

// Decisions returns the feed of the layout that counts.
func (l *Chooser) Decisions() *feed.Feed[Decision] { return l.decisions }

// Wishes returns the feed of the wish for the owner of the layouts.
func (l *Chooser) Wishes() *feed.Feed[mig.Wish] { return l.wishes }

// Run follows the configuration and the file of layouts until ctx ends, and returns nil then.
func (l *Chooser) Run(ctx context.Context) error {
	ticker := l.clock.NewTicker(rereadEvery)
	defer ticker.Stop()
	patience := l.clock.After(labelPatience)
	for {
		_, configured := l.configs.Latest()
		l.decide(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-configured:
		case <-ticker.C():
		case <-patience:
		}
	}
}

// Reload reads the wish that an earlier process has saved since this process started, and returns
// when the owner knows it. Call it when this process begins to change layouts.
func (l *Chooser) Reload(ctx context.Context) {
	l.mu.Lock()
	l.recall(ctx)
	l.mu.Unlock()
	l.decide(ctx)
}

// SetLabel tells the value of the node's label; empty if the node does not have it.
func (l *Chooser) SetLabel(ctx context.Context, value string) {
	l.mu.Lock()
	if known := l.state.Label; known == nil || *known != value {
		l.state.Default = value == layout.AllDisabled && (known == nil || *known == "")
		l.state.Label, l.unsaved = &value, true
	}
	l.told = true
	l.mu.Unlock()
	l.decide(ctx)
}

// Apply chooses the layout of that name for the given GPUs (for all GPUs if gpus is empty), until
// the configuration file or the label names another layout. An empty name ends the choice of an
// earlier Apply. An error says that the configuration does not let layouts be changed, or why the
// layout cannot be used; then nothing has changed.
func (l *Chooser) Apply(ctx context.Context, name string, gpus []string) (Decision, error) {
	l.mu.Lock()
	c := l.configs.Value().MIG
	if !c.Enabled {
		l.mu.Unlock()
		return Decision{}, ErrOff
	}
	var command *Command
	if name != "" {
		if _, err := l.find(c.File, name); err != nil {
			l.mu.Unlock()
			return Decision{}, err
		}
		s := l.said(c)
		command = &Command{Layout: name, GPUs: gpus, Key: s.key, Label: s.label}
	}
	l.again++
	l.state.Command, l.ordered, l.unsaved = command, true, true
	l.mu.Unlock()
	return l.decide(ctx), nil
}

// Layouts returns the file of layouts; nil if they are the built-in ones. The error says why it
// cannot be used.
func (l *Chooser) Layouts() (*layout.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.layouts(l.configs.Value().MIG.File)
}

// said returns what the configuration and the label say, and the command.
func (l *Chooser) said(c config.MIG) said {
	s := said{key: c.Layout, command: l.state.Command}
	if c.Label && l.state.Label != nil {
		s.label = *l.state.Label
	}
	return s
}

// decide publishes the layout that counts, if it is another one than before.
func (l *Chooser) decide(ctx context.Context) Decision {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.save(ctx)
	c, before := l.configs.Value().MIG, l.decisions.Value()
	var next Decision
	if c.Enabled {
		next = l.next(c, before)
	}
	if reflect.DeepEqual(next.Wish, before.Wish) && next.Layout == before.Layout && next.From == before.From &&
		fmt.Sprint(next.Err) == fmt.Sprint(before.Err) {
		return before
	}
	log := klog.FromContext(ctx)
	if next.Err != nil {
		log.Info("Cannot use the MIG layout; the last one that could be used stays in force", "layout", next.Layout, "from",
			string(next.From),
			"reason", next.Err.Error())
	} else if next.Layout != before.Layout || next.From != before.From {
		log.Info("Chose the MIG layout", "layout", next.Layout, "from", string(next.From))
	}
	l.decisions.Publish(next)
	l.wishes.Publish(next.Wish)
	return next
}

// next returns the layout that counts now.
func (l *Chooser) next(c config.MIG, before Decision) Decision {
	if c.Label && l.state.Label == nil && l.state.Command == nil && l.clock.Since(l.started) < labelPatience {
		return Decision{}
	}
	s := l.said(c)
	name, gpus, from := choose(s)
	if s.command != nil && from != FromCommand { // what it was given over says something else now
		l.state.Command, l.unsaved = nil, true
	}
	next := Decision{Layout: name, From: from, Wish: before.Wish}
	if name == "" {
		return Decision{}
	}
	file, err := l.find(c.File, name)
	if err == nil && from == FromLabel && l.state.Default && c.Layout != name {
		divided, known := l.divided()
		if !known {
			return before
		}
		if divided {
			err = errDefault
		}
	}
	if err != nil {
		next.Err = err
		return next
	}
	next.Wish = mig.Wish{
		Layout: name, File: file, GPUs: gpus, Replace: c.Replace, Evict: c.Evict, EvictTimeout: c.EvictTimeout, Pause: c.PauseClients,
		Origin: string(from), Again: l.again,
	}
	return next
}

// find returns the file that has a layout, and nil for a layout that is built in. Whether there is
// a built-in one depends on the GPUs: the owner says so.
func (l *Chooser) find(path, name string) (*layout.File, error) {
	file, err := l.layouts(path)
	if file == nil {
		return nil, err
	}
	if _, err := file.Layout(name); err != nil {
		return nil, fmt.Errorf("MIG layouts in %s: %w", path, err)
	}
	return file, nil
}

// layouts returns a file of layouts, and nil without a path. The file is the same one as long as
// its content is.
func (l *Chooser) layouts(path string) (*layout.File, error) {
	if path == "" {
		return nil, nil
	}
	content, err := statefile.Read(path, MaxLayouts)
	if err != nil {
		return nil, fmt.Errorf("read the MIG layouts: %w; check mig.configFile and what is mounted there", err)
	}
	if l.file == nil || path != l.path || !bytes.Equal(content, l.content) {
		file, err := layout.Parse(content)
		if err != nil {
			return nil, fmt.Errorf("MIG layouts in %s: %w", path, err)
		}
		l.path, l.content, l.file = path, content, &file
	}
	return l.file, nil
}

// recall takes in what an earlier process has saved. A label that this process was told stays, and
// what it was asked for.
func (l *Chooser) recall(ctx context.Context) {
	if l.stateDir == "" {
		return
	}
	answer := make(chan savedState, 1) // nothing without a file
	err := l.use(ctx, func(path string) error {
		var saved savedState
		found, err := statefile.ReadState(path, maxState, stateVersion, &saved)
		if err != nil {
			klog.FromContext(ctx).Info("Cannot read which MIG layout was asked for last; it is kept beside it", "path",
				stateFile+statefile.Damaged,
				"reason", err.Error())
		}
		if found {
			answer <- saved
		}
		return nil
	})
	l.read = err == nil
	select {
	case saved := <-answer:
		if l.told {
			saved.Label = l.state.Label
		}
		if l.ordered {
			saved.Command = l.state.Command
		}
		l.state = saved
	default:
	}
}

// save writes what is not saved, if this process leads. What cannot be written is written the next
// time.
func (l *Chooser) save(ctx context.Context) {
	if l.stateDir == "" || !l.unsaved || l.lead() != nil {
		return // Reload has it written when this process leads
	}
	if !l.read {
		l.recall(ctx)
	}
	now := l.state
	if l.read && l.use(ctx, func(path string) error { return statefile.WriteState(path, now) }) == nil {
		l.unsaved, l.ordered = false, false
	}
}

// use works in the state directory. An error is logged once.
func (l *Chooser) use(ctx context.Context, work func(path string) error) error {
	err := l.disk.Do(context.WithoutCancel(ctx), diskTimeout,
		func() error { return work(filepath.Join(l.stateDir, stateFile)) })
	if err != nil && fmt.Sprint(err) != fmt.Sprint(l.problem) {
		klog.FromContext(ctx).Info("Cannot save which MIG layout is asked for; a restart may forget it", "reason",
			err.Error())
	}
	l.problem = err
	return err
}
