package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
)

const (
	// lookEvery is how often daemons are asked that are not ready; those that are, after askRarely,
	// and when the mark of their start is gone: a daemon may end and be started again between two
	// questions.
	lookEvery = time.Second
	askRarely = 10 * time.Second
	// probeTimeout bounds one probe. Its program then has another second to end, and whoever asked
	// goes on without it after diskTimeout. A resource that is new is not listed before the end of its
	// first probe.
	probeTimeout = 4 * time.Second
	diskTimeout  = probeTimeout + time.Second
)

// limitCommands are what a Prober asks. Every control daemon answers them by a line each, the
// second one by none without a limit.
const limitCommands = probeCommand + "\nget_default_device_pinned_mem_limit 0"

// A Prober asks the control daemons of resources whether they are there. Make it with NewProber.
type Prober struct {
	root    string
	clock   clock.WithTicker
	unready *feed.Feed[map[string]string]
	wish    chan struct{} // holds one wish for a look at once

	mu      sync.Mutex // guards all following fields
	targets map[string]target
}

// A target is a resource that is followed.
type target struct {
	reason   string // why it cannot be used; empty when it can
	answered bool   // the reason is of an answer
	limits   string // what it answered
	asking   bool   // an answer is waited for
	asked    time.Time
	disk     *statefile.Disk
}

// NewProber returns a Prober of the daemons below root, which asks them while it runs.
func NewProber(root string, c clock.WithTicker) *Prober {
	return &Prober{
		root: root, clock: c, unready: feed.New[map[string]string](nil), wish: make(chan struct{},
			1), targets: map[string]target{},
	}
}

// Unready returns the feed of the resources that are followed and cannot be used, by name, each
// with the reason: a sentence without a full stop. A resource is there from when it is followed
// until its daemon has answered.
func (p *Prober) Unready() *feed.Feed[map[string]string] { return p.unready }

// Asked reports whether the daemon of a resource has answered or has been given the time for that,
// 5 s, since it is followed.
func (p *Prober) Asked(resource string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.targets[resource].answered
}

// Follow sets the resources whose daemons are asked from now on. It does not wait for them.
func (p *Prober) Follow(resources []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.targets
	p.targets = make(map[string]target, len(resources))
	for _, name := range resources {
		t, followed := known[name]
		if !followed {
			t.disk = statefile.NewDisk()
			t.reason = fmt.Sprintf("the MPS control daemon of %s has not answered yet", name)
			select {
			case p.wish <- struct{}{}:
			default:
			}
		}
		p.targets[name] = t
	}
	p.publishLocked()
}

// publishLocked publishes the resources that cannot be used, if they changed.
func (p *Prober) publishLocked() {
	unready := map[string]string{}
	for name, t := range p.targets {
		if t.reason != "" {
			unready[name] = t.reason
		}
	}
	if !maps.Equal(unready, p.unready.Value()) {
		p.unready.Publish(unready)
	}
}

// Run asks until ctx ends, and returns nil then.
func (p *Prober) Run(ctx context.Context) error {
	var asked sync.WaitGroup
	defer asked.Wait()
	var tick <-chan time.Time // nil while no resource is followed, so as not to wake an idle process
	for {
		names, followed := p.due()
		for _, name := range names {
			asked.Go(func() { p.ask(ctx, name) })
		}
		if tick == nil && followed {
			tick = p.clock.After(lookEvery)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.wish:
		case <-tick:
			tick = nil
		}
	}
}

// due returns the resources whose daemons are to be looked at now: those of which no answer is
// waited for. One that does not answer does not delay the others. It also reports whether any
// resource is followed.
func (p *Prober) due() (names []string, followed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, t := range p.targets {
		if !t.asking {
			t.asking = true
			p.targets[name] = t
			names = append(names, name)
		}
	}
	return names, len(p.targets) > 0
}

// OwnLimits returns the limits that a daemon has for all its clients, as it answered last: "33
// percent of the threads", or "20G of memory" of its first GPU, or both; empty if it has none.
func (p *Prober) OwnLimits(resource string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.targets[resource].limits
}

// ownLimits reads the answers to limitCommands.
func ownLimits(answer string) string {
	first, second, _ := strings.Cut(answer, "\n")
	var all []string
	if p := percentage(strings.TrimSpace(first)); p != "" && p != "100" {
		all = append(all, p+" percent of the threads")
	}
	if m := memory(second); m != "" {
		all = append(all, m+" of memory")
	}
	return strings.Join(all, " and ")
}

// errStarted says that a daemon that was ready still has the mark of its start.
var errStarted = errors.New("it is started")

// ask looks at the daemon of a resource, and asks it if that was not done for long, if it was not
// ready, or if it has no mark. A disk that hangs delays nobody.
func (p *Prober) ask(ctx context.Context, name string) {
	p.mu.Lock()
	t, now := p.targets[name], p.clock.Now()
	p.mu.Unlock()
	disk, always := t.disk, t.reason != "" || now.Sub(t.asked) >= askRarely
	if disk == nil {
		return // it is not followed any more
	}
	daemon := control{dir: filepath.Join(p.root, name)}
	// ctx ends what does not hang
	answer, err := statefile.Within(context.WithoutCancel(ctx), disk, diskTimeout, func() (string, error) {
		if !always {
			if _, err := os.Stat(daemon.folder(startedMark)); err == nil {
				return "", errStarted
			}
		}
		answer, err := daemon.ask(ctx, limitCommands, probeTimeout)
		// A daemon goes on answering without room for files, and may not be able to start a server, or to
		// start again.
		return answer, cmp.Or(full(p.root, daemon.folder(pipeFolder), daemon.folder(logFolder)), err)
	})
	if ctx.Err() != nil {
		return // what it said last is as good
	}
	reason := ""
	switch {
	case errors.Is(err, statefile.ErrHangs):
		reason = fmt.Sprintf("the MPS control daemon of %s does not answer: %v; see to the disk of %s (--mps-root)", name,
			err, p.root)
	case errors.Is(err, errFull):
		reason = fmt.Sprintf("the MPS control daemon of %s cannot write its files: %v (--mps-root)", name, err)
	case err != nil:
		reason = fmt.Sprintf("the MPS control daemon of %s does not answer: %v", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t = p.targets[name]
	if t.disk != disk {
		return // it is not followed any more, or anew
	}
	if errors.Is(err, errStarted) {
		t.asking = false
		p.targets[name] = t
		return
	}
	before := t.reason
	t.reason, t.answered, t.limits, t.asking, t.asked = reason, true, ownLimits(answer), false, now
	p.targets[name] = t
	if reason == "" && before != "" {
		klog.FromContext(ctx).Info("MPS control daemon can be used", "resource", name)
	}
	if reason != "" && reason != before {
		klog.FromContext(ctx).Info("MPS control daemon cannot be used", "resource", name, "reason", reason)
	}
	p.publishLocked()
}
