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
	// checkEvery is the interval between two checks. A check probes a daemon that is not ready. A
	// ready daemon is probed only after askRarely, or if the started mark is missing: the daemon
	// may have been restarted between two probes.
	checkInterval = time.Second
	askRarely     = 10 * time.Second
	// probeTimeout limits a probe. The program then has another second to exit; after diskTimeout,
	// the probe counts as failed. A new resource is not listed before the end of the first probe.
	probeTimeout = 4 * time.Second
	diskTimeout  = probeTimeout + time.Second
)

// limitCommands are the commands of a probe. Every control daemon answers each command with a line;
// the second answer is empty without a limit.
const limitCommands = probeCommand + "\nget_default_device_pinned_mem_limit 0"

// A Prober checks that the control daemons of resources respond. Create a Prober with NewProber.
type Prober struct {
	root     string
	clock    clock.WithTicker
	unready  *feed.Feed[map[string]string]
	checkNow chan struct{} // holds at most one request for an immediate check

	mu      sync.Mutex // guards all following fields
	targets map[string]target
}

// A target is a resource with a daemon to probe.
type target struct {
	reason    string // why pods cannot use the resource; empty if they can
	hasResult bool   // the daemon has answered, or its time is over
	limits    string // the answer to the limit commands
	isProbing bool   // a probe is running
	askedAt   time.Time
	disk      *statefile.Disk
}

// NewProber returns a Prober of the daemons below root. The daemons are probed while Run runs.
func NewProber(root string, c clock.WithTicker) *Prober {
	return &Prober{
		root: root, clock: c, unready: feed.New[map[string]string](nil), checkNow: make(chan struct{}, 1),
		targets: map[string]target{},
	}
}

// Unready returns the feed of the unusable resources, by name, with reasons: sentences without a
// full stop. A followed resource is in the feed until its daemon has answered.
func (p *Prober) Unready() *feed.Feed[map[string]string] { return p.unready }

// HasResult reports whether the daemon of a followed resource has answered, or has had 5 s to
// answer.
func (p *Prober) HasResult(resource string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.targets[resource].hasResult
}

// Follow sets the resources whose daemons are probed from now on. It does not wait for the probes.
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
			case p.checkNow <- struct{}{}:
			default:
			}
		}
		p.targets[name] = t
	}
	p.publishLocked()
}

// publishLocked publishes the unusable resources, if they changed.
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

// Run probes the daemons until ctx ends, and returns nil then.
func (p *Prober) Run(ctx context.Context) error {
	var asked sync.WaitGroup
	defer asked.Wait()
	var tick <-chan time.Time // nil while no resource is followed, so as not to wake an idle process
	for {
		names, followed := p.due()
		for _, name := range names {
			asked.Go(func() { p.check(ctx, name) })
		}
		if tick == nil && followed {
			tick = p.clock.After(checkInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.checkNow:
		case <-tick:
			tick = nil
		}
	}
}

// due returns the resources without a running probe, and whether any resource is followed. A slow
// daemon does not delay the probes of other daemons.
func (p *Prober) due() (names []string, followed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, t := range p.targets {
		if !t.isProbing {
			t.isProbing = true
			p.targets[name] = t
			names = append(names, name)
		}
	}
	return names, len(p.targets) > 0
}

// OwnLimits returns the limits of a daemon for all clients, from the last answer: "33 percent of
// the threads", or "20G of memory" of the first GPU, or both; empty without limits.
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

// errStarted is returned if a ready daemon still has its started mark.
var errStarted = errors.New("it is started")

// check checks the daemon of a resource. It probes a daemon that is not ready, lost the mark, or
// was not probed for long. A hanging disk delays no other resource.
func (p *Prober) check(ctx context.Context, name string) {
	p.mu.Lock()
	t, now := p.targets[name], p.clock.Now()
	p.mu.Unlock()
	disk, always := t.disk, t.reason != "" || now.Sub(t.askedAt) >= askRarely
	if disk == nil {
		return // no longer followed
	}
	daemon := control{dir: filepath.Join(p.root, name)}
	// ctx stops the probe unless the disk hangs.
	answer, err := statefile.Within(context.WithoutCancel(ctx), disk, diskTimeout, func() (string, error) {
		if !always {
			if _, err := os.Stat(daemon.folder(startedMark)); err == nil {
				return "", errStarted
			}
		}
		answer, err := daemon.ask(ctx, limitCommands, probeTimeout)
		// A daemon still answers while the disk is full, but may be unable to start a server or to
		// restart.
		return answer, cmp.Or(full(p.root, daemon.folder(pipeFolder), daemon.folder(logFolder)), err)
	})
	if ctx.Err() != nil {
		return // the last result is still good
	}
	reason := ""
	switch {
	case errors.Is(err, statefile.ErrHangs):
		reason = fmt.Sprintf("the MPS control daemon of %s does not answer: %v; check the disk of %s (--mps-root)",
			name, err, p.root)
	case errors.Is(err, errFull):
		reason = fmt.Sprintf("the MPS control daemon of %s cannot write its files: %v (--mps-root)", name, err)
	case err != nil:
		reason = fmt.Sprintf("the MPS control daemon of %s does not answer: %v", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	t = p.targets[name]
	if t.disk != disk {
		return // no longer followed, or followed again
	}
	if errors.Is(err, errStarted) {
		t.isProbing = false
		p.targets[name] = t
		return
	}
	before := t.reason
	t.reason, t.hasResult, t.limits, t.isProbing, t.askedAt = reason, true, ownLimits(answer), false, now
	p.targets[name] = t
	if reason == "" && before != "" {
		klog.FromContext(ctx).Info("MPS control daemon can be used", "resource", name)
	}
	if reason != "" && reason != before {
		klog.FromContext(ctx).Info("MPS control daemon cannot be used", "resource", name, "reason", reason)
	}
	p.publishLocked()
}
