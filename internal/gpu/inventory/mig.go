package inventory

// Partitions is how multi-instance mode divides a GPU, and how it can.
type Partitions struct {
	// PCIDevice and PCISubsystem are a device ID and a vendor ID, as NVML gives them together:
	// 0x233010de.
	PCIDevice, PCISubsystem uint32
	// Mode is the mode that is in force. Pending is the mode after the next reset of the GPU.
	Mode, Pending MIGMode
	// Resetless says that the driver changes the mode without a reset of the GPU.
	Resetless bool
	// Profiles are the profiles of GPU instances that the driver has for this GPU; none where it does
	// not tell, or not all of each.
	Profiles []MIGProfile
	// Instances are the GPU instances by ascending Start, those without a compute instance too.
	Instances []GPUInstance
	// Unread says why Instances could not be read; empty if they were.
	Unread string
}

// A MIGProfile is a size of GPU instance, and where instances of it can be.
type MIGProfile struct {
	// Name is such as "1g.10gb" or "1g.10gb+me".
	Name string
	// ID is the driver's number of the profile on this GPU, as nvidia-smi mig -lgip prints it.
	ID int
	// Count is how many instances the GPU has room for at most.
	Count int
	// Size is how many memory slices an instance has, and Starts at which slices it can begin,
	// ascending.
	Size   int
	Starts []int
	// MemoryBytes is the memory of an instance, and Attributes is what else a MIG device has that
	// fills it; zero where not known.
	MemoryBytes uint64
	Attributes  MIGAttributes
}

// A GPUInstance is a part of a GPU with its own memory. Only its compute instances can be used.
type GPUInstance struct {
	// ID is the driver's number of the instance on its GPU.
	ID int
	// Profile is the name of its MIGProfile.
	Profile string
	// Start is its first memory slice, and Size how many it has.
	Start, Size int
	// Computes are its compute instances by ascending Start.
	Computes []ComputeInstance
}

// A ComputeInstance is a part of a GPU instance's compute slices: a MIG device.
type ComputeInstance struct {
	// ID is the driver's number of the instance in its GPU instance.
	ID int
	// Start is its first compute slice in the GPU instance, and Slices how many it has.
	Start, Slices int
}

// A MIGAction is the kind of a MIGStep.
type MIGAction string

// The actions.
const (
	MIGDestroyCompute  MIGAction = "destroy-compute-instance"
	MIGDestroyInstance MIGAction = "destroy-gpu-instance" // which has no compute instance
	MIGEnable          MIGAction = "enable-mig"
	MIGDisable         MIGAction = "disable-mig" // on a GPU without instances
	MIGCreateInstance  MIGAction = "create-gpu-instance"
	MIGCreateCompute   MIGAction = "create-compute-instance"
)

// A MIGStep is one change of how a GPU is divided, by one call of the driver's. Which fields it has
// depends on Action.
type MIGStep struct {
	Action MIGAction
	// GI is the ID of the GPU instance that is destroyed, or whose compute instance is created or
	// destroyed.
	GI int
	// CI is the ID of the compute instance that is destroyed.
	CI int
	// Profile is the MIGProfile.ID of a GPU instance that is created.
	Profile int
	// Start and Size are the memory slices of a GPU instance that is created, or the compute slices of
	// a compute instance.
	Start, Size int
}

// Mode returns the MIG mode that the step sets, and false if it sets none.
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
