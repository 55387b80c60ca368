package inventory

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Snapshot is the state of the node's GPUs at one generation.
type Snapshot struct {
	// Generation rises by one with every Snapshot that differs from the one before; 0 is the Snapshot
	// of a node that was never looked at.
	Generation uint64
	// Driver has the versions of the driver; zero while NVML has not answered.
	Driver Driver
	// GPUs are the GPUs of the node by ascending Index. A GPU that was seen once and can no longer be
	// reached stays here with State Lost until its owner drops it.
	GPUs []GPU
	// Control are the driver's device nodes that the node has.
	Control ControlNodes
	// Majors are the numbers of the driver's device nodes.
	Majors Majors
	// LeftOut are the GPUs that the driver counts but that could not be identified, by ascending
	// Index.
	LeftOut []LeftOut
	// Stale says why the last look at the node failed; empty when it succeeded. A stale Snapshot keeps
	// the GPUs of the last look that succeeded: a failed look is not an empty node.
	Stale string
	// LinksDue says that some GPUs are still to be asked for their Links, and will be soon.
	LinksDue bool
}

// Driver identifies the driver that a Snapshot was read from.
type Driver struct {
	// Version is the driver's version, such as "580.95.05".
	Version string
	// CUDA is the newest CUDA version the driver supports, such as "13.0"; empty if the driver does
	// not say.
	CUDA string
	// OnDisk is the version of the driver's files on disk where that is another one, as after an
	// upgrade before the node is restarted. What starts now loads these files and cannot use the
	// kernel module.
	OnDisk string
}

// Mismatch says that the driver's files on disk do not fit the kernel module that is loaded, and
// what to do; empty if they fit.
func (d Driver) Mismatch() string {
	if d.OnDisk == "" {
		return ""
	}
	return fmt.Sprintf("driver %s on disk, %s loaded: restart the node", d.OnDisk, d.Version)
}

// Branch returns the driver's branch, the number before the first dot of its version (580 for
// "580.95.05"), or 0 for a version that does not begin with a number.
func (d Driver) Branch() int {
	branch := 0
	for _, c := range d.Version {
		if c < '0' || c > '9' {
			break
		}
		branch = branch*10 + int(c-'0')
	}
	return branch
}

// Before reports whether the driver's version is known and older than another one, such as
// "575.51.02".
func (d Driver) Before(version string) bool {
	numbers := strings.Split(d.Version, ".")
	for i, other := range strings.Split(version, ".") {
		if i == len(numbers) {
			return true
		}
		own, err := strconv.Atoi(numbers[i])
		if n, _ := strconv.Atoi(other); err != nil || own != n {
			return err == nil && own < n
		}
	}
	return false
}

// LeftOut is a GPU that the driver counts but that could not be identified, and why.
type LeftOut struct {
	// Index is the NVML index at which the GPU was expected.
	Index int
	// Reason is a sentence without a full stop, for logs and status.
	Reason string
	// Retry says that the GPU may be there again, and that only a new session may find it.
	Retry bool
}

// GPU returns the GPU with the given UUID.
func (s Snapshot) GPU(uuid string) (GPU, bool) {
	i := slices.IndexFunc(s.GPUs, func(g GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return GPU{}, false
	}
	return s.GPUs[i], true
}

// GPUAt returns the GPU with the given index.
func (s Snapshot) GPUAt(index int) (GPU, bool) {
	i := slices.IndexFunc(s.GPUs, func(g GPU) bool { return g.Index == index })
	if i < 0 {
		return GPU{}, false
	}
	return s.GPUs[i], true
}

// Equal reports whether two Snapshots say the same of the node, whatever their generations.
func (s Snapshot) Equal(other Snapshot) bool {
	return s.Driver == other.Driver &&
		s.Control == other.Control &&
		s.Majors == other.Majors &&
		s.Stale == other.Stale &&
		s.LinksDue == other.LinksDue &&
		slices.Equal(s.LeftOut, other.LeftOut) &&
		slices.EqualFunc(s.GPUs, other.GPUs, GPU.Equal)
}

// UVMPatience is how long it is waited for nvidia-uvm. It was seen to come 13 s after the nodes of
// GPUs; a container that was made before cannot use CUDA for as long as it lives.
const UVMPatience = time.Minute

// LacksUVM reports whether the node has nvidiactl and no nvidia-uvm. Where a node is made by its
// number, it is enough that the kernel has that.
func (s Snapshot) LacksUVM(byNumber bool) bool {
	return s.Control.Has(NodeControl) && !s.Control.Has(NodeUVM) && (!byNumber || s.Majors.UVM == 0)
}
