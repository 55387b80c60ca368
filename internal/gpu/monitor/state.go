package monitor

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/order"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// nodeState is the state of the node. It belongs to the loop.
type nodeState struct {
	policy  health.Policy
	metrics Metrics
	facts   health.Facts
	// scan is the Snapshot of the last successful look, plus known GPUs that the look could not
	// identify. Its Health values are unused.
	scan inventory.Snapshot
	// lastSuccess is the end of the last successful look. err is the error of the last look, and
	// stale its text in the Snapshot. unloaded is true if the driver was gone since the last
	// successful look.
	lastSuccess  time.Time
	successSince time.Time // start of the current series of successful looks
	lookStart    time.Time // start of the last look
	err          error
	stale        string
	wasUnloaded  bool
	// troubleCount is the number of GPUs that are lost, hang or are left out. The next call is at
	// nextRetry; retryCount counts the calls.
	troubleCount, retryCount int
	nextRetry                time.Time
	// linksDueSince is when links became due; zero if all are read. linksLate is true once the
	// Snapshot no longer waits for links.
	linksDueSince time.Time
	linksLate     bool
	// lastComplete is the last Snapshot with all links.
	lastComplete inventory.Snapshot
	// unwatched are the GPUs without driver events.
	unwatched []inventory.LeftOut
	// unansweredSince has the start of each GPU's unanswered calls, by UUID.
	unansweredSince map[string]time.Time
	// withheldSince is when an operator withheld all GPUs from new work, until the next look; zero
	// otherwise.
	withheldSince time.Time
	// withheldGPUs has the verdict on each GPU that an operator withholds from new work, by UUID.
	withheldGPUs map[string]inventory.Health
	// nodeReason is the common reason of all GPUs, or empty.
	nodeReason string
	// gpus has the state of each GPU by UUID, including GPUs that are gone.
	gpus map[string]health.GPU
	// restoredEntries has the ledger's entries of devices not seen since the start.
	restoredEntries ledger.Book
	// lastPublished is the last Snapshot returned by compose.
	lastPublished inventory.Snapshot
}

// foldEvent folds in an event. It returns true for an event of an unknown GPU or MIG device: the
// next look may find the device.
func (t *nodeState) foldEvent(e inventory.Event, now time.Time) (unseen bool) {
	e = t.withUUID(e)
	g, ok := t.gpus[e.UUID]
	if !ok {
		return e.UUID != "" || e.BDF != ""
	}
	before := g
	g, ok = t.policy.FoldEvent(g, e, t.facts, now)
	t.gpus[e.UUID] = g
	countXID(t.metrics, before, g, e, now)
	return !ok
}

// foldLateEvent is foldEvent for an event that waited for the next scan. On a GPU without MIG
// devices, the event of an instance counts as an event of the GPU.
func (t *nodeState) foldLateEvent(e inventory.Event, now time.Time) (unseen bool) {
	e = t.withUUID(e)
	if g, ok := t.gpus[e.UUID]; ok && g.Whole() {
		e.GI, e.CI = inventory.Unattributed, inventory.Unattributed
	}
	return t.foldEvent(e, now)
}

// withUUID returns an event of the kernel log with the UUID of the GPU, if the last look found the
// GPU.
func (t *nodeState) withUUID(e inventory.Event) inventory.Event {
	i := slices.IndexFunc(t.scan.GPUs, func(g inventory.GPU) bool { return e.BDF != "" && g.BDF == e.BDF })
	if i >= 0 {
		e.UUID = t.scan.GPUs[i].UUID
	}
	return e
}

// foldTime folds in the passage of time.
func (t *nodeState) foldTime(now time.Time) {
	for _, g := range t.scan.GPUs {
		t.gpus[g.UUID] = t.policy.FoldTime(t.gpus[g.UUID], now)
	}
}

// foldLook folds in a look.
func (t *nodeState) foldLook(l look, now time.Time) {
	t.err = l.err
	if l.err != nil {
		t.stale = silenceReason(l.err)
		t.wasUnloaded = t.wasUnloaded || errors.Is(l.err, inventory.ErrNoDriver)
		t.foldSilence(t.scan.GPUs, t.policy, t.stale, now)
		return
	}
	if t.lastSuccess.IsZero() || t.stale != "" {
		t.successSince = now
	}
	t.stale, t.lastSuccess, t.unwatched, t.withheldSince = "", now, l.unwatched, time.Time{}
	t.keepLinks(&l.snapshot, now)
	t.facts = health.Facts{Branch: l.snapshot.Driver.Branch(), Opened: l.sessionOpened,
		GSPUnmarked: l.snapshot.Driver.Before(inventory.MarksGSP)}
	missing := t.missingGPUs(l.snapshot) // non-empty only if GPUs are left out
	for i, g := range l.snapshot.GPUs {
		known, ok := t.gpus[g.UUID]
		if !ok {
			known = health.GPU{UUID: g.UUID}
		}
		was, there := t.scan.GPU(g.UUID)
		rebound := was.Binding != g.Binding
		if was.Binding == 0 { // Binding is unknown, but the driver was gone and loaded again
			rebound = t.wasUnloaded
		}
		if ok && (rebound || !there) {
			known = t.policy.FoldReset(known, now) // the driver initialised the GPU again
		}
		unread := slices.ContainsFunc(l.snapshot.LeftOut, func(o inventory.LeftOut) bool { return o.Index == g.Index })
		known = known.WithScan(g, unread, now)
		if !t.restoredEntries.Empty() {
			known = known.WithRestored(t.takeRestored, now)
		}
		t.gpus[g.UUID] = t.foldResult(known, l.readings[i], now)
	}
	for _, g := range missing {
		t.gpus[g.UUID] = t.policy.FoldAbsence(t.gpus[g.UUID], reasonAt(l.snapshot.LeftOut, g.Index), now)
	}
	t.scan = withMissing(l.snapshot, missing)
	t.wasUnloaded = false
	t.planRetries(now)
}

// linksPatience limits the wait of a Snapshot for links. It is enough for eight GPUs with 20 ms a
// call.
const linksPatience = 30 * time.Second

// keepLinks keeps the previous links of GPUs while new ones are due.
func (t *nodeState) keepLinks(s *inventory.Snapshot, now time.Time) {
	if !s.LinksDue {
		t.linksDueSince, t.lastComplete = time.Time{}, *s
		return
	}
	if t.linksDueSince.IsZero() {
		t.linksDueSince = now
	}
	if t.linksLate = now.Sub(t.linksDueSince) >= linksPatience; t.linksLate {
		return
	}
	s.GPUs = slices.Clone(s.GPUs)
	for i, g := range s.GPUs {
		was, _ := t.lastComplete.GPU(g.UUID)
		var kept []inventory.Link
		for _, l := range was.Links {
			if peer, ok := s.GPU(l.Peer); ok {
				l.PeerIndex = peer.Index
				kept = append(kept, l)
			}
		}
		if len(kept) > 0 {
			s.GPUs[i].Links = kept
		}
	}
}

// hangAfter is the duration of a call after which the GPU becomes Unhealthy. A hang is noticed
// within Poll and judged within SuspectPoll. The sum of all three is below 15 s, even if two GPUs
// hang at once.
const hangAfter = 8 * time.Second

// answerPatience is the time without an answer after which a GPU becomes Unhealthy, although calls
// return.
const answerPatience = 60 * time.Second

// foldResult folds in the reading of a GPU, or its failure.
func (t *nodeState) foldResult(g health.GPU, r readResult, now time.Time) health.GPU {
	if r.err == nil {
		delete(t.unansweredSince, g.UUID)
		return t.policy.FoldReading(g, r.Reading, t.facts, now)
	}
	var stall *inventory.Stall
	if !errors.As(r.err, &stall) {
		return t.policy.FoldSilence(g, silenceReason(r.err), now)
	}
	since, ok := t.unansweredSince[g.UUID]
	if !ok || since.Before(t.facts.Opened) { // does not count the time to open a session
		since = later(t.lookStart, t.facts.Opened)
		t.unansweredSince[g.UUID] = since
	}
	if now.Sub(stall.Call.Since) >= hangAfter || now.Sub(since) >= answerPatience {
		return t.policy.FoldHang(g, *stall, t.facts, now)
	}
	return t.policy.FoldStall(g, cmp.Or(stall.Call.Function, "reading its files"), now)
}

// foldCleared folds in a request that cleared memory error counts, before the later readings.
func (t *nodeState) foldCleared(uuids []string) {
	for _, uuid := range uuids {
		if g, ok := t.gpus[uuid]; ok {
			t.gpus[uuid] = t.policy.FoldCleared(g)
		}
	}
}

// quiesce marks the state as stale until Resume.
func (t *nodeState) quiesce(allocate bool, now time.Time) {
	t.stale = ErrQuiesced.Error()
	clear(t.unansweredSince)
	switch {
	case allocate:
		t.withheldSince = time.Time{}
	case t.withheldSince.IsZero():
		t.withheldSince = now
	}
}

// takeRestored returns and removes the ledger's entries of a device.
func (t *nodeState) takeRestored(uuid string) ([]health.Fault, []time.Time) {
	faults, recoveries := t.restoredEntries.Device(uuid)
	t.restoredEntries.Drop(uuid)
	return faults, recoveries
}

// hasLedgerEntries reports whether any device may have entries for the ledger. Most nodes have
// none.
func (t *nodeState) hasLedgerEntries() bool {
	for _, g := range t.gpus {
		if g.HasLedgerEntries() {
			return true
		}
	}
	return false
}

// ledgerEntries returns the state to save across restarts.
func (t *nodeState) ledgerEntries(boot string) ledger.Book {
	b := t.restoredEntries.Clone()
	for _, g := range t.gpus {
		b.Add(g.UUID, boot, g.Device)
		for _, i := range slices.Concat(g.Instances, g.Unread) {
			b.Add(i.UUID, boot, i.Device)
		}
	}
	return b
}

// clear clears the faults of a device for an operator. It reports whether the device exists.
func (t *nodeState) clear(uuid string, now time.Time) bool {
	for key, g := range t.gpus {
		if cleared, ok := t.policy.Clear(g, uuid, now); ok {
			t.gpus[key] = cleared
			return true
		}
	}
	return t.restoredEntries.Drop(uuid)
}

// foldProof folds in the result of a CUDA check of a device: the reason of the failure, or empty.
func (t *nodeState) foldProof(uuid, why string, remedy inventory.Remedy, now time.Time) {
	for key, g := range t.gpus {
		if next, ok := t.policy.FoldProof(g, uuid, why, remedy, now); ok {
			t.gpus[key] = next
			return
		}
	}
}

// foldSilence folds in a failure to read the GPUs.
func (t *nodeState) foldSilence(gpus []inventory.GPU, p health.Policy, why string, now time.Time) {
	for _, g := range gpus {
		t.gpus[g.UUID] = p.FoldSilence(t.gpus[g.UUID], why, now)
	}
}

// silenceReason returns the reason for display. The reason stays the same while a call hangs,
// whatever waits for the call.
func silenceReason(err error) string {
	if errors.Is(err, inventory.ErrNoAnswer) {
		return "the NVIDIA driver does not answer: see the kernel log; if this persists, restart the node"
	}
	return err.Error()
}

// reasonAt returns why the GPU at an index is left out, or else why any other GPU is left out.
func reasonAt(leftOut []inventory.LeftOut, index int) string {
	i := slices.IndexFunc(leftOut, func(l inventory.LeftOut) bool { return l.Index == index })
	return leftOut[max(i, 0)].Reason
}

// missingGPUs returns the GPUs of the last look that are not in s but may still exist, because the
// driver counts unidentified GPUs. If the driver counts fewer GPUs, the missing GPUs were unplugged
// or unbound, and are simply gone.
func (t *nodeState) missingGPUs(s inventory.Snapshot) []inventory.GPU {
	if len(s.LeftOut) == 0 {
		return nil
	}
	var missing []inventory.GPU
	for _, g := range t.scan.GPUs {
		if _, ok := s.GPU(g.UUID); !ok {
			missing = append(missing, g)
		}
	}
	return missing
}

// withMissing returns s plus the missing GPUs, by index.
func withMissing(s inventory.Snapshot, missing []inventory.GPU) inventory.Snapshot {
	if len(missing) == 0 {
		return s
	}
	s.GPUs = slices.Concat(s.GPUs, missing)
	order.Sort(s.GPUs, func(a, b inventory.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return s
}

// compose returns the Snapshot of the current state, and whether it differs from the published one.
func (t *nodeState) compose() (inventory.Snapshot, bool) {
	t.nodeReason = t.nodeWide()
	if !t.hasChanged() {
		return t.lastPublished, false
	}
	s := t.scan
	s.Generation = t.lastPublished.Generation + 1
	s.Stale, s.LinksDue = t.stale, t.awaitsLinks()
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		g := &s.GPUs[i]
		known := t.gpus[g.UUID]
		g.Health, g.Reset = t.healthOf(g.UUID, known.Device), known.LastReset()
		g.MIGDevices = slices.Clone(g.MIGDevices)
		for j := range g.MIGDevices {
			g.MIGDevices[j].Health = t.verdict(g.UUID, known.Instances[j].Device)
		}
	}
	t.lastPublished = s
	return s, true
}

// hasChanged reports whether the state differs from the published Snapshot. It allocates nothing,
// because most looks change nothing.
func (t *nodeState) hasChanged() bool {
	p := t.lastPublished
	if p.Generation == 0 || p.Stale != t.stale || p.LinksDue != t.awaitsLinks() || p.Driver != t.scan.Driver ||
		p.Control != t.scan.Control ||
		len(p.GPUs) != len(t.scan.GPUs) || !slices.Equal(p.LeftOut, t.scan.LeftOut) {
		return true
	}
	for i, g := range t.scan.GPUs {
		was, known := p.GPUs[i], t.gpus[g.UUID]
		g.Health, g.Reset = t.healthOf(g.UUID, known.Device), known.LastReset()
		if len(was.MIGDevices) != len(g.MIGDevices) {
			return true
		}
		for j, m := range g.MIGDevices {
			m.Health = t.verdict(g.UUID, known.Instances[j].Device)
			if was.MIGDevices[j] != m {
				return true
			}
		}
		g.MIGDevices = was.MIGDevices
		if !was.Equal(g) {
			return true
		}
	}
	return false
}

// awaitsLinks reports whether missing links are still worth a wait: looks succeed, and the links
// have not been due for long.
func (t *nodeState) awaitsLinks() bool { return t.scan.LinksDue && !t.linksLate && t.stale == "" }

// healthOf returns the published health of a GPU. A fault common to all GPUs has the node's reason.
func (t *nodeState) healthOf(gpu string, d health.Device) inventory.Health {
	h := t.verdict(gpu, d)
	if t.nodeReason != "" && h.State != inventory.Healthy {
		h.Reason = t.nodeReason
	}
	return h
}

// verdict returns the verdict on a device of the GPU with the given UUID. GPUs withheld by an
// operator are withheld even if health checks are off.
func (t *nodeState) verdict(gpu string, d health.Device) inventory.Health {
	verdict := t.policy.Verdict(d)
	if h, is := t.withheldGPUs[gpu]; is {
		verdict = inventory.Worst(verdict, h)
	}
	if t.withheldSince.IsZero() {
		return verdict
	}
	return inventory.Worst(verdict, inventory.Health{
		State: inventory.Unknown, Reason: t.stale, Remedy: inventory.RemedyHuman, Since: t.withheldSince,
	})
}

// nodeWide returns the common reason of all GPUs, or an empty string.
func (t *nodeState) nodeWide() string {
	if !t.withheldSince.IsZero() {
		return t.stale
	}
	if len(t.scan.GPUs) == 0 || t.gpus[t.scan.GPUs[0].UUID].Health.State == inventory.Healthy {
		return ""
	}
	gpus := make([]health.GPU, 0, len(t.scan.GPUs))
	for _, g := range t.scan.GPUs {
		gpus = append(gpus, t.gpus[g.UUID])
	}
	return health.NodeWide(gpus)
}

// limit returns when foldTime will next change the state; zero for never.
func (t *nodeState) limit() time.Time {
	var limit time.Time
	for _, g := range t.scan.GPUs {
		limit = order.Earliest(limit, t.gpus[g.UUID].Limit())
	}
	return limit
}

// poll returns the time between two looks while all GPUs look healthy.
func (t *nodeState) poll(o Options) time.Duration {
	return cmp.Or(o.Poll, t.policy.Interval, defaultPoll)
}

// pace returns the wait for the next look if nothing happens.
func (t *nodeState) pace(o Options, pinned bool) time.Duration {
	pace := t.poll(o)
	if t.scan.LinksDue {
		pace = o.SuspectPoll
	}
	for _, g := range t.scan.GPUs {
		known := t.gpus[g.UUID]
		_, wants := t.policy.WantsSession(known, t.facts)
		switch {
		case wants && known.Answers() && t.mayReopen() && !pinned:
			return 0
		case known.Suspect():
			pace = min(pace, o.SuspectPoll)
		}
	}
	return pace
}
