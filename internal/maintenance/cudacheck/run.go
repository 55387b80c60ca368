package cudacheck

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/cuda"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

const (
	// AtOnce is the number of devices tried at a time: a process takes some hundred megabytes.
	AtOnce = 2
	// The interval between checks of the devices in use grows from soon, after a change, to seldom.
	soon, seldom = time.Second, 10 * time.Second
	// saveAgain is the interval between tries to save verdicts.
	saveAgain = 10 * time.Second
	// A transient failure is tried again after firstRetry; the interval doubles up to lastRetry.
	firstRetry, lastRetry = 10 * time.Second, 5 * time.Minute
)

// A try is the state of a device. Only the loop accesses it.
type try struct {
	isRunning bool
	inUse     bool      // checked together with the other devices in use
	began     time.Time // when the last try began
	// waitReason says why the device is not proven yet; next is the time of the next try.
	waitReason string
	next       time.Time
	pause      time.Duration // before the next try after a failure
	// hangs is closed when the process of the last try has exited; nil if no process hangs.
	hangs <-chan struct{}
}

// An outcome is the result of a try.
type outcome struct {
	uuid    string
	busy    error // the device is not free
	givenUp bool  // the driver is released
	proof   cuda.Proof
}

// A loop is the state of a run of Proofs.
type loop struct {
	*Proofs
	devices      map[string]*try
	runningTries int
	outcomes     chan outcome
	// Devices in use are checked together: isChecking is true during a check, next is the time of
	// the next check, and pace the interval after the check.
	isChecking bool
	next       time.Time
	pace       time.Duration
	answers    chan map[string]error
	// saveError is why verdicts are not saved; save is the time of the next try to save.
	saveError error
	save      time.Time
}

// Run proves that CUDA works on the devices, while the configuration wants proofs, until ctx ends.
// Then running proofs are cancelled.
func (p *Proofs) Run(ctx context.Context) error {
	l := &loop{Proofs: p, devices: map[string]*try{}, outcomes: make(chan outcome),
		answers: make(chan map[string]error)}
	giveUp, cancel := context.WithCancel(ctx)
	defer l.end(ctx, cancel)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		s, snapshotChanged := p.options.Snapshots.Latest()
		c, configChanged := p.options.Configs.Latest()
		if c.Validate && s.Generation > 0 {
			p.recall(ctx)
			l.forget(ctx, s)
			timer.Stop()
			late := l.saveLate(ctx)
			if next := order.Earliest(late, l.begin(giveUp, s), l.checkInUse(giveUp, s)); !next.IsZero() {
				timer.Reset(max(0, time.Until(next)))
			}
			l.show(ctx, s)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-snapshotChanged:
		case <-configChanged:
		case <-timer.C:
		case uuid := <-p.toProve:
			l.decide(ctx, p.records.Value().with(uuid, nil))
			l.again(uuid)
		case o := <-l.outcomes:
			l.runningTries--
			l.record(ctx, o)
		case used := <-l.answers:
			l.takeAnswers(used)
		}
	}
}

// end cancels the running tries and waits for their end. It saves unsaved verdicts if the disk
// answers now.
func (l *loop) end(ctx context.Context, giveUp func()) {
	giveUp()
	if l.saveError != nil {
		l.write(ctx)
	}
	for l.runningTries > 0 || l.isChecking {
		select {
		case <-l.outcomes:
			l.runningTries--
		case <-l.answers:
			l.isChecking = false
		}
	}
}

// forget removes void verdicts: a later process could not know of the reset.
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
		if v.Boot != l.options.BootID { // the device may be gone
			records = records.with(uuid, nil)
		}
	}
	if len(records) != len(l.records.Value()) {
		l.decide(ctx, records)
	}
}

// again makes a device due at once. A running try of the device is not repeated in parallel.
func (l *loop) again(uuid string) {
	if t := l.devices[uuid]; t != nil {
		t.next, t.pause, t.inUse = time.Time{}, 0, false
	}
}

// begin starts the due tries. It returns the time of the next due try; zero without any.
func (l *loop) begin(ctx context.Context, s inventory.Snapshot) (next time.Time) {
	now, records := time.Now(), l.records.Value()
	for _, d := range Devices(s) {
		v, valid := records.valid(s, l.options.BootID, d)
		if valid && (v.Failure == nil || !v.Failure.IsTransient()) {
			continue
		}
		t := l.devices[d.UUID]
		if t == nil {
			t = &try{waitReason: "the proof starts soon"}
			l.devices[d.UUID] = t
		}
		if t.isRunning || l.hangs(t) {
			continue
		}
		why := unfitReason(s, d, valid)
		if why == "" && l.hasStaleProof(d) {
			why = "an earlier verdict is still on the disk:" + l.saveError.Error()
		}
		if why != "" {
			t.waitReason = why
			continue
		}
		if t.inUse {
			continue
		}
		if l.runningTries == AtOnce || t.next.After(now) {
			if due := t.next; l.runningTries < AtOnce && (next.IsZero() || due.Before(next)) {
				next = due
			}
			continue
		}
		t.isRunning, t.began, t.waitReason = true, now, "the proof is running"
		l.runningTries++
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

// unfitReason returns why a device is not tried in the present state; empty if the device may be
// tried. A device may also be Unhealthy because of a failed try.
func unfitReason(s inventory.Snapshot, d Device, failed bool) string {
	if s.Stale != "" {
		return "the last health check of the node failed: " + s.Stale
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

// hasStaleProof reports whether the file still says that CUDA is proven on a device, although the
// verdict is void and the disk hangs. A later process would believe the file, whatever a new proof
// shows.
func (l *loop) hasStaleProof(d Device) bool {
	v, found := l.onDisk[d.UUID]
	return errors.Is(l.saveError, statefile.ErrHangs) && found && v.Failure == nil && v.Boot == l.options.BootID
}

// try tries a device, in a separate goroutine.
func (l *loop) try(ctx context.Context, d Device) (o outcome) {
	o.uuid = d.UUID
	trying, end := l.tries.begin(ctx, d.UUID) // registered before the check that the driver is not released
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

// checkInUse checks whether the devices in use are free now, when due. It checks all at once
// because the kubelet refuses frequent queries. It returns the time of the next check; zero without
// devices in use.
func (l *loop) checkInUse(ctx context.Context, s inventory.Snapshot) (next time.Time) {
	var used []Device
	for _, d := range Devices(s) {
		if t := l.devices[d.UUID]; t != nil && t.inUse && unfitReason(s, d, false) == "" {
			used = append(used, d)
		}
	}
	if len(used) == 0 || l.isChecking {
		return time.Time{}
	}
	if l.next.After(time.Now()) {
		return l.next
	}
	l.isChecking = true
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

// takeAnswers takes the answers of checkInUse.
func (l *loop) takeAnswers(answer map[string]error) {
	l.isChecking = false
	l.pace = min(2*l.pace, seldom)
	for uuid, why := range answer {
		switch t := l.devices[uuid]; {
		case t == nil:
		case why == nil:
			t.inUse, t.next = false, time.Time{}
		case t.waitReason != why.Error():
			t.waitReason, l.pace = why.Error(), soon
		}
	}
	l.next = time.Now().Add(l.pace)
}

// record records the outcome of a try.
func (l *loop) record(ctx context.Context, o outcome) {
	t := l.devices[o.uuid]
	t.isRunning = false
	now := time.Now()
	if o.busy != nil {
		t.waitReason, t.inUse = o.busy.Error(), true
		l.pace, l.next = soon, now.Add(soon)
		return
	}
	t.hangs = o.proof.Ended
	if o.givenUp && o.proof.Failure != nil && !o.proof.Failure.WasTried() {
		t.waitReason = "the driver was released"
		return
	}
	f := o.proof.Failure
	log := klog.FromContext(ctx)
	if f != nil {
		t.pause = min(max(firstRetry, 2*t.pause), lastRetry)
		t.waitReason, t.next = f.Error(), now.Add(t.pause)
	}
	switch {
	case ctx.Err() != nil:
		return // cancelled
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

// decide publishes verdicts and writes them to disk. Unsaved verdicts are proven again by the next
// process.
func (l *loop) decide(ctx context.Context, b Records) {
	if l.options.Lead() != nil {
		return
	}
	l.records.Publish(b)
	if l.options.StateDir == "" {
		return
	}
	before := l.saveError
	l.write(ctx)
	if l.saveError != nil && (before == nil || before.Error() != l.saveError.Error()) {
		klog.FromContext(ctx).Info("Cannot save the verdicts on CUDA; a restart before the next try repeats the proofs",
			"dir", l.options.StateDir, "reason", l.saveError.Error())
	}
}

// write writes the verdicts to disk. After a hang, the disk writes the newest verdicts.
func (l *loop) write(ctx context.Context) {
	written := make(chan Records, 1)
	l.saveError = l.disk.Do(context.WithoutCancel(ctx), diskPatience, func() error {
		if l.options.Lead() != nil {
			return nil // only the memory is right now
		}
		b := l.records.Value()
		err := statefile.WriteState(l.path(), fileFormat{fileVersion, b})
		if err != nil { // the file is out of date
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
	case l.onDisk = <-written:
	default:
	}
	l.save = time.Time{}
	if l.saveError != nil {
		l.save = time.Now().Add(saveAgain)
	}
}

// saveLate writes unsaved verdicts to disk when due. It returns the time of the next try; zero if
// all verdicts are on disk.
func (l *loop) saveLate(ctx context.Context) time.Time {
	if l.saveError != nil && !l.save.After(time.Now()) && l.options.Lead() == nil {
		l.write(ctx)
	}
	return l.save
}

// show publishes the progress.
func (l *loop) show(ctx context.Context, s inventory.Snapshot) {
	next := Status{Waiting: map[string]string{}, InUse: map[string]bool{}, Retry: map[string]time.Time{},
		Done: l.status.Value().Done}
	if l.saveError != nil {
		next.Unsaved = l.saveError.Error()
	}
	records, all := l.records.Value(), Devices(s)
	for _, d := range all {
		v, valid := records.valid(s, l.options.BootID, d)
		t := l.devices[d.UUID]
		switch {
		case t == nil:
		case !valid:
			next.Waiting[d.UUID] = t.waitReason
			if t.inUse {
				next.InUse[d.UUID] = true
			}
		case v.Failure != nil && !t.next.IsZero():
			next.Retry[d.UUID] = t.next
		}
	}
	if len(all) > 0 && len(next.Waiting) == 0 && next.Done == 0 {
		next.Done = time.Since(l.began)
		klog.FromContext(ctx).Info("CUDA was tried on every device", "devices", len(all),
			"sinceStart", next.Done.Round(time.Millisecond))
	}
	was := l.status.Value()
	if was.Done != next.Done || was.Unsaved != next.Unsaved || !maps.Equal(was.Waiting, next.Waiting) ||
		!maps.Equal(was.InUse, next.InUse) || !maps.Equal(was.Retry, next.Retry) {
		l.status.Publish(next)
	}
	for uuid := range l.devices {
		if t := l.devices[uuid]; !t.isRunning && !l.hangs(t) && !slices.ContainsFunc(all,
			func(d Device) bool { return d.UUID == uuid }) {
			delete(l.devices, uuid)
		}
	}
}
