package health

import (
	"fmt"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/inventory"
)

// Source is what a fault was found by. A device has at most one open fault of each source, but one for each XID.
type Source string

// The sources of faults.
const (
	SourceXID         Source = "xid"             // an XID event
	SourcePoison      Source = "poison"          // an event: poisoned memory was consumed
	SourceRetirement  Source = "retirement"      // an event: memory could not be retired
	SourceUnavailable Source = "unavailable"     // an event: the GPU stopped answering
	SourceAction      Source = "recovery-action" // a reading: the driver's recovery action
	SourceLost        Source = "lost"            // a reading or a scan: the GPU is not there, or answers that it is lost
	SourceReset       Source = "reset-required"  // a reading: calls answer that the GPU needs a reset
	SourceMemory      Source = "memory"          // a reading: memory that cannot be repaired
	SourceFabric      Source = "fabric"          // a reading: the NVSwitch fabric
	SourceECC         Source = "ecc"             // a reading: uncorrected memory errors since the last one
	SourceContact     Source = "contact"         // a reading: calls fail with codes that say nothing of the GPU
	SourceHang        Source = "hang"            // no reading: a call to this GPU does not return
	SourceSilence     Source = "silence"         // no reading: nobody could ask the GPU
	SourceFlapping    Source = "flapping"        // recovered too often
)

// event reports whether faults of the source are opened by events, which no reading can find again.
func (s Source) event() bool {
	return s == SourceXID || s == SourcePoison || s == SourceRetirement || s == SourceUnavailable
}

// signal reports whether faults of the source are told by signals of a reading that not every GPU has.
func (s Source) signal() bool { return s == SourceMemory || s == SourceFabric || s == SourceECC }

// A Fault is one thing that is wrong with a device, from the look that found it to the one that found it cured.
type Fault struct {
	Source Source
	// XID is the number of a SourceXID fault.
	XID uint64
	// State is what the fault makes of the device.
	State inventory.State
	// Reason is a sentence without a full stop: what was found, and what to do about it.
	Reason string
	Cure   inventory.Cure
	// Since is when the fault was found, Seen when it was found last.
	Since time.Time
	Seen  time.Time

	// limit is when Suspect turns Unhealthy, and when Unknown is no longer given to new work.
	limit time.Time
	// passes counts the readings in a row that found the evidence gone, the first of them at passing.
	passes  int
	passing time.Time
}

// uncorrected reports whether the fault is an XID of uncorrected memory errors: 172 is the detail of 48 for the chip's own
// memories.
func (f Fault) uncorrected() bool { return f.XID == 48 || f.XID == 172 }

// durable reports whether the fault must outlive the process, so that a restart does not make a bad GPU good.
func (f Fault) durable() bool {
	return f.State == inventory.Unhealthy || f.State == inventory.Lost
}

func (f Fault) health() inventory.Health {
	return inventory.Health{
		State: f.State, Grace: f.State == inventory.Unknown && !f.limit.IsZero(), Reason: f.Reason, XID: f.XID, Cure: f.Cure,
	}
}

// effort orders cures by what they take.
func effort(c inventory.Cure) int {
	switch c {
	case inventory.CureHardware:
		return 4
	case inventory.CureHuman:
		return 3
	case inventory.CureReboot:
		return 2
	case inventory.CureReset, inventory.CureDrain, inventory.CureReconnect:
		return 1
	default:
		return 0
	}
}

// remedy says in words what a cure asks for.
func remedy(c inventory.Cure) string {
	switch c {
	case inventory.CureReset:
		return "stop every process on the GPU and reset it"
	case inventory.CureDrain:
		return "let running work end, then reset the GPU"
	case inventory.CureDrainP2P:
		return "end the processes that use peer-to-peer memory"
	case inventory.CureReboot:
		return "restart the node"
	case inventory.CureFabric:
		return "bring up the NVSwitch fabric (Fabric Manager)"
	case inventory.CureIMEX:
		return "recover the IMEX domain"
	case inventory.CureReconnect:
		return "bring the GPU back: plugged in, powered and bound to the driver"
	case inventory.CureHardware:
		return "have the part replaced or re-cabled, then clear the fault"
	case inventory.CureHuman, inventory.NoCure:
	}
	return "find out why, then clear the fault"
}

// because joins what was found and what its cure asks for to a reason.
func because(c inventory.Cure, format string, args ...any) string {
	return fmt.Sprintf(format, args...) + ": " + remedy(c)
}
