package inventory

import (
	"fmt"
	"math/bits"
)

// A Reading has the health signals of a physical GPU, read at one time. It holds for the GPU and
// for all MIG devices on it: partitions have no signals of their own.
type Reading struct {
	// Contact is how the GPU answered. Unless it is ContactGood, the signals may be incomplete.
	Contact Contact
	// Reason names the call that decided Contact and what it answered; empty with ContactGood.
	Reason string
	// Incomplete names a call for a signal that failed although the GPU may have the signal, and what
	// it answered. Alone that says nothing of the GPU, but the signal is unknown, and not gone. Empty
	// if there was none.
	Incomplete string
	// RecoveryAction is the driver's own verdict (NVML field 230, from R565).
	RecoveryAction Signal[RecoveryAction]
	// RowRemapPending says that memory rows will be remapped by the next reset; the GPU stays usable.
	// RowRemapFailure says that a row could not be remapped: the part is used up. Both are unknown
	// while MIG devices exist (Ampere and newer).
	RowRemapPending, RowRemapFailure Signal[bool]
	// UncorrectedECC is the number of uncorrected memory errors since the driver was loaded or the GPU
	// reset; unknown without ECC.
	UncorrectedECC Signal[uint64]
	// UnrepairableMemory says that the driver has given up on part of the memory (R590, Hopper and
	// newer).
	UnrepairableMemory Signal[bool]
	// SRAMThreshold says that uncorrected errors of the chip's own memories have passed NVIDIA's
	// threshold for replacing the part (R535, Ampere and newer, root). Alone it does not keep a GPU
	// from work.
	SRAMThreshold Signal[bool]
	// Fabric is the state of the GPU in the NVSwitch fabric (R525, Hopper and newer); unknown where
	// there is none.
	Fabric Signal[Fabric]
	// Persistence says that persistence mode is on: the GPU keeps its state while no session uses it.
	Persistence Signal[bool]
	// Energy is the energy in mJ that the GPU used since the driver was loaded (Volta and newer).
	Energy Signal[uint64]
	// Report is for people only: the daemon does not act on it.
	Report Report
}

// A Report has the signals of a GPU that do not decide whether it can be given to work. It may be
// some seconds older than the Reading that it is part of.
type Report struct {
	// RetiredPagesPending says that memory pages will be retired by the next reset (before Ampere).
	RetiredPagesPending Signal[bool]
	// RepairPending says that memory channels or cores will be repaired by the next reset (R580).
	RepairPending Signal[bool]
	// Clocks are the reasons for which the clocks are lower than they could be.
	Clocks Signal[ClockReasons]
	// PCIeReplays is the number of PCIe packets that had to be sent again.
	PCIeReplays Signal[int]
	// NVLinks is the state of the GPU's NVLink lanes; unknown without any.
	NVLinks Signal[NVLinks]
}

// NVLinks are lanes of a GPU, a bit each. That lanes are inactive is normal on a card that no
// bridge connects, and a fault on a machine with NVSwitches.
type NVLinks struct{ Active, Inactive uint64 }

// ClockReasons is a set of reasons for which clocks are lower than they could be. The bits are
// those of NVML's nvmlClocksEventReasons.
type ClockReasons uint64

// Names returns the names of the reasons; bits that have no name here are "bit N".
func (c ClockReasons) Names() []string {
	names := [...]string{
		"idle", "application-clocks", "software-power-cap", "hardware-slowdown", "sync-boost", "software-thermal-slowdown",
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

// A Signal is a value that not every driver and GPU has. An unknown one says nothing about health.
type Signal[T comparable] struct {
	Value T
	Known bool
}

// Known returns a Signal that has a value.
func Known[T comparable](value T) Signal[T] { return Signal[T]{Value: value, Known: true} }

// Contact is how a GPU answered when it was read.
type Contact int

// The ways in which a GPU answers.
const (
	ContactGood          Contact = iota
	ContactFailing               // calls fail with a code that names no state of the GPU: try again, with a new session
	ContactResetRequired         // the driver wants the GPU reset before anything else
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

// RecoveryAction is what the driver says has to be done before a GPU is usable again. The values
// are those of nvmlDeviceGpuRecoveryAction_t; a newer driver may give others, which do not mean
// that the GPU is usable.
type RecoveryAction uint32

// The recovery actions.
const (
	RecoveryNone          RecoveryAction = iota // usable
	RecoveryGPUReset                            // end every process on the GPU, then reset it
	RecoveryNodeReboot                          // restart the node
	RecoveryDrainP2P                            // end the peer-to-peer users
	RecoveryDrainAndReset                       // usable with less capacity: let work end, give it no more, then reset
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
	// Status is the NVML return code of the fabric's probe: 0 is success. It means something with
	// FabricCompleted only.
	Status uint32
	// Faults are the faults that the driver reports of the GPU's way into the fabric (R550); 0 without
	// faults and on drivers that do not report them.
	Faults FabricFault
	// Summary is the driver's own sum of the faults (R580).
	Summary FabricSummary
}

// FabricState is how far a GPU's registration with the fabric has come. The values are those of
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

// The faults of a GPU's way into the fabric. Those from FabricWrongSystem to FabricMisconfigured
// are the values of one field, and exclude each other.
const (
	FabricDegradedBandwidth   FabricFault = 1 << iota // fewer or slower lanes than there should be
	FabricRouteRecovery                               // routes are being repaired
	FabricRouteUnhealthy                              // a route does not work
	FabricAccessTimeout                               // accesses timed out, and recovery from it is under way
	FabricWrongSystem                                 // another system GUID than expected
	FabricWrongChassis                                // another serial number of the chassis than expected
	FabricNoPartition                                 // no partition of the fabric has the GPU
	FabricTooFewLinks                                 // too few NVLinks for the partition
	FabricWrongFirmware                               // the GPU's firmware does not fit the fabric
	FabricWrongPlace                                  // the GPU is where the fabric expects none
	FabricInvalidGPU                                  // the state of the GPU is not valid
	FabricMisconfigured                               // something else, which a newer driver knows
	FabricUnassigned                                  // the GPU was not assigned to a partition (R595)
	FabricManagerDisconnected                         // the manager of the whole fabric is not connected (R595)
)

// fabricFaultNames are the names of the faults, in their order.
var fabricFaultNames = [...]string{
	"degraded bandwidth", "route recovery", "route unhealthy", "access timeout", "wrong system GUID", "wrong chassis serial number",
	"no partition", "too few NVLinks", "wrong firmware", "wrong place", "invalid GPU state", "misconfigured", "not assigned to a partition",
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

// FabricSummary is the driver's sum of the faults. The values are those of
// NVML_GPU_FABRIC_HEALTH_SUMMARY.
type FabricSummary uint8

// The sums; a driver without an opinion says FabricSummaryUnknown.
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
