package cudacheck

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// AtOnce is how many devices are tried at a time: a process takes some hundred megabytes.
	AtOnce = 2
	// It is asked at this pace whether devices that are in use are free: at the first one after a
	// change, and then less and less often.
	soon, seldom = time.Second, 10 * time.Second
	// saveAgain is when it is tried again to save verdicts.
	saveAgain = 10 * time.Second
	// What may pass by itself is tried again after firstRetry, and each time after twice as long, up
	// to lastRetry.
	firstRetry, lastRetry = 10 * time.Second, 5 * time.Minute
)

// A try is what is going on with a device. It belongs to the loop.
type try struct {
	running bool
	inUse   bool      // it is asked together with others whether it is free
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
	uuid    string
	busy    error // the device is not free
	givenUp bool  // the driver is released
	proof   cuda.Proof
}

// A loop is one run of Proofs.
type loop struct {
	*Proofs
	known    map[string]*try
	running  int
	outcomes chan outcome
	// Devices in use are asked about together: asking says that they are, next when they are again,
	// and pace how long after that.
	asking  bool
	next    time.Time
	pace    time.Duration
	answers chan map[string]error
	// unsaved is why verdicts are not saved, and save when that is tried again.
	unsaved error
	save    time.Time
}

// Run proves that CUDA works on the devices, while the configuration wants that, until ctx ends.
// Processes that run then are given up.
func (p *Proofs) Run(ctx context.Context) error {
	l := &loop{Proofs: p, known: map[string]*try{}, outcomes: make(chan outcome), answers: make(chan map[string]error)}
	giveUp, cancel := context.WithCancel(ctx)
	defer l.end(ctx, cancel)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s, looked := p.options.Snapshots.Latest()
		c, configured := p.options.Configs.Latest()
		if c.Validate && s.Generation > 0 {
			p.recall(ctx)
			l.forget(ctx, s)
			timer.Stop()
			late := l.saveLate(ctx)
			if next := earliest(late, l.begin(giveUp, s), l.ask(giveUp, s)); !next.IsZero() {
				timer.Reset(max(0, time.Until(next)))
			}
			l.show(ctx, s)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-looked:
		case <-configured:
		case <-timer.C:
		case uuid := <-p.asked:
			l.decide(ctx, p.records.Value().with(uuid, nil))
			l.again(uuid)
		case o := <-l.outcomes:
			l.running--
			l.take(ctx, o)
		case used := <-l.answers:
			l.hear(used)
		}
	}
}

// end gives up what is under way, and waits for its end. What is not saved is saved, if the disk
// answers now.
func (l *loop) end(ctx context.Context, giveUp func()) {
	giveUp()
	if l.unsaved != nil {
		l.write(ctx)
	}
	for l.running > 0 || l.asking {
		select {
		case <-l.outcomes:
			l.running--
		case <-l.answers:
			l.asking = false
		}
	}
}

// earliest returns the earliest of times that are not zero; zero if all are.
func earliest(times ...time.Time) (first time.Time) {
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
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
	if t := l.known[uuid]; t != nil {
		t.next, t.pause, t.inUse = time.Time{}, 0, false
	}
}

// begin begins tries of devices that are due. It returns when the next one is due; zero if none is.
func (l *loop) begin(ctx context.Context, s inventory.Snapshot) (next time.Time) {
	now, records := time.Now(), l.records.Value()
	for _, d := range Devices(s) {
		v, valid := records.valid(s, l.options.BootID, d)
		if valid && (v.Failure == nil || !v.Failure.IsTransient()) {
			continue
		}
		t := l.known[d.UUID]
		if t == nil {
			t = &try{waits: "it is its turn soon"}
			l.known[d.UUID] = t
		}
		if t.running || l.hangs(t) {
			continue
		}
		why := unfit(s, d, valid)
		if why == "" && l.claimed(d) {
			why = "an earlier verdict on it is not off the disk: " + l.unsaved.Error()
		}
		if why != "" {
			t.waits = why
			continue
		}
		if t.inUse {
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

// unfit says why a device is not tried as it is now; empty if it may be. A failed one is Unhealthy
// by that.
func unfit(s inventory.Snapshot, d Device, failed bool) string {
	if s.Stale != "" {
		return "the last look at the node failed: " + s.Stale
	}
	g, _ := s.GPU(d.GPU)
	h := g.Fitness()
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

// claimed reports whether the file says that CUDA is proven on a device, which is not known any
// more, and the disk hangs: a process that follows would believe that, whatever a proof shows now.
func (l *loop) claimed(d Device) bool {
	v, found := l.saved[d.UUID]
	return errors.Is(l.unsaved, statefile.ErrHangs) && found && v.Failure == nil && v.Boot == l.options.BootID
}

// try tries a device, in a goroutine of its own.
func (l *loop) try(ctx context.Context, d Device) (o outcome) {
	o.uuid = d.UUID
	trying, end := l.tries.begin(ctx, d.UUID) // before it is asked whether the driver is released
	defer func() {
		o.givenUp = trying.Err() != nil
		end(o.proof.Ended)
	}()
	release, err := l.options.Reserve(trying, d)
	if err != nil {
		o.busy = err
		return o
	}
	defer release()
	o.proof = l.options.Prove(trying, d.UUID)
	return o
}

// ask asks whether the devices in use are free, if it is time: about all at once, because kubelet
// refuses many questions. It returns when it is time; zero if there is nothing to ask.
func (l *loop) ask(ctx context.Context, s inventory.Snapshot) (next time.Time) {
	var used []Device
	for _, d := range Devices(s) {
		if t := l.known[d.UUID]; t != nil && t.inUse && unfit(s, d, false) == "" {
			used = append(used, d)
		}
	}
	if len(used) == 0 || l.asking {
		return time.Time{}
	}
	if l.next.After(time.Now()) {
		return l.next
	}
	l.asking = true
	go func() {
		var mu sync.Mutex
		var questions sync.WaitGroup
		answer := map[string]error{}
		for _, d := range used {
			questions.Go(func() {
				release, err := l.options.Reserve(ctx, d)
				if err == nil {
					release()
				}
				mu.Lock()
				defer mu.Unlock()
				answer[d.UUID] = err
			})
		}
		questions.Wait()
		l.answers <- answer
	}()
	return time.Time{}
}

// hear takes the answer of ask.
func (l *loop) hear(answer map[string]error) {
	l.asking = false
	l.pace = min(2*l.pace, seldom)
	for uuid, why := range answer {
		switch t := l.known[uuid]; {
		case t == nil:
		case why == nil:
			t.inUse, t.next = false, time.Time{}
		case t.waits != why.Error():
			t.waits, l.pace = why.Error(), soon
		}
	}
	l.next = time.Now().Add(l.pace)
}

// take takes the outcome of a try.
func (l *loop) take(ctx context.Context, o outcome) {
	t := l.known[o.uuid]
	t.running = false
	now := time.Now()
	if o.busy != nil {
		t.waits, t.inUse = o.busy.Error(), true
		l.pace, l.next = soon, now.Add(soon)
		return
	}
	t.hangs = o.proof.Ended
	if o.givenUp && o.proof.Failure != nil && !o.proof.Failure.WasTried() {
		t.waits = "the driver was released"
		return
	}
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
	case !f.WasTried():
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

// decide publishes verdicts and writes them down. What cannot be written is proven anew by the next
// process.
func (l *loop) decide(ctx context.Context, b Records) {
	if l.options.Lead() != nil {
		return
	}
	l.records.Publish(b)
	if l.options.StateDir == "" {
		return
	}
	said := l.unsaved
	l.write(ctx)
	if l.unsaved != nil && (said == nil || said.Error() != l.unsaved.Error()) {
		klog.FromContext(ctx).Info("Cannot save what is proven of CUDA; it is tried again, and a restart before that may prove it anew",
			"dir", l.options.StateDir, "reason", l.unsaved.Error())
	}
}

// write writes the verdicts down. Where the disk hangs, what is written at last is what is known
// then.
func (l *loop) write(ctx context.Context) {
	written := make(chan Records, 1)
	l.unsaved = l.disk.Do(context.WithoutCancel(ctx), diskPatience, func() error {
		if l.options.Lead() != nil {
			return nil // its memory is the truth now
		}
		b := l.records.Value()
		err := statefile.WriteState(l.path(), form{fileVersion, b})
		if err != nil { // what the file said before is not true any more
			removed := statefile.Remove(l.path())
			if removed == nil {
				written <- nil
			}
			return errors.Join(err, removed)
		}
		written <- b
		return nil
	})
	select {
	case l.saved = <-written:
	default:
	}
	l.save = time.Time{}
	if l.unsaved != nil {
		l.save = time.Now().Add(saveAgain)
	}
}

// saveLate writes the verdicts down that could not be written before, if it is time. It returns
// when it is time; zero if all are on disk.
func (l *loop) saveLate(ctx context.Context) time.Time {
	if l.unsaved != nil && !l.save.After(time.Now()) && l.options.Lead() == nil {
		l.write(ctx)
	}
	return l.save
}

// show publishes how far the loop is.
func (l *loop) show(ctx context.Context, s inventory.Snapshot) {
	next := Status{Waiting: map[string]string{}, InUse: map[string]bool{}, Retry: map[string]time.Time{},
		Done: l.status.Value().Done}
	if l.unsaved != nil {
		next.Unsaved = l.unsaved.Error()
	}
	records, all := l.records.Value(), Devices(s)
	for _, d := range all {
		v, valid := records.valid(s, l.options.BootID, d)
		t := l.known[d.UUID]
		switch {
		case t == nil:
		case !valid:
			next.Waiting[d.UUID] = t.waits
			if t.inUse {
				next.InUse[d.UUID] = true
			}
		case v.Failure != nil && !t.next.IsZero():
			next.Retry[d.UUID] = t.next
		}
	}
	if len(all) > 0 && len(next.Waiting) == 0 && next.Done == 0 {
		next.Done = time.Since(l.began)
		klog.FromContext(ctx).Info("There is a verdict on CUDA for each device", "devices", len(all),
			"sinceStart", next.Done.Round(time.Millisecond))
	}
	was := l.status.Value()
	if was.Done != next.Done || was.Unsaved != next.Unsaved || !maps.Equal(was.Waiting, next.Waiting) ||
		!maps.Equal(was.InUse, next.InUse) || !maps.Equal(was.Retry, next.Retry) {
		l.status.Publish(next)
	}
	for uuid := range l.known {
		if t := l.known[uuid]; !t.running && !l.hangs(t) && !slices.ContainsFunc(all,
			func(d Device) bool { return d.UUID == uuid }) {
			delete(l.known, uuid)
		}
	}
}
