package inventory

import (
	"fmt"
	"slices"
	"time"
)

// NoNUMANode is the NUMA node of a device whose NUMA node is not known.
const NoNUMANode = -1

// A GPU is one physical device; its key is the UUID.
type GPU struct {
	// UUID is NVML's name for the GPU, "GPU-" and a UUID. It survives restarts of driver and node.
	UUID string
	// Index is the NVML index: PCI order, from 0. It can change when another GPU disappears.
	Index int
	// Minor is the N of /dev/nvidiaN. It need not equal Index.
	Minor int
	// BDF is the PCI address as sysfs writes it: "0000:1b:00.0".
	BDF string
	// Binding is another number after the GPU was unbound from the driver and bound again; 0 where
	// that cannot be told.
	Binding uint64
	// Model is the product name, such as "NVIDIA H100 80GB HBM3".
	Model string
	// Brand is the brand as NVIDIA's Go library writes it, such as "Tesla", "GeForceRTX" or "Nvidia";
	// empty if the driver does not name one.
	Brand string
	// MemoryBytes is the total memory.
	MemoryBytes uint64
	// ReservedBytes is the part of it that the driver and its firmware keep; 0 where the driver does
	// not tell.
	ReservedBytes uint64
	// Architecture is the lower-case name of the chip's generation, such as "hopper"; empty if the
	// driver names one that this program does not know.
	Architecture string
	// ComputeCapability is the CUDA compute capability.
	ComputeCapability ComputeCapability
	// AddressingMode is how the GPU reaches memory of the processes on the host: "HMM", "ATS" or
	// "None"; empty if the driver does not say.
	AddressingMode string
	// ComputeMode says which processes may compute on it. It is read as seldom as a Report.
	ComputeMode ComputeMode
	// NotReady says that confidential computing is on and the driver refuses work until an operator
	// sets the GPUs ready. It is read as seldom as a Report.
	NotReady bool `json:",omitzero"`
	// Unlicensed says that the GPU is a virtual one without a licence, which the driver slows down. It
	// is read as seldom as a Report.
	Unlicensed bool `json:",omitzero"`
	// NUMANode is the memory node nearest to the GPU, or NoNUMANode.
	NUMANode int
	// PCIeRoot is the PCIe root complex as sysfs names it, such as "pci0000:16"; empty if not known.
	PCIeRoot string
	// Class is the PCI class as sysfs writes it: "0x030200" is a 3D controller, "0x030000" a VGA
	// controller; empty if not known.
	Class string
	// Clique is the part of a multi-node NVLink fabric that the GPU has joined, "<cluster
	// UUID>.<clique ID>"; empty without one.
	Clique string
	// VGPU says whether the GPU is a virtual one of a hypervisor.
	VGPU VGPU
	// MIG is the state of multi-instance mode.
	MIG MIGMode
	// MIGDevices are the usable partitions by ascending Index; empty unless MIG is MIGEnabled.
	MIGDevices []MIGDevice
	// Links are the connections to the other GPUs of the Snapshot, by ascending PeerIndex. A peer
	// whose connection could not be read has no entry.
	Links []Link
	// Reset is when it was seen last that the GPU was reset, or its driver loaded again, since this
	// process runs; zero if it was not.
	Reset time.Time `json:",omitzero"`
	// Health is the health of the physical GPU. It counts for all MIG devices on it, too.
	Health Health
}

// Equal reports whether two GPUs are the same in every respect.
func (g GPU) Equal(other GPU) bool {
	return g.UUID == other.UUID && g.Index == other.Index && g.Minor == other.Minor && g.BDF == other.BDF &&
		g.Binding == other.Binding && g.Model == other.Model && g.Architecture == other.Architecture &&
		g.MemoryBytes == other.MemoryBytes && g.ReservedBytes == other.ReservedBytes &&
		g.ComputeCapability == other.ComputeCapability && g.NUMANode == other.NUMANode && g.MIG == other.MIG &&
		g.Brand == other.Brand && g.AddressingMode == other.AddressingMode && g.PCIeRoot == other.PCIeRoot &&
		g.Class == other.Class && g.ComputeMode == other.ComputeMode &&
		g.NotReady == other.NotReady && g.Unlicensed == other.Unlicensed && g.Clique == other.Clique &&
		g.VGPU == other.VGPU &&
		g.Health == other.Health && g.Reset.Equal(other.Reset) &&
		slices.Equal(g.MIGDevices, other.MIGDevices) && slices.Equal(g.Links, other.Links)
}

// Fitness returns the health of the GPU with what keeps every program from it although the GPU is
// well: its compute mode, or confidential computing that is not ready. These end without a fault to
// clear.
func (g GPU) Fitness() Health {
	if !g.Health.Allocatable() {
		return g.Health
	}
	switch {
	case g.ComputeMode == ComputeProhibited:
		return Health{State: Unhealthy, Reason: fmt.Sprintf("its compute mode is %s, and no program can use it: nvidia-smi -i %d -c DEFAULT",
			g.ComputeMode, g.Index)}
	case g.NotReady:
		return Health{State: Unhealthy, Reason: "confidential computing is on and not ready, and no program can use the GPU: " +
			"attest the GPUs of the node, then run nvidia-smi conf-compute -srs 1"}
	}
	return g.Health
}

// ComputeCapability is a CUDA compute capability, such as 9.0.
type ComputeCapability struct{ Major, Minor int }

func (c ComputeCapability) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// VGPU has the facts that a virtual GPU tells of the hypervisor's driver; zero for another GPU, and
// where a process may not read it.
type VGPU struct {
	// Present says that the GPU is a virtual one.
	Present bool
	// HostDriver is the version of the hypervisor's driver, such as "550.90.05", and HostBranch its
	// branch, such as "r550_00"; empty if the GPU does not say.
	HostDriver, HostBranch string
}

// ComputeMode says which processes may compute on a GPU. The values are NVML's.
type ComputeMode int

// The compute modes.
const (
	ComputeDefault          ComputeMode = iota // any number of processes
	ComputeExclusiveThread                     // one; as ComputeExclusiveProcess since CUDA 8
	ComputeProhibited                          // none
	ComputeExclusiveProcess                    // one; under MPS that is the server, for all of its clients
)

func (m ComputeMode) String() string {
	switch m {
	case ComputeDefault:
		return "DEFAULT"
	case ComputeExclusiveThread:
		return "EXCLUSIVE_THREAD"
	case ComputeProhibited:
		return "PROHIBITED"
	case ComputeExclusiveProcess:
		return "EXCLUSIVE_PROCESS"
	}
	return fmt.Sprintf("ComputeMode(%d)", int(m))
}

// MIGMode is the state of multi-instance mode on a GPU.
type MIGMode int

// The states of multi-instance mode.
const (
	MIGUnsupported MIGMode = iota
	MIGDisabled
	MIGEnabled
)

func (m MIGMode) String() string {
	switch m {
	case MIGUnsupported:
		return "unsupported"
	case MIGDisabled:
		return "disabled"
	case MIGEnabled:
		return "enabled"
	}
	return fmt.Sprintf("MIGMode(%d)", int(m))
}

// A MIGDevice is a usable partition of a GPU: one compute instance in one GPU instance.
type MIGDevice struct {
	// UUID is NVML's name for the device: "MIG-" and a UUID, or "MIG-GPU-<uuid>/<gi>/<ci>" on drivers
	// before R470. Opaque.
	UUID string
	// Index is the j of "i:j": NVML's index of the device on its parent.
	Index int
	// GI and CI are the IDs of the GPU instance and of the compute instance in it.
	GI, CI int
	// GICap and CICap are the N of the /dev/nvidia-caps/nvidia-capN that give access to the two; 0
	// where not known.
	GICap, CICap int
	// Profile is the name of the partition's size, such as "1g.10gb" or "1c.2g.20gb+me".
	Profile string
	// Placement is where the GPU instance lies; the zero value if the process may not ask for it.
	Placement MIGPlacement
	// MemoryBytes is the memory of the partition.
	MemoryBytes uint64
	// Attributes are the other parts of the partition.
	Attributes MIGAttributes
	// Health is the health of this instance alone. The worse one of it and of the health of its GPU
	// counts (Worst).
	Health Health
}

// A MIGPlacement is where a GPU instance lies.
type MIGPlacement struct {
	// Profile is the ID of the profile of the GPU instance, as MIGProfile has it.
	Profile int
	// Start is the first memory slice of the GPU instance, and Size how many it has; Size is 0 where
	// the placement is not known.
	Start, Size int
}

// MIGAttributes are the parts of a MIG device, as NVML counts them. Compute instances of one GPU
// instance share the engines.
type MIGAttributes struct {
	Multiprocessors                              int
	GISlices, CISlices                           int // compute slices of the GPU instance and of the compute instance
	CopyEngines, Decoders, Encoders, JPEGs, OFAs int
}
