package inventory

import (
	"fmt"
	"iter"
	"time"
)

// A Sample has the measurements of a GPU at one time, for metrics. Nothing in this program decides
// by it.
type Sample struct {
	// UUID names the GPU.
	UUID string
	// Taken is when it was measured.
	Taken time.Time
	// LastXID is the XID that the driver reported last for the GPU or a part of it; 0 if it reported
	// none.
	LastXID uint64
	// Values are those of the whole GPU. What is measured for each GPU instance is not here while MIG
	// mode is on.
	Values Measures
	// Refused is why the driver lets this process have no value of GPU performance monitoring; empty
	// where it lets it, or the GPU has none.
	Refused string
	// Instances are the GPU instances by ascending GI; empty unless MIG mode is on.
	Instances []InstanceSample
}

// An InstanceSample has the measurements of a GPU instance: all MIG devices in it share these
// values.
type InstanceSample struct {
	// GI is the ID of the GPU instance.
	GI int
	// Profile is the name of its size, such as "1g.10gb".
	Profile string
	Values  Measures
}

// A Measure is a quantity that can be measured on a GPU, in the unit of dcgm-exporter.
type Measure int

// The measures.
const (
	SMClock            Measure = iota // MHz
	MemoryClock                       // MHz
	Temperature                       // degrees Celsius
	MemoryTemperature                 // degrees Celsius
	PowerUsage                        // watts
	EnergyConsumption                 // millijoules since the driver was loaded
	PCIeReplayCount                   // packets sent again since the GPU was reset
	GPUUtilization                    // percent of the time with a kernel running
	MemoryUtilization                 // percent of the time with the memory read or written
	EncoderUtilization                // percent
	DecoderUtilization                // percent
	MemoryFree                        // MiB
	MemoryUsed                        // MiB, without what is reserved where that is known
	MemoryReserved                    // MiB, for the driver and its firmware
	MemoryTotal                       // MiB
	VGPULicense                       // 1 if a licensed feature is on, else 0
	CorrectableRows                   // memory rows remapped because of corrected errors
	UncorrectableRows                 // memory rows remapped because of uncorrected errors
	RowRemapFailed                    // 1 if a row could not be remapped, else 0
	ECCCorrected                      // corrected memory errors since the driver was loaded or the GPU was reset
	ECCUncorrected                    // the same for uncorrected ones
	NVLinkTransmitted                 // bytes sent over all NVLinks since the driver was loaded
	NVLinkReceived                    // bytes received over all NVLinks since then
	PCIeTransmit                      // bytes a second
	PCIeReceive                       // bytes a second
	ClockEventReasons                 // the bits of ClockReasons
	GraphicsActive                    // ratio of the time with the graphics or compute engine active, 0 to 1
	TensorActive                      // ratio of the cycles with a tensor pipe active, 0 to 1
	DRAMActive                        // ratio of the cycles with the memory interface active, 0 to 1
	SMActive                          // ratio of the cycles with a warp on an SM, mean of all SMs, 0 to 1
	SMOccupancy                       // ratio of the warps on an SM to as many as it can have, mean of all SMs, 0 to 1
	FP64Active                        // ratio of the cycles with the FP64 pipes active, 0 to 1
	FP32Active                        // the same for FP32
	FP16Active                        // the same for FP16
	RowRemapPending                   // 1 if the next reset will remap rows, else 0
	NVLinkReplays                     // packets sent again over all NVLinks since the driver was loaded
	NVLinkRecoveries                  // recoveries of all NVLinks since then
	// lanes of NVLink that were active, or are on like GPUs, and no longer are; absent in MIG mode.
	NVLinksDown
	PCIeGeneration     // of the link now; an idle GPU may have a lower one
	PCIeWidth          // lanes of the link now
	PCIeMaxGeneration  // that the GPU and its slot can have
	PCIeMaxWidth       // lanes that the GPU and its slot can have
	PowerLimit         // watts, as it is set
	EnforcedPowerLimit // watts, the least of all limits
	MaxSMClock         // MHz, the highest that the GPU can have
	MaxMemoryClock     // MHz, the same for the memory
	measures
)

func (m Measure) String() string {
	names := [measures]string{
		"SMClock", "MemoryClock", "Temperature", "MemoryTemperature", "PowerUsage", "EnergyConsumption", "PCIeReplayCount",
		"GPUUtilization", "MemoryUtilization", "EncoderUtilization", "DecoderUtilization", "MemoryFree", "MemoryUsed",
		"MemoryReserved", "MemoryTotal", "VGPULicense", "CorrectableRows", "UncorrectableRows", "RowRemapFailed",
		"ECCCorrected", "ECCUncorrected", "NVLinkTransmitted", "NVLinkReceived",
		"PCIeTransmit", "PCIeReceive", "ClockEventReasons", "GraphicsActive", "TensorActive", "DRAMActive",
		"SMActive", "SMOccupancy", "FP64Active", "FP32Active", "FP16Active", "RowRemapPending", "NVLinkReplays", "NVLinkRecoveries",
		"NVLinksDown", "PCIeGeneration", "PCIeWidth", "PCIeMaxGeneration", "PCIeMaxWidth",
		"PowerLimit", "EnforcedPowerLimit", "MaxSMClock", "MaxMemoryClock",
	}
	if m < 0 || m >= measures {
		return fmt.Sprintf("Measure(%d)", int(m))
	}
	return names[m]
}

// AllMeasures gives the measures one by one.
func AllMeasures() iter.Seq[Measure] {
	return func(yield func(Measure) bool) {
		for m := range measures {
			if !yield(m) {
				return
			}
		}
	}
}

// Measures are the values of a Sample. A value that the GPU or its driver does not have is absent,
// and not zero.
type Measures struct {
	known  uint64 // a bit for each Measure
	values [measures]float64
}

// Set adds a value, or replaces it.
func (m *Measures) Set(which Measure, value float64) {
	m.known |= 1 << which
	m.values[which] = value
}

// Get returns a value, and whether there is one.
func (m *Measures) Get(which Measure) (value float64, known bool) {
	return m.values[which], m.known&(1<<which) != 0
}
