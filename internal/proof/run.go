package proof

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/files"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

const (
	// AtOnce is how many devices are tried at a time: a process takes some hundred megabytes.
	AtOnce = 2
	// soon is the pace at which it is asked whether a device is free.
	soon = time.Second
	// What may pass by itself is tried again after firstRetry, and each time after twice as long, up to lastRetry.
	firstRetry, lastRetry = 10 * time.Second, 5 * time.Minute
)

// A try is what is going on with a device. It belongs to the loop.
type try struct {
	running bool
	began   time.Time // when the last try began
	// waits says why the device is not proven yet, and next when it is tried again.
	waits string
	next  time.Time
	pause time.Duration // before the next try of what failed
	// hangs is closed when the process of the last try has ended; nil if that is not waited for.
	hangs <-chan struct{}
}

// An outcome is what came of a try.
type outcome struct {
	uuid  string
	busy  error // the device is not free
	proof cuda.Proof
}

// A loop is one run of Proofs.
type loop struct {
	*Proofs
	tries    map[string]*try
	running  int
	outcomes chan outcome
}

// Run proves that CUDA works on the devices, while the configuration wants that, until ctx ends. Processes that run then are given up.
func (p *Proofs) Run(ctx context.Context) error {
	l := &loop{Proofs: p, tries: map[string]*try{}, outcomes: make(chan outcome)}
	giveUp, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		for l.running > 0 {
			<-l.outcomes
			l.running--
		}
	}()
	timer := p.options.Clock.NewTimer(0)
	defer timer.Stop()
	for {
		s, looked := p.options.Snapshots.Latest()
		c, configured := p.options.Configs.Latest()
		if c.Validate && s.Generation > 0 {
			l.forget(ctx, s)
			timer.Stop()
			if next := l.begin(giveUp, s); !next.IsZero() {
				timer.Reset(max(0, next.Sub(p.options.Clock.Now())))
			}
			l.show(ctx, s)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-looked:
		case <-configured:
		case <-timer.C():
		case uuid := <-p.asked:
			l.decide(ctx, p.records.Value().with(uuid, nil))
			l.again(uuid)
		case o := <-l.outcomes:
			l.running--
			l.take(ctx, o)
		}
	}
}

// forget removes verdicts that say nothing any more: a later process could not know of a reset.
func (l *loop) forget(ctx context.Context, s inventory.Snapshot) {
	records := l.records.Value()
	for _, d := range Devices(s) {
		if _, valid := records.valid(s, l.options.BootID, d); !valid {
			if _, found := records[d.UUID]; found {
				records = records.with(d.UUID, nil)
				l.again(d.UUID)
			}
		}
	}
	for uuid, v := range records {
		if v.Boot != l.options.BootID { // its device may be gone
			records = records.with(uuid, nil)
		}
	}
	if len(records) != len(l.records.Value()) {
		l.decide(ctx, records)
	}
}

// again has a device be tried at once. One that is being tried is not tried beside that.
func (l *loop) again(uuid string) {
	if t := l.tries[uuid]; t != nil {
		t.next, t.pause = time.Time{}, 0
	}
}

// begin begins tries of devices that are due. It returns when the next one is due; zero if none is.
func (l *loop) begin(ctx context.Context, s inventory.Snapshot) (next time.Time) {
	now, records := l.options.Clock.Now(), l.records.Value()
	for _, d := range Devices(s) {
		v, valid := records.valid(s, l.options.BootID, d)
		if valid && (v.Failure == nil || !v.Failure.Passing()) {
			continue
		}
		t := l.tries[d.UUID]
		if t == nil {
			t = &try{waits: "it is its turn soon"}
			l.tries[d.UUID] = t
		}
		if t.running || l.hangs(t) {
			continue
		}
		if why := unfit(s, d, valid); why != "" {
			t.waits = why
			continue
		}
		if l.running == AtOnce || t.next.After(now) {
			if due := t.next; l.running < AtOnce && (next.IsZero() || due.Before(next)) {
				next = due
			}
			continue
		}
		t.running, t.began, t.waits = true, now, "it is being tried"
		l.running++
		go func() { l.outcomes <- l.try(ctx, d) }()
	}
	return next
}

// hangs reports whether the last process for a device has not ended.
func (l *loop) hangs(t *try) bool {
	if t.hangs == nil {
		return false
	}
	select {
	case <-t.hangs:
		t.hangs = nil
		return false
	default:
		return true
	}
}

// unfit says why a device is not tried as it is now; empty if it may be. A failed one is Unhealthy by that.
func unfit(s inventory.Snapshot, d Device, failed bool) string {
	if s.Stale != "" {
		return "the last look at the node failed: " + s.Stale
	}
	g, _ := s.GPU(d.GPU)
	h := g.Health
	for _, m := range g.MIGDevices {
		if m.UUID == d.UUID {
			h = inventory.Worst(h, m.Health)
		}
	}
	if !failed && !h.Allocatable() {
		return "it is " + h.State.String() + ": " + h.Reason
	}
	return ""
}

// try tries a device, in a goroutine of its own.
func (l *loop) try(ctx context.Context, d Device) outcome {
	release, err := l.options.Reserve(ctx, d)
	if err != nil {
		return outcome{uuid: d.UUID, busy: err}
	}
	defer release()
	return outcome{uuid: d.UUID, proof: l.options.Prove(ctx, d.UUID)}
}

// take takes the outcome of a try.
func (l *loop) take(ctx context.Context, o outcome) {
	t := l.tries[o.uuid]
	t.running = false
	now := l.options.Clock.Now()
	if o.busy != nil {
		t.waits, t.next = o.busy.Error(), now.Add(soon)
		return
	}
	t.hangs = o.proof.Ended
	f := o.proof.Failure
	log := klog.FromContext(ctx)
	if f != nil {
		t.pause = min(max(firstRetry, 2*t.pause), lastRetry)
		t.waits, t.next = f.Error(), now.Add(t.pause)
	}
	switch {
	case ctx.Err() != nil:
		return // it was given up
	case f == nil:
		t.next, t.pause = time.Time{}, 0
		log.Info("CUDA is proven", "device", o.uuid, "took", o.proof.Took, "memory", o.proof.Memory)
	case !f.Tried():
		log.Info("CUDA cannot be tried", "device", o.uuid, "reason", f.Error())
		return
	default:
		log.Info("CUDA does not work", "device", o.uuid, "reason", f.Error())
	}
	s := l.options.Snapshots.Value()
	l.decide(ctx, l.records.Value().with(o.uuid, &Record{
		Boot: l.options.BootID, Driver: s.Driver.Version, At: t.began.UTC(), Failure: f,
		Milliseconds: o.proof.Took.Milliseconds(), MemoryBytes: o.proof.Memory,
	}))
}

// decide publishes verdicts and writes them down. What cannot be written is proven anew by the next process.
func (l *loop) decide(ctx context.Context, b Records) {
	if l.options.Lead() != nil {
		return
	}
	l.records.Publish(b)
	if l.options.StateDir == "" {
		return
	}
	err := l.disk.Do(context.WithoutCancel(ctx), diskPatience, func() error {
		if l.options.Lead() != nil {
			return nil // its memory is the truth now
		}
		err := files.WriteState(l.path(), form{fileVersion, b})
		if err != nil { // what the file said before is not true any more
			err = errors.Join(err, files.Remove(l.path()))
		}
		return err
	})
	if err != nil {
		klog.FromContext(ctx).Info("Cannot save what is proven of CUDA; a restart of the daemon proves it again", "dir", l.options.StateDir,
			"reason", err.Error())
	}
}

// show publishes how far the loop is.
func (l *loop) show(ctx context.Context, s inventory.Snapshot) {
	next := Status{Waiting: map[string]string{}, Retry: map[string]time.Time{}, Done: l.status.Value().Done}
	records, all := l.records.Value(), Devices(s)
	for _, d := range all {
		v, valid := records.valid(s, l.options.BootID, d)
		t := l.tries[d.UUID]
		switch {
		case t == nil:
		case !valid:
			next.Waiting[d.UUID] = t.waits
		case v.Failure != nil && !t.next.IsZero():
			next.Retry[d.UUID] = t.next
		}
	}
	if len(all) > 0 && len(next.Waiting) == 0 && next.Done == 0 {
		next.Done = l.options.Clock.Since(l.began)
		klog.FromContext(ctx).Info("There is a verdict on CUDA for each device", "devices", len(all),
			"sinceStart", next.Done.Round(time.Millisecond))
	}
	was := l.status.Value()
	if was.Done != next.Done || !maps.Equal(was.Waiting, next.Waiting) || !maps.Equal(was.Retry, next.Retry) {
		l.status.Publish(next)
	}
	for uuid := range l.tries {
		if !slices.ContainsFunc(all, func(d Device) bool { return d.UUID == uuid }) && !l.tries[uuid].running {
			delete(l.tries, uuid)
		}
	}
}
