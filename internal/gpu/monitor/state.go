package monitor

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/ledger"
)

// nodeState is what is known of the node. It belongs to the loop.
type nodeState struct {
	policy  health.Policy
	metrics Metrics
	facts   health.Facts
	// scan is the last look that succeeded, with the GPUs kept that it could not identify; its healths
	// mean nothing.
	scan inventory.Snapshot
	// looked is when a look succeeded last, err why the last one failed. Stale is what the Snapshot
	// says of it; unloaded, that the driver was gone since the last look that succeeded.
	looked   time.Time
	answers  time.Time // since when looks succeed
	began    time.Time // when the last look began
	err      error
	stale    string
	unloaded bool
	// troubled is how many GPUs are lost, hang or are left out; they are asked again at next, for the
	// time that tries counts.
	troubled, tries int
	next            time.Time
	// linksDue is since when links are to be asked for, zero if they are not. linksLate says that
	// nobody waits for them any more.
	linksDue  time.Time
	linksLate bool
	// linked is the last look after which no links were due.
	linked inventory.Snapshot
	// unwatched are the GPUs that give no events.
	unwatched []inventory.LeftOut
	// unanswered is since when each GPU, by UUID, has been asked without an answer.
	unanswered map[string]time.Time
	// withheld says since when an operator wants no work on the GPUs, until the driver is looked at
	// again; zero if it is wanted.
	withheld time.Time
	// withheldGPUs are the GPUs, by UUID, on which an operator wants no work, with the verdict that
	// says so.
	withheldGPUs map[string]inventory.Health
	// node is the reason that holds for all GPUs at once, empty if there is none.
	node string
	// gpus is what is known of each GPU by UUID, also of GPUs that are not there now.
	gpus map[string]health.GPU
	// noted is what the ledger said of devices that were not seen yet.
	noted ledger.Book
	// published is the last Snapshot that compose returned.
	published inventory.Snapshot
}

// event folds an event in. It reports whether a look must tell more first: the event names a GPU or
// MIG device that nobody has seen yet.
func (t *nodeState) event(e inventory.Event, now time.Time) (unseen bool) {
	e = t.identified(e)
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

// lateEvent is event after the look that should have told more. An instance of a GPU that has no
// MIG devices is the GPU.
func (t *nodeState) lateEvent(e inventory.Event, now time.Time) (unseen bool) {
	e = t.identified(e)
	if g, ok := t.gpus[e.UUID]; ok && g.Whole() {
		e.GI, e.CI = inventory.Unattributed, inventory.Unattributed
	}
	return t.event(e, now)
}

// identified returns an event of the kernel's log with the UUID of its GPU, if the last look found
// that.
func (t *nodeState) identified(e inventory.Event) inventory.Event {
	i := slices.IndexFunc(t.scan.GPUs, func(g inventory.GPU) bool { return e.BDF != "" && g.BDF == e.BDF })
	if i >= 0 {
		e.UUID = t.scan.GPUs[i].UUID
	}
	return e
}

// time folds in that time went by.
func (t *nodeState) time(now time.Time) {
	for _, g := range t.scan.GPUs {
		t.gpus[g.UUID] = t.policy.FoldTime(t.gpus[g.UUID], now)
	}
}

// look folds a look in.
func (t *nodeState) look(l look, now time.Time) {
	t.err = l.err
	if l.err != nil {
		t.stale = silent(l.err)
		t.unloaded = t.unloaded || errors.Is(l.err, inventory.ErrNoDriver)
		t.silence(t.scan.GPUs, t.policy, t.stale, now)
		return
	}
	if t.looked.IsZero() || t.stale != "" {
		t.answers = now
	}
	t.stale, t.looked, t.unwatched, t.withheld = "", now, l.unwatched, time.Time{}
	t.links(&l.snapshot, now)
	t.facts = health.Facts{Branch: l.snapshot.Driver.Branch(), Opened: l.opened,
		Unmarked: l.snapshot.Driver.Before(inventory.MarksGSP)}
	missing := t.missing(l.snapshot) // and so something is left out
	for i, g := range l.snapshot.GPUs {
		known, ok := t.gpus[g.UUID]
		if !ok {
			known = health.GPU{UUID: g.UUID}
		}
		was, there := t.scan.GPU(g.UUID)
		rebound := was.Binding != g.Binding
		if was.Binding == 0 { // it cannot be told, but a driver that was away was loaded anew
			rebound = t.unloaded
		}
		if ok && (rebound || !there) {
			known = t.policy.FoldReset(known, now) // the driver made it anew
		}
		unread := slices.ContainsFunc(l.snapshot.LeftOut, func(o inventory.LeftOut) bool { return o.Index == g.Index })
		known = known.Seen(g, unread, now)
		if !t.noted.Empty() {
			known = known.Restored(t.claim, now)
		}
		t.gpus[g.UUID] = t.foldResult(known, l.readings[i], now)
	}
	for _, g := range missing {
		t.gpus[g.UUID] = t.policy.FoldAbsence(t.gpus[g.UUID], reasonAt(l.snapshot.LeftOut, g.Index), now)
	}
	t.scan = withMissing(l.snapshot, missing)
	t.unloaded = false
	t.plan(now)
}

// linksPatience is how long Snapshots say that links are due. Eight GPUs that take 20 ms a call
// tell all theirs within that time.
const linksPatience = 30 * time.Second

// links has GPUs keep the links that they had before some were due.
func (t *nodeState) links(s *inventory.Snapshot, now time.Time) {
	if !s.LinksDue {
		t.linksDue, t.linked = time.Time{}, *s
		return
	}
	if t.linksDue.IsZero() {
		t.linksDue = now
	}
	if t.linksLate = now.Sub(t.linksDue) >= linksPatience; t.linksLate {
		return
	}
	s.GPUs = slices.Clone(s.GPUs)
	for i, g := range s.GPUs {
		was, _ := t.linked.GPU(g.UUID)
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

// hangAfter is how long a call about a GPU may take until the GPU is Unhealthy. A GPU that begins
// to hang is asked within Poll and judged within SuspectPoll: the sum of the three is below 15 s,
// also for two that hang at once.
const hangAfter = 8 * time.Second

// answerPatience is how long a GPU that is asked may go without an answer until it is not Healthy,
// although its calls return.
const answerPatience = 60 * time.Second

// foldResult folds in how a GPU answered, or did not.
func (t *nodeState) foldResult(g health.GPU, r readResult, now time.Time) health.GPU {
	if r.err == nil {
		delete(t.unanswered, g.UUID)
		return t.policy.FoldReading(g, r.Reading, t.facts, now)
	}
	var stall *inventory.Stall
	if !errors.As(r.err, &stall) {
		return t.policy.FoldSilence(g, silent(r.err), now)
	}
	since, ok := t.unanswered[g.UUID]
	if !ok || since.Before(t.facts.Opened) { // the time in which a session is opened does not count
		since = later(t.began, t.facts.Opened)
		t.unanswered[g.UUID] = since
	}
	if now.Sub(stall.Call.Since) >= hangAfter || now.Sub(since) >= answerPatience {
		return t.policy.FoldHang(g, *stall, t.facts, now)
	}
	return t.policy.FoldStall(g, cmp.Or(stall.Call.Function, "reading its files"), now)
}

// cleared folds in that the counts of memory errors of GPUs were cleared, before what was read of
// them afterwards.
func (t *nodeState) cleared(uuids []string) {
	for _, uuid := range uuids {
		if g, ok := t.gpus[uuid]; ok {
			t.gpus[uuid] = t.policy.FoldCleared(g)
		}
	}
}

// quiesce marks what is known as the last that will be until the driver is gone back to.
func (t *nodeState) quiesce(allocate bool, now time.Time) {
	t.stale = ErrQuiesced.Error()
	clear(t.unanswered)
	switch {
	case allocate:
		t.withheld = time.Time{}
	case t.withheld.IsZero():
		t.withheld = now
	}
}

// claim returns what the ledger said of a device, once.
func (t *nodeState) claim(uuid string) ([]health.Fault, []time.Time) {
	faults, recoveries := t.noted.Device(uuid)
	t.noted.Drop(uuid)
	return faults, recoveries
}

// wantsBook reports whether anything that was found may have to outlive the process; mostly nothing
// has.
func (t *nodeState) wantsBook() bool {
	for _, g := range t.gpus {
		if g.Marked() {
			return true
		}
	}
	return false
}

// book returns what must outlive the process.
func (t *nodeState) book(boot string) ledger.Book {
	b := t.noted.Clone()
	for _, g := range t.gpus {
		b.Add(g.UUID, boot, g.Device)
		for _, i := range slices.Concat(g.Instances, g.Unread) {
			b.Add(i.UUID, boot, i.Device)
		}
	}
	return b
}

// clear folds in that an operator takes a device for good. It reports whether there is such a
// device.
func (t *nodeState) clear(uuid string, now time.Time) bool {
	for key, g := range t.gpus {
		if cleared, ok := t.policy.Clear(g, uuid, now); ok {
			t.gpus[key] = cleared
			return true
		}
	}
	return t.noted.Drop(uuid)
}

// proven folds in what a proof showed of a device: why CUDA does not work on it; nothing is wrong
// if that is empty.
func (t *nodeState) proven(uuid, why string, cure inventory.Cure, now time.Time) {
	for key, g := range t.gpus {
		if next, ok := t.policy.FoldProof(g, uuid, why, cure, now); ok {
			t.gpus[key] = next
			return
		}
	}
}

// silence folds in that the GPUs cannot be asked.
func (t *nodeState) silence(gpus []inventory.GPU, p health.Policy, why string, now time.Time) {
	for _, g := range gpus {
		t.gpus[g.UUID] = p.FoldSilence(t.gpus[g.UUID], why, now)
	}
}

// silent says for people why nobody could be asked. It says the same as long as a call hangs,
// whatever waits for it.
func silent(err error) string {
	if errors.Is(err, inventory.ErrNoAnswer) {
		return "the NVIDIA driver does not answer: the kernel log says what it is at; if it stays so, restart the node"
	}
	return err.Error()
}

// reasonAt returns why the GPU at an index is left out, or any other that is.
func reasonAt(leftOut []inventory.LeftOut, index int) string {
	i := slices.IndexFunc(leftOut, func(l inventory.LeftOut) bool { return l.Index == index })
	return leftOut[max(i, 0)].Reason
}

// missing returns the GPUs of the last look that a new one does not show, but may still count: it
// counts GPUs that it could not identify. If it counts fewer, what is not shown was unplugged or
// unbound: then it is simply gone.
func (t *nodeState) missing(s inventory.Snapshot) []inventory.GPU {
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

// withMissing returns s with the GPUs that are missing from it in their places.
func withMissing(s inventory.Snapshot, missing []inventory.GPU) inventory.Snapshot {
	if len(missing) == 0 {
		return s
	}
	s.GPUs = slices.Concat(s.GPUs, missing)
	slices.SortStableFunc(s.GPUs, func(a, b inventory.GPU) int { return cmp.Compare(a.Index, b.Index) })
	return s
}

// compose returns the Snapshot of what is known now, and whether it differs from the one before.
func (t *nodeState) compose() (inventory.Snapshot, bool) {
	t.node = t.nodeWide()
	if !t.changed() {
		return t.published, false
	}
	s := t.scan
	s.Generation = t.published.Generation + 1
	s.Stale, s.LinksDue = t.stale, t.awaitsLinks()
	s.GPUs = slices.Clone(s.GPUs)
	for i := range s.GPUs {
		g := &s.GPUs[i]
		known := t.gpus[g.UUID]
		g.Health, g.Reset = t.health(g.UUID, known.Device), known.ResetSeen()
		g.MIGDevices = slices.Clone(g.MIGDevices)
		for j := range g.MIGDevices {
			g.MIGDevices[j].Health = t.verdict(g.UUID, known.Instances[j].Device)
		}
	}
	t.published = s
	return s, true
}

// changed reports whether the published Snapshot is not what is known now. It allocates nothing:
// most looks change nothing.
func (t *nodeState) changed() bool {
	p := t.published
	if p.Generation == 0 || p.Stale != t.stale || p.LinksDue != t.awaitsLinks() || p.Driver != t.scan.Driver ||
		p.Control != t.scan.Control ||
		len(p.GPUs) != len(t.scan.GPUs) || !slices.Equal(p.LeftOut, t.scan.LeftOut) {
		return true
	}
	for i, g := range t.scan.GPUs {
		was, known := p.GPUs[i], t.gpus[g.UUID]
		g.Health, g.Reset = t.health(g.UUID, known.Device), known.ResetSeen()
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

// awaitsLinks reports whether links are worth waiting for: looks succeed, and they have not been
// due for long.
func (t *nodeState) awaitsLinks() bool { return t.scan.LinksDue && !t.linksLate && t.stale == "" }

// health is the verdict on a GPU as the Snapshot has it: what is wrong with the whole node is said
// of the node.
func (t *nodeState) health(gpu string, d health.Device) inventory.Health {
	h := t.verdict(gpu, d)
	if t.node != "" && h.State != inventory.Healthy {
		h.Reason = t.node
	}
	return h
}

// verdict is the verdict on a device of a GPU, by UUID. An operator's word to give the GPUs no work
// holds also where checks are off.
func (t *nodeState) verdict(gpu string, d health.Device) inventory.Health {
	verdict := t.policy.Verdict(d)
	if h, is := t.withheldGPUs[gpu]; is {
		verdict = inventory.Worst(verdict, h)
	}
	if t.withheld.IsZero() {
		return verdict
	}
	return inventory.Worst(verdict, inventory.Health{
		State: inventory.Unknown, Reason: t.stale, Cure: inventory.CureHuman, Since: t.withheld,
	})
}

// nodeWide returns the reason that holds for all GPUs at once, or an empty one.
func (t *nodeState) nodeWide() string {
	if !t.withheld.IsZero() {
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

// limit returns when time will change something next; the zero time if it will not.
func (t *nodeState) limit() time.Time {
	var limit time.Time
	for _, g := range t.scan.GPUs {
		if l := t.gpus[g.UUID].Limit(); !l.IsZero() && (limit.IsZero() || l.Before(limit)) {
			limit = l
		}
	}
	return limit
}

// poll returns the time between two looks at GPUs that look well.
func (t *nodeState) poll(o Options) time.Duration {
	return cmp.Or(o.Poll, t.policy.Interval, defaultPoll)
}

// pace returns how long to wait for the next look while nothing happens.
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
