package inventory

import (
	"fmt"
	"iter"
	"time"
)

// A Sample has the measurements of a GPU at one time, for metrics. Nothing else in this program
// depends on them.
type Sample struct {
	// UUID is the GPU.
	UUID string
	// Taken is the time of the measurement.
	Taken time.Time
	// LastXID is the last XID reported for the GPU or a part of it; 0 if there was none.
	LastXID uint64
	// Values are the measurements of the whole GPU. In MIG mode, measurements of GPU instances are
	// in Instances instead.
	Values Measures
	// Refused says why the driver refuses the values of GPU performance monitoring to this process;
	// empty without a refusal, or if the GPU has no such values.
	Refused string
	// Instances are the GPU instances by ascending GI; empty unless MIG mode is on.
	Instances []InstanceSample
}

// An InstanceSample has the measurements of a GPU instance. All its MIG devices share the values.
type InstanceSample struct {
	// GI is the ID of the GPU instance.
	GI int
	// Profile is the name of the instance's size, such as "1g.10gb".
	Profile string
	Values  Measures
}

// A Measure is a quantity measured on a GPU, in the unit of dcgm-exporter.
type Measure int

// The measures.
const (
	SMClock            Measure = iota // MHz
	MemoryClock                       // MHz
	Temperature                       // degrees Celsius
	MemoryTemperature                 // degrees Celsius
	PowerUsage                        // watts
	EnergyConsumption                 // millijoules since the driver was loaded
	PCIeReplayCount                   // packets repeated since the GPU was reset
	GPUUtilization                    // percent of the time with a kernel running
	MemoryUtilization                 // percent of the time with the memory read or written
	EncoderUtilization                // percent
	DecoderUtilization                // percent
	MemoryFree                        // MiB
	MemoryUsed                        // MiB, without reserved memory if its size is known
	MemoryReserved                    // MiB, for the driver and its firmware
	MemoryTotal                       // MiB
	VGPULicense                       // 1 if a licensed feature is on, else 0
	CorrectableRows                   // memory rows remapped because of corrected errors
	UncorrectableRows                 // memory rows remapped because of uncorrected errors
	RowRemapFailed                    // 1 if a row could not be remapped, else 0
	ECCCorrected                      // corrected memory errors since the driver was loaded or the GPU was reset
	ECCUncorrected                    // uncorrected memory errors, likewise
	NVLinkTransmitted                 // bytes sent over all NVLinks since the driver was loaded
	NVLinkReceived                    // bytes received over all NVLinks, likewise
	PCIeTransmit                      // bytes a second
	PCIeReceive                       // bytes a second
	ClockEventReasons                 // the bits of ClockReasons
	GraphicsActive                    // ratio of the time with the graphics or compute engine active, 0 to 1
	TensorActive                      // ratio of the cycles with a tensor pipe active, 0 to 1
	DRAMActive                        // ratio of the cycles with the memory interface active, 0 to 1
	SMActive                          // ratio of the cycles with a warp on an SM, mean of all SMs, 0 to 1
	SMOccupancy                       // ratio of the warps on an SM to as many as it can have, mean of all SMs, 0 to 1
	FP64Active                        // ratio of the cycles with the FP64 pipes active, 0 to 1
	FP32Active                        // FP32 pipes, likewise
	FP16Active                        // FP16 pipes, likewise
	RowRemapPending                   // 1 if the next reset will remap rows, else 0
	NVLinkReplays                     // packets repeated over all NVLinks since the driver was loaded
	NVLinkRecoveries                  // recoveries of all NVLinks, likewise
	// NVLink lanes that were active before, or are active on equal GPUs, and are now down; absent
	// in MIG mode.
	NVLinksDown
	PCIeGeneration     // current generation of the link; lower on an idle GPU
	PCIeWidth          // current lanes of the link
	PCIeMaxGeneration  // highest generation of the GPU and its slot
	PCIeMaxWidth       // most lanes of the GPU and its slot
	PowerLimit         // watts, as set
	EnforcedPowerLimit // watts, the lowest of all limits
	MaxSMClock         // MHz, highest possible clock
	MaxMemoryClock     // MHz, highest possible clock
	measures
)

func (m Measure) String() string {
	names := [measures]string{
		"SMClock", "MemoryClock", "Temperature", "MemoryTemperature", "PowerUsage", "EnergyConsumption",
		"PCIeReplayCount",
		"GPUUtilization", "MemoryUtilization", "EncoderUtilization", "DecoderUtilization", "MemoryFree", "MemoryUsed",
		"MemoryReserved", "MemoryTotal", "VGPULicense", "CorrectableRows", "UncorrectableRows", "RowRemapFailed",
		"ECCCorrected", "ECCUncorrected", "NVLinkTransmitted", "NVLinkReceived",
		"PCIeTransmit", "PCIeReceive", "ClockEventReasons", "GraphicsActive", "TensorActive", "DRAMActive",
		"SMActive", "SMOccupancy", "FP64Active", "FP32Active", "FP16Active", "RowRemapPending", "NVLinkReplays",
		"NVLinkRecoveries",
		"NVLinksDown", "PCIeGeneration", "PCIeWidth", "PCIeMaxGeneration", "PCIeMaxWidth",
		"PowerLimit", "EnforcedPowerLimit", "MaxSMClock", "MaxMemoryClock",
	}
	if m < 0 || m >= measures {
		return fmt.Sprintf("Measure(%d)", int(m))
	}
	return names[m]
}

// AllMeasures yields all measures.
func AllMeasures() iter.Seq[Measure] {
	return func(yield func(Measure) bool) {
		for m := range measures {
			if !yield(m) {
				return
			}
		}
	}
}

// Measures are the values of a Sample. A value missing on the GPU or its driver is absent, not
// zero.
type Measures struct {
	known  uint64 // one bit for each Measure
	values [measures]float64
}

// Set adds or replaces a value.
func (m *Measures) Set(which Measure, value float64) {
	m.known |= 1 << which
	m.values[which] = value
}

// Get returns a value and whether it is present.
func (m *Measures) Get(which Measure) (value float64, known bool) {
	return m.values[which], m.known&(1<<which) != 0
}
