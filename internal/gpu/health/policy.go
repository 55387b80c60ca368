package health

import (
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Policy has the rules for opening and closing faults. The zero value is not usable; Default
// returns good values.
//
// A fault found by a reading closes after Passes consecutive readings without evidence, the first
// and the last at least Settle apart. A fault of an event, such as an XID, closes likewise if the
// recovery action covers the event and is NONE. Otherwise the fault also needs evidence of a reset.
// The remedy reboot needs a new boot ID. The remedies hardware and human need an operator.
type Policy struct {
	// Interval is the time between two readings of a healthy GPU.
	Interval  time.Duration
	Overrides Overrides
	// SuspectLimit is how long a device may be Suspect before it becomes Unhealthy.
	SuspectLimit time.Duration
	// UnknownGrace is how long a device may still get new work after the driver stopped answering.
	UnknownGrace time.Duration
	// Passes is the number of consecutive readings without evidence needed to close a fault.
	Passes int
	// SuspectSettle and Settle are the shortest time between the first and the last pass, for
	// Suspect and for worse devices. The recovery action may change some time after the event, and
	// a recovery must last.
	SuspectSettle, Settle time.Duration
	// FlapLimit is the number of recoveries accepted within FlapWindow. After another one, an
	// operator must clear the fault.
	FlapLimit  int
	FlapWindow time.Duration
	// FabricReported means that the state of the NVSwitch fabric is only reported.
	FabricReported bool
	// IMEXGates means that a GPU gets no new work while the driver requests a recovery of the IMEX
	// domain. Otherwise the request is only reported: it concerns fabric memory alone, and the next
	// pod may bring up the domain.
	IMEXGates bool
	// EnergyEvidence means that a decrease of the energy counter is evidence of a reset.
	EnergyEvidence bool
	// ReopenAlways means that NVML is opened again for a GPU that only a new session can find, even
	// if another GPU without persistence mode loses settings such as power limits.
	ReopenAlways bool
	// Manual means that an operator must clear every fault that makes a device Unhealthy or Lost.
	Manual bool
}

// Default returns the default policy.
func Default() Policy {
	return Policy{
		Interval:      4 * time.Second,
		SuspectLimit:  5 * time.Second,
		UnknownGrace:  10 * time.Second,
		Passes:        2,
		SuspectSettle: time.Second,
		Settle:        3 * time.Second, // two polls of 4 s, with jitter
		FlapLimit:     3,
		FlapWindow:    24 * time.Hour,
	}
}

// Verdict returns the published health of a device. If the operator disabled all health checks, it
// is always Healthy.
func (p Policy) Verdict(d Device) inventory.Health {
	if p.Overrides.Off() {
		return inventory.Health{State: inventory.Healthy, Since: d.Health.Since}
	}
	return d.Health
}

// Facts are the inputs of a fold besides the event or reading.
type Facts struct {
	// Branch is the driver's branch, such as 580; 0 before a driver was found.
	Branch int
	// Opened is the time at which the session of the reading was opened. Handles of an older
	// session say nothing about a GPU that was lost or reset since.
	Opened time.Time
	// GSPUnmarked is true for a driver older than inventory.MarksGSP. Its recovery action does not
	// ask for a reset when the GPU's own processor (GSP) hangs.
	GSPUnmarked bool
}
