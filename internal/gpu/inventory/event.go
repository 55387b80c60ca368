package inventory

import "fmt"

// Unattributed is the GI or CI of an event that the driver does not attribute to one instance.
const Unattributed = -1

// An Event is an event of a GPU that the driver reported. Events nudge the owner of the Snapshot to
// look again; of all kinds only an XID carries data that no look can tell afterwards.
type Event struct {
	Kind EventKind
	// UUID is the GPU it happened to; empty when the driver does not say which, or names it by its PCI
	// address.
	UUID string
	// BDF is the PCI address of the GPU as GPU.BDF has it; empty unless UUID is, and the event came
	// from the kernel's log.
	BDF string
	// Logged says that the event came from the kernel's log. The driver may report the same one
	// itself, before or after.
	Logged bool
	// XID is the driver's error number, for EventXID only. 999 means that the driver does not know it.
	XID uint64
	// GI and CI are the instances it happened to, or Unattributed: then it concerns all that stand on
	// the GPU or GI.
	GI, CI int
}

// EventKind is the kind of an Event.
type EventKind int

// The kinds of events, after NVML's event types (docs: nvmlEventType).
const (
	EventXID                   EventKind = iota + 1
	EventMIGChange                       // partitions were created or destroyed
	EventSingleBitECC                    // corrected memory error
	EventDoubleBitECC                    // uncorrected memory error
	EventSingleBitECCStorm               // corrected memory errors at a high rate (R560)
	EventDRAMRetirement                  // memory was retired (R560)
	EventDRAMRetirementFailure           // memory could not be retired (R560)
	EventNonFatalPoison                  // contained memory error (R560)
	EventFatalPoison                     // uncontained memory error (R560)
	EventUnavailable                     // the GPU stopped answering (R565)
	EventRecoveryAction                  // the driver's recovery action changed (R565)
	EventLost                            // waiting for events said that some GPU fell off the bus
	EventBinding                         // GPUs were bound to the driver or unbound (R575): only a new session sees it
)

func (k EventKind) String() string {
	names := [...]string{
		EventXID: "xid", EventMIGChange: "mig-change", EventSingleBitECC: "single-bit-ecc", EventDoubleBitECC: "double-bit-ecc",
		EventSingleBitECCStorm: "single-bit-ecc-storm", EventDRAMRetirement: "dram-retirement",
		EventDRAMRetirementFailure: "dram-retirement-failure", EventNonFatalPoison: "non-fatal-poison", EventFatalPoison: "fatal-poison",
		EventUnavailable: "unavailable", EventRecoveryAction: "recovery-action", EventLost: "lost", EventBinding: "binding",
	}
	if k <= 0 || int(k) >= len(names) {
		return fmt.Sprintf("EventKind(%d)", int(k))
	}
	return names[k]
}
