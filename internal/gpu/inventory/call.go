package inventory

import (
	"cmp"
	"fmt"
	"time"
)

// NoGPU is the index of no GPU.
const NoGPU = -1

// A Call is a call into the driver that has not returned.
type Call struct {
	// Function is the NVML function; empty while the caller does something else, such as reading files
	// of the driver.
	Function string
	// GPU is the NVML index of the GPU that the call is about, or NoGPU.
	GPU int
	// Since is when the call began.
	Since time.Time
}

func (c Call) String() string {
	function := cmp.Or(c.Function, "reading the driver's files")
	if c.GPU == NoGPU {
		return function
	}
	return fmt.Sprintf("%s of GPU %d", function, c.GPU)
}

// A Stall is the error of a question to the driver that is not waited for any more, because a call
// does not return. If the call is about a GPU, it says something of that GPU alone. It is an
// ErrNoAnswer.
type Stall struct {
	Call Call
	// Over says that the call has returned since, and that the GPU is left alone for a while because
	// its calls hung again and again.
	Over bool
}

func (s *Stall) Error() string { return fmt.Sprintf("%v: %v does not return", ErrNoAnswer, s.Call) }

// Is reports whether target is ErrNoAnswer.
func (s *Stall) Is(target error) bool { return target == ErrNoAnswer }
