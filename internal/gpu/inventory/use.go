package inventory

import "fmt"

// A Process is one that computes on a GPU.
type Process struct {
	// PID is its number in the PID namespace of the daemon.
	PID int
	// MemoryBytes is how much of the GPU's memory it holds; unknown where the driver does not tell.
	MemoryBytes Signal[uint64]
	// GI is the ID of the GPU instance on which it computes; unknown where that is the whole GPU.
	GI Signal[int]
}

// A DriverClient is a process that has a GPU open. It may compute nothing.
type DriverClient struct {
	// PID is its number in the PID namespace of the daemon.
	PID int
	// Name is that of its program, as the kernel shows it; empty if it is not known.
	Name string
	// Pod is the UID of its pod; empty for a process of the host.
	Pod string
}

// A Remnant is something that work leaves behind on a GPU after its end, and that can be taken
// back.
type Remnant int

// The remnants.
const (
	RemnantClocks Remnant = iota + 1 // application clocks that are not the default
	RemnantECC                       // the counts of memory errors since the driver was loaded or the GPU reset
)

func (r Remnant) String() string {
	switch r {
	case RemnantClocks:
		return "clocks"
	case RemnantECC:
		return "ecc"
	}
	return fmt.Sprintf("Remnant(%d)", int(r))
}
