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
	// XID is the driver's error number behind the verdict, or 0.
	XID uint64
	// Remedy makes the device usable again. It is empty for a Healthy device.
	Remedy Remedy `json:"Cure"`
	// Since is the time of the change to State.
	Since time.Time
}

// Allocatable reports whether the device may get new work. The kubelet sees an allocatable device
// as Healthy. A Suspect device is allocatable; without a verdict in time, the policy turns it
// Unhealthy. An Unknown device is allocatable during the grace.
func (h Health) Allocatable() bool {
	return h.State == Healthy || h.State == Suspect || h.State == Unknown && h.Grace
}

// Why returns the reason and the remedy, "REASON; remedy: REMEDY", or only one if the other is
// empty.
func (h Health) Why() string {
	switch {
	case h.Remedy == NoRemedy:
		return h.Reason
	case h.Reason == "":
		return "remedy: " + string(h.Remedy)
	}
	return h.Reason + "; remedy: " + string(h.Remedy)
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

// A Remedy repairs an Unhealthy or Lost device.
type Remedy string

// The remedies: the driver's recovery actions (NVML field 230), and further actions of operators.
const (
	NoRemedy        Remedy = ""
	RemedyReset     Remedy = "reset"       // stop all processes on the GPU, then reset it
	RemedyDrain     Remedy = "drain+reset" // let running work finish, schedule no new work, then reset
	RemedyDrainP2P  Remedy = "drain-p2p"   // stop the peer-to-peer users
	RemedyReboot    Remedy = "reboot"      // restart the node
	RemedyFabric    Remedy = "fabric"      // the NVSwitch fabric must come up (Fabric Manager)
	RemedyIMEX      Remedy = "imex"        // the IMEX domain must recover
	RemedyReconnect Remedy = "reconnect"   // plug the device in, bind it to the driver or create it again
	RemedyHuman     Remedy = "human"       // an operator must investigate and clear the fault
	RemedyHardware  Remedy = "hardware"    // an operator must replace or re-cable the part and clear the fault
)
