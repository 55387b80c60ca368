package inventory

import "fmt"

// Unattributed is the GI or CI of an event without a known instance.
const Unattributed = -1

// An Event is a driver event of a GPU. An Event asks the owner of the Snapshot for a health check.
// Some kinds, such as an XID, have data that no later check can find.
type Event struct {
	Kind EventKind
	// UUID is the GPU of the event. It is empty if the driver does not name the GPU, or names it by
	// its PCI address.
	UUID string
	// BDF is the PCI address of the GPU, in the format of GPU.BDF. It is set only for an event of
	// the kernel log without a UUID.
	BDF string
	// Logged is true for an event of the kernel log. The driver itself may report the same event,
	// before or after.
	Logged bool
	// XID is the driver's error number, for EventXID only. 999 stands for a number unknown to the
	// driver.
	XID uint64
	// GI and CI are the instances of the event. With Unattributed, the event concerns all instances
	// of the GPU or GI.
	GI, CI int
}

// EventKind is the kind of an Event.
type EventKind int

// The kinds of events, after NVML's event types (docs: nvmlEventType).
const (
	EventXID                   EventKind = iota + 1
	EventMIGChange                       // GPU or compute instances were created or destroyed
	EventSingleBitECC                    // corrected memory error
	EventDoubleBitECC                    // uncorrected memory error
	EventSingleBitECCStorm               // corrected memory errors at a high rate (R560)
	EventDRAMRetirement                  // memory was retired (R560)
	EventDRAMRetirementFailure           // memory could not be retired (R560)
	EventNonFatalPoison                  // contained memory error (R560)
	EventFatalPoison                     // uncontained memory error (R560)
	EventUnavailable                     // the GPU stopped answering (R565)
	EventRecoveryAction                  // the driver's recovery action changed (R565)
	EventLost                            // the wait for events failed because some GPU fell off the bus
	EventBinding                         // GPUs were bound or unbound (R575): only a new session sees them
)

func (k EventKind) String() string {
	names := [...]string{
		EventXID: "xid", EventMIGChange: "mig-change", EventSingleBitECC: "single-bit-ecc",
		EventDoubleBitECC:      "double-bit-ecc",
		EventSingleBitECCStorm: "single-bit-ecc-storm", EventDRAMRetirement: "dram-retirement",
		EventDRAMRetirementFailure: "dram-retirement-failure", EventNonFatalPoison: "non-fatal-poison",
		EventFatalPoison: "fatal-poison",
		EventUnavailable: "unavailable", EventRecoveryAction: "recovery-action", EventLost: "lost",
		EventBinding: "binding",
	}
	if k <= 0 || int(k) >= len(names) {
		return fmt.Sprintf("EventKind(%d)", int(k))
	}
	return names[k]
}
