package inventory

import (
	"fmt"
	"slices"
	"time"
)

// NoNUMANode stands for an unknown NUMA node.
const NoNUMANode = -1

// A GPU is one physical device, identified by its UUID.
type GPU struct {
	// UUID is NVML's name of the GPU: "GPU-" and a UUID. It survives restarts of the driver and the
	// node.
	UUID string
	// Index is the NVML index: PCI order, from 0. It can change when another GPU disappears.
	Index int
	// Minor is the N of /dev/nvidiaN. It may differ from Index.
	Minor int
	// BDF is the PCI address in the format of sysfs: "0000:1b:00.0".
	BDF string
	// Binding changes when the GPU is unbound from the driver and bound again; 0 if unknown.
	Binding uint64
	// Model is the product name, such as "NVIDIA H100 80GB HBM3".
	Model string
	// Brand is the brand in the spelling of NVIDIA's Go library, such as "Tesla", "GeForceRTX" or
	// "Nvidia"; empty if the driver names none.
	Brand string
	// MemoryBytes is the total memory.
	MemoryBytes uint64
	// ReservedBytes is the part of MemoryBytes reserved for the driver and its firmware; 0 if
	// unknown.
	ReservedBytes uint64
	// Architecture is the lower-case name of the chip's generation, such as "hopper"; empty if this
	// program does not know the generation.
	Architecture string
	// ComputeCapability is the CUDA compute capability.
	ComputeCapability ComputeCapability
	// AddressingMode is how the GPU accesses memory of host processes: "HMM", "ATS" or "None";
	// empty if the driver does not say.
	AddressingMode string
	// ComputeMode says which processes may compute on the GPU. It is as old as a Report.
	ComputeMode ComputeMode
	// NotReady is true if confidential computing is on and the driver refuses work until an
	// operator sets the GPUs ready. It is as old as a Report.
	NotReady bool `json:",omitzero"`
	// Unlicensed is true for a virtual GPU without a licence. The driver slows down such a GPU. It
	// is as old as a Report.
	Unlicensed bool `json:",omitzero"`
	// NUMANode is the memory node nearest to the GPU, or NoNUMANode.
	NUMANode int
	// PCIeRoot is the PCIe root complex in the spelling of sysfs, such as "pci0000:16"; empty if
	// unknown.
	PCIeRoot string
	// Class is the PCI class in the spelling of sysfs: "0x030200" is a 3D controller, "0x030000" a
	// VGA controller; empty if unknown.
	Class string
	// Clique is the GPU's part of a multi-node NVLink fabric, "<cluster UUID>.<clique ID>"; empty
	// if the GPU has joined no fabric.
	Clique string
	// VGPU is set for a virtual GPU of a hypervisor.
	VGPU VGPU
	// MIG is the state of multi-instance mode.
	MIG MIGMode
	// MIGDevices are the usable MIG devices by ascending Index; empty unless MIG is MIGEnabled.
	MIGDevices []MIGDevice
	// Links are the connections to the other GPUs of the Snapshot, by ascending PeerIndex. A peer
	// without a readable connection has no entry.
	Links []Link
	// Reset is the time of the last known reset of the GPU, or reload of its driver, since this
	// process started; zero if there was none.
	Reset time.Time `json:",omitzero"`
	// Health is the health of the physical GPU. It also applies to all its MIG devices.
	Health Health
}

// Equal reports whether two GPUs are equal in every field.
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

// Fitness returns the health of the GPU, or Unhealthy if a setting keeps all programs from a
// healthy GPU: the compute mode, or confidential computing that is not ready. Such a state ends
// without a fault to clear.
func (g GPU) Fitness() Health {
	if !g.Health.Allocatable() {
		return g.Health
	}
	switch {
	case g.ComputeMode == ComputeProhibited:
		return Health{State: Unhealthy, Reason: fmt.Sprintf("its compute mode is %s, and no program can use it: "+
			"nvidia-smi -i %d -c DEFAULT", g.ComputeMode, g.Index)}
	case g.NotReady:
		return Health{State: Unhealthy, Reason: "confidential computing is on and not ready, " +
			"and no program can use the GPU: attest the GPUs of the node, then run nvidia-smi conf-compute -srs 1"}
	}
	return g.Health
}

// ComputeCapability is a CUDA compute capability, such as 9.0.
type ComputeCapability struct{ Major, Minor int }

func (c ComputeCapability) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// VGPU describes a virtual GPU and the hypervisor's driver. It is zero for other GPUs, and for a
// process without permission to read it.
type VGPU struct {
	// Present is true for a virtual GPU.
	Present bool
	// HostDriver is the version of the hypervisor's driver, such as "550.90.05". HostBranch is the
	// branch, such as "r550_00". Both are empty if the GPU does not report them.
	HostDriver, HostBranch string
}

// ComputeMode says which processes may compute on a GPU. The values are NVML's.
type ComputeMode int

// The compute modes.
const (
	ComputeDefault          ComputeMode = iota // any number of processes
	ComputeExclusiveThread                     // one process; same as ComputeExclusiveProcess since CUDA 8
	ComputeProhibited                          // no process
	ComputeExclusiveProcess                    // one process; under MPS this is the MPS server, for all its clients
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
	// UUID is NVML's name of the device: "MIG-" and a UUID, or "MIG-GPU-<uuid>/<gi>/<ci>" on
	// drivers before R470. Opaque.
	UUID string
	// Index is the j of "i:j": NVML's index of the device on its GPU.
	Index int
	// GI and CI are the IDs of the GPU instance and of the compute instance in it.
	GI, CI int
	// GICap and CICap are the N of /dev/nvidia-caps/nvidia-capN for the GPU instance and the
	// compute instance; 0 if unknown.
	GICap, CICap int
	// Profile is the name of the device's size, such as "1g.10gb" or "1c.2g.20gb+me".
	Profile string
	// Placement is the position of the GPU instance; zero for a process without permission to read
	// it.
	Placement MIGPlacement
	// MemoryBytes is the memory of the device.
	MemoryBytes uint64
	// Attributes are the other resources of the device.
	Attributes MIGAttributes
	// Health is the health of this instance alone. The worse of this Health and the GPU's applies:
	// see Worst.
	Health Health
}

// A MIGPlacement is the position of a GPU instance on its GPU.
type MIGPlacement struct {
	// Profile is the MIGProfile.ID of the GPU instance.
	Profile int
	// Start is the first memory slice of the GPU instance. Size is the number of slices; 0 if the
	// placement is unknown.
	Start, Size int
}

// MIGAttributes are the resources of a MIG device, in NVML's units. The compute instances of a GPU
// instance share the engines.
type MIGAttributes struct {
	Multiprocessors                              int
	GISlices, CISlices                           int // compute slices of the GPU instance and of the compute instance
	CopyEngines, Decoders, Encoders, JPEGs, OFAs int
}
