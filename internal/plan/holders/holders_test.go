package holders_test

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/holders"
)

var (
	device = holders.Key{Resource: "nvidia.com/gpu", ID: "GPU-0"}
	start  = time.Unix(1e9, 0)
)

// names returns what an account says that names a pod for the device; nobody for an empty pod.
func names(pod string, checkpointOnly bool) map[holders.Key]holders.Holder {
	if pod == "" {
		return nil
	}
	return map[holders.Key]holders.Holder{device: {Pod: pod, Container: "c", CheckpointOnly: checkpointOnly}}
}

// A reading is an account that is read some time after the one before.
type reading struct {
	after time.Duration
	says  holders.Account
}

// TestADeviceIsDroppedOnEvidenceAlone: the same kubelet has named nobody for ten seconds.
func TestADeviceIsDroppedOnEvidenceAlone(t *testing.T) {
	t.Parallel()
	free := holders.Account{Kubelet: 1}
	restarted := holders.Account{Kubelet: 2}
	silent := holders.Account{Kubelet: 1, UnknownBecause: "kubelet's checkpoint is damaged"}
	held := holders.Account{Kubelet: 1, Held: names("p", false)}
	for name, test := range map[string]struct {
		readings []reading
		stays    bool
	}{
		"not free for long enough": {[]reading{{time.Hour, free}, {10*time.Second - 1, free}}, true},
		"free for long enough":     {[]reading{{time.Second, free}, {10 * time.Second, free}}, false},
		"a reading that began before that": {[]reading{{0, free},
			{time.Hour, holders.Account{Kubelet: 1, Began: time.Unix(1, 0)}}}, true},
		"never an account": {[]reading{{time.Hour, silent}, {24 * time.Hour, silent}}, true},
		"the account is away once on the way": {[]reading{{0, free}, {9 * time.Second, silent}, {time.Second, free},
			{9 * time.Second, free}}, true},
		"and then is there for long enough": {[]reading{{0, free}, {9 * time.Second, silent}, {time.Second, free},
			{10 * time.Second, free}}, false},
		"kubelet restarts on the way": {[]reading{{0, free}, {9 * time.Second, restarted},
			{9 * time.Second, restarted}}, true},
		"and that one says so for long enough": {[]reading{{0, free}, {9 * time.Second, restarted},
			{10 * time.Second, restarted}}, false},
		"held after a while": {[]reading{{0, free}, {9 * time.Second, held}, {9 * time.Second, free},
			{9 * time.Second, free}}, true},
		"held, and then free for long enough": {[]reading{{0, held}, {time.Hour, free}, {10 * time.Second, free}}, false},
		"another resource's device of the name": {[]reading{{0, holders.Account{Kubelet: 1,
			Held: map[holders.Key]holders.Holder{{Resource: "other", ID: device.ID}: {}}}}, {10 * time.Second, free}}, false},
	} {
		h, now, stays := holders.New(), start, true
		s := h.Leaves(device, true)
		for _, r := range test.readings {
			now = now.Add(r.after)
			r.says.Began = cmp.Or(r.says.Began, now)
			h.Tell(r.says, now)
			s = s.Read(h, r.says, device, now)
			stays = stays && !s.IsOver(r.says.Began)
		}
		if stays != test.stays {
			t.Errorf("%s: still listed: %v, want %v", name, stays, test.stays)
		}
	}
}

// TestAGrantCountsUntilAnAccountShowsThePod: the kubelet asks for a device before any account says
// that a pod holds it.
func TestAGrantCountsUntilAnAccountShowsThePod(t *testing.T) {
	t.Parallel()
	type reading struct {
		after time.Duration // the grant
		late  time.Duration // how long before its end it began
		held  map[holders.Key]holders.Holder
		want  bool
	}
	const allocated = "the kubelet may have allocated it within the last 10s"
	for name, readings := range map[string][]reading{
		"no account shows the pod": {{0, 0, nil, true}, {10*time.Second - 1, 0, nil, true},
			{10 * time.Second, 0, nil, false}},
		"it was given long ago":          {{time.Hour, time.Hour, nil, true}, {2 * time.Hour, 0, nil, false}},
		"PodResources has shown the pod": {{time.Second, 0, names("p", false), true}, {2 * time.Second, 0, nil, false}},
		"an earlier question shows it": {{time.Second, 2 * time.Second, names("p", false), true},
			{2 * time.Second, 0, nil, true}},
		"the checkpoint may show the last one": {{time.Second, 0, names("p", true), true}, {2 * time.Second, 0, nil, true},
			{10 * time.Second, 0, nil, false}},
	} {
		given := holders.New()
		given.Ask(device, start)
		given.Give(device, start)
		for way, s := range map[string]holders.State{
			"before it left the plan": given.Leaves(device, true),
			"after that":              holders.New().Leaves(device, true).Allocate(start),
			"by another process":      holders.Adopted(start),
		} {
			if !s.Counts() {
				t.Errorf("%s, %s: not held before the accounts were read", name, way)
			}
			for _, r := range readings {
				now := start.Add(r.after)
				a := holders.Account{Kubelet: 1, Began: now.Add(-r.late), Held: r.held}
				given.Tell(a, now)
				s = s.Read(given, a, device, now)
				if s.Counts() != r.want || (s.WaitsFor() == allocated) != (r.want && r.held == nil) {
					t.Errorf("%s, %s: %v later: held = %v, want %v; it waits for %q", name, way, r.after, s.Counts(), r.want,
						s.WaitsFor())
				}
			}
		}
	}
}

// TestADeviceThatWasNeverOffered is held only by a pod that an account names.
func TestADeviceThatWasNeverOffered(t *testing.T) {
	t.Parallel()
	h := holders.New()
	s := h.Leaves(device, false)
	if s.Counts() || !s.CannotBeHeld() {
		t.Errorf("before a reading: counts %v, cannot be held %v", s.Counts(), s.CannotBeHeld())
	}
	if s = s.Read(h, holders.Account{Held: names("p", false)}, device, start); !s.Counts() ||
		s.WaitsFor() != "pod p holds it" {
		t.Errorf("an account names a pod: counts %v; it waits for %q", s.Counts(), s.WaitsFor())
	}
}

// TestIsHeld: by the last account without a gap, or by a grant which that account need not show
// yet, whatever else was given since.
func TestIsHeld(t *testing.T) {
	t.Parallel()
	gap := func(a holders.Account) holders.Account { a.UnknownBecause = "damaged"; return a }
	other := holders.Key{Resource: device.Resource, ID: "GPU-1"}
	for name, tt := range map[string]struct {
		given    bool // at the start
		readings []reading
		want     bool
	}{
		"nothing is known":                      {want: false},
		"given, and nothing was read":           {given: true, want: true},
		"given, and read nine seconds later":    {true, []reading{{9 * time.Second, holders.Account{}}}, true},
		"given, and read ten seconds later":     {true, []reading{{10 * time.Second, holders.Account{}}}, false},
		"given, and an hour without an account": {true, []reading{{time.Hour, gap(holders.Account{})}}, true},
		"the account names a pod":               {false, []reading{{0, holders.Account{Held: names("p", true)}}}, true},
		"an account with a gap names a pod": {false, []reading{{0, gap(holders.Account{Held: names("p", true)})}},
			false},
		"the account names a pod, and then nobody": {false,
			[]reading{{0, holders.Account{Held: names("p", true)}}, {1, holders.Account{}}}, false},
	} {
		h, now := holders.New(), start
		if tt.given {
			h.Give(device, now)
		}
		for _, r := range tt.readings {
			now = now.Add(r.after)
			r.says.Began = now
			h.Tell(r.says, now)
		}
		h.Ask(other, now.Add(time.Hour))
		h.Give(other, now.Add(time.Hour))
		if got := h.IsHeld(device); got != tt.want {
			t.Errorf("%s: held = %v, want %v", name, got, tt.want)
		}
	}
}

// TestContainersOfUnits: an account says who holds a unit; for a grant that the account need not
// show, the grant does.
func TestContainersOfUnits(t *testing.T) {
	t.Parallel()
	h := holders.New()
	give := func(at time.Duration, ids ...string) {
		for _, id := range ids {
			h.Give(holders.Key{Resource: device.Resource, ID: id}, start.Add(at))
		}
		h.Occupy(device.Resource, ids, start.Add(at))
	}
	tell := func(at time.Duration, a holders.Account) {
		a.Began = start.Add(at)
		h.Tell(a, start.Add(at))
	}
	is := func(step string, awaits bool, want string) {
		t.Helper()
		all := h.Containers(device.Resource)
		var got []string
		for _, id := range slices.Sorted(maps.Keys(all)) {
			got = append(got, id+"="+all[id])
		}
		if text := strings.Join(got, ", "); text != want || h.Awaits(device.Resource) != awaits {
			t.Errorf("%s: %q, awaits %v, want %q, %v", step, text, h.Awaits(device.Resource), want, awaits)
		}
	}
	tell(0, holders.Account{Held: names("init", false)})
	is("an init container", false, "GPU-0=init c")
	give(time.Second, "GPU-0", "GPU-1")
	give(time.Second, "GPU-2")
	is("two containers", true, "GPU-0=1, GPU-1=1, GPU-2=2")
	tell(time.Second, holders.Account{Held: names("init", false)})
	is("an account as old as the grant", true, "GPU-0=1, GPU-1=1, GPU-2=2")
	tell(2*time.Second, holders.Account{Held: names("p", false)})
	is("an account shows one unit", true, "GPU-0=p c, GPU-1=1, GPU-2=2")
	tell(3*time.Second, holders.Account{UnknownBecause: "away"})
	is("an account that says nothing", true, "GPU-0=p c, GPU-1=1, GPU-2=2")
	tell(11*time.Second, holders.Account{UnknownBecause: "damaged", Unreadable: true, Partial: true,
		Held: names("p", false)})
	is("an init container may hold a unit", true, "GPU-0=p c, GPU-1=1, GPU-2=2")
	tell(11*time.Second, holders.Account{Held: names("p", false)})
	is("no account shows the others", false, "GPU-0=p c")
	if got := h.Containers("nvidia.com/other"); len(got) > 0 || h.Awaits("nvidia.com/other") {
		t.Errorf("another resource has %v", got)
	}
}

// TestInitContainersWithoutTheCheckpoint: PodResources leaves them out, so what the last checkpoint
// said of them stays.
func TestInitContainersWithoutTheCheckpoint(t *testing.T) {
	t.Parallel()
	for _, checkpointOnly := range []bool{false, true} {
		h := holders.New()
		h.Tell(holders.Account{Held: names("init", checkpointOnly)}, start)
		h.Tell(holders.Account{UnknownBecause: "damaged", Unreadable: true, Partial: true}, start)
		if stays := len(h.Containers(device.Resource)) > 0; stays != checkpointOnly {
			t.Errorf("named by the checkpoint alone: %v; it stays: %v", checkpointOnly, stays)
		}
		h.Tell(holders.Account{UnknownBecause: "away", Partial: true}, start)
		if len(h.Containers(device.Resource)) > 0 {
			t.Error("a checkpoint that can be read does not name the container, and it stays")
		}
	}
}

// TestSilence counts after ten seconds without a gap, and not any more when nobody waits.
func TestSilence(t *testing.T) {
	t.Parallel()
	h := holders.New()
	for _, step := range []struct {
		at            time.Duration
		unreadable    bool
		noPod         bool
		says          string
		changed, ends bool
	}{
		{0, true, false, "", false, false},
		{9 * time.Second, false, false, "", false, false},
		{12 * time.Second, true, false, "", false, false},
		{22*time.Second - 1, true, false, "", false, false},
		{22 * time.Second, true, false, "damaged", true, false},
		{23 * time.Second, true, true, "damaged", true, false},
		{24 * time.Second, true, true, "damaged", false, true},
		{25 * time.Second, true, true, "", false, false},
		{26 * time.Second, true, false, "", true, false},
	} {
		a := holders.Account{Unreadable: step.unreadable, NoPodResources: step.noPod}
		if step.unreadable {
			a.UnknownBecause = "damaged"
		}
		changed := h.Tell(a, start.Add(step.at))
		if h.Silence() != step.says || changed != step.changed || h.NoPodResources() != step.noPod {
			t.Errorf("after %v: %q, changed %v, want %q, %v", step.at, h.Silence(), changed, step.says, step.changed)
		}
		if step.ends && (!h.EndSilence() || h.EndSilence() || h.Silence() != "") {
			t.Errorf("after %v: the silence does not end once", step.at)
		}
	}
}

// TestUsersOfAWantedDevice: whom an account names, unless the checkpoint alone does so and
// PodResources has shown that the pod ended.
func TestUsersOfAWantedDevice(t *testing.T) {
	t.Parallel()
	one, two := holders.Source{Incarnation: 1, Connections: 1}, holders.Source{Incarnation: 2, Connections: 1}
	type step struct {
		account        holders.Account
		offered, asked bool
		user, outdated bool
	}
	shown := step{account: holders.Account{Source: one, Held: names("p", false)}, user: true}
	saved := func(by holders.Source) holders.Account { return holders.Account{Source: by, Held: names("p", true)} }
	for name, steps := range map[string][]step{
		"nobody":                             {{}},
		"the checkpoint alone names a pod":   {{account: saved(one), user: true, outdated: true}},
		"PodResources names it":              {shown},
		"it has ended":                       {shown, {account: saved(one), outdated: true}},
		"it has ended at another kubelet":    {shown, {account: saved(two), user: true, outdated: true}},
		"it has ended, and nobody was asked": {shown, {account: saved(holders.Source{}), user: true, outdated: true}},
		"the kubelet asked for the device":   {shown, {account: saved(one), asked: true, user: true, outdated: true}},
		"the device was offered meanwhile":   {shown, {account: saved(one), offered: true, user: true, outdated: true}},
		"shown while it was offered": {{account: shown.account, offered: true, user: true},
			{account: saved(one), user: true, outdated: true}},
		"shown by what was asked before a call": {{account: shown.account, asked: true, user: true},
			{account: saved(one), user: true, outdated: true}},
	} {
		h, now := holders.New(), start
		for i, step := range steps {
			now = now.Add(time.Second)
			step.account.Began = now
			if step.asked {
				h.Ask(device, now)
			}
			users, outdated, err := h.Of(step.account, func(id string) bool { return id == device.ID }, step.offered, nil,
				now)
			if _, user := users[device]; user != step.user || outdated != step.outdated || err != nil {
				t.Errorf("%s, reading %d: %v, outdated %v, %v, want %v, %v", name, i, users, outdated, err, step.user,
					step.outdated)
			}
			if users, outdated, _ := h.Of(step.account, func(string) bool { return false }, step.offered, nil,
				now); len(users) > 0 || outdated {
				t.Errorf("%s, reading %d: a device that nobody wants has %v", name, i, users)
			}
		}
	}
}

// TestUsersAfterAGrant: within ten seconds an account must have shown the pod.
func TestUsersAfterAGrant(t *testing.T) {
	t.Parallel()
	one, two := holders.Source{Incarnation: 1}, holders.Source{Incarnation: 2}
	for name, tt := range map[string]struct {
		after   time.Duration
		wanted  bool
		retired bool           // another process may have given it until the start
		held    bool           // now
		shown   holders.Source // the kubelet that showed the pod meanwhile
		known   bool
	}{
		"a moment ago":                 {wanted: true},
		"a moment ago, and it retired": {wanted: true, retired: true},
		"nearly ten seconds ago":       {after: 10*time.Second - 1, wanted: true},
		"ten seconds ago":              {after: 10 * time.Second, wanted: true, known: true},
		"another device":               {known: true},
		"a pod is shown":               {wanted: true, held: true, known: true},
		"a pod was shown":              {after: time.Second, wanted: true, shown: one, known: true},
		"another kubelet showed it":    {after: time.Second, wanted: true, shown: two},
	} {
		h, retiring, now := holders.New(), map[holders.Key]holders.State{}, start.Add(tt.after)
		if retiring[device] = holders.Adopted(start); !tt.retired {
			delete(retiring, device)
			h.Ask(device, start)
			h.Give(device, start)
		}
		wanted := func(string) bool { return tt.wanted }
		if tt.shown != (holders.Source{}) {
			_, _, _ = h.Of(holders.Account{Source: tt.shown, Began: now, Held: names("p", false)}, wanted, false, retiring, now)
		}
		a := holders.Account{Source: one, Began: now}
		if tt.held {
			a.Held = names("p", false)
		}
		if _, _, err := h.Of(a, wanted, false, retiring, now); (err == nil) != tt.known {
			t.Errorf("%s: %v, want that it is known: %v", name, err, tt.known)
		}
	}
}

// TestBegin: what was saved before the first plan counts as told, unless it could not be read.
func TestBegin(t *testing.T) {
	t.Parallel()
	h := holders.New()
	h.Begin(holders.Account{Held: names("p", true)})
	if !h.IsNamed(device) || len(h.Containers(device.Resource)) != 1 || !h.Complete().Began.IsZero() {
		t.Errorf("named %v, containers %v", h.IsNamed(device), h.Containers(device.Resource))
	}
}
