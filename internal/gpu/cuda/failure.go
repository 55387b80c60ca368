package cuda

import (
	"cmp"
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FailureKind says what a Failure is about.
type FailureKind string

// The kinds.
const (
	// NoLibrary says that nothing was tried: libcuda is not there, cannot be loaded, or lacks a
	// function.
	NoLibrary FailureKind = "no library"
	// NotStarted says that nothing was tried: the process could not be started, or an earlier one for
	// the GPU has not ended.
	NotStarted FailureKind = "not started"
	// Refused says that a function of CUDA returned an error.
	Refused FailureKind = "refused"
	// Wrong says that the GPU computed something else.
	Wrong FailureKind = "wrong"
	// Hangs, Crashed and TooLarge say that the process did not end in time, ended by itself without an
	// answer, or took too much memory.
	Hangs    FailureKind = "hangs"
	Crashed  FailureKind = "crashed"
	TooLarge FailureKind = "too large"
)

// A Failure is why CUDA is not proven to work on a device.
type Failure struct {
	Kind FailureKind `json:"kind"`
	// Function is the function of CUDA that was called last.
	Function string `json:"function,omitempty"`
	// Code is CUDA's error, and Name its name, such as CUDA_ERROR_ECC_UNCORRECTABLE; 0 and empty if
	// there is none.
	Code int    `json:"code,omitempty"`
	Name string `json:"name,omitempty"`
	// Text says more; it may be empty.
	Text string `json:"text,omitempty"`
}

// Tried reports whether CUDA was tried: otherwise nothing is known of the device.
func (f *Failure) Tried() bool { return f.Kind != NoLibrary && f.Kind != NotStarted }

// Passing reports whether the cause may go by itself, as that of a driver whose device nodes or
// whose fabric come up later, of a GPU that another process has, or of a node that is too busy.
func (f *Failure) Passing() bool {
	if !f.Tried() || f.Kind == Hangs {
		return true
	}
	switch f.Code {
	case outOfMemory, deviceUnavailable, noDevice, invalidDevice, operatingSystem, SystemNotReady, unknownError:
		return f.Kind == Refused
	}
	return false
}

// The errors of CUDA that are told apart.
const (
	outOfMemory       = 2
	deviceUnavailable = 46
	noDevice          = 100
	invalidDevice     = 101
	operatingSystem   = 304
	SystemNotReady    = 802
	DriverMismatch    = 803
	unknownError      = 999
)

// remedies say what to do about some errors. Others are those of a GPU that is to be reset.
var remedies = map[int]string{
	outOfMemory:       "something else holds the memory of the GPU: end it",
	deviceUnavailable: "another process has the GPU for itself, or its compute mode forbids computing: nvidia-smi -q -d COMPUTE,PIDS tells",
	noDevice:          inventory.LacksDeviceNodes,
	invalidDevice:     inventory.LacksDeviceNodes,
	operatingSystem:   inventory.LacksDeviceNodes,
	SystemNotReady:    "start Fabric Manager, and read its log",
	DriverMismatch:    "finish the driver's upgrade: its library and its kernel module are of different versions",
	unknownError:      "load the kernel module nvidia_uvm (nvidia-modprobe -u -c 0), and read the kernel log",
}

// Error returns what happened, with the remedy.
func (f *Failure) Error() string {
	switch f.Kind {
	case NoLibrary:
		return fmt.Sprintf("CUDA cannot be tried: %s: mount the driver's libraries, with the driver capability compute",
			f.Text)
	case NotStarted:
		return "CUDA cannot be tried: " + f.Text
	case Wrong:
		return "the GPU computes wrongly: " + f.Text
	case Hangs:
		return fmt.Sprintf("CUDA hangs: %s does not return within %v", cmp.Or(f.Function, "the process"), Limit)
	case Crashed:
		return fmt.Sprintf("CUDA crashes in %s: %s", cmp.Or(f.Function, "its process"), f.Text)
	case TooLarge:
		return fmt.Sprintf("CUDA takes more than %d MB of memory in %s", MaxMemory/1_000_000,
			cmp.Or(f.Function, "its process"))
	case Refused:
	}
	text := "CUDA does not work: " + f.Function + ": "
	switch {
	case f.Name != "":
		text += f.Name + " (" + fmt.Sprint(f.Code) + ")"
	case f.Code != 0:
		text += fmt.Sprintf("CUDA error %d", f.Code)
	default:
		return text + f.Text
	}
	if f.Text != "" {
		text += ", " + f.Text
	}
	if remedy := remedies[f.Code]; remedy != "" {
		text += ": " + remedy
	}
	return text
}
