package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/draslices"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubeapi"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/apiserver"
)

// ledgerPublisher is a publisher that makes no request, with the clock that it goes by.
func ledgerPublisher(t *testing.T) (*publisher, *clocktesting.FakeClock) {
	t.Helper()
	timer := clocktesting.NewFakeClock(time.Now())
	devices := draslices.New(t.Context(), draslices.Options{
		Snapshots: feed.New(inventory.Snapshot{}), Configs: feed.New(config.Config{}), Owners: feed.New(dra.Owners{}),
	})
	client := kubeapi.New(kubeapi.Options{Node: nodeName})
	return newPublisher(client, devices, "", feed.New(draplugin.Status{}), timer, &spread{}), timer
}

// device is GPU-n, with the keys of its taints.
func device(n int, taints ...string) dra.Device {
	d := dra.Device{
		Name:       fmt.Sprintf("gpu-%d", n),
		Attributes: map[string]dra.Attribute{"uuid": {Type: dra.String, Value: fmt.Sprintf("GPU-%d", n)}},
	}
	for _, key := range taints {
		d.Taints = append(d.Taints, dra.Taint{Key: key, Effect: "NoSchedule"})
	}
	return d
}

func sliceOf(devices ...dra.Device) dra.Slice { return dra.Slice{Devices: devices} }

// kept is a slice as the API server has it.
func kept(t *testing.T, version string, s dra.Slice) kubeapi.Slice {
	t.Helper()
	devices, err := json.Marshal(s.Devices)
	if err != nil {
		t.Fatal(err)
	}
	return kubeapi.Slice{Name: "s", UID: "u", ResourceVersion: version, Pool: nodeName, Generation: 1, Count: 1, Devices: devices}
}

// TestViewOfSlices: what the watch tells counts, but for own writes and reads that it has not seen yet; those count for a time.
func TestViewOfSlices(t *testing.T) {
	t.Parallel()
	slice := func(uid, version string) kubeapi.Slice {
		return kubeapi.Slice{Name: "s", UID: uid, ResourceVersion: version}
	}
	seen := func(version string, all ...kubeapi.Slice) kubeapi.Slices {
		s := kubeapi.Slices{ResourceVersion: version, ByName: map[string]kubeapi.Slice{}}
		for _, one := range all {
			s.ByName[one.Name] = one
		}
		return s
	}
	const young, old = ownWrite - time.Second, ownWrite
	for name, tt := range map[string]struct {
		watched, listed kubeapi.Slices
		own             ownSlice // if it has a name
		age             time.Duration
		want            string // UID and version, "none", or "not known"
		keeps           bool   // the own write
	}{
		"nothing is known":                {want: "not known"},
		"the watch":                       {watched: seen("10", slice("u", "10")), want: "u 10"},
		"read since":                      {watched: seen("10"), listed: seen("12", slice("u", "12")), age: young, want: "u 12"},
		"read, and the watch is as far":   {watched: seen("12"), listed: seen("12", slice("u", "12")), want: "none"},
		"read long ago":                   {watched: seen("10"), listed: seen("12", slice("u", "12")), age: old, want: "none"},
		"read, and there is no watch":     {listed: seen("12", slice("u", "12")), age: young, want: "u 12"},
		"read long ago without a watch":   {listed: seen("12", slice("u", "12")), age: old, want: "not known"},
		"written since":                   {watched: seen("10", slice("u", "9")), own: ownSlice{Slice: slice("u", "15")}, age: young, want: "u 15", keeps: true},
		"written, and not listed":         {watched: seen("10"), own: ownSlice{Slice: slice("u", "15")}, want: "u 15", keeps: true},
		"written, and the watch is there": {watched: seen("15", slice("v", "15")), own: ownSlice{Slice: slice("u", "15")}, want: "v 15"},
		"written long ago":                {watched: seen("10", slice("u", "9")), own: ownSlice{Slice: slice("u", "15")}, age: old, want: "u 9"},
		"removed":                         {watched: seen("10", slice("u", "9")), own: ownSlice{Slice: slice("u", "9"), removed: true}, age: young, want: "none", keeps: true},
		"removed, and there is a new one": {watched: seen("10", slice("v", "10")), own: ownSlice{Slice: slice("u", "9"), removed: true}, want: "v 10"},
		"removed, and the watch knows":    {watched: seen("10"), own: ownSlice{Slice: slice("u", "9"), removed: true}, want: "none"},
		"removed long ago":                {watched: seen("10", slice("u", "9")), own: ownSlice{Slice: slice("u", "9"), removed: true}, age: old, want: "u 9"},
	} {
		p, timer := ledgerPublisher(t)
		p.there.Publish(tt.watched)
		p.ledger.listed, p.ledger.at = tt.listed, timer.Now()
		if tt.own.Name != "" {
			tt.own.at = timer.Now()
			p.ledger.own["s"] = tt.own
		}
		timer.Step(tt.age)
		view, known := p.view()
		got := "not known"
		if is, has := view["s"]; has {
			got = is.UID + " " + is.ResourceVersion
		} else if known {
			got = "none"
		}
		if got != tt.want || (len(p.ledger.own) > 0) != tt.keeps {
			t.Errorf("%s: %s, want %s; own writes that count on %v", name, got, tt.want, p.ledger.own)
		}
	}
}

// TestListIsForgotten: once the watch is as far as a list, that counts no more, also while the watch begins anew.
func TestListIsForgotten(t *testing.T) {
	t.Parallel()
	p, timer := ledgerPublisher(t)
	p.ledger.listed, p.ledger.at = kubeapi.Slices{ResourceVersion: "5"}, timer.Now()
	p.there.Publish(kubeapi.Slices{ResourceVersion: "4"})
	if view, known := p.view(); !known || len(view) > 0 {
		t.Fatalf("before the watch is as far: %v, known: %v", view, known)
	}
	p.there.Publish(kubeapi.Slices{ResourceVersion: "9", ByName: map[string]kubeapi.Slice{"s": {Name: "s", ResourceVersion: "9"}}})
	if view, _ := p.view(); len(view) != 1 {
		t.Fatalf("what the watch tells: %v", view)
	}
	p.there.Publish(kubeapi.Slices{})
	if view, known := p.view(); known {
		t.Errorf("while the watch begins anew: %v", view)
	}
}

// TestPauseOfSliceWrites: bad news waits for nothing, good news a second after the last write, and what another program removed longer and
// longer, until kubelet has started again or nothing was removed for a minute.
func TestPauseOfSliceWrites(t *testing.T) {
	t.Parallel()
	to := func(devices ...dra.Device) dra.Write {
		return dra.Write{Name: "s", Published: dra.PublishedSlice{Slice: sliceOf(devices...)}}
	}
	for name, tt := range map[string]struct {
		step          dra.Write
		is            dra.Slice
		generation    int64
		written       time.Duration // ago
		restored      time.Duration // ago
		pace          time.Duration
		registrations int
		want          time.Duration // 0 for none
	}{
		"the first":                     {step: dra.Write{New: true}, restored: time.Second, pace: minPace, want: 0},
		"restored, once":                {step: dra.Write{New: true}, generation: 1, restored: time.Second, want: 0},
		"restored again":                {step: dra.Write{New: true}, generation: 1, restored: 10 * time.Second, pace: 30 * time.Second, want: 20 * time.Second},
		"just before a calm minute":     {step: dra.Write{New: true}, generation: 1, restored: calm - time.Second, pace: maxPace, want: time.Second},
		"after a calm minute":           {step: dra.Write{New: true}, generation: 1, restored: calm, pace: 2 * calm, want: 0},
		"after a start of kubelet":      {step: dra.Write{New: true}, generation: 1, restored: time.Second, pace: maxPace, registrations: 1, want: 0},
		"removed":                       {step: dra.Write{Name: "s", Remove: true}, is: sliceOf(device(0)), want: 0},
		"a taint":                       {step: to(device(0, "xid")), is: sliceOf(device(0)), want: 0},
		"a device is gone":              {step: to(device(0)), is: sliceOf(device(0), device(1)), want: 0},
		"a taint is gone":               {step: to(device(0)), is: sliceOf(device(0, "xid")), written: 300 * time.Millisecond, want: 700 * time.Millisecond},
		"a taint is gone after a while": {step: to(device(0)), is: sliceOf(device(0, "xid")), written: slicePace, want: 0},
	} {
		p, timer := ledgerPublisher(t)
		now := timer.Now()
		p.ledger.generation, p.ledger.pace = tt.generation, tt.pace
		p.ledger.restored, p.ledger.written = now.Add(-tt.restored), now.Add(-tt.written)
		p.driver.Publish(draplugin.Status{Registrations: tt.registrations})
		if got := max(0, p.pause(tt.step, map[string]dra.PublishedSlice{"s": {Slice: tt.is}})); got != tt.want {
			t.Errorf("%s: waits %v, want %v", name, got, tt.want)
		}
	}
}

// TestChangesByOthers: which changes of slices count as those of another program, and for how long three of them have slices left alone.
func TestChangesByOthers(t *testing.T) {
	t.Parallel()
	pool := dra.Pool{Name: nodeName, Slices: []dra.Slice{sliceOf(device(0))}}
	name := pool.SliceName(0)
	p, timer := ledgerPublisher(t)
	version := 0
	judged := func(name string, is dra.PublishedSlice) error {
		version++
		there, view := map[string]dra.PublishedSlice{}, map[string]kubeapi.Slice{}
		if name != "" {
			there[name], view[name] = is, kubeapi.Slice{Name: name, ResourceVersion: fmt.Sprint(version)}
		}
		err := p.judge(t.Context(), pool, there, view)
		if again := p.judge(t.Context(), pool, there, view); !errors.Is(again, err) {
			t.Errorf("%s: the same again is judged %v, before %v", name, again, err)
		}
		return err
	}
	counts := func(what string, want int, name string, is dra.PublishedSlice) {
		t.Helper()
		if err := judged(name, is); err != nil || len(p.ledger.struck) != want {
			t.Errorf("%s: %d changes of others (%v), want %d", what, len(p.ledger.struck), err, want)
		}
	}
	p.ledger.generation = 1
	mine := dra.PublishedSlice{Pool: nodeName, Generation: 1, Count: 1, Slice: pool.Slices[0]}
	other, tried := mine, mine
	other.Slice, tried.Slice = sliceOf(device(5)), sliceOf(device(0, "xid"))
	p.ledger.tried[name] = tried
	counts("at the start", 0, name, other)
	counts("what is to be there", 0, name, mine)
	counts("what was tried", 0, name, tried)
	for what, change := range map[string]func(*dra.PublishedSlice){
		"another generation": func(s *dra.PublishedSlice) { s.Generation = 7 },
		"another count":      func(s *dra.PublishedSlice) { s.Count = 7 },
		"other devices":      func(s *dra.PublishedSlice) { s.Slice = sliceOf(device(5)) },
	} {
		changed := tried
		change(&changed)
		p.ledger.struck = nil
		counts(what, 1, name, changed)
	}
	p.ledger.struck = nil
	counts("a slice of no part of the pool", 1, "left", mine)
	counts("which is changed before it is removed", 1, "left", other)
	counts("nothing is there", 1, "", mine)
	counts("something is there again, as at the start", 1, "left", mine)

	p.ledger.struck = nil
	counts("this process's", 0, name, tried)
	version -= 2
	counts("an older one, of an API server that is behind", 0, name, other)
	counts("this process's again", 0, name, tried)

	p.ledger.struck = nil
	counts("one", 1, name, other)
	timer.Step(time.Minute)
	counts("two", 2, name, other)
	timer.Step(strikeWindow - time.Minute)
	counts("the first is too long ago", 2, name, other)
	if err := judged(name, other); !errors.Is(err, errOtherPublisher) {
		t.Errorf("three changes: %v", err)
	}
	timer.Step(strikeWindow - time.Second)
	if err := judged(name, mine); !errors.Is(err, errOtherPublisher) {
		t.Errorf("within the time: %v", err)
	}
	timer.Step(time.Second)
	counts("after the time", 0, name, mine)
}

// TestWhatTheAPIServerKeeps: of what was sent, and that nothing is sent again that it does not keep.
func TestWhatTheAPIServerKeeps(t *testing.T) {
	t.Parallel()
	counted := device(0)
	counted.ConsumesCounters = []dra.CounterUse{{CounterSet: "c"}}
	for name, tt := range map[string]struct {
		sent, kept                   dra.Slice
		before                       bool // it is known that it keeps neither
		noTaints, noCounters, differ bool
	}{
		"all":               {sent: sliceOf(device(0, "xid")), kept: sliceOf(device(0, "xid"))},
		"no taints":         {sent: sliceOf(device(0, "xid")), kept: sliceOf(device(0)), noTaints: true, differ: true},
		"some taints":       {sent: sliceOf(device(0, "a", "b")), kept: sliceOf(device(0, "a")), differ: true},
		"no counters":       {sent: sliceOf(counted), kept: sliceOf(device(0)), noCounters: true, differ: true},
		"fewer devices":     {sent: sliceOf(device(0), device(1)), kept: sliceOf(device(0)), differ: true},
		"a taint too many":  {sent: sliceOf(device(0)), kept: sliceOf(device(0, "theirs")), differ: true},
		"neither, as known": {sent: sliceOf(device(0, "xid")), kept: sliceOf(device(0)), before: true, noTaints: true, noCounters: true, differ: true},
	} {
		p, _ := ledgerPublisher(t)
		p.ledger.noTaints, p.ledger.noCounters = tt.before, tt.before
		if err := p.compare(t.Context(), "s", tt.sent, kept(t, "1", tt.kept)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if p.ledger.noTaints != tt.noTaints || p.ledger.noCounters != tt.noCounters || (len(p.ledger.kept) > 0) != tt.differ {
			t.Errorf("%s: no taints %v, no counters %v, kept %v", name, p.ledger.noTaints, p.ledger.noCounters, p.ledger.kept)
		}
		if !p.same("s", tt.sent, tt.kept) || p.same("s", sliceOf(device(7)), tt.kept) || p.same("s", tt.sent, sliceOf(device(7))) {
			t.Errorf("%s: what is written again is not what the API server does not have", name)
		}
		if err := p.compare(t.Context(), "s", tt.sent, kept(t, "1", tt.sent)); err != nil || len(p.ledger.kept) > 0 {
			t.Errorf("%s: it keeps all now, and %v is kept (%v)", name, p.ledger.kept, err)
		}
	}
}

// TestDamagedSlices: a slice whose content is none of this program's fails, with its name.
func TestDamagedSlices(t *testing.T) {
	t.Parallel()
	for _, s := range []kubeapi.Slice{{Name: "one", Devices: []byte(`{`)}, {Name: "two", Counters: []byte(`7`)}} {
		if _, err := content(s); err == nil || !strings.Contains(err.Error(), "ResourceSlice "+s.Name) {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
	s, err := content(kubeapi.Slice{Devices: []byte(`[{"name":"gpu-0"}]`), Counters: []byte(`[{"name":"c"}]`)})
	if err != nil || len(s.Devices) != 1 || len(s.SharedCounters) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestPublishedIsSettled: a GPU counts as not published only by what was just read.
func TestPublishedIsSettled(t *testing.T) {
	t.Parallel()
	there := map[string]dra.PublishedSlice{"s": {Slice: sliceOf(device(0), device(1))}}
	for name, tt := range map[string]struct {
		published map[string]bool
		looked    bool
		want      bool
	}{
		"not known":             {nil, false, false},
		"not known, and looked": {nil, true, true},
		"the same":              {map[string]bool{"GPU-0": true, "GPU-1": true}, false, true},
		"some":                  {map[string]bool{"GPU-1": true}, false, true},
		"one more":              {map[string]bool{"GPU-0": true, "GPU-2": true}, false, false},
		"one more, and looked":  {map[string]bool{"GPU-2": true}, true, true},
	} {
		p, _ := ledgerPublisher(t)
		p.devices.Published().Publish(tt.published)
		if got := p.settle(there, tt.looked); got != tt.want {
			t.Errorf("%s: settled %v", name, got)
		}
	}
}

// TestWhatIsNoted: the numbers of all slices and the newest generation; a generation that was written is never given again.
func TestWhatIsNoted(t *testing.T) {
	t.Parallel()
	p, _ := ledgerPublisher(t)
	p.ledger.noTaints = true
	for _, tt := range []struct{ written, want int64 }{{0, 3}, {5, 5}} {
		p.ledger.generation = tt.written
		if err := p.note(map[string]dra.PublishedSlice{
			"a": {Generation: 3, Slice: sliceOf(device(0), device(1))}, "b": {Generation: 2, Slice: sliceOf(device(2))},
		}); err != nil {
			t.Fatal(err)
		}
		want := draslices.Publication{Slices: 2, Devices: 3, Generation: 3, API: p.client.ResourceVersion(), NoTaints: true}
		if got := p.devices.Publication().Value(); got != want || p.ledger.generation != tt.want {
			t.Errorf("noted %+v and generation %d, want %+v and %d", got, p.ledger.generation, want, tt.want)
		}
		if got := slices.Sorted(maps.Keys(p.devices.Published().Value())); !cmp.Equal([]string{"GPU-0", "GPU-1", "GPU-2"}, got) {
			t.Errorf("published are %v", got)
		}
	}
	_, changed := p.devices.Publication().Latest()
	if err := p.note(map[string]dra.PublishedSlice{}); err != nil {
		t.Fatal(err)
	}
	<-changed
	_, changed = p.devices.Publication().Latest()
	if err := p.note(map[string]dra.PublishedSlice{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
		t.Error("the same was told twice")
	default:
	}
}

// TestProblemsOfSlices: what waits for something else is told and not tried again; what is told already is not told again.
func TestProblemsOfSlices(t *testing.T) {
	t.Parallel()
	p, _ := ledgerPublisher(t)
	other := errors.New("away")
	for _, tt := range []struct {
		err, want error
		problem   string
		told      bool
	}{
		{nil, nil, "", false},
		{other, other, "away", true},
		{other, other, "away", false},
		{errOtherPublisher, nil, errOtherPublisher.Error(), true},
		{&errNotNow{"no Node"}, nil, "no Node", true},
		{nil, nil, "", true},
	} {
		_, changed := p.devices.Publication().Latest()
		if got := p.tell(tt.err); !errors.Is(got, tt.want) || (got == nil) != (tt.want == nil) {
			t.Errorf("%v: %v, want %v", tt.err, got, tt.want)
		}
		told := false
		select {
		case <-changed:
			told = true
		default:
		}
		if got := p.devices.Publication().Value().Problem; got != tt.problem || told != tt.told {
			t.Errorf("%v: the problem is %q, told anew: %v", tt.err, got, told)
		}
	}
}

// TestPublisherNeeded: while there is something to publish and kubelet has registered the driver, or something to remove.
func TestPublisherNeeded(t *testing.T) {
	t.Parallel()
	full, empty := dra.Pool{Name: nodeName, Slices: []dra.Slice{sliceOf()}}, dra.Pool{Name: nodeName}
	registered := draplugin.Status{Registered: true, Registrations: 1}
	for name, tt := range map[string]struct {
		pool      dra.Pool
		driver    draplugin.Status
		published map[string]bool
		want      bool
	}{
		"a pool":                            {full, registered, map[string]bool{}, true},
		"a pool, not registered":            {full, draplugin.Status{}, map[string]bool{"GPU-0": true}, false},
		"a later process":                   {full, draplugin.Status{Registrations: 1, Later: true}, nil, false},
		"another program":                   {full, draplugin.Status{Registrations: 1, Foreign: "x.sock"}, nil, false},
		"no pool yet":                       {dra.Pool{}, registered, map[string]bool{"GPU-0": true}, false},
		"no pool yet, and nothing is known": {dra.Pool{}, draplugin.Status{}, nil, true},
		"nothing to publish":                {empty, registered, map[string]bool{}, false},
		"something to remove":               {empty, draplugin.Status{}, map[string]bool{"GPU-0": true}, true},
		"perhaps something to remove":       {empty, draplugin.Status{}, nil, true},
	} {
		p, _ := ledgerPublisher(t)
		p.devices.Pools().Publish(tt.pool)
		p.devices.Published().Publish(tt.published)
		p.driver.Publish(tt.driver)
		if got := p.needed(); got != tt.want {
			t.Errorf("%s: needed %v", name, got)
		}
	}
}

// TestNothingIsForgottenWithoutALook: a GPU stays published as long as the API server cannot be asked.
func TestNothingIsForgottenWithoutALook(t *testing.T) {
	s := newStage(t)
	p, _ := ledgerPublisher(t)
	p.client = kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
	for name, pool := range map[string]dra.Pool{"no pool yet": {}, "an empty pool": {Name: nodeName}} {
		p.devices.Pools().Publish(pool)
		p.devices.Published().Publish(map[string]bool{"GPU-0": true})
		p.there.Publish(kubeapi.Slices{ResourceVersion: "1"})
		s.server.SetFault(apiserver.Fault{Status: 500})
		if err := p.publish(t.Context()); err == nil || !p.devices.Published().Value()["GPU-0"] {
			t.Errorf("%s: %v, published %v", name, err, p.devices.Published().Value())
		}
		s.server.SetFault(apiserver.Fault{})
		if err := p.publish(t.Context()); err != nil || len(p.devices.Published().Value()) > 0 {
			t.Errorf("%s, with an answer: %v, published %v", name, err, p.devices.Published().Value())
		}
	}
}

// TestPublishedBeforeItIs: a GPU counts as published before the write whose answer may be lost. Where it is not known what is, all stay so.
func TestPublishedBeforeItIs(t *testing.T) {
	s := newStage(t)
	s.server.SetFault(apiserver.Fault{Status: 500, Only: apiserver.Request.IsWrite})
	for name, tt := range map[string]struct {
		published, want map[string]bool
	}{
		"none":    {map[string]bool{}, map[string]bool{"GPU-0": true}},
		"another": {map[string]bool{"GPU-7": true}, map[string]bool{"GPU-0": true, "GPU-7": true}},
		"unknown": {nil, nil},
	} {
		p, _ := ledgerPublisher(t)
		p.client = kubeapi.New(kubeapi.Options{Kubeconfig: s.server.Kubeconfig(), Node: nodeName, Version: "v1"})
		p.devices.Pools().Publish(dra.Pool{Name: nodeName, Slices: []dra.Slice{sliceOf(device(0))}})
		p.devices.Published().Publish(tt.published)
		p.there.Publish(kubeapi.Slices{ResourceVersion: "1"})
		if err := p.publish(t.Context()); err == nil || !cmp.Equal(tt.want, p.devices.Published().Value()) {
			t.Errorf("%s: %v, published %v, want %v", name, err, p.devices.Published().Value(), tt.want)
		}
	}
}
