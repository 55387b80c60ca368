package health_test

import (
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Only allocations of fabric memory need the IMEX domain, and the next pod may be the one that
// brings it up.
func TestIMEXRecoveryGatesOnlyWhereItIsWanted(t *testing.T) {
	s := begin(t, 595)
	s.xid(48)
	s.reads(2, asking(inventory.RecoveryIMEXDomain))
	s.want(inventory.Healthy, inventory.NoRemedy) // nor does it keep the driver from acquitting
	if got := s.gpu.Reading.RecoveryAction; got != inventory.Known(inventory.RecoveryIMEXDomain) {
		t.Errorf("the recovery action is kept as %+v, for people to see", got)
	}
	s.policy.IMEXGates = true
	s.reads(1, asking(inventory.RecoveryIMEXDomain))
	s.want(inventory.Unhealthy, inventory.RemedyIMEX)
	s.policy.IMEXGates = false
	s.reads(2, asking(inventory.RecoveryIMEXDomain))
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// The driver's summary weighs the single faults; without one each of them counts.
func TestFabricSummaryDecidesWhereItIsKnown(t *testing.T) {
	const faults = inventory.FabricDegradedBandwidth | inventory.FabricRouteRecovery
	for _, tt := range []struct {
		summary inventory.FabricSummary
		faults  inventory.FabricFault
		gates   bool
	}{
		{inventory.FabricSummaryUnknown, 0, false},
		{inventory.FabricSummaryUnknown, faults, true},
		{inventory.FabricSummaryUnknown, inventory.FabricUnassigned | inventory.FabricManagerDisconnected, false},
		{inventory.FabricSummaryUnhealthy, inventory.FabricUnassigned, true},
		{inventory.FabricSummaryHealthy, 0, false},
		{inventory.FabricSummaryHealthy, faults, false},
		{inventory.FabricSummaryLimitedCapacity, 0, false},
		{inventory.FabricSummaryLimitedCapacity, faults, false},
		{inventory.FabricSummaryUnhealthy, 0, true},
		{inventory.FabricSummaryUnhealthy, faults, true},
	} {
		s := begin(t, 580)
		bad := s.good
		bad.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricCompleted, Summary: tt.summary,
			Faults: tt.faults})
		s.reads(1, bad)
		if gates := s.gpu.Health.Remedy == inventory.RemedyFabric; gates != tt.gates {
			t.Errorf("%v with faults %b: %+v", tt.summary, tt.faults, s.gpu.Health)
		}
	}
}

func TestFabricReasonsNameWhatIsWrong(t *testing.T) {
	for want, f := range map[string]inventory.Fabric{
		"registration with the NVSwitch fabric is in-progress, and CUDA does not start before it is completed: " +
			"bring up the NVSwitch fabric (Fabric Manager)": {State: inventory.FabricInProgress},
		"registration with the NVSwitch fabric failed with NVML code 999: " +
			"bring up the NVSwitch fabric (Fabric Manager)": {
			State: inventory.FabricCompleted, Status: 999,
		},
		"the connection to the NVSwitch fabric has faults: degraded bandwidth; " +
			"no partition has the GPU: ask the administrator of the fabric to add it to one: " +
			"bring up the NVSwitch fabric (Fabric Manager)": {
			State: inventory.FabricCompleted, Faults: inventory.FabricDegradedBandwidth | inventory.FabricNoPartition,
		},
		"the connection to the NVSwitch fabric has faults: too few NVLinks of the GPU are up for its partition: " +
			"check NVSwitches, cables and trays; " +
			"the fabric manager (GFM) is not connected: check that it is running and reachable": {
			State: inventory.FabricCompleted, Faults: inventory.FabricTooFewLinks | inventory.FabricManagerDisconnected,
		},
		"the connection to the NVSwitch fabric has faults: route unhealthy: bring up the NVSwitch fabric (Fabric " +
			"Manager)": {
			State: inventory.FabricCompleted, Summary: inventory.FabricSummaryUnhealthy,
			Faults: inventory.FabricRouteUnhealthy,
		},
		"the driver reports the connection to the NVSwitch fabric as unhealthy: " +
			"bring up the NVSwitch fabric (Fabric Manager)": {
			State: inventory.FabricCompleted, Summary: inventory.FabricSummaryUnhealthy,
		},
	} {
		s := begin(t, 580)
		bad := s.good
		bad.Fabric = inventory.Known(f)
		s.reads(1, bad)
		if got := s.gpu.Health.Reason; got != want {
			t.Errorf("reason %q, want %q", got, want)
		}
	}
}

// Multi-instance mode takes a GPU out of the fabric.
func TestMIGModeIsNotGatedByTheFabric(t *testing.T) {
	s := begin(t, 580)
	bad := s.good
	bad.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})
	s.reads(1, bad)
	s.want(inventory.Unhealthy, inventory.RemedyFabric)
	s.see(inventory.GPU{MIG: inventory.MIGEnabled})
	s.reads(2, bad)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.see(inventory.GPU{MIG: inventory.MIGDisabled})
	s.reads(1, bad)
	s.want(inventory.Unhealthy, inventory.RemedyFabric)
}

// A call for a signal that fails condemns no GPU, and ends none of what the signal has shown.
func TestSignalThatCannotBeReadNow(t *testing.T) {
	s := begin(t, 580)
	unread := s.good
	unread.Incomplete = "nvmlDeviceGetGpuFabricInfo: ERROR_UNKNOWN"
	s.reads(10, unread)
	s.want(inventory.Healthy, inventory.NoRemedy)

	bad := s.good
	bad.Fabric = inventory.Known(inventory.Fabric{State: inventory.FabricInProgress})
	s.reads(1, bad)
	s.xid(48)
	s.reads(10, unread)
	s.want(inventory.Unhealthy, inventory.RemedyFabric)
	if n := len(s.gpu.Faults); n != 1 {
		t.Errorf("%d faults, want the fabric's alone: %+v", n, s.gpu.Faults)
	}
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)

	for name, bad := range map[string]inventory.Reading{
		"memory": {UnrepairableMemory: inventory.Known(true)},
		"ECC":    {UncorrectedECC: inventory.Known(uint64(2))},
	} {
		s := begin(t, 580)
		bad.RecoveryAction = s.good.RecoveryAction
		s.good.UncorrectedECC = inventory.Known(uint64(1))
		s.reads(1, s.good)
		s.reads(1, bad)
		s.reads(5, unread)
		if len(s.gpu.Faults) != 1 {
			t.Errorf("%s: %+v after readings without it", name, s.gpu.Faults)
		}
	}
}

// A GPU that could not be asked, or never was, and then fails its calls, is not given to work while
// its verdict is awaited.
func TestFailingCallsAfterSilence(t *testing.T) {
	failing := inventory.Reading{Contact: inventory.ContactFailing, Reason: "nvmlDeviceGetMemoryInfo: ERROR_UNKNOWN"}
	s := begin(t, 580)
	s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now)
	s.wait(time.Second) // while its grace lasts
	s.read(failing)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(1, failing)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)

	s.gpu = health.GPU{UUID: "GPU-0"}
	s.read(failing)
	s.want(inventory.Unhealthy, inventory.RemedyReset)

	s = begin(t, 580)
	s.read(failing)
	s.want(inventory.Suspect, inventory.RemedyReset)
}

// TestHang: a GPU with a call that does not return is Unhealthy, also after a restart, until it
// answers.
func TestHang(t *testing.T) {
	s := begin(t, 580)
	hang := func() { s.gpu = s.hang(s.now) }
	hang()
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	const reason = "the driver does not return from nvmlDeviceGetMemoryInfo for this GPU: see the kernel log; " +
		"if this persists, reset the GPU or restart the node"
	if s.gpu.Health.Reason != reason || s.gpu.Answers() {
		t.Errorf("it answers: %v, %q", s.gpu.Answers(), s.gpu.Health.Reason)
	}
	s.reads(1, s.good)
	s.wait(time.Second)
	hang()
	s.restart()
	s.reads(1, s.good)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
	s.reads(1, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	for range 20 { // calls that take long are no reason to ask for hands
		hang()
		s.reads(2, s.good)
		s.want(inventory.Healthy, inventory.NoRemedy)
	}
	s.gpu = s.policy.FoldSilence(s.gpu, "the driver hangs", s.now)
	hang()
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

// hang is a call that began at a time and has not returned.
func (s *story) hang(since time.Time) health.GPU {
	call := inventory.Call{Function: "nvmlDeviceGetMemoryInfo", Since: since}
	return s.policy.FoldHang(s.gpu, inventory.Stall{Call: call}, s.facts, s.now)
}

// TestGSPThatHangs: where the driver does not mark a GPU whose GSP hangs, two long hangs within ten
// minutes, and the XIDs of the GSP, need evidence of a reset.
func TestGSPThatHangs(t *testing.T) {
	hangs := func(s *story, times int, each, apart time.Duration) {
		for range times {
			since := s.now
			for s.wait(8 * time.Second); s.now.Sub(since) < each; s.wait(time.Second) {
				s.gpu = s.hang(since)
			}
			s.reads(2, s.good)
			s.wait(apart)
		}
	}
	for name, tt := range map[string]struct {
		happen  func(*story)
		healthy [2]bool // by itself, with a driver that marks such a GPU, and one that does not
	}{
		"one hang of 45 s": {func(s *story) { hangs(s, 1, 45*time.Second, 0) }, [2]bool{true, true}},
		"two within minutes": {func(s *story) { hangs(s, 2, 45*time.Second, 8*time.Minute) },
			[2]bool{true, false}},
		"two in a quarter of an hour": {func(s *story) { hangs(s, 2, 45*time.Second, 15*time.Minute) },
			[2]bool{true, true}},
		"many that are shorter": {func(s *story) { hangs(s, 9, 29*time.Second, 0) }, [2]bool{true, true}},
		"two that hung 12 s, and then nobody asked": {func(s *story) {
			for range 2 {
				stall := inventory.Stall{Call: inventory.Call{Function: "x", Since: s.now}, Over: true}
				s.wait(time.Minute)
				s.gpu = s.policy.FoldHang(s.gpu, stall, s.facts, s.now)
				s.reads(2, s.good)
			}
		}, [2]bool{true, true}},
		"XID 119": {func(s *story) { s.xid(119) }, [2]bool{false, false}},
		"XID 120": {func(s *story) { s.xid(120) }, [2]bool{true, false}},
	} {
		for i, unmarked := range []bool{false, true} {
			s := begin(t, 570)
			s.facts.GSPUnmarked = unmarked
			tt.happen(s)
			s.reads(20, s.good)
			if healthy := s.gpu.Health.State == inventory.Healthy; healthy != tt.healthy[i] {
				t.Errorf("%s, unmarked %v: %+v", name, unmarked, s.gpu.Health)
				continue
			}
			s.restart()
			s.facts.GSPUnmarked = unmarked
			s.reads(20, s.good)
			if healthy := s.gpu.Health.State == inventory.Healthy; healthy != tt.healthy[i] {
				t.Errorf("%s, unmarked %v, after a restart of the daemon: %+v", name, unmarked, s.gpu.Health)
			}
			s.gpu = s.policy.FoldReset(s.gpu, s.now.Add(time.Second))
			s.wait(2 * time.Second)
			s.reads(2, s.good)
			s.want(inventory.Healthy, inventory.NoRemedy)
		}
	}
}

// TestStall: a GPU with a call that has not returned for a while is Suspect, which lets new work
// in, until it answers.
func TestStall(t *testing.T) {
	s := begin(t, 580)
	s.gpu = s.policy.FoldStall(s.gpu, "nvmlDeviceGetMemoryInfo", s.now)
	s.want(inventory.Suspect, inventory.RemedyReset)
	want := "the driver has not returned from nvmlDeviceGetMemoryInfo for this GPU yet"
	if s.gpu.Health.Reason != want || s.gpu.Answers() {
		t.Errorf("it answers: %v, %q, want %q", s.gpu.Answers(), s.gpu.Health.Reason, want)
	}
	s.reads(2, s.good)
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.gpu = s.hang(s.now)
	s.gpu = s.policy.FoldStall(s.gpu, "nvmlDeviceGetMemoryInfo", s.now)
	s.want(inventory.Unhealthy, inventory.RemedyReset)
}

// Before the recovery action the catalog says that what struck a MIG device needs a reset of the
// GPU, and so of its siblings.
func TestFaultsOfAMIGDeviceThatReachItsSiblings(t *testing.T) {
	poison := inventory.Event{Kind: inventory.EventFatalPoison}
	xid := func(code uint64) inventory.Event { return inventory.Event{Kind: inventory.EventXID, XID: code} }
	for name, tt := range map[string]struct {
		branch   int
		event    inventory.Event
		siblings bool
	}{
		"double-bit error, R550":        {550, xid(48), true},
		"uncontained error, R550":       {550, xid(95), true},
		"failed remapping, R550":        {550, xid(64), true},
		"code without a meaning, R550":  {550, xid(1), false},
		"uncontained poison, R560":      {560, poison, true},
		"double-bit error, R565":        {565, xid(48), false},
		"uncontained error, R580":       {580, xid(95), false},
		"uncontained poison, R565":      {565, poison, false},
		"timeout that NONE says not of": {580, xid(119), false},
		"application's error, R550":     {550, xid(31), false},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, tt.branch)
			s.see(inventory.GPU{MIGDevices: []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}, {UUID: "MIG-2", GI: 2}}})
			tt.event.GI, tt.event.CI = 2, inventory.Unattributed
			s.event(tt.event)
			if whole := s.gpu.Health.State != inventory.Healthy; whole != tt.siblings {
				t.Errorf("the GPU is %+v", s.gpu.Health)
			}
			struck := tt.event.XID != 31
			if own := s.gpu.Instances[1].Health.State != inventory.Healthy; own != (struck && !tt.siblings) {
				t.Errorf("the MIG device is %+v", s.gpu.Instances[1].Health)
			}
			if s.gpu.Instances[0].Health.State != inventory.Healthy || len(s.gpu.Instances[1].Counts) != 1 ||
				len(s.gpu.Counts) != 0 {
				t.Errorf("counted at the wrong place: %+v", s.gpu)
			}
			if _,
				ok := s.policy.FoldEvent(s.gpu, inventory.Event{Kind: tt.event.Kind, XID: tt.event.XID, GI: 3}, s.facts,
				s.now); ok {
				t.Error("an event of an instance that is not there hit something")
			}
		})
	}
}

// An XID that the driver reports and the kernel logs counts once, whichever comes first.
func TestXIDInBothEventAndLog(t *testing.T) {
	event := inventory.Event{Kind: inventory.EventXID, XID: 119, GI: inventory.Unattributed, CI: inventory.Unattributed}
	logged := event
	logged.Logged = true
	other := logged
	other.XID = 120
	const line, soon, late = 2 * time.Millisecond, time.Second, 10 * time.Second
	for name, tt := range map[string]struct {
		events []inventory.Event
		apart  time.Duration
		counts []int // of XID 119, after each
	}{
		"event first": {[]inventory.Event{event, logged}, soon, []int{1, 1}},
		"log first":   {[]inventory.Event{logged, event}, soon, []int{1, 1}},
		"event alone": {[]inventory.Event{event, event, event}, soon, []int{1, 2, 3}},
		"log alone":   {[]inventory.Event{logged, logged, logged}, soon, []int{1, 2, 3}},
		"two events, then their logs": {[]inventory.Event{event, event, logged, logged, logged}, soon,
			[]int{1, 2, 2, 2, 3}},
		"in turn":      {[]inventory.Event{event, logged, event, logged}, soon, []int{1, 1, 2, 2}},
		"too late":     {[]inventory.Event{event, logged}, late, []int{1, 2}},
		"just in time": {[]inventory.Event{event, logged}, late - 1, []int{1, 1}},
		"another code": {[]inventory.Event{event, other, logged}, soon, []int{1, 1, 1}},

		// As an H200 with driver 580 tells of XID 13.
		"three lines, then the event": {[]inventory.Event{logged, logged, logged, event}, line, []int{1, 1, 1, 1}},
		"the event, then three lines": {[]inventory.Event{event, logged, logged, logged}, line, []int{1, 1, 1, 1}},
		"lines alone":                 {[]inventory.Event{logged, logged, logged}, line, []int{1, 1, 1}},
		"lines, then two events":      {[]inventory.Event{logged, logged, event, event}, line, []int{1, 1, 1, 2}},
		"two events, then lines":      {[]inventory.Event{event, event, logged, logged}, line, []int{1, 2, 2, 2}},
		"lines that do not end": {[]inventory.Event{logged, logged, logged, logged, logged}, soon / 2,
			[]int{1, 1, 2, 2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			for i, e := range tt.events {
				s.event(e)
				n := 0
				for _, c := range s.gpu.Counts {
					if c.XID == 119 {
						n = c.N
					}
				}
				if n != tt.counts[i] {
					t.Errorf("after %d: %d counted, want %d", i+1, n, tt.counts[i])
				}
				s.wait(tt.apart)
			}
			s.want(inventory.Unhealthy, inventory.RemedyReset)
		})
	}

	// A line that is late does not strike a GPU again that is repaired.
	s := begin(t, 580)
	event.XID, logged.XID = 48, 48
	s.policy.Settle = time.Second
	s.event(event)
	for range 2 {
		s.wait(time.Second)
		s.read(s.good)
	}
	s.want(inventory.Healthy, inventory.NoRemedy)
	s.event(logged)
	s.want(inventory.Healthy, inventory.NoRemedy)
}

// With MIG devices the two may say by different precision where it was: then the first one counts.
func TestXIDInBothEventAndLogOfAMIGDevice(t *testing.T) {
	at := func(gi int, logged bool) inventory.Event {
		return inventory.Event{Kind: inventory.EventXID, XID: 119, GI: gi, CI: inventory.Unattributed, Logged: logged}
	}
	const whole = inventory.Unattributed
	for name, tt := range map[string]struct {
		first, second inventory.Event
		gpu, one, two int // counts
	}{
		"the log knows no instance":      {at(1, false), at(whole, true), 0, 1, 0},
		"the event knows no instance":    {at(1, true), at(whole, false), 0, 1, 0},
		"both know it":                   {at(1, true), at(1, false), 0, 1, 0},
		"the second one knows it better": {at(whole, false), at(1, true), 1, 0, 0},
		"they are of two instances":      {at(1, false), at(2, true), 0, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := begin(t, 580)
			s.see(inventory.GPU{MIGDevices: []inventory.MIGDevice{{UUID: "MIG-1", GI: 1}, {UUID: "MIG-2", GI: 2}}})
			s.event(tt.first)
			s.event(tt.second)
			got := []int{len(s.gpu.Counts), len(s.gpu.Instances[0].Counts), len(s.gpu.Instances[1].Counts)}
			if got[0] != tt.gpu || got[1] != tt.one || got[2] != tt.two {
				t.Errorf("%v counted at the GPU and its MIG devices, want %d, %d, %d", got, tt.gpu, tt.one, tt.two)
			}
			for _, i := range s.gpu.Instances {
				for _, c := range i.Counts {
					if c.N != 1 {
						t.Errorf("%s counted %d times", i.UUID, c.N)
					}
				}
			}
		})
	}
}
