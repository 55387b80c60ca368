package inventory

import (
	"cmp"
	"fmt"
	"time"
)

// NoGPU is the index of a Call about no GPU.
const NoGPU = -1

// A Call is a call into the driver that has not returned.
type Call struct {
	// Function is the NVML function. It is empty while the caller does something else, such as
	// reading files of the driver.
	Function string
	// GPU is the NVML index of the GPU, or NoGPU.
	GPU int
	// Since is the start of the call.
	Since time.Time
}

func (c Call) String() string {
	function := cmp.Or(c.Function, "reading the driver's files")
	if c.GPU == NoGPU {
		return function
	}
	return fmt.Sprintf("%s of GPU %d", function, c.GPU)
}

// A Stall is the error of an abandoned request to the driver, because a call does not return. A
// Stall of a call about a GPU says nothing about the other GPUs. It matches ErrNoAnswer.
type Stall struct {
	Call Call
	// Over is true if the call has returned meanwhile, and the GPU is paused because its calls hung
	// repeatedly.
	Over bool
}

func (s *Stall) Error() string { return fmt.Sprintf("%v: %v does not return", ErrNoAnswer, s.Call) }

// Is reports whether target is ErrNoAnswer.
func (s *Stall) Is(target error) bool { return target == ErrNoAnswer }
