package health

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Source is the origin of a fault. A device has at most one open fault of each source, and one of
// each XID.
type Source string

// The sources of faults.
const (
	SourceXID         Source = "xid"             // an XID event
	SourcePoison      Source = "poison"          // an event: poisoned memory was consumed
	SourceRetirement  Source = "retirement"      // an event: memory could not be retired
	SourceUnavailable Source = "unavailable"     // an event: the GPU stopped answering
	SourceAction      Source = "recovery-action" // a reading: the driver's recovery action
	// A reading or a scan: the GPU is gone, or answers that it is lost.
	SourceLost    Source = "lost"
	SourceReset   Source = "reset-required" // a reading: calls answer that the GPU needs a reset
	SourceMemory  Source = "memory"         // a reading: memory that cannot be repaired
	SourceFabric  Source = "fabric"         // a reading: the NVSwitch fabric
	SourceECC     Source = "ecc"            // a reading: new uncorrected memory errors
	SourceContact Source = "contact"        // a reading: calls fail with codes that name no state of the GPU
	SourceHang    Source = "hang"           // no reading: a call to this GPU does not return
	// no reading: calls to this GPU hung twice within a short time, as with a hanging GSP.
	SourceHangs    Source = "hangs"
	SourceSilence  Source = "silence"  // no reading: the driver does not answer
	SourceFlapping Source = "flapping" // too many recoveries
	SourceCUDA     Source = "cuda"     // a CUDA check failed; package cudacheck saves the result on disk
)

// event reports whether events open the faults of the source. Readings cannot find such faults
// again.
func (s Source) event() bool {
	return s == SourceXID || s == SourcePoison || s == SourceRetirement || s == SourceUnavailable
}

// signal reports whether signals find the faults of the source. Some GPUs lack these signals.
func (s Source) signal() bool { return s == SourceMemory || s == SourceFabric || s == SourceECC }

// A Fault is one problem of a device.
type Fault struct {
	Source Source
	// XID is the number of a SourceXID fault.
	XID uint64
	// State is the state of the device because of this fault alone.
	State inventory.State
	// Reason says what happened and what to do: a sentence without a full stop.
	Reason string
	Remedy inventory.Remedy
	// Since is the time of the first evidence of the fault, and LastSeen of the latest.
	Since    time.Time
	LastSeen time.Time

	// limit is the end of the Suspect state, or of the grace of an Unknown device.
	limit time.Time
	// passes is the number of consecutive readings without evidence of the fault; firstPass
	// is the time of the first.
	passes    int
	firstPass time.Time
}

// uncorrected reports whether the fault is an XID of uncorrected memory errors: 172 is the SRAM
// detail of 48.
func (f Fault) uncorrected() bool { return f.XID == 48 || f.XID == 172 }

// durable reports whether the fault must survive a restart of the process: a bad GPU stays bad.
func (f Fault) durable() bool {
	return f.Source != SourceCUDA && (f.State == inventory.Unhealthy || f.State == inventory.Lost)
}

// maxXIDs limits the XID faults of a device. Each fault costs time at every event and reading, and
// space in the ledger. More XIDs from the driver do not make the device worse.
const maxXIDs = 32

// substituteFor returns the fault to open after an XID: f itself, or, if the device already has
// faults of maxXIDs other XIDs, the newest of these that is as bad and as hard to close. It returns
// f without such a fault.
func (p Policy) substituteFor(g GPU, d Device, f Fault, facts Facts) Fault {
	if f.Source != SourceXID {
		return f
	}
	xids := 0
	for _, o := range d.Faults {
		if o.Source == SourceXID {
			xids++
		}
		if o.Source == SourceXID && o.XID == f.XID {
			return f
		}
	}
	if xids < maxXIDs {
		return f
	}
	for _, o := range slices.Backward(d.Faults) {
		if o.Source == SourceXID && inventory.Worst(o.health(), f.health()).State == o.State &&
			effort(o.Remedy) >= effort(f.Remedy) &&
			p.conditionFor(g, o, facts) >= p.conditionFor(g, f, facts) {
			o.passes = 0
			return o
		}
	}
	return f
}

func (f Fault) health() inventory.Health {
	return inventory.Health{
		State: f.State, Grace: f.State == inventory.Unknown && !f.limit.IsZero(), Reason: f.Reason, XID: f.XID,
		Remedy: f.Remedy,
	}
}

// effort ranks remedies by their cost.
func effort(c inventory.Remedy) int {
	switch c {
	case inventory.RemedyHardware:
		return 4
	case inventory.RemedyHuman:
		return 3
	case inventory.RemedyReboot:
		return 2
	case inventory.RemedyReset, inventory.RemedyDrain, inventory.RemedyReconnect:
		return 1
	default:
		return 0
	}
}

// instruction returns the instruction for a remedy.
func instruction(c inventory.Remedy) string {
	switch c {
	case inventory.RemedyReset:
		return "stop all processes on the GPU and reset it"
	case inventory.RemedyDrain:
		return "wait until running work ends, then reset the GPU"
	case inventory.RemedyDrainP2P:
		return "end the processes that use peer-to-peer memory"
	case inventory.RemedyReboot:
		return "restart the node"
	case inventory.RemedyFabric:
		return "bring up the NVSwitch fabric (Fabric Manager)"
	case inventory.RemedyIMEX:
		return "recover the IMEX domain"
	case inventory.RemedyReconnect:
		return "check that the GPU is plugged in, powered and bound to the driver"
	case inventory.RemedyHardware:
		return "replace the part or its cables, then clear the fault"
	case inventory.RemedyHuman, inventory.NoRemedy:
	}
	return "find the cause, then clear the fault"
}

// because returns a reason: what happened and what to do.
func because(c inventory.Remedy, format string, args ...any) string {
	return fmt.Sprintf(format, args...) + ": " + instruction(c)
}
