package inventory

import (
	"fmt"
	"time"
)

// Health says whether a device can be given new work, and why not.
type Health struct {
	// State is the verdict. The zero value is Unknown: a device is Healthy only after a verdict.
	State State
	// Grace says of an Unknown device that new work may still be given to it: the driver has only just
	// stopped answering.
	Grace bool
	// Reason is a sentence without a full stop that an operator can act on; empty when State is
	// Healthy.
	Reason string
	// XID is the driver's error number behind the verdict, or 0.
	XID uint64
	// Cure is the action that makes the device usable again; empty when State is Healthy.
	Cure Cure
	// Since is when State was entered.
	Since time.Time
}

// Allocatable reports whether new work may be given to the device: this is what kubelet sees as
// Healthy. A Suspect device still is; the policy that made it Suspect turns it Unhealthy if no
// verdict arrives in time. An Unknown one is while its grace lasts.
func (h Health) Allocatable() bool {
	return h.State == Healthy || h.State == Suspect || h.State == Unknown && h.Grace
}

// Why returns the reason and the cure, "REASON; cure: CURE". If one of them is empty, it returns
// the other.
func (h Health) Why() string {
	switch {
	case h.Cure == NoCure:
		return h.Reason
	case h.Reason == "":
		return "cure: " + string(h.Cure)
	}
	return h.Reason + "; cure: " + string(h.Cure)
}

// Worst returns the graver of two verdicts, the first of them when they are alike.
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
	// Unknown: nobody can say, because the monitor itself has no answer from the driver.
	Unknown State = iota
	// Healthy: the last verdict is good.
	Healthy
	// Suspect: something happened, and its verdict is being fetched.
	Suspect
	// Unhealthy: the device must not be given new work until it is cured.
	Unhealthy
	// Lost: the device cannot be reached or is not there any more.
	Lost
)

func (s State) String() string {
	names := [...]string{"Unknown", "Healthy", "Suspect", "Unhealthy", "Lost"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("State(%d)", int(s))
	}
	return names[s]
}

// gravity orders the states from the best to the worst.
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

// Cure is the action that makes an Unhealthy or Lost device usable again.
type Cure string

// The cures, after the driver's recovery actions (NVML field 230) and what operators can do beyond
// them.
const (
	NoCure        Cure = ""
	CureReset     Cure = "reset"       // stop every process on the GPU, then reset it
	CureDrain     Cure = "drain+reset" // let running work end, give it no more, then reset
	CureDrainP2P  Cure = "drain-p2p"   // end the peer-to-peer users
	CureReboot    Cure = "reboot"      // restart the node
	CureFabric    Cure = "fabric"      // the NVSwitch fabric has to come up (Fabric Manager)
	CureIMEX      Cure = "imex"        // the IMEX domain has to recover
	CureReconnect Cure = "reconnect"   // the device has to come back: plugged in, bound to the driver, re-created
	CureHuman     Cure = "human"       // an operator has to look, and clear the fault
	CureHardware  Cure = "hardware"    // the part has to be replaced or re-cabled, and the fault cleared
)
