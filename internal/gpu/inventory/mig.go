package inventory

// Partitions describes the MIG layout of a GPU, and the possible layouts.
type Partitions struct {
	// PCIDevice and PCISubsystem are pairs of device ID and vendor ID, in NVML's format:
	// 0x233010de.
	PCIDevice, PCISubsystem uint32
	// Mode is the MIG mode in force. Pending is the mode after the next reset of the GPU.
	Mode, Pending MIGMode
	// Resetless is true if the driver changes the mode without a reset of the GPU.
	Resetless bool
	// Profiles are the profiles of GPU instances supported on this GPU. It is empty if the driver
	// does not report them all.
	Profiles []MIGProfile
	// Instances are the GPU instances by ascending Start, including those without a compute
	// instance.
	Instances []GPUInstance
	// Unread says why Instances could not be read; empty on success.
	Unread string
}

// A MIGProfile is a size of GPU instances, with their possible placements.
type MIGProfile struct {
	// Name is the profile's name, such as "1g.10gb" or "1g.10gb+me".
	Name string
	// ID is the driver's profile number on this GPU, as printed by nvidia-smi mig -lgip.
	ID int
	// Count is the maximum number of instances on the GPU.
	Count int
	// Size is the number of memory slices of an instance. Starts are the possible first slices,
	// ascending.
	Size   int
	Starts []int
	// MemoryBytes is the memory of an instance. Attributes are the other resources of a MIG device
	// that fills the instance. Both are zero if unknown.
	MemoryBytes uint64
	Attributes  MIGAttributes
}

// A GPUInstance is a part of a GPU with its own memory. Only its compute instances can run work.
type GPUInstance struct {
	// ID is the driver's number of the instance on its GPU.
	ID int
	// Profile is the name of its MIGProfile.
	Profile string
	// Start is the first memory slice. Size is the number of memory slices.
	Start, Size int
	// Computes are the compute instances by ascending Start.
	Computes []ComputeInstance
}

// A ComputeInstance is a part of a GPU instance's compute slices: a MIG device.
type ComputeInstance struct {
	// ID is the driver's number of the instance in its GPU instance.
	ID int
	// Start is the first compute slice in the GPU instance. Slices is the number of compute slices.
	Start, Slices int
}

// A MIGAction is the kind of a MIGStep.
type MIGAction string

// The actions.
const (
	MIGDestroyCompute  MIGAction = "destroy-compute-instance"
	MIGDestroyInstance MIGAction = "destroy-gpu-instance" // only a GPU instance without compute instances
	MIGEnable          MIGAction = "enable-mig"
	MIGDisable         MIGAction = "disable-mig" // only a GPU without instances
	MIGCreateInstance  MIGAction = "create-gpu-instance"
	MIGCreateCompute   MIGAction = "create-compute-instance"
)

// A MIGStep is one change of a GPU's MIG layout by one call into the driver. Action decides which
// fields are used.
type MIGStep struct {
	Action MIGAction
	// GI is the ID of the GPU instance to destroy, or of the parent of the compute instance to
	// create or destroy.
	GI int
	// CI is the ID of the compute instance to destroy.
	CI int
	// Profile is the MIGProfile.ID of the GPU instance to create.
	Profile int
	// Start and Size are the memory slices of the GPU instance to create, or the compute slices of
	// the compute instance to create.
	Start, Size int
}

// Mode returns the MIG mode set by the step; false if the step does not set the mode.
func (s MIGStep) Mode() (MIGMode, bool) {
	switch s.Action {
	case MIGEnable:
		return MIGEnabled, true
	case MIGDisable:
		return MIGDisabled, true
	default:
		return MIGUnsupported, false
	}
}
