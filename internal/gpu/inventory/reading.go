package inventory

import (
	"fmt"
	"math/bits"
)

// A Reading has the health signals of a physical GPU at one time. It applies to the GPU and all its
// MIG devices, because MIG devices have no separate signals.
type Reading struct {
	// Contact describes the answer of the GPU. The signals are complete only with ContactGood.
	Contact Contact
	// Reason names the call that decided Contact, with its answer; empty with ContactGood.
	Reason string
	// Incomplete names a failed call for a signal that the GPU may have, with the answer; empty
	// without such a failure. The failure alone says nothing about the GPU, but leaves the signal
	// unknown.
	Incomplete string
	// RecoveryAction is the driver's own verdict (NVML field 230, R565 or newer).
	RecoveryAction Signal[RecoveryAction]
	// RowRemapPending is true if the next reset will remap memory rows; the GPU stays usable.
	// RowRemapFailure is true if a row could not be remapped: the part is used up. Both are unknown
	// while MIG devices exist (Ampere or newer).
	RowRemapPending, RowRemapFailure Signal[bool]
	// UncorrectedECC is the number of uncorrected memory errors since the driver was loaded or the
	// GPU was reset; unknown without ECC.
	UncorrectedECC Signal[uint64]
	// UnrepairableMemory is true if the driver has given up on a part of the memory (R590, Hopper
	// or newer).
	UnrepairableMemory Signal[bool]
	// SRAMThreshold is true if uncorrected SRAM errors have passed NVIDIA's threshold for replacing
	// the part (R535, Ampere or newer, root). Alone it does not keep a GPU from work.
	SRAMThreshold Signal[bool]
	// Fabric is the state of the GPU in the NVSwitch fabric (R525, Hopper or newer); unknown
	// without a fabric.
	Fabric Signal[Fabric]
	// Persistence is true in persistence mode: the GPU keeps its state while no session uses it.
	Persistence Signal[bool]
	// Energy is the GPU's energy consumption in mJ since the driver was loaded (Volta or newer).
	Energy Signal[uint64]
	// Report is for display only: the daemon does not act on it.
	Report Report
}

// A Report has the signals of a GPU without influence on its health. It may be some seconds older
// than its Reading.
type Report struct {
	// RetiredPagesPending is true if the next reset will retire memory pages (before Ampere).
	RetiredPagesPending Signal[bool]
	// RepairPending is true if the next reset will repair memory channels or cores (R580).
	RepairPending Signal[bool]
	// Clocks are the reasons for lowered clocks.
	Clocks Signal[ClockReasons]
	// PCIeReplays is the number of repeated PCIe packets.
	PCIeReplays Signal[int]
	// NVLinks is the state of the GPU's NVLink lanes; unknown without lanes.
	NVLinks Signal[NVLinks]
}

// NVLinks is a set of a GPU's active lanes and a set of its inactive lanes, one bit for each lane.
// Inactive lanes are normal on a card without a bridge, and a fault on a machine with NVSwitches.
type NVLinks struct{ Active, Inactive uint64 }

// ClockReasons is a set of reasons for lowered clocks. The bits are those of NVML's
// nvmlClocksEventReasons.
type ClockReasons uint64

// Names returns the names of the reasons. A bit without a name is "bit N".
func (c ClockReasons) Names() []string {
	names := [...]string{
		"idle", "application-clocks", "software-power-cap", "hardware-slowdown", "sync-boost",
		"software-thermal-slowdown",
		"hardware-thermal-slowdown", "hardware-power-brake", "display-clocks", "board-limit", "reliability",
	}
	var set []string
	for rest := c; rest != 0; rest &= rest - 1 {
		bit := bits.TrailingZeros64(uint64(rest))
		if bit < len(names) {
			set = append(set, names[bit])
			continue
		}
		set = append(set, fmt.Sprintf("bit %d", bit))
	}
	return set
}

// A Signal is a value missing on some drivers and GPUs. An unknown Signal says nothing about
// health.
type Signal[T comparable] struct {
	Value T
	Known bool
}

// Known returns a Signal with a value.
func Known[T comparable](value T) Signal[T] { return Signal[T]{Value: value, Known: true} }

// Contact describes the answer of a GPU to a reading.
type Contact int

// The kinds of answers of a GPU.
const (
	ContactGood          Contact = iota
	ContactFailing               // calls fail with a code that names no state of the GPU: retry with a new session
	ContactResetRequired         // the driver wants a reset of the GPU before anything else
	ContactLost                  // the GPU fell off the bus, was unplugged or unbound
)

func (c Contact) String() string {
	names := [...]string{"good", "failing", "reset-required", "lost"}
	if c < 0 || int(c) >= len(names) {
		return fmt.Sprintf("Contact(%d)", int(c))
	}
	return names[c]
}

// RecoveryActionBranch is the first driver branch that has a recovery action.
const RecoveryActionBranch = 565

// MarksGSP is the first driver whose recovery action asks for a reset when the GPU's own processor
// (GSP) hangs.
const MarksGSP = "575.51.02"

// RecoveryAction is the driver's advice for making a GPU usable again. The values are those of
// nvmlDeviceGpuRecoveryAction_t. A GPU with an unknown value, of a newer driver, need not be
// usable.
type RecoveryAction uint32

// The recovery actions.
const (
	RecoveryNone          RecoveryAction = iota // usable
	RecoveryGPUReset                            // stop all processes on the GPU, then reset it
	RecoveryNodeReboot                          // restart the node
	RecoveryDrainP2P                            // stop the peer-to-peer users
	RecoveryDrainAndReset                       // less capacity: let work finish, add none, then reset
	RecoveryIMEXDomain                          // no fabric memory until the IMEX domain recovers
	RecoveryBusReset                            // reset the PCIe bus above the GPU
	RecoverySystemReboot                        // restart the machine
)

func (a RecoveryAction) String() string {
	names := [...]string{
		"none", "gpu-reset", "node-reboot", "drain-p2p", "drain-and-reset", "imex-domain", "bus-reset", "system-reboot",
	}
	if int(a) >= len(names) {
		return fmt.Sprintf("RecoveryAction(%d)", uint32(a))
	}
	return names[a]
}

// Fabric is the state of a GPU in the NVSwitch fabric. CUDA does not start on the GPU until State
// is FabricCompleted.
type Fabric struct {
	State FabricState
	// Status is the NVML return code of the fabric's probe: 0 is success. It is meaningful with
	// FabricCompleted only.
	Status uint32
	// Faults are the faults of the GPU's connection to the fabric (R550); 0 without faults and on
	// drivers without this information.
	Faults FabricFault
	// Summary is the driver's overall verdict on the faults (R580).
	Summary FabricSummary
}

// FabricState is the progress of a GPU's registration with the fabric. The values are those of
// nvmlGpuFabricState_t.
type FabricState uint8

// The states of a GPU that has a fabric.
const (
	FabricNotStarted FabricState = iota + 1
	FabricInProgress
	FabricCompleted
)

func (s FabricState) String() string {
	names := [...]string{FabricNotStarted: "not-started", FabricInProgress: "in-progress", FabricCompleted: "completed"}
	if s == 0 || int(s) >= len(names) {
		return fmt.Sprintf("FabricState(%d)", uint8(s))
	}
	return names[s]
}

// FabricFault is a set of faults.
type FabricFault uint16

// The faults of a GPU's connection to the fabric. The faults from FabricWrongSystem to
// FabricMisconfigured are the values of one field and exclude each other.
const (
	FabricDegradedBandwidth   FabricFault = 1 << iota // fewer or slower lanes than expected
	FabricRouteRecovery                               // routes are being repaired
	FabricRouteUnhealthy                              // a route does not work
	FabricAccessTimeout                               // accesses timed out, and recovery is under way
	FabricWrongSystem                                 // the system GUID is not the expected one
	FabricWrongChassis                                // the chassis serial number is not the expected one
	FabricNoPartition                                 // no partition of the fabric has the GPU
	FabricTooFewLinks                                 // too few NVLinks for the partition
	FabricWrongFirmware                               // the GPU's firmware does not fit the fabric
	FabricWrongPlace                                  // the fabric expects no GPU in this place
	FabricInvalidGPU                                  // the state of the GPU is not valid
	FabricMisconfigured                               // anything else, known only to a newer driver
	FabricUnassigned                                  // the GPU was not assigned to a partition (R595)
	FabricManagerDisconnected                         // the manager of the whole fabric is not connected (R595)
)

// fabricFaultNames are the names of the faults, in the order of their bits.
var fabricFaultNames = [...]string{
	"degraded bandwidth", "route recovery", "route unhealthy", "access timeout", "wrong system GUID",
	"wrong chassis serial number",
	"no partition", "too few NVLinks", "wrong firmware", "wrong place", "invalid GPU state", "misconfigured",
	"not assigned to a partition",
	"fabric manager not connected",
}

// Names returns the names of the faults in the set.
func (f FabricFault) Names() []string {
	var names []string
	for i, name := range fabricFaultNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// FabricSummary is the driver's overall verdict on the faults. The values are those of
// NVML_GPU_FABRIC_HEALTH_SUMMARY.
type FabricSummary uint8

// The verdicts. FabricSummaryUnknown is also the value of a driver without summaries.
const (
	FabricSummaryUnknown FabricSummary = iota
	FabricSummaryHealthy
	FabricSummaryUnhealthy
	FabricSummaryLimitedCapacity
)

func (s FabricSummary) String() string {
	names := [...]string{"unknown", "healthy", "unhealthy", "limited-capacity"}
	if int(s) >= len(names) {
		return fmt.Sprintf("FabricSummary(%d)", uint8(s))
	}
	return names[s]
}
