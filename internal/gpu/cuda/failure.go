package cuda

import (
	"cmp"
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// FailureKind is the kind of a Failure.
type FailureKind string

// The kinds of Failures.
const (
	// NoLibrary: CUDA was not tried. libcuda is missing, cannot be loaded, or lacks a function.
	NoLibrary FailureKind = "no library"
	// NotStarted: CUDA was not tried. The process could not start, or an earlier process for the
	// GPU has not ended.
	NotStarted FailureKind = "not started"
	// Refused: a CUDA function returned an error.
	Refused FailureKind = "refused"
	// Wrong: the GPU computed a wrong result.
	Wrong FailureKind = "wrong"
	// The process did not end in time (Hangs), ended without a result (Crashed), or used too much
	// memory (TooLarge).
	Hangs    FailureKind = "hangs"
	Crashed  FailureKind = "crashed"
	TooLarge FailureKind = "too large"
)

// A Failure says why CUDA is not proven to work on a device.
type Failure struct {
	Kind FailureKind `json:"kind"`
	// Function is the last called CUDA function.
	Function string `json:"function,omitempty"`
	// Code is CUDA's error number, and Name the name, such as CUDA_ERROR_ECC_UNCORRECTABLE; 0 and
	// empty without an error.
	Code int    `json:"code,omitempty"`
	Name string `json:"name,omitempty"`
	// Text has details; it may be empty.
	Text string `json:"text,omitempty"`
}

// WasTried reports whether CUDA was tried. Without a try, nothing is known about the device.
func (f *Failure) WasTried() bool { return f.Kind != NoLibrary && f.Kind != NotStarted }

// IsTransient reports whether the cause may go away by itself: device nodes or a fabric that come up
// later, a GPU used by another process, or a busy node.
func (f *Failure) IsTransient() bool {
	if !f.WasTried() || f.Kind == Hangs {
		return true
	}
	switch f.Code {
	case outOfMemory, deviceUnavailable, noDevice, invalidDevice, operatingSystem, SystemNotReady, unknownError:
		return f.Kind == Refused
	}
	return false
}

// CUDA errors with a remedy other than a reset of the GPU, or with a transient cause.
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

// remedies are the remedies for some errors. All other errors need a reset of the GPU.
var remedies = map[int]string{
	outOfMemory: "something else holds the memory of the GPU: end it",
	deviceUnavailable: "another process has the GPU for itself, or its compute mode forbids computing: nvidia-smi " +
		"-q -d COMPUTE,PIDS shows both",
	noDevice:        inventory.LacksDeviceNodes,
	invalidDevice:   inventory.LacksDeviceNodes,
	operatingSystem: inventory.LacksDeviceNodes,
	SystemNotReady:  "start Fabric Manager, and read its log",
	DriverMismatch:  "finish the driver's upgrade: its library and its kernel module are of different versions",
	unknownError:    "load the kernel module nvidia_uvm (nvidia-modprobe -u -c 0), and read the kernel log",
}

// Error returns what happened and the remedy.
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
