package mps

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
)

const (
	// lookEvery is how often daemons are asked that are not ready; those that are, every lookRarely-th time.
	lookEvery  = time.Second
	lookRarely = 10
)

// A Prober asks the control daemons of resources whether they are there. Make it with NewProber.
type Prober struct {
	root    string
	clock   clock.WithTicker
	unready *feed.Feed[map[string]string]
	wish    chan struct{} // holds one wish for a look at once

	mu      sync.Mutex        // guards all following fields
	reasons map[string]string // why a resource that is followed is not ready; empty when it is
}

// NewProber returns a Prober of the daemons below root, which asks them while it runs.
func NewProber(root string, c clock.WithTicker) *Prober {
	return &Prober{
		root: root, clock: c, unready: feed.New[map[string]string](nil), wish: make(chan struct{}, 1), reasons: map[string]string{},
	}
}

// Unready returns the feed of the resources that are followed and cannot be used, by name, each with the reason: a sentence
// without a full stop. A resource is there from when it is followed until its daemon has answered.
func (p *Prober) Unready() *feed.Feed[map[string]string] { return p.unready }

// Follow has the daemons of these resources asked from now on, and no others. It answers at once.
func (p *Prober) Follow(resources []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.reasons
	p.reasons = make(map[string]string, len(resources))
	for _, name := range resources {
		reason, followed := known[name]
		if !followed {
			reason = fmt.Sprintf("the MPS control daemon of %s has not been asked yet", name)
			select {
			case p.wish <- struct{}{}:
			default:
			}
		}
		p.reasons[name] = reason
	}
	p.publishLocked()
}

// publishLocked announces who is not ready, if that is news.
func (p *Prober) publishLocked() {
	unready := maps.Clone(p.reasons)
	maps.DeleteFunc(unready, func(_, reason string) bool { return reason == "" })
	if !maps.Equal(unready, p.unready.Value()) {
		p.unready.Publish(unready)
	}
}

// Run asks until ctx ends, and returns nil then.
func (p *Prober) Run(ctx context.Context) error {
	ticker := p.clock.NewTicker(lookEvery)
	defer ticker.Stop()
	for n := 0; ; n++ {
		p.look(ctx, n%lookRarely == 0)
		select {
		case <-ctx.Done():
			return nil
		case <-p.wish:
		case <-ticker.C():
		}
	}
}

// look asks the daemons that are not ready, or all of them, side by side: one that hangs keeps nobody waiting.
func (p *Prober) look(ctx context.Context, all bool) {
	p.mu.Lock()
	names := maps.Clone(p.reasons)
	p.mu.Unlock()
	var asked sync.WaitGroup
	for name, reason := range names {
		if all || reason != "" {
			asked.Go(func() { p.ask(ctx, name) })
		}
	}
	asked.Wait()
}

// ask asks the daemon of a resource.
func (p *Prober) ask(ctx context.Context, name string) {
	_, err := control{dir: filepath.Join(p.root, name)}.ask(ctx, aQuestion, askTimeout)
	if ctx.Err() != nil {
		return // what it said last is as good
	}
	reason := ""
	if err != nil {
		reason = fmt.Sprintf("the MPS control daemon of %s does not answer: %v", name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	before, followed := p.reasons[name]
	if !followed || before == reason {
		return
	}
	p.reasons[name] = reason
	if reason == "" {
		klog.FromContext(ctx).Info("The MPS control daemon of a resource answers", "resource", name)
	} else {
		klog.FromContext(ctx).Info("A resource that is shared by MPS cannot be used", "resource", name, "reason", reason)
	}
	p.publishLocked()
}
