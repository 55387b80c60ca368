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
	// labelTimeout is how long a node waits for an unknown label before the configuration
	// file counts.
	labelTimeout = 5 * time.Second
	// diskTimeout limits one operation in the state directory: a hanging disk must not keep
	// GPUs from pods.
	diskTimeout = 5 * time.Second
	// MaxLayouts is the size limit of the file of layouts, in bytes.
	MaxLayouts = 1 << 20
)

// ErrOff is the error of commands if MIG layouts are disabled.
var ErrOff = errors.New("MIG layouts are disabled on this node: set mig.enabled to true in the configuration file, " +
	"or start the daemon with --mig-enabled; docs/mig.md lists the rights that it needs")

// errDefault is the error for a label that NVIDIA's GPU operator may have set by default.
var errDefault = errors.New("the label nvidia.com/mig.config=all-disabled may be the default of NVIDIA's GPU " +
	"operator, and would remove the MIG devices of this node; to confirm it, set the label to another layout and " +
	"back, or mig.layout to all-disabled, or run mig apply")

// A Choice is the layout in force. The zero Choice is that of a node without a layout.
type Choice struct {
	// Layout is the name of the layout, and From its source.
	Layout string
	From   Origin
	// Err says why Desired is still an earlier layout: the file of layouts is unusable or does not
	// contain Layout. It is nil otherwise.
	Err error
	// Desired is the layout for the mig.Controller.
	Desired mig.DesiredLayout
}

// A Chooser chooses the layout. Create it with New.
type Chooser struct {
	configs   *feed.Feed[config.Config]
	stateDir  string
	mayWrite  func() error
	isDivided func() (isDivided, known bool)
	disk      *statefile.Disk
	clock     clock.WithTicker
	started   time.Time
	choices   *feed.Feed[Choice]
	desired   *feed.Feed[mig.DesiredLayout]

	mu sync.Mutex // guards all following fields
	savedSources
	layoutFile
}

// savedSources are the sources of layouts outside the configuration file, and how much of them is on
// disk.
type savedSources struct {
	state        savedState
	labelKnown   bool // SetLabel was called in this process
	orderUnsaved bool // the order is from this process and not saved
	restored     bool // state includes the state saved by an earlier process
	unsaved      bool
	problem      error // of the last access to the state directory
	orderNumber  uint64
}

// A layoutFile is the last read file of layouts.
type layoutFile struct {
	path    string
	content []byte
	file    *layout.File
}

// The file in the state directory. It saves the choices that are not in the configuration
// file, so that the next process chooses the same layout.
const (
	stateFileName = "mig-wish.json"
	stateVersion  = 1
	maxState      = 64 << 10
)

type savedState struct {
	Version int `json:"version"`
	// Label is the last known value of the label; nil if never known.
	Label *string `json:"label,omitempty"`
	// MaybeDefault says that the label appeared with the value all-disabled. NVIDIA's GPU
	// operator sets all-disabled on nodes without the label.
	MaybeDefault bool `json:"default,omitempty"`
	// Order is the last run of mig apply; nil if it is no longer valid.
	Order *Order `json:"command,omitempty"`
}

// New returns a Chooser with a first choice, made from the configuration and the saved
// state. Without a state directory no state is saved. mayWrite returns an error if this
// process must not write to the state directory. isDivided reports whether GPUs of the node
// are in MIG mode, and whether their mode is known.
func New(
	ctx context.Context, configs *feed.Feed[config.Config], stateDir string, mayWrite func() error,
	isDivided func() (divided, known bool),
	c clock.WithTicker,
) *Chooser {
	l := &Chooser{
		configs: configs, stateDir: stateDir, mayWrite: mayWrite, isDivided: isDivided, disk: statefile.NewDisk(),
		clock: c, started: c.Now(),
		choices: feed.New(Choice{}), desired: feed.New(mig.DesiredLayout{}),
	}
	l.state.Version = stateVersion
	l.Reload(ctx)
	return l
}

// Choices returns the feed of the choice.
func (l *Chooser) Choices() *feed.Feed[Choice] { return l.choices }

// Desired returns the feed of the layout for the mig.Controller.
func (l *Chooser) Desired() *feed.Feed[mig.DesiredLayout] { return l.desired }

// Run follows the configuration and the file of layouts until ctx ends, and then returns nil.
func (l *Chooser) Run(ctx context.Context) error {
	ticker := l.clock.NewTicker(rereadEvery)
	defer ticker.Stop()
	labelTimeout := l.clock.After(labelTimeout)
	for {
		_, configChanged := l.configs.Latest()
		l.update(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-configChanged:
		case <-ticker.C():
		case <-labelTimeout:
		}
	}
}

// Reload reads the state saved by an earlier process after the start of this process, and
// updates the choice. Call Reload when this process starts to change layouts.
func (l *Chooser) Reload(ctx context.Context) {
	l.mu.Lock()
	l.restore(ctx)
	l.mu.Unlock()
	l.update(ctx)
}

// SetLabel sets the value of the node label; empty if the node does not have it.
func (l *Chooser) SetLabel(ctx context.Context, value string) {
	l.mu.Lock()
	if known := l.state.Label; known == nil || *known != value {
		l.state.MaybeDefault = value == layout.AllDisabled && (known == nil || *known == "")
		l.state.Label, l.unsaved = &value, true
	}
	l.labelKnown = true
	l.mu.Unlock()
	l.update(ctx)
}

// Apply chooses a layout by name for the given GPUs (all GPUs if gpus is empty), until the
// configuration file or the label names another layout. An empty name cancels an earlier Apply. The
// error says that layouts are disabled or why the layout is unusable; then the choice is unchanged.
func (l *Chooser) Apply(ctx context.Context, name string, gpus []string) (Choice, error) {
	l.mu.Lock()
	c := l.configs.Value().MIG
	if !c.Enabled {
		l.mu.Unlock()
		return Choice{}, ErrOff
	}
	var order *Order
	if name != "" {
		if _, err := l.find(c.File, name); err != nil {
			l.mu.Unlock()
			return Choice{}, err
		}
		s := l.sources(c)
		order = &Order{Layout: name, GPUs: gpus, Key: s.key, Label: s.label}
	}
	l.orderNumber++
	l.state.Order, l.orderUnsaved, l.unsaved = order, true, true
	l.mu.Unlock()
	return l.update(ctx), nil
}

// Layouts returns the file of layouts; nil for the built-in layouts. The error says why the file is
// unusable.
func (l *Chooser) Layouts() (*layout.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.layouts(l.configs.Value().MIG.File)
}

// sources returns the layouts of the configuration and the label, and the order.
func (l *Chooser) sources(c config.MIG) sources {
	s := sources{key: c.Layout, order: l.state.Order}
	if c.Label && l.state.Label != nil {
		s.label = *l.state.Label
	}
	return s
}

// update publishes the choice if it has changed.
func (l *Chooser) update(ctx context.Context) Choice {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.save(ctx)
	c, before := l.configs.Value().MIG, l.choices.Value()
	var next Choice
	if c.Enabled {
		next = l.next(c, before)
	}
	if reflect.DeepEqual(next.Desired, before.Desired) && next.Layout == before.Layout && next.From == before.From &&
		fmt.Sprint(next.Err) == fmt.Sprint(before.Err) {
		return before
	}
	log := klog.FromContext(ctx)
	if next.Err != nil {
		log.Info("Cannot use the MIG layout; the previous layout stays in force", "layout", next.Layout, "from",
			string(next.From),
			"reason", next.Err.Error())
	} else if next.Layout != before.Layout || next.From != before.From {
		log.Info("Chose the MIG layout", "layout", next.Layout, "from", string(next.From))
	}
	l.choices.Publish(next)
	l.desired.Publish(next.Desired)
	return next
}

// next returns the choice for the present sources.
func (l *Chooser) next(c config.MIG, before Choice) Choice {
	if c.Label && l.state.Label == nil && l.state.Order == nil && l.clock.Since(l.started) < labelTimeout {
		return Choice{}
	}
	s := l.sources(c)
	name, gpus, from := choose(s)
	if s.order != nil && from != FromOrder { // the configuration file or the label has changed since
		l.state.Order, l.unsaved = nil, true
	}
	next := Choice{Layout: name, From: from, Desired: before.Desired}
	if name == "" {
		return Choice{}
	}
	file, err := l.find(c.File, name)
	if err == nil && from == FromLabel && l.state.MaybeDefault && c.Layout != name {
		divided, known := l.isDivided()
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
	next.Desired = mig.DesiredLayout{
		Layout: name, File: file, GPUs: gpus, Replace: c.Replace, Evict: c.Evict, EvictTimeout: c.EvictTimeout,
		Pause:  c.PauseClients,
		Origin: string(from), OrderNumber: l.orderNumber,
	}
	return next
}

// find returns the file that contains the layout, and nil for a built-in layout. The Controller
// checks whether the built-in layout exists for the GPUs.
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

// layouts returns the file of layouts, and nil without a path. It returns the same pointer until
// the content changes.
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

// restore reads the state saved by an earlier process. A label and an order received by this
// process take precedence.
func (l *Chooser) restore(ctx context.Context) {
	if l.stateDir == "" {
		return
	}
	result := make(chan savedState, 1) // empty without a file
	err := l.withStateFile(ctx, func(path string) error {
		var saved savedState
		found, err := statefile.ReadState(path, maxState, stateVersion, &saved)
		if err != nil {
			klog.FromContext(ctx).Info("Cannot read the saved MIG layout; the damaged file is set aside", "path",
				stateFileName+statefile.Damaged,
				"reason", err.Error())
		}
		if found {
			result <- saved
		}
		return nil
	})
	l.restored = err == nil
	select {
	case saved := <-result:
		if l.labelKnown {
			saved.Label = l.state.Label
		}
		if l.orderUnsaved {
			saved.Order = l.state.Order
		}
		l.state = saved
	default:
	}
}

// save writes unsaved state if this process leads. A failed write is repeated by the next call.
func (l *Chooser) save(ctx context.Context) {
	if l.stateDir == "" || !l.unsaved || l.mayWrite() != nil {
		return // Reload saves the state when this process becomes the leader
	}
	if !l.restored {
		l.restore(ctx)
	}
	now := l.state
	if l.restored && l.withStateFile(ctx, func(path string) error { return statefile.WriteState(path, now) }) == nil {
		l.unsaved, l.orderUnsaved = false, false
	}
}

// withStateFile accesses the state file. The same error is logged once.
func (l *Chooser) withStateFile(ctx context.Context, do func(path string) error) error {
	err := l.disk.Do(context.WithoutCancel(ctx), diskTimeout,
		func() error { return do(filepath.Join(l.stateDir, stateFileName)) })
	if err != nil && fmt.Sprint(err) != fmt.Sprint(l.problem) {
		klog.FromContext(ctx).Info("Cannot save the MIG layout; a restart may lose it", "reason",
			err.Error())
	}
	l.problem = err
	return err
}
