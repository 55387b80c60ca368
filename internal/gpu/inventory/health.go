package inventory

import (
	"fmt"
	"time"
)

// Health says whether a device may get new work, and why not.
type Health struct {
	// State is the verdict. The zero value is Unknown: a device is Healthy only after a verdict.
	State State
	// Grace is true for an Unknown device that may still get new work: the driver has only just
	// stopped answering.
	Grace bool
	// Reason tells an operator what happened and what to do: a sentence without a full stop. It is
	// empty for a Healthy device.
	Reason string
	// XID is the driver's error number that caused the verdict, or 0.
	XID uint64
	// Cure is the remedy: what makes the device usable again. It is empty for a Healthy device.
	Cure Cure
	// Since is the time of the change to State.
	Since time.Time
}

// Allocatable reports whether the device may get new work. The kubelet sees an allocatable device
// as Healthy. A Suspect device is allocatable: without a verdict in time, the policy turns it
// Unhealthy. An Unknown device is allocatable during its grace.
func (h Health) Allocatable() bool {
	return h.State == Healthy || h.State == Suspect || h.State == Unknown && h.Grace
}

// Why returns the reason and the remedy, "REASON; remedy: REMEDY", or whichever of the two is set.
func (h Health) Why() string {
	switch {
	case h.Cure == NoCure:
		return h.Reason
	case h.Reason == "":
		return "remedy: " + string(h.Cure)
	}
	return h.Reason + "; remedy: " + string(h.Cure)
}

// Worst returns the worse of two verdicts, or the first if they are equally bad.
func Worst(a, b Health) Health {
	if b.State.gravity() > a.State.gravity() {
		return b
	}
	return a
}

// State is a verdict on a device.
type State int

// The verdicts.
const (
	// Unknown: there is no verdict, because the driver does not answer the monitor.
	Unknown State = iota
	// Healthy: the last verdict is good.
	Healthy
	// Suspect: something happened, and the verdict is not yet known.
	Suspect
	// Unhealthy: the device must not get new work until it is repaired.
	Unhealthy
	// Lost: the device is unreachable or gone.
	Lost
)

func (s State) String() string {
	names := [...]string{"Unknown", "Healthy", "Suspect", "Unhealthy", "Lost"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("State(%d)", int(s))
	}
	return names[s]
}

// gravity ranks the states from best to worst.
func (s State) gravity() int {
	switch s {
	case Healthy:
		return 0
	case Suspect:
		return 1
	case Unknown:
		return 2
	case Unhealthy:
		return 3
	case Lost:
		return 4
	}
	return 5
}

// Cure is the remedy for an Unhealthy or Lost device.
type Cure string

// The remedies: the driver's recovery actions (NVML field 230), and further actions of operators.
const (
	NoCure        Cure = ""
	CureReset     Cure = "reset"       // stop all processes on the GPU, then reset it
	CureDrain     Cure = "drain+reset" // let running work finish, schedule no new work, then reset
	CureDrainP2P  Cure = "drain-p2p"   // stop the peer-to-peer users
	CureReboot    Cure = "reboot"      // restart the node
	CureFabric    Cure = "fabric"      // the NVSwitch fabric must come up (Fabric Manager)
	CureIMEX      Cure = "imex"        // the IMEX domain must recover
	CureReconnect Cure = "reconnect"   // the device must come back: plug it in, bind it to the driver or create it again
	CureHuman     Cure = "human"       // an operator must investigate and clear the fault
	CureHardware  Cure = "hardware"    // an operator must replace or re-cable the part and clear the fault
)
