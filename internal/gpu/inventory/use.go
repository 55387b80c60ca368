package inventory

import "fmt"

// A Process is a process that computes on a GPU.
type Process struct {
	// PID is the process ID in the PID namespace of the daemon.
	PID int
	// MemoryBytes is the GPU memory used by the process; unknown if the driver does not say.
	MemoryBytes Signal[uint64]
	// GI is the ID of the GPU instance used by the process; unknown for a whole GPU.
	GI Signal[int]
}

// A DriverClient is a process that has a GPU open. It may not compute.
type DriverClient struct {
	// PID is the process ID in the PID namespace of the daemon.
	PID int
	// Name is the name of the program as the kernel shows it; empty if unknown.
	Name string
	// Pod is the UID of its pod; empty for a process of the host.
	Pod string
}

// A Remnant is a change left on a GPU by finished work. The daemon can undo it.
type Remnant int

// The remnants.
const (
	RemnantClocks Remnant = iota + 1 // application clocks other than the default
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
